"""Cases of every kind, each drawn by a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from experiments.service.fuzzing.bodies import BODIES
from experiments.service.fuzzing.case import Case, Server
from experiments.service.fuzzing.odd_requests import REQUESTS


def _json(kind: str, make: Callable[[random.Random], tuple[str, Any]]) -> Callable[[random.Random, Server], Case]:
    def case(rng: random.Random, server: Server) -> Case:
        path, body = make(rng)
        return Case(kind, path, {"model": server.model, **body} if path != "/detokenize" else body)

    return case


KINDS: tuple[tuple[int, Callable[[random.Random, Server], Case]], ...] = (
    *((weight, _json(kind, make)) for weight, kind, make in BODIES),
    *REQUESTS,
)


def make_case(seed: int, number: int, server: Server) -> Case:
    """Return the case of a seed with a number: always the same, but for ids of events, which a server signs."""
    rng = random.Random(f"{seed}/{number}")
    (make,) = rng.choices([make for _, make in KINDS], [weight for weight, _ in KINDS])
    return make(rng, server)
