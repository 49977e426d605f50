"""Guided runs: the forwards are real, the committed tokens are the known ones (LLMA, arXiv 2304.04487, section 3.2).

This measures the speed of a model on real text without its weights: a random model of its shape follows another model's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.request import Request
from outrider.engine.executor import LocalExecutor, Verifier, VerifyResult
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.bench.options import SIZES

_CERTAIN = 3e4  # logit of a known token: the highest, and finite in float16


def random_model(size: str, vocab_size: int, context: int, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model of ``SIZES`` with seeded random weights, tied embeddings and no end token, for the engine."""
    config = AutoConfig.for_model(**{
        "model_type": "llama", "vocab_size": vocab_size, "max_position_embeddings": context, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES[size],
    })  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=TREE_ATTENTION).eval()


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights, in the same memory, with transformers' own attention."""
    config = type(model.config).from_dict(model.config.to_dict())
    with torch.device(model.device):  # buffers, too: nothing is copied
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    return twin.eval()


class GuidedVerifier(Verifier):
    """Verifier that makes the known token win below each row on the known path; other rows keep the model's output."""

    def __init__(self, known: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._known = known
        self.ranked = True  # whether drafters may rank the target's tokens; else its logits are neither changed nor passed on

    @torch.inference_mode()
    def verify(self, work: ScheduledRequest, target: TargetRows, root: torch.Tensor | None = None) -> VerifyResult:
        """Verify a tree; ``target`` is changed in place, so that drafters learn from the committed tokens."""
        assert work.tree is not None
        greedy, rows, tokens = target.ids, [], []
        reached = [0]
        for token in self._known[work.request.request_id][work.request.num_output :]:
            greedy[reached] = token
            rows += reached
            tokens += [token] * len(reached)
            reached = work.tree.children(reached, token)
            if not reached:
                break
        if not self.ranked:
            return dataclasses.replace(super().verify(work, target), target=TargetRows(greedy, None))
        at = torch.tensor([rows, tokens], device=target.logits.device)
        target.logits[at[0], at[1]] = _CERTAIN
        return super().verify(work, target)


class GuidedExecutor(LocalExecutor):
    """Executor that computes every row and commits the known tokens of greedy requests.

    It raises logits only if a drafter ranks tokens, so that other steps cost as much as a real model's.
    """

    def __init__(self, runner: ModelRunner, known: dict[str, Sequence[int]]) -> None:
        """Follow ``known`` (request id -> output), which engines may share: an output is set before its request is added."""
        super().__init__(runner)
        self.known = known
        self._verifier = self._guided = GuidedVerifier(self.known)

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """See ``Executor``."""
        self._guided.ranked = top_k > 0
        return super().execute(works, top_k)


class KnownExecutor(LocalExecutor):
    """Executor that commits the known tokens of greedy requests and computes nothing: steps are counted, not timed.

    For drafters that do not read the target's rows; those of ``top_k`` need a ``GuidedExecutor``.
    """

    def __init__(self, runner: ModelRunner, known: dict[str, Sequence[int]]) -> None:
        """Follow ``known`` (request id -> output); of the runner, its slots are used."""
        super().__init__(runner)
        self._guided = GuidedVerifier(known)
        self._guided.ranked = False

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """See ``Executor``. No KV is ever reused."""
        return free[0], 0

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """See ``Executor``."""
        assert top_k == 0, "the strategy reads the target's rows"
        unknown = (None if work.tree is None else np.full(len(work.tree), -1, np.int32) for work in works)
        return [
            None if ids is None else self._guided.verify(work, TargetRows(ids, None))
            for work, ids in zip(works, unknown, strict=True)
        ]


@contextmanager
def guided_generate(model: PreTrainedModel, num_prompt: int, known: Sequence[int]) -> Iterator[None]:
    """Make ``generate`` emit a known output after ``num_prompt`` tokens, one prompt at a time.

    This is a forward hook and not a logits processor: transformers' prompt lookup passes its candidates through the processors
    and would cut them where they leave the known output, which only the target knows.
    """

    def raise_known(module: object, args: object, kwargs: dict[str, Any], output: Any) -> None:
        logits, seen = output.logits, kwargs["past_key_values"].get_seq_length()
        first = seen - logits.shape[1] + 1 - num_prompt  # output index of the token that the first row predicts
        for row in range(logits.shape[1]):
            if 0 <= first + row < len(known):
                logits[0, row, known[first + row]] = _CERTAIN

    hook = model.register_forward_hook(raise_known, with_kwargs=True)
    try:
        with torch.inference_mode():
            yield
    finally:
        hook.remove()
