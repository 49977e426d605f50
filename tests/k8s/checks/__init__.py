"""All checks: each takes the documents of one deployment and returns a sentence for each fault, none when all is well."""

from __future__ import annotations

from collections.abc import Callable

from tests.k8s.checks import (
    devices,
    jobs,
    kuberay,
    monitoring,
    network,
    references,
    schema,
    security,
    selectors,
    serve,
    tls,
    values,
)
from tests.k8s.manifests import Document

CHECKS: dict[str, Callable[[list[Document]], list[str]]] = {
    "schema": schema.check,
    "values": values.check,
    "kuberay": kuberay.check,
    "serve": serve.check,
    "selectors": selectors.check,
    "network": network.check,
    "references": references.check,
    "security": security.check,
    "monitoring": monitoring.check,
    "tls": tls.check,
    "jobs": jobs.check,
    "devices": devices.check,
}
