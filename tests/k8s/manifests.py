"""The Kubernetes manifests as the checks see them: documents, the pods that they make, and what these contain."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

Document = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[2]
K8S = REPOSITORY / "k8s"
NAMESPACE = "outrider"
OVERLAYS = sorted(path.stem for path in (K8S / "rendered").glob("*.yaml"))
GPU = "nvidia.com/gpu"

# The keys of each secret of k8s/secrets.sh.
SECRETS: dict[str, set[str]] = {
    "outrider-cache": {"OUTRIDER_CACHE_SECRET", "OUTRIDER_REDIS_PASSWORD"},
    "outrider-gcs-redis": {"password"},
    "outrider-gcs-redis-tls": {"ca.crt", "tls.crt", "tls.key"},
    "outrider-keys": {"keys.yaml"},
    "outrider-ray-tls": {"ca.crt", "ca.key"},
    "outrider-ray-token": {"auth_token"},
    "outrider-redis-acl": {"users.acl"},
    "outrider-redis-tls": {"ca.crt", "tls.crt", "tls.key"},
}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a tenth of the time
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?\d+))?")
_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate("num kMGTPE", start=-3)}
_BINARY_UNITS = {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}


@dataclass(frozen=True)
class Pods:
    """The pods of one workload: of a StatefulSet or Job, the head of a Ray cluster, or one of its worker groups."""

    where: str  # for faults
    labels: Mapping[str, str]
    spec: Document
    count: int
    group: Document | None = None  # of Ray: headGroupSpec, or one of workerGroupSpecs
    claims: tuple[str, ...] = field(default=())  # names of volumeClaimTemplates

    @property
    def is_head(self) -> bool:
        return self.group is not None and "groupName" not in self.group

    @property
    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ray(self) -> Document:
        """Return the container in which KubeRay starts Ray: the first."""
        first: Document = self.spec["containers"][0]
        return first

    @property
    def volumes(self) -> dict[str, Document]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", ())} | {name: {} for name in self.claims}

    @property
    def ports(self) -> dict[str, int]:
        ports = (port for container in self.containers for port in container.get("ports", ()))
        return {port.get("name", str(port["containerPort"])): port["containerPort"] for port in ports}


def overlay(name: str) -> list[Document]:
    """Return a copy of a rendered overlay with the monitoring and, for a DGX, the jobs."""
    return deepcopy([*_rendered(name), *monitoring(), *(_jobs() if name.startswith("dgx") else ())])


@cache
def _jobs() -> list[Document]:
    return [document for path in sorted((K8S / "jobs").glob("*.yaml")) for document in load_all(path.read_text())]


@cache
def _rendered(name: str) -> list[Document]:
    return load_all((K8S / "rendered" / f"{name}.yaml").read_text())


@cache
def monitoring() -> list[Document]:
    """Return ``k8s/monitoring`` as kustomize builds it; a test compares it where kustomize is installed."""
    folder = K8S / "monitoring"
    (kustomization,) = load_all((folder / "kustomization.yaml").read_text())
    documents = [document for name in kustomization["resources"] for document in load_all((folder / name).read_text())]
    for generated in kustomization["configMapGenerator"]:
        files = dict(entry.split("=") for entry in generated["files"])
        metadata = {"name": generated["name"], "labels": generated["options"]["labels"]}
        data = {name: (folder / file).read_text() for name, file in files.items()}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for document in documents:
        document["metadata"]["namespace"] = kustomization["namespace"]
    return documents


def load_all(text: str) -> list[Any]:
    return list(yaml.load_all(text, Loader=_LOADER))


def kustomize() -> str | None:
    """Return the path of kustomize: the environment's ``KUSTOMIZE``, or the one on the PATH."""
    return shutil.which(os.environ.get("KUSTOMIZE", "kustomize"))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document.get("kind") in kinds]


def named(documents: list[Document], kind: str, name: str) -> Document | None:
    return next((document for document in of_kind(documents, kind) if document["metadata"]["name"] == name), None)


def title(document: Document) -> str:
    """Return the name of a document in faults: ``Service outrider-redis``."""
    return f"{document.get('kind')} {document['metadata']['name']}"


def walk(value: object) -> Iterator[tuple[str, Any]]:
    """Yield every entry of every mapping in a document."""
    children = value if isinstance(value, list) else []
    if isinstance(value, dict):
        yield from value.items()
        children = list(value.values())
    for child in children:
        yield from walk(child)


def pods_of(documents: list[Document]) -> list[Pods]:
    found = []
    for document in of_kind(documents, "Deployment", "StatefulSet", "Job"):
        spec = document["spec"]
        claims = tuple(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
        template = spec["template"]
        labels = template["metadata"].get("labels", {})
        found.append(Pods(title(document), labels, template["spec"], spec.get("replicas", 1), None, claims))
    for document in of_kind(documents, "RayService"):
        cluster = document["spec"]["rayClusterConfig"]
        found.append(_of_group(f"{title(document)}, head", cluster["headGroupSpec"], "head", 1))
        for group in cluster["workerGroupSpecs"]:
            found.append(_of_group(f"{title(document)}, group {group['groupName']}", group, "worker", group["replicas"]))
    return found


def _of_group(where: str, group: Document, node: str, count: int) -> Pods:
    by_operator = {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node,
        "ray.io/group": group.get("groupName", "headgroup"),
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    template = group["template"]
    return Pods(where, by_operator | template.get("metadata", {}).get("labels", {}), template["spec"], count, group)


def ray_pods(documents: list[Document]) -> list[Pods]:
    return [pods for pods in pods_of(documents) if pods.group is not None]


def environment(documents: list[Document], container: Document) -> dict[str, str | None]:
    """Return the environment of a container; None for a value of a secret."""
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= (named(documents, "ConfigMap", source["configMapRef"]["name"]) or {}).get("data", {})
        else:
            found |= dict.fromkeys(SECRETS.get(source["secretRef"]["name"], ()))
    return found | {entry["name"]: entry.get("value") for entry in container.get("env", ())}


def mount_of(container: Document, path: str) -> Document | None:
    """Return the mount that a path is under; of several the innermost."""
    mounts = [mount for mount in container.get("volumeMounts", ()) if PurePosixPath(path).is_relative_to(mount["mountPath"])]
    return max(mounts, key=lambda mount: len(mount["mountPath"]), default=None)


def files_of(documents: list[Document], volume: Document) -> set[str]:
    """Return the names of the files in a volume of a secret or a config map."""
    source = volume.get("secret", volume.get("configMap", {}))
    if "items" in source:
        return {item["path"] for item in source["items"]}
    if "secretName" in source:
        return SECRETS.get(source["secretName"], set())
    return set((named(documents, "ConfigMap", source.get("name", "")) or {}).get("data", ()))


def quantity(value: object) -> Decimal:
    """Return a number as Kubernetes writes it: ``250m``, ``1Gi``, ``2e3``."""
    match = _QUANTITY.fullmatch(str(value))
    assert match is not None, value
    number, binary, unit, exponent = match.groups()
    return Decimal(number) * (_BINARY_UNITS[binary] if binary else _UNITS[unit or " "] * Decimal(10) ** int(exponent or 0))


def resource(container: Document, name: str) -> Decimal:
    """Return the limit of a container's resource, else its request."""
    resources = container.get("resources", {})
    return quantity(resources.get("limits", {}).get(name, resources.get("requests", {}).get(name, 0)))


def selects(selector: Document | None, labels: Mapping[str, str]) -> bool:
    """Return whether a selector selects what has these labels; an empty one selects all, None nothing."""
    if selector is None:
        return False
    if not all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))


def behind(documents: list[Document], address: str) -> list[tuple[Pods, int]]:
    """Return the pods, with their port, behind ``[SCHEME://]HOST:PORT`` of a Service; none without such a Service."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    service = named(documents, "Service", host)
    found = []
    for declared in service["spec"]["ports"] if service is not None else ():
        target = declared.get("targetPort", declared["port"])
        for pods in pods_of(documents):
            if str(declared["port"]) == port and selects({"matchLabels": service["spec"]["selector"]}, pods.labels):
                number = pods.ports.get(target) if isinstance(target, str) else target
                found += [] if number is None else [(pods, number)]
    return found
