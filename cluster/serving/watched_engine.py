"""An ``EnginePort`` that ends a request at its deadline and counts the tokens it used."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from actors.replica import Description
from cluster.http.errors import ApiError
from cluster.serving.generation import EnginePort, Job
from decoding.request import StepOutput


@dataclass(slots=True)
class Spending:
    """The tokens of a request."""

    input_tokens: int  # of prompts, and of the texts that answers may repeat
    output_tokens: int = 0
    begun: bool = False  # an engine took it

    @property
    def tokens(self) -> int:
        """What it has used: nothing as long as no engine took it."""
        return self.input_tokens + self.output_tokens if self.begun else 0


class WatchedEngine:
    """The engine for one request."""

    def __init__(
        self,
        engine: EnginePort,
        spending: Spending | None,
        arrived_s: float,
        allowed_s: float,
        refuse: Callable[[ApiError], ApiError],
    ) -> None:
        """
        Args:
            engine: computes.
            spending: is told of the tokens; None where nobody asks.
            arrived_s: of the request, by the clock of ``time.monotonic``.
            allowed_s: its answer is to be there so long after; ``math.inf``: whenever it is.
            refuse: counts the error.
        """
        self._engine, self._spending, self._refuse = engine, spending, refuse
        self._deadline_s, self._allowed_s = arrived_s + allowed_s, allowed_s

    async def generate(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        """See ``EnginePort.generate``. Raises ``ApiError`` (504) at the deadline."""
        spending = self._spending
        async with contextlib.aclosing(self._engine.generate(job)) as outputs:
            while True:
                try:
                    output = await self._next(outputs)
                except StopAsyncIteration:
                    return
                if spending is not None:
                    spending.begun = True
                    spending.output_tokens += len(output.token_ids)
                yield output

    async def describe(self) -> list[Description]:
        """See ``EnginePort.describe``."""
        return await self._engine.describe()

    async def _next(self, outputs: AsyncGenerator[StepOutput, None]) -> StepOutput:
        if self._deadline_s == math.inf:
            return await anext(outputs)
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()) as limit:
                return await anext(outputs)
        except TimeoutError:
            if not limit.expired():
                raise  # not ours
        message = f"the answer was not there within {self._allowed_s:g} s (timeout, or the server's limits.request_timeout_s)"
        raise self._refuse(ApiError(504, message, code="deadline_exceeded"))
