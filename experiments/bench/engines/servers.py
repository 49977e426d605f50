"""What answers a load in this process: our engine, and transformers one prompt at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from decoding.request import Request
from engine.engine import Engine
from experiments.bench.engines.contestants import Prompt, make_request
from experiments.bench.engines.guided import GuidedExecutor
from experiments.bench.engines.stock_generate import StockGenerate
from experiments.bench.engines.traffic import Progress, ServerCounts


class EngineServer:
    """Our engine with one strategy, stepped by who asks for progress."""

    def __init__(self, name: str, make_engine: Callable[[], Engine], max_tokens: int, guide: GuidedExecutor | None) -> None:
        """
        Args:
            name: of the strategy, with its options.
            make_engine: makes an engine that has seen no request.
            max_tokens: of each output that is not known.
            guide: takes the known outputs, in guided runs.
        """
        self.name = name
        self._make_engine, self._max_tokens, self._guide = make_engine, max_tokens, guide
        self._engine: Engine | None = None
        self._requests: dict[str, Request] = {}
        self._drafted: dict[str, int] = {}  # rows drafted for each live request so far
        self._steps = 0

    def begin(self) -> None:
        """See ``Server``."""
        self._engine, self._requests, self._drafted, self._steps = self._make_engine(), {}, {}, 0

    def submit(self, prompt: Prompt, tenant: str = "local") -> None:
        """See ``Server``."""
        assert self._engine is not None, "not begun"
        request = make_request(prompt, self._max_tokens, self._guide, tenant)
        self._engine.add(request)
        self._requests[prompt.id], self._drafted[prompt.id] = request, 0

    def cancel(self, key: str) -> None:
        """Ends a live request: its client hung up."""
        assert self._engine is not None, "not begun"
        self._engine.abort(key)

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
        accepted: dict[str, int] = {}
        for request in self._requests.values():
            for source, count in request.stats.accepted_by_source.items():
                accepted[source] = accepted.get(source, 0) + count
        cached = sum(request.stats.cached_tokens for request in self._requests.values())
        self._engine = None
        return ServerCounts(self._steps, None, True, cached, dict(sorted(accepted.items())))


class OneAtATime:
    """transformers' ``generate`` behind a queue: who comes while it runs waits for its turn."""

    def __init__(self, stock: StockGenerate) -> None:
        """
        Args:
            stock: takes one prompt at a time.
        """
        self.name, self._stock = stock.name, stock
        self._queue: deque[Prompt] = deque()
        self._steps = 0
        self._accepted: dict[str, int] = {}

    def begin(self) -> None:
        """See ``Server``."""
        self._queue, self._steps, self._accepted = deque(), 0, {}

    def submit(self, prompt: Prompt, tenant: str = "local") -> None:
        """See ``Server``; it keeps nothing, so there are no tenants."""
        self._queue.append(prompt)

    def poll(self, wait_s: float) -> list[Progress]:
        """See ``Server``: the next prompt, to its end. Of its tokens the first has a time of its own, the others the last."""
        if not self._queue:
            time.sleep(wait_s)
            return []
        prompt, began = self._queue.popleft(), time.perf_counter()
        run = self._stock.run([prompt])
        self._steps += run.steps
        for source, count in run.accepted_by_source.items():
            self._accepted[source] = self._accepted.get(source, 0) + count
        output = run.outputs[0]
        first = Progress(prompt.id, began + run.prefill_s, tuple(output[:1]), 0, len(output) < 2)
        rest = [Progress(prompt.id, time.perf_counter(), tuple(output[1:]), 0, True)] if len(output) > 1 else []
        return [first, *rest]

    def end(self) -> ServerCounts:
        """See ``Server``."""
        return ServerCounts(self._steps, self._steps, False, None, self._accepted)
