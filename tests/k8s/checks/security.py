"""What the namespace's pod security standard (restricted) asks for and more: least rights, read-only roots, bounded resources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cache_service.store.redis_binary import FLOORS, version_fault
from tests.k8s.manifests import NAMESPACE, Document, Pods, environment, named, pods_of, quantity, resource

_IMAGE = re.compile(r"(?P<name>[^@\s]+?)(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?")
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_MODE = "pod-security.kubernetes.io/enforce"
_RESOURCES = (("requests", "cpu"), ("requests", "memory"), ("limits", "memory"))


def check(documents: list[Document]) -> list[str]:
    """Images, rights, resources, and places to write to."""
    found = []
    namespace = named(documents, "Namespace", NAMESPACE) or {"metadata": {}}
    if namespace["metadata"].get("labels", {}).get(_MODE) != "restricted":
        found.append(f"Namespace {NAMESPACE}: label {_MODE} is not restricted")
    for pods in pods_of(documents):
        found += [f"{pods.where}: {fault}" for fault in _of_pods(pods)]
        for container in pods.containers:
            faults = [*_image(container), *_rights(container, pods), *_bounds(container)]
            if container is pods.ray and pods.group is not None:
                faults += _ray_folders(container, pods, environment(documents, container).get("HOME"))
            elif _is_read_only(container) and pods.claims and not _writable(container, pods):
                faults.append("its root is read-only, and no volume is there to write to")
            found += [f"{pods.where}, container {container.get('name')}: {fault}" for fault in faults]
    return found


def _of_pods(pods: Pods) -> Iterator[str]:
    spec = pods.spec
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken is not false: no container needs Kubernetes' API"
    yield from (f"{name} is true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes", ()):
        kinds = volume.keys() - {"name"}
        if not kinds <= _VOLUMES:
            yield f"volume {volume['name']}: {', '.join(kinds)} is not allowed in pods of a restricted namespace"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']}: emptyDir without sizeLimit could fill the node"


def _image(container: Document) -> Iterator[str]:
    image = container.get("image", "")
    match = _IMAGE.fullmatch(image)
    if match is None or not (match["tag"] or match["digest"]):
        yield f"image {image!r} has neither tag nor digest"
    elif match["tag"] == "latest":
        yield f"image {image!r}: latest is another one tomorrow"
    elif (kind := match["name"].rpartition("/")[2]) in FLOORS:
        fault = version_fault(kind, match["tag"] or "")
        yield from () if fault is None else (f"image {image!r} {fault}",)


def _rights(container: Document, pods: Pods) -> Iterator[str]:
    own, common = container.get("securityContext", {}), pods.spec.get("securityContext", {})
    both = common | own
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if not both.get("runAsUser"):
        yield "runAsUser is not set: a name in the image does not tell Kubernetes that it is not root"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile is not RuntimeDefault"
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()) or capabilities.get("add"):
        yield "capabilities are not all dropped"
    if not _is_read_only(container):
        yield "readOnlyRootFilesystem is not true"


def _bounds(container: Document) -> Iterator[str]:
    resources = container.get("resources", {})
    yield from (f"resources.{kind} has no {name}" for kind, name in _RESOURCES if name not in resources.get(kind, {}))


def _is_read_only(container: Document) -> bool:
    return container.get("securityContext", {}).get("readOnlyRootFilesystem") is True


def _writable(container: Document, pods: Pods) -> dict[str, Document]:
    """The volumes that a container can write to, by where they are mounted."""
    volumes = {volume["name"]: volume for volume in pods.spec.get("volumes", ())} | {name: {} for name in pods.claims}
    mounts = [mount for mount in container.get("volumeMounts", ()) if not mount.get("readOnly")]
    found = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in mounts}
    return {path: volume for path, volume in found.items() if not volume.keys() & {"configMap", "secret", "projected"}}


def _ray_folders(container: Document, pods: Pods, home: str | None) -> Iterator[str]:
    """Where Ray writes: sessions and sockets, compiled code and measured curves, objects and what NCCL exchanges."""
    writable = _writable(container, pods)
    for path, what in (
        ("/tmp", "Ray's sessions"),
        (home or "HOME", "what is compiled and measured"),
        ("/dev/shm", "shared memory"),
    ):
        if path not in writable:
            yield f"no volume to write to at {path}, for {what}"
    shared = writable.get("/dev/shm", {}).get("emptyDir", {})
    size, objects = quantity(shared.get("sizeLimit")), (pods.group or {}).get("rayStartParams", {}).get("object-store-memory")
    if shared.get("medium") != "Memory":
        yield "/dev/shm is not in memory: emptyDir.medium Memory"
    if size is not None and size > resource(container, "memory"):
        yield f"/dev/shm may be {shared['sizeLimit']}, more than the container's memory"
    if size is not None and (objects is None or (quantity(objects) or 0) > size):
        yield f"object-store-memory is {objects}, and /dev/shm, where it is, {shared['sizeLimit']}"
