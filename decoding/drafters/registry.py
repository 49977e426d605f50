"""Registry of drafters by the strategy names that requests and configurations use."""

from __future__ import annotations

import difflib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
_NAMED = re.compile(r"\s*([A-Za-z][\w.-]{0,63})\s*=\s*(.*)", re.DOTALL)  # "NAME = STRATEGY:option=value,..."
_NEXT_OPTION = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")  # a comma before the next name: values may contain commas


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Strategy name and the options of its drafter."""

    label: str  # the unparsed text
    name: str
    options: dict[str, Any]
    alias: str = field(default="", kw_only=True)  # name of the setting, if it has one

    @property
    def setting(self) -> str:
        """Return the name by which requests choose it."""
        return self.alias or self.name

    def build(self) -> Drafter:
        """Build a new drafter. Raise ``ValueError`` for an unknown strategy or option, or a value outside its range."""
        return build_drafter(self.name, self.options)


def parse_strategy(text: str) -> StrategyChoice:
    """Parse a strategy such as ``llma:copy_length=9,include_prompt=false``, or ``short = llma:copy_length=9`` with a name.

    Raises ``ValueError`` for an option without ``=``, or a name that a strategy has.
    """
    named = _NAMED.fullmatch(text)
    alias, described = ("", text) if named is None else (named[1], named[2])
    if alias in STRATEGIES or alias in WITH_DRAFT_MODEL:
        raise ValueError(f"strategy {text!r}: {alias} is the name of a strategy: give the setting another name")
    name, _, rest = described.partition(":")
    options: dict[str, Any] = {}
    for pair in _NEXT_OPTION.split(rest) if rest.strip() else ():
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not key:
            raise ValueError(f"strategy {text!r}: {pair!r} must be option=value")
        options[key] = option_value(value)
    return StrategyChoice(text, name.strip(), options, alias=alias)


def option_value(text: str) -> Any:
    """Return the value of an option from its text: JSON, or else a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def setting_of(strategy: str) -> str:
    """Return the name of the setting that a request's strategy begins with: ``jacobi`` for ``jacobi:window=5``."""
    return strategy.partition(":")[0]


def strategy_text(setting: str, options: Mapping[str, Any]) -> str:
    """Return a request's strategy as text, its options in order: ``jacobi:guesses=3,window=5``."""
    values = {
        name: value if isinstance(value, str) and value.isidentifier() else json.dumps(value) for name, value in options.items()
    }
    listed = ",".join(f"{name}={values[name]}" for name in sorted(values))
    return f"{setting}:{listed}" if listed else setting


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


def build_drafters(
    strategy: str, options: Mapping[str, Any], others: Sequence[str], most_rows: int | None = None, max_settings: int = 0
) -> Drafter:
    """Build the drafter of an engine whose requests may choose among several strategies.

    Args:
        strategy, options: default strategy, and constructor options of its drafter.
        others: further strategies, each ``NAME``, ``NAME:option=value,...`` or ``SETTING = NAME:option=value,...``
            (``parse_strategy``). May include the names of ``strategy`` and of plain decoding, which needs no drafter.
        most_rows: if set, each strategy drafts as many rows as pay off on the device, at most this many per request and rank.
        max_settings: most drafters with options of requests at a time; 0: requests cannot set options.

    Raises:
        ValueError: see ``build_drafter``; or a strategy occurs twice, or ``strategy`` occurs among the others with options.
    """
    drafters = {strategy: build_drafter(strategy, options)}
    choices = {strategy: StrategyChoice(strategy, strategy, dict(options))}
    for text in others:
        choice = parse_strategy(text)
        if choice.setting == strategy and choice.options:
            raise ValueError(f"strategies: {text} is the default strategy: set its options in speculation.options")
        if choice.setting != strategy and choice.setting in drafters:
            raise ValueError(f"strategies: {choice.setting} is listed twice")
        if choice.alias and choice.name == PLAIN:
            raise ValueError(f"strategies: {text}: {PLAIN} has no options, so that it needs no other name")
        drafter = choice.build()
        if choice.setting not in (strategy, PLAIN):
            drafters[choice.setting], choices[choice.setting] = drafter, choice
    from outrider.decoding.budget.draft_budget import RowBudget
    from outrider.decoding.drafters.by_request import ByRequest

    def budget(setting: str, drafter: Drafter) -> RowBudget | None:
        own = most_rows is None or choices[setting].name in _OWN_BUDGET
        return None if own or most_rows is None else RowBudget(most_rows, drafter.looks_ahead)

    def build(text: str) -> tuple[Drafter, RowBudget | None]:
        choice = parse_strategy(text)
        base = choices[choice.name]
        drafter = build_drafter(base.name, base.options | choice.options)
        return drafter, budget(choice.name, drafter)

    budgets = {name: budget(name, drafter) for name, drafter in drafters.items()}
    paying = {name: rows for name, rows in budgets.items() if rows is not None}
    if not paying and len(drafters) == 1 and not max_settings:
        return drafters[strategy]
    return ByRequest(drafters, paying, build if max_settings else None, max_settings)


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
