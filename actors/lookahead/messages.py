"""Messages between the leader of a lookahead-parallel group and its ranks: token ids, row numbers and counts."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.actors.wire import Message
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import SamplingParams, TokenLogprob
from outrider.decoding.tree import Acceptance


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """Request that is new to the rank. Later messages refer to it by ``number``."""

    number: int
    request_id: str
    prompt: Int32Array  # [n]
    params: SamplingParams
    end_tokens: tuple[int, ...]
    scope: str | None = None  # see ``engine.kv.prefix_cache.PrefixCache``
    adapter: str | None = None
    rope_length: int = 0  # see ``engine.forward.rope``
    http_id: str = ""  # for log lines


@dataclass(frozen=True, slots=True)
class WorkMessage:
    """Rank's part of a step for one request, see ``ScheduledRequest``. ``start`` 0 assigns the slot to the request."""

    number: int
    slot: int
    start: int
    end: int
    committed: Int32Array  # output tokens that the rank has not received
    tokens: Int32Array  # [n] tokens of the rank's part of the tree, the root first; empty without a tree
    parents: Int32Array  # [n]
    num_candidates: int
    digest: bytes = b""  # hash of the committed sequence, if it is to be compared


@dataclass(frozen=True, slots=True)
class StepMessage(Message):
    """Work of a rank in one step."""

    sequence: int
    opened: tuple[OpenMessage, ...]
    closed: tuple[int, ...]  # numbers of finished requests
    works: tuple[WorkMessage, ...]
    top_k: int
    joins: bool = False  # first message since the leader added the rank: the rank drops its earlier requests


@dataclass(frozen=True, slots=True)
class OutcomeMessage:
    """Verification result of a rank's part of a tree."""

    acceptance: Acceptance  # row numbers of the part
    ids: Int32Array  # [n] likeliest next token after each row of the part
    ranked: Int32Array | None  # [n, top_k], see ``TargetRows.ranked``
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """Reply to a step: an outcome for each work that has a tree, in order."""

    sequence: int
    compute_s: float
    outcomes: tuple[OutcomeMessage, ...]


@dataclass(frozen=True, slots=True)
class EmulatedReply(Reply):
    """``Reply`` of a rank with an emulated device, see ``EmulatedClock.join``."""

    ended_s: float  # by the wall clock of this machine
    hidden_s: float  # wall seconds of the step that dilation hid


@dataclass(frozen=True, slots=True)
class Failure(Message):
    """Report of a step that the rank could not compute. The rank must be restarted."""

    reason: str
    disagrees: bool = False  # its committed text differs from the leader's


@dataclass(frozen=True, slots=True)
class Detached(Message):
    """Reply of a rank that is busy or follows another leader."""


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Sign of life, sent also during computation."""

    busy: bool  # the rank has own requests and follows no leader
