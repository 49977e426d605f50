"""Every document against the schema of its kind, in which an unknown field is an error."""

from __future__ import annotations

import json
from functools import cache

import kubernetes_validate

from tests.k8s.manifests import Document, title
from tests.k8s.schemas import SCHEMAS, described, schema_faults

# The newest that kubernetes-validate knows, and one that managed clusters still run: fields of one alone are found.
VERSIONS = ("1.37", "1.31")


def check(documents: list[Document]) -> list[str]:
    """Unknown fields, missing ones, and values of a wrong type."""
    texts = ((title(document), json.dumps(document, sort_keys=True)) for document in documents)
    return [f"{name}: {fault}" for name, text in texts for version in VERSIONS for fault in _faults(text, version)]


@cache  # overlays have most documents in common
def _faults(text: str, version: str) -> tuple[str, ...]:
    document: Document = json.loads(text)
    if (document.get("apiVersion"), document.get("kind")) in SCHEMAS:
        return tuple(f"{fault} (pods as of Kubernetes {version})" for fault in schema_faults(document, version))
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return (f"no kind {document.get('apiVersion')}/{document.get('kind')} in Kubernetes {version}",)
    except kubernetes_validate.ValidationError as error:
        return (f"{described(error)} (Kubernetes {version})",)
    return ()
