"""Strict JSON schemas of the kinds that are not Kubernetes' own: RayService, RayCluster, PodMonitor and PrometheusRule.

Fields and enumerations of ``ray.io/v1`` are those of KubeRay 1.7.0's API reference, those of ``monitoring.coreos.com/v1`` are the
ones of use here out of prometheus-operator 0.87's. They are written from these references and are not the
CustomResourceDefinitions themselves, which have the last word in a cluster. Both projects are licensed under Apache-2.0. Pod
templates, and whatever else is Kubernetes' own, are looked up in the definitions that kubernetes-validate carries.

Not known here: bounds of int32, rules in CEL (fields that may not change later), defaults, ``status``; what only the controllers
check is in ``checks_kuberay``. Fields that KubeRay reads no more (``serviceUnhealthySecondThreshold``,
``deploymentUnhealthySecondThreshold``) are refused on purpose.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jsonschema
from referencing import Registry, Resource

Schema = dict[str, Any]

_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
_CORE, _NET = "io.k8s.api.core.v1.", "io.k8s.api.networking.v1."
_META = "io.k8s.apimachinery.pkg.apis.meta.v1."


def _of_kubernetes(name: str) -> Schema:
    return {"$ref": f"{_DEFINITIONS}#/$defs/{name}"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _enum(*values: str) -> Schema:
    return {"enum": list(values)}


def _kind(api: str, kind: str, spec: Schema) -> Schema:
    meta = _of_kubernetes(_META + "ObjectMeta")
    return _object(("apiVersion", "kind", "metadata", "spec"), apiVersion=_enum(api), kind=_enum(kind), metadata=meta, spec=spec)


_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_TRUTH: Schema = {"type": "boolean"}
_TEXTS = _list(_TEXT)
_TEXT_BY_NAME: Schema = {"type": "object", "additionalProperties": _TEXT}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION: Schema = {"type": "string", "pattern": r"^(0|([0-9]+(ms|[smhdwy]))+)$"}
_RESOURCES = _of_kubernetes(_CORE + "ResourceRequirements")
_ENV = _list(_of_kubernetes(_CORE + "EnvVar"))
_SERVICE = _of_kubernetes(_CORE + "Service")
_MANAGER = _enum("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")

_CREDENTIAL = _object(value=_TEXT, valueFrom=_of_kubernetes(_CORE + "EnvVarSource"))
_NETWORK_RULES = {
    "ingressRules": _list(_of_kubernetes(_NET + "NetworkPolicyIngressRule")),
    "egressRules": _list(_of_kubernetes(_NET + "NetworkPolicyEgressRule")),
}
_GROUP = {
    "template": _of_kubernetes(_CORE + "PodTemplateSpec"),
    "rayStartParams": _TEXT_BY_NAME,
    "resources": _TEXT_BY_NAME,
    "labels": _TEXT_BY_NAME,
}

_CLUSTER = _object(
    ("headGroupSpec",),
    upgradeStrategy=_object(type=_enum("Recreate", "None")),
    authOptions=_object(enableK8sTokenAuth=_TRUTH, secretName=_TEXT, mode=_enum("disabled", "token")),
    suspend=_TRUTH,
    managedBy=_MANAGER,
    autoscalerOptions=_object(
        resources=_RESOURCES,
        image=_TEXT,
        imagePullPolicy=_TEXT,
        securityContext=_of_kubernetes(_CORE + "SecurityContext"),
        idleTimeoutSeconds=_WHOLE,
        upscalingMode=_enum("Default", "Aggressive", "Conservative"),
        version=_enum("v1", "v2"),
        env=_ENV,
        envFrom=_list(_of_kubernetes(_CORE + "EnvFromSource")),
        volumeMounts=_list(_of_kubernetes(_CORE + "VolumeMount")),
        command=_TEXTS,
        args=_TEXTS,
    ),
    headServiceAnnotations=_TEXT_BY_NAME,
    enableInTreeAutoscaling=_TRUTH,
    gcsFaultToleranceOptions=_object(
        backend=_enum("redis", "rocksdb"),
        redisUsername=_CREDENTIAL,
        redisPassword=_CREDENTIAL,
        externalStorageNamespace=_TEXT,
        redisAddress=_TEXT,
        storage=_object(
            claimName=_TEXT,
            size=_of_kubernetes("io.k8s.apimachinery.pkg.api.resource.Quantity"),
            storageClassName=_TEXT,
            accessModes=_TEXTS,
            subPath=_TEXT,
            deletionPolicy=_enum("DeleteWithCluster", "Retain"),
        ),
    ),
    historyServerOptions=_object(collectorOptions=_object(image=_TEXT, imagePullPolicy=_TEXT, resources=_RESOURCES, env=_ENV)),
    networkPolicy=_object(
        mode=_enum("DenyAll", "DenyAllIngress", "DenyAllEgress"),
        head=_object(**_NETWORK_RULES),
        worker=_object(**_NETWORK_RULES),
        workerGroups=_list(_object(("groupName",), groupName=_TEXT, **_NETWORK_RULES)),
    ),
    tlsOptions=_object(enabled=_TRUTH),
    headGroupSpec=_object(
        ("template",),
        headService=_SERVICE,
        enableIngress=_TRUTH,
        serviceType=_TEXT,
        ingressOptions=_object(
            host=_TEXT,
            path=_TEXT,
            pathType=_enum("Exact", "Prefix", "ImplementationSpecific"),
            tls=_list(_of_kubernetes(_NET + "IngressTLS")),
        ),
        **_GROUP,
    ),
    rayVersion=_TEXT,
    workerGroupSpecs=_list(
        _object(
            ("groupName", "template"),  # minReplicas and maxReplicas have defaults
            groupName=_TEXT,
            replicas=_WHOLE,
            minReplicas=_WHOLE,
            maxReplicas=_WHOLE,
            numOfHosts=_WHOLE,
            idleTimeoutSeconds=_WHOLE,
            priority=_WHOLE,
            suspend=_TRUTH,
            scaleStrategy=_object(workersToDelete=_TEXTS),
            **_GROUP,
        )
    ),
)

_RAY_SERVICE = _object(
    rayClusterDeletionDelaySeconds={"type": "integer", "minimum": 0},
    serveService=_SERVICE,
    upgradeStrategy=_object(
        type=_enum("NewCluster", "NewClusterWithIncrementalUpgrade", "None"),
        clusterUpgradeOptions=_object(
            ("stepSizePercent", "intervalSeconds", "gatewayClassName"),
            maxSurgePercent=_WHOLE,
            stepSizePercent=_WHOLE,
            intervalSeconds=_WHOLE,
            gatewayClassName=_TEXT,
        ),
    ),
    managedBy=_MANAGER,
    serveConfigV2=_TEXT,
    rayClusterConfig=_CLUSTER,
    excludeHeadPodFromServeSvc=_TRUTH,
    suspend=_TRUTH,
)

_RELABELINGS = _list(
    _object(
        action=_TEXT,
        modulus=_WHOLE,
        regex=_TEXT,
        replacement=_TEXT,
        separator=_TEXT,
        sourceLabels=_TEXTS,
        targetLabel=_TEXT,
    )
)

_POD_MONITOR = _object(
    ("selector",),
    selector=_of_kubernetes(_META + "LabelSelector"),
    namespaceSelector=_object(any=_TRUTH, matchNames=_TEXTS),
    jobLabel=_TEXT,
    podTargetLabels=_TEXTS,
    sampleLimit=_WHOLE,
    targetLimit=_WHOLE,
    labelLimit=_WHOLE,
    podMetricsEndpoints=_list(
        _object(
            port=_TEXT,
            portNumber=_PORT,
            path=_TEXT,
            scheme=_enum("http", "https"),
            interval=_DURATION,
            scrapeTimeout=_DURATION,
            honorLabels=_TRUTH,
            honorTimestamps=_TRUTH,
            filterRunning=_TRUTH,
            params={"type": "object", "additionalProperties": _TEXTS},
            authorization=_object(type=_TEXT, credentials=_object(("key",), key=_TEXT, name=_TEXT, optional=_TRUTH)),
            relabelings=_RELABELINGS,
            metricRelabelings=_RELABELINGS,
        )
    ),
)

_RULE: Schema = {
    **_object(
        ("expr",),
        alert=_TEXT,
        record=_TEXT,
        expr={"type": ["string", "integer"]},
        labels=_TEXT_BY_NAME,
        annotations=_TEXT_BY_NAME,
        **{"for": _DURATION, "keep_firing_for": _DURATION},
    ),
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
}
_RULES = _object(
    ("groups",),
    groups=_list(
        _object(
            ("name", "rules"),
            name={"type": "string", "minLength": 1},
            interval=_DURATION,
            limit=_WHOLE,
            labels=_TEXT_BY_NAME,
            query_offset=_DURATION,
            rules=_list(_RULE),
        )
    ),
)

SCHEMAS = {
    (api, kind): _kind(api, kind, spec)
    for api, kind, spec in (
        ("ray.io/v1", "RayService", _RAY_SERVICE),
        ("ray.io/v1", "RayCluster", _CLUSTER),
        ("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
        ("monitoring.coreos.com/v1", "PrometheusRule", _RULES),
    )
}


@cache
def _registry(version: str) -> Registry[Any]:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return Resource.from_contents(json.loads((folder / "_definitions.json").read_text())) @ Registry()


def schema_faults(document: dict[str, Any], version: str) -> list[str]:
    """What the schema of a kind in ``SCHEMAS`` does not allow, with pod templates as a version of Kubernetes has them."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[document["apiVersion"], document["kind"]], registry=_registry(version))
    errors = sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
    return [described(error) for error in errors]


def described(error: jsonschema.ValidationError) -> str:
    """Where it is and what it is; of what is long the end, for what is wrong stands behind the value."""
    text = error.message if len(error.message) <= 300 else f"... {error.message[-300:]}"
    return f"{'.'.join(map(str, error.absolute_path))}: {text}"
