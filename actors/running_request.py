"""Commands to a replica's engine thread: new requests with their event loops, aborts, and updates from Redis."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from outrider.decoding.request import QUARANTINE_TOKENS, Request, StepOutput, merge_outputs

MOST_HELD = (
    QUARANTINE_TOKENS // 2
)  # tokens; held output is recomputed after a crash, so it must be less than what ends a quarantine


@dataclass(slots=True)
class RunningRequest:
    """Running request and the queue of the event loop that receives its outputs."""

    request: Request
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[StepOutput | Exception]
    published: int = 0  # output tokens already passed to the mirror
    held: StepOutput | None = None  # output delayed until the next one
    delivered_s: float = -math.inf  # time of the last delivery to the event loop
    resumed: bool = False  # replaces a running request of the same id and account
    notifies_quarantine: bool = False  # the consumer is notified when the request is computed alone
    began_s: float = field(default_factory=time.monotonic)

    def deliver(self, output: StepOutput, now_s: float, period_s: float) -> bool:
        """Deliver an output, or hold it if the last delivery was less than ``period_s`` ago. Return the result of ``put``."""
        held = 0 if self.held is None else len(self.held.token_ids)
        # Final outputs, step reports and more than a few tokens are never held.
        at_once = output.finish_reason is not None or output.report is not None or held + len(output.token_ids) >= MOST_HELD
        if now_s - self.delivered_s >= period_s or at_once:
            self.delivered_s = now_s
            return self.put(output)
        self.held = output if self.held is None else merge_outputs((self.held, output))
        return True

    def put(self, item: StepOutput | Exception) -> bool:
        """Send an item, after any held output, to the event loop from another thread. Return False if the loop is closed."""
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
class AbortRequest:
    """Request whose consumer has gone."""

    running: RunningRequest


@dataclass(frozen=True, slots=True)
class UpdatesReady:
    """Signal that updates of other replicas are ready to be applied."""


Command = RunningRequest | AbortRequest | UpdatesReady | None  # None: stop
