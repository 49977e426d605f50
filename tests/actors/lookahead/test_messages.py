"""Messages between ranks: what is sent is what comes, and bytes that are no message are refused with the one named error."""

from __future__ import annotations

import contextlib
import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from outrider.actors.sharded.messages import JoinMessage, ReadyMessage, ShardedStep
from outrider.actors.wire import Message, WireError, decode, encode
from outrider.decoding.request import Acceptance, SamplingParams, TokenLogprob
from outrider.engine.forward.batch import Batch, SequenceRows
from outrider.engine.forward.sharded import Compaction, EntryCopy

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


def test_parameters_keep_their_types() -> None:
    """Equality of dataclasses would let a list pass for a tuple."""
    step = decode(encode(STEP))
    assert isinstance(step, StepMessage)
    assert step.opened[0].params == PARAMS
    assert hash(step.opened[0].params) == hash(PARAMS)


def test_names_and_stop_strings_may_be_any_text() -> None:
    """Half of a surrogate pair, which is no UTF-8, ends neither the leader's step nor the rank."""
    opened = dataclasses.replace(STEP.opened[0], request_id="\ud800", params=dataclasses.replace(PARAMS, stop=("\udfff",)))
    step = decode(encode(dataclasses.replace(STEP, opened=(opened,))))
    assert isinstance(step, StepMessage)
    assert (step.opened[0].request_id, step.opened[0].params.stop) == ("\ud800", ("\udfff",))


@given(st.binary(max_size=200))
def test_junk_is_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):  # a few bytes may make a message; most make this error, and none another
        assert isinstance(decode(data), Message)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_refused_or_read(message: Message, data: st.DataObject) -> None:
    """Nothing but the named error comes of bytes that were cut or changed on the way."""
    raw = bytearray(encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    damaged = bytes(raw[:at]) if data.draw(st.booleans()) else bytes([*raw[:at], data.draw(st.integers(0, 255)), *raw[at + 1 :]])
    with contextlib.suppress(WireError):
        assert isinstance(decode(damaged), Message)


@pytest.mark.parametrize(
    "value",
    [
        [], [99], {"kind": 0}, "step", None, "Detached", ["Detached"], ["Path", ["/"]], ["OpenMessage", []],
        ["Heartbeat", []], ["Heartbeat", [1.5]], ["Heartbeat", [True, 1]], ["Heartbeat", None],
        ["Reply", [1, 0.5, [5]]], ["Reply", [1, 0.5, 5]], ["ReadyMessage", [b"cpu"]], ["ShardedStep", [[[2, [1, 2, 3, 4]]], []]],
    ],
)  # fmt: skip
def test_other_msgpack_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        decode(msgpack.packb(value))


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": ROWS[1:]},
        {"logit_rows": ROWS[2:] + 1},
        {"segments": (SequenceRows(-1, 0, 0, 7, None),)},
        {"segments": (SequenceRows(0, 0, 5, 3, None),)},
        {"segments": (SequenceRows(0, 0, 0, 7, MASK),)},
    ],
)
def test_what_compiled_code_would_not_notice_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rows"):
        ShardedStep((), dataclasses.replace(BATCH, **changes))  # type: ignore[arg-type]
