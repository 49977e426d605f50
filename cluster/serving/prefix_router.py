"""Prefix-aware routing (``server.routing: prefix``): Serve's request router over ``ReplicaChooser``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.replica_chooser import ReplicaChooser


class PrefixRouter(RequestRouter):
    """Router that sends calls with jobs as ``ReplicaChooser`` decides, and others to the replica with the fewest calls."""

    # Serve takes the first available replica that accepts the call; if none does, it asks again with increasing pauses. Calls are
    # identified by Serve's internal request id, so each call needs a separate one; see `HandleEngine`.

    def initialize_state(self, **kwargs: Any) -> None:
        """Create the ``ReplicaChooser`` with the arguments from the deployment's configuration."""
        # The router runs where a handle is used, in the API's process, and keeps its state there; replicas are not queried.
        self._chooser = ReplicaChooser(**kwargs)
        self._unsent: dict[str, weakref.ref[PendingRequest]] = {}  # calls with a chosen replica that none has taken yet

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order, one per group; see ``RequestRouter``."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        jobs = _jobs_of(pending_request)
        if not jobs:
            return [candidate_replicas]
        # Serve reports no end of a call that no replica took: a dead reference means that the caller gave up.
        for given_up in [call for call, request in self._unsent.items() if request() is None]:
            del self._unsent[given_up]
            self._chooser.release(given_up)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queue_lengths = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        call = pending_request.metadata.internal_request_id
        self._unsent[call] = weakref.ref(pending_request)
        return [[replicas[name]] for name in self._chooser.choose(call, jobs, queue_lengths)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica has taken a call; see ``RequestRouter``."""
        call = pending_request.metadata.internal_request_id
        self._unsent.pop(call, None)
        self._chooser.place(call, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record the end of a call, for any reason; see ``RequestRouter``."""
        self._chooser.release(internal_request_id, replica_id.unique_id)


def _jobs_of(request: PendingRequest) -> Sequence[GenerationJob]:
    """Return the jobs of a call; empty if it is no call of ``EngineReplica.generate``."""
    jobs = request.args[0] if request.args else None
    return jobs if isinstance(jobs, tuple) and all(isinstance(job, GenerationJob) for job in jobs) else ()
