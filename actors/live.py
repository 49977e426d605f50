"""Commands to a replica's engine thread: new requests with the event loop that awaits them, aborts, arrivals from Redis."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from decoding.request import CLEARED_TOKENS, Request, StepOutput
from decoding.step_output import merge_outputs

MOST_HELD = CLEARED_TOKENS // 2  # tokens: what is computed again after a crash is less than what ends a quarantine


@dataclass(slots=True)
class Live:
    """A request and the queue of the event loop that waits for its outputs."""

    request: Request
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[StepOutput | Exception]
    published: int = 0  # emitted tokens that the mirror was told of
    held: StepOutput | None = None  # goes out with the next
    told_s: float = -math.inf  # when tokens went out last
    resumed: bool = False  # takes the place of a live request of the same id and account
    announced: bool = False  # its consumer is told when it is computed alone
    began_s: float = field(default_factory=time.monotonic)

    def tell(self, output: StepOutput, now_s: float, period_s: float) -> bool:
        """Hands an output to the event loop, or holds it until the next where the last went less than ``period_s`` ago.

        The end of a request, what is reported by step and more than a few tokens are not held. Returned is what ``put`` returns.
        """
        held = 0 if self.held is None else len(self.held.token_ids)
        at_once = output.finish_reason is not None or output.report is not None or held + len(output.token_ids) >= MOST_HELD
        if now_s - self.told_s >= period_s or at_once:
            self.told_s = now_s
            return self.put(output)
        self.held = output if self.held is None else merge_outputs((self.held, output))
        return True

    def put(self, item: StepOutput | Exception) -> bool:
        """Hands an item to the event loop from another thread, and first what is held; False when that loop is closed and nobody
        waits any more."""
        if isinstance(item, StepOutput):
            item = item if self.held is None else merge_outputs((self.held, item))
            self.held = None
        try:
            if self.held is not None:
                self.loop.call_soon_threadsafe(self.items.put_nowait, self.held)
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that nobody waits for any more."""

    live: Live


@dataclass(frozen=True, slots=True)
class Arrived:
    """Something of other replicas waits to be applied."""


Command = Live | Abort | Arrived | None  # None: stop
