"""Target-guided runs: the forward is real, the token that is committed is the known one (LLMA, arXiv 2304.04487, section 3.2).

So the speed of a model on real text can be measured without that model's weights: a random model of its shape, driven along what
another one wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decoding.drafters.base import TargetRows
from engine.executor import LocalExecutor, Outcome, Verifier
from engine.forward.attention import TREE_ATTENTION
from engine.forward.batch import Work
from engine.forward.runner import ModelRunner
from experiments.bench.options import SIZES

_CERTAIN = 3e4  # logit of a known token: above all others, and a number in float16


def random_model(size: str, vocab_size: int, context: int, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A model with random weights, tied embeddings and no end token, for the engine.

    Args:
        size: a key of ``SIZES``.
        vocab_size: of the tokenizer that cut the texts.
        context: tokens of prompt and output together.
        dtype: of weights and activations.
        seed: same seed, same weights.
    """
    config = AutoConfig.for_model(**{
        "model_type": "llama", "vocab_size": vocab_size, "max_position_embeddings": context, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES[size],
    })  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=TREE_ATTENTION).eval()


def stock_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, in the same memory, as transformers runs them."""
    config = type(model.config).from_dict(model.config.to_dict())
    with torch.device(model.device):  # buffers, too: nothing is copied
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    return twin.eval()


class GuidedVerifier(Verifier):
    """Lets the known token win below each row on the known path; below all others the model says what it says."""

    def __init__(self, known: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._known = known
        self.ranked = True  # whether drafters may ask what the target ranked; else its logits are left alone, and not told

    @torch.inference_mode()
    def verify(self, work: Work, target: TargetRows, root: torch.Tensor | None = None) -> Outcome:
        """See ``Verifier``. What the target said is changed in place, so that drafters learn from it what was committed."""
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
    """Computes every row and commits the known tokens. Requests are greedy.

    The logits are raised only where a drafter ranks tokens, so that other steps cost what a real model's do.
    """

    def __init__(self, runner: ModelRunner, known: dict[str, Sequence[int]]) -> None:
        """
        Args:
            runner: of the model.
            known: request id -> output to commit; set before the request is added.
        """
        super().__init__(runner)
        self.known = known
        self._verifier = self._guided = GuidedVerifier(known)

    def execute(self, works: Sequence[Work], top_k: int = 0) -> list[Outcome | None]:
        """See ``Executor``."""
        self._guided.ranked = top_k > 0
        return super().execute(works, top_k)


@contextmanager
def guided_generate(model: PreTrainedModel, num_prompt: int, known: Sequence[int]) -> Iterator[None]:
    """Makes ``generate`` emit known tokens, one prompt at a time: in each row the logit of its position's known token is raised.

    A forward hook, and no logits processor: transformers' prompt lookup runs its candidates through the processors and would cut
    them where they leave the known output, which only the target knows.

    Args:
        model: to run with a cache that tells its length.
        num_prompt: tokens of the prompt.
        known: the output.
    """

    def raise_known(module: object, args: object, kwargs: dict[str, Any], output: Any) -> None:
        logits, seen = output.logits, kwargs["past_key_values"].get_seq_length()
        first = seen - logits.shape[1] + 1 - num_prompt  # place in the output of the token that the first row foretells
        for row in range(logits.shape[1]):
            if 0 <= first + row < len(known):
                logits[0, row, known[first + row]] = _CERTAIN

    hook = model.register_forward_hook(raise_known, with_kwargs=True)
    try:
        with torch.inference_mode():
            yield
    finally:
        hook.remove()
