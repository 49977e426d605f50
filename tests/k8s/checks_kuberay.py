"""What KubeRay's operator (1.7) refuses or silently does otherwise, and no schema of a RayService says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from tests.k8s.manifests import Document, Pods, environment, of_kind, ports_of, ray_pods

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 47  # what is left when the names of clusters and services have been made of it
_TIMEOUT = re.compile(r"[1-9]\d*|(\d+(\.\d+)?(ns|us|ms|s|m|h))+")
_GATES = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}
_HEAD_PORTS = ("gcs-server", "dashboard", "serve")
_OF_SERVICES = ("app.kubernetes.io/name", "app.kubernetes.io/created-by")
_RESERVED = {"num-cpus", "num-gpus", "memory", "resources"}
_AUTOSCALER = "RAY_enable_autoscaler_v2"


def check(documents: list[Document]) -> list[str]:
    """All of it, for each RayService."""
    pods = ray_pods(documents)
    environments = {one.where: environment(documents, one.ray) for one in pods}
    found = []
    for service in of_kind(documents, "RayService"):
        name, cluster = service["metadata"].get("name", ""), service["spec"]["rayClusterConfig"]
        annotations = service["metadata"].get("annotations", {})
        head = environments[f"RayService {name}, head"]
        faults = [*_of_service(service), *_of_cluster(cluster), *_storage(cluster, annotations, head)]
        faults += [*_autoscaling(cluster, head), *_groups(cluster)]
        found += [f"RayService {name}: {fault}" for fault in faults]
    found += [f"{one.where}: {fault}" for one in pods for fault in _of_pods(one)]
    return found


def start_resources(group: Document) -> dict[str, float]:
    """The custom resources that the nodes of a group offer.

    Raises:
        ValueError: they are not written as KubeRay needs them: JSON, in quotes, for a shell.
    """
    text = group.get("rayStartParams", {}).get("resources")
    if text is None:
        return {}
    inner = json.loads(text)
    if not isinstance(inner, str):
        raise ValueError("not in quotes")
    found = json.loads(inner)
    if not isinstance(found, dict) or not all(isinstance(amount, int | float) for amount in found.values()):
        raise ValueError("not names with numbers")
    return found


def _of_service(service: Document) -> Iterator[str]:
    name, spec = service["metadata"].get("name", ""), service["spec"]
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        yield f"the name must be of at most {_LONGEST_NAME} of a-z 0-9 -, beginning with a letter"
    timeout = service["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", "1")
    if not _TIMEOUT.fullmatch(timeout):
        yield f"ray.io/initializing-timeout is {timeout!r}, which is no positive duration, such as 10m"
    strategy = spec.get("upgradeStrategy", {})
    kinds = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
    if strategy.get("type", "NewCluster") not in kinds:
        yield f"upgradeStrategy.type is {strategy['type']!r}; allowed: {', '.join(kinds)}"
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        yield from _incremental(spec, strategy.get("clusterUpgradeOptions"))
    elif "clusterUpgradeOptions" in strategy:
        yield f"upgradeStrategy.clusterUpgradeOptions means nothing with type {strategy.get('type')}"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"


def _incremental(spec: Document, options: Document | None) -> Iterator[str]:
    if options is None:
        yield "NewClusterWithIncrementalUpgrade needs upgradeStrategy.clusterUpgradeOptions"
        return
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", -1)
    if not 0 <= surge <= 100 or not 0 <= step <= surge:
        yield f"clusterUpgradeOptions: 0 <= stepSizePercent ({step}) <= maxSurgePercent ({surge}) <= 100 does not hold"
    if options.get("intervalSeconds", 0) <= 0 or not options.get("gatewayClassName"):
        yield "clusterUpgradeOptions needs intervalSeconds above 0 and a gatewayClassName"
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "NewClusterWithIncrementalUpgrade needs rayClusterConfig.enableInTreeAutoscaling"


def _of_cluster(cluster: Document) -> Iterator[str]:
    if "upgradeStrategy" in cluster:
        yield "rayClusterConfig.upgradeStrategy is refused in a RayService: say it in spec.upgradeStrategy"
    for field, gate in _GATES.items():
        if field in cluster:
            yield f"rayClusterConfig.{field} is refused unless the operator's feature gate {gate} is on; by default it is off"
    if "name" in cluster["headGroupSpec"].get("headService", {}).get("metadata", {}):
        yield "headGroupSpec.headService.metadata.name is refused in a RayService: leave it out"
    auth, version = cluster.get("authOptions", {}), _version(cluster)
    if auth.get("mode") == "token" and version < (2, 52):
        yield f"authOptions.mode token needs rayVersion 2.52.0 or newer, and rayVersion is {cluster.get('rayVersion')}"
    if auth.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is refused in a RayService"


def _version(cluster: Document) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)", str(cluster.get("rayVersion")))
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def _storage(cluster: Document, annotations: Document, head: dict[str, str | None]) -> Iterator[str]:
    options, params = cluster.get("gcsFaultToleranceOptions"), cluster["headGroupSpec"].get("rayStartParams", {})
    if "redis-username" in params or "REDIS_USERNAME" in head:
        yield "head: redis-username and REDIS_USERNAME are refused: say it in gcsFaultToleranceOptions.redisUsername"
    if options is None:
        if "RAY_REDIS_ADDRESS" in head:
            yield "head: RAY_REDIS_ADDRESS is refused without gcsFaultToleranceOptions"
        return
    template = cluster["headGroupSpec"]["template"].get("metadata", {}).get("annotations", {})
    for annotation in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotation in annotations | template:
            yield f"annotation {annotation} is refused beside gcsFaultToleranceOptions"
    if "redis-password" in params:
        yield "head: rayStartParams.redis-password is refused beside gcsFaultToleranceOptions: say it in redisPassword"
    for variable in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
        if variable in head:
            yield f"head: {variable} in the environment is refused beside gcsFaultToleranceOptions"
    if options.get("backend", "redis") != "redis":
        yield "gcsFaultToleranceOptions.backend rocksdb is refused unless the feature gate GCSFaultToleranceEmbeddedStorage is on"
    elif "storage" in options or not options.get("redisAddress"):
        yield "gcsFaultToleranceOptions: Redis needs redisAddress, and no storage"
    if "externalStorageNamespace" in options:
        yield "gcsFaultToleranceOptions.externalStorageNamespace: both clusters of an upgrade would share it; leave it out"


def _autoscaling(cluster: Document, head: dict[str, str | None]) -> Iterator[str]:
    groups, options = cluster.get("workerGroupSpecs", []), cluster.get("autoscalerOptions", {})
    asked = str(head.get(_AUTOSCALER, "")).lower() in ("1", "true")
    if not cluster.get("enableInTreeAutoscaling"):
        if asked:
            yield f"head: {_AUTOSCALER} is refused without enableInTreeAutoscaling"
        return
    if _AUTOSCALER in head and "version" in options:
        yield f"head: {_AUTOSCALER} and autoscalerOptions.version say the same: leave one out"
    second = options.get("version") == "v2" or asked or ("version" not in options and _version(cluster) >= (2, 47))
    for group in [cluster["headGroupSpec"], *groups]:
        name = group.get("groupName", "head")
        if second and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy must be Never, or left out, with the autoscaler v2"
        if group.get("suspend"):
            yield f"{name}: suspend is refused with enableInTreeAutoscaling"
        if group.get("idleTimeoutSeconds", 0) < 0 or ("idleTimeoutSeconds" in group and not second):
            yield f"{name}: idleTimeoutSeconds is for the autoscaler v2, and not negative"
        if group.get("priority") and (not second or _version(cluster) < (2, 56)):
            yield f"{name}: priority needs the autoscaler v2 and rayVersion 2.56 or newer"


def _groups(cluster: Document) -> Iterator[str]:
    groups = cluster.get("workerGroupSpecs", [])
    names = Counter(group["groupName"] for group in groups)
    yield from (f"two worker groups are named {name}" for name, times in names.items() if times > 1)
    for group in groups:
        name, low, high = group["groupName"], group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        if not _NAME.fullmatch(name):
            yield f"group {name!r}: the name is not of a-z 0-9 -, beginning with a letter"
        if not 0 <= low <= group.get("replicas", low) <= high:
            yield (
                f"group {name}: 0 <= minReplicas ({low}) <= replicas ({group.get('replicas', low)}) <= maxReplicas ({high}) "
                "does not hold"
            )
        if group.get("numOfHosts", 1) < 1:
            yield f"group {name}: numOfHosts is below 1"


def _of_pods(pods: Pods) -> Iterator[str]:
    group = pods.group or {}
    params = group.get("rayStartParams", {})
    if not pods.spec.get("containers"):
        yield "no container"
    yield from (
        f"rayStartParams.{name} is {value!r}, not a string" for name, value in params.items() if not isinstance(value, str)
    )
    both = sorted(_RESERVED & params.keys())
    if both and "resources" in group:
        yield f"resources and rayStartParams.{both[0]} exclude each other"
    if "labels" in params:
        yield "rayStartParams.labels is refused: say it in the group's labels"
    try:
        start_resources(group)
    except (ValueError, TypeError):
        yield f"""rayStartParams.resources is {params["resources"]}; KubeRay needs it in quotes: '"{{\\"NAME\\": 1}}"'"""
    if pods.is_head:
        yield from _head(pods, params)


def _head(pods: Pods, params: Document) -> Iterator[str]:
    if params.get("num-cpus") != "0":
        yield 'rayStartParams.num-cpus must be "0": what runs on the head is lost with it'
    labels = (pods.group or {})["template"].get("metadata", {}).get("labels", {})
    for label in _OF_SERVICES:
        if label in labels:
            yield f"label {label} is what the operator's service for the head selects by, with its own value: leave it out"
    missing = [name for name in _HEAD_PORTS if name not in ports_of(pods)]
    if ports_of(pods) and missing:
        yield f"ports: no {', '.join(missing)}: who declares ports declares all that the head's service is to have"
