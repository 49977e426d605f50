"""The dashboard and the alerts of ``k8s/monitoring``: they ask for nothing but metrics that exist, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.observe.metric_families import FAMILIES
from outrider.cluster.observe.metrics import exposition

FOLDER = Path(__file__).resolve().parents[3] / "k8s" / "monitoring"
METRIC = re.compile(r"\b(?:vllm|outrider):\w+")
SELECTOR = re.compile(r"((?:vllm|outrider):\w+)\{([^}]*)\}")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "grafana_dashboard.json").read_text()))


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    assert document["kind"] == "PrometheusRule"
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for rule in rules():
        yield rule["expr"]


def exposed() -> dict[str, set[str]]:
    """The labels of every series by name, as they are exposed while no engine answers."""
    own = {
        f"{family.name}_total" if family.kind == "counter" else family.name: {"model_name", "engine", *family.labels}
        for family in FAMILIES
    }
    own |= {
        "outrider:audits_total": {"result"}, "outrider:door_refused_total": {"code"}, "outrider:device_failures_total": {"error"},
        "outrider:baseline_requests_total": {"result"}, "outrider:baseline_texts_total": {"texts"},
        "outrider:baseline_median": {"figure", "side"}, "outrider:baseline_ratio": {"figure", "bound"},
    }  # fmt: skip
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition([], 1).decode()):
        if family.type == "histogram":
            found[f"{family.name}_bucket"] = {"model_name", "engine", "le"}
            found |= {f"{family.name}_{suffix}": {"model_name", "engine"} for suffix in ("sum", "count")}
        else:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = own.get(name, set())
    assert own.keys() <= found.keys()
    return found


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_asks_for_what_exists(expression: str) -> None:
    series = exposed()
    names = METRIC.findall(expression)
    assert names and set(names) <= series.keys()
    for name, selector in SELECTOR.findall(expression):
        labels = {matcher.split("=")[0].strip(" !~") for matcher in selector.split(",")}
        assert labels <= series[name], (name, labels)
    for grouping in GROUPING.findall(expression):
        assert {label.strip() for label in grouping.split(",")} <= set().union(*(series[name] for name in names))
    for pair in ("()", "[]", "{}"):
        assert expression.count(pair[0]) == expression.count(pair[1])


def test_every_metric_of_ours_but_few_is_on_the_dashboard_or_has_an_alert() -> None:
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for expression in expressions() for name in METRIC.findall(expression)}
    left = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed()} - used
    assert left == {
        "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_max_tokens",
        "vllm:iteration_tokens_total", "vllm:cache_config_info", "outrider:exchange_bytes_total",
        "outrider:requests_total", "outrider:draft_tokens_total", "outrider:accepted_tokens_total",
        "outrider:cache_waiting_tokens", "outrider:cache_lost_records_total", "outrider:cache_corrupt_records_total",
        "outrider:cache_failures_total",
        *(name for name in left if name.startswith("outrider:emulated_")),  # not of a real cluster
    }  # fmt: skip
