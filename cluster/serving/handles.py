"""Options of Serve handles: where the router runs, and what requests travel over.

By default Serve gives each handle a thread with an event loop of its own, and every request and every item of a stream crosses
from one to the other. In the caller's own loop they do not, which saves milliseconds until a first token; but such a handle
serves that loop alone. Streams save some more over gRPC, which all replicas speak and which is encrypted where Ray's calls are,
than as calls of Ray's. Serve's ``RAY_SERVE_THROUGHPUT_OPTIMIZED`` turns both defaults round. So each handle says what it needs.
"""

from __future__ import annotations

import copy
from typing import Any

from ray.serve.handle import DeploymentHandle


def for_threads(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """A handle of the same deployment that any thread may use and wait for."""
    return _with_router(handle, in_own_loop=True)


def for_this_loop(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """A handle of the same deployment for streams within the running event loop, and for no other.

    Its streams may raise ``grpc.RpcError``, too.

    Raises:
        RuntimeError: no event loop runs.
    """
    return _with_router(handle, in_own_loop=False).options(stream=True, _by_reference=False)


def _with_router(handle: DeploymentHandle[Any], in_own_loop: bool) -> DeploymentHandle[Any]:
    routed = copy.copy(handle)  # as it comes to another actor: without a router
    routed._init(_run_router_in_separate_loop=in_own_loop)
    return routed.options(_by_reference=True)
