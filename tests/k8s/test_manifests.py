"""Every overlay, rendered, with the monitoring beside it, goes through every check; see ``checks``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.k8s.checks import CHECKS
from tests.k8s.checks.devices import GPU
from tests.k8s.checks.monitoring import query_faults
from tests.k8s.checks.tls import is_on
from tests.k8s.manifests import (
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
    serve_arguments,
)

needs_kustomize = pytest.mark.skipif(kustomize() is None, reason="no kustomize on the PATH, nor at KUSTOMIZE")


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("check", CHECKS)
def test_an_overlay_has_no_fault(name: str, check: str) -> None:
    assert CHECKS[check](overlay(name)) == []


def test_the_overlay_that_is_applied_has_eight_replicas_of_one_gpu() -> None:
    documents = overlay("dgx-8xa100")
    arguments = serve_arguments(documents)
    assert (arguments["server"]["replicas"], arguments["server"]["gpus_per_replica"]) == (8, 1)
    assert arguments.get("parallelism", {}).get("mode", "none") == "none"
    (engines,) = (pods for pods in ray_pods(documents) if resource(pods.ray, GPU))
    assert (engines.count, resource(engines.ray, GPU)) == (1, 8)
    for page in (K8S / "README.md", REPOSITORY / "docs" / "install.md"):
        applied = re.findall(r"kubectl apply -k k8s/overlays/([\w-]+)", page.read_text(encoding="utf-8"))
        assert applied[0] == "dgx-8xa100", page


def test_the_page_of_the_group_of_eight_begins_with_what_the_record_has() -> None:
    arguments = serve_arguments(overlay("dgx-8xa100-lookahead"))
    assert (arguments["parallelism"]["world_size"], arguments["server"]["replicas"]) == (8, 1)
    record = "experiments/results/2026-11-22-simulate.json"
    rows = json.loads((REPOSITORY / record).read_text())["results"]["rows"]
    p50 = {(row["traffic"], row["deployment"], row["strategy"]): f"{row['e2e_s']['p50']:.2f} s" for row in rows}
    pages = (K8S / "overlays" / "dgx-8xa100-lookahead" / "kustomization.yaml", REPOSITORY / "docs" / "lookahead-parallel.md")
    for text in (page.read_text(encoding="utf-8") for page in pages):
        start = text.split("\napiVersion")[0].split("\n\n```")[0]
        assert record in start and p50["8 a second", "8 x 1 GPU", "auto"] in start, start
        assert p50["8 a second", "1 x 8 GPUs lookahead", "auto"] in start, start


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_speak_tls_but_in_the_demo(name: str) -> None:
    documents = overlay(name)
    assert {is_on(documents, pods.ray) for pods in ray_pods(documents)} == {not name.startswith("cpu-")}


def test_every_overlay_is_rendered() -> None:
    assert sorted(path.name for path in (K8S / "overlays").iterdir()) == OVERLAYS != []


@needs_kustomize
def test_what_is_rendered_is_what_kustomize_makes(tmp_path: Path) -> None:
    environment = os.environ | {"KUSTOMIZE": str(kustomize())}
    subprocess.run([K8S / "render.sh", tmp_path], env=environment, check=True, timeout=120)
    version = subprocess.run([str(kustomize()), "version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in (K8S / "rendered").iterdir())
    for made in tmp_path.iterdir():
        kept, advice = K8S / "rendered" / made.name, f"run k8s/render.sh: {made.name} is not what kustomize makes"
        assert _documents(made.read_text()) == _documents(kept.read_text()), advice
        if "v4." in version:  # others may order and break lines otherwise
            assert made.read_text() == kept.read_text(), advice


@needs_kustomize
def test_the_monitoring_is_what_kustomize_makes() -> None:
    command = [str(kustomize()), "build", K8S / "monitoring"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert _documents(made) == sorted(monitoring(), key=_order)


def _documents(text: str) -> list[dict[str, object]]:
    return sorted(load_all(text), key=_order)


def _order(document: dict[str, object]) -> str:
    return f"{document['kind']} {document['metadata']}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("250m", 0.25), ("1Gi", 2**30), ("2e3", 2000), ("1E", 1e18), ("0.5", 0.5), (4, 4),
        ("4GiB", None), ("four", None), (True, None),
    ],
)  # fmt: skip
def test_quantities(text: object, number: float | None) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(outrider:steps_total[$__rate_interval])", "unclosed left parenthesis"),
        ("rate(outrider:steps_total)", "expected type matrix"),
        ("sum by engine (outrider:steps_total)", "invalid promql query"),
        ("outrider:stepz_total", "no metric outrider:stepz_total"),
        ('{__name__="outrider:stepz_total"}', "no metric outrider:stepz_total"),
        ("max_over_time(sum(outrider:replica)[5m:1m])", "no metric outrider:replica"),
        ("vector(1)", "asks for no metric"),
    ],
)
def test_a_bad_query_is_seen(query: str, fault: str) -> None:
    assert [found for found in query_faults(query) if fault in found], query_faults(query)


def test_a_good_query_has_no_fault() -> None:
    assert query_faults('sum by (engine) (rate(outrider:steps_total{model_name=~"$model"}[$__rate_interval]))') == []
