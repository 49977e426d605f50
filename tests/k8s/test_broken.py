"""Manifests with one fault each: its check finds it, and says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.k8s.checks import CHECKS
from tests.k8s.manifests import Document, overlay, title

GONE = object()
RAY, REDIS = "RayService outrider", "StatefulSet outrider-redis"
CLUSTER = "spec rayClusterConfig"
HEAD = f"{CLUSTER} headGroupSpec"
API, ENGINE = f"{CLUSTER} workerGroupSpecs 0", f"{CLUSTER} workerGroupSpecs 1"
HEAD_RAY, API_RAY, ENGINE_RAY = (f"{group} template spec containers 0" for group in (HEAD, API, ENGINE))
API_POD, ENGINE_POD = f"{API} template spec", f"{ENGINE} template spec"
CACHE = "spec template spec containers 0"
OVERLAY, LOOKAHEAD, COMPARE = "dgx-8xa100", "dgx-8xa100-lookahead", "dgx-8xa100-compare"

# The title of a document; a path in it, keys and indices divided by spaces; what is put there (nothing if it is GONE; what a
# function makes of what is there); words of the message; the overlay, if it is another one.
Change = tuple[Any, ...]


def changed(document: str, path: str, value: Any, overlay_name: str) -> list[Document]:
    """A good overlay with one change."""
    documents = overlay(overlay_name)
    (node,) = [one for one in documents if title(one) == document]
    *parents, last = [int(part) if part.isdigit() else part for part in path.split()]
    for parent in parents:
        node = node[parent]
    if value is GONE:
        del node[last]
    else:
        node[last] = value(node[last]) if callable(value) else value
    return documents


def text(old: str, new: str) -> Callable[[str], str]:
    """Replaces a part of a text."""

    def replace(value: str) -> str:
        assert old in value
        return value.replace(old, new)

    return replace


def serve(old: str, new: str, fault: str, overlay_name: str = OVERLAY) -> Change:
    """A change of ``serveConfigV2``."""
    return RAY, "spec serveConfigV2", text(old, new), fault, overlay_name


def policy(name: str, path: str, value: Any, fault: str) -> Change:
    """A change of a NetworkPolicy."""
    return f"NetworkPolicy {name}", f"spec {path}", value, fault


def unused(path: str, *names: str) -> list[Change]:
    """Fields that no manifest has, each put at a path of the RayService."""
    return [(RAY, f"{path} {name}", "x", f"'{name}' was unexpected") for name in names]


def dashboard(query: str) -> Change:
    """The dashboard's variable asks for something else."""

    def change(old: str) -> str:
        document = json.loads(old)
        document["templating"]["list"][1]["query"] = query
        return json.dumps(document)

    return "ConfigMap outrider-dashboard", "data outrider.json", change


COMPONENT = {"matchLabels": {"app.kubernetes.io/component": "proxy"}}
# fmt: off
OF_SCHEMA = [
    (RAY, f"{ENGINE_RAY} imagePullPolciy", "Always", "'imagePullPolciy' was unexpected"),
    (RAY, f"{CLUSTER} headGroupSpecs", {}, "'headGroupSpecs' was unexpected"),
    (RAY, f"{HEAD} rayStartParams num-cpus", 0, "0 is not of type 'string'"),
    (RAY, f"{ENGINE} rayStartParams num-gpus", 8, "8 is not of type 'string'"),
    (RAY, "spec upgradeStrategy type", "InPlace", "'InPlace' is not one of"),
    (RAY, f"{API} groupName", GONE, "'groupName' is a required property"),
    (REDIS, "spec replicas", "one", "'one' is not of type 'integer'"),
    (REDIS, f"{CACHE} readinessProbe exec cmd", ["true"], "'cmd' was unexpected"),
    (REDIS, "spec template spec hostnameOverride", "redis", "(Kubernetes 1.31)"),
    ("PodDisruptionBudget outrider-api", "apiVersion", "policy/v1beta1", "no kind policy/v1beta1/PodDisruptionBudget"),
    ("NetworkPolicy dns", "spec egress 0 port", 53, "'port' was unexpected"),
    ("PodMonitor outrider", "spec podMetricsEndpoints 0 interval", "15 seconds", "does not match"),
    ("PrometheusRule outrider", "spec groups 0 rules 0 record", "name", "'record' was unexpected"),
    # What KubeRay refuses in a RayService, beside what is used, or unless a feature gate is on; or reads no more.
    *unused("spec", "serviceUnhealthySecondThreshold"),
    *unused(CLUSTER, "networkPolicy", "tlsOptions", "historyServerOptions", "upgradeStrategy", "autoscalerOptions"),
    *unused(f"{CLUSTER} authOptions", "enableK8sTokenAuth"),
    *unused(f"{CLUSTER} gcsFaultToleranceOptions", "backend", "storage", "externalStorageNamespace", "redisUsername"),
    *unused(HEAD, "headService", "resources"),
    *unused(f"{HEAD} rayStartParams", "redis-password", "redis-username", "labels"),
    *unused(ENGINE, "suspend", "idleTimeoutSeconds", "priority", "numOfHosts"),
    (RAY, f"{CLUSTER} enableInTreeAutoscaling", True, "True is not one of [False]"),
    (RAY, "spec upgradeStrategy type", "NewClusterWithIncrementalUpgrade", "is not one of"),
]
OF_VALUES = [
    (RAY, f"{ENGINE_RAY} resources limits memory", "256GiB", "'256GiB', which is no quantity"),
    (RAY, f"{API_RAY} resources requests cpu", "8", "requests cpu 8, above its limit of 4"),
    (RAY, f"{ENGINE_RAY} resources requests nvidia.com/gpu", "4", "devices are whole, and requested as limited"),
    (RAY, f"{ENGINE_RAY} resources limits gpu", "8", "gpu is no resource"),
    (RAY, f"{API_RAY} imagePullPolicy", "Now", "imagePullPolicy is 'Now'; allowed: Always"),
    (RAY, f"{ENGINE_POD} topologySpreadConstraints 0 whenUnsatisfiable", "Never", "'Never'; allowed: DoNotSchedule"),
    (RAY, f"{ENGINE_POD} tolerations 0 operator", "In", "operator is 'In'; allowed: Equal, Exists"),
    (RAY, f"{API_POD} volumes 2 emptyDir sizeLimit", "2 Gi", "sizeLimit is '2 Gi', which is no quantity"),
    (REDIS, "spec volumeClaimTemplates 0 spec resources requests storage", "ten", "'ten', which is no quantity"),
    (REDIS, "spec volumeClaimTemplates 0 spec accessModes 0", "ReadWrite", "'ReadWrite'; allowed: ReadOnlyMany"),
    ("NetworkPolicy dns", "spec egress 0 ports 0 protocol", "udp", "protocol is 'udp'; allowed: SCTP"),
    ("NetworkPolicy dns", "spec policyTypes 0", "egress", "policyTypes.0 is 'egress'; allowed: Egress"),
    ("Service outrider-redis", "metadata name", "Outrider_Redis", "metadata.name is 'Outrider_Redis'"),
    ("ConfigMap outrider-env", "metadata namespace", "default", "namespace is default, not outrider"),
    ("PodMonitor outrider", "metadata namespace", GONE, "namespace is None, not outrider"),
    ("Namespace outrider", "metadata name", "outriders", "no Namespace outrider"),
    ("ConfigMap outrider-redis", "metadata name", "outrider-env", "ConfigMap outrider-env is there twice"),
    (RAY, "metadata labels tier", "the first", "'the first' is no label"),
    (RAY, f"{API_RAY} ports 0 name", "openai-compatible", "port 'openai-compatible' is not of 1 to 15"),
    (RAY, f"{API_RAY} volumeMounts 1 mountPath", "/tmp", "two volumes are mounted at /tmp"),
]
OF_KUBERAY = [
    (RAY, f"{HEAD} rayStartParams num-cpus", "4", 'num-cpus must be "0"'),
    (RAY, f"{HEAD_RAY} ports 1", GONE, "ports: no dashboard"),
    (RAY, f"{HEAD} template metadata labels app.kubernetes.io/name", "outrider", "leave it out"),
    (RAY, f"{HEAD_RAY} env 0", {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}, "RAY_REDIS_ADDRESS in the environment"),
    ("ConfigMap outrider-env", "data REDIS_PASSWORD", "x", "REDIS_PASSWORD in the environment is refused"),
    ("ConfigMap outrider-env", "data REDIS_USERNAME", "x", "REDIS_USERNAME in the environment is refused"),
    ("ConfigMap outrider-env", "data RAY_enable_autoscaler_v2", "1", "refused without enableInTreeAutoscaling"),
    (RAY, "metadata annotations", {"ray.io/ft-enabled": "true"}, "annotation ray.io/ft-enabled is refused"),
    (RAY, "metadata annotations", {"ray.io/initializing-timeout": "ten"}, "is no positive duration"),
    (RAY, "metadata name", "outrider-" + "x" * 39, "at most 47"),
    (RAY, "metadata name", "8xa100", "beginning with a letter"),
    (RAY, f"{CLUSTER} rayVersion", "2.51.1", "token needs rayVersion 2.52.0"),
    (RAY, f"{ENGINE} minReplicas", 2, "minReplicas (2) <= replicas (1) <= maxReplicas (1) does not hold"),
    (RAY, f"{ENGINE} groupName", "api", "two worker groups are named api"),
    (RAY, f"{ENGINE} groupName", "Engine.A100", "group 'Engine.A100': the name is not of a-z"),
    (RAY, f"{API} rayStartParams resources", '{"outrider_api": 1}', "KubeRay needs it in quotes"),
]
OF_SERVE = [
    serve("      port: 8000\n      replicas", "      port: 8080\n      replicas", "server.port 0.0.0.0 and 8080"),
    serve("max_running: 32", "max_running: 16", "is not what the command in its first line makes"),
    serve("# outrider", "# Outrider", "the first line is not the command"),
    serve("single_gpu.yaml", "single_gpus.yaml", "the command in its first line fails: no config file"),
    serve("proxy_location: EveryNode", "proxy_location: Everywhere", "proxy_location"),
    serve("proxy_location: EveryNode", "proxy_locations: EveryNode", "unknown key proxy_locations"),
    serve("  port: 8000\napplications", "  ports: 8000\napplications", "unknown key http_options.ports"),
    serve("  route_prefix: /", "  route_prefixes: /", "unknown key applications.0.route_prefixes"),
    serve(
        "  route_prefix: /", "  deployments: [{name: engine, ray_actor_options: {num_gpu: 1}}]",
        "unknown key applications.0.deployments.0.ray_actor_options.num_gpu"),
    serve("cluster.app:build_app", "cluster.app:build", "import_path cluster.app:build: module 'cluster.app' has no attribute"),
    serve("cluster.app:build_app", "cluster.app:capacity", "is no function of one Config"),
    serve("max_running: 32", "max_runing: 32", "args.engine.max_runing"),
    serve("max_running: 32", "max_running: 0", "args: engine.max_running is 0; allowed: 1 to 4096"),
    serve("anonymous: null", "anonymous: me", "tenancy.anonymous is 'me'"),
    serve("admin_port: 8001", "admin_port: 9000", "server.admin_port is 9000, and the container's port admin 8001"),
    serve("admin_host: 0.0.0.0", "admin_host: 127.0.0.1", "Prometheus does not reach it"),
    serve("api_resource: outrider_api", "api_resource: outrider_http", "server.api_resource is outrider_http"),
    serve("      replicas: 8", "      replicas: 9", "group 9 of 9, 1 ranks, finds no 4 CPU and 1 GPU in the pods"),
    serve("      replicas: 1", "      replicas: 2", "group 2 of 2, 8 ranks, finds no", LOOKAHEAD),
    serve("api_replicas: 2", "api_replicas: 3", "group api: 2 pods, and server.api_replicas is 3"),
    serve("      replicas: 2", "      replicas: 3", "group 3 of 3, 4 ranks, finds no", "dgx-8xa100-2x4"),
    serve("world_size: 8", "world_size: 16", "group 1 of 1, 16 ranks, finds no", LOOKAHEAD),
    serve("cpus_per_replica: 4", "cpus_per_replica: 9", "finds no 72 CPU and 8 GPU in one pod", LOOKAHEAD),
    serve("shadow: 0.05", "shadow: 1.5", "args: baseline.shadow is 1.5; allowed: 0 to 1", COMPARE),
    serve("shadow: 0.05", "shadows: 0.05", "args.baseline.shadows", COMPARE),
    serve("      enabled: true\n      kind: tensor", "      kind: tensor", "baseline.shadow is 0.05, but there is no", COMPARE),
    serve("kind: tensor", "kind: sliced", "args.baseline.kind", COMPARE),
    serve("      world_size: 4\n      shadow", "      world_size: 5\n      shadow", "group 2 of 2, 5 ranks, finds no", COMPARE),
    serve("world_size: 4\n      placement", "world_size: 5\n      placement", "group 2 of 2, 4 ranks, finds no", COMPARE),
    serve("world_size: 2\n      shadow", "world_size: 3\n      shadow", "group 2 of 2, 3 ranks, finds no 3 CPU", "cpu-compare"),
    serve("      replicas: 32", "      replicas: 3", "4 engine pods for 3 replicas", "multi-node"),
    serve("device: cuda", "device: auto", "say cpu or cuda"),
    serve("stop_timeout_s: 30", "stop_timeout_s: 90", "terminationGracePeriodSeconds is not above server.stop_timeout_s"),
    serve("@outrider-redis:", "@redis:", "redis_url is at redis, and no Service has that name"),
    serve("-redis:6379", "-redis:6380", "redis_url is at outrider-redis:6380, and no pod listens there"),
    serve("rediss:", "redis:", "would travel in the clear"),
    serve("redis/ca.crt", "redis/tls.crt", "ssl_ca_certs is /etc/outrider/redis/tls.crt, and no volume has that file"),
    serve("keys/keys.yaml", "keys/tenants.yaml", "tenancy.keys_file is /etc/outrider/keys/tenants.yaml"),
    serve("path: /models/model", "path: /model", "/model, the model, is under no mounted volume"),
    (RAY, f"{CLUSTER} rayVersion", "2.59.0", "rayVersion is 2.59.0, and constraints.txt has ray==2.60.0"),
    (RAY, f"{API} rayStartParams resources", GONE, "none does"),
    (RAY, f"{ENGINE} rayStartParams resources", '"{\\"outrider_api\\": 1}"', "group api, RayService outrider, group engine does"),
    (RAY, f"{ENGINE_RAY} resources limits nvidia.com/gpu", "4", "group 5 of 8, 1 ranks, finds no"),
    (RAY, f"{ENGINE} replicas", 1, "group 2 of 2, 1 ranks, finds no 1 CPU", "cpu-demo"),
    (RAY, f"{API_RAY} ports 0 containerPort", 8010, "the container's port serve 8010"),
    (RAY, f"{HEAD_RAY} volumeMounts 3", GONE, "head: tenancy.keys_file"),
    (RAY, f"{ENGINE_RAY} volumeMounts 5", GONE, "/models/model, the model, is under no mounted volume"),
    (RAY, f"{ENGINE_RAY} envFrom 1", GONE, "no OUTRIDER_CACHE_SECRET"),
    (RAY, f"{API_RAY} envFrom 1", GONE, "no OUTRIDER_REDIS_PASSWORD"),
    ("ConfigMap outrider-env", "data RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "1", "cluster.cli.launch.serve sets 0"),
]
OF_SELECTORS = [
    ("Service outrider-redis", "spec selector app.kubernetes.io/component", "cache", "selects no pod"),
    ("Service outrider-redis", "spec ports 0 targetPort", "tls", "targetPort tls is declared by no container"),
    (REDIS, "spec selector", COMPONENT, "does not select its own pods"),
    (REDIS, "spec serviceName", "redis", "serviceName is redis, and there is no such Service"),
    ("PodDisruptionBudget outrider-api", "spec selector", COMPONENT, "selects no pod"),
    ("PodDisruptionBudget outrider-engine", "spec minAvailable", "50%", "needs minAvailable as a number"),
    ("PodDisruptionBudget outrider-engine", "spec", lambda spec: {"maxUnavailable": 1, "selector": spec["selector"]},
        "no maxUnavailable"),
    ("PodDisruptionBudget outrider-engine", "spec minAvailable", 2, "minAvailable is 2, and there are 1 pods"),
    ("PodDisruptionBudget outrider-engine", "spec selector", {}, "both select it"),
    ("PodMonitor outrider", "spec selector", COMPONENT, "selects no pod"),
    ("PodMonitor outrider", "spec podMetricsEndpoints 0 port", "metric", "port metric is declared by no container"),
    ("PodMonitor outrider", "spec podMetricsEndpoints", [], "it scrapes nothing"),
    (RAY, f"{ENGINE_POD} topologySpreadConstraints 0 labelSelector", COMPONENT, "does not select the pods"),
    (RAY, f"{CLUSTER} gcsFaultToleranceOptions redisAddress", "redis:6379", "no pod is behind such a Service"),
    (RAY, "spec serveConfigV2", "", "serveConfigV2 is empty"),
]
OF_NETWORK = [
    policy("default-deny", "policyTypes", ["Ingress"], "no NetworkPolicy denies all ingress and egress by default"),
    policy("default-deny", "ingress", [{}], "a client may reach StatefulSet outrider-redis on port 6379"),
    policy("clients", "podSelector", COMPONENT, "a client cannot reach RayService outrider, group api on port 8000"),
    policy("clients", "podSelector", COMPONENT, "selects no pod"),
    policy("clients", "podSelector", {}, "a client may reach RayService outrider, head on port 8000"),
    policy("clients", "ingress 0 ports", GONE, "a client may reach RayService outrider, group api on port 8001"),
    policy("clients", "ingress 0 ports 0 endPort", 8001, "a client may reach RayService outrider, group api on port 8001"),
    policy("clients", "ingress 0 from 0", {"namespaceSelector": {}}, "a pod of another namespace may reach"),
    policy("clients", "ingress 0 from 0", {"podSelector": {}}, "another pod of the namespace may reach"),
    policy("clients", "ingress 0 from", [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "the internet may reach RayService outrider"),
    policy("head", "ingress 0 ports 0 port", 8266, "KubeRay's operator cannot reach RayService outrider, head on port 8265"),
    policy("head", "ingress 0 from 0 namespaceSelector", {}, "a client may reach RayService outrider, head on port 8265"),
    policy("head", "egress", [], "RayService outrider, head cannot reach StatefulSet outrider-gcs-redis on port 6379"),
    policy("head", "policyTypes", ["Ingress"], "policyTypes leaves Egress out"),
    policy("monitoring", "ingress 0 ports 0 port", 9000, "Prometheus cannot reach RayService outrider, group api on port 8001"),
    policy("monitoring", "podSelector", {}, "Prometheus may reach StatefulSet outrider-redis on port 8001"),
    policy("ray", "ingress 0 ports", [{"port": 6379}], "group engine cannot reach RayService outrider, group api on port 10002"),
    policy("ray", "egress 1 ports 0 port", 6380, "group engine cannot reach StatefulSet outrider-redis on port 6379"),
    policy("ray", "egress 0 to 0 podSelector matchExpressions 0 values", ["head", "api"], "engine cannot reach RayService"),
    policy("ray", "egress 1", {}, "group engine may reach the internet on port 443"),
    policy("redis", "ingress 0 from 0 podSelector", {}, "another pod of the namespace may reach StatefulSet outrider-redis"),
    policy("redis", "egress", [{}], "policyTypes leaves Egress out"),
    policy("dns", "egress 0 ports 0", GONE, "cannot reach DNS on port 53 by UDP"),
    policy("dns", "egress 0 ports", GONE, "StatefulSet outrider-redis may reach DNS on port 22"),
    policy("dns", "podSelector", COMPONENT, "group api cannot reach DNS on port 53"),
    policy("dns", "egress 0 to 1", GONE, "group engine cannot reach NodeLocal DNS on port 53"),
    policy("dns", "egress 0 to 1", GONE, "group engine cannot reach NodeLocal DNS on port 53 by UDP"),
    policy("dns", "egress 0 to 2", GONE, "group engine cannot reach kubespray's NodeLocal DNS on port 53"),
    ("PodMonitor outrider", "spec podMetricsEndpoints 0 port", "serve", "Prometheus cannot reach"),
]
OF_REFERENCES = [
    (RAY, f"{API_RAY} envFrom 0 configMapRef name", "outrider-envs", "there is no ConfigMap outrider-envs"),
    (RAY, f"{API_RAY} envFrom 1 secretRef name", "cache", "secret cache is none that k8s/secrets.sh makes"),
    (RAY, f"{API_POD} volumes 3 secret secretName", "keys", "secret keys is none"),
    (RAY, f"{API_POD} volumes 4 secret items 0 key", "ca.pem", "secret outrider-redis-tls has no key ca.pem"),
    (RAY, f"{API_POD} volumes 5 persistentVolumeClaim claimName", "models", "no PersistentVolumeClaim models"),
    (RAY, f"{API_POD} volumes 0", GONE, "tmp is mounted, and there is no such volume"),
    (RAY, f"{API_RAY} volumeMounts 0", GONE, "volume tmp is mounted nowhere"),
    (RAY, f"{CLUSTER} authOptions secretName", "outrider-keys", "has no key auth_token"),
    (RAY, f"{CLUSTER} gcsFaultToleranceOptions redisPassword valueFrom secretKeyRef key", "secret", "has no key secret"),
    (RAY, f"{API_POD} serviceAccountName", "outrider", "there is no ServiceAccount outrider"),
    (REDIS, "spec template spec volumes 0 configMap name", "redis", "there is no ConfigMap redis"),
    (REDIS, f"{CACHE} volumeMounts 1 subPath", "conf", "outrider-redis has no key conf"),
    ("ConfigMap outrider-redis", "data", {"other": ""}, "ConfigMap outrider-redis has no key redis.conf"),
    (REDIS, "spec volumeClaimTemplates 0 metadata name", "disk", "data is mounted, and there is no such volume"),
    ("StatefulSet outrider-gcs-redis", "spec template spec containers 0 env 0 valueFrom secretKeyRef name",
        "outrider-redis", "secret outrider-redis is none"),
]
OF_SECURITY = [
    (RAY, f"{API_RAY} image", "registry.example.com:5000/outrider", "has neither tag nor digest"),
    (REDIS, f"{CACHE} image", "redis:latest", "latest is another one tomorrow"),
    (RAY, f"{API_POD} securityContext runAsNonRoot", GONE, "runAsNonRoot is not true"),
    (RAY, f"{API_POD} securityContext runAsUser", 0, "runAsUser is not set"),
    (RAY, f"{API_POD} securityContext seccompProfile", GONE, "seccompProfile is not RuntimeDefault"),
    (RAY, f"{API_RAY} securityContext allowPrivilegeEscalation", True, "allowPrivilegeEscalation is not false"),
    (RAY, f"{API_RAY} securityContext capabilities drop", ["NET_RAW"], "capabilities are not all dropped"),
    (RAY, f"{API_RAY} securityContext capabilities add", ["SYS_PTRACE"], "capabilities are not all dropped"),
    (REDIS, f"{CACHE} securityContext readOnlyRootFilesystem", False, "is not true"),
    (REDIS, f"{CACHE} image", "redis:7.4.9-bookworm", "'redis:7.4.9-bookworm' is older than 7.4.10"),
    (REDIS, f"{CACHE} image", "docker.io/library/redis:8.0.6", "'docker.io/library/redis:8.0.6' is not of a supported"),
    (REDIS, f"{CACHE} image", "valkey/valkey:8.1.8-alpine", "'valkey/valkey:8.1.8-alpine' is older than 8.1.9"),
    (REDIS, f"{CACHE} image", "redis:7.4", "'redis:7.4' has no version of three numbers"),
    (RAY, f"{API_RAY} resources limits memory", GONE, "resources.limits has no memory"),
    (REDIS, f"{CACHE} resources requests cpu", GONE, "resources.requests has no cpu"),
    (RAY, f"{API_POD} automountServiceAccountToken", GONE, "automountServiceAccountToken is not false"),
    (RAY, f"{API_POD} hostNetwork", True, "hostNetwork is true"),
    (RAY, f"{API_POD} volumes 5", {"name": "models", "hostPath": {"path": "/"}}, "hostPath is not allowed"),
    (RAY, f"{API_POD} volumes 0 emptyDir sizeLimit", GONE, "emptyDir without sizeLimit"),
    (RAY, f"{API_RAY} volumeMounts 0", GONE, "no volume to write to at /tmp"),
    (RAY, f"{API_RAY} volumeMounts 1 readOnly", True, "no volume to write to at /home/ray"),
    ("ConfigMap outrider-env", "data HOME", "/root", "no volume to write to at /root"),
    (RAY, f"{API_POD} volumes 2 emptyDir medium", GONE, "/dev/shm is not in memory"),
    (RAY, f"{API_POD} volumes 2 emptyDir sizeLimit", "16Gi", "/dev/shm may be 16Gi, more than the container's memory"),
    (RAY, f"{API} rayStartParams object-store-memory", "3000000000", "object-store-memory is 3000000000"),
    (REDIS, f"{CACHE} volumeMounts 0 readOnly", True, "no volume is there to write to"),
    ("Namespace outrider", "metadata labels", {}, "pod-security.kubernetes.io/enforce is not restricted"),
]
QUERY = "spec groups 0 rules 0 expr"
DASHBOARD: Change = ("ConfigMap outrider-dashboard", "data outrider.json")
OF_MONITORING = [
    ("PrometheusRule outrider", QUERY, "absent(outrider:replicas", "OutriderAbsent: absent(outrider:replicas: "),
    ("PrometheusRule outrider", QUERY, "absent(outrider:replica)", "there is no metric outrider:replica"),
    (*DASHBOARD, text("outrider:replicas", "outrider:replica"), "there is no metric outrider:replica"),
    (*DASHBOARD, text("$model", "$mode"), "$mode is no variable of the dashboard"),
    (*DASHBOARD, text("{", "{,"), "not JSON"),
    (*dashboard("label_values(vllm:num_requests_running, model)"), "vllm:num_requests_running has no label model"),
    (*dashboard("query_result(vllm:num_requests_running)"), "is not label_values(METRIC, LABEL)"),
]
MAKER, HEAD_MAKER = f"{API_POD} initContainers 0", f"{HEAD} template spec initContainers 0"
AUTHORITY_VOLUME = {"name": "authority", "mountPath": "/etc/outrider/authority"}
OF_TLS = [
    (RAY, f"{ENGINE_RAY} env", [], "is set in RayService outrider, head, and not in RayService outrider, group engine"),
    (RAY, f"{HEAD_RAY} env 1 value", "0", "is set in RayService outrider, group api, and not in"),
    (RAY, f"{API_RAY} env", [], "and not in RayService outrider, group api"),
    (RAY, f"{API_RAY} env 3", GONE, "group api: RAY_TLS_SERVER_KEY is not in the container's env"),
    (RAY, f"{API_RAY} env 4 value", "/etc/ca.crt", "are not in one mounted volume"),
    (RAY, f"{API_RAY} volumeMounts 6", GONE, "are not in one mounted volume"),
    (RAY, f"{API_RAY} volumeMounts 0", AUTHORITY_VOLUME, "container ray: it sees the authority's key"),
    (RAY, f"{API_POD} volumes 8 emptyDir medium", GONE, "with the pod's key, is not in memory"),
    (RAY, f"{API_POD} initContainers", GONE, "no init container makes a certificate in volume tls"),
    (RAY, f"{MAKER} volumeMounts 2 readOnly", True, "no init container makes a certificate in volume tls"),
    (RAY, f"{MAKER} volumeMounts 1", GONE, "does not see the authority"),
    (RAY, f"{MAKER} env 0 valueFrom fieldRef fieldPath", "status.hostIP", "is not told POD_IP, status.podIP"),
    (RAY, f"{HEAD_MAKER} args", [], "is not told $(FQ_RAY_IP)"),
    (RAY, f"{CLUSTER} gcsFaultToleranceOptions redisAddress", "outrider-gcs-redis:6379", "would travel in the clear"),
    ("ConfigMap outrider-env", "data RAY_REDIS_CA_CERT", GONE, "RAY_REDIS_CA_CERT is None"),
]
JOB, JOB_RAY = "Job outrider-scaling", "spec template spec containers 0"
OF_JOBS = [
    (JOB, f"{JOB_RAY} command", ["outrider", "bench", "scale"], "is not outrider bench scaling"),
    (JOB, f"{JOB_RAY} args 6", "--worker-count=8", "its options are refused: "),
    (JOB, f"{JOB_RAY} args 6", "--workers=2,2", "--workers must name no number twice"),
    (JOB, f"{JOB_RAY} args 6", "--workers=1,16", "--workers goes to 16, and it has 8 GPUs"),
    (JOB, f"{JOB_RAY} args 8", "--records=8", "--clients goes to 64, and there are 8 prompts"),
    (JOB, f"{JOB_RAY} args 0", "--model=/model", "/model is under no mounted volume"),
    (JOB, f"{JOB_RAY} args 11", "--out=/tmp", "--out /tmp is no claim to write to"),
]
PRODUCTS = "affinity nodeAffinity requiredDuringSchedulingIgnoredDuringExecution nodeSelectorTerms 0 matchExpressions 0 values"
OF_DEVICES = [
    (RAY, f"{ENGINE_POD} runtimeClassName", GONE, "group engine: runtimeClassName is None, not nvidia"),
    (JOB, "spec template spec runtimeClassName", "runc", "Job outrider-scaling: runtimeClassName is runc, not nvidia"),
    (RAY, f"{ENGINE_POD} tolerations", [], "does not tolerate the taint nvidia.com/gpu"),
    (RAY, f"{ENGINE_POD} affinity", GONE, "gpu.product does not name NVIDIA-H200, NVIDIA-H200-NVL: on nodes with H200"),
    (RAY, f"{ENGINE_POD} {PRODUCTS}", ["NVIDIA-A100-SXM4-80GB"], "NVIDIA-H100-PCIe: on nodes with H100 the pod stays Pending"),
    (JOB, f"spec template spec {PRODUCTS} 2", "NVIDIA-A100-80GB-PCIe-MIG-1g.10gb", "MIG-1g.10gb, which is no whole A100"),
    (JOB, f"spec template spec {PRODUCTS} 8", "NVIDIA-H200-NVL-SHARED", "NVIDIA-H200-NVL-SHARED, which is no whole A100"),
]

# fmt: on
BROKEN: dict[str, list[Change]] = {
    "schema": OF_SCHEMA,
    "values": OF_VALUES,
    "kuberay": OF_KUBERAY,
    "serve": OF_SERVE,
    "selectors": OF_SELECTORS,
    "network": OF_NETWORK,
    "references": OF_REFERENCES,
    "security": OF_SECURITY,
    "monitoring": OF_MONITORING,
    "tls": OF_TLS,
    "jobs": OF_JOBS,
    "devices": OF_DEVICES,
}
CASES = [
    pytest.param(check, document, path, value, fault, *(rest or [OVERLAY]), id=f"{check}: {fault}")
    for check, changes in BROKEN.items()
    for document, path, value, fault, *rest in changes
]


@pytest.mark.parametrize(("check", "document", "path", "value", "fault", "overlay_name"), CASES)
def test_a_fault_is_found_and_named(check: str, document: str, path: str, value: Any, fault: str, overlay_name: str) -> None:
    faults = CHECKS[check](changed(document, path, value, overlay_name))
    assert [found for found in faults if fault in found], faults


def test_each_check_finds_a_fault() -> None:
    assert BROKEN.keys() == CHECKS.keys()
