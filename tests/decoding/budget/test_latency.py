"""The curve of step times."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.budget.latency import LatencyCurve, StepLoad

CURVE = LatencyCurve((1, 5, 9), (0.010, 0.012, 0.022), 256, 1e-4, 1e-6, 5e-7)
FLAT = LatencyCurve((1, 64), (0.01, 0.01), 0, 0.0, 0.0)
SECONDS = st.floats(1e-6, 10.0)


def at(curve: LatencyCurve, rows: float, load: StepLoad) -> float:
    (seconds,) = curve.seconds(np.array([rows]), load)
    return float(seconds)


def test_the_example_of_the_docstring() -> None:
    parts = 0.011, 1e-4, 344e-6, 3 * 44 * 5e-7
    assert at(CURVE, 3, StepLoad(2, 2, 600)) == pytest.approx(sum(parts))


def test_rows_between_and_beyond_what_was_timed() -> None:
    load = StepLoad(1, 1, 256)
    seconds = CURVE.seconds(np.array([1.0, 2.0, 5.0, 7.0, 9.0, 13.0]), load)
    assert seconds == pytest.approx([0.010, 0.0105, 0.012, 0.017, 0.022, 0.032])


def test_a_dip_stands_for_fewer_rows_as_well() -> None:
    curve = LatencyCurve((1, 2, 4, 8), (1.0, 0.8, 1.5, 1.2), 0, 0.0, 0.0)
    assert curve.seconds(np.array([1.0, 2.0, 4.0, 8.0, 100.0]), StepLoad(1, 1, 0)).tolist() == [0.8, 0.8, 1.2, 1.2, 1.2]


def test_a_short_context_saves_entries_and_no_looking() -> None:
    assert at(CURVE, 5, StepLoad(1, 1, 56)) == pytest.approx(0.012 - 200e-6)
    assert at(CURVE, 5, StepLoad(4, 4, 4 * 256)) == pytest.approx(0.012 + 3e-4 + 768e-6)


def test_a_quarter_of_a_step_is_the_least() -> None:
    curve = LatencyCurve((1, 2), (0.010, 0.020), 2000, 0.0, 1e-4)
    assert at(curve, 1, StepLoad(1, 1, 0)) == 0.0025
    assert at(curve, 1, StepLoad(1, 1, 2000)) == 0.010


@given(st.lists(SECONDS, min_size=2, max_size=9), st.integers(0, 3000), st.integers(1, 64), st.integers(0, 100_000))
def test_more_rows_never_take_less(seconds: list[float], context: int, sequences: int, entries: int) -> None:
    curve = LatencyCurve(tuple(2**power for power in range(len(seconds))), tuple(seconds), context, 1e-4, 1e-7, 1e-8)
    taken = curve.seconds(np.arange(1.0, 600.0), StepLoad(sequences, sequences, entries))
    assert (np.diff(taken) >= -1e-12).all() and (taken >= min(seconds) / 4).all()


@pytest.mark.parametrize(
    ("rows", "seconds", "slack", "critical"),
    [
        ((1, 8, 16), (0.010, 0.011, 0.016), 1.2, 9),
        ((1, 8, 16), (0.010, 0.011, 0.016), 1.0, 1),
        ((1, 8, 16), (0.010, 0.011, 0.016), 1.1, 8),
        ((1, 64), (1.0, 64.0), 1.2, 1),
        ((1, 64), (1.0, 1.0), 1.2, 64),  # no more than were timed
        ((1, 2, 4), (1.0, 0.5, 0.7), 1.2, 3),  # one row takes what two do
    ],
)
def test_critical_rows(rows: tuple[int, ...], seconds: tuple[float, ...], slack: float, critical: int) -> None:
    assert LatencyCurve(rows, seconds, 0, 0.0, 0.0).critical_rows(slack) == critical


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": (1,), "rows_s": (1.0,)}, "rows must be at least two"),
        ({"rows": (2, 4)}, "rows must be at least two numbers that ascend from 1"),
        ({"rows": (1, 1)}, "ascend"),
        ({"rows": (1, 4, 2), "rows_s": (1.0, 1.0, 1.0)}, "ascend"),
        ({"rows_s": (1.0,)}, "rows_s must be 2 positive"),
        ({"rows_s": (1.0, 0.0)}, "rows_s"),
        ({"rows_s": (1.0, float("nan"))}, "rows_s"),
        ({"rows_s": (1.0, float("inf"))}, "rows_s"),
        ({"context": -1}, "context must not be negative"),
        ({"sequence_s": -1e-9}, "sequence_s"),
        ({"entry_s": float("nan")}, "entry_s"),
        ({"row_entry_s": -1.0}, "row_entry_s"),
    ],
)
def test_what_is_no_curve(changes: dict[str, object], said: str) -> None:
    fields = {"rows": (1, 64), "rows_s": (0.01, 0.02), "context": 0, "sequence_s": 0.0, "entry_s": 0.0}
    with pytest.raises(ValueError, match=said):
        LatencyCurve(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.lists(SECONDS, min_size=2, max_size=5), st.integers(0, 9999), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_json_and_back(seconds: list[float], context: int, sequence_s: float, entry_s: float, looks_s: float) -> None:
    curve = LatencyCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds), context, sequence_s, entry_s, looks_s)
    again = LatencyCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again == curve and hash(again) == hash(curve)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "must be an object with rows"),
        ([1, 2], "must be an object"),
        ({**FLAT.to_json(), "rows": "12"}, "rows must be a list"),
        ({**FLAT.to_json(), "rows": [1, 2.5]}, "rows must hold whole numbers, got 2.5"),
        ({**FLAT.to_json(), "rows": [True, 64]}, "rows must hold whole numbers, got True"),
        ({**FLAT.to_json(), "rows_s": [0.1, "0.2"]}, "rows_s must hold numbers, got '0.2'"),
        ({**FLAT.to_json(), "rows_s": [0.1, None]}, "rows_s must hold numbers"),
        ({**FLAT.to_json(), "context": 1.5}, "context must hold whole numbers"),
        ({**FLAT.to_json(), "sequence_s": {}}, "sequence_s must hold numbers"),
        ({**FLAT.to_json(), "rows": [1, 2, 3]}, "rows_s must be 3 positive"),
        ({**FLAT.to_json(), "row_s": 1}, "row_s is not a field"),
        ({**FLAT.to_json(), "rows": [1, 10**400]}, "rows must hold at most"),
        ({**FLAT.to_json(), "rows": [1, 10**9]}, "rows must hold at most"),
        ({**FLAT.to_json(), "rows_s": [0.1, 10**400]}, "rows_s must hold at most"),
        ({**FLAT.to_json(), "rows_s": [0.1, float("nan")]}, "rows_s must hold at most"),
        ({**FLAT.to_json(), "context": 10**400}, "context must hold at most"),
        ({**FLAT.to_json(), "entry_s": 1e308}, "entry_s must hold at most"),
        ({**FLAT.to_json(), "sequence_s": -1}, "sequence_s must not be negative"),
        ({name: value for name, value in FLAT.to_json().items() if name != "entry_s"}, "entry_s is missing"),
    ],
)
def test_json_of_something_else(data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LatencyCurve.from_json(data)
