"""TLS between Ray's pods: on in all of them or in none, each with a certificate of its own; and to the Redis of the head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.k8s.manifests import Document, Pods, environment, of_kind, pods_of, ray_pods

AUTHORITY = "outrider-ray-tls"
FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
REDIS_AUTHORITY = "RAY_REDIS_CA_CERT"
_ON, _IS_ON = "RAY_USE_TLS", ("1", "true")


def is_on(documents: list[Document], container: Document) -> bool:
    """Whether Ray encrypts in a container."""
    return str(environment(documents, container).get(_ON, "0")).lower() in _IS_ON


def check(documents: list[Document]) -> list[str]:
    """All of it."""
    pods = ray_pods(documents)
    on, off = ([one for one in pods if is_on(documents, one.ray) is wanted] for wanted in (True, False))
    found = []
    if on and off:
        names = ", ".join(one.where for one in off)
        found.append(f"{_ON} is set in {on[0].where}, and not in {names}: they cannot speak with each other")
    found += [f"{one.where}: {fault}" for one in on for fault in _of_pods(one)]
    for one in pods_of(documents):
        shown = [each for each in one.spec.get("containers", ()) if _mounts(one, each, AUTHORITY)]
        found += [f"{one.where}, container {each['name']}: it sees the authority's key, secret {AUTHORITY}" for each in shown]
    for service in of_kind(documents, "RayService"):
        heads = [one for one in pods if one.is_head]
        options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
        found += [f"{one.where}: {fault}" for one in heads for fault in _of_state(documents, one, options.get("redisAddress"))]
    return found


def _of_pods(pods: Pods) -> Iterator[str]:
    """Files and who makes them, where TLS is on."""
    own = {entry["name"]: entry.get("value") for entry in pods.ray.get("env", ())}
    for name in (_ON, *FILES):
        if name not in own:
            yield f"{name} is not in the container's env: KubeRay gives wait-gcs-ready that, and not envFrom"
    volumes = {_volume_of(pods.ray, own.get(name) or "") for name in FILES}
    if len(volumes) != 1 or None in volumes:
        yield f"{', '.join(FILES)} are not in one mounted volume"
        return
    (volume,) = volumes
    source = next((one for one in pods.spec.get("volumes", ()) if one["name"] == volume), {})
    if source.get("emptyDir", {}).get("medium") != "Memory":
        yield f"volume {volume}, with the pod's key, is not in memory: emptyDir.medium Memory"
    makers = [
        each
        for each in pods.spec.get("initContainers", ())
        if any(mount["name"] == volume and not mount.get("readOnly") for mount in each.get("volumeMounts", ()))
    ]
    if not makers:
        yield f"no init container makes a certificate in volume {volume}"
    for each in makers:
        if not _mounts(pods, each, AUTHORITY):
            yield f"init container {each['name']} does not see the authority, secret {AUTHORITY}"
        address = next((entry for entry in each.get("env", ()) if entry["name"] == "POD_IP"), {})
        if address.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") != "status.podIP":
            yield f"init container {each['name']} is not told POD_IP, status.podIP, which the certificate has to name"
        if pods.is_head and "$(FQ_RAY_IP)" not in [*each.get("command", ()), *each.get("args", ())]:
            yield f"init container {each['name']} is not told $(FQ_RAY_IP), the name by which the other pods know the head"


def _of_state(documents: list[Document], head: Pods, address: str | None) -> Iterator[str]:
    """The connection to the Redis of the head's own state."""
    if address is None:
        return
    if not address.startswith("rediss://"):
        yield f"gcsFaultToleranceOptions.redisAddress is {address}, without rediss://: Ray's state would travel in the clear"
    file = environment(documents, head.ray).get(REDIS_AUTHORITY)
    if file is None or _volume_of(head.ray, file) is None:
        yield f"{REDIS_AUTHORITY} is {file}, which is under no mounted volume: no certificate of Redis is believed"


def _volume_of(container: Document, path: str) -> str | None:
    """The volume that a file is in."""
    mounts = [mount for mount in container.get("volumeMounts", ()) if Path(path).is_relative_to(mount["mountPath"])]
    found: str | None = max(mounts, key=lambda mount: len(mount["mountPath"]), default={}).get("name")
    return found


def _mounts(pods: Pods, container: Document, secret: str) -> bool:
    """Whether a container sees a secret's files."""
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    volumes = [volume for volume in pods.spec.get("volumes", ()) if volume["name"] in mounted]
    return any(volume.get("secret", {}).get("secretName") == secret for volume in volumes)
