"""Pods with GPUs: they fit every product that the image has code for, get whole GPUs, and a runtime that brings the driver."""

from __future__ import annotations

from collections.abc import Iterator

from tests.k8s.manifests import Document, Pods, pods_of, resource

GPU, PRODUCT = "nvidia.com/gpu", "nvidia.com/gpu.product"
RUNTIME_CLASS = "nvidia"  # as NVIDIA's GPU Operator names it
# As feature discovery labels nodes: the product's name in the driver, with dashes.
PRODUCTS = {
    "A100": {"NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-PCIE-40GB"},
    "H100": {"NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"},
    "H200": {"NVIDIA-H200", "NVIDIA-H200-NVL"},
}


def check(documents: list[Document]) -> list[str]:
    """Runtime class, toleration and affinity of each pod that is given a GPU."""
    pods = [one for one in pods_of(documents) if any(resource(container, GPU) for container in one.containers)]
    return [f"{one.where}: {fault}" for one in pods for fault in _of_pods(one)]


def _of_pods(pods: Pods) -> Iterator[str]:
    if pods.spec.get("runtimeClassName") != RUNTIME_CLASS:
        yield f"runtimeClassName is {pods.spec.get('runtimeClassName')}, not {RUNTIME_CLASS}: the pod may get no driver"
    if not any(one.get("key") == GPU and one.get("operator") == "Exists" for one in pods.spec.get("tolerations", ())):
        yield f"it does not tolerate the taint {GPU} of nodes with GPUs"
    required = pods.spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    expressions = [one for term in required.get("nodeSelectorTerms", ()) for one in term.get("matchExpressions", ())]
    named = {value for one in expressions if one["key"] == PRODUCT and one["operator"] == "In" for value in one["values"]}
    for family, products in PRODUCTS.items():
        if not products <= named:
            yield f"{PRODUCT} does not name {', '.join(sorted(products - named))}: on nodes with {family} the pod stays Pending"
    for value in sorted(named - set().union(*PRODUCTS.values())):
        yield f"{PRODUCT} names {value}, which is no whole A100, H100 or H200"
