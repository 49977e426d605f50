"""A generation request, what it asks for, and what a step gives it."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decoding.grammar import Grammar
from decoding.tree import Int32Array

MAX_LOGPROBS = 20  # as OpenAI and vLLM
MAX_LOGIT_BIAS = 100.0  # as OpenAI
_GREEDY_BELOW = 1e-5  # as vLLM: logits divided by less could overflow
_CHOICE_BITS = 16  # of a text key
PLAIN = "autoregressive"  # the strategy of plain decoding, which every request may ask for

# Bounds of numbers, both ends included. OpenAI's where it has the parameter; those of repetition_penalty, of which vLLM asks only
# that it be positive, keep every product with a logit finite.
_BOUNDS = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


def request_hash(name: str) -> int:
    """What stands for a request in text keys: 64 bits of the BLAKE2b hash of its name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def text_key(request_id: str) -> int:
    """The key, below 2**80, of the text that a request writes: the hash of its name, then 16 bits for the choice.

    The id ``NAME/INDEX`` of a choice of a larger request hashes NAME; INDEX is up to five digits, below 65,536. Any other id is a
    name, of choice 0.

    Example: ``text_key("chatcmpl-7/2") == request_hash("chatcmpl-7") << 16 | 2``.
    """
    name, _, index = request_id.rpartition("/")
    if name and index.isascii() and index.isdigit() and len(index) <= 5 and int(index) < 1 << _CHOICE_BITS:
        return request_hash(name) << _CHOICE_BITS | int(index)
    return request_hash(request_id) << _CHOICE_BITS


def request_of(text: int) -> int:
    """The request hash in a text key."""
    return text >> _CHOICE_BITS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Values outside their range raise ``ValueError`` naming the field.

    ``grammar``, ``logit_bias``, ``min_tokens`` and the penalties change the logits (``decoding.penalties``) of greedy and sampled
    requests alike; ``temperature``, ``min_p``, ``top_k`` and ``top_p`` shape what a sampled request draws from
    (``decoding.sampling``).
    """

    max_tokens: int = 256
    temperature: float = 0.0  # below 1e-5: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are not part of it unless include_stop
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the text
    include_stop: bool = False  # what ends the text, one of stop or stop_token_ids, is part of it
    skip_special_tokens: bool = True  # the text is without the tokenizer's special tokens
    min_p: float = 0.0  # tokens less likely than this share of the most likely one are excluded; 0: none
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones; 1: off
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output
    frequency_penalty: float = 0.0  # subtracted once for every time that the output holds the token
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    logprobs: int | None = None  # alternatives reported with each token's log-probability; None: no log-probabilities
    min_tokens: int = 0  # tokens that end the text are not chosen before so many; stop strings end it all the same
    grammar: str | None = None  # what the text must be of, see engine.grammar; None: any text

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {getattr(self, name)}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 and {MAX_LOGPROBS}, or None for none, got {self.logprobs}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos must be off with a grammar, which says itself where the text may end")
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        for token, bias in self.logit_bias:
            if token < 0 or not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
                raise ValueError(
                    f"logit_bias must pair token ids with values between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, "
                    f"got {bias} for {token}"
                )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias must name each token once")

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax, of the logits as bias and penalties leave them."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether a token's logit depends on how often the sequence holds the token."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def alters_logits(self) -> bool:
        """Whether a greedy token may be another than the argmax of the model's own logits."""
        return self.penalized or bool(self.logit_bias) or self.min_tokens > 0 or self.grammar is not None

    @property
    def truncates(self) -> bool:
        """Whether a sampled token is drawn from some of the tokens only."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0


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
    cached_tokens: int = 0  # of the prompt: their KV was there already
    prefill_s: float = 0.0  # from admission to the first token
    decode_s: float = 0.0  # from the first token to the last
    propose_s: float = 0.0
    forward_s: float = 0.0  # the request's share of its steps is the whole step: steps are shared
    energy_j: float | None = None  # its share of what the devices used in its steps; None where nothing measured it

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
class TokenLogprob:
    """How likely the model found an emitted token: natural logarithms of the softmax of its raw logits, before bias, penalties,
    temperature and truncation (vLLM's ``raw_logprobs``)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens and theirs, the most likely first, equals by token id
    rank: int | None = None  # among all tokens, 1 the most likely; told of tokens of a prompt only


@dataclass(frozen=True, slots=True)
class StepReport:
    """Who drafted what a step emitted, for requests that ask (see ``decoding.origins``)."""

    pieces: tuple[str, ...]  # of the output's ``text``, one for each token: what it released; "" for a part of a character
    sources: tuple[str, ...]  # one for each token: ``model`` for the target's own, else what drafted it
    drafted: int  # rows that were verified, accepted ones included

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return sum(source != "model" for source in self.sources)


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
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, where the request asks for them
    report: StepReport | None = None  # where the request asks for it
    # Of the first output with tokens, where the request asks for it: one for each token of the prompt from the second on.
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


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
        "_buffer", "_length", "admitted_s", "arrival", "arrived_s", "finish_reason", "first_token_s", "grammar",
        "max_draft_tokens", "num_computed", "num_given", "num_prompt", "params", "priority",
        "prompt_logprobs", "prompt_scores",
        "public", "queued_s", "references", "report", "request_id", "scope", "siblings", "slot", "state", "stats",
        "strategy", "tenant", "text", "waited_s",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | Int32Array,
        params: SamplingParams,
        references: Sequence[Sequence[int] | Int32Array] = (),
        priority: int = 0,
        *,
        tenant: str | None = None,
        public: bool = True,
        emitted: Sequence[int] | Int32Array = (),
        strategy: str | None = None,
        max_draft_tokens: int | None = None,
        siblings: bool = False,
        report: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        """
        Args:
            request_id: unique among live requests.
            prompt_ids: [n] token ids, at least one.
            params: how to choose tokens, when to end.
            references: token sequences to draft from besides the prompt (documents, earlier turns).
            priority: lower runs first, as in vLLM; any but 0 needs ``engine.scheduling_policy`` priority.
            tenant: whose outputs to draft from, and to add this one to. None is a private request: it drafts from no other
                request's output, and none drafts from its.
            public: may draft from the public corpus.
            emitted: output tokens that were emitted before, by an engine that is gone. They are committed at once and count as
                output: with choices that depend on seed and position alone, what follows is what would have followed there.
            strategy: who drafts for it, one of those that the engine has; None for the engine's own. ``autoregressive`` is plain
                decoding, which every engine has.
            max_draft_tokens: most drafted rows in a step, for each rank; the engine's own limit holds as well. 0 is plain
                decoding, whoever would draft.
            siblings: other choices of the same prompt run beside it, ``NAME/INDEX`` with its own NAME. They compute the prompt
                once, also where the request is private otherwise.
            report: outputs say who drafted each token (``StepOutput.report``).
            prompt_logprobs: alternatives reported with each log-probability of the prompt (``StepOutput.prompt_logprobs``); None
                for none. The whole prompt is computed then, whatever is there of it. With ``emitted`` they were told before.

        Raises:
            ValueError: the prompt is empty, ``emitted`` leaves no room for one more token, or ``max_draft_tokens`` is negative.

        Example: ``Request("a", [5, 6], SamplingParams(max_tokens=3), emitted=[7])`` holds the tokens ``5 6 7``, of which one is
        output, and may emit two more.
        """
        if len(prompt_ids) == 0:
            raise ValueError("prompt must hold at least one token")
        if len(emitted) >= params.max_tokens:
            raise ValueError(f"emitted must leave room for a token: {len(emitted)} of max_tokens={params.max_tokens} are there")
        if max_draft_tokens is not None and max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must be 0 (plain decoding) or more, got {max_draft_tokens}")
        self.request_id, self.params, self.priority = request_id, params, priority
        self.strategy = strategy
        self.max_draft_tokens = 0 if strategy == PLAIN else max_draft_tokens
        self.tenant, self.public, self.siblings, self.report = tenant, public, siblings, report
        self.prompt_logprobs = None if len(emitted) else prompt_logprobs
        self.prompt_scores: list[TokenLogprob] = []  # of its tokens from the second on, as far as they are computed
        self.text = text_key(request_id)  # key of its output in histories
        self.references: tuple[Int32Array, ...] = tuple(np.asarray(r, np.int32) for r in references if len(r))
        self.num_prompt, self.num_given = len(prompt_ids), len(emitted)  # num_given: output of an engine that is gone
        self._buffer = np.empty(self.num_prompt + params.max_tokens, np.int32)
        self._buffer[: self.num_prompt] = prompt_ids
        self._length = self.num_prompt + len(emitted)
        self._buffer[self.num_prompt : self._length] = emitted
        self.state = RequestState.WAITING
        self.slot: int | None = None
        self.num_computed = 0  # tokens whose KV is in the slot
        self.scope: str | None = None  # whose KV it may reuse, and who its own; set at admission, None: nobody
        self.arrival = 0  # order of arrival, set by the scheduler
        self.queued_s = self.waited_s = 0.0  # the scheduler's clock when it began to wait for a slot, and its waits before that
        self.finish_reason: FinishReason | None = None
        self.stats = SpecStats()
        self.grammar: Grammar | None = None  # the state of ``params.grammar``, set where the request is computed
        self.arrived_s = 0.0  # the engine's clock when it took the request
        self.admitted_s: float | None = None  # the engine's clock at the first step, and at the first token
        self.first_token_s: float | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing is ever drafted for it: no drafter hears of it, is taught by it, or keeps its output."""
        return self.max_draft_tokens == 0

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

    def take_prompt_scores(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the prompt, once its whole is computed; they are not asked for any more."""
        assert len(self.prompt_scores) == self.num_prompt - 1, (len(self.prompt_scores), self.num_prompt)
        scores = tuple(self.prompt_scores)
        self.prompt_logprobs, self.prompt_scores = None, []
        return scores

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends emitted tokens; the caller keeps within ``remaining``."""
        assert len(token_ids) <= self.remaining, (len(token_ids), self.remaining)
        self._buffer[self._length : self._length + len(token_ids)] = token_ids
        self._length += len(token_ids)
