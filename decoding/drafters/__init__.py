"""Drafters by name. A strategy is chosen here, at build time, and nowhere else."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decoding.drafters.auto import AutoDrafter
from decoding.drafters.autoregressive import AutoregressiveDrafter
from decoding.drafters.base import SOURCES, Drafter
from decoding.drafters.by_request import ByRequest
from decoding.drafters.jacobi import JacobiDrafter
from decoding.drafters.llma import LlmaDrafter
from decoding.drafters.ngrammys import NgrammysDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.recycling import RecyclingDrafter
from decoding.drafters.suffix import SuffixDrafter
from decoding.drafters.trie import TrieDrafter
from decoding.request import PLAIN
from decoding.strategy_choice import parse_strategy

__all__ = ["LOSSLESS", "SOURCES", "STRATEGIES", "ByRequest", "Drafter", "build_drafter", "build_drafters"]

STRATEGIES: dict[str, Callable[..., Drafter]] = {
    PLAIN: AutoregressiveDrafter,
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


def build_drafters(strategy: str, options: Mapping[str, Any], others: Sequence[str]) -> Drafter:
    """The drafter of an engine whose requests may choose among several strategies.

    Plain decoding takes no drafter (``Request.plain``): with no strategy beside it and ``strategy``, this is ``build_drafter``.

    Args:
        strategy: of requests that ask for none.
        options: arguments of its drafter.
        others: further strategies that requests may ask for, each ``NAME`` or ``NAME:option=value,...`` (``parse_strategy``).
            The names of ``strategy`` and of plain decoding may be among them.

    Raises:
        ValueError: as ``build_drafter``; one of the others is there twice, or is ``strategy`` with options.

    Example: ``build_drafters("auto", {}, ["llma:copy_length=9", "trie"])`` drafts with any of the three, by request.
    """
    drafters = {strategy: build_drafter(strategy, options)}
    for text in others:
        choice = parse_strategy(text)
        if choice.name == strategy and choice.options:
            raise ValueError(f"strategies: {text} is the strategy of requests that ask for none, its options go with it")
        if choice.name != strategy and choice.name in drafters:
            raise ValueError(f"strategies: {choice.name} is there twice")
        drafter = choice.build()
        if choice.name not in (strategy, PLAIN):
            drafters[choice.name] = drafter
    return drafters[strategy] if len(drafters) == 1 else ByRequest(drafters)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
