"""How many engines there are as the load comes and goes (``server.max_replicas``): a policy for Ray Serve's autoscaling.

Serve starts and stops the engines, each replica says twice a second what it has to do, and the policy says how many are needed.
Its class travels to Serve's controller by value, and imports nothing of ours.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

REQUESTS, TOKENS = "requests", "tokens_per_s"  # what a replica says: choices that run or wait, and tokens emitted per second
UP_S, DOWN_S = 5.0, 300.0  # for which more, or fewer, are needed before there are
WINDOW_S = 15.0  # over which what replicas say is averaged


class LoadPolicy:
    """As many engines as have to be there so that none has more to do than it is meant to."""

    def __init__(self, requests: float, tokens_per_s: float | None) -> None:
        """
        Args:
            requests: choices that an engine is meant to have, those that wait included.
            tokens_per_s: that it is meant to emit; None where that does not count.
        """
        self._targets = {"requests": requests, "tokens_per_s": tokens_per_s}

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many there should be, and nothing to be kept. Serve keeps it within bounds, and waits before it acts.

        As many as are meant to be there while none has said anything: a model that loads is no engine without work.

        Example: 8 requests are meant, and two engines have 15 and 3: three are needed.
        """
        said = ctx.aggregated_metrics or {}
        if not said.get(REQUESTS):
            return ctx.target_num_replicas, {}
        needed = [sum(said.get(name, {}).values()) / target for name, target in self._targets.items() if target is not None]
        return math.ceil(max(needed)), {}


class Pace:
    """Tokens per second of a count that grows."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None

    def since(self, tokens: int) -> float:
        """Of the time since it was asked last; 0 at first."""
        now, before = time.monotonic(), self._before
        self._before = now, tokens
        return 0.0 if before is None or now <= before[0] else (tokens - before[1]) / (now - before[0])
