"""NetworkPolicies, evaluated: each connection that is needed is admitted, and no other one is.

Namespaces are known by labels that whoever installs sets: ``outrider/clients``, ``outrider/operator`` (KubeRay's) and
``outrider/monitoring`` (Prometheus'), each "true".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.k8s.manifests import (
    NAMESPACE,
    Document,
    Pods,
    behind,
    named,
    of_kind,
    pods_of,
    ports_of,
    selects,
    serve_arguments,
    serve_document,
    title,
)

DASHBOARD = 8265
DNS = "DNS"
# NodeLocal DNSCache, which listens on the node's own network, so that no selector finds it: its default address, and kubespray's.
NODE_LOCAL = {"NodeLocal DNS": "169.254.20.10", "kubespray's NodeLocal DNS": "169.254.25.10"}
# Where Ray listens, by default or at random, where Outrider and Redis do, and where nobody does.
PORTS = {22, 53, 80, 443, 6379, 8000, 8001, 8080, DASHBOARD, 9000, 10001, 10002, 15000, 19999, 44217, 52365}


@dataclass(frozen=True)
class Peer:
    """One end of a connection."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] | None = None  # its namespace's labels; None for what is no pod
    address: str = "10.244.0.1"
    ports: Mapping[str, int] = field(default_factory=dict)
    pods: Pods | None = None  # of ours

    @property
    def is_inside(self) -> bool:
        """Whether our policies speak of it."""
        return self.namespace is not None and self.namespace.get("kubernetes.io/metadata.name") == NAMESPACE

    @property
    def is_ray(self) -> bool:
        """Whether a node of Ray runs in it."""
        return self.pods is not None and self.pods.group is not None


Connection = tuple[str, str, int]


def check(documents: list[Document]) -> list[str]:
    """Policies that select nothing, connections that do not come about, and those that should not."""
    policies = of_kind(documents, "NetworkPolicy")
    peers = _peers(documents)
    found = [f"{title(policy)}: {fault}" for policy in policies for fault in _of_policy(policy, peers)]
    if not any(_denies_everything(policy["spec"]) for policy in policies):
        found.append("no NetworkPolicy denies all ingress and egress by default: podSelector {}, both policyTypes, no rule")
    needed, tolerated = _needed(documents, peers), _tolerated(documents, peers)
    for source in peers:
        for target in peers:
            if not (source.is_inside or target.is_inside):
                continue
            for port in sorted(PORTS | set(target.ports.values())):
                connection = (source.name, target.name, port)
                goes, comes = lets_out(policies, source, target, port), lets_in(policies, source, target, port)
                if connection in needed and not (goes and comes):
                    found.append(f"{source.name} cannot reach {target.name} on port {port}")
                # Each end refuses by itself: the other's policies may be others tomorrow.
                is_let = (source.is_inside and goes) or (target.is_inside and comes)
                if is_let and connection not in needed | tolerated:
                    found.append(f"{source.name} may reach {target.name} on port {port}, which nothing needs")
    for server in (peer for peer in peers if peer.name in (DNS, *NODE_LOCAL)):
        for source in (peer for peer in peers if peer.is_ray):
            if not lets_out(policies, source, server, 53, "UDP"):
                found.append(f"{source.name} cannot reach {server.name} on port 53 by UDP")
    return found


def lets_out(policies: list[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the source's policies let it connect; true for what is outside."""
    own = _of_peer(policies, "Egress", source)
    rules = [rule for spec in own for rule in spec.get("egress", ())]
    return not own or any(_any_is(rule.get("to"), target) and _any_has(rule, target, port, protocol) for rule in rules)


def lets_in(policies: list[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the target's policies admit a connection; true for what is outside."""
    own = _of_peer(policies, "Ingress", target)
    rules = [rule for spec in own for rule in spec.get("ingress", ())]
    return not own or any(_any_is(rule.get("from"), source) and _any_has(rule, target, port, protocol) for rule in rules)


def _of_peer(policies: list[Document], direction: str, peer: Peer) -> list[Document]:
    """Specifications of the policies that a peer is subject to."""
    specs = [policy["spec"] for policy in policies if direction in _directions(policy["spec"])]
    return [spec for spec in specs if peer.is_inside and selects(spec.get("podSelector"), peer.labels)]


def _denies_everything(spec: Document) -> bool:
    has_rules = spec.get("ingress") or spec.get("egress")
    return spec.get("podSelector") == {} and set(_directions(spec)) == {"Ingress", "Egress"} and not has_rules


def _directions(spec: Document) -> list[str]:
    default = ["Ingress", "Egress"] if "egress" in spec else ["Ingress"]
    return list(spec.get("policyTypes", default))


def _any_is(peers: list[Document] | None, other: Peer) -> bool:
    return not peers or any(_is(peer, other) for peer in peers)


def _any_has(rule: Document, target: Peer, port: int, protocol: str) -> bool:
    return not rule.get("ports") or any(_has(entry, target, port, protocol) for entry in rule["ports"])


def _is(peer: Document, other: Peer) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(cidr) for cidr in block.get("except", ())
        )
    if other.namespace is None:
        return False
    here = other.is_inside if "namespaceSelector" not in peer else selects(peer["namespaceSelector"], other.namespace)
    return here and ("podSelector" not in peer or selects(peer["podSelector"], other.labels))


def _has(entry: Document, target: Peer, port: int, protocol: str) -> bool:
    wanted = entry.get("port", port)
    first = target.ports.get(wanted, -1) if isinstance(wanted, str) else wanted
    return entry.get("protocol", "TCP") == protocol and first <= port <= entry.get("endPort", first)


def _peers(documents: list[Document]) -> list[Peer]:
    own = named(documents, "Namespace", NAMESPACE) or {"metadata": {}}
    here = own["metadata"].get("labels", {}) | {"kubernetes.io/metadata.name": NAMESPACE}
    inside = [Peer(one.where, one.labels, here, ports=ports_of(one), pods=one) for one in pods_of(documents)]
    outside = [
        Peer(who, namespace={"kubernetes.io/metadata.name": who, f"outrider/{label}": "true"})
        for who, label in (("a client", "clients"), ("KubeRay's operator", "operator"), ("Prometheus", "monitoring"))
    ]
    return [
        *inside,
        *outside,
        Peer("another pod of the namespace", namespace=here),
        Peer("a pod of another namespace", namespace={"kubernetes.io/metadata.name": "default"}),
        Peer(DNS, {"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}, ports={"dns": 53}),
        *(Peer(name, address=address, ports={"dns": 53}) for name, address in NODE_LOCAL.items()),
        Peer("the internet", address="203.0.113.7"),
    ]


def _needed(documents: list[Document], peers: list[Peer]) -> set[Connection]:
    """What does not work without."""
    ray = [peer for peer in peers if peer.is_ray]
    heads = [peer for peer in ray if peer.pods is not None and peer.pods.is_head]
    http = serve_document(documents).get("http_options", {}).get("port", 8000)
    found = {("a client", one.where, port) for one, port in behind(documents, f"outrider:{http}")}
    found |= {("KubeRay's operator", peer.name, port) for peer in heads for port in (DASHBOARD, http)}
    # Most of Ray's ports are chosen at random.
    found |= {(one.name, other.name, port) for one in ray for other in ray for port in PORTS | set(other.ports.values())}
    found |= {(peer.name, name, 53) for peer in ray for name in (DNS, *NODE_LOCAL)}
    url = urlsplit(serve_arguments(documents).get("redis_url") or "redis://")
    found |= {
        (peer.name, one.where, port) for peer in ray for one, port in behind(documents, f"{url.hostname}:{url.port or 6379}")
    }
    for service in of_kind(documents, "RayService"):
        address = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {}).get("redisAddress", "")
        found |= {(peer.name, one.where, port) for peer in heads for one, port in behind(documents, address)}
    for monitor in of_kind(documents, "PodMonitor"):
        ports = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
        chosen = [peer for peer in peers if peer.pods and selects(monitor["spec"].get("selector"), peer.labels)]
        found |= {("Prometheus", peer.name, peer.ports.get(port, port)) for peer in chosen for port in ports}
    return found


def _tolerated(documents: list[Document], peers: list[Peer]) -> set[Connection]:
    """Names that nobody asks for, and a port for metrics where nobody listens."""
    admin = serve_arguments(documents).get("server", {}).get("admin_port", 8001)
    asked = {(peer.name, name, 53) for peer in peers for name in (DNS, *NODE_LOCAL)}
    return asked | {("Prometheus", peer.name, port) for peer in peers if peer.is_ray for port in (8080, admin)}


def _of_policy(policy: Document, peers: list[Peer]) -> Iterator[str]:
    spec = policy["spec"]
    inside = [peer for peer in peers if peer.pods is not None]
    selectors = [spec.get("podSelector")]
    rules = [*spec.get("ingress", ()), *spec.get("egress", ())]
    selectors += [
        peer["podSelector"]
        for rule in rules
        for peer in [*rule.get("from", ()), *rule.get("to", ())]
        if "podSelector" in peer and "namespaceSelector" not in peer
    ]
    for selector in selectors:
        if not any(selects(selector, peer.labels) for peer in inside):
            yield f"{selector} selects no pod"
    for direction in ("Ingress", "Egress"):
        if direction.lower() in spec and direction not in _directions(spec):
            yield f"it has rules for {direction.lower()}, and policyTypes leaves {direction} out"
