"""The option ``--strategy NAME[:option=value,...]`` of commands that compare strategies."""

from __future__ import annotations

from outrider.decoding.drafters.registry import StrategyChoice, parse_strategy

__all__ = ["StrategyChoice", "chosen_strategies", "parse_strategy"]


def chosen_strategies(texts: list[str] | None) -> list[StrategyChoice]:
    """Return the requested strategies, or all with defaults. Raises ValueError: unknown, with a wrong option, or given twice."""
    from outrider.decoding.drafters.registry import STRATEGIES

    choices = [parse_strategy(text) for text in texts or STRATEGIES]
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--strategy {label} was given twice")
    # Built once as a check: a wrong option is an error before the first measurement.
    for choice in choices:
        choice.build()
    return choices
