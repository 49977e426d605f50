"""Flags for strategy options and published sizes, and the line that says that drafts were cut."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.cluster.cli.generate.command import Record, _cut, read_settings, readable_summary, summarize
from outrider.cluster.cli.generate.prompt_file import PromptRecord
from outrider.cluster.cli.generate.strategy_option import OPTION_HELP, parse_options
from outrider.configs.slices import SpeculationOptions
from outrider.decoding.drafters.options import OPTIONS
from outrider.decoding.request import SpecStats


def test_as_published_makes_room_for_the_largest_trees_of_all_requests() -> None:
    flags = {"as_published": True, "strategy": "jacobi", "batch_size": 6, "option": ["window=15"]}
    settings = read_settings(None, flags, records=3)
    assert settings.speculation.as_published and settings.speculation.options == {"window": 15}
    assert settings.speculation.most_draft_tokens == 512
    assert settings.engine.max_step_tokens == 6 * 513
    usual = read_settings(None, {"batch_size": 6}, records=3)
    assert usual.engine.max_step_tokens == 512 and usual.speculation.most_draft_tokens == 64


def test_limits_of_drafts() -> None:
    def limits(**options: int | bool) -> tuple[int, int]:
        made = dataclasses.replace(SpeculationOptions(), **options)  # type: ignore[arg-type]
        return made.usual_draft_tokens, made.most_draft_tokens

    assert limits() == (64, 64)
    assert limits(as_published=True) == (64, 512)
    assert limits(largest_tree=128) == (64, 128)
    assert limits(largest_tree=16) == (16, 16)
    assert limits(as_published=True, max_draft_tokens=9) == (9, 9)
    assert limits(max_draft_tokens=1024) == (1024, 1024)


def test_the_summary_says_once_that_drafts_were_cut() -> None:
    def record(**stats: object) -> Record:
        made = Record(PromptRecord("r", "w", "p", ()))
        made.stats = SpecStats(**stats)  # type: ignore[arg-type]
        return made

    reason = "more do not pay on this device; as_published drafts all"
    cut = [record(steps=10, drafted=drafted, wanted_rows=119, cut_reason=reason) for drafted in (30, 46)]
    records = [*cut, record(steps=5, drafted=0)]
    line = {"cut": f"jacobi: 119 rows a step wanted, 3.8 drafted: {reason}"}
    assert _cut(records, "jacobi") == line and _cut(records[2:], "jacobi") == {}
    shown = readable_summary(summarize(records, 1.0) | {"lossless": True, "strategy": "jacobi"} | line)
    assert shown.count("119 rows a step wanted") == 1 and shown.endswith("--as-published drafts all")


def test_options_are_named_in_the_help_and_parsed() -> None:
    assert all(name in OPTION_HELP for options in OPTIONS.values() for name in options)
    assert parse_options(["window=5", "ties=first", "include_prompt=false"]) == {
        "window": 5,
        "ties": "first",
        "include_prompt": False,
    }
    with pytest.raises(ValueError, match="name=value"):
        parse_options(["window"])
