"""Parts of lookahead parallelism: messages, merged results, reuse on a rank, and the choice of a width."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.actors.lookahead.executor import RankResult, merge_results
from outrider.actors.lookahead.messages import (
    Detached,
    Failure,
    Heartbeat,
    OpenMessage,
    OutcomeMessage,
    Reply,
    StepMessage,
    WorkMessage,
)
from outrider.actors.lookahead.rank import Rank
from outrider.actors.lookahead.rank_state import RankKVState, RankKVStates
from outrider.actors.lookahead.width import WidthChoice, WidthChoices
from outrider.actors.sharded.messages import JoinMessage, ReadyMessage, ShardedStep
from outrider.actors.wire import Message, WireError, decode, encode
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams, TokenLogprob
from outrider.decoding.tree import Acceptance, DraftTree, TreePart
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.batch import Batch, ScheduledRequest, SequenceRows
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.sharded import Compaction, EntryCopy
from tests.helpers.models import VOCAB, prepared, tiny_model
from tests.helpers.ranks import TinyGroup, twin

PARAMS = SamplingParams(
    max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, seed=2**63 - 1, stop=("end", "\n"), stop_token_ids=(3, 4), ignore_eos=True,
    min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias=((7, -100.0), (8, 0.5)),
    logprobs=2, min_tokens=1,
)  # fmt: skip
STEP = StepMessage(
    sequence=12,
    opened=(OpenMessage(3, "chatcmpl-ü/0", np.array([5, 6, 2**31 - 1], np.int32), PARAMS, (0, 50256)),),
    closed=(1, 2),
    works=(
        WorkMessage(
            3, 0, 0, 4, np.array([9], np.int32), np.array([9, 1, 2], np.int32), np.array([-1, 0, 0], np.int32), 2, b"12345678"
        ),
        WorkMessage(4, 1, 17, 81, *[np.zeros(0, np.int32)] * 3, 0),
    ),
    top_k=8,
    joins=True,
)
REPLY = Reply(
    7,
    0.25,
    (
        OutcomeMessage(
            Acceptance((1, 4), 9), np.array([3, 4], np.int32), np.array([[1, 2], [3, 4]], np.int32),
            (TokenLogprob(9, -0.5, ((9, -0.5), (1, -2.0))),),
        ),
        OutcomeMessage(Acceptance((), 0), np.array([0], np.int32), None, None),
    ),
)  # fmt: skip
MASK = np.tril(np.ones((5, 5), np.bool_))
MASK[4, 3] = False
ROWS = np.arange(7)
BATCH = Batch(ROWS + 40, ROWS, (SequenceRows(3, 17, 0, 5, MASK), SequenceRows(0, 2, 5, 2, None)), ROWS[2:], (0, None))
MESSAGES: list[Message] = [
    STEP, REPLY, Failure("OutOfMemoryError: 2 GiB", True), Detached(), Heartbeat(True), Heartbeat(False),
    JoinMessage("127.0.0.1", 4242, 8, 512), ReadyMessage("cpu"),
    ShardedStep((Compaction(3, 12, (0, 2, 4)), EntryCopy(1, 2, 30, 14)), BATCH),
]  # fmt: skip


def plain(value: object) -> object:
    """Arrays as lists, so that messages can be compared."""
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert plain(decode(encode(message))) == plain(message)


def test_parameters_keep_their_types_and_any_text() -> None:
    step = decode(encode(STEP))
    assert isinstance(step, StepMessage)
    assert step.opened[0].params == PARAMS
    assert hash(step.opened[0].params) == hash(PARAMS)  # equality of dataclasses would let a list pass for a tuple
    # Half of a surrogate pair, which is no UTF-8.
    opened = dataclasses.replace(STEP.opened[0], request_id="\ud800", params=dataclasses.replace(PARAMS, stop=("\udfff",)))
    step = decode(encode(dataclasses.replace(STEP, opened=(opened,))))
    assert isinstance(step, StepMessage)
    assert (step.opened[0].request_id, step.opened[0].params.stop) == ("\ud800", ("\udfff",))


OTHER_MSGPACK: list[object] = [
    [], [99], {"kind": 0}, "step", None, "Detached", ["Detached"], ["Path", ["/"]], ["OpenMessage", []],
    ["Heartbeat", []], ["Heartbeat", [1.5]], ["Heartbeat", [True, 1]], ["Heartbeat", None],

    ["Heartbeat", b"\1"], ["JoinMessage", [b"a", 1, 2, 3]], ["JoinMessage", ["a", True, 2, 3]],
    ["Reply", [1, 0.5, [5]]], ["Reply", [1, 0.5, 5]], ["ReadyMessage", [b"cpu"]], ["ShardedStep", [[[2, [1, 2, 3, 4]]], []]],
    ["ShardedStep", [[[-1, [1, 2, 3, 4]]], []]], ["_Unions", [None, None, [[-1, 2], b"12345678"]]],
    ["_Unions", [b"ab", None, None]],
]  # fmt: skip
WRONG_BATCHES: list[dict[str, Any]] = [
    {"positions": ROWS[1:]},
    {"logit_rows": ROWS[2:] + 1},
    {"segments": (SequenceRows(-1, 0, 0, 7, None),)},
    {"segments": (SequenceRows(0, 0, 5, 3, None),)},
    {"segments": (SequenceRows(0, 0, 0, 7, MASK),)},
]


@dataclasses.dataclass(frozen=True, slots=True)
class _Unions(Message):
    first: None | EntryCopy  # noqa: RUF036
    second: EntryCopy | None | Acceptance  # noqa: RUF036
    rows: Int32Array | None


def test_unions_with_none_in_any_place() -> None:
    for message in (_Unions(None, None, None), _Unions(EntryCopy(1, 2, 3, 4), Acceptance((1,), 2), ROWS.astype(np.int32))):
        assert plain(decode(encode(message))) == plain(message)
    second = decode(encode(_Unions(None, EntryCopy(1, 2, 3, 4), None)))
    assert isinstance(second, _Unions) and second.second == EntryCopy(1, 2, 3, 4)


def test_wrong_contents_are_refused() -> None:
    for value in OTHER_MSGPACK:
        with pytest.raises(WireError):
            decode(msgpack.packb(value))
    for changes in WRONG_BATCHES:  # compiled code would not notice
        with pytest.raises(ValueError, match="rows"):
            ShardedStep((), dataclasses.replace(BATCH, **changes))


@given(st.binary(max_size=200), st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_refused_or_read(junk: bytes, message: Message, data: st.DataObject) -> None:
    """Random bytes, and messages that were cut or changed on the way, raise nothing but ``WireError``."""
    raw = bytearray(encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    damaged = bytes(raw[:at]) if data.draw(st.booleans()) else bytes([*raw[:at], data.draw(st.integers(0, 255)), *raw[at + 1 :]])
    for received in (junk, damaged):
        with contextlib.suppress(WireError):
            assert isinstance(decode(received), Message)


# Root 7 with the branches 1 2 3 and 4 5.
TREE = DraftTree(
    np.array([7, 1, 2, 3, 4, 5], np.int32), np.array([-1, 0, 1, 2, 0, 4], np.int32), np.arange(6, dtype=np.int8), 6
)  # fmt: skip
LEFT, RIGHT = np.array([0, 1, 2, 3], np.int32), np.array([0, 4, 5], np.int32)
END = 10


def result_of(places: np.ndarray, rows: tuple[int, ...], next_token: int, first_id: int = 50, top_k: int = 0) -> RankResult:
    """A part of ``TREE``, its walk, and ids that tell who computed a row."""
    ids = np.arange(first_id, first_id + len(places), dtype=np.int32)
    ranked = np.stack([ids + 100 * k for k in range(top_k)], axis=1) if top_k else None
    held = RankKVState(Request("r", [1], SamplingParams()), 0)
    said = OutcomeMessage(Acceptance(rows, next_token), ids, ranked, None)
    return RankResult(TreePart(places, TREE.take(places)), held, said)


def test_the_longest_walk_wins_and_speaks_of_the_whole_tree() -> None:
    leader, other = result_of(LEFT, (), 4, 50, top_k=2), result_of(RIGHT, (1, 2), 9, 60, top_k=2)
    outcome, left_out = merge_results(TREE, END, [leader, other])
    assert outcome.acceptance.rows == (4, 5)
    assert outcome.acceptance.next_token == 9
    assert left_out == 0
    assert outcome.tree is TREE
    assert outcome.target.ids.tolist() == [50, 51, 52, 53, 61, 62]  # the root is the leader's to speak of
    assert outcome.target.top_k([0, 5], 2).tolist() == [[50, 150], [62, 162]]
    assert (leader.held.computed, other.held.computed) == (END, END + 2)


def test_equal_short_and_deviating_walks() -> None:
    # Of equals the lowest rank wins.
    shares = [result_of(RIGHT, (), 4), result_of(np.array([0, 1, 4], np.int32), (2,), 9), result_of(RIGHT, (1,), 9)]
    outcome, _ = merge_results(TREE, END, shares)
    assert outcome.tree.tokens[list(outcome.acceptance.rows)].tolist() == [4]
    assert [one.held.computed for one in shares] == [END, END + 1, END + 1]
    # Walks that part later share their beginning.
    shares = [result_of(np.array([0, 1, 2], np.int32), (1, 2), 6), result_of(LEFT, (1, 2, 3), 9)]
    outcome, left_out = merge_results(TREE, END, shares)
    assert outcome.acceptance.rows == (1, 2, 3) and left_out == 0
    assert [one.held.computed for one in shares] == [END + 2, END + 3]
    # Half precision: the other rank saw a near-tie differently. The step is the leader's, and it is counted.
    shares = [result_of(RIGHT, (1,), 8), result_of(LEFT, (1, 2, 3), 9)]
    outcome, left_out = merge_results(TREE, END, shares)
    assert (outcome.acceptance.rows, outcome.acceptance.next_token, left_out) == ((4,), 8, 1)
    assert shares[1].held.computed == END
    # The rank with the left branch was lost: the tree is what is left, and the walk's rows are rows of that.
    outcome, _ = merge_results(TREE, END, [result_of(np.array([0], np.int32), (), 4), result_of(RIGHT, (1, 2), 9, 60)])
    assert (outcome.tree.tokens.tolist(), outcome.tree.parents.tolist()) == ([7, 4, 5], [-1, 0, 1])
    assert outcome.tree.sources.tolist() == [0, 4, 5]
    assert outcome.acceptance.rows == (1, 2) and outcome.target.ids.tolist() == [50, 61, 62]


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


PROMPT = np.random.default_rng(2).integers(1, VOCAB, 50).astype(np.int32)
NONE = np.zeros(0, np.int32)
THREE_ROWS = np.array([-1, 0, 0], np.int32)
REUSE_PARAMS = SamplingParams(8, ignore_eos=True)


class Watched:
    """A rank, and how many rows each of its forwards computed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.rank, self.rows = Rank(LocalExecutor(runner)), list[int]()
        self._sequence = 0
        runner.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.rows.append(kwargs["input_ids"].shape[1])

    def step(self, *works: WorkMessage, opened: tuple[OpenMessage, ...] = (), closed: tuple[int, ...] = ()) -> list[list[int]]:
        """The likeliest tokens below the rows of each tree."""
        self._sequence += 1
        reply = self.rank.handle(StepMessage(self._sequence, opened, closed, works, 0))
        return [outcome.ids.tolist() for outcome in reply.outcomes]


@pytest.fixture
def watched() -> Watched:
    return Watched(twin("llama", "float32"))


def opening(number: int, scope: str | None = "s", prompt: Int32Array = PROMPT) -> OpenMessage:
    return OpenMessage(number, f"r{number}", prompt, REUSE_PARAMS, (), scope)


def work(number: int, slot: int, start: int, end: int, tree: bool = True, prompt: Int32Array = PROMPT) -> WorkMessage:
    tokens = np.array([prompt[-1], 3, 4], np.int32) if tree else NONE
    return WorkMessage(number, slot, start, end, NONE, tokens, THREE_ROWS if tree else NONE, 3 if tree else 0)


def test_rows_that_are_there_are_not_computed_again_in_place_or_in_another_slot(watched: Watched) -> None:
    first = watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    copied = watched.step(work(2, 1, 0, 50), opened=(opening(2),))
    in_place = watched.step(work(3, 0, 0, 50), opened=(opening(3),), closed=(1,))
    assert first == copied == in_place
    assert watched.rows == [52, 3, 3]


def test_chunks_that_are_there_are_left_out_and_the_rest_is_computed(watched: Watched) -> None:
    first = watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    longer = np.concatenate([PROMPT[:40], PROMPT[:20]])
    alone = Watched(twin("llama", "float32")).step(work(9, 0, 0, 60, prompt=longer), opened=(opening(9, prompt=longer),))
    watched.rows.clear()
    assert watched.step(work(2, 1, 0, 16, tree=False), opened=(opening(2, prompt=longer),)) == []
    assert watched.step(work(2, 1, 16, 32, tree=False)) == []
    assert watched.rows == []  # all of it was copied
    assert watched.step(work(2, 1, 32, 48, tree=False)) == []
    assert watched.step(work(2, 1, 48, 60, prompt=longer)) == alone and alone != first
    assert watched.rows == [8, 14]


def test_nothing_is_reused_of_other_scopes_or_after_a_failure(watched: Watched) -> None:
    answers = [
        watched.step(work(number, number % 2, 0, 50), opened=(opening(number, scope),), closed=(number - 1,) if number else ())
        for number, scope in enumerate(("s", None, "t", None))
    ]
    assert answers == [answers[0]] * 4
    watched.step(work(4, 0, 0, 50), opened=(opening(4),))
    watched.rank.forget(failed=True)
    watched.step(work(5, 0, 0, 50), opened=(opening(5),))
    assert watched.rows == [52] * 6


def test_a_request_that_was_preempted_is_placed_anew(watched: Watched) -> None:
    first = watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    other = PROMPT[::-1].copy()
    watched.step(work(2, 0, 0, 50, prompt=other), opened=(opening(2, prompt=other),))  # it has taken the slot
    assert watched.step(work(1, 1, 0, 50)) == first  # nothing is left of it
    assert watched.step(work(1, 0, 0, 50), closed=(2,)) == first  # and again: a copy of its own
    assert watched.rows == [52, 52, 52, 3]


def shared_steps(choice: WidthChoice, steps: int, shared_s: float, alone_s: float, shared_tokens: int = 3) -> list[bool]:
    """Whether each of so many steps is shared, where shared ones take so long and bring so much, the others two tokens."""
    taken = []
    for _ in range(steps):
        taken.append(choice.shared)
        choice.record_step(shared_tokens if choice.shared else 2, shared_s if choice.shared else alone_s)
    return taken


def test_both_are_tried_in_turns_and_the_faster_one_is_taken() -> None:
    taken = shared_steps(WidthChoice(), 64 + 16 * 34, shared_s=0.040, alone_s=0.020)
    assert taken[:64] == ([True] * 16 + [False] * 16) * 2
    blocks = [taken[at] for at in range(64, len(taken), 16)]
    assert blocks == ([False] * 16 + [True]) * 2  # one trial of seventeen is for the other


def test_sharing_follows_the_tokens_a_second_of_each_load() -> None:
    taken = shared_steps(WidthChoice(), 64 + 16 * 17, shared_s=0.025, alone_s=0.020)  # 120 tokens a second beside 100
    assert sum(taken[64:]) == 16 * 16
    choice = WidthChoice()
    shared_steps(choice, 400, shared_s=0.040, alone_s=0.020)
    assert not choice.shared
    later = shared_steps(choice, 3000, shared_s=0.010, alone_s=0.020)
    assert sum(later[-1000:]) > 900
    choices = WidthChoices()
    assert choices.of(2, 2) is choices.of(2, 3)
    assert len({id(choices.of(ranks, requests)) for ranks in (2, 4) for requests in (1, 2, 4)}) == 6


def test_exchange_is_that_of_all_steps() -> None:
    drafter = prepared(build_drafter("recycling", {}), tiny_model("llama", "float32"))
    with TinyGroup("llama", drafter, world=2) as group:
        assert group.state.exchange_s == group.state.exchange_bytes == 0
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first = group.run([Request("a", [5, 6, 7, 5, 6], params)])
        between, moved = group.state.exchange_s, group.state.exchange_bytes
        assert first == group.run([Request("b", [5, 6, 7, 5, 6], params)])
        assert 0.0 < between < group.state.exchange_s == pytest.approx(sum(step.exchange_s for step in group.times))
        assert 0 < moved < group.state.exchange_bytes
        assert group.engine.metrics().forward_s > group.state.exchange_s
