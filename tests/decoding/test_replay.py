"""Replay against scripted drafters, whose steps can be counted by hand, and against a plain simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.replay import KnownText, ReplayCounts, known_rows, replay_workload
from outrider.decoding.request import Request
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree

LLMA = SOURCES.index("llma")
VOCAB = 50


def text(output: Sequence[int], prompt: Sequence[int] = (1,), references: Sequence[Sequence[int]] = ()) -> KnownText:
    arrays = [np.asarray(ids, np.int32) for ids in (prompt, output, *references)]
    return KnownText("t", arrays[0], tuple(arrays[2:]), arrays[1])


class Scripted(Drafter):
    """Proposes what a script says for each length of the output, and writes down what it is told."""

    def __init__(self, script: dict[int, list[int] | DraftTree]) -> None:
        self.script, self.calls = script, []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        (request,), (budget,) = requests, budgets
        self.calls.append(("propose", request.num_output, budget))
        draft = self.script.get(request.num_output, [])
        return [draft if isinstance(draft, DraftTree) else DraftTree.chain(request.root, draft, LLMA)]

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        assert not target.has_logits
        self.calls.append(("observe", request.output_ids.tolist(), len(tree), target.ids.tolist(), acceptance.rows))

    def finish(self, request: Request) -> None:
        self.calls.append(("finish", request.request_id, request.output_ids.tolist()))


def replayed(drafter: Drafter, *texts: KnownText, budget: int = 16) -> ReplayCounts:
    return replay_workload(texts, lambda: drafter, budget, VOCAB, lambda: 0.0)


def test_the_example_of_the_docstring() -> None:
    drafter = Scripted({1: [5, 6, 9]})
    counts = replayed(drafter, text([4, 5, 6, 7, 0]))
    assert (counts.tokens, counts.steps, counts.drafted, counts.accepted) == (5, 3, 3, 2)
    assert counts.tokens_per_step == pytest.approx(5 / 3)
    assert counts.drafted_per_step == 1.0
    assert counts.accepted_by_source == {"llma": 2}
    assert drafter.calls == [
        ("observe", [4], 1, [4], ()),
        ("propose", 1, 16),
        ("observe", [4, 5, 6, 7], 4, [5, 6, 7, -1], (1, 2)),
        ("finish", "0", [4, 5, 6, 7, 0]),  # the last token needs no draft
    ]


def test_the_right_branch_of_a_tree_is_followed_and_rows_beside_it_stay_unknown() -> None:
    tree = DraftTree(
        np.array([4, 8, 5, 9, 6], np.int32), np.array([-1, 0, 0, 1, 2], np.int32), np.array([0, LLMA, LLMA, LLMA, 1], np.int8), 5
    )
    drafter = Scripted({1: tree})
    counts = replayed(drafter, text([4, 5, 6, 7, 3, 0]))
    assert (counts.steps, counts.accepted) == (4, 2)
    assert counts.accepted_by_source == {"llma": 1, SOURCES[1]: 1}
    assert drafter.calls[2] == ("observe", [4, 5, 6, 7], 5, [5, -1, 6, -1, 7], (2, 4))


class Wide(Scripted):
    """Drafts as many wrong branches as there are ranks, and the right one last."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        (request,), (budget,) = requests, budgets
        self.calls.append(("propose", request.num_output, budget))
        tokens = np.array([request.root, *range(40, 39 + self.ranks), request.root + 1], np.int32)
        count = len(tokens)
        return [DraftTree(tokens, np.array([-1] + [0] * (count - 1), np.int32), np.full(count, LLMA, np.int8), count)]


def test_a_replay_as_so_many_ranks() -> None:
    made: list[Wide] = []

    def make() -> Wide:
        made.append(Wide({}))
        return made[-1]

    texts = [text([4, 5, 6, 7, 8, 0]), text([4, 5, 0])]
    counts = replay_workload(texts, make, 3, VOCAB, lambda: 0.0, keep_history=False, ranks=4)
    assert [drafter.ranks for drafter in made] == [4, 4]
    assert [call for call in made[0].calls if call[0] == "propose"] == [("propose", 1, 12), ("propose", 3, 12)]
    assert (counts.steps, counts.drafted, counts.accepted) == (6, 12, 3)
    cut = replay_workload(texts, lambda: Wide({}), 1, VOCAB, lambda: 0.0, ranks=2)
    assert cut.drafted == 6 and cut.accepted == 3
    with pytest.raises(ValueError, match="ranks"):
        replay_workload(texts, make, 3, VOCAB, lambda: 0.0, ranks=0)


def test_drafts_beyond_output_budget_and_vocabulary_are_cut() -> None:
    output = [4, 5, 6, 7, 0]
    long = replayed(Scripted({1: [5, 6, 7, 0, 9, 9]}), text(output))
    assert (long.steps, long.drafted, long.accepted) == (2, 3, 3)  # three may be accepted before the last token
    assert replayed(Scripted({1: [5, 6, 7]}), text(output), budget=1).drafted == 1
    assert replayed(Scripted({1: [5, VOCAB, 7]}), text(output)).drafted == 1
    none = replayed(Scripted({1: [5, 6, 7]}), text(output), budget=0)
    assert (none.steps, none.drafted, none.propose_s) == (5, 0, [])


def test_an_empty_output_is_its_end_token() -> None:
    drafter = Scripted({})
    counts = replayed(drafter, text([0]))
    assert (counts.records, counts.tokens, counts.steps) == (1, 1, 1)
    assert drafter.calls == [("finish", "0", [0])]


def test_history_is_kept_over_a_workload_or_made_anew_for_each_record() -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted({}))
        return made[-1]

    texts = [text([4, 0]), text([5, 0]), text([6, 0])]
    counts = replay_workload(texts, make, 4, VOCAB, lambda: 0.0)
    assert len(made) == 1 and counts.records == 3
    assert [call[1] for call in made[0].calls if call[0] == "finish"] == ["0", "1", "2"]
    replay_workload(texts[:1], lambda: made[0], 4, VOCAB, lambda: 0.0, id_prefix="again ")
    assert made[0].calls[-1][1] == "again 0"
    made.clear()
    replay_workload(texts, make, 4, VOCAB, lambda: 0.0, keep_history=False)
    assert [sum(call[0] == "finish" for call in drafter.calls) for drafter in made] == [1, 1, 1]


def test_every_call_is_timed_and_every_record_reported() -> None:
    ticks = iter(range(1000))
    reported = []
    texts = [text([4, 5, 6, 0]), text([4, 0])]
    clock, on_record = (lambda: float(next(ticks))), (lambda: reported.append(1))
    counts = replay_workload(texts, lambda: Scripted({}), 4, VOCAB, clock, on_record=on_record)
    assert (counts.propose_s, counts.observe_s, counts.finish_s) == ([1.0] * 2, [1.0] * 4, [1.0] * 2)
    assert len(reported) == 2


def test_a_drafter_that_needs_logits_is_refused() -> None:
    class NeedsLogits(Scripted):
        needs_logits = True

    with pytest.raises(ValueError, match="NeedsLogits drafts from the target's logits"):
        replayed(NeedsLogits({}), text([4, 0]))


def simulated(prompt: list[int], output: list[int], n: int, k: int) -> int:
    """Steps of prompt lookup, counted without trees: after the first token, a step takes what agrees of a copy, and one more."""
    done, steps = 1, 1
    while done < len(output):
        seen, draft = prompt + output[:done], []
        for size in range(min(n, len(seen) - 1), 0, -1):
            starts = [at for at in range(len(seen) - size) if seen[at : at + size] == seen[-size:]]
            if starts:
                draft = seen[starts[0] + size :][:k]
                break
        agreed = 0
        while agreed < min(len(draft), len(output) - done - 1) and draft[agreed] == output[done + agreed]:
            agreed += 1
        done, steps = done + agreed + 1, steps + 1
    return steps


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=40), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 6)
)
def test_steps_are_those_of_a_plain_simulation(outputs: list[list[int]], n: int, k: int) -> None:
    texts = [text(output[1:], output[:1] * 2) for output in outputs]
    options = {"max_ngram": n, "num_tokens": k}
    counts = replay_workload(texts, lambda: build_drafter("prompt_lookup", options), 64, VOCAB, lambda: 0.0)
    assert counts.steps == sum(simulated(output[:1] * 2, output[1:], n, k) for output in outputs)
    assert counts.tokens == sum(len(output) - 1 for output in outputs)
    assert counts.accepted == counts.tokens - counts.steps


def test_a_replay_has_no_logits_to_rank() -> None:
    tree = DraftTree.chain(4, [5, 6])
    target = known_rows(tree, Acceptance((1,), 9))
    assert target.ids.tolist() == [5, 9, -1] and not target.has_logits
    with pytest.raises(AssertionError, match="needs_logits"):
        target.top_k([0], 2)
