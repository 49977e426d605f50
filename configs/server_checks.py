"""Where the operator's routes listen, and what may be wrong with the ports and addresses of a server."""

from __future__ import annotations

from collections.abc import Iterator

from configs.slices import ServerOptions
from configs.tenancy_checks import is_loopback

_LAST_PORT = 65535


def admin_address(server: ServerOptions) -> tuple[str, int] | None:
    """Host and port of /admin and /metrics; None where they are on the main port.

    Example: ``host=0.0.0.0, port=8000`` has them on ``127.0.0.1:8001``; ``host=127.0.0.1, port=8000`` on the main port, which
    only this machine reaches anyway; with ``admin_port=9000`` both have them on ``127.0.0.1:9000``.
    """
    if server.admin_port is not None:
        return server.admin_host, server.admin_port
    return None if is_loopback(server.host) else (server.admin_host, server.port + 1)


def server_faults(server: ServerOptions) -> Iterator[str]:
    """One sentence for each fault; none when all is well."""
    if server.admin_port == server.port:
        yield (
            f"server.admin_port is {server.admin_port}, as server.port: /admin and /metrics need one of their own; choose "
            "another, or leave it out"
        )
    elif server.admin_port is None and server.port == _LAST_PORT and admin_address(server) is not None:
        yield f"server.port is {_LAST_PORT}, and /admin and /metrics listen on the port after it: set server.admin_port"
    endpoint = server.otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield f"server.otlp_endpoint is {endpoint!r}; allowed: the address of an OTLP/HTTP collector, such as http://127.0.0.1:4318"
    resource = server.api_resource
    if resource is not None and (not resource.isidentifier() or resource in ("CPU", "GPU", "memory")):
        yield f"server.api_resource is {resource!r}; allowed: the name of a custom resource of Ray, such as outrider_api"
