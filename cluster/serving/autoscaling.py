"""Autoscaling of engine replicas (``server.max_replicas``): a policy for Ray Serve."""

# Each replica reports its load twice a second, the policy computes the number of replicas, and Serve starts and stops them.

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

REQUESTS, TOKENS = "requests", "tokens_per_s"  # reported metrics: choices that run or wait, and tokens emitted per second
UP_S, DOWN_S = 5.0, 300.0  # seconds for which more, or fewer, replicas must be needed before Serve acts
WINDOW_S = 15.0  # seconds over which reports are averaged


class LoadPolicy:
    """Autoscaling policy: as few replicas as keep each one's load at or below its target."""

    # Serve's controller gets the class by value, so it imports nothing of Outrider.

    def __init__(self, requests: float, tokens_per_s: float | None) -> None:
        """Set the targets per replica: choices, waiting ones included, and emitted tokens per second, None for no target."""
        self._targets = {"requests": requests, "tokens_per_s": tokens_per_s}

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas and no state: for a target of 8 requests, two engines with 15 and 3 need three."""
        said = ctx.aggregated_metrics or {}
        if not said.get(REQUESTS):
            # No report yet: the models are still loading, which does not mean that they are idle.
            return ctx.target_num_replicas, {}
        needed = [sum(said.get(name, {}).values()) / target for name, target in self._targets.items() if target is not None]
        return math.ceil(max(needed)), {}


class Pace:
    """Rate of a growing token count."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None

    def since(self, tokens: int) -> float:
        """Return the tokens per second since the previous call; 0 at the first."""
        now, before = time.monotonic(), self._before
        self._before = now, tokens
        return 0.0 if before is None or now <= before[0] else (tokens - before[1]) / (now - before[0])
