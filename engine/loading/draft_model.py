"""Small model in this process that drafts for the target, with KV slots separate from the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from outrider.configs.slices import SELF, Dtype, ModelOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import DummySequence, ScheduledDummy, pack
from outrider.engine.forward.rope import length_rope
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.kv.prefix_cache import common_prefix
from outrider.engine.loading.hybrids import refuse_role
from outrider.engine.loading.model import LoadedModel, load_config, load_model


class _Slot:
    """Tokens of one request whose KV the draft model has in a slot."""

    def __init__(self, capacity: int) -> None:
        self.request: Request | None = None
        self.tokens = np.empty(capacity, np.int32)
        self.length = 0  # computed entries: the first ones of ``tokens``
        self._agreed = 0  # number of the request's tokens, which never change, at the start of ``tokens``

    def begin(self, request: Request, computed: int) -> None:
        """Start another request, of which ``computed`` tokens have their KV in the slot."""
        self.request, self.length, self._agreed = request, computed, computed
        self.tokens[:computed] = request.tokens[:computed]

    def align(self, chain: Sequence[int], known: int) -> int:
        """Set ``tokens`` to the request's and the chain's, and cut ``length`` at the first change; return the total length."""
        assert self.request is not None
        committed = self.request.tokens
        # Ids from ``known``, the size of the draft model's vocabulary, are replaced by the last one.
        self._follow(self._agreed, np.minimum(committed[self._agreed :], known - 1))
        self._agreed = len(committed)
        if chain:
            self._follow(len(committed), np.minimum(np.array(chain, np.int32), known - 1))
        return len(committed) + len(chain)

    def hold(self, span: ScheduledDummy) -> None:
        """Record the entries of a forward: up to its end, and the tree's rows as far as each continues the row before it."""
        self.length = span.end
        if span.tree is not None and len(span.tree) > 1:
            forks = np.flatnonzero(np.diff(span.tree.parents) != 1)
            chain = span.tree.tokens[1 : int(forks[0]) + 1 if len(forks) else None]
            self.tokens[span.end : span.end + len(chain)] = chain
            self.length += len(chain)

    def _follow(self, at: int, tokens: Int32Array) -> None:
        """Overwrite ``tokens`` at a position, and cut ``length`` at the first difference."""
        end = at + len(tokens)
        # A KV entry is valid if the tokens up to it are those it was computed from; comparing tokens detects rejected drafts,
        # preemption and reused slots.
        if self.length > at:
            same = common_prefix(self.tokens[at : min(self.length, end)], tokens)
            if at + same < min(self.length, end):
                self.length = at + same
        self.tokens[at:end] = tokens


class LocalDraftModel:
    """Draft model (``decoding.drafters.base.DraftModel``) with the target's slot numbers; requests of one scope share KV."""

    def __init__(
        self, runner: ModelRunner, vocab_size: int, max_model_len: int, step_tokens: int, token_ids: torch.Tensor | None = None
    ) -> None:
        """Create a draft model over a runner with a slot for each of the target's, and the size of the target's vocabulary.

        ``token_ids`` are those of the runner's logits, [logits]; when absent they are of the first tokens.
        """
        # A sequence has at most ``max_model_len`` tokens, which both models can hold, and a forward at most ``step_tokens`` rows.
        self.runner, self.vocab_size, self.max_model_len = runner, vocab_size, max_model_len
        self._cache, self._step_tokens, self._token_ids = runner.cache, step_tokens, token_ids
        self._known = int(runner.model.config.get_text_config().vocab_size)
        self._slots = [_Slot(self._cache.capacity) for _ in range(self._cache.slots)]

    def catch_up(self, requests: Sequence[Request]) -> list[bool]:
        """Compute missing tokens, for requests with the fewest first; remaining rows go to others in order. See ``DraftModel``.

        Example: with 512 rows a step, requests that lack 2, 1 and 900 tokens: the first two can be drafted for, and of the third
        509 tokens are computed.
        """
        fits = [request.num_tokens < self.max_model_len for request in requests]
        lacks = [self._lacking(request) if fit else 0 for request, fit in zip(requests, fits, strict=True)]
        ready, budget = [False] * len(requests), self._step_tokens
        for at in sorted((at for at, fit in enumerate(fits) if fit), key=lacks.__getitem__):
            if lacks[at] > budget:
                break
            ready[at] = True
            budget -= lacks[at]
        spans = []
        for at, request in enumerate(requests):
            if fits[at] and not ready[at] and budget:
                slot = self._slot(request)
                rows = min(budget, request.num_tokens - 1 - slot.length)
                budget -= rows
                end = slot.length + rows
                if rows:
                    spans.append(ScheduledDummy(DummySequence(_number(request), slot.tokens[:end]), slot.length, end, None))
        if spans:
            self._forward(spans)
        return ready

    def next_logits(self, requests: Sequence[Request], chains: Sequence[Sequence[int]]) -> torch.Tensor:
        """See ``DraftModel``."""
        return self._forward([self._span(request, chain) for request, chain in zip(requests, chains, strict=True)])

    def tree_logits(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """See ``DraftModel``."""
        logits = self._forward([self._span(request, (), tree) for request, tree in zip(requests, trees, strict=True)])
        return list(logits.split([len(tree) for tree in trees]))

    def _span(self, request: Request, chain: Sequence[int], tree: DraftTree | None = None) -> ScheduledDummy:
        """Return the work for a request's missing tokens and a chain after them, with a tree or only its root."""
        slot = self._slot(request)
        end = slot.align(chain, self._known)
        if tree is None:
            known = DraftTree.chain(int(slot.tokens[end - 1]), ())
        else:
            known = replace(tree, tokens=np.minimum(tree.tokens, self._known - 1))
        return ScheduledDummy(DummySequence(_number(request), slot.tokens[:end]), min(slot.length, end - 1), end, known)

    def _lacking(self, request: Request) -> int:
        """Return the rows of a request's next forward: its missing tokens, at least the last one."""
        slot = self._slot(request)
        slot.align((), self._known)
        computed = min(slot.length, request.num_tokens - 1)
        self._cache.prefixes.keep(_number(request), request.scope, request.tokens[:computed])
        return request.num_tokens - computed

    def _slot(self, request: Request) -> _Slot:
        """Return the slot of a request. A reused slot takes over KV of other requests of the scope."""
        number = _number(request)
        slot = self._slots[number]
        if slot.request is not request:
            slot.begin(request, self._cache.place(request.tokens, request.scope, (number,))[1])
        return slot

    def _forward(self, spans: Sequence[ScheduledDummy]) -> torch.Tensor:
        """Compute spans; return logits over the target's vocabulary, -inf for tokens that the draft model lacks."""
        for span in spans:
            assert span.end + (0 if span.tree is None else len(span.tree) - 1) <= self._cache.capacity, (span.end, span.tree)
        logits = self.runner.forward(pack(spans))
        for span in spans:
            self._slots[span.request.slot].hold(span)
        if self._token_ids is not None:
            return logits.new_full((len(logits), self.vocab_size), float("-inf")).index_copy_(1, self._token_ids, logits)
        if self._known < self.vocab_size:
            return torch.nn.functional.pad(logits, (0, self.vocab_size - self._known), value=float("-inf"))
        return logits[:, : self.vocab_size]


def _number(request: Request) -> int:
    assert request.slot is not None, request.request_id
    return request.slot


def load_draft_model(
    path: str, options: ModelOptions, target: LoadedModel, slots: int, step_tokens: int, draft_rows: int
) -> LocalDraftModel:
    """Load a draft model with the type, the device and the number of slots of its target.

    Args:
        path: folder or name on the hub, or a key of ``SELF``.
        options: of the target.
        step_tokens: most rows of one forward.
        draft_rows: rows that a slot must hold after a request's tokens.

    Raises:
        ModelLoadError: it cannot be used, or its tokens are not the target's.
    """
    dtype = cast(Dtype, str(target.model.dtype).removeprefix("torch."))
    weights = SELF.get(path)
    own = replace(
        options, path=path if weights is None else options.path, served_name=None, dtype=dtype, device=str(target.model.device),
        max_model_len=None, weights=weights or "auto", adapters={},
    )  # fmt: skip
    refuse_role(
        load_config(own.path), f"speculation.draft_model {path!r}", "choose a draft model without such layers, or leave it out"
    )
    loaded = load_model(own)
    vocab_size = int(target.model.config.get_text_config().vocab_size)
    token_ids = cut_head(loaded.model, path, vocab_size)
    most = min(vocab_size, int(loaded.model.config.get_text_config().vocab_size))
    check_vocabularies(options.path, target.tokenizer, path, loaded.tokenizer, most)
    rope = length_rope(loaded.model.config)  # drafts use constant frequencies, which are poor beyond the border
    max_model_len = min(target.max_model_len, loaded.max_model_len if rope is None else rope.border)
    runner = ModelRunner(loaded.model, slots, max_model_len + draft_rows)
    return LocalDraftModel(runner, vocab_size, max_model_len, step_tokens, token_ids)


def cut_head(model: PreTrainedModel, path: str, vocab_size: int) -> torch.Tensor | None:
    """Keep the rows of the output layer for the configuration's ``draft_token_ids``, if it has any, and return the ids.

    A short list of frequent tokens makes a draft model's step cheaper (Zhao et al., 2025, arXiv 2502.14856).

    Raises:
        ModelLoadError: the ids are unusable.
    """
    ids, head = getattr(model.config.get_text_config(), "draft_token_ids", None), model.get_output_embeddings()
    if ids is None:
        return None
    tokens = min(len(head.weight), vocab_size)
    usable = isinstance(ids, list) and all(isinstance(one, int) and 0 <= one < tokens for one in ids)
    if not usable or not ids or len(set(ids)) < len(ids):
        raise ModelLoadError(
            f"speculation.draft_model {path!r}: draft_token_ids of its config.json must be different ids from 0 to {tokens - 1}"
        )
    kept = torch.tensor(ids, device=head.weight.device)
    small = torch.nn.Linear(head.in_features, len(ids), bias=False, device="meta")
    small.weight = torch.nn.Parameter(head.weight[kept].detach(), requires_grad=False)
    model.set_output_embeddings(small)
    return kept


def check_vocabularies(
    target_name: str, target: PreTrainedTokenizerFast, draft_name: str, draft: PreTrainedTokenizerFast, most: int
) -> None:
    """Raise ``ModelLoadError`` unless the known ids below ``most``, which both models can emit, are the same tokens in both."""
    ours = {number: token for token, number in target.get_vocab().items() if number < most}
    theirs = {number: token for token, number in draft.get_vocab().items() if number < most}
    differing = [number for number, token in ours.items() if theirs.get(number, token) != token]
    if differing or not ours.keys() & theirs.keys():
        first = min(differing, default=0)
        raise ModelLoadError(
            f"speculation.draft_model {draft_name!r} and {target_name!r} have different vocabularies: token {first} is "
            f"{theirs.get(first)!r} and {ours.get(first)!r}; choose a draft model with the target model's tokenizer"
        )
