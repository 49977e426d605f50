"""Every rendered overlay passes every check, each check finds the faults of a table, and documents name what exists."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.cli.launch.serve_config import serve_config_text
from outrider.configs.schema import keys
from tests.k8s.checks import CHECKS, query_faults, uses_tls
from tests.k8s.manifests import (
    GPU,
    K8S,
    OVERLAYS,
    REPOSITORY,
    kustomize,
    load_all,
    monitoring,
    overlay,
    quantity,
    ray_pods,
    resource,
    title,
)
from tests.k8s.serve import command, configuration

INSTALL, RUNBOOK, UPGRADE = ((REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("install", "runbook", "upgrade"))


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("check", CHECKS)
def test_an_overlay_has_no_fault(name: str, check: str) -> None:
    assert list(CHECKS[check](overlay(name))) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_use_tls_but_in_the_demo(name: str) -> None:
    documents = overlay(name)
    assert {uses_tls(documents, pods) for pods in ray_pods(documents)} == {not name.startswith("cpu-")}


def test_the_overlay_that_is_applied_has_eight_replicas_of_one_gpu() -> None:
    documents = overlay("dgx-8xa100")
    config = configuration(documents)
    assert (config.server.replicas, config.server.gpus_per_replica, config.parallelism.mode) == (8, 1, "none")
    assert [(pods.count, resource(pods.ray, GPU)) for pods in ray_pods(documents) if resource(pods.ray, GPU)] == [(1, 8)]


def test_every_overlay_is_rendered_and_documented() -> None:
    table = INSTALL.split("| overlay |")[1].split("\n\n")[0]
    documented = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert sorted(path.name for path in (K8S / "overlays").iterdir()) == OVERLAYS == sorted(documented) != []


def test_every_alert_is_in_the_runbook() -> None:
    groups = load_all((K8S / "monitoring" / "alerts.yaml").read_text())[0]["spec"]["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert re.findall(r"^\| (Outrider\w+) \|", RUNBOOK, re.MULTILINE) == alerts


def test_the_keys_that_pages_name_exist() -> None:
    known = {*keys(), "tenancy.tenants"}  # which only a file can set
    sections = {key.partition(".")[0] for key in known}
    named = re.findall(r"`(\w+\.\w+)(?:=[^`]*|: [^`]*)?`", INSTALL + RUNBOOK + UPGRADE)
    assert named and {name for name in named if name.partition(".")[0] in sections} <= known


@pytest.mark.skipif(kustomize() is None, reason="no kustomize on the PATH, nor at KUSTOMIZE")
def test_kustomize_builds_what_is_rendered(tmp_path: Path) -> None:
    program = str(kustomize())
    subprocess.run([K8S / "render.sh", tmp_path], env=os.environ | {"KUSTOMIZE": program}, check=True, timeout=120)
    made, kept = ({path.name: path.read_text() for path in folder.iterdir()} for folder in (tmp_path, K8S / "rendered"))
    assert made == kept, "run k8s/render.sh"
    built = subprocess.run([program, "build", K8S / "monitoring"], capture_output=True, text=True, check=True, timeout=60)
    assert sorted(load_all(built.stdout), key=title) == sorted(monitoring(), key=title)


@pytest.mark.parametrize(("text", "number"), [("250m", 0.25), ("1Gi", 2**30), ("2e3", 2000), ("1E", 1e18), ("0.5", 0.5), (4, 4)])
def test_quantities(text: object, number: float) -> None:
    assert float(quantity(text)) == number


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(outrider:steps_total[$__rate_interval])", "unclosed left parenthesis"),
        ("rate(outrider:steps_total)", "expected type matrix"),
        ("max_over_time(sum(outrider:replica)[5m:1m])", "no metric outrider:replica"),
        ("vector(1)", "no metric"),
        ("outrider:replicas + $mode", "$mode is no variable"),
    ],
)
def test_a_bad_query_is_found(query: str, fault: str) -> None:
    assert fault in next(query_faults(query, {"model"}))
    good = 'sum by (engine) (rate(outrider:steps_total{model_name=~"$model"}[5m]))'
    assert list(query_faults(good, {"model"})) == []


GONE = object()
RAY, REDIS, JOB = "RayService outrider", "StatefulSet outrider-redis", "Job outrider-scaling"
CLUSTER, POD = "spec rayClusterConfig", "spec template spec"
HEAD, API, ENGINE = f"{CLUSTER} headGroupSpec", f"{CLUSTER} workerGroupSpecs 0", f"{CLUSTER} workerGroupSpecs 1"
API_POD, ENGINE_POD = (f"{group} template spec" for group in (API, ENGINE))
HEAD_RAY, API_RAY, ENGINE_RAY = (f"{group} template spec containers 0" for group in (HEAD, API, ENGINE))
CACHE = f"{POD} containers 0"
OTHER = {"matchLabels": {"app.kubernetes.io/component": "proxy"}}
LOOKAHEAD, COMPARE = "dgx-8xa100-lookahead", "dgx-8xa100-compare"
PRODUCTS = "affinity nodeAffinity requiredDuringSchedulingIgnoredDuringExecution nodeSelectorTerms 0 matchExpressions 0 values"
# What a function makes of the present value.
Change = Callable[[str], str]


def replaced(old: str, new: str) -> Change:
    def change(value: str) -> str:
        assert old in value
        return value.replace(old, new)

    return change


def with_settings(*overrides: str) -> Change:
    """Make ``serveConfigV2`` with more overrides."""

    def change(value: str) -> str:
        config, before = command(value)
        with contextlib.chdir(REPOSITORY):
            return serve_config_text(config, [*before, *overrides])

    return change


def serve(*overrides: str, fault: str, name: str = "dgx-8xa100") -> tuple[Any, ...]:
    return RAY, "spec serveConfigV2", with_settings(*overrides), fault, name


def policy(name: str, path: str, value: Any, fault: str) -> tuple[Any, ...]:
    return f"NetworkPolicy {name}", f"spec {path}", value, fault


# By check: a document; a path in it, keys and indices divided by spaces; the new value, or a function that makes it, or GONE;
# words of the fault; the overlay, if it is not dgx-8xa100.
# fmt: off
BROKEN: dict[str, list[tuple[Any, ...]]] = {
    "schema": [
        (RAY, f"{ENGINE_RAY} imagePullPolciy", "Always", "'imagePullPolciy' was unexpected"),
        (RAY, f"{API} groupName", GONE, "'groupName' is a required property"),
        (RAY, f"{CLUSTER} enableInTreeAutoscaling", True, "enableInTreeAutoscaling: False was expected"),
        (REDIS, f"{POD} hostnameOverride", "redis", "(1.31)"),
        ("PodDisruptionBudget outrider-api", "apiVersion", "policy/v1beta1", "no kind policy/v1beta1/PodDisruptionBudget"),
        ("PodDisruptionBudget outrider-engine", "spec minAvailable", "50%", "spec.minAvailable"),
        ("NetworkPolicy dns", "spec egress 0 ports 0 protocol", "udp", "'udp' is not one of"),
        ("PodMonitor outrider", "metadata namespace", GONE, "'namespace' is a required property"),
        ("ConfigMap outrider-env", "data REDIS_PASSWORD", "x", "'REDIS_PASSWORD' should not be valid"),
        ("ConfigMap outrider-redis", "metadata name", "outrider-env", "ConfigMap outrider-env is defined twice"),
        ("Namespace outrider", "metadata labels", {}, "'pod-security.kubernetes.io/enforce' is a required property"),
        (RAY, "metadata annotations", {"ray.io/ft-enabled": "true"}, "'ray.io/ft-enabled' should not be valid"),
        (RAY, f"{HEAD} rayStartParams num-cpus", "4", "'0' was expected"),
        (RAY, f"{HEAD_RAY} env 0 name", "RAY_REDIS_ADDRESS", "'RAY_REDIS_ADDRESS' should not be valid"),
        (RAY, f"{CLUSTER} gcsFaultToleranceOptions redisAddress", "outrider-gcs-redis:6379", "does not match '^rediss://'"),
        (RAY, f"{ENGINE_RAY} resources limits memory", "256GiB", "'256GiB' does not match"),
        (RAY, f"{API_RAY} resources limits memory", GONE, "'memory' is a required property"),
        (RAY, f"{API_RAY} image", "registry.example.com:5000/outrider", "does not match"),
        (RAY, f"{API_POD} securityContext runAsUser", 0, "0 is less than the minimum of 1"),
        (REDIS, f"{CACHE} securityContext readOnlyRootFilesystem", False, "True was expected"),
        (RAY, f"{API_POD} automountServiceAccountToken", GONE, "'automountServiceAccountToken' is a required property"),
        (RAY, f"{API_POD} hostNetwork", True, "False schema does not allow True"),
        (RAY, f"{API_POD} volumes 5", {"name": "models", "hostPath": {"path": "/"}}, "'hostPath' is not one of"),
        (RAY, f"{API_POD} volumes 0 emptyDir sizeLimit", GONE, "'sizeLimit' is a required property"),
    ],
    "references": [
        (RAY, f"{API_POD} volumes 3 secret secretName", "keys", "no Secret keys"),
        (RAY, f"{API_POD} volumes 4 secret items 0 key", "ca.pem", "Secret outrider-redis-tls has no key ca.pem"),
        (RAY, f"{CLUSTER} gcsFaultToleranceOptions redisPassword valueFrom secretKeyRef key", "secret", "has no key secret"),
        (RAY, f"{API_POD} volumes 5 persistentVolumeClaim claimName", "models", "no PersistentVolumeClaim models"),
        (RAY, f"{API_RAY} volumeMounts 0", GONE, "tmp is a volume without a mount, or"),
        (RAY, f"{API_RAY} volumeMounts 1 mountPath", "/tmp", "volumeMounts: /tmp twice"),
        (RAY, f"{ENGINE} groupName", "api", "workerGroupSpecs: api twice"),
        ("ConfigMap outrider-redis", "data", {"other": ""}, "volume config has no file redis.conf"),
    ],
    "selectors": [
        ("Service outrider-redis", "spec selector app.kubernetes.io/component", "cache", "selects no pod"),
        ("Service outrider-redis", "spec ports 0 targetPort", "tls", "port tls is declared by no container"),
        (REDIS, "spec selector", OTHER, "does not select its own pods"),
        ("PodDisruptionBudget outrider-api", "spec selector", OTHER, "selects no pod"),
        ("PodDisruptionBudget outrider-engine", "spec minAvailable", 2, "minAvailable is 2"),
        ("PodDisruptionBudget outrider-engine", "spec selector", {}, "two PodDisruptionBudgets select it"),
        ("PodMonitor outrider", "spec podMetricsEndpoints 0 port", "metric", "port metric is declared by no container"),
        (RAY, f"{ENGINE_POD} topologySpreadConstraints 0 labelSelector", OTHER, "do not select the pods"),
        (RAY, f"{HEAD_RAY} ports 1", GONE, "ports of the operator's service are missing"),
        (RAY, f"{HEAD} template metadata labels app.kubernetes.io/name", "outrider", "does not select it"),
        (RAY, f"{ENGINE} minReplicas", 2, "replicas is not between"),
        (RAY, f"{CLUSTER} gcsFaultToleranceOptions redisAddress", "redis:6379", "no pod is behind redisAddress"),
    ],
    "resources": [
        (RAY, f"{API_RAY} resources requests cpu", "8", "cpu: 8 requested, and the limit is 4"),
        (RAY, f"{ENGINE_RAY} resources requests {GPU}", "4", "nvidia.com/gpu: 4 requested, and the limit is 8"),
        (REDIS, f"{CACHE} image", "redis:7.4.9-bookworm", "is older than 7.4.10"),
        (REDIS, f"{CACHE} volumeMounts 0 readOnly", True, "no writable volume at /data"),
        (RAY, f"{API_RAY} volumeMounts 1 readOnly", True, "no writable volume at /home/ray"),
        ("ConfigMap outrider-env", "data HOME", "/root", "no writable volume at /root"),
        (RAY, f"{API_POD} volumes 2 emptyDir sizeLimit", "16Gi", "/dev/shm is not in memory, or larger"),
        (RAY, f"{API} rayStartParams object-store-memory", "3000000000", "object-store-memory is 3000000000"),
    ],
    "tls": [
        (RAY, f"{ENGINE_RAY} env", [], "RAY_USE_TLS is set in RayService outrider, head, RayService outrider, group api alone"),
        (RAY, f"{API_RAY} env 3", GONE, "group api: RAY_TLS_SERVER_KEY in env is None"),
        (RAY, f"{API_RAY} volumeMounts 6", GONE, "is no volume in memory"),
        (RAY, f"{API_POD} volumes 8 emptyDir medium", GONE, "is no volume in memory"),
        (RAY, f"{API_RAY} volumeMounts 0 name", "authority", "a container sees the CA's key"),
        (RAY, f"{API_POD} initContainers", GONE, "no init container"),
        (RAY, f"{API_POD} initContainers 0 volumeMounts 2 readOnly", True, "no init container"),
        (RAY, f"{API_POD} initContainers 0 volumeMounts 1", GONE, "no init container"),
        (RAY, f"{HEAD} template spec initContainers 0 args", [], "no init container"),
        ("ConfigMap outrider-env", "data RAY_REDIS_CA_CERT", GONE, "head: RAY_REDIS_CA_CERT is /, which no volume has"),
    ],
    "gpus": [
        (RAY, f"{ENGINE_POD} runtimeClassName", GONE, "group engine: runtimeClassName is None, not nvidia"),
        (RAY, f"{ENGINE_POD} tolerations", [], "tolerations is [], not"),
        (RAY, f"{ENGINE_POD} affinity", GONE, "NVIDIA-H200"),
        (JOB, f"{POD} {PRODUCTS} 2", "NVIDIA-A100-80GB-PCIe-MIG-1g.10gb", "NVIDIA-A100-80GB-PCIe-MIG-1g.10gb"),
    ],
    "jobs": [
        (JOB, f"{POD} containers 0 args 6", "--worker-count=8", "options refused: "),
        (JOB, f"{POD} containers 0 args 6", "--workers=1,16", "--workers goes to 16, and it has 8 GPUs"),
        (JOB, f"{POD} containers 0 args 0", "--model=/model", "/model is under no mounted volume"),
        (JOB, f"{POD} containers 0 args 11", "--out=/tmp", "--out /tmp is no claim to write to"),
    ],
    "monitoring": [
        ("ConfigMap outrider-dashboard", "data outrider.json", replaced("outrider:replicas", "outrider:replica"), "no metric"),
        ("ConfigMap outrider-dashboard", "data outrider.json", replaced(", model_name)", ", model)"), "a metric with the label"),
    ],
    "network": [
        policy("default-deny", "policyTypes", ["Ingress"], "no NetworkPolicy denies all ingress and egress by default"),
        policy("default-deny", "ingress", [{}], "a client may reach StatefulSet outrider-redis on port 6379"),
        policy("clients", "podSelector", OTHER, "a client cannot reach RayService outrider, group api on port 8000"),
        policy("clients", "podSelector", OTHER, "selects no pod"),
        policy("clients", "ingress 0 ports", GONE, "a client may reach RayService outrider, group api on port 8001"),
        policy("clients", "ingress 0 from 0", {"namespaceSelector": {}}, "a pod of another namespace may reach"),
        policy("clients", "ingress 0 from", [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "the internet may reach RayService outrider"),
        policy("head", "ingress 0 ports 0 port", 8266, "KubeRay's operator cannot reach RayService outrider, head on port 8265"),
        policy("head", "egress", [], "RayService outrider, head cannot reach StatefulSet outrider-gcs-redis on port 6379"),
        policy("monitoring", "ingress 0 ports 0 port", 9000, "Prometheus cannot reach RayService outrider, group api on"),
        policy("ray", "ingress 0 ports", [{"port": 6379}], "cannot reach RayService outrider, group api on port 10002"),
        policy("ray", "egress 1", {}, "group engine may reach the internet on port 443"),
        policy("dns", "egress 0 ports", GONE, "StatefulSet outrider-redis may reach DNS on port 22"),
        policy("dns", "egress 0 to 1", GONE, "group engine cannot reach NodeLocal DNS on port 53 by UDP"),
    ],
    "serve": [
        (RAY, "spec serveConfigV2", replaced("max_running: 32", "max_running: 16"), "is not what the command in"),
        (RAY, "spec serveConfigV2", replaced("single_gpu.yaml", "single_gpus.yaml"), "its first line fails: no config file"),
        serve("server.port=8080", fault="server.port is 8080, and the container's port serve 8000"),
        serve("server.admin_port=9000", fault="server.admin_port is 9000, and the container's port admin 8001"),
        serve("server.stop_timeout_s=90", fault="terminationGracePeriodSeconds is not above server.stop_timeout_s"),
        serve("server.api_replicas=3", fault="server.api_replicas is 3"),
        serve("server.replicas=9", fault="group 9 of 9: 1 ranks of 4 CPU and 1 GPU"),
        serve("server.replicas=2", fault="group 2 of 2: 8 ranks", name=LOOKAHEAD),
        serve("server.cpus_per_replica=9", fault="of 9 CPU and 1 GPU find no place (STRICT_PACK)", name=LOOKAHEAD),
        serve("baseline.world_size=5", fault="group 2 of 2: 5 ranks", name=COMPARE),
        serve("server.replicas=3", fault="4 engine pods for 3 replicas", name="multi-node"),
        serve("model.device=auto", fault="model.device is auto"),
        serve("redis_url=rediss://o@redis:6379?ssl_ca_certs=/etc/outrider/redis/ca.crt", fault="no pod listens there"),
        serve("redis_url=redis://o@outrider-redis:6379", fault="would travel in the clear"),
        serve("redis_url=rediss://o@outrider-redis:6379?ssl_ca_certs=/etc/ca", fault="no volume has the file /etc/ca"),
        serve("model.path=/model", fault="/model, the model, is under no mounted volume"),
        (RAY, f"{CLUSTER} rayVersion", "2.59.0", "rayVersion is 2.59.0"),
        (RAY, f"{API} rayStartParams resources", GONE, "must offer outrider_api"),
        (RAY, f"{ENGINE} replicas", 1, "group 2 of 2: 1 ranks of 1 CPU", "cpu-demo"),
        (RAY, f"{HEAD_RAY} volumeMounts 3", GONE, "head: no volume has the file"),
        (RAY, f"{API_RAY} envFrom 1", GONE, "no OUTRIDER_REDIS_PASSWORD"),
        ("ConfigMap outrider-env", "data RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "1", "launch.serve sets 0"),
    ],
}
# fmt: on


@pytest.mark.parametrize(
    ("check", "row"), [pytest.param(check, row, id=f"{check}: {row[3]}") for check, rows in BROKEN.items() for row in rows]
)
def test_a_fault_is_found_and_named(check: str, row: tuple[Any, ...]) -> None:
    document, path, value, fault, name = (*row, "dgx-8xa100")[:5]
    documents = overlay(name)
    (node,) = (one for one in documents if title(one) == document)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split()]
    for parent in parents:
        node = node[parent]
    if value is GONE:
        del node[last]
    else:
        node[last] = value(node[last]) if callable(value) else value
    faults = list(CHECKS[check](documents))
    assert [found for found in faults if fault in found], faults


def test_each_check_finds_a_fault() -> None:
    assert BROKEN.keys() == CHECKS.keys()
