"""All checks: each takes the documents of one deployment and returns a sentence for each fault, none when all is well."""

from __future__ import annotations

from collections.abc import Callable

from tests.k8s import (
    checks_kuberay,
    checks_monitoring,
    checks_network,
    checks_references,
    checks_schema,
    checks_security,
    checks_selectors,
    checks_serve,
    checks_values,
)
from tests.k8s.manifests import Document

CHECKS: dict[str, Callable[[list[Document]], list[str]]] = {
    "schema": checks_schema.check,
    "values": checks_values.check,
    "kuberay": checks_kuberay.check,
    "serve": checks_serve.check,
    "selectors": checks_selectors.check,
    "network": checks_network.check,
    "references": checks_references.check,
    "security": checks_security.check,
    "monitoring": checks_monitoring.check,
}
