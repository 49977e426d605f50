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


def test_the_rows_beyond_a_stair_are_not_as_steep_as_the_stair() -> None:
    """Steps of a GPU take 10 ms more at 65, 129, 193 and 257 rows: 10 ms for 64 rows on average."""
    rows = (1, 64, 65, 128, 129, 192, 193, 256, 257)
    curve = LatencyCurve(rows, tuple(0.01 * -(-each // 64) for each in rows), 256, 0.0, 0.0)
    assert at(curve, 321, StepLoad(1, 1, 256)) == pytest.approx(0.06, rel=0.01)  # 257 rows take 50 ms, 129 take 30


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


NO_CURVES: dict[str, list[dict[str, object]]] = {
    "rows": [{"rows": (1,), "rows_s": (1.0,)}, {"rows": (2, 4)}, {"rows": (1, 1)}, {"rows": (1, 4, 2), "rows_s": (1.0,) * 3}],
    "rows_s": [{"rows_s": each} for each in ((1.0,), (1.0, 0.0), (1.0, float("nan")), (1.0, float("inf")))],
    "context": [{"context": -1}],
    "sequence_s": [{"sequence_s": -1e-9}],
    "entry_s": [{"entry_s": float("nan")}],
    "row_entry_s": [{"row_entry_s": -1.0}],
}


@pytest.mark.parametrize(("field", "changes"), [(field, each) for field, changes in NO_CURVES.items() for each in changes])
def test_what_is_no_curve(field: str, changes: dict[str, object]) -> None:
    fields = {"rows": (1, 64), "rows_s": (0.01, 0.02), "context": 0, "sequence_s": 0.0, "entry_s": 0.0}
    with pytest.raises(ValueError, match=rf"{field}\b"):
        LatencyCurve(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.lists(SECONDS, min_size=2, max_size=5), st.integers(0, 9999), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_json_and_back(seconds: list[float], context: int, sequence_s: float, entry_s: float, looks_s: float) -> None:
    curve = LatencyCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds), context, sequence_s, entry_s, looks_s)
    again = LatencyCurve.from_json(json.loads(json.dumps(curve.to_json())))
    assert again == curve and hash(again) == hash(curve)


NO_VALUES: dict[str, list[object]] = {
    "rows": ["12", [1, 2.5], [True, 64], [1, 10**400], [1, 10**9]],
    "rows_s": [[0.1, "0.2"], [0.1, None], [0.1, 10**400], [0.1, float("nan")], [0.1, 0.2, 0.3]],
    "context": [1.5, 10**400],
    "sequence_s": [{}, -1],
    "entry_s": [1e308],
    "row_s": [1],  # not a field
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in NO_VALUES.items() for value in values])
def test_json_of_something_else(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field}\b"):
        LatencyCurve.from_json({**FLAT.to_json(), field: value})


@pytest.mark.parametrize("data", [None, [1, 2], {name: value for name, value in FLAT.to_json().items() if name != "entry_s"}])
def test_json_without_fields(data: object) -> None:
    with pytest.raises(ValueError, match=r"must be an object|entry_s"):
        LatencyCurve.from_json(data)
