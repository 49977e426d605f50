"""Registry of drafters by the strategy names that requests and configurations use."""

from __future__ import annotations

import difflib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.decoding.request import PLAIN

if TYPE_CHECKING:
    from outrider.decoding.drafters.base import Drafter

# Import path of a drafter class, imported when it is built; or the class itself.
Maker = str | Callable[..., "Drafter"]
# Strategies without a draft model: they work with any target.
STRATEGIES: dict[str, Maker] = {
    PLAIN: "outrider.decoding.drafters.autoregressive:AutoregressiveDrafter",
    "prompt_lookup": "outrider.decoding.drafters.prompt_lookup:PromptLookupDrafter",
    "adapld": "outrider.decoding.drafters.prompt_lookup:AdaPldDrafter",
    "llma": "outrider.decoding.drafters.llma:LlmaDrafter",
    "jacobi": "outrider.decoding.drafters.jacobi:JacobiDrafter",
    "ngrammys": "outrider.decoding.drafters.ngrammys:NgrammysDrafter",
    "recycling": "outrider.decoding.drafters.recycling:RecyclingDrafter",
    "racer": "outrider.decoding.drafters.recycling:RacerDrafter",
    "suffix": "outrider.decoding.drafters.suffix:SuffixDrafter",
    "suffix_decoding": "outrider.decoding.drafters.suffix:SuffixDecodingDrafter",
    "sam": "outrider.decoding.drafters.suffix:SamDrafter",
    "trie": "outrider.decoding.drafters.trie:TrieDrafter",
    "auto": "outrider.decoding.drafters.auto:AutoDrafter",
}
# Strategies with a second, smaller model (``Drafter.draft_model``).
WITH_DRAFT_MODEL: dict[str, Maker] = {
    "speculative": "outrider.decoding.drafters.with_model.speculative:SpeculativeDrafter",
    "spectr": "outrider.decoding.drafters.with_model.spectr:SpectrDrafter",
    "bild": "outrider.decoding.drafters.with_model.bild:BildDrafter",
    "mjsd": "outrider.decoding.drafters.with_model.mjsd:MjsdDrafter",
}
_OWN_BUDGET = (PLAIN, "auto", *WITH_DRAFT_MODEL)  # strategies that decide their number of rows themselves
# Strategies that preserve the target's distribution. Only spectr, and speculative with sampling=rejection, do not use
# ``verify_exact``: with the same seed their text differs from plain decoding.
LOSSLESS = frozenset((*STRATEGIES, "speculative", "spectr"))
_NEXT_OPTION = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")  # a comma before the next name: values may contain commas


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Strategy name and the options of its drafter."""

    label: str  # the unparsed text
    name: str
    options: dict[str, Any]

    def build(self) -> Drafter:
        """Build a new drafter. Raise ``ValueError`` for an unknown strategy or option, or a value outside its range."""

        return build_drafter(self.name, self.options)


def parse_strategy(text: str) -> StrategyChoice:
    """Parse a strategy such as ``llma:copy_length=9,include_prompt=false``. Raise ``ValueError`` for an option without ``=``."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in _NEXT_OPTION.split(rest) if rest.strip() else ():
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not key:
            raise ValueError(f"strategy {text!r}: {pair!r} must be option=value")
        try:
            # Values are JSON, or else strings.
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return StrategyChoice(text, name.strip(), options)


def build_drafter(strategy: str, options: Mapping[str, Any]) -> Drafter:
    """Build the drafter of a strategy with constructor options.

    Raises:
        ValueError: an unknown strategy or option (the message suggests the nearest known one), or a value outside its range.
    """
    makers = {**STRATEGIES, **WITH_DRAFT_MODEL}
    if strategy not in makers:
        raise ValueError(f"strategy {strategy!r} is not known{_nearest(strategy, makers)}; known: {', '.join(makers)}")
    named = makers[strategy]
    maker = named if callable(named) else pkgutil.resolve_name(named)
    known = inspect.signature(maker).parameters
    given = dict(options)
    for name, value in options.items():
        if name not in known:
            choices = ", ".join(known) or "none"
            raise ValueError(f"{strategy} has no option {name!r}{_nearest(name, known)}; its options: {choices}")
        expected = type(known[name].default)
        if expected is float and type(value) is int:  # rollback=5
            given[name] = float(value)
        elif type(value) is not expected:
            raise ValueError(f"option {name!r} of {strategy} must be of type {expected.__name__}, got {value!r}")
    drafter: Drafter = maker(**given)
    return drafter


def build_drafters(strategy: str, options: Mapping[str, Any], others: Sequence[str], most_rows: int | None = None) -> Drafter:
    """Build the drafter of an engine whose requests may choose among several strategies.

    Args:
        strategy, options: default strategy, and constructor options of its drafter.
        others: further strategies, each ``NAME`` or ``NAME:option=value,...`` (``parse_strategy``). May include the names of
            ``strategy`` and of plain decoding, which needs no drafter.
        most_rows: if set, each strategy drafts as many rows as pay off on the device, at most this many per request and rank.

    Raises:
        ValueError: see ``build_drafter``; or a strategy occurs twice, or ``strategy`` occurs among the others with options.
    """
    drafters = {strategy: build_drafter(strategy, options)}
    for text in others:
        choice = parse_strategy(text)
        if choice.name == strategy and choice.options:
            raise ValueError(f"strategies: {text} is the default strategy: set its options in speculation.options")
        if choice.name != strategy and choice.name in drafters:
            raise ValueError(f"strategies: {choice.name} is listed twice")
        drafter = choice.build()
        if choice.name not in (strategy, PLAIN):
            drafters[choice.name] = drafter
    from outrider.decoding.budget.draft_budget import RowBudget
    from outrider.decoding.drafters.by_request import ByRequest

    paying = {}
    if most_rows is not None:
        bounded = drafters.keys() - set(_OWN_BUDGET)
        paying = {name: RowBudget(most_rows, drafters[name].looks_ahead) for name in bounded}
    return ByRequest(drafters, paying) if paying or len(drafters) > 1 else drafters[strategy]


def check_drafters(drafter: Drafter, strategies: Sequence[str], draft_model: str | None, exact: bool, shared: bool) -> None:
    """Raise ``ValueError`` if an engine must not (``exact``) or cannot (``shared`` by ranks) use a drafter; name the setting."""
    if drafter.draft_rows and draft_model is None:
        named = ", ".join(name for name in strategies if name in WITH_DRAFT_MODEL)
        raise ValueError(f"{named} drafts with a second model: set speculation.draft_model to its folder or name on the hub")
    lossy = [name for name in strategies if name not in LOSSLESS]
    if exact and lossy:
        raise ValueError(
            f"{', '.join(lossy)} does not preserve the model's output, and speculation.exact is true: "
            "set speculation.exact=false to allow it, or choose another strategy"
        )
    if shared and drafter.own_rules:
        named = ", ".join(name for name in strategies if name in WITH_DRAFT_MODEL)
        raise ValueError(
            f"{named}: with parallelism.mode=lookahead each rank verifies a part of the draft and keeps its logits, so that only "
            "exact matching can merge the results: use speculative with sampling coupled or greedy, or parallelism.mode=none"
        )


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
