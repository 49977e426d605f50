"""Commands to a replica's engine thread: new requests with the event loop that awaits them, aborts, arrivals from Redis."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from decoding.request import Request, StepOutput


@dataclass(slots=True)
class Live:
    """A request and the queue of the event loop that waits for its outputs."""

    request: Request
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[StepOutput | Exception | None]  # None: a beat
    published: int = 0  # emitted tokens that the mirror was told of
    announced: bool = False  # being a suspect, to its consumer, that it is computed

    async def beat(self, every_s: float) -> None:
        """Puts a beat, again and again."""
        while True:
            await asyncio.sleep(every_s)
            self.items.put_nowait(None)

    def put(self, item: StepOutput | Exception) -> bool:
        """Hands an item to the event loop from another thread; False when that loop is closed and nobody waits any more."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Abort:
    """A request that nobody waits for any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """Something of other replicas waits to be applied."""


Command = Live | Abort | Arrived | None  # None: stop
