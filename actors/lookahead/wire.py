"""Messages between the leader of a lookahead-parallel group and its ranks: token ids, row numbers and counts, as msgpack.

Nothing is unpickled: what comes from a connection is checked and can build these classes only. Arrays travel as little-endian
bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from decoding.request import SamplingParams, TokenLogprob
from decoding.tree import Int32Array

MAX_MESSAGE_BYTES = 1 << 26  # prompts of millions of tokens; more is no message of ours
_STEP, _REPLY, _FAILURE, _AWAY, _BEAT = range(5)
_INT32 = np.dtype("<i4")


class WireError(ValueError):
    """Bytes that are no message."""


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A request that the rank has not seen. Its number stands for it from now on."""

    number: int
    request_id: str
    prompt: Int32Array  # [n]
    params: SamplingParams
    end_tokens: tuple[int, ...]
    scope: str | None = None  # see ``engine.kv.prefix_cache.PrefixCache``


@dataclass(frozen=True, slots=True)
class WorkMessage:
    """A rank's part of a step for one request: see ``engine.forward.batch.Work``.

    One that begins at 0 says that the slot is the request's from now on. The rank may find that it holds some of the tokens.
    """

    number: int
    slot: int
    start: int
    end: int
    committed: Int32Array  # tokens of the output that the rank has not seen
    tokens: Int32Array  # [n] of the rank's part of the tree, the root first; empty without a tree
    parents: Int32Array  # [n]
    num_candidates: int
    digest: bytes = b""  # of the committed sequence, where it is to be compared


@dataclass(frozen=True, slots=True)
class StepMessage:
    """What a rank computes in one step."""

    sequence: int
    opened: tuple[OpenMessage, ...]
    closed: tuple[int, ...]  # numbers of requests that have ended
    works: tuple[WorkMessage, ...]
    top_k: int
    joins: bool = False  # the leader's first message since it took the rank in: what was before does not count


@dataclass(frozen=True, slots=True)
class OutcomeMessage:
    """What a rank's part of a tree came to."""

    rows: tuple[int, ...]  # accepted, of the part
    next_token: int
    ids: Int32Array  # [n] the likeliest token below each row of the part
    ranked: Int32Array | None  # [n, top_k]
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a step: an outcome for each of its works that has a tree, in order."""

    sequence: int
    compute_s: float
    outcomes: tuple[OutcomeMessage, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that the rank could not compute. It is of no use until it is made anew."""

    reason: str
    disagrees: bool = False  # its committed text is not the leader's


@dataclass(frozen=True, slots=True)
class Away:
    """The answer of a rank that has requests of its own or follows another leader."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, which a rank gives whatever it computes."""

    busy: bool  # it has requests of its own and follows nobody


Message = StepMessage | Reply | Failure | Away | Beat


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    data: bytes = msgpack.packb(_flatten(message), unicode_errors="surrogatepass")  # ids and stop strings may be any text
    return data


def _flatten(message: Message) -> list[Any]:
    match message:
        case StepMessage(sequence, opened, closed, works, top_k, joins):
            heads = [
                (one.number, one.request_id, _pack(one.prompt), dataclasses.asdict(one.params), one.end_tokens, one.scope)
                for one in opened
            ]
            rows = [
                (
                    work.number, work.slot, work.start, work.end, _pack(work.committed), _pack(work.tokens), _pack(work.parents),
                    work.num_candidates, work.digest,
                )
                for work in works
            ]  # fmt: skip
            return [_STEP, sequence, heads, closed, rows, top_k, joins]
        case Reply(sequence, compute_s, outcomes):
            return [_REPLY, sequence, compute_s, [_flatten_outcome(outcome) for outcome in outcomes]]
        case Failure(reason, disagrees):
            return [_FAILURE, reason, disagrees]
        case Away():
            return [_AWAY]
        case Beat(busy):
            return [_BEAT, busy]


def _flatten_outcome(outcome: OutcomeMessage) -> list[Any]:
    ranked = None if outcome.ranked is None else (_pack(outcome.ranked), outcome.ranked.shape[1])
    logprobs = outcome.logprobs and [(one.token_id, one.logprob, one.top) for one in outcome.logprobs]
    return [outcome.rows, outcome.next_token, _pack(outcome.ids), ranked, logprobs]


def decode(data: bytes) -> Message:
    """The message of some bytes.

    Raises:
        WireError: they are none.
    """
    try:
        kind, *fields = msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")
        if kind == _STEP:
            return _step(*fields)
        if kind == _REPLY:
            return _reply(*fields)
        if kind == _FAILURE:
            return Failure(str(fields[0]), bool(fields[1]))
        if kind == _AWAY:
            return Away()
        if kind == _BEAT:
            return Beat(bool(fields[0]))
    except (ValueError, TypeError, IndexError, AttributeError, msgpack.UnpackException) as error:
        raise WireError(f"not a message of a group: {type(error).__name__}: {error}") from None
    raise WireError(f"not a message of a group: kind {kind!r}")


def _step(
    sequence: int, opened: Sequence[Any], closed: tuple[int, ...], works: Sequence[Any], top_k: int, joins: bool
) -> StepMessage:
    heads = tuple(
        OpenMessage(number, request_id, _unpack(prompt), SamplingParams(**params), end_tokens, scope)
        for number, request_id, prompt, params, end_tokens, scope in opened
    )
    parts = tuple(
        WorkMessage(number, slot, start, end, _unpack(committed), _unpack(tokens), _unpack(parents), candidates, digest)
        for number, slot, start, end, committed, tokens, parents, candidates, digest in works
    )
    return StepMessage(sequence, heads, closed, parts, top_k, joins)


def _reply(sequence: int, compute_s: float, outcomes: Sequence[Any]) -> Reply:
    return Reply(sequence, float(compute_s), tuple(_outcome(*outcome) for outcome in outcomes))


def _outcome(rows: tuple[int, ...], next_token: int, ids: bytes, ranked: Any, logprobs: Any) -> OutcomeMessage:
    table = None if ranked is None else _unpack(ranked[0]).reshape(-1, ranked[1])
    told = logprobs and tuple(TokenLogprob(*one) for one in logprobs)
    return OutcomeMessage(rows, next_token, _unpack(ids), table, told)


def _pack(array: Int32Array) -> bytes:
    return array.astype(_INT32, copy=False).tobytes()


def _unpack(data: bytes) -> Int32Array:
    return np.frombuffer(data, _INT32).astype(np.int32, copy=False)
