"""What an API server refuses or misunderstands, and no schema says: quantities, words of a fixed set, names, namespaces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from tests.k8s.manifests import NAMESPACE, Document, Pods, named, pods_of, quantity, title, walk

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_CLUSTER_WIDE = {"Namespace", "PersistentVolume", "StorageClass", "PriorityClass", "ClusterRole", "ClusterRoleBinding"}
_NATIVE = {"cpu", "memory", "ephemeral-storage"}

_WORDS: dict[str, set[str]] = {  # by the last part of the path, or the last two
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "dnsPolicy": {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "tolerations.operator": {"Exists", "Equal"},
    "matchExpressions.operator": {"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"},
    "policyTypes": {"Ingress", "Egress"},
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "persistentVolumeReclaimPolicy": {"Retain", "Delete", "Recycle"},
    "emptyDir.medium": {"", "Memory"},
    "seccompProfile.type": {"RuntimeDefault", "Localhost", "Unconfined"},
    "hostPath.type": {"", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice"},
    "podManagementPolicy": {"OrderedReady", "Parallel"},
    "unhealthyPodEvictionPolicy": {"IfHealthyBudget", "AlwaysAllow"},
    "terminationMessagePolicy": {"File", "FallbackToLogsOnError"},
    "sessionAffinity": {"None", "ClientIP"},
    "serviceType": {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"},
}
_FREE = {"data", "labels", "annotations", "matchLabels", "rayStartParams", "groups"}  # whose keys are anybody's
_QUANTITIES = {"requests", "limits", "capacity"}


def check(documents: list[Document]) -> list[str]:
    """Quantities, words, names, labels and namespaces."""
    found = [f"{title(document)}: {fault}" for document in documents for fault in _of_document(document)]
    found += [f"{pods.where}: {fault}" for pods in pods_of(documents) for fault in _of_pods(pods)]
    if named(documents, "Namespace", NAMESPACE) is None:
        found.append(f"no Namespace {NAMESPACE}")
    names = Counter(f"{title(document)} is there twice" for document in documents)
    return found + [fault for fault, times in names.items() if times > 1]


def _of_document(document: Document) -> Iterator[str]:
    meta = document.get("metadata", {})
    if not _LABEL.fullmatch(meta.get("name", "")):
        yield f"metadata.name is {meta.get('name')!r}; allowed: 1 to 63 of a-z 0-9 -, no - at an end"
    expected = None if document.get("kind") in _CLUSTER_WIDE else NAMESPACE
    if meta.get("namespace") != expected:
        yield f"metadata.namespace is {meta.get('namespace')}, not {expected}"
    for path, value in walk(document):
        names = [str(part) for part in path if not isinstance(part, int)]
        if _FREE & set(names[:-1]):
            continue
        where = ".".join(map(str, path))
        if names[-1:] in (["labels"], ["matchLabels"]) and isinstance(value, dict):
            yield from _labels(where, value)
        words = _WORDS.get(".".join(names[-2:])) or _WORDS.get(names[-1] if names else "")
        if words and isinstance(value, str) and value not in words:
            yield f"{where} is {value!r}; allowed: {', '.join(sorted(words))}"
        if (len(names) > 1 and names[-2] in _QUANTITIES) or names[-1:] == ["sizeLimit"]:
            amount = quantity(value)
            if amount is None or amount < 0:
                yield f"{where} is {value!r}, which is no quantity, such as 250m or 4Gi"


def _labels(where: str, labels: Document) -> Iterator[str]:
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            yield f"{where}: {key}: {value!r} is no label"


def _of_pods(pods: Pods) -> Iterator[str]:
    yield from _labels("labels", dict(pods.labels))
    for kind, entries in (("container", pods.containers), ("volume", pods.spec.get("volumes", []))):
        names = [entry.get("name", "") for entry in entries]
        yield from (f"{kind} {name!r}: the name is not of 1 to 63 of a-z 0-9 -" for name in names if not _LABEL.fullmatch(name))
        yield from (f"{kind} {name} is there twice" for name, times in Counter(names).items() if times > 1)
    for container in pods.containers:
        yield from (f"container {container.get('name')}: {fault}" for fault in _of_container(container))


def _of_container(container: Document) -> Iterator[str]:
    ports = [port.get("name", "") for port in container.get("ports", ())]
    yield from (f"port {name!r} is not of 1 to 15 of a-z 0-9 -" for name in ports if not _PORT_NAME.fullmatch(name))
    yield from (f"port {name} is there twice" for name, times in Counter(ports).items() if times > 1)
    paths = Counter(mount.get("mountPath") for mount in container.get("volumeMounts", ()))
    yield from (f"two volumes are mounted at {path}" for path, times in paths.items() if times > 1)
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in requests.keys() | limits.keys():
        request, limit = quantity(requests.get(name)), quantity(limits.get(name))
        if name not in _NATIVE and "/" not in name:
            yield f"{name} is no resource: cpu, memory, ephemeral-storage, or DOMAIN/NAME of a device"
        if request is not None and limit is not None and request > limit:
            yield f"requests {name} {requests[name]}, above its limit of {limits[name]}"
        if "/" in name and (limit is None or limit != int(limit) or (request is not None and request != limit)):
            yield f"{name}: devices are whole, and requested as limited"
