"""What ranks say about parts of one tree becomes one outcome: the longest walk, and what the target said below every row."""

from __future__ import annotations

import numpy as np

from outrider.actors.lookahead.executor import RankResult, merge_results
from outrider.actors.lookahead.messages import OutcomeMessage
from outrider.actors.lookahead.rank_state import RankKVState, RankKVStates
from outrider.decoding.request import Acceptance, Request, SamplingParams
from outrider.decoding.tree import DraftTree, TreePart
from outrider.engine.forward.batch import ScheduledRequest

# Root 7 with the branches 1 2 3 and 4 5.
TREE = DraftTree(
    np.array([7, 1, 2, 3, 4, 5], np.int32), np.array([-1, 0, 1, 2, 0, 4], np.int32), np.arange(6, dtype=np.int8), 6
)  # fmt: skip
LEFT, RIGHT = np.array([0, 1, 2, 3], np.int32), np.array([0, 4, 5], np.int32)
END = 10


def share(places: np.ndarray, rows: tuple[int, ...], next_token: int, first_id: int = 50, top_k: int = 0) -> RankResult:
    """A part of ``TREE``, its walk, and ids that tell who computed a row."""
    ids = np.arange(first_id, first_id + len(places), dtype=np.int32)
    ranked = np.stack([ids + 100 * k for k in range(top_k)], axis=1) if top_k else None
    held = RankKVState(Request("r", [1], SamplingParams()), 0)
    said = OutcomeMessage(Acceptance(rows, next_token), ids, ranked, None)
    return RankResult(TreePart(places, TREE.take(places)), held, said)


def test_the_longest_walk_wins_and_speaks_of_the_whole_tree() -> None:
    leader, other = share(LEFT, (), 4, 50, top_k=2), share(RIGHT, (1, 2), 9, 60, top_k=2)
    outcome, left_out = merge_results(TREE, END, [leader, other])
    assert outcome.acceptance.rows == (4, 5)
    assert outcome.acceptance.next_token == 9
    assert left_out == 0
    assert outcome.tree is TREE
    assert outcome.target.ids.tolist() == [50, 51, 52, 53, 61, 62]  # the root is the leader's to speak of
    assert outcome.target.top_k([0, 5], 2).tolist() == [[50, 150], [62, 162]]
    assert (leader.held.computed, other.held.computed) == (END, END + 2)


def test_of_equals_the_lowest_rank_wins() -> None:
    shares = [share(RIGHT, (), 4), share(np.array([0, 1, 4], np.int32), (2,), 9), share(RIGHT, (1,), 9)]
    outcome, _ = merge_results(TREE, END, shares)
    assert outcome.tree.tokens[list(outcome.acceptance.rows)].tolist() == [4]
    assert [one.held.computed for one in shares] == [END, END + 1, END + 1]


def test_a_walk_that_begins_otherwise_than_the_leaders_is_left_out() -> None:
    """Half precision: the other rank saw a near-tie differently. The step is the leader's, and it is counted."""
    leader, other = share(RIGHT, (1,), 8), share(LEFT, (1, 2, 3), 9)
    outcome, left_out = merge_results(TREE, END, [leader, other])
    assert outcome.acceptance.rows == (4,)
    assert outcome.acceptance.next_token == 8
    assert left_out == 1
    assert other.held.computed == END


def test_walks_that_part_later_share_what_they_have_in_common() -> None:
    shares = [share(np.array([0, 1, 2], np.int32), (1, 2), 6), share(LEFT, (1, 2, 3), 9)]
    outcome, left_out = merge_results(TREE, END, shares)
    assert outcome.acceptance.rows == (1, 2, 3)
    assert left_out == 0
    assert [one.held.computed for one in shares] == [END + 2, END + 3]


def test_rows_that_nobody_computed_are_not_in_the_outcome() -> None:
    """The rank with the left branch was lost: the tree is what is left, and the walk's rows are rows of that."""
    leader, other = share(np.array([0], np.int32), (), 4), share(RIGHT, (1, 2), 9, 60)
    outcome, _ = merge_results(TREE, END, [leader, other])
    assert outcome.tree.tokens.tolist() == [7, 4, 5]
    assert outcome.tree.parents.tolist() == [-1, 0, 1]
    assert outcome.tree.sources.tolist() == [0, 4, 5]
    assert outcome.acceptance.rows == (1, 2)
    assert outcome.target.ids.tolist() == [50, 61, 62]


def test_who_ends_is_let_go_of_and_its_id_is_free() -> None:
    holdings, request = RankKVStates(), Request("r", [1, 2], SamplingParams())
    work = ScheduledRequest(request, 0, 2, None, frozenset())
    holdings.align(work).num_sent = 0
    assert holdings.live and holdings.take_ended() == ()
    holdings.end(request)
    assert not holdings.live
    again = holdings.align(ScheduledRequest(Request("r", [1, 2], SamplingParams()), 0, 2, None, frozenset()))
    assert (again.number, again.num_sent) == (1, -1)
    holdings.clear()  # of the second one the rank was never told
    assert holdings.take_ended() == (0,) and holdings.take_ended() == ()
    holdings.end(request)  # harmless
    assert holdings.take_ended() == ()
