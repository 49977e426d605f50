"""Checks of the manifests: each takes the documents of one deployment and yields a sentence for each fault."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import promql_parser
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from outrider.cache_service.store.redis_binary import FLOORS, version_fault
from outrider.experiments.bench.run import arguments
from outrider.experiments.bench.scaling.command import BENCH
from tests.cluster.observe.test_monitoring import METRIC, exposed
from tests.k8s import network, serve
from tests.k8s.made_secrets import tls_environment
from tests.k8s.manifests import (
    GPU,
    SECRETS,
    Document,
    Pods,
    behind,
    environment,
    files_of,
    load_all,
    mount_of,
    named,
    of_kind,
    pods_of,
    quantity,
    ray_pods,
    resource,
    selects,
    title,
    walk,
)

VERSIONS = ("1.37", "1.31")  # the newest of kubernetes-validate, and one that managed clusters still run
RULES, OTHER_SPECS = load_all(Path(__file__).with_name("schema.yaml").read_text())


def check_schema(documents: list[Document]) -> Iterator[str]:
    """Validate each document against Kubernetes' schemas and ``schema.yaml``, in which unknown fields are errors."""
    if named(documents, "Namespace", "outrider") is None:
        yield "no Namespace outrider"
    names = Counter(map(title, documents))
    yield from (f"{name} is defined twice" for name, times in names.items() if times > 1)
    for document in documents:
        text = json.dumps(document, sort_keys=True)
        yield from (f"{title(document)}: {fault}" for version in VERSIONS for fault in _schema_faults(text, version))


@cache  # overlays have most documents in common
def _schema_faults(text: str, version: str) -> list[str]:
    document: Document = json.loads(text)
    registry, kinds = _definitions(version)
    kind = (document["apiVersion"], document["kind"])
    if kind not in kinds:
        return [f"no kind {'/'.join(kind)} in Kubernetes {version}"]
    has_namespace = kind[1] not in ("Namespace", "PersistentVolume")
    metadata = {"required": ["name", "namespace"] if has_namespace else ["name"]}
    schema = {"$ref": f"urn:kubernetes#/$defs/{kinds[kind]}", "properties": {"metadata": metadata}}
    errors = Draft202012Validator(schema, registry=registry).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[-300:]} ({version})" for error in errors]


@cache
def _definitions(version: str) -> tuple[Registry[Any], dict[tuple[str, str], str]]:
    """Return Kubernetes' definitions with our rules, and the names of those of (apiVersion, kind)."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    definitions: dict[str, Document] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    kinds = {}
    for name, definition in definitions.items():
        for one in definition.get("x-kubernetes-group-version-kind", ()):
            kinds["/".join(filter(None, (one["group"], one["version"]))), one["kind"]] = name
    for name, rule in RULES.items():
        definitions[name] = definitions[name] | {"allOf": [rule]}
    metadata = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    for name, spec in OTHER_SPECS.items():
        api, _, kind = name.partition(" ")
        kinds[api, kind] = kind
        properties = {"apiVersion": {}, "kind": {}, "metadata": metadata, "spec": spec}
        definitions[kind] = _closed({"required": list(properties), "properties": properties})
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions}
    return Registry().with_resource("urn:kubernetes", Resource.from_contents(document)), kinds


def _closed(schema: Document) -> Document:
    """Return a schema whose objects have no other properties than the named ones, down to the first ``$ref``."""
    if "$ref" in schema:
        return schema
    closed = dict(schema)
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if "properties" in schema:
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
        closed |= {"type": "object", "additionalProperties": False}
    return closed


# The lists whose entries have distinct names, and the field with the name.
UNIQUE = {
    "containers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "env": "name",
    "ports": "name",
    "workerGroupSpecs": "groupName",
}
# The fields that refer to another document: its kind, and the field with its name.
REFERENCES = {
    "secret": ("Secret", "secretName"),
    "secretRef": ("Secret", "name"),
    "secretKeyRef": ("Secret", "name"),
    "configMap": ("ConfigMap", "name"),
    "configMapRef": ("ConfigMap", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


def check_references(documents: list[Document]) -> Iterator[str]:
    """Find config maps, secrets, keys, claims, volumes and files that are named and do not exist."""
    known = {("Secret", name): keys for name, keys in SECRETS.items()}
    known |= {(one["kind"], one["metadata"]["name"]): set(one.get("data", ())) for one in documents}
    for field, value in walk(documents):
        if field in UNIQUE and isinstance(value, list):
            names = Counter(entry.get(UNIQUE[field]) for entry in value)
            yield from (f"{field}: {name} twice" for name, times in names.items() if name and times > 1)
        if field in REFERENCES and isinstance(value, dict):
            kind, name_field = REFERENCES[field]
            name = value[name_field]
            keys = {entry["key"] for entry in (value, *value.get("items", ())) if "key" in entry}
            if (kind, name) not in known:
                yield f"no {kind} {name}"
            elif not keys <= known[kind, name]:
                yield f"{kind} {name} has no key {', '.join(keys - known[kind, name])}"
    for pods in pods_of(documents):
        mounts = [mount for container in pods.containers for mount in container.get("volumeMounts", ())]
        for name in pods.volumes.keys() ^ {mount["name"] for mount in mounts}:
            yield f"{pods.where}: {name} is a volume without a mount, or a mount without a volume"
        for mount in mounts:  # a missing file would be mounted as an empty folder
            if "subPath" in mount and mount["subPath"] not in files_of(documents, pods.volumes.get(mount["name"], {})):
                yield f"{pods.where}: volume {mount['name']} has no file {mount['subPath']}"


def check_selectors(documents: list[Document]) -> Iterator[str]:
    """Check that selectors find pods, that these have the ports, and that budgets leave pods to evict."""
    pods = pods_of(documents)
    for document in of_kind(documents, "Service", "PodMonitor", "PodDisruptionBudget"):
        spec = document["spec"]
        selector = {"matchLabels": spec["selector"]} if document["kind"] == "Service" else spec["selector"]
        chosen = [one for one in pods if selects(selector, one.labels)]
        if not chosen:
            yield f"{title(document)}: selector {selector} selects no pod"
        for port in (*spec.get("ports", ()), *spec.get("podMetricsEndpoints", ())):
            target = port.get("targetPort", port["port"])
            missing = [one.where for one in chosen if target not in (*one.ports, *one.ports.values())]
            yield from (f"{title(document)}: port {target} is declared by no container of {where}" for where in missing)
        if spec.get("minAvailable", 0) > sum(one.count for one in chosen):
            yield f"{title(document)}: minAvailable is {spec['minAvailable']}, more than the pods"
    for document in of_kind(documents, "StatefulSet"):
        if not selects(document["spec"]["selector"], document["spec"]["template"]["metadata"]["labels"]):
            yield f"{title(document)} does not select its own pods"
        if named(documents, "Service", document["spec"]["serviceName"]) is None:
            yield f"{title(document)}: no Service {document['spec']['serviceName']}"
    for one in pods:
        budgets = of_kind(documents, "PodDisruptionBudget")
        if sum(selects(budget["spec"]["selector"], one.labels) for budget in budgets) > 1:
            yield f"{one.where}: two PodDisruptionBudgets select it, and then no pod can be evicted"
        for constraint in one.spec.get("topologySpreadConstraints", ()):
            if not selects(constraint.get("labelSelector"), one.labels):
                yield f"{one.where}: topologySpreadConstraints do not select the pods themselves"
    for field, value in walk(documents):
        if field == "redisAddress" and not behind(documents, value):
            yield f"no pod is behind redisAddress {value}"
        for group in value if field == "workerGroupSpecs" else ():
            if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
                yield f"group {group['groupName']}: replicas is not between minReplicas and maxReplicas"
    for head in (one for one in pods if one.is_head):
        # Who declares ports declares all that the operator's service for the head has; it sets the labels by which it selects.
        if not {"gcs-server", "dashboard", "serve"} <= head.ports.keys():
            yield f"{head.where}: ports of the operator's service are missing"
        if (head.labels["app.kubernetes.io/name"], head.labels["app.kubernetes.io/created-by"]) != (
            "kuberay",
            "kuberay-operator",
        ):
            yield f"{head.where}: the operator's service for the head does not select it"


def check_resources(documents: list[Document]) -> Iterator[str]:
    """Check requests against limits, the versions of Redis, the writable folders and the memory behind /dev/shm."""
    for pods in pods_of(documents):
        for container in pods.containers:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            for name in {*requests, *limits}:
                request, limit = quantity(requests.get(name, 0)), quantity(limits.get(name, requests.get(name)))
                if request > limit or ("/" in name and request != limit):
                    yield f"{pods.where}: {name}: {request} requested, and the limit is {limit}"
            name, _, tag = container["image"].partition("@")[0].rpartition(":")
            kind = name.rpartition("/")[2]
            if kind in FLOORS and version_fault(kind, tag) is not None:
                yield f"{pods.where}: image {container['image']} {version_fault(kind, tag)}"
        writable = {}
        for mount in pods.ray.get("volumeMounts", ()):
            volume = pods.volumes.get(mount["name"], {})
            if not mount.get("readOnly") and not volume.keys() & {"configMap", "secret"}:
                writable[mount["mountPath"]] = volume
        needed = ["/data"] if pods.claims else []
        if pods.group is not None:
            needed = ["/tmp", "/dev/shm", str(environment(documents, pods.ray).get("HOME"))]
        yield from (f"{pods.where}: no writable volume at {path}" for path in needed if path not in writable)
        if "/dev/shm" in writable:
            shared = writable["/dev/shm"].get("emptyDir", {})
            size = quantity(shared.get("sizeLimit", 0))
            objects = (pods.group or {}).get("rayStartParams", {}).get("object-store-memory")
            if shared.get("medium") != "Memory" or size > resource(pods.ray, "memory"):
                yield f"{pods.where}: /dev/shm is not in memory, or larger than the container's memory"
            if pods.group is not None and (objects is None or quantity(objects) > size):
                yield f"{pods.where}: object-store-memory is {objects}, and /dev/shm, where it is, {size}"


TLS_FOLDER = "/etc/outrider/tls"


def uses_tls(documents: list[Document], pods: Pods) -> bool:
    return environment(documents, pods.ray).get("RAY_USE_TLS") == "1"


def check_tls(documents: list[Document]) -> Iterator[str]:
    """Check that Ray's pods use TLS all or none, with a certificate made in each, and that only its maker sees the CA's key."""
    on = [pods for pods in ray_pods(documents) if uses_tls(documents, pods)]
    if on and len(on) < len(ray_pods(documents)):
        yield f"RAY_USE_TLS is set in {', '.join(pods.where for pods in on)} alone"
    for pods in on:
        own = {entry["name"]: entry.get("value") for entry in pods.ray.get("env", ())}
        for name, value in tls_environment(Path(TLS_FOLDER)).items():
            if own.get(name) != value:  # KubeRay gives its init container wait-gcs-ready these, and not envFrom
                yield f"{pods.where}: {name} in env is {own.get(name)}, not {value}"
        volume = (mount_of(pods.ray, TLS_FOLDER) or {}).get("name", "")
        if pods.volumes.get(volume, {}).get("emptyDir", {}).get("medium") != "Memory":
            yield f"{pods.where}: {TLS_FOLDER}, with the pod's key, is no volume in memory"
        if not any(_makes_certificate(pods, each, volume) for each in pods.spec.get("initContainers", ())):
            yield f"{pods.where}: no init container with the CA, POD_IP and the head's name makes a certificate in {TLS_FOLDER}"
    for pods in pods_of(documents):
        if any("outrider-ray-tls" in _secrets(pods, container) for container in pods.spec["containers"]):
            yield f"{pods.where}: a container sees the CA's key"
        file = environment(documents, pods.ray).get("RAY_REDIS_CA_CERT") or "/"
        volume = (mount_of(pods.ray, file) or {}).get("name", "")
        if pods.is_head and PurePosixPath(file).name not in files_of(documents, pods.volumes.get(volume, {})):
            yield f"{pods.where}: RAY_REDIS_CA_CERT is {file}, which no volume has"


def _secrets(pods: Pods, container: Document) -> set[str]:
    volumes = [pods.volumes.get(mount["name"], {}) for mount in container.get("volumeMounts", ())]
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def _makes_certificate(pods: Pods, container: Document, volume: str) -> bool:
    mounts = [mount["name"] for mount in container.get("volumeMounts", ()) if not mount.get("readOnly")]
    addresses = [entry.get("valueFrom") for entry in container.get("env", ()) if entry["name"] == "POD_IP"]
    return (
        volume in mounts
        and "outrider-ray-tls" in _secrets(pods, container)
        and addresses == [{"fieldRef": {"fieldPath": "status.podIP"}}]
        and (not pods.is_head or container.get("args") == ["$(FQ_RAY_IP)"])
    )


# As NVIDIA's feature discovery labels nodes with whole GPUs that the image has code for: A100, H100, H200.
PRODUCTS = [
    "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-PCIE-40GB",
    "NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL", "NVIDIA-H200", "NVIDIA-H200-NVL",
]  # fmt: skip
_EXPRESSION = {"key": f"{GPU}.product", "operator": "In", "values": PRODUCTS}
_TERMS = {"nodeSelectorTerms": [{"matchExpressions": [_EXPRESSION]}]}
# Without the runtime class a pod may get no driver.
OF_GPU_PODS = {
    "runtimeClassName": "nvidia",
    "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _TERMS}},
}


def check_gpus(documents: list[Document]) -> Iterator[str]:
    """Check runtime class, toleration and affinity of each pod with a GPU."""
    for pods in pods_of(documents):
        for field, value in OF_GPU_PODS.items() if resource(pods.ray, GPU) else ():
            if pods.spec.get(field) != value:
                yield f"{pods.where}: {field} is {pods.spec.get(field)}, not {value}"


def check_jobs(documents: list[Document]) -> Iterator[str]:
    """Check the options and GPUs of ``outrider bench scaling``, and that what it reads and writes is mounted."""
    for pods in pods_of(documents):
        if not pods.where.startswith("Job "):
            continue
        (container,) = pods.containers
        error = io.StringIO()
        try:
            with contextlib.redirect_stderr(error):
                args = arguments(BENCH, container["args"])
        except SystemExit:
            yield f"{pods.where}: options refused: {error.getvalue()}"
            continue
        if container["command"] != ["outrider", "bench", "scaling"]:
            yield f"{pods.where}: command {container['command']} is not outrider bench scaling"
        if max(args.workers) != resource(container, GPU):
            yield f"{pods.where}: --workers goes to {max(args.workers)}, and it has {resource(container, GPU)} GPUs"
        if args.records * len(args.prompts) < max(args.clients):
            yield f"{pods.where}: --clients goes to {max(args.clients)}, and there are fewer prompts"
        for path in (args.model, *map(str, args.prompts)):
            if mount_of(container, path) is None:
                yield f"{pods.where}: {path} is under no mounted volume"
        kept = mount_of(container, str(args.out)) or {"name": ""}
        if "persistentVolumeClaim" not in pods.volumes.get(kept["name"], {}) or kept.get("readOnly"):
            yield f"{pods.where}: --out {args.out} is no claim to write to"


_series = cache(exposed)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")
DURATIONS = {"__rate_interval", "__interval", "__range"}


def check_monitoring(documents: list[Document]) -> Iterator[str]:
    """Check the queries of alerts and dashboards, the dashboards' variables, and the labels that these ask for."""
    config_maps = [one for one in of_kind(documents, "ConfigMap") if "grafana_dashboard" in one["metadata"].get("labels", {})]
    dashboards = [json.loads(text) for one in config_maps for text in one["data"].values()]
    variables = [variable for dashboard in dashboards for variable in dashboard["templating"]["list"]]
    for variable in variables:
        metric, label = (re.findall(r"^label_values\((.+), (\w+)\)$", str(variable["query"])) or [("", "")])[0]
        if variable["type"] == "query" and label not in _series().get(metric, ()):
            yield f"{variable['query']} is not label_values(METRIC, LABEL) of a metric with the label"
    declared = DURATIONS | {variable["name"] for variable in variables}
    queries = [query for field, query in walk([*of_kind(documents, "PrometheusRule"), *dashboards]) if field == "expr"]
    yield from (fault for query in queries for fault in query_faults(str(query), declared))


def query_faults(query: str, variables: set[str]) -> Iterator[str]:
    """Find faults of a query in PromQL, in which these variables of Grafana may stand."""
    try:
        promql_parser.parse(_VARIABLE.sub(lambda match: "5m" if match[1] in DURATIONS else "x", query))
    except ValueError as error:
        yield f"{query}: {error}"
    metrics = set(METRIC.findall(query))
    if not metrics or metrics - _series().keys():
        yield f"{query}: no metric {', '.join(metrics - _series().keys())}"
    for name in set(_VARIABLE.findall(query)) - variables:
        yield f"{query}: ${name} is no variable of the dashboard"


CHECKS: dict[str, Callable[[list[Document]], Iterator[str]]] = {
    "schema": check_schema,
    "references": check_references,
    "selectors": check_selectors,
    "resources": check_resources,
    "tls": check_tls,
    "gpus": check_gpus,
    "jobs": check_jobs,
    "monitoring": check_monitoring,
    "network": network.check,
    "serve": serve.check,
}
