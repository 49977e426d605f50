"""NetworkPolicies, evaluated: each connection that is needed is admitted, and no other one is.

Whoever installs labels namespaces ``outrider/clients``, ``outrider/operator`` (KubeRay) and ``outrider/monitoring`` (Prometheus)
with "true".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.k8s.manifests import NAMESPACE, Document, Pods, behind, named, of_kind, pods_of, selects, title, walk
from tests.k8s.serve import configuration

DASHBOARD = 8265
# NodeLocal DNSCache is on the node's network, where no selector finds it: its default address, and kubespray's.
DNS, NODE_LOCAL = "DNS", {"NodeLocal DNS": "169.254.20.10", "kubespray's NodeLocal DNS": "169.254.25.10"}
# The ports to try: Ray's, by default or at random, Outrider's, Redis', and unused ones.
PORTS = {22, 53, 80, 443, 6379, 8000, 8001, 8080, DASHBOARD, 9000, 10001, 10002, 15000, 19999, 44217, 52365}


@dataclass(frozen=True)
class Peer:
    """One end of a connection."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] | None = None  # labels of the namespace; None outside the cluster
    address: str = "10.244.0.1"
    ports: Mapping[str, int] = field(default_factory=dict)
    pods: Pods | None = None

    @property
    def is_inside(self) -> bool:
        return self.namespace is not None and self.namespace.get("kubernetes.io/metadata.name") == NAMESPACE

    @property
    def is_ray(self) -> bool:
        return self.pods is not None and self.pods.group is not None


Connection = tuple[str, str, int]


def check(documents: list[Document]) -> Iterator[str]:
    """Find policies that select nothing, needed connections that are refused, and others that are admitted."""
    policies, peers = of_kind(documents, "NetworkPolicy"), _peers(documents)
    for policy in policies:
        yield from (f"{title(policy)}: {fault}" for fault in _policy_faults(policy["spec"], peers))
    if {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} not in [policy["spec"] for policy in policies]:
        yield "no NetworkPolicy denies all ingress and egress by default: podSelector {}, both policyTypes, no rule"
    needed, tolerated = _needed(documents, peers), _tolerated(documents, peers)
    for source in peers:
        for target in peers:
            for port in sorted(PORTS | set(target.ports.values())):
                connection = (source.name, target.name, port)
                goes, comes = admits(policies, "Egress", source, target, port), admits(policies, "Ingress", source, target, port)
                if connection in needed and not (goes and comes):
                    yield f"{source.name} cannot reach {target.name} on port {port}"
                # Each end has to refuse by itself: the other's policies may change.
                is_let = (source.is_inside and goes) or (target.is_inside and comes)
                if is_let and connection not in needed | tolerated:
                    yield f"{source.name} may reach {target.name} on port {port}, which nothing needs"
        for server in (peer for peer in peers if source.is_ray and peer.name in (DNS, *NODE_LOCAL)):
            if not admits(policies, "Egress", source, server, 53, "UDP"):
                yield f"{source.name} cannot reach {server.name} on port 53 by UDP"


def admits(policies: list[Document], direction: str, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Return whether the policies of the source (Egress) or the target (Ingress) admit a connection; outside all is admitted."""
    own, other, peers = (source, target, "to") if direction == "Egress" else (target, source, "from")
    specs = [
        policy["spec"]
        for policy in policies
        if own.is_inside and direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], own.labels)
    ]
    return not specs or any(
        (not rule.get(peers) or any(_is(peer, other) for peer in rule[peers]))
        and (not rule.get("ports") or any(_has(entry, target, port, protocol) for entry in rule["ports"]))
        for spec in specs
        for rule in spec.get(direction.lower(), ())
    )


def _is(peer: Document, other: Peer) -> bool:
    if "ipBlock" in peer:
        return ipaddress.ip_address(other.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if other.namespace is None:
        return False
    here = other.is_inside if "namespaceSelector" not in peer else selects(peer["namespaceSelector"], other.namespace)
    return here and ("podSelector" not in peer or selects(peer["podSelector"], other.labels))


def _has(entry: Document, target: Peer, port: int, protocol: str) -> bool:
    wanted = entry.get("port", port)
    first = target.ports.get(wanted, -1) if isinstance(wanted, str) else wanted
    return entry.get("protocol", "TCP") == protocol and first <= port <= entry.get("endPort", first)


def _policy_faults(spec: Document, peers: list[Peer]) -> Iterator[str]:
    selectors = [spec["podSelector"]]
    for field_name, rules in walk(spec):
        if field_name in ("from", "to"):
            selectors += [peer["podSelector"] for peer in rules if "podSelector" in peer and "namespaceSelector" not in peer]
    for selector in selectors:
        if not any(selects(selector, peer.labels) for peer in peers if peer.pods is not None):
            yield f"{selector} selects no pod"
    for direction in ("Ingress", "Egress"):
        if direction.lower() in spec and direction not in spec["policyTypes"]:
            yield f"it has rules for {direction.lower()}, and policyTypes leaves {direction} out"


def _peers(documents: list[Document]) -> list[Peer]:
    own = named(documents, "Namespace", NAMESPACE) or {"metadata": {}}
    here = own["metadata"].get("labels", {}) | {"kubernetes.io/metadata.name": NAMESPACE}
    roles = (("a client", "clients"), ("KubeRay's operator", "operator"), ("Prometheus", "monitoring"))
    return [
        *(Peer(one.where, one.labels, here, ports=one.ports, pods=one) for one in pods_of(documents)),
        *(Peer(who, namespace={"kubernetes.io/metadata.name": who, f"outrider/{label}": "true"}) for who, label in roles),
        Peer("another pod of the namespace", namespace=here),
        Peer("a pod of another namespace", namespace={"kubernetes.io/metadata.name": "default"}),
        Peer(DNS, {"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}, ports={"dns": 53}),
        *(Peer(name, address=address, ports={"dns": 53}) for name, address in NODE_LOCAL.items()),
        Peer("the internet", address="203.0.113.7"),
    ]


def _needed(documents: list[Document], peers: list[Peer]) -> set[Connection]:
    ray = [peer for peer in peers if peer.is_ray]
    heads = [peer for peer in ray if peer.pods is not None and peer.pods.is_head]
    config = configuration(documents)
    http, redis = config.server.port, urlsplit(config.redis_url or "redis://")
    found = {("a client", one.where, port) for one, port in behind(documents, f"outrider:{http}")}
    found |= {("KubeRay's operator", peer.name, port) for peer in heads for port in (DASHBOARD, http)}
    # Most of Ray's ports are chosen at random.
    found |= {(one.name, other.name, port) for one in ray for other in ray for port in PORTS | set(other.ports.values())}
    found |= {(peer.name, name, 53) for peer in ray for name in (DNS, *NODE_LOCAL)}
    servers = behind(documents, f"{redis.hostname}:{redis.port or 6379}")
    found |= {(peer.name, one.where, port) for peer in ray for one, port in servers}
    for name, address in walk(documents):
        if name == "redisAddress":
            found |= {(peer.name, one.where, port) for peer in heads for one, port in behind(documents, address)}
    for monitor in of_kind(documents, "PodMonitor"):
        chosen = [peer for peer in peers if peer.pods and selects(monitor["spec"]["selector"], peer.labels)]
        ports = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
        found |= {("Prometheus", peer.name, peer.ports.get(port, port)) for peer in chosen for port in ports}
    return found


def _tolerated(documents: list[Document], peers: list[Peer]) -> set[Connection]:
    """Return connections that are admitted without need: to DNS, and to a port for metrics where no pod listens."""
    asked = {(peer.name, name, 53) for peer in peers for name in (DNS, *NODE_LOCAL)}
    admin = configuration(documents).server.admin_port
    return asked | {("Prometheus", peer.name, port) for peer in peers if peer.is_ray for port in (8080, admin or 8001)}
