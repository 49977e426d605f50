"""The curve that follows the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.measures.latency import LiveCurve
from tests.helpers.models import llama_config, save_model

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


def test_a_step_that_took_very_long_counts_little() -> None:
    live = LiveCurve(TIMED)
    for at in range(320):
        live.record_step([work(9)], 2.0 if at % 50 == 20 else 0.008)
    assert seconds(live.curve, [work(9)]) == pytest.approx(0.008, rel=0.03)


def test_prompts_tell_nothing() -> None:
    live = LiveCurve(TIMED)
    for _ in range(100):
        live.record_step([work(3), work(1, computed=64)], 0.1)
        live.record_step([ScheduledRequest(work(1).request, 0, 100, None, frozenset())], 0.1)
    assert live.curve is TIMED


def test_an_engine_tells_its_target_how_long_steps_take(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", llama_config(), seed=1)
    options = EngineOptions(max_running=1)
    engine = Engine.load(ModelOptions(str(folder), dtype="float32"), options, SpeculationOptions("auto"))
    target = engine._target
    assert target is not None
    target._live = LiveCurve(LatencyCurve((1, 64), (10.0, 20.0), 0, 0.0, 0.0))
    engine.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=80, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert target.latency().rows_s[0] < 8.0
