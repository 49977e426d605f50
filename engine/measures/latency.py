"""Step times on this device: the latency curve, fitted to forwards over synthetic sequences and corrected by the steps."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.row_pricing import seconds_of
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.tree import DraftTree
from outrider.engine.forward.batch import Batch, DummySequence, ScheduledDummy, ScheduledRequest, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model_tables import TableProgress

# Rows of one sequence. Matrix products use blocks of 12 or 16 rows, so step times rise in stairs: one row more shows them.
_ROWS = (1, 2, 4, 8, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64, 96, 128, 256)
_CONTEXT = 256  # KV entries before those rows
_NEAR, _FAR = 64, (1024, 2048)  # shorter and longer contexts
_WIDE = 64  # rows of a tree at the longer contexts
_TREE_ROWS = 8  # rows per sequence, if several have trees
_LONG_S, _FEW = 0.5, 8  # after a step that takes longer, steps with more than ``_FEW`` rows are skipped
_TIMING_S = 2.0  # target for all rounds
_LEAST_ROUNDS, _ROUNDS = 2, 8
_TURN_S, _MOST_OFTEN = 0.02, 4  # shorter steps run up to ``_MOST_OFTEN`` times per round
_GLANCED = (1, 8, 64)  # rows of the steps in ``rough_cases``
_PARTS = 1000  # progress units for the log

# Of ``LiveCurve``.
_KEPT = 0.99  # decay of older steps per step
_TIMED = 0.5  # weight of the timed curve in each factor, in steps
_REDRAWN = 16  # steps between updates of ``curve``
_MOST_OFF = 1.5  # largest deviation of one step from the expectation, as a factor
_LEAST, _MOST = 0.2, 5.0  # bounds of the factors

Result = TypeVar("Result")
Report = Callable[[int, int], None]  # forwards done, forwards in all


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Step to time: equal sequences, each with a tree of ``rows`` rows behind ``context`` KV entries."""

    sequences: int
    rows: int
    context: int


def cases(slots: int, capacity: int, max_model_len: int, full: Sequence[int] = ()) -> list[Case]:
    """Return the steps to time, the smallest first.

    Example: 4 slots of 2112 entries for a context of 2048: 1, 2, 4, 8, 12, ... 256 rows of one sequence behind 256 entries, one
    row behind 64, and one row and 64 rows behind 1024 and 2046; of 2 and of 4 sequences, 1 row and 8 rows each behind 256 and one
    row behind 1024.

    Args:
        capacity: entries per slot, at least 2.
        full: see ``ModelRunner.full_rows``: each number of rows is timed, and one row more.
    """
    most = min(_ROWS[-1], capacity // 2 + 1)
    context = max(0, min(_CONTEXT, max_model_len - 2, capacity - most))
    stairs = {count + more for count in full for more in (0, 1)}
    rows = (*(count for count in sorted({*_ROWS, *stairs}) if count < most), most)
    wide = {1, min(_WIDE, most), *(count + 1 for count in full[:1] if count < most)}
    deepest = min(max_model_len - 2, capacity - max(wide))
    far = {min(each, deepest) for each in _FAR if deepest > context}
    found = {Case(1, count, context) for count in rows} | {Case(1, 1, min(_NEAR, context))}
    found |= {Case(1, count, each) for each in far for count in wide}
    for count in {min(2**power, slots) for power in range(1, slots.bit_length() + 1)} - {1}:
        found |= {Case(count, 1, context), Case(count, min(_TREE_ROWS, most), context)}
        found |= {Case(count, 1, min(far))} if far else set()
    return sorted(found, key=lambda case: (case.sequences * case.rows, case.sequences * case.context))


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each step in each round."""

    rounds: dict[Case, list[float]]

    @property
    def seconds(self) -> dict[Case, float]:
        """Return the shortest time of each step, the least disturbed one."""
        return {case: min(taken) for case, taken in self.rounds.items()}

    @property
    def spread(self) -> float:
        """Return the median ratio of a step's median time to its shortest: 1.0 on a quiet machine."""
        return statistics.median(statistics.median(taken) / min(taken) for taken in self.rounds.values())


def time_steps(runner: ModelRunner, wanted: Sequence[Case], report: Report | None = None) -> Timings:
    """Run ``timing`` to its end and return the times."""
    return result_of(timing(runner, wanted, report))


def result_of(work: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            result: Result = ended.value
            return result


def rough_cases(runner: ModelRunner, max_model_len: int) -> list[Case]:
    """Return a few steps of one sequence to time for a fast start."""
    full = runner.full_rows[:1]  # the first stair, which one request's tree may reach
    glanced = {*_GLANCED, *(count + 1 for count in full)}
    wanted = [case for case in cases(1, runner.cache.capacity, max_model_len, full) if case.rows in glanced]
    context = max((case.context for case in wanted if case.rows > 1), default=0)
    return [case for case in wanted if case.context == context]


def rough_timings(runner: ModelRunner, max_model_len: int) -> Timings:
    """Time ``rough_cases``."""
    return result_of(timing(runner, rough_cases(runner, max_model_len), most_rounds=_LEAST_ROUNDS))


def timing(
    runner: ModelRunner, wanted: Sequence[Case], report: Report | None = None, most_rounds: int | None = None
) -> Generator[None, None, Timings]:
    """Time forwards on overwritten slots, with the argmax of all rows, which waits for a GPU; callers may pause before each."""
    # The CPU time of a single thread does not include other processes on its core.
    alone = runner.ranks == 1 and runner.model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter

    def timed(batch: Batch) -> float:
        for slot in slots:  # a request may have used the slot meanwhile
            runner.cache.prefixes.cut(slot, 0)
        started = clock()
        argmax_rows(runner.forward(batch))
        return clock() - started

    slots = range(max(case.sequences for case in wanted))
    _clear(runner, wanted)
    turns: list[tuple[Case, Batch]] = []
    slow, pass_s = False, 0.0
    for number, case in enumerate(wanted, start=1):
        if slow and case.sequences * case.rows > _FEW:
            continue
        batch = _batch(case)
        yield
        seconds = timed(batch)  # warm-up: memory allocation, kernel selection and compilation
        if seconds > _TURN_S:
            seconds = timed(batch)
        slow = slow or seconds > _LONG_S
        often = max(1, min(_MOST_OFTEN, int(_TURN_S / seconds)))
        turns += [(case, batch)] * often
        pass_s += seconds * often
        if report is not None:
            report(number, (_LEAST_ROUNDS + 1) * len(wanted))
    # By default as many rounds as fit into ``_TIMING_S``.
    rounds = most_rounds or max(_LEAST_ROUNDS, min(_ROUNDS, int(_TIMING_S / pass_s)))
    taken: dict[Case, list[float]] = {case: [] for case, _ in turns}
    # The steps alternate, so that disturbances affect all of them.
    for done, (case, batch) in enumerate(turns * rounds, start=1):
        yield
        taken[case].append(timed(batch))
        if report is not None:
            report(len(turns) + done, len(turns) * (rounds + 1))
    return Timings(taken)


def measure(runner: ModelRunner, max_model_len: int, report: Report | None = None) -> Timings:
    """Time the steps that ``fit`` needs; without ``report``, log the progress if it takes long."""
    wanted = cases(runner.sequences, runner.cache.capacity, max_model_len, runner.full_rows)
    if report is None:
        progress = TableProgress(f"timing the steps of {type(runner.model).__name__}", _PARTS)

        def report(done: int, total: int) -> None:
            if done < 0.9 * total:  # no line shortly before the end
                progress.update(_PARTS * done // total)

    return time_steps(runner, wanted, report)


def fit(seconds: Mapping[Case, float]) -> LatencyCurve:
    """Fit a latency curve to measured steps. Raises ``ValueError`` without two of one sequence and context, one with one row."""
    # Times of one sequence at the context with the most row counts are used directly.
    contexts = [case.context for case in seconds if case.sequences == 1]
    context = max(contexts, key=contexts.count, default=0)
    own = sorted(case for case in seconds if case.sequences == 1 and case.context == context)
    curve = LatencyCurve(tuple(case.rows for case in own), tuple(seconds[case] for case in own), context, 0.0, 0.0)
    others = [case for case in seconds if case not in own]
    if not others:
        return curve
    # The excess time of the other steps is divided between further sequences, KV entries, and entries that each row reads, by
    # least squares relative to the time of each step.
    base = np.array([curve.seconds(np.array([case.rows * case.sequences]), StepLoad(1, 1, context))[0] for case in others])
    parts = np.array([_parts(case, context) for case in others], np.float64)
    weights = 1.0 / np.array([seconds[case] for case in others])
    sequence_s, entry_s, row_entry_s = _non_negative(parts * weights[:, None], 1.0 - base * weights)
    return replace(curve, sequence_s=sequence_s, entry_s=entry_s, row_entry_s=row_entry_s)


def _parts(case: Case, context: int) -> tuple[int, int, int]:
    """Return the factors of ``sequence_s``, ``entry_s`` and ``row_entry_s`` in ``LatencyCurve.seconds``."""
    rows = case.sequences * case.rows
    return case.sequences - 1, case.sequences * case.context - context, rows * max(case.context - context, 0)


def _non_negative(parts: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> list[float]:
    """Return the non-negative least-squares factors of the columns, by trying every subset of columns.

    Example: columns ``1 0`` and ``1 1`` and wanted ``1 -1``: exact are 2 and -1, but of those allowed 1 and 0 come nearest.
    """
    columns = range(parts.shape[1])
    best, least = [0.0 for _ in columns], float(wanted @ wanted)
    for chosen in itertools.chain.from_iterable(itertools.combinations(columns, count) for count in range(1, len(columns) + 1)):
        picked = list(chosen)
        factors = np.linalg.lstsq(parts[:, picked], wanted, rcond=None)[0]
        off = parts[:, picked] @ factors - wanted
        if (factors >= 0).all() and float(off @ off) < least:
            least, best = float(off @ off), [0.0 for _ in columns]
            for column, factor in zip(picked, factors, strict=True):
                best[column] = float(factor)
    return best


def _batch(case: Case) -> Batch:
    """Build the batch of a step whose trees are a root with branches of one token, so that the attention mask is used."""
    parents = np.minimum(np.arange(-1, case.rows - 1, dtype=np.int32), 0)
    tree = DraftTree(np.zeros(case.rows, np.int32), parents, np.zeros(case.rows, np.int8), case.rows)
    tokens, end = np.zeros(case.context + 1, np.int32), case.context + 1
    return pack([ScheduledDummy(DummySequence(slot, tokens), case.context, end, tree) for slot in range(case.sequences)])


def _clear(runner: ModelRunner, wanted: Iterable[Case]) -> None:
    lengths: dict[int, int] = {}
    for case in wanted:
        lengths |= {slot: max(case.context, lengths.get(slot, 0)) for slot in range(case.sequences)}
    for slot, length in lengths.items():
        runner.cache.prefixes.cut(slot, 0)  # cached KV there is lost
        runner.cache.zero(slot, length)


class LiveCurve:
    """Timed latency curve with two factors, fitted to the latest steps by least squares relative to the timed seconds.

    Example: one row was timed at 6 ms, nine at 8. The neighbours of the machine go, and steps of one row take 4 ms, of nine 6.
    The factors go to 0.67 and 1: a row, which added a 24th to a step, adds a 16th.
    """

    def __init__(self, timed: LatencyCurve) -> None:
        self.curve = self._timed = timed
        # One factor scales the fixed time of a step (mostly memory), the other the time that its rows add (mostly compute).
        self._fixed = self._added = 1.0  # the factors
        self._since = 0  # steps since the last update of ``curve``
        # Decayed sums of products of: f, the fixed part of the timed step; a, the part added by rows; t, the time taken.
        self._ff = self._fa = self._aa = self._ft = self._at = 0.0

    def record_step(self, works: Sequence[ScheduledRequest], seconds: float) -> None:
        """Update the fit with a step and its seconds; steps that compute prompts are ignored."""
        rows = context = 0
        for work in works:
            if work.tree is None or work.end - work.start != 1:
                return
            rows += len(work.tree)
            context += work.start
        parts = self._timed.parts(StepLoad(len(works), len(works), context))
        timed = seconds_of(float(rows), parts)
        fixed = min(max(self._timed.one_row_s + parts[3], parts[5]), timed) / timed
        added = 1.0 - fixed
        expected = self._fixed * fixed + self._added * added
        # One disturbed step must not change much.
        taken = min(max(seconds / timed, expected / _MOST_OFF), expected * _MOST_OFF)
        self._ff = _KEPT * self._ff + fixed * fixed
        self._fa = _KEPT * self._fa + fixed * added
        self._aa = _KEPT * self._aa + added * added
        self._ft = _KEPT * self._ft + fixed * taken
        self._at = _KEPT * self._at + added * taken
        self._since += 1
        if self._since == _REDRAWN:
            self._redraw()

    def _redraw(self) -> None:
        # If all steps have equal rows, which cannot separate the two factors, the weight of the timed curve makes the larger part
        # change more.
        ff, fa, aa, ft, at = self._ff + _TIMED, self._fa, self._aa + _TIMED, self._ft + _TIMED, self._at + _TIMED
        over = ff * aa - fa * fa
        fixed = self._fixed = min(max((ft * aa - at * fa) / over, _LEAST), _MOST)
        added = self._added = min(max((at * ff - ft * fa) / over, _LEAST), _MOST)
        timed, one_s = self._timed, self._timed.one_row_s
        self.curve = replace(
            timed,
            rows_s=tuple(fixed * one_s + added * (seconds - one_s) for seconds in timed.rows_s),
            sequence_s=fixed * timed.sequence_s,
            entry_s=fixed * timed.entry_s,
            row_entry_s=added * timed.row_entry_s,
        )
        self._since = 0
