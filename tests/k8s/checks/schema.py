"""Every document against the schema of its kind, in which an unknown field is an error.

The schemas of Kubernetes' own kinds, pod templates among them, are those that kubernetes-validate carries. Those of RayService
(KubeRay 1.7), PodMonitor and PrometheusRule (prometheus-operator 0.87) are written here from the API references. They hold what
our manifests use and no more: whoever adds a field reads first what the operator demands of it. Most of KubeRay's others are
refused in a RayService, or by default (``headService.metadata.name``, ``authOptions.enableK8sTokenAuth``, ``networkPolicy``), or
beside what is used here (``rayStartParams.redis-password``).
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jsonschema
import kubernetes_validate
from referencing import Registry, Resource

from tests.k8s.manifests import Document, title

Schema = dict[str, Any]

# The newest that kubernetes-validate knows, and one that managed clusters still run: fields of one alone are found.
VERSIONS = ("1.37", "1.31")

_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
_CORE, _META = "io.k8s.api.core.v1.", "io.k8s.apimachinery.pkg.apis.meta.v1."


def _of_kubernetes(name: str) -> Schema:
    return {"$ref": f"{_DEFINITIONS}#/$defs/{name}"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _enum(*values: object) -> Schema:
    return {"enum": list(values)}


_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_TEXT_BY_NAME: Schema = {"type": "object", "additionalProperties": _TEXT}
_DURATION: Schema = {"type": "string", "pattern": r"^(0|([0-9]+(ms|[smhdwy]))+)$"}

_TEMPLATE = _of_kubernetes(_CORE + "PodTemplateSpec")
_START_PARAMS = _object(**dict.fromkeys(("num-cpus", "num-gpus", "object-store-memory", "resources"), _TEXT))
_CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion=_TEXT,
    enableInTreeAutoscaling=_enum(False),
    authOptions=_object(secretName=_TEXT, mode=_enum("disabled", "token")),
    gcsFaultToleranceOptions=_object(
        ("redisAddress", "redisPassword"),
        redisAddress=_TEXT,
        redisPassword=_object(valueFrom=_of_kubernetes(_CORE + "EnvVarSource")),
    ),
    headGroupSpec=_object(("template",), template=_TEMPLATE, rayStartParams=_START_PARAMS),
    workerGroupSpecs=_list(
        _object(
            ("groupName", "template"),  # minReplicas and maxReplicas have defaults
            groupName=_TEXT,
            replicas=_WHOLE,
            minReplicas=_WHOLE,
            maxReplicas=_WHOLE,
            template=_TEMPLATE,
            rayStartParams=_START_PARAMS,
        )
    ),
)
_RAY_SERVICE = _object(
    upgradeStrategy=_object(type=_enum("NewCluster", "None")),
    serveConfigV2=_TEXT,
    rayClusterConfig=_CLUSTER,
    excludeHeadPodFromServeSvc=_enum(True),
)
_ENDPOINT = _object(port=_TEXT, path=_TEXT, interval=_DURATION, scrapeTimeout=_DURATION)
_POD_MONITOR = _object(
    ("selector",), selector=_of_kubernetes(_META + "LabelSelector"), podMetricsEndpoints=_list(_ENDPOINT)
)  # fmt: skip
_RULE = _object(
    ("alert", "expr"), alert=_TEXT, expr=_TEXT, labels=_TEXT_BY_NAME, annotations=_TEXT_BY_NAME, **{"for": _DURATION}
)  # fmt: skip
_RULES = _object(("groups",), groups=_list(_object(("name", "rules"), name=_TEXT, rules=_list(_RULE))))
_SPECS = {
    ("ray.io/v1", "RayService"): _RAY_SERVICE,
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _RULES,
}


def check(documents: list[Document]) -> list[str]:
    """Unknown fields, missing ones, and values of a wrong type."""
    texts = ((title(document), json.dumps(document, sort_keys=True)) for document in documents)
    return [f"{name}: {fault}" for name, text in texts for version in VERSIONS for fault in _faults(text, version)]


@cache  # overlays have most documents in common
def _faults(text: str, version: str) -> tuple[str, ...]:
    document: Document = json.loads(text)
    api, kind = document.get("apiVersion"), document.get("kind")
    if (api, kind) in _SPECS:
        meta = _of_kubernetes(_META + "ObjectMeta")
        parts = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": meta, "spec": _SPECS[api, kind]}
        validator = jsonschema.Draft202012Validator(_object(tuple(parts), **parts), registry=_registry(version))
        return tuple(f"{_described(error)} (pods as of Kubernetes {version})" for error in validator.iter_errors(document))
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return (f"no kind {api}/{kind} in Kubernetes {version}",)
    except kubernetes_validate.ValidationError as error:
        return (f"{_described(error)} (Kubernetes {version})",)
    return ()


@cache
def _registry(version: str) -> Registry[Any]:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return Resource.from_contents(json.loads((folder / "_definitions.json").read_text())) @ Registry()


def _described(error: jsonschema.ValidationError) -> str:
    """Where it is and what it is; of what is long the end, for what is wrong stands behind the value."""
    text = error.message if len(error.message) <= 300 else f"... {error.message[-300:]}"
    return f"{'.'.join(map(str, error.absolute_path))}: {text}"
