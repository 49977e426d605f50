"""Padding and cadence of streams, so that sizes and times of packets do not tell what they hold.

Who sees the encrypted packets of a stream sees when they come and how long they are. With speculative decoding both follow the
number of accepted tokens, and that sequence has been shown to identify prompts (https://arxiv.org/abs/2411.01076). Two guards,
alone or together (``both``):

* ``cadence``: tokens leave in one chunk a period, an empty one where nothing is new. When steps end is not seen any more.
* ``pad``: each event is filled up to a multiple of some bytes by ``obfuscation``, a field of random characters as OpenAI's has.

Example: with 100 ms and 512 bytes, 3 + 5 tokens that came in two steps within a period leave as one chunk of 512 bytes, and so
do none. What is left to see is how long the answer takes, and a chunk with so much text that it needs another 512 bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from cluster.http.errors import ApiError
from cluster.http.types.openai import CompletionFields
from configs.slices import ServerOptions
from decoding.step_output import StepOutput, merge_outputs

Outputs = AsyncGenerator[tuple[int, StepOutput], None]  # of choices by number
_FIELD = ',"obfuscation":"'
_TAIL = "}\n\n"


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How one stream leaves."""

    period_s: float | None = None  # of its chunks; None: as the steps end
    pad_bytes: int | None = None  # lengths of events are multiples of it; None: as they are

    def pad(self, event: str) -> str:
        """A server-sent event that holds a JSON object, filled up where that is asked for.

        Example: ``data: {"a":1}`` and its two line ends are 15 bytes; with the 17 of an empty field, 32 more make 64.
        """
        if self.pad_bytes is None:
            return event
        bare = len(event.encode()) + len(_FIELD) + 1
        filling = secrets.token_hex((-bare % self.pad_bytes + 1) // 2)[: -bare % self.pad_bytes]
        return f'{event.removesuffix(_TAIL)}{_FIELD}{filling}"{_TAIL}'

    @property
    def has_period(self) -> bool:
        """Whether a chunk comes also where there is nothing new."""
        return self.period_s is not None

    def outputs(self, outputs: Outputs, choices: int) -> Outputs:
        """The outputs of ``choices`` choices as they are to leave. Closing it closes ``outputs``."""
        return outputs if self.period_s is None else paced(outputs, choices, self.period_s)


async def paced(outputs: Outputs, choices: int, period_s: float) -> Outputs:
    """In each period one output of each choice that has not ended: all that came in it, or nothing.

    Raises what ``outputs`` raises, after what came before it.
    """
    arrived: list[list[StepOutput]] = [[] for _ in range(choices)]

    async def read() -> None:
        async for index, output in outputs:
            arrived[index].append(output)

    reader = asyncio.create_task(read())
    clock = asyncio.get_running_loop().time
    began, tick, live = clock(), 0, set(range(choices))
    try:
        while live:
            tick = max(tick, int((clock() - began) / period_s)) + 1  # a sleep may end early: no tick comes twice
            await asyncio.sleep(began + tick * period_s - clock())
            complete = reader.done()
            for index in sorted(live):
                merged = merge_outputs(arrived[index])
                arrived[index].clear()
                if merged.finish_reason is not None:
                    live.discard(index)
                yield index, merged
            if complete and live:
                await reader  # raises why it ended early
                return
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await outputs.aclose()


class StreamGuard:
    """The server's guard, and what single requests may ask of it."""

    def __init__(self, server: ServerOptions) -> None:
        """
        Args:
            server: ``stream_guard`` and its measures.
        """
        guard, self._pad_bytes = server.stream_guard, server.stream_pad_bytes
        self._period_s = server.stream_period_s if guard in ("cadence", "both") else None
        self._pads, self._is_on = guard in ("pad", "both"), guard != "none"

    def shape(self, body: CompletionFields) -> StreamShape:
        """How the answer to a request leaves. ``stream_options.include_obfuscation`` decides on the padding, where it is there.

        Raises:
            ApiError: 400, it asks for a report of its steps, which is what the guard hides.
        """
        if self._is_on and body.speculation is not None and getattr(body.speculation, "report", None):
            message = "speculation.report is not to be had here: server.stream_guard hides what steps emit; leave it out"
            raise ApiError(400, message, param="speculation.report", code="unsupported_parameter")
        asked = None if body.stream_options is None else body.stream_options.include_obfuscation
        pads = self._pads if asked is None else asked
        return StreamShape(self._period_s, self._pad_bytes if pads else None)
