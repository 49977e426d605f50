"""Step times: which steps are timed, the curve that fits them, its file, and the curve that follows the steps."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.cuda.static_runner import StaticRunner
from outrider.engine.engine import Engine
from outrider.engine.forward.batch import Batch, ScheduledRequest
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.measures.calibration import Calibration, CalibrationFile
from outrider.engine.measures.latency import Case, LiveCurve, Timings, cases, fit, measure, time_steps
from tests.helpers.attention_reference import ReferenceAttention
from tests.helpers.models import CONTEXT, SLOTS, VOCAB, run, tiny_model


def test_cases_of_a_usual_engine() -> None:
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


def test_a_fit_has_no_negative_part_and_needs_two_steps_of_one_sequence() -> None:
    # Several sequences take less than as many rows of one, and long contexts less than short ones.
    seconds = {Case(1, 1, 256): 0.010, Case(1, 8, 256): 0.011, Case(8, 1, 256): 0.008, Case(1, 1, 2000): 0.009}
    found = fit(seconds)
    assert (found.sequence_s, found.entry_s, found.row_entry_s) == (0.0, 0.0, 0.0)
    found = fit(seconds | {Case(1, 1, 2000): 0.020, Case(1, 8, 2000): 0.021})
    assert found.sequence_s == 0.0 and found.row_entry_s >= 0.0 <= found.entry_s and found.row_entry_s + found.entry_s > 0
    for seconds in ({}, {Case(2, 1, 256): 1.0}, {Case(1, 1, 256): 1.0}):
        with pytest.raises(ValueError, match="rows"):
            fit(seconds)
    assert fit({Case(1, 1, 0): 1.0, Case(1, 2, 0): 2.0}) == LatencyCurve((1, 2), (1.0, 2.0), 0, 0.0, 0.0)
    timings = Timings({Case(1, 1, 0): [3.0, 1.0, 2.0], Case(1, 2, 0): [2.0, 2.0, 2.0], Case(1, 4, 0): [1.0, 2.0, 1.5]})
    assert timings.seconds == {Case(1, 1, 0): 1.0, Case(1, 2, 0): 2.0, Case(1, 4, 0): 1.0}  # the least disturbed
    assert timings.spread == 1.5  # of 2.0, 1.0 and 1.5


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_slow_device_leaves_the_large_steps_out_and_reports_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.engine.measures.latency._LONG_S", 0.0)
    runner, forward = tiny_model("llama", "float32").runner, ModelRunner.forward
    timings = measure(runner, CONTEXT)
    assert timings.rounds and all(case.sequences * case.rows <= 8 for case in timings.rounds)
    assert fit(timings.seconds).rows == (1, 2, 4, 8)

    def slow(self: ModelRunner, batch: Batch) -> torch.Tensor:
        time.sleep(0.1)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", slow)
    monkeypatch.setattr("outrider.engine.measures.latency._ROUNDS", 2)
    monkeypatch.setattr("outrider.engine.measures.latency._MOST_OFTEN", 1)
    with caplog.at_level(logging.WARNING):
        measure(runner, CONTEXT)
    assert caplog.records


INFO = ModelInfo("m", CONTEXT, VOCAB, "float32", "cpu", 1, (0,), "auto", True, "0123456789abcdef0123", "none")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_model("llama", "float32").runner


@pytest.fixture(scope="module")
def measured(runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return replace(CalibrationFile(tmp_path_factory.mktemp("unused"), runner, INFO).measure(), spread=1.0)


@pytest.fixture
def kept(runner: ModelRunner, measured: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationFile:
    """A file with a curve; measuring gives the same numbers again and is counted in ``measures``."""
    file = CalibrationFile(tmp_path / "made" / "when needed", runner, INFO)
    assert file.save(measured)
    monkeypatch.setattr(CalibrationFile, "measure", lambda self: self.measures.append(1) or measured)
    monkeypatch.setattr(CalibrationFile, "measures", [], raising=False)
    return file


DAMAGES: tuple[Callable[[str], str], ...] = (
    lambda text: "",
    lambda text: text[: len(text) // 2],
    lambda text: text.replace('"context": ', '"context": "many'),
    lambda text: text.replace('"format": 1', '"format": 99'),
    lambda text: text.replace('"dtype": "float32"', '"dtype": "float16"'),
    lambda text: text.replace('"covers": [', '"covers": ["'),
    lambda text: text.replace('"covers": [', '"covers": [1, '),
    lambda text: text.replace('"entry_s"', '"entries_s"'),
    lambda text: re.sub(r'("rows_s": \[\s*)', r"\1-", text),
    lambda text: re.sub(r'("rows_s": \[\s*)', r"\1NaN, ", text),
    lambda text: re.sub(r'("context": )', r"\g<1>" + "9" * 400, text),
    lambda text: "[1, 2]",
    lambda text: "\udcff\udcfe",
    lambda text: "[" * 100_000,
)


def test_the_file_is_read_back_and_a_damaged_or_foreign_one_is_measured_again(
    kept: CalibrationFile, measured: Calibration, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    assert CalibrationFile(kept.path.parent, runner, INFO).curve() == measured.curve and not kept.measures
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]  # nothing else is left behind
    assert kept.path.name.startswith("latency-0123456789abcdef-")
    for number, change in enumerate(DAMAGES, 1):
        before = kept.path.read_text()
        text = change(before)
        assert text != before, number
        kept.path.write_bytes(text.encode(errors="surrogateescape"))
        caplog.clear()
        assert kept.curve() == measured.curve and len(kept.measures) == number and str(kept.path) in caplog.text, number
        assert kept.curve() == measured.curve and len(kept.measures) == number  # the new file is good
    kept.path.unlink()
    kept.path.mkdir()  # a folder where the file should be
    assert kept.curve() == measured.curve and not kept.save(measured)
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]


def test_more_slots_than_were_measured(kept: CalibrationFile, runner: ModelRunner) -> None:
    more = ModelRunner(runner.model, 8, runner.cache.capacity)
    assert CalibrationFile(kept.path.parent, more, INFO).path == kept.path
    CalibrationFile(kept.path.parent, more, INFO).curve()
    assert len(kept.measures) == 1 and json.loads(kept.path.read_text())["covers"][0] == 8
    kept.curve()  # fewer slots than were measured
    assert len(kept.measures) == 1


def test_another_form_model_dtype_or_number_of_threads_has_another_file(
    runner: ModelRunner, tmp_path: Path, threads: None
) -> None:
    usual = tiny_model("qwen3", "float32").runner
    slots, capacity = usual.cache.slots, usual.cache.capacity
    runners = [
        usual,
        ModelRunner(deepcopy(usual.model), slots, capacity, fixed_rows=16),
        StaticRunner(deepcopy(usual.model), slots, capacity, attention=ReferenceAttention),
        StaticRunner(deepcopy(usual.model), slots, capacity, 8, attention=ReferenceAttention),
        ModelRunner(deepcopy(usual.model), slots, capacity),
    ]
    for layer in runners[-1].model.model.layers:
        layer.compile(backend="eager")
    assert len({CalibrationFile(tmp_path, each, INFO).path for each in runners}) == len(runners)
    infos = [INFO, replace(INFO, model_revision="f" * 32), replace(INFO, dtype="bfloat16")]
    paths = {CalibrationFile(tmp_path, runner, info).path for info in infos}
    paths.add(CalibrationFile(tmp_path, tiny_model("llama", "float64").runner, replace(INFO, dtype="float64")).path)
    assert len(paths) == 4
    same = [replace(INFO, strategy="trie", served_name="other", lossless=False), replace(INFO, tokenizer_revision="1")]
    assert {CalibrationFile(tmp_path, runner, info).path for info in same} <= paths
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
    assert CalibrationFile(tmp_path, runner, INFO).path not in paths


def test_times_of_a_busy_machine_are_used_and_not_kept(
    runner: ModelRunner, measured: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CalibrationFile, "measure", lambda self: replace(measured, spread=1.6))
    file = CalibrationFile(tmp_path, runner, INFO)
    assert file.curve() == measured.curve and not file.path.exists()


TIMED = LatencyCurve((1, 9, 64), (0.006, 0.008, 0.028), 256, 1e-4, 1e-6, 5e-7)
BUSY = LatencyCurve((1, 9, 64), (0.004, 0.006, 0.026), 256, 2e-4 / 3, 2e-6 / 3, 5e-7)  # a third less for what is fixed


def work(rows: int, context: int = 256, computed: int = 1) -> ScheduledRequest:
    """Of a request that decodes, or whose prompt is computed."""
    request = Request("r", np.arange(context + computed), SamplingParams())
    return ScheduledRequest(request, context, context + computed, DraftTree.chain(1, [1] * (rows - 1)), frozenset())


def seconds(curve: LatencyCurve, works: list[ScheduledRequest]) -> float:
    rows, load = sum(len(each.tree or ()) for each in works), StepLoad(len(works), len(works), sum(each.start for each in works))
    return float(curve.seconds(np.array([float(rows)]), load)[0])


def follow(live: LiveCurve, true: LatencyCurve, steps: list[list[ScheduledRequest]]) -> None:
    for works in steps:
        live.record_step(works, seconds(true, works))


def test_it_follows_the_part_that_has_changed() -> None:
    """The example of the docstring, with requests that come and go and texts that grow."""
    live = LiveCurve(TIMED)
    rng = np.random.default_rng(0)
    steps = [[work(int(rng.integers(1, 30)), int(rng.integers(10, 900))) for _ in range(rng.integers(1, 4))] for _ in range(400)]
    follow(live, BUSY, steps)
    for name in ("rows_s", "sequence_s", "entry_s", "row_entry_s"):
        assert getattr(live.curve, name) == pytest.approx(getattr(BUSY, name), rel=0.04), name
    row = (live.curve.rows_s[1] - live.curve.rows_s[0]) / 8
    assert row / live.curve.rows_s[0] == pytest.approx(1 / 16, rel=0.06)
    follow(live, TIMED, 2 * steps)  # and back
    assert live.curve.rows_s == pytest.approx(TIMED.rows_s, rel=0.04)


@given(st.integers(1, 64), st.floats(0.5, 3.0))
def test_steps_of_as_many_rows_are_said_to_take_what_they_take(rows: int, times: float) -> None:
    live = LiveCurve(TIMED)
    for _ in range(320):
        live.record_step([work(rows)], times * seconds(TIMED, [work(rows)]))
    assert seconds(live.curve, [work(rows)]) == pytest.approx(times * seconds(TIMED, [work(rows)]), rel=0.05)
    changes = np.divide(live.curve.rows_s, TIMED.rows_s) - 1.0
    least, most = sorted((0.0, 1.25 * (times - 1.0)))
    assert (changes >= least - 1e-9).all() and (changes <= most + 1e-9).all()  # neither part runs away


def test_outliers_count_little_and_prompts_do_not_count() -> None:
    live = LiveCurve(TIMED)
    for _ in range(100):
        live.record_step([work(3), work(1, computed=64)], 0.1)
        live.record_step([ScheduledRequest(work(1).request, 0, 100, None, frozenset())], 0.1)
    assert live.curve is TIMED
    for at in range(320):
        live.record_step([work(9)], 2.0 if at % 50 == 20 else 0.008)
    assert seconds(live.curve, [work(9)]) == pytest.approx(0.008, rel=0.03)


def test_an_engine_reports_its_step_times_to_the_target(folder: str) -> None:
    engine = Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(max_running=1), SpeculationOptions("auto"))
    target = engine._target
    assert target is not None
    target._live = LiveCurve(LatencyCurve((1, 64), (10.0, 20.0), 0, 0.0, 0.0))
    run(engine, Request("r", [1, 2, 3], SamplingParams(max_tokens=80, ignore_eos=True)))
    assert target.latency().rows_s[0] < 8.0
