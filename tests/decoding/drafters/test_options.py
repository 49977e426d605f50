"""Options of the strategies: the table and the constructors agree, and values outside a range are refused by name."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import pytest

from outrider.decoding.drafters.options import OPTIONS, check_given
from outrider.decoding.drafters.registry import STRATEGIES, WITH_DRAFT_MODEL, build_drafter

MAKERS = {**STRATEGIES, **WITH_DRAFT_MODEL}


def defaults(strategy: str) -> dict[str, Any]:
    """Return the options of a strategy's constructor with their defaults."""
    maker = MAKERS[strategy]
    parameters = inspect.signature(pkgutil.resolve_name(maker) if isinstance(maker, str) else maker).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def test_every_strategy_is_in_the_table() -> None:
    assert OPTIONS.keys() == MAKERS.keys()


@pytest.mark.parametrize("strategy", MAKERS)
def test_the_table_has_exactly_the_options_of_the_constructor(strategy: str) -> None:
    known = defaults(strategy)
    assert list(OPTIONS[strategy]) == list(known)
    for name, default in known.items():
        assert OPTIONS[strategy][name].fault(default) == "", name
        assert type(default) is OPTIONS[strategy][name].kind, name


@pytest.mark.parametrize("strategy", MAKERS)
def test_options_can_be_built_at_both_ends_of_their_ranges(strategy: str) -> None:
    for name, option in OPTIONS[strategy].items():
        if name in ("capacity", "history_tokens"):  # the upper end is gigabytes
            ends: tuple[object, ...] = (option.low,)
        else:
            ends = option.choices or ((False, True) if option.low is None else (option.low, option.high))
        for value in ends:
            other = {"max_context": 1024} if name == "match_length" else {}
            assert build_drafter(strategy, {name: value, **other}).published_rows >= 0


@pytest.mark.parametrize("strategy", MAKERS)
def test_values_beyond_a_range_are_refused_by_the_constructor_and_in_requests(strategy: str) -> None:
    for name, option in OPTIONS[strategy].items():
        wrong: list[object] = ["neither"] if option.low is None else [option.low - 1, (option.high or 0) * 2 + 1]
        for value in wrong:
            with pytest.raises(ValueError, match=name):
                build_drafter(strategy, {name: value})
            assert name in (check_given(strategy, {name: value}, {f"{strategy}.{name}"}) or "")


def test_rows_of_the_published_sizes() -> None:
    sizes = {
        "jacobi": ({"window": 15, "ngram": 5, "guesses": 15}, 119),
        "ngrammys": ({"k": 10, "w": 10}, 100),
        "trie": ({"decoding_length": 64}, 63),
        "llma": ({"copy_length": 20}, 20),
        "auto": ({}, 0),
        "autoregressive": ({}, 0),
        "spectr": ({"sequences": 4, "num_draft_tokens": 4}, 16),
        "recycling": ({"shape": "published"}, 80),
    }
    for strategy, (options, rows) in sizes.items():
        assert build_drafter(strategy, options).published_rows == rows, strategy


def test_requests_may_set_what_costs_no_memory() -> None:
    assert check_given("trie", {"decoding_length": 128, "layout": "parallel"}) is None
    assert "speculation.request_options" in (check_given("trie", {"capacity": 5}) or "")
    assert check_given("trie", {"capacity": 5}, {"trie.capacity"}) is None
    assert "did you mean 'copy_length'" in (check_given("llma", {"copy_len": 3}) or "")
    assert "must be of type int" in (check_given("llma", {"copy_length": True}) or "")
    assert check_given("mjsd", {"threshold": 1}) is None


def test_costly_options_are_exactly_those_that_take_memory_or_time_to_prepare() -> None:
    costly = {f"{strategy}.{name}" for strategy, options in OPTIONS.items() for name, one in options.items() if one.costly}
    assert costly == {
        "auto.history_tokens", "auto.recycling", "llma.history_tokens", "trie.capacity",
        "suffix_decoding.capacity", "recycling.start", "racer.capacity",
    }  # fmt: skip
