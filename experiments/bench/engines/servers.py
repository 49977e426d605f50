"""What answers a load in this process: our engine, stepped by who asks for progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from decoding.request import Request
from engine.engine import Engine
from experiments.bench.engines.contestants import Prompt
from experiments.bench.engines.traffic import Progress, ServerCounts


class EngineServer:
    """Our engine with one strategy."""

    def __init__(self, name: str, make_engine: Callable[[], Engine], make_request: Callable[[Prompt], Request]) -> None:
        """
        Args:
            name: of the strategy, with its options.
            make_engine: makes an engine without requests; one that has seen none, where history and KV are to begin anew.
            make_request: makes the request for a prompt, with its id.
        """
        self.name = name
        self._make_engine, self._make_request = make_engine, make_request
        self._engine: Engine | None = None
        self._requests: dict[str, Request] = {}
        self._drafted: dict[str, int] = {}  # rows drafted for each live request so far
        self._steps = 0

    def begin(self) -> None:
        """See ``Server``."""
        self._engine, self._requests, self._drafted, self._steps = self._make_engine(), {}, {}, 0

    def submit(self, prompt: Prompt) -> None:
        """See ``Server``."""
        assert self._engine is not None, "not begun"
        request = self._make_request(prompt)
        self._engine.add(request)
        self._requests[prompt.id], self._drafted[prompt.id] = request, 0

    def poll(self, wait_s: float) -> list[Progress]:
        """See ``Server``: one step; without requests it sleeps."""
        assert self._engine is not None, "not begun"
        if not self._engine.has_work:
            time.sleep(wait_s)
            return []
        outputs = self._engine.step()
        at_s = time.perf_counter()
        self._steps += 1
        told = []
        for output in outputs:
            key = output.request_id
            drafted = self._requests[key].stats.drafted
            finished = output.finish_reason is not None
            told.append(Progress(key, at_s, output.token_ids, drafted - self._drafted[key], finished))
            self._drafted[key] = drafted
        return told

    def end(self) -> ServerCounts:
        """See ``Server``."""
        accepted: Counter[str] = Counter()
        for request in self._requests.values():
            accepted.update(request.stats.accepted_by_source)
        cached = sum(request.stats.cached_tokens for request in self._requests.values())
        self._engine = None
        return ServerCounts(self._steps, True, cached, dict(sorted(accepted.items())))
