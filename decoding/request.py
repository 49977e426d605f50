"""Generation request, from its prompt to its last token: sampling parameters, state and outputs."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.sources.text_keys import text_key
from outrider.decoding.tree import ChoiceTree
from outrider.decoding.verify.grammar import Grammar

PUBLIC = "*"  # tenant whose texts all tenants may draft from
PLAIN = "autoregressive"  # name of plain decoding, which every request may choose
QUARANTINE_TOKENS = 16  # tokens that end a quarantine: tokens not yet reported when an engine ended are of one or two steps
MAX_LOGPROBS = 20  # as OpenAI and vLLM
MAX_LOGIT_BIAS = 100.0  # as OpenAI
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1000  # each string is searched for in every token's text and held back while incomplete
_GREEDY_BELOW = 1e-5  # as vLLM: logits divided by less could overflow
# Inclusive bounds. OpenAI's for its parameters. vLLM only requires repetition_penalty > 0; these bounds keep every product with a
# logit finite.
_BOUNDS = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of the reasoning at the beginning of an output: after so many tokens, the closing tag is the only choice."""

    tokens: int
    opening: tuple[int, ...]  # token ids of the tags
    closing: tuple[int, ...]
    is_open: bool  # whether the prompt opens the reasoning; otherwise the output does, unless it has none

    def forced(self, output_ids: Sequence[int]) -> int | None:
        """Return the only next token after an output; None if it is free."""
        begin = 0 if self.is_open else _end_of(self.opening, output_ids[: len(self.opening) + _BEFORE_OPENING])
        length = len(output_ids) - (begin or 0) - self.tokens  # tokens after the budget was used up
        if begin is None or not 0 <= length < len(self.closing):
            return None
        thought = output_ids[begin : begin + self.tokens]
        # The model may have begun the tag itself when the budget was used up.
        begun = next(n for n in range(len(self.closing), -1, -1) if n == 0 or tuple(thought[-n:]) == self.closing[:n])
        if length >= len(self.closing) - begun or _end_of(self.closing, thought) is not None:
            return None
        return self.closing[begun + length]


_BEFORE_OPENING = 4  # tokens that may stand before the opening tag, such as white space


def _end_of(part: tuple[int, ...], tokens: Sequence[int]) -> int | None:
    """Return the end of the first occurrence of ``part`` in ``tokens``; None if there is none."""
    size = len(part)
    return next((at + size for at in range(len(tokens) - size + 1) if tuple(tokens[at : at + size]) == part), None)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop parameters. Values outside their range raise ``ValueError`` naming the field."""

    max_tokens: int = 256
    temperature: float = 0.0  # below 1e-5: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text; they are not part of it unless include_stop
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the text
    include_stop: bool = False  # the matched stop string or stop token is part of the text
    skip_special_tokens: bool = True  # leave the tokenizer's special tokens out of the text
    min_p: float = 0.0  # tokens less likely than this share of the most likely one are excluded; 0: none
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones; 1: off
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output
    frequency_penalty: float = 0.0  # subtracted once for every occurrence of the token in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of (token id, value added to its logit)
    logprobs: int | None = None  # alternatives reported with each token's log-probability; None: no log-probabilities
    min_tokens: int = 0  # end tokens are banned before this many tokens; stop strings still end the text
    grammar: str | None = None  # grammar of the output, see engine.text.grammar; None: any text
    grammar_field: str = "response_format"  # field of the client's request that grammar errors name
    allowed_token_ids: tuple[int, ...] = ()  # all other tokens are excluded; empty: none is
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output does not contain, if there is another choice
    logprob_token_ids: tuple[int, ...] = ()  # with logprobs: these tokens are the alternatives
    thinking: ThinkingBudget | None = None  # limit of the reasoning

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
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for size in map(len, self.stop):
            if not 0 < size <= MAX_STOP_CHARS:
                raise ValueError(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, got one of {size}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 and {MAX_LOGPROBS}, or None for none, got {self.logprobs}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos must be false with a grammar: the grammar determines where the text may end")
        if self.allowed_token_ids and self.grammar is not None:
            raise ValueError("allowed_token_ids must be empty with a grammar")
        if not all(self.bad_words):
            raise ValueError("bad_words must hold sequences of at least one token")
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
        """Return whether every token is the argmax of the logits after bias and penalties."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Return whether a token's logit depends on how often the sequence holds the token."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def alters_logits(self) -> bool:
        """Return whether a greedy token may differ from the argmax of the model's own logits."""
        bound = self.grammar is not None or bool(self.allowed_token_ids) or bool(self.bad_words) or self.thinking is not None
        return bound or self.penalized or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def truncates(self) -> bool:
        """Return whether sampling excludes some of the tokens."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0


class FinishReason(enum.StrEnum):
    """Reason why a request ended, in OpenAI's words; ``abort`` and ``error`` are Outrider's own."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class SpecStats:
    """Counters of one request. ``steps`` counts forwards that emitted tokens, including the one that ends the prefill."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    acceptance_histogram: list[int] = field(default_factory=list)  # steps with drafts, by the number of accepted tokens
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was cached
    prefill_s: float = 0.0  # from admission to the first token
    decode_s: float = 0.0  # from the first token to the last
    propose_s: float = 0.0
    forward_s: float = 0.0  # each request counts its whole steps, although steps are shared
    energy_j: float | None = None  # its share of the devices' energy in its steps; None if not measured
    wanted_rows: int = 0  # rows that the strategy's options ask for in a step, if fewer were allowed in some step; else 0
    cut_reason: str = ""  # why there were fewer, in words
    refused_by_penalty: int | None = None  # steps that refused a draft only because of a penalty; None if not counted

    def cut(self, strategy: str) -> str | None:
        """Return in one line that drafts were smaller than the strategy's options ask for, and why; None if they were not.

        Example: ``jacobi: 119 rows a step wanted, 3.8 drafted: more do not pay on this device; as_published drafts all``.
        """
        if not self.wanted_rows or not self.steps:
            return None
        return f"{strategy}: {self.wanted_rows} rows a step wanted, {self.drafted / self.steps:.1f} drafted: {self.cut_reason}"

    def tokens_per_step(self, emitted: int) -> float:
        """Return emitted tokens per target forward; 0.0 before the first."""
        return emitted / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token before bias, penalties, temperature and truncation (vLLM's ``raw_logprobs``), natural log."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the likeliest tokens, in descending order, ties by token id
    rank: int | None = None  # rank among all tokens, 1 is the likeliest; set for prompt tokens only


@dataclass(frozen=True, slots=True)
class StepReport:
    """Drafter of each token that a step emitted, for requests with ``report`` (see ``decoding.budget.attribution``)."""

    pieces: tuple[str, ...]  # parts of the output's ``text``, one per token; "" for an incomplete character
    sources: tuple[str, ...]  # one per token: ``model`` for the target's own, else the draft source
    drafted: int  # verified rows, accepted ones included

    @property
    def accepted(self) -> int:
        """Return the number of drafted tokens that were emitted."""
        return sum(source != "model" for source in self.sources)


@dataclass(slots=True)  # not frozen: frozen instances are slower to create, and every request gets one per step
class StepOutput:
    """Output of one step for one request. ``text`` excludes incomplete characters and possible beginnings of stop strings."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR
    stats: SpecStats | None = None  # set with the finish reason
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if requested
    report: StepReport | None = None  # if requested
    # If requested, in the first output with tokens: one for each prompt token from the second on.
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    scores: tuple[tuple[float, ...], ...] | None = None  # of a request's choices: the log-probability of each token
    fault_field: str | None = None  # set with error: the faulty field of the request; None: a step failed
    alone: bool | None = None  # set without tokens: whether the next step runs this quarantined request alone


def merge_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    """Merge consecutive outputs of a choice into one; without outputs, return one without tokens."""
    if not outputs:
        return StepOutput("", (), "")
    if len(outputs) == 1:
        return outputs[0]
    changes: dict[str, Any] = {}
    for part in dataclasses.fields(StepOutput):
        values = [value for output in outputs if (value := getattr(output, part.name)) is not None]
        if part.name == "text":
            changes["text"] = "".join(values)
        elif values and isinstance(values[0], tuple):  # token ids, log-probabilities: concatenated
            changes[part.name] = tuple(item for value in values for item in value)
        elif values:
            changes[part.name] = values[-1]
    return StepOutput(**changes)


@dataclass(frozen=True, slots=True)
class BudgetCounts:
    """Decisions of a draft budget since its start."""

    asked: int = 0  # times that a request was considered for drafting
    offered: int = 0  # candidate rows that were likely enough to be considered
    granted: int = 0  # offered rows that were drafted
    least_chance: float = 0.0  # lowest acceptance probability at which a row paid off in the latest step


def cache_namespace_of(tenant: str | None, adapter: str | None) -> str | None:
    """Return the namespace of a tenant's outputs, apart by adapter: ``acme``, or ``acme:sql``; None for no tenant."""
    return tenant if tenant is None or adapter is None else f"{tenant}:{adapter}"


def kv_namespace_of(tenant: str | None, adapter: str | None, salt: str) -> str | None:
    """Return the namespace of the KV that a request shares: that of its outputs, apart by salt; None for no tenant."""
    namespace = cache_namespace_of(tenant, adapter)
    return f"{namespace}\0{salt}" if salt and namespace is not None else namespace


def tenant_of(memory: str) -> str:
    """Return the tenant of a namespace made by ``cache_namespace_of``."""
    return memory.partition(":")[0]


def log_label(http_id: str, request_id: str) -> str:
    """Return ``[HTTP_ID] request REQUEST_ID``, the name of a request in log lines; without the first part if it is empty."""
    return f"[{http_id}] request {request_id}" if http_id else f"request {request_id}"


class RequestState(enum.Enum):
    """Scheduling state of a request."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One generation: the only mutable core type, changed by the engine only.

    The committed sequence is prompt and output. The last committed token is the *root*: it is emitted, but its KV is not cached
    yet, so ``num_computed <= len(tokens) - 1`` between steps.

    Args:
        request_id: unique among live requests.
        prompt_ids: [n] token ids, at least one.
        references: token sequences to draft from besides the prompt (documents, earlier turns).
        priority: lower runs first, as in vLLM. Values other than 0 require ``engine.scheduling_policy`` priority.
        account: account that is charged for the slots and rows of the request.
        weight: weight of the account in fair sharing, above 0.
        tenant: the request drafts from outputs of this tenant and adds its own. None is a private request: it drafts from no
            other request's output, and no other request drafts from its output.
        public: may draft from the public corpus.
        adapter: adapter of the model to use; None for the model itself.
        emitted: output tokens that an earlier engine emitted before it was lost. They are committed at once and count as output.
            The output continues as it would have there.
        strategy: drafting strategy, one of the engine's; None for the engine's default. ``autoregressive`` is plain decoding,
            which every engine supports.
        max_draft_tokens: maximum drafted rows per step and rank; the engine's own limit applies as well. 0 is plain decoding,
            whatever the strategy.
        as_published: draft all rows that the strategy's options ask for, not only as many as pay off on the device; None: as the
            engine does by default.
        siblings: other choices of the same prompt run beside it, with ids ``NAME/INDEX`` of the same NAME. They compute the
            prompt once, even if the request is private.
        report: report which drafter proposed each token (``StepOutput.report``).
        prompt_logprobs: number of alternatives reported with each prompt token's log-probability
            (``StepOutput.prompt_logprobs``); None for none. The whole prompt is computed then, without reuse of cached KV.
            Ignored with ``emitted``, since they were reported before.
        embedding: the client's embedding as sign bits (``decoding.sources.embeddings.signs_of``).
        salt: KV is shared only with requests of the same tenant and salt; texts of other requests are not used for drafts, and
            the output is not kept for them. Empty for none.
        choices: token sequences to score as continuations of the prompt, of 1 to ``max_tokens`` tokens each. They are branches of
            one tree, and the request ends with their log-probabilities (``StepOutput.scores``) instead of output.
        quarantined: the request was running when an engine ended or a step failed. It is computed alone until it has emitted
            ``QUARANTINE_TOKENS`` more tokens.
        http_id: id of the HTTP request (``X-Request-Id``), for log lines; empty if unknown.

    Raises:
        ValueError: the prompt is empty, ``emitted`` leaves no room for one more token, ``max_draft_tokens`` is negative, or
            a choice is empty or longer than ``max_tokens``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | Int32Array,
        params: SamplingParams,
        references: Sequence[Sequence[int] | Int32Array] = (),
        priority: int = 0,
        *,
        account: str = "",
        weight: float = 1.0,
        tenant: str | None = None,
        public: bool = True,
        adapter: str | None = None,
        emitted: Sequence[int] | Int32Array = (),
        strategy: str | None = None,
        max_draft_tokens: int | None = None,
        as_published: bool | None = None,
        siblings: bool = False,
        report: bool = False,
        prompt_logprobs: int | None = None,
        embedding: Int32Array | None = None,
        salt: str = "",
        choices: Sequence[Sequence[int]] = (),
        quarantined: bool = False,
        http_id: str = "",
    ) -> None:
        _check(prompt_ids, params, emitted, max_draft_tokens)
        if not all(0 < len(choice) <= params.max_tokens for choice in choices):
            raise ValueError(f"choices must have 1 to max_tokens={params.max_tokens} tokens each")
        self.choices = ChoiceTree.of(int(prompt_ids[-1]), choices) if choices else None
        self.request_id, self.http_id, self.params, self.priority = request_id, http_id, params, priority
        self.account, self.weight = account, weight
        self.strategy, self.as_published = strategy, as_published
        self.max_draft_tokens = 0 if strategy == PLAIN or choices else max_draft_tokens
        self.tenant, self.public, self.siblings, self.report = tenant, public, siblings, report
        self.adapter, self.cache_namespace = adapter, None if salt else cache_namespace_of(tenant, adapter)
        self.kv_namespace = kv_namespace_of(tenant, adapter, salt)
        self.quarantined, self.embedding = quarantined, embedding
        self.argmax = params.greedy and not params.alters_logits  # every token is the argmax of the unmodified logits
        self.prompt_logprobs = None if len(emitted) else prompt_logprobs
        self.prompt_scores: list[TokenLogprob] = []  # log-probabilities of prompt tokens, from the second on
        self.text = text_key(request_id)  # key of its output in histories
        self.references: tuple[Int32Array, ...] = tuple(np.asarray(r, np.int32) for r in references if len(r))
        self.num_prompt, self.num_given = len(prompt_ids), len(emitted)  # num_given: tokens that an earlier engine emitted
        # Allocated once for prompt and longest output, so that ``tokens`` and ``output_ids`` are views.
        self._buffer = np.empty(self.num_prompt + params.max_tokens, np.int32)
        self._buffer[: self.num_prompt] = prompt_ids
        self._length = self.num_prompt + len(emitted)
        self._buffer[self.num_prompt : self._length] = emitted
        self.state = RequestState.WAITING
        self.slot: int | None = None
        self.num_computed = 0  # tokens whose KV is in the slot
        self.scope: str | None = None  # scope of prefix KV sharing, set at admission; None: not shared
        self.rope_length = 0  # minimum sequence length for length-dependent RoPE, set with ``scope``; 0: none
        self.arrival = 0  # order of arrival, set by the scheduler
        self.queued_s = self.waited_s = 0.0  # scheduler clock when it was queued for a slot; total of its earlier waits
        self.finish_reason: FinishReason | None = None
        self.fault: str | None = None  # error that ends this request only
        self.fault_field: str | None = None  # set with fault: see ``StepOutput.fault_field``
        self.stats = SpecStats()
        self.grammar: Grammar | None = None  # state of ``params.grammar``, set by the process that computes the request
        self.arrived_s = 0.0  # engine clock at arrival
        self.admitted_s: float | None = None  # engine clock at the first step; ``first_token_s``: at the first token
        self.first_token_s: float | None = None

    @property
    def label(self) -> str:
        """Return the name of the request in log lines; see ``log_label``."""
        return log_label(self.http_id, self.request_id)

    @property
    def plain(self) -> bool:
        """Return whether nothing is ever drafted for the request. No drafter observes it or keeps its output."""
        return self.max_draft_tokens == 0

    @property
    def tokens(self) -> Int32Array:
        """Return an [n] int32 view of the committed sequence. Do not write to it."""
        return self._buffer[: self._length]

    @property
    def output_ids(self) -> Int32Array:
        """Return an [m] int32 view of the tokens emitted so far."""
        return self._buffer[self.num_prompt : self._length]

    @property
    def prompt_ids(self) -> Int32Array:
        """Return a [num_prompt] int32 view of the prompt."""
        return self._buffer[: self.num_prompt]

    @property
    def num_tokens(self) -> int:
        """Return the length of the committed sequence."""
        return self._length

    @property
    def num_output(self) -> int:
        """Return the number of tokens emitted so far."""
        return self._length - self.num_prompt

    @property
    def remaining(self) -> int:
        """Return the number of tokens that may still be emitted."""
        return len(self._buffer) - self._length

    @property
    def root(self) -> int:
        """Return the last committed token."""
        return int(self._buffer[self._length - 1])

    def take_prompt_scores(self) -> tuple[TokenLogprob, ...]:
        """Return the prompt's log-probabilities, once all of it is computed, and stop collecting them."""
        assert len(self.prompt_scores) == self.num_prompt - 1, (len(self.prompt_scores), self.num_prompt)
        scores = tuple(self.prompt_scores)
        self.prompt_logprobs, self.prompt_scores = None, []
        return scores

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens, at most ``remaining``."""
        end = self._length + len(token_ids)
        assert end <= len(self._buffer), (len(token_ids), self.remaining)
        self._buffer[self._length : end] = token_ids
        self._length = end
        if self.quarantined and self.num_output - self.num_given >= QUARANTINE_TOKENS:
            self.quarantined = False


def _check(
    prompt_ids: Sequence[int] | Int32Array,
    params: SamplingParams,
    emitted: Sequence[int] | Int32Array,
    max_draft_tokens: int | None,
) -> None:
    if len(prompt_ids) == 0:
        raise ValueError("prompt must hold at least one token")
    if len(emitted) >= params.max_tokens:
        raise ValueError(f"emitted must hold fewer tokens than max_tokens={params.max_tokens}, got {len(emitted)}")
    if max_draft_tokens is not None and max_draft_tokens < 0:
        raise ValueError(f"max_draft_tokens must be 0 (plain decoding) or more, got {max_draft_tokens}")
