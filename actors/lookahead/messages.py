"""Messages between the leader of a lookahead-parallel group and its ranks: token ids, row numbers and counts."""

from __future__ import annotations

from dataclasses import dataclass

from actors.wire import Message
from decoding.request import Acceptance, SamplingParams, TokenLogprob
from decoding.tree import Int32Array


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A request that the rank has not seen. Its number stands for it from now on."""

    number: int
    request_id: str
    prompt: Int32Array  # [n]
    params: SamplingParams
    end_tokens: tuple[int, ...]
    scope: str | None = None  # see ``engine.kv.prefix_cache.PrefixCache``
    adapter: str | None = None
    reach: int = 0  # see ``engine.forward.rope``


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
class StepMessage(Message):
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

    acceptance: Acceptance  # rows of the part
    ids: Int32Array  # [n] the likeliest token below each row of the part
    ranked: Int32Array | None  # [n, top_k], see ``TargetRows.ranked``
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """The answer to a step: an outcome for each of its works that has a tree, in order."""

    sequence: int
    compute_s: float
    outcomes: tuple[OutcomeMessage, ...]


@dataclass(frozen=True, slots=True)
class Failure(Message):
    """A step that the rank could not compute. It is of no use until it is made anew."""

    reason: str
    disagrees: bool = False  # its committed text is not the leader's


@dataclass(frozen=True, slots=True)
class Away(Message):
    """The answer of a rank that has requests of its own or follows another leader."""


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """A sign of life, which a rank gives whatever it computes."""

    busy: bool  # it has requests of its own and follows nobody
