"""Whatever is named exists: config maps, secrets and their keys, claims, volumes."""

from __future__ import annotations

from collections.abc import Iterator

from tests.k8s.manifests import SECRETS, Document, Pods, named, of_kind, pods_of

_OPTIONAL = "optional"


def check(documents: list[Document]) -> list[str]:
    """References of all pods, and of KubeRay's own options."""
    found = [f"{one.where}: {fault}" for one in pods_of(documents) for fault in _of_pods(documents, one)]
    for service in of_kind(documents, "RayService"):
        cluster = service["spec"]["rayClusterConfig"]
        faults: list[str] = []
        token = cluster.get("authOptions", {})
        if token.get("mode") == "token" and "secretName" in token:
            faults += _secret(token["secretName"], "auth_token")
        options = cluster.get("gcsFaultToleranceOptions", {})
        faults += _value(documents, options.get("redisPassword", {}).get("valueFrom", {}))
        found += [f"RayService {service['metadata']['name']}: {fault}" for fault in faults]
    return found


def _secret(name: str, key: str | None = None) -> Iterator[str]:
    if name not in SECRETS:
        yield f"secret {name} is none that k8s/secrets.sh makes: {', '.join(SECRETS)}"
    elif key is not None and key not in SECRETS[name]:
        yield f"secret {name} has no key {key}; k8s/secrets.sh gives it {', '.join(sorted(SECRETS[name]))}"


def _config(documents: list[Document], name: str, key: str | None = None) -> Iterator[str]:
    config = named(documents, "ConfigMap", name)
    if config is None:
        yield f"there is no ConfigMap {name}"
    elif key is not None and key not in {**config.get("data", {}), **config.get("binaryData", {})}:
        yield f"ConfigMap {name} has no key {key}"


def _value(documents: list[Document], source: Document) -> Iterator[str]:
    """Of an ``EnvVarSource``."""
    secret, config = source.get("secretKeyRef", {}), source.get("configMapKeyRef", {})
    if secret and not secret.get(_OPTIONAL):
        yield from _secret(secret["name"], secret["key"])
    if config and not config.get(_OPTIONAL):
        yield from _config(documents, config["name"], config["key"])


def _of_pods(documents: list[Document], pods: Pods) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pods.spec.get("volumes", ())}
    for name, volume in volumes.items():
        yield from (f"volume {name}: {fault}" for fault in _volume(documents, volume))
    mounts = [mount for container in pods.containers for mount in container.get("volumeMounts", ())]
    mounted = {mount["name"] for mount in mounts}
    known = volumes.keys() | set(pods.claims)
    yield from (f"{name} is mounted, and there is no such volume" for name in sorted(mounted - known))
    yield from (f"volume {name} is mounted nowhere" for name in sorted(known - mounted))
    for mount in mounts:
        if "subPath" in mount and mount["name"] in volumes:
            yield from _sub_path(documents, volumes[mount["name"]], mount["subPath"])
    for container in pods.containers:
        for source in container.get("envFrom", ()):
            if "secretRef" in source and not source["secretRef"].get(_OPTIONAL):
                yield from _secret(source["secretRef"]["name"])
            if "configMapRef" in source and not source["configMapRef"].get(_OPTIONAL):
                yield from _config(documents, source["configMapRef"]["name"])
        for entry in container.get("env", ()):
            yield from _value(documents, entry.get("valueFrom", {}))
    account = pods.spec.get("serviceAccountName", "default")
    if account != "default" and named(documents, "ServiceAccount", account) is None:
        yield f"there is no ServiceAccount {account}"


def _volume(documents: list[Document], volume: Document) -> Iterator[str]:
    secret, config, claim = volume.get("secret"), volume.get("configMap"), volume.get("persistentVolumeClaim")
    for source in volume.get("projected", {}).get("sources", ()):
        yield from _volume(documents, {kind: inner | {"secretName": inner.get("name")} for kind, inner in source.items()})
    if secret is not None and not secret.get(_OPTIONAL):
        yield from _secret(secret["secretName"])
        yield from (fault for item in secret.get("items", ()) for fault in _secret(secret["secretName"], item["key"]))
    if config is not None and not config.get(_OPTIONAL):
        yield from _config(documents, config["name"])
        yield from (fault for item in config.get("items", ()) for fault in _config(documents, config["name"], item["key"]))
    if claim is not None and named(documents, "PersistentVolumeClaim", claim["claimName"]) is None:
        yield f"there is no PersistentVolumeClaim {claim['claimName']}"


def _sub_path(documents: list[Document], volume: Document, path: str) -> Iterator[str]:
    """A file that is missing would be mounted as an empty folder."""
    for kind, name_key, find in (("configMap", "name", None), ("secret", "secretName", _secret)):
        source = volume.get(kind)
        if source is None:
            continue
        if "items" in source:
            if path not in {item["path"] for item in source["items"]}:
                yield f"volume {volume['name']} has no file {path}"
        elif find is None:
            yield from _config(documents, source[name_key], path)
        else:
            yield from find(source[name_key], path)
