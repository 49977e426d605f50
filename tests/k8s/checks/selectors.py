"""Selectors find pods, ports are those that these pods declare, and evictions leave as many pods as a budget wants."""

from __future__ import annotations

from collections.abc import Iterator

from tests.k8s.manifests import Document, Pods, behind, named, of_kind, pods_of, ports_of, selects, serve_document, title


def check(documents: list[Document]) -> list[str]:
    """Of everything that has a selector but NetworkPolicies, which ``network`` reads."""
    pods, found = pods_of(documents), []
    for document in documents:
        faults: Iterator[str] = iter(())
        match document.get("kind"):
            case "Service":
                faults = _service(document, pods)
            case "StatefulSet" | "Deployment":
                faults = _owner(document, documents)
            case "PodDisruptionBudget":
                faults = _budget(document, pods)
            case "PodMonitor":
                faults = _monitor(document, pods)
            case "RayService":
                faults = _ray_service(document, documents)
        found += [f"{title(document)}: {fault}" for fault in faults]
    found += [f"{one.where}: {fault}" for one in pods for fault in _spread(one)]
    for one in pods:
        budgets = [title(budget) for budget in of_kind(documents, "PodDisruptionBudget") if _selects(budget, one)]
        if len(budgets) > 1:
            found.append(f"{one.where}: {' and '.join(budgets)} both select it, and then no pod can be evicted")
    return found


def _selects(document: Document, pods: Pods) -> bool:
    return selects(document["spec"].get("selector"), pods.labels)


def _service(document: Document, pods: list[Pods]) -> Iterator[str]:
    chosen = [one for one in pods if selects({"matchLabels": document["spec"].get("selector", {})}, one.labels)]
    if not chosen or "selector" not in document["spec"]:
        yield f"selector {document['spec'].get('selector')} selects no pod"
    for port in document["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        for one in chosen:
            if target not in (*ports_of(one), *ports_of(one).values()):
                yield f"targetPort {target} is declared by no container of {one.where}"


def _owner(document: Document, documents: list[Document]) -> Iterator[str]:
    labels = document["spec"]["template"]["metadata"].get("labels", {})
    if not selects(document["spec"].get("selector"), labels):
        yield f"selector {document['spec'].get('selector')} does not select its own pods, labelled {labels}"
    service = document["spec"].get("serviceName")
    if document["kind"] == "StatefulSet" and named(documents, "Service", service or "") is None:
        yield f"serviceName is {service}, and there is no such Service"


def _budget(document: Document, pods: list[Pods]) -> Iterator[str]:
    chosen = [one for one in pods if _selects(document, one)]
    if not chosen:
        yield f"selector {document['spec'].get('selector')} selects no pod"
    least = document["spec"].get("minAvailable")
    if any(one.group is not None for one in chosen) and (not isinstance(least, int) or "maxUnavailable" in document["spec"]):
        yield "evictions know no controller of a Ray cluster's pods: it needs minAvailable as a number, and no maxUnavailable"
    count = sum(one.count for one in chosen)
    if isinstance(least, int) and least > count:
        yield f"minAvailable is {least}, and there are {count} pods"


def _monitor(document: Document, pods: list[Pods]) -> Iterator[str]:
    spec = document["spec"]
    chosen = [one for one in pods if _selects(document, one)]
    if not chosen or "namespaceSelector" in spec:
        yield f"selector {spec.get('selector')} selects no pod of its namespace"
    if not spec.get("podMetricsEndpoints"):
        yield "it scrapes nothing: podMetricsEndpoints is empty"
    for endpoint in spec.get("podMetricsEndpoints", ()):
        for one in chosen:
            if endpoint["port"] not in ports_of(one):
                yield f"port {endpoint['port']} is declared by no container of {one.where}"


def _ray_service(document: Document, documents: list[Document]) -> Iterator[str]:
    address = document["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {}).get("redisAddress")
    if address is not None and not behind(documents, address):
        yield f"gcsFaultToleranceOptions.redisAddress is {address}, and no pod is behind such a Service"
    if not serve_document(documents):
        yield "serveConfigV2 is empty"


def _spread(pods: Pods) -> Iterator[str]:
    for constraint in pods.spec.get("topologySpreadConstraints", ()):
        if not selects(constraint.get("labelSelector"), pods.labels):
            yield f"topologySpreadConstraints: {constraint.get('labelSelector')} does not select the pods that it spreads"
    affinity = pods.spec.get("affinity", {})
    for kind in ("podAffinity", "podAntiAffinity"):
        for term in affinity.get(kind, {}).get("requiredDuringSchedulingIgnoredDuringExecution", ()):
            if not selects(term.get("labelSelector"), pods.labels):
                yield f"{kind}: {term.get('labelSelector')} does not select the pods themselves"
