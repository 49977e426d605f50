"""The option ``--strategy NAME[:option=value,...]`` of commands that compare strategies."""

from __future__ import annotations

from outrider.decoding.drafters.registry import StrategyChoice, parse_strategy

__all__ = ["StrategyChoice", "chosen_strategies", "parse_strategy"]


def chosen_strategies(texts: list[str] | None) -> list[StrategyChoice]:
    """Return the requested strategies, or all of them with defaults; each is built once as a check.

    Raises ValueError: see ``parse_strategy`` and ``StrategyChoice.build``; or a strategy was given twice.
    """
    from outrider.decoding.drafters.registry import STRATEGIES

    choices = [parse_strategy(text) for text in texts or STRATEGIES]
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--strategy {label} was given twice")
    for choice in choices:
        choice.build()
    return choices
