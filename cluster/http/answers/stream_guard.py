"""Padding and cadence of streams, so that sizes and times of packets do not reveal their content.

* ``cadence``: one chunk per period, empty if there are no new tokens. This hides when steps end.
* ``pad``: each event is padded to a multiple of some bytes by ``obfuscation``, a field of random characters like OpenAI's.

Example: with 100 ms and 512 bytes, 3 + 5 tokens that came in two steps within a period leave as one chunk of 512 bytes, and so
do none. What is left to see is how long the answer takes, and a chunk with so much text that it needs another 512 bytes.
"""

# An observer of encrypted packets sees their times and sizes. With speculative decoding both follow the number of accepted
# tokens, and this sequence has been shown to identify prompts (https://arxiv.org/abs/2411.01076).

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.types.openai import CompletionFields
from outrider.configs.slices import ServerOptions
from outrider.decoding.request import StepOutput, merge_outputs

Outputs = AsyncGenerator[tuple[int, StepOutput], None]  # (index of the choice, output)
PERIOD_S = 0.1  # cadence: time between two chunks
PAD_BYTES = 512  # pad: lengths of events are multiples of it
_FIELD = ',"obfuscation":"'
_TAIL = "}\n\n"


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Padding and cadence of one stream."""

    period_s: float | None = None  # seconds between chunks; None sends chunks as steps end
    pad_bytes: int | None = None  # event lengths are multiples of it; None disables padding

    def pad(self, event: str) -> str:
        """Return an event that holds a JSON object, padded if enabled: 15 bytes, 17 of an empty field and 32 more make 64."""
        if self.pad_bytes is None:
            return event
        bare = len(event.encode()) + len(_FIELD) + 1
        filling = secrets.token_hex((-bare % self.pad_bytes + 1) // 2)[: -bare % self.pad_bytes]
        return f'{event.removesuffix(_TAIL)}{_FIELD}{filling}"{_TAIL}'

    @property
    def has_period(self) -> bool:
        """Return whether empty chunks are sent."""
        return self.period_s is not None

    def outputs(self, outputs: Outputs, choices: int) -> Outputs:
        """Return the outputs of all choices, at the cadence if enabled. Closing the result closes ``outputs``."""
        return outputs if self.period_s is None else paced(outputs, choices, self.period_s)


async def paced(outputs: Outputs, choices: int, period_s: float) -> Outputs:
    """Yield one output per period and unfinished choice: all merged, or an empty one. Errors are raised after earlier outputs."""
    arrived: list[list[StepOutput]] = [[] for _ in range(choices)]

    async def read() -> None:
        async for index, output in outputs:
            arrived[index].append(output)

    reader = asyncio.create_task(read())
    clock = asyncio.get_running_loop().time
    began, tick, live = clock(), 0, set(range(choices))
    try:
        while live:
            tick = max(tick, int((clock() - began) / period_s)) + 1  # a sleep may end early; no tick may repeat
            await asyncio.sleep(began + tick * period_s - clock())
            complete = reader.done()
            for index in sorted(live):
                merged = merge_outputs(arrived[index])
                arrived[index].clear()
                if merged.finish_reason is not None:
                    live.discard(index)
                yield index, merged
            if complete and live:
                await reader  # raises the error that ended it early
                return
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await outputs.aclose()


class StreamGuard:
    """Stream guard of the server, applied to requests."""

    def __init__(self, server: ServerOptions) -> None:
        guard = server.stream_guard
        self._period_s = PERIOD_S if guard in ("cadence", "both") else None
        self._pads, self._is_on = guard in ("pad", "both"), guard != "none"

    def shape(self, body: CompletionFields) -> StreamShape:
        """Return padding and cadence of a request's stream; ``stream_options.include_obfuscation`` overrides the padding.

        Raises ApiError: 400 if the request wants a report of its steps, which the guard hides.
        """
        if self._is_on and body.speculation is not None and getattr(body.speculation, "report", None):
            message = "speculation.report is not available with server.stream_guard, which hides steps: leave it out"
            raise ApiError(400, message, param="speculation.report", code="unsupported_parameter")
        requested = None if body.stream_options is None else body.stream_options.include_obfuscation
        pads = self._pads if requested is None else requested
        return StreamShape(self._period_s, PAD_BYTES if pads else None)
