"""A generation request, what it asks for, and what a step gives it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decoding.tree import Int32Array


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Values outside their range raise ``ValueError`` naming the field."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are not part of it
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the text

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature == 0.0


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words; ``abort`` and ``error`` are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class SpecStats:
    """Counters of one request. ``steps`` are forwards that emitted tokens, the one that ends the prefill included."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    prefill_s: float = 0.0  # from admission to the first token
    decode_s: float = 0.0  # from the first token to the last
    propose_s: float = 0.0
    forward_s: float = 0.0  # the request's share of its steps is the whole step: steps are shared

    def tokens_per_step(self, emitted: int) -> float:
        """Emitted tokens per target forward; 0.0 before the first."""
        return emitted / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What verification kept of a tree: the accepted rows in order of depth, and the target's own token after them."""

    rows: tuple[int, ...]
    next_token: int

    @property
    def count(self) -> int:
        """Tokens emitted: accepted drafts and the bonus token."""
        return len(self.rows) + 1


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gives one request. ``text`` is what can be shown now: unfinished characters and possible beginnings of stop
    strings are held back until they are decided."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR
    stats: SpecStats | None = None  # set with the finish reason


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One generation. The only mutable core type; only the engine changes it.

    The committed sequence is prompt and output. The last committed token is the *root*: emitted, but its KV is not cached yet, so
    ``num_computed <= len(tokens) - 1`` between steps.
    """

    __slots__ = (
        "_buffer", "_length", "admitted_s", "arrival", "finish_reason", "first_token_s", "num_computed", "num_prompt", "params",
        "priority", "references", "request_id", "slot", "state", "stats",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | Int32Array,
        params: SamplingParams,
        references: Sequence[Sequence[int] | Int32Array] = (),
        priority: int = 0,
    ) -> None:
        """
        Args:
            request_id: unique among live requests.
            prompt_ids: [n] token ids, at least one.
            params: how to choose tokens, when to end.
            references: token sequences to draft from besides the prompt (documents, earlier turns).
            priority: lower runs first, as in vLLM.

        Raises:
            ValueError: the prompt is empty.
        """
        if len(prompt_ids) == 0:
            raise ValueError("prompt must hold at least one token")
        self.request_id, self.params, self.priority = request_id, params, priority
        self.references: tuple[Int32Array, ...] = tuple(np.asarray(r, np.int32) for r in references if len(r))
        self.num_prompt = len(prompt_ids)
        self._buffer = np.empty(self.num_prompt + params.max_tokens, np.int32)
        self._buffer[: self.num_prompt] = prompt_ids
        self._length = self.num_prompt
        self.state = RequestState.WAITING
        self.slot: int | None = None
        self.num_computed = 0  # tokens whose KV is in the slot
        self.arrival = 0  # order of arrival, set by the scheduler
        self.finish_reason: FinishReason | None = None
        self.stats = SpecStats()
        self.admitted_s: float | None = None  # the engine's clock at the first step, and at the first token
        self.first_token_s: float | None = None

    @property
    def tokens(self) -> Int32Array:
        """[n] int32 view of the committed sequence; not to be written to."""
        return self._buffer[: self._length]

    @property
    def output_ids(self) -> Int32Array:
        """[m] int32 view of the tokens emitted so far."""
        return self._buffer[self.num_prompt : self._length]

    @property
    def prompt_ids(self) -> Int32Array:
        """[num_prompt] int32 view of the prompt."""
        return self._buffer[: self.num_prompt]

    @property
    def num_tokens(self) -> int:
        """Length of the committed sequence."""
        return self._length

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return self._length - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.params.max_tokens - self.num_output

    @property
    def root(self) -> int:
        """The last committed token."""
        return int(self._buffer[self._length - 1])

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends emitted tokens; the caller keeps within ``remaining``."""
        assert len(token_ids) <= self.remaining, (len(token_ids), self.remaining)
        self._buffer[self._length : self._length + len(token_ids)] = token_ids
        self._length += len(token_ids)
