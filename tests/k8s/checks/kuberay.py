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
_HEAD_PORTS = ("gcs-server", "dashboard", "serve")
_OF_SERVICES = ("app.kubernetes.io/name", "app.kubernetes.io/created-by")
_OF_OPTIONS = ("REDIS_USERNAME", "REDIS_PASSWORD", "RAY_REDIS_ADDRESS")  # which gcsFaultToleranceOptions say


def check(documents: list[Document]) -> list[str]:
    """All of it, for each RayService."""
    pods, found = ray_pods(documents), []
    for service in of_kind(documents, "RayService"):
        cluster = service["spec"]["rayClusterConfig"]
        faults = [*_of_service(service), *_of_cluster(cluster), *_groups(cluster.get("workerGroupSpecs", []))]
        found += [f"RayService {service['metadata'].get('name', '')}: {fault}" for fault in faults]
    for one in pods:
        faults = [*_resources(one), *(_head(one, environment(documents, one.ray)) if one.is_head else ())]
        found += [f"{one.where}: {fault}" for fault in faults]
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
    name, annotations = service["metadata"].get("name", ""), service["metadata"].get("annotations", {})
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        yield f"the name must be of at most {_LONGEST_NAME} of a-z 0-9 -, beginning with a letter"
    timeout = annotations.get("ray.io/initializing-timeout", "1")
    if not _TIMEOUT.fullmatch(timeout):
        yield f"ray.io/initializing-timeout is {timeout!r}, which is no positive duration, such as 10m"
    for annotation in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotation in annotations:
            yield f"annotation {annotation} is refused beside gcsFaultToleranceOptions"


def _of_cluster(cluster: Document) -> Iterator[str]:
    numbers = re.match(r"(\d+)\.(\d+)", str(cluster.get("rayVersion")))
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if cluster.get("authOptions", {}).get("mode") == "token" and version < (2, 52):
        yield f"authOptions.mode token needs rayVersion 2.52.0 or newer, and rayVersion is {cluster.get('rayVersion')}"


def _groups(groups: list[Document]) -> Iterator[str]:
    names = Counter(group["groupName"] for group in groups)
    yield from (f"two worker groups are named {name}" for name, times in names.items() if times > 1)
    for group in groups:
        name, low, high = group["groupName"], group.get("minReplicas", 0), group.get("maxReplicas", 2**31 - 1)
        count = group.get("replicas", low)
        if not _NAME.fullmatch(name):
            yield f"group {name!r}: the name is not of a-z 0-9 -, beginning with a letter"
        if not 0 <= low <= count <= high:
            yield f"group {name}: 0 <= minReplicas ({low}) <= replicas ({count}) <= maxReplicas ({high}) does not hold"


def _resources(pods: Pods) -> Iterator[str]:
    try:
        start_resources(pods.group or {})
    except (ValueError, TypeError):
        text = (pods.group or {})["rayStartParams"]["resources"]
        yield f"""rayStartParams.resources is {text}; KubeRay needs it in quotes: '"{{\\"NAME\\": 1}}"'"""


def _head(pods: Pods, variables: dict[str, str | None]) -> Iterator[str]:
    group = pods.group or {}
    if group.get("rayStartParams", {}).get("num-cpus") != "0":
        yield 'rayStartParams.num-cpus must be "0": what runs on the head is lost with it'
    metadata = group["template"].get("metadata", {})
    for label in _OF_SERVICES:
        if label in metadata.get("labels", {}):
            yield f"label {label} is what the operator's service for the head selects by, with its own value: leave it out"
    missing = [name for name in _HEAD_PORTS if name not in ports_of(pods)]
    if ports_of(pods) and missing:
        yield f"ports: no {', '.join(missing)}: who declares ports declares all that the head's service is to have"
    for variable in _OF_OPTIONS:
        if variable in variables:
            yield f"{variable} in the environment is refused beside gcsFaultToleranceOptions"
    if str(variables.get("RAY_enable_autoscaler_v2", "")).lower() in ("1", "true"):
        yield "RAY_enable_autoscaler_v2 is refused without enableInTreeAutoscaling"
