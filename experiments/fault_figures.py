"""What requests took and gave while something was wrong, beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, streamed to its end."""

    output: list[int] | str  # token ids, or text where that is all there is
    tokens: int
    steps: int  # forwards; 0 where unknown
    shared: int  # accepted tokens that stood in other requests' outputs
    seconds: float
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
    def summary(self) -> str:
        """A line of progress."""
        return f"{self.tokens / self.seconds:.0f} tokens/s, {tokens_per_step(self.answers)} tokens per step"


def tokens_per_step(answers: Sequence[Answer]) -> float | None:
    """Emitted tokens per forward; None where no forward was counted."""
    steps = sum(answer.steps for answer in answers)
    return round(sum(answer.tokens for answer in answers) / steps, 3) if steps else None


def compared(passes: Sequence[Pass], plain: Sequence[Pass]) -> dict[str, Any]:
    """A phase beside plain decoding of the same repeat.

    Args:
        passes: [repeats] of the phase.
        plain: [repeats], with the same requests.

    Returns:
        ``tokens_per_s``, ``ratio`` (all requests: plain seconds over the phase's) with the mean, the lowest and the highest of the
        repeats; ``request_ratio`` (one request's seconds, each with its own) with percentiles over all requests and repeats, of
        which ``lowest`` is the request that suffered most; how many outputs are plain decoding's own.

    Example: two requests that took 2 s and 4 s plainly and 1 s and 5 s in the phase have the request ratios 2.0 and 0.8.
    """
    pairs = [
        (own, other) for one, by in zip(passes, plain, strict=True) for own, other in zip(one.answers, by.answers, strict=True)
    ]
    ratios = [by.seconds / one.seconds for one, by in zip(passes, plain, strict=True)]
    single = np.array([other.seconds / own.seconds for own, other in pairs])
    low, middle = np.percentile(single, [5, 50])
    return {
        "requests": len(pairs),
        "identical": sum(own.output == other.output for own, other in pairs),
        "tokens": sum(one.tokens for one in passes),
        "tokens_per_step": tokens_per_step([own for own, _ in pairs]),
        "shared_tokens": sum(own.shared for own, _ in pairs),
        "tokens_per_s": _spread([one.tokens / one.seconds for one in passes]),
        "ratio": _spread(ratios),
        "request_ratio": {"p50": round(float(middle), 3), "p5": round(float(low), 3), "lowest": round(float(single.min()), 3)},
        "request_s": {"p50": _percentile(pairs, 50), "p95": _percentile(pairs, 95), "max": _percentile(pairs, 100)},
    }


def halves(first: Sequence[Pass], second: Sequence[Pass]) -> dict[str, float | None]:
    """Tokens per step of B's requests: of those that A had answered before the fault, and of those that it answered after it.

    Args:
        first: [repeats] of A; the fault came when half of the requests were done.
        second: [repeats] of B, with the same requests.
    """
    before, after = [], []
    for one, other in zip(first, second, strict=True):
        for answered, answer in zip(one.answers, other.answers, strict=True):
            (before if answered.place <= len(one.answers) // 2 else after).append(answer)
    return {"answered_before": tokens_per_step(before), "answered_after": tokens_per_step(after)}


def _percentile(pairs: Sequence[tuple[Answer, Answer]], percent: float) -> float:
    return round(float(np.percentile([own.seconds for own, _ in pairs], percent)), 4)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 3), "lowest": round(min(values), 3), "highest": round(max(values), 3)}
