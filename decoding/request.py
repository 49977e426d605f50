"""A generation request, from its prompt to its last token.

What it asks for (``decoding.sampling_params``), what a step gives it (``decoding.step_output``), and the keys of what is
remembered of it (``decoding.sources.text_keys``) are imported from here, too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from decoding.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_CHARS, SamplingParams
from decoding.sources.text_keys import request_hash, request_of, text_key
from decoding.step_output import Acceptance, FinishReason, SpecStats, StepOutput, StepReport, TokenLogprob
from decoding.tree import Int32Array
from decoding.verify.grammar import Grammar

__all__ = [
    "CLEARED_TOKENS", "MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_STOP_CHARS", "PLAIN", "PUBLIC", "Acceptance", "FinishReason",
    "Request", "RequestState", "SamplingParams", "SpecStats", "StepOutput", "StepReport", "TokenLogprob", "memory_name",
    "request_hash", "request_of", "tenant_of", "text_key",
]  # fmt: skip

PUBLIC = "*"  # the tenant whose texts all tenants draft from
PLAIN = "autoregressive"  # the strategy of plain decoding, which every request may ask for
CLEARED_TOKENS = 16  # that end a quarantine: what an engine had not told of when it ended is of a step or two


def memory_name(tenant: str | None, adapter: str | None) -> str | None:
    """Under which the outputs of a tenant's requests are remembered: what an adapter says is not what the model says.

    Example: ``acme``, and ``acme:sql`` for its adapter ``sql``; None for no tenant. Names of tenants have no colon.
    """
    return tenant if tenant is None or adapter is None else f"{tenant}:{adapter}"


def tenant_of(memory: str) -> str:
    """Whose memory it is: see ``memory_name``."""
    return memory.partition(":")[0]


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One generation. The only mutable core type; only the engine changes it.

    The committed sequence is prompt and output. The last committed token is the *root*: emitted, but its KV is not cached yet, so
    ``num_computed <= len(tokens) - 1`` between steps.

    Args:
        request_id: unique among live requests.
        prompt_ids: [n] token ids, at least one.
        params: how to choose tokens, when to end.
        references: token sequences to draft from besides the prompt (documents, earlier turns).
        priority: lower runs first, as in vLLM; any but 0 needs ``engine.scheduling_policy`` priority.
        account: whose share of slots and rows it takes, and by what weight accounts share them.
        weight: of the account, above 0.
        tenant: whose outputs to draft from, and to add this one to. None is a private request: it drafts from no other
            request's output, and none drafts from its.
        public: may draft from the public corpus.
        adapter: of the model, whose output is wanted; None for the model's own. Outputs, KV and what is learned of drafts are
            kept apart by tenant and adapter (``memory``).
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
        embedding: of the client's, as ``decoding.sources.embeddings.signs_of`` gives it: past requests are found by it, too.
        quarantined: an engine ended, or a step failed, while it was computed: it is computed alone until it has emitted
            ``CLEARED_TOKENS`` more.

    Raises:
        ValueError: the prompt is empty, ``emitted`` leaves no room for one more token, or ``max_draft_tokens`` is negative.

    Example: ``Request("a", [5, 6], SamplingParams(max_tokens=3), emitted=[7])`` holds the tokens ``5 6 7``, of which one is
    output, and may emit two more.
    """

    __slots__ = (
        "_buffer", "_length", "account", "adapter", "admitted_s", "argmax", "arrival", "arrived_s", "embedding", "fault",
        "fault_field", "finish_reason", "first_token_s", "grammar", "max_draft_tokens", "memory", "num_computed", "num_given",
        "num_prompt", "params", "priority", "prompt_logprobs", "prompt_scores", "public", "quarantined", "queued_s", "reach",
        "references", "report", "request_id", "scope", "siblings", "slot", "state", "stats", "strategy", "tenant", "text",
        "waited_s", "weight",
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
        self.adapter, self.memory = adapter, memory_name(tenant, adapter)
        self.quarantined, self.embedding = quarantined, embedding
        self.argmax = params.greedy and not params.alters_logits  # every token is that of the highest of the model's own logits
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
        self.reach = 0  # length of text by which its rows are rotated at least, set with ``scope``; 0: by their positions alone
        self.arrival = 0  # order of arrival, set by the scheduler
        self.queued_s = self.waited_s = 0.0  # the scheduler's clock when it began to wait for a slot, and its waits before that
        self.finish_reason: FinishReason | None = None
        self.fault: str | None = None  # why it cannot go on: the engine ends it, and no other, with this error
        self.fault_field: str | None = None  # set with fault: see ``StepOutput.fault_field``
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
        return len(self._buffer) - self._length

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
        end = self._length + len(token_ids)
        assert end <= len(self._buffer), (len(token_ids), self.remaining)
        self._buffer[self._length : end] = token_ids
        self._length = end
        if self.quarantined and self.num_output - self.num_given >= CLEARED_TOKENS:
            self.quarantined = False


def _check(
    prompt_ids: Sequence[int] | Int32Array,
    params: SamplingParams,
    emitted: Sequence[int] | Int32Array,
    max_draft_tokens: int | None,
) -> None:
    """Raises what ``Request`` says."""
    if len(prompt_ids) == 0:
        raise ValueError("prompt must hold at least one token")
    if len(emitted) >= params.max_tokens:
        raise ValueError(f"emitted must leave room for a token: {len(emitted)} of max_tokens={params.max_tokens} are there")
    if max_draft_tokens is not None and max_draft_tokens < 0:
        raise ValueError(f"max_draft_tokens must be 0 (plain decoding) or more, got {max_draft_tokens}")
