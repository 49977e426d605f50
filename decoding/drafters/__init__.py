"""Drafters by name. A strategy is chosen here, at build time, and nowhere else."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from decoding.drafters.auto import AutoDrafter
from decoding.drafters.autoregressive import AutoregressiveDrafter
from decoding.drafters.base import SOURCES, Drafter
from decoding.drafters.jacobi import JacobiDrafter
from decoding.drafters.llma import LlmaDrafter
from decoding.drafters.ngrammys import NgrammysDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.recycling import RecyclingDrafter
from decoding.drafters.suffix import SuffixDrafter
from decoding.drafters.trie import TrieDrafter

__all__ = ["LOSSLESS", "SOURCES", "STRATEGIES", "Drafter", "build_drafter"]

STRATEGIES: dict[str, Callable[..., Drafter]] = {
    "autoregressive": AutoregressiveDrafter,
    "prompt_lookup": PromptLookupDrafter,
    "llma": LlmaDrafter,
    "jacobi": JacobiDrafter,
    "ngrammys": NgrammysDrafter,
    "recycling": RecyclingDrafter,
    "suffix": SuffixDrafter,
    "trie": TrieDrafter,
    "auto": AutoDrafter,
}
LOSSLESS = frozenset(STRATEGIES)  # those that preserve the target's law: all are verified by ``verify_exact``


def build_drafter(strategy: str, options: Mapping[str, Any]) -> Drafter:
    """The drafter of a strategy.

    Args:
        strategy: a key of ``STRATEGIES``.
        options: arguments of the drafter.

    Raises:
        ValueError: an unknown strategy or option (the message names the nearest known one), or a value outside its range.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not known{_nearest(strategy, STRATEGIES)}; known: {', '.join(STRATEGIES)}")
    known = inspect.signature(STRATEGIES[strategy]).parameters
    for name, value in options.items():
        if name not in known:
            choices = ", ".join(known) or "none"
            raise ValueError(f"{strategy} has no option {name!r}{_nearest(name, known)}; its options: {choices}")
        expected = type(known[name].default)
        if type(value) is not expected:
            raise ValueError(f"option {name!r} of {strategy} must be of type {expected.__name__}, got {value!r}")
    return STRATEGIES[strategy](**options)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
