"""What requests took and gave while something was wrong, beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.bench.record import spread


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, streamed to its end."""

    output: list[int] | str  # token ids, or text where that is all there is
    tokens: int
    steps: int  # forwards; 0 where unknown
    shared: int  # accepted tokens that stood in other requests' outputs
    seconds: float  # from asking to the end
    decode_s: float  # from the first token to the end
    place: int  # the how-many-eth it was to end


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests once, in the order of their prompts."""

    answers: tuple[Answer, ...]
    seconds: float  # from the first one's beginning to the last one's end

    @property
    def tokens(self) -> int:
        """Emitted by all."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def decode_s(self) -> float:
        """Of all requests together, the times at which several ran counted for each."""
        return sum(answer.decode_s for answer in self.answers)

    @property
    def summary(self) -> str:
        """A line of progress."""
        return f"{self.tokens / self.seconds:.0f} tokens/s, {tokens_per_step(self.answers)} tokens per step"


def tokens_per_step(answers: Sequence[Answer]) -> float | None:
    """Emitted tokens per forward; None where no forward was counted."""
    steps = sum(answer.steps for answer in answers)
    return round(sum(answer.tokens for answer in answers) / steps, 3) if steps else None


def compared(passes: Sequence[Pass], plain: Sequence[Pass]) -> dict[str, Any]:
    """A phase beside plain decoding of the same repeat: how many outputs are the same, how fast it was, and ``ratios``.

    Args:
        passes: [repeats] of the phase.
        plain: [repeats], with the same requests.
    """
    pairs = _pairs(passes, plain)
    own = [one for one, _ in pairs]
    seconds = [one.seconds for one in own]
    return {
        "requests": len(own),
        "identical": sum(one.output == other.output for one, other in pairs),
        "tokens": sum(one.tokens for one in own),
        "tokens_per_step": tokens_per_step(own),
        "shared_tokens": sum(one.shared for one in own),
        "tokens_per_s": spread([one.tokens / one.seconds for one in passes]),
        "request_s": {f"p{percent}": round(float(np.percentile(seconds, percent)), 4) for percent in (50, 95, 100)},
        **ratios(passes, plain),
    }


def ratios(passes: Sequence[Pass], others: Sequence[Pass]) -> dict[str, dict[str, float]]:
    """How many times as fast a phase was as another with the same requests, repeat by repeat: above 1 is faster.

    Returns:
        ``ratio``, of the seconds of all requests, and ``decode_ratio``, of those after the first tokens: the median, the least
        and the largest of the repeats. ``request_ratio``, of the seconds of a single request: percentiles over all of them, the
        lowest is the one that suffered most.

    Example: requests of 2 s and 4 s in the other phase that took 1 s and 5 s in this one have the request ratios 2.0 and 0.8.
    """
    both = list(zip(passes, others, strict=True))
    single = np.array([other.seconds / one.seconds for one, other in _pairs(passes, others)])
    percentiles = {f"p{percent}": round(float(np.percentile(single, percent)), 3) for percent in (50, 5)}
    return {
        "ratio": spread([other.seconds / one.seconds for one, other in both]),
        "decode_ratio": spread([other.decode_s / one.decode_s for one, other in both]),
        "request_ratio": percentiles | {"lowest": round(float(single.min()), 3)},
    }


def halves(first: Sequence[Pass], second: Sequence[Pass]) -> dict[str, float | None]:
    """Tokens per step of B's requests: of those that A had answered before the fault, and of those that it answered after it.

    Args:
        first: [repeats] of A; the fault came when half of the requests were done.
        second: [repeats] of B, with the same requests.
    """
    before: list[Answer] = []
    after: list[Answer] = []
    for one, other in zip(first, second, strict=True):
        for answered, answer in zip(one.answers, other.answers, strict=True):
            (before if answered.place <= len(one.answers) // 2 else after).append(answer)
    return {"answered_before": tokens_per_step(before), "answered_after": tokens_per_step(after)}


def _pairs(passes: Sequence[Pass], others: Sequence[Pass]) -> list[tuple[Answer, Answer]]:
    """Each request of all repeats with itself."""
    return [pair for one, other in zip(passes, others, strict=True) for pair in zip(one.answers, other.answers, strict=True)]
