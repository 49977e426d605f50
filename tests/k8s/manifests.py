"""The manifests as the checks see them: documents, the pods that come of them, and what these contain."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[2]
K8S = REPOSITORY / "k8s"
NAMESPACE = "outrider"
OVERLAYS = sorted(path.stem for path in (K8S / "rendered").glob("*.yaml"))

# What k8s/secrets.sh makes: the keys of each secret.
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

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # where libyaml is, it takes a tenth of the time
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE])|[eE]([+-]?\d+))?")
_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate(["n", "u", "m"], start=-3)}
_UNITS |= {unit: Decimal(1000) ** power for power, unit in enumerate(["k", "M", "G", "T", "P", "E"], start=1)}
_UNITS |= {unit: Decimal(1024) ** power for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], start=1)}


@dataclass(frozen=True)
class Pods:
    """The pods of one workload: those of a StatefulSet, the head of a Ray cluster, or one of its worker groups."""

    where: str  # how a fault names them
    labels: Mapping[str, str]
    spec: Document
    count: int
    group: Document | None = None  # of Ray: headGroupSpec, or one of workerGroupSpecs
    claims: tuple[str, ...] = field(default=())  # names of the volumes that it gets a claim of its own for

    @property
    def is_head(self) -> bool:
        """Whether it is the head of a Ray cluster."""
        return self.group is not None and "groupName" not in self.group

    @property
    def containers(self) -> list[Document]:
        """All of them, those that come first included."""
        return [*self.spec.get("initContainers", ()), *self.spec.get("containers", ())]

    @property
    def ray(self) -> Document:
        """The container in which KubeRay starts Ray: the first."""
        return next(iter(self.spec.get("containers", ())), {})


def overlay(name: str) -> list[Document]:
    """A rendered overlay with the monitoring beside it, and the jobs where there is a DGX; each call gives copies of its own."""
    return deepcopy([*_rendered(name), *monitoring(), *(_jobs() if name.startswith("dgx") else ())])


@cache
def _jobs() -> tuple[Document, ...]:
    return tuple(document for path in sorted((K8S / "jobs").glob("*.yaml")) for document in load_all(path.read_text()))


@cache
def _rendered(name: str) -> tuple[Document, ...]:
    return tuple(load_all((K8S / "rendered" / f"{name}.yaml").read_text()))


@cache
def monitoring() -> tuple[Document, ...]:
    """``k8s/monitoring`` as kustomize makes it, made here, so that it is checked where there is no kustomize."""
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
    return tuple(documents)


def load_all(text: str) -> list[Any]:
    """The documents of a text in yaml."""
    return list(yaml.load_all(text, Loader=_LOADER))


def kustomize() -> str | None:
    """The path of kustomize: the environment's ``KUSTOMIZE``, or as the shell finds it."""
    return shutil.which(os.environ.get("KUSTOMIZE", "kustomize"))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    """The documents of some kinds."""
    return [document for document in documents if document.get("kind") in kinds]


def named(documents: list[Document], kind: str, name: str) -> Document | None:
    """The one document of a kind with a name."""
    return next((document for document in of_kind(documents, kind) if document["metadata"]["name"] == name), None)


def title(document: Document) -> str:
    """How a fault names a document: ``Service outrider-redis``."""
    return f"{document.get('kind')} {document.get('metadata', {}).get('name')}"


def walk(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Everything in a document, with where it is."""
    yield path, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from walk(inner, (*path, key))


def pods_of(documents: list[Document]) -> list[Pods]:
    """The pods that come of the documents."""
    found = []
    for document in of_kind(documents, "Deployment", "StatefulSet", "Job"):
        spec = document["spec"]
        claims = tuple(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
        count, template = spec.get("replicas", 1), spec["template"]
        found.append(Pods(title(document), template["metadata"].get("labels", {}), template["spec"], count, None, claims))
    for document in of_kind(documents, "RayService"):
        cluster = document["spec"]["rayClusterConfig"]
        found.append(_of_group(f"{title(document)}, head", cluster["headGroupSpec"], "head", 1))
        for group in cluster.get("workerGroupSpecs", ()):
            count = group.get("replicas", group.get("minReplicas", 0))
            found.append(_of_group(f"{title(document)}, group {group['groupName']}", group, "worker", count))
    return found


def _of_group(where: str, group: Document, node: str, count: int) -> Pods:
    template = group["template"]
    by_operator = {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node,
        "ray.io/group": group.get("groupName", "headgroup"),
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    return Pods(where, by_operator | template.get("metadata", {}).get("labels", {}), template["spec"], count, group)


def ray_pods(documents: list[Document]) -> list[Pods]:
    """Those that KubeRay starts a node of Ray in."""
    return [pods for pods in pods_of(documents) if pods.group is not None]


def environment(documents: list[Document], container: Document) -> dict[str, str | None]:
    """The environment that a container is given; None for a value that is in a secret."""
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", ()):
        prefix, config, secret = source.get("prefix", ""), source.get("configMapRef"), source.get("secretRef")
        values: Mapping[str, str | None] = {}
        if config is not None:
            values = (named(documents, "ConfigMap", config["name"]) or {}).get("data", {})
        elif secret is not None:
            values = dict.fromkeys(SECRETS.get(secret["name"], ()))
        found |= {prefix + name: value for name, value in values.items()}
    return found | {entry["name"]: entry.get("value") for entry in container.get("env", ())}


def quantity(value: object) -> Decimal | None:
    """A number as Kubernetes writes it (``250m``, ``1Gi``, ``2e3``); None if it is none."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    if match is None:
        return None
    number, unit, exponent = match.groups()
    return Decimal(number) * (_UNITS[unit] if unit else Decimal(10) ** int(exponent or 0))


def resource(container: Document, name: str) -> Decimal:
    """How much of a resource a container has: its limit, else what it requests."""
    resources = container.get("resources", {})
    text = resources.get("limits", {}).get(name, resources.get("requests", {}).get(name, 0))
    return quantity(text) or Decimal(0)


def ports_of(pods: Pods) -> dict[str, int]:
    """The ports that its containers declare, by name."""
    ports = (port for container in pods.containers for port in container.get("ports", ()))
    return {port.get("name", str(port["containerPort"])): port["containerPort"] for port in ports}


def selects(selector: Document | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector (``matchLabels``, ``matchExpressions``) selects what has these labels; an empty one selects all."""
    if selector is None:
        return False
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return exact and all(_holds(expression, labels) for expression in selector.get("matchExpressions", ()))


def _holds(expression: Document, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", ())
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[expression["operator"]]


def behind(documents: list[Document], address: str) -> list[tuple[Pods, int]]:
    """The pods and their port behind ``[SCHEME://]HOST:PORT`` of a Service of ours; none when there is no such one."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    name, *rest = host.split(".")
    service = named(documents, "Service", name)
    if service is None or rest[:1] not in ([], [NAMESPACE]):
        return []
    found = []
    for declared in service["spec"]["ports"]:
        if str(declared["port"]) == port:
            target = declared.get("targetPort", declared["port"])
            for pods in pods_of(documents):
                if selects({"matchLabels": service["spec"].get("selector", {})}, pods.labels):
                    number = ports_of(pods).get(target) if isinstance(target, str) else target
                    found += [] if number is None else [(pods, number)]
    return found


def serve_document(documents: list[Document]) -> Document:
    """What ``serveConfigV2`` says; empty when it is not yaml, which ``serve`` finds."""
    texts = [service["spec"].get("serveConfigV2", "") for service in of_kind(documents, "RayService")]
    return _parsed(texts[0]) if texts else {}


@cache
def _parsed(text: str) -> Document:
    try:
        (found,) = load_all(text) or [{}]
    except (yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def serve_arguments(documents: list[Document]) -> Document:
    """The arguments of the application in it: sections of a configuration."""
    applications = serve_document(documents).get("applications") or [{}]
    return applications[0].get("args") or {}
