"""Generation request, from its prompt to its last token.

Re-exports the sampling parameters (``decoding.sampling_params``), step outputs (``decoding.step_output``) and text keys
(``decoding.sources.text_keys``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from outrider.decoding.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_CHARS, SamplingParams
from outrider.decoding.sources.text_keys import request_hash, request_of, text_key
from outrider.decoding.step_output import Acceptance, FinishReason, SpecStats, StepOutput, StepReport, TokenLogprob
from outrider.decoding.tree import Int32Array
from outrider.decoding.verify.grammar import Grammar

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_CHARS",
    "PLAIN",
    "PUBLIC",
    "QUARANTINE_TOKENS",
    "Acceptance",
    "FinishReason",
    "Request",
    "RequestState",
    "SamplingParams",
    "SpecStats",
    "StepOutput",
    "StepReport",
    "TokenLogprob",
    "cache_namespace_of",
    "request_hash",
    "request_of",
    "tenant_of",
    "text_key",
]  # fmt: skip

PUBLIC = "*"  # tenant whose texts all tenants may draft from
PLAIN = "autoregressive"  # name of plain decoding, which every request may choose
QUARANTINE_TOKENS = 16  # tokens that end a quarantine: tokens not yet reported when an engine ended are of one or two steps


def cache_namespace_of(tenant: str | None, adapter: str | None) -> str | None:
    """Return the namespace in which a tenant's outputs are kept. Outputs of an adapter are kept apart from the model's own.

    Example: ``acme``, and ``acme:sql`` for its adapter ``sql``; None for no tenant. Names of tenants have no colon.
    """
    return tenant if tenant is None or adapter is None else f"{tenant}:{adapter}"


def tenant_of(memory: str) -> str:
    """Return the tenant of a namespace made by ``cache_namespace_of``."""
    return memory.partition(":")[0]


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
        adapter: adapter of the model to use; None for the model itself. Outputs, KV and draft statistics are kept apart by tenant
            and adapter (``memory``).
        emitted: output tokens that an earlier engine emitted before it was lost. They are committed at once and count as output.
            Token choices depend on seed and position only, so the output continues as it would have there.
        strategy: drafting strategy, one of the engine's; None for the engine's default. ``autoregressive`` is plain decoding,
            which every engine supports.
        max_draft_tokens: maximum drafted rows per step and rank; the engine's own limit applies as well. 0 is plain decoding,
            whatever the strategy.
        siblings: other choices of the same prompt run beside it, with ids ``NAME/INDEX`` of the same NAME. They compute the
            prompt once, even if the request is private.
        report: report which drafter proposed each token (``StepOutput.report``).
        prompt_logprobs: number of alternatives reported with each prompt token's log-probability
            (``StepOutput.prompt_logprobs``); None for none. The whole prompt is computed then, without reuse of cached KV.
            Ignored with ``emitted``, since they were reported before.
        embedding: the client's embedding as sign bits (``decoding.sources.embeddings.signs_of``), used to find similar past
            requests.
        quarantined: the request was running when an engine ended or a step failed. It is computed alone until it has emitted
            ``QUARANTINE_TOKENS`` more tokens.

    Raises:
        ValueError: the prompt is empty, ``emitted`` leaves no room for one more token, or ``max_draft_tokens`` is negative.

    Example: ``Request("a", [5, 6], SamplingParams(max_tokens=3), emitted=[7])`` holds the tokens ``5 6 7``, of which one is
    output, and may emit two more.
    """

    __slots__ = (
        "_buffer",
        "_length",
        "account",
        "adapter",
        "admitted_s",
        "argmax",
        "arrival",
        "arrived_s",
        "cache_namespace",
        "embedding",
        "fault",
        "fault_field",
        "finish_reason",
        "first_token_s",
        "grammar",
        "max_draft_tokens",
        "num_computed",
        "num_given",
        "num_prompt",
        "params",
        "priority",
        "prompt_logprobs",
        "prompt_scores",
        "public",
        "quarantined",
        "queued_s",
        "references",
        "report",
        "request_id",
        "rope_length",
        "scope",
        "siblings",
        "slot",
        "state",
        "stats",
        "strategy",
        "tenant",
        "text",
        "waited_s",
        "weight",
    )  # fmt: skip

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
        siblings: bool = False,
        report: bool = False,
        prompt_logprobs: int | None = None,
        embedding: Int32Array | None = None,
        quarantined: bool = False,
    ) -> None:
        _check(prompt_ids, params, emitted, max_draft_tokens)
        self.request_id, self.params, self.priority = request_id, params, priority
        self.account, self.weight = account, weight
        self.strategy = strategy
        self.max_draft_tokens = 0 if strategy == PLAIN else max_draft_tokens
        self.tenant, self.public, self.siblings, self.report = tenant, public, siblings, report
        self.adapter, self.cache_namespace = adapter, cache_namespace_of(tenant, adapter)
        self.quarantined, self.embedding = quarantined, embedding
        self.argmax = params.greedy and not params.alters_logits  # every token is the argmax of the unmodified logits
        self.prompt_logprobs = None if len(emitted) else prompt_logprobs
        self.prompt_scores: list[TokenLogprob] = []  # log-probabilities of prompt tokens, from the second on
        self.text = text_key(request_id)  # key of its output in histories
        self.references: tuple[Int32Array, ...] = tuple(np.asarray(r, np.int32) for r in references if len(r))
        self.num_prompt, self.num_given = len(prompt_ids), len(emitted)  # num_given: tokens that an earlier engine emitted
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
