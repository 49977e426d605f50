"""The queries of alerts and dashboards: PromQL that parses, and asks for metrics that ``/metrics`` has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache

import promql_parser

from tests.cluster.observe.test_monitoring import exposed
from tests.k8s.manifests import Document, of_kind, title

_VARIABLE = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")
_DURATIONS = {"__rate_interval", "__interval", "__range"}
_LABEL_VALUES = re.compile(r"label_values\((.+),\s*(\w+)\)")


def check(documents: list[Document]) -> list[str]:
    """All queries of PrometheusRules and of config maps that are dashboards."""
    found = []
    for document in of_kind(documents, "PrometheusRule"):
        for group in document["spec"]["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert", rule.get("record"))
                found += [f"{title(document)}, {name}: {fault}" for fault in query_faults(str(rule["expr"]))]
    for document in of_kind(documents, "ConfigMap"):
        if "grafana_dashboard" in document["metadata"].get("labels", {}):
            for name, text in document["data"].items():
                found += [f"{title(document)}, {name}: {fault}" for fault in _dashboard(text)]
    return found


def query_faults(query: str) -> list[str]:
    """What is wrong with a query in which Grafana's variables may stand."""
    try:
        parsed = promql_parser.parse(_VARIABLE.sub(lambda match: "5m" if match[1] in _DURATIONS else "x", query))
    except ValueError as error:
        return [f"{query}: {error}"]
    names: list[str] = []

    def visit(expression: promql_parser.Expr) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            by_matcher = [matcher.value for matcher in expression.matchers.matchers if matcher.name == "__name__"]
            names.extend([expression.name] if expression.name else by_matcher)

    promql_parser.walk(parsed, visit)
    if not names:
        return [f"{query}: asks for no metric"]
    return [f"{query}: there is no metric {name}" for name in names if name not in _known()]


@cache
def _known() -> frozenset[str]:
    return frozenset(exposed())


def _dashboard(text: str) -> Iterator[str]:
    try:
        dashboard = json.loads(text)
    except ValueError as error:
        yield f"not JSON: {error}"
        return
    variables = [variable for variable in dashboard.get("templating", {}).get("list", ()) if variable["type"] == "query"]
    for variable in variables:
        match = _LABEL_VALUES.fullmatch(str(variable["query"]))
        if match is None:
            yield f"variable {variable['name']}: {variable['query']} is not label_values(METRIC, LABEL)"
            continue
        yield from (f"variable {variable['name']}: {fault}" for fault in query_faults(match[1]))
        if match[2] not in exposed().get(match[1], ()):
            yield f"variable {variable['name']}: {match[1]} has no label {match[2]}"
    declared = {variable["name"] for variable in dashboard.get("templating", {}).get("list", ())}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            faults = query_faults(target["expr"])
            used = {match[1] for match in _VARIABLE.finditer(target["expr"])} - declared - _DURATIONS
            faults += [f"${name} is no variable of the dashboard" for name in sorted(used)]
            yield from (f"panel {panel['title']}: {fault}" for fault in faults)
