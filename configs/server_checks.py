"""Checks of a server's ports, addresses and host names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from outrider.configs.slices import SAMPLING_BOUNDS, ServerOptions
from outrider.configs.tenancy_checks import is_loopback

_LAST_PORT = 65535
_ANY = "*"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9_.-]+(:[0-9]{1,5})?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")


def admin_address(server: ServerOptions) -> tuple[str, int] | None:
    """Return host and port of /admin and /metrics; None if they are on the main port.

    Example, port 8000: ``host=0.0.0.0``: ``127.0.0.1:8001``; ``host=127.0.0.1``: main port; ``admin_port=9000``: that port.
    """
    if server.admin_port is not None:
        return server.admin_host, server.admin_port
    return None if is_loopback(server.host) else (server.admin_host, server.port + 1)


def allowed_names(server: ServerOptions, host: str) -> frozenset[str] | None:
    """Return the host names that clients may use for a server at ``host``, besides localhost and IP addresses; None: any."""
    # Protection against DNS rebinding: a web page may point its own name at this server and then act as the browser's machine. On
    # loopback, where no key is needed, that is the machine's user.
    if _ANY in (server.allowed_hosts or ()) or (server.allowed_hosts is None and not is_loopback(host)):
        return None
    return frozenset(name.lower() for name in server.allowed_hosts or ())


def admin_names(server: ServerOptions) -> frozenset[str] | None:
    """Return ``allowed_names`` of the operator's port; None (any) if it is not on loopback, because it is scraped remotely."""
    return allowed_names(server, server.admin_host) if is_loopback(server.admin_host) else None


def http_options(server: ServerOptions) -> dict[str, Any]:
    """Return the HTTP options of Ray Serve."""
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if server.ssl_certfile is not None:
        options |= {"ssl_keyfile": server.ssl_keyfile, "ssl_certfile": server.ssl_certfile}
    return options


def server_faults(server: ServerOptions) -> Iterator[str]:
    """Yield one sentence for each fault."""
    if server.admin_port == server.port:
        yield (
            f"server.admin_port is {server.admin_port}, like server.port: /admin and /metrics need a separate port; choose "
            "another, or leave it out"
        )
    elif server.admin_port is None and server.port == _LAST_PORT and admin_address(server) is not None:
        yield f"server.port is {_LAST_PORT}, and /admin and /metrics listen on the port after it: set server.admin_port"
    if (server.ssl_certfile is None) != (server.ssl_keyfile is None):
        yield "server.ssl_certfile and server.ssl_keyfile belong together: set both, or leave both out"
    for origin in server.allowed_origins:
        if origin != _ANY and not _ORIGIN.fullmatch(origin):
            yield f"server.allowed_origins holds {origin!r}; allowed: '*', or origins such as https://app.example:8443"
    if server.most_replicas < server.replicas:
        yield f"server.max_replicas is {server.max_replicas}; allowed: at least server.replicas, which is {server.replicas}"
    if not server.most_replicas:
        yield "server.replicas is 0: set server.max_replicas to the number of replicas to start on request"
    if server.target_tokens_per_s is not None and server.max_replicas is None:
        yield (
            f"server.target_tokens_per_s is {server.target_tokens_per_s:g}, but autoscaling is off: set "
            "server.max_replicas, or leave it out"
        )
    for name, value in server.sampling_defaults.items():
        low, high = SAMPLING_BOUNDS.get(name, (0, 0))
        if name not in SAMPLING_BOUNDS:
            yield f"server.sampling_defaults.{name} is no sampling parameter; allowed: {', '.join(SAMPLING_BOUNDS)}"
        elif not low <= value <= high or (name == "top_k" and value != int(value)):
            kind = " (an integer)" if name == "top_k" else ""
            yield f"server.sampling_defaults.{name} is {value}; allowed: {low:g} to {high:g}{kind}"
    endpoint = server.otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield f"server.otlp_endpoint is {endpoint!r}; allowed: the address of an OTLP/HTTP collector, such as http://127.0.0.1:4318"
    resource = server.api_resource
    if resource is not None and (not resource.isidentifier() or resource in ("CPU", "GPU", "memory")):
        yield f"server.api_resource is {resource!r}; allowed: the name of a custom resource of Ray, such as outrider_api"
    for name in server.allowed_hosts or ():
        if name != _ANY and not _HOST_NAME.fullmatch(name):
            yield f"server.allowed_hosts has {name!r}; allowed: names without scheme and port, such as api.example.com, or '*'"
