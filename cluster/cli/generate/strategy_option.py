"""Command-line options for strategies: ``--strategy NAME[:option=value,...]`` and ``--option name=value``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.decoding.drafters.options import OPTIONS
from outrider.decoding.drafters.registry import STRATEGIES, StrategyChoice, option_value, parse_strategy

__all__ = ["AS_PUBLISHED_HELP", "OPTION_HELP", "StrategyChoice", "chosen_strategies", "parse_options", "parse_strategy"]

_LISTED = "; ".join(f"{strategy}: {', '.join(options)}" for strategy, options in OPTIONS.items() if options)
OPTION_HELP = f"Strategy option name=value, such as copy_length=9; repeatable. Ranges: docs/strategies.md. {_LISTED}."
AS_PUBLISHED_HELP = "Draft all rows that the strategy's options ask for, as in its paper, not only those that pay off."


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value``; a value that is not JSON is a string. Raises ``ValueError`` for a text without ``=``."""
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--option {text!r} must be name=value")
        options[name] = option_value(value)
    return options


def chosen_strategies(texts: list[str] | None) -> list[StrategyChoice]:
    """Return the requested strategies, or all with defaults. Raises ValueError: unknown, with a wrong option, or given twice."""
    choices = [parse_strategy(text) for text in texts or STRATEGIES]
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--strategy {label} was given twice")
    # Built once as a check: a wrong option is an error before the first measurement.
    for choice in choices:
        choice.build()
    return choices
