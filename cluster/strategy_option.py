"""The option ``--strategy NAME[:option=value,...]`` of commands that compare strategies."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.drafters import Drafter

_NEXT_OPTION = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")  # a comma before the next name: a value may hold commas of its own


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and the options of its drafter."""

    label: str  # as it was asked for
    name: str
    options: dict[str, Any]

    def build(self) -> Drafter:
        """A new drafter. Raises ``ValueError`` for an unknown strategy or option, or a value outside its range."""
        from decoding.drafters import build_drafter

        return build_drafter(self.name, self.options)


def parse_strategy(text: str) -> StrategyChoice:
    """Reads ``llma:copy_length=9,include_prompt=false``; values are JSON, or strings where they are not.

    Raises:
        ValueError: an option without ``=``.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in _NEXT_OPTION.split(rest) if rest.strip() else ():
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not key:
            raise ValueError(f"--strategy {text!r}: {pair!r} must be option=value")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return StrategyChoice(text, name.strip(), options)


def chosen_strategies(texts: list[str] | None) -> list[StrategyChoice]:
    """The strategies that were asked for, or all with their defaults, each built once to see that it can be.

    Raises:
        ValueError: see ``parse_strategy`` and ``StrategyChoice.build``; or one asked for twice.
    """
    from decoding.drafters import STRATEGIES

    choices = [parse_strategy(text) for text in texts or STRATEGIES]
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--strategy {label} was given twice")
    for choice in choices:
        choice.build()
    return choices
