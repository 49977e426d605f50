"""Which steps are timed, how, and the curve that fits them."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.measures.latency import Case, Timings, cases, fit, measure, time_steps
from tests.helpers.models import CONTEXT, SLOTS, tiny_model


def test_the_example_of_the_docstring() -> None:
    found = cases(slots=4, capacity=2112, max_model_len=2048)
    own = [case.rows for case in found if case.sequences == 1 and case.context == 256]
    assert own == [1, 2, 4, 8, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64, 96, 128, 256]
    one = {(1, 1, 64), (1, 1, 1024), (1, 1, 2046), (1, 64, 1024), (1, 64, 2046)}
    several = {(count, *rest) for count in (2, 4) for rest in ((1, 256), (8, 256), (1, 1024))}
    others = {(case.sequences, case.rows, case.context) for case in found if (case.sequences, case.context) != (1, 256)}
    assert others == one | several
    assert all(a.sequences * a.rows <= b.sequences * b.rows for a, b in pairwise(found))


@given(st.integers(1, 70), st.integers(2, 3000), st.integers(0, 300))
def test_every_case_fits_its_slot(slots: int, length: int, draft: int) -> None:
    found = cases(slots, length + draft, length)
    assert len(set(found)) == len(found)
    for case in found:
        assert 1 <= case.sequences <= slots and case.rows >= 1 and case.context >= 0, case
        assert case.context + case.rows <= length + draft, case
        assert case.context + (case.rows > 1) < length, case  # positions of the rows
    context = max((case.context for case in found if case.sequences == 1), key=[case.context for case in found].count)
    assert {1, 2} <= {case.rows for case in found if case.context == context and case.sequences == 1}
    assert max(case.sequences for case in found) == slots


def made_up(curve: LatencyCurve, wanted: list[Case]) -> dict[Case, float]:
    """Times that follow a curve exactly."""
    found = {}
    for case in wanted:
        load = StepLoad(case.sequences, case.sequences, case.sequences * case.context)
        found[case] = float(curve.seconds(np.array([case.sequences * case.rows]), load)[0])
    return found


@pytest.mark.parametrize("parts", [(3e-4, 5e-7, 2e-8), (0.0, 5e-7, 2e-8), (3e-4, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_times_that_follow_a_curve_give_it_back(parts: tuple[float, float, float]) -> None:
    wanted = cases(8, 2112, 2048)
    rows = tuple(sorted(case.rows for case in wanted if case.sequences == 1 and case.context == 256))
    curve = LatencyCurve(rows, tuple(0.005 + 1e-4 * count for count in rows), 256, *parts)
    found = fit(made_up(curve, wanted))
    assert (found.rows, found.rows_s, found.context) == (curve.rows, curve.rows_s, 256)
    assert (found.sequence_s, found.entry_s, found.row_entry_s) == pytest.approx(parts, abs=1e-12)


def test_no_part_of_a_fit_is_negative() -> None:
    """Several sequences that take less than as many rows of one, and long contexts that take less than short ones."""
    seconds = {Case(1, 1, 256): 0.010, Case(1, 8, 256): 0.011, Case(8, 1, 256): 0.008, Case(1, 1, 2000): 0.009}
    found = fit(seconds)
    assert (found.sequence_s, found.entry_s, found.row_entry_s) == (0.0, 0.0, 0.0)
    found = fit(seconds | {Case(1, 1, 2000): 0.020, Case(1, 8, 2000): 0.021})
    assert found.sequence_s == 0.0 and found.row_entry_s >= 0.0 <= found.entry_s and found.row_entry_s + found.entry_s > 0


def test_a_fit_needs_two_steps_of_one_sequence() -> None:
    for seconds in ({}, {Case(2, 1, 256): 1.0}, {Case(1, 1, 256): 1.0}):
        with pytest.raises(ValueError, match="rows"):
            fit(seconds)
    assert fit({Case(1, 1, 0): 1.0, Case(1, 2, 0): 2.0}) == LatencyCurve((1, 2), (1.0, 2.0), 0, 0.0, 0.0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_all_slots_of_a_real_model_are_timed(family: str) -> None:
    runner = tiny_model(family, "float32").runner
    for slot in range(SLOTS):  # what memory may hold before it is written
        keys, values = runner.cache.entries(slot, runner.cache.capacity)
        for layer in range(len(keys)):
            runner.cache.write(layer, slot, 0, torch.full_like(keys[layer], torch.nan), torch.full_like(values[layer], torch.nan))
    reports: list[tuple[int, int]] = []
    timings = measure(runner, CONTEXT, lambda done, total: reports.append((done, total)))
    assert list(timings.rounds) == cases(SLOTS, runner.cache.capacity, CONTEXT)
    assert all(0 < seconds < 60 for seconds in timings.seconds.values()) and timings.spread >= 1.0
    assert all(0 < done <= total for done, total in reports) and reports[-1][0] == reports[-1][1]
    for case in timings.rounds:
        for slot in range(case.sequences):
            assert all(entries.isfinite().all() for entries in runner.cache.entries(slot, case.context)), case
    curve = fit(timings.seconds)
    assert curve.rows[0] == 1 and 1 <= curve.critical_rows() <= curve.rows[-1]


def test_steps_are_what_the_engine_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_model("llama", "float32").runner
    seen: list[Batch] = []
    forward = runner.forward

    def recorded(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return forward(batch)

    monkeypatch.setattr(runner, "forward", recorded)
    time_steps(runner, [Case(1, 1, 20), Case(3, 4, 20)])
    one, three = (next(batch for batch in seen if len(batch.segments) == count) for count in (1, 3))
    assert (len(one.token_ids), one.segments[0].start, one.segments[0].mask) == (1, 20, None)
    assert [segment.slot for segment in three.segments] == [0, 1, 2] and three.positions.tolist() == [20, 21, 21, 21] * 3
    star = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    for segment in three.segments:
        assert segment.mask is not None and (segment.mask == star).all()


def test_a_slow_device_leaves_the_large_steps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.measures.latency._LONG_S", 0.0)
    runner = tiny_model("llama", "float32").runner
    timings = measure(runner, CONTEXT)
    assert timings.rounds and all(case.sequences * case.rows <= 8 for case in timings.rounds)
    assert fit(timings.seconds).rows == (1, 2, 4, 8)


def test_what_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runner, forward = tiny_model("llama", "float32").runner, ModelRunner.forward

    def slow(self: ModelRunner, batch: Batch) -> torch.Tensor:
        time.sleep(0.1)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", slow)
    monkeypatch.setattr("outrider.engine.measures.latency._LONG_S", 0.0)
    monkeypatch.setattr("outrider.engine.measures.latency._ROUNDS", 2)
    monkeypatch.setattr("outrider.engine.measures.latency._MOST_OFTEN", 1)
    with caplog.at_level(logging.WARNING):
        measure(runner, CONTEXT)
    assert "timing the steps of LlamaForCausalLM: " in caplog.text


def test_the_least_disturbed_time_counts() -> None:
    timings = Timings({Case(1, 1, 0): [3.0, 1.0, 2.0], Case(1, 2, 0): [2.0, 2.0, 2.0], Case(1, 4, 0): [1.0, 2.0, 1.5]})
    assert timings.seconds == {Case(1, 1, 0): 1.0, Case(1, 2, 0): 2.0, Case(1, 4, 0): 1.0}
    assert timings.spread == 1.5  # of 2.0, 1.0 and 1.5
