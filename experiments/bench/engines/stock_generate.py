"""Contestants of transformers: greedy ``generate``, and its prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.experiments.bench.engines.contestants import Prompt, Run
from outrider.experiments.bench.engines.guided import guided_generate

LOOKUP_TOKENS = 10


@contextmanager
def _timed(model: PreTrainedModel) -> Iterator[list[tuple[float, float]]]:
    """Yield the list of (end, duration) of the forwards of a model, which grows during the block."""
    forwards: list[tuple[float, float]] = []
    began = [0.0]

    def begin(*_: object) -> None:
        began[0] = time.perf_counter()

    def end(*_: object) -> None:
        now = time.perf_counter()
        forwards.append((now, now - began[0]))

    hooks = (model.register_forward_pre_hook(begin), model.register_forward_hook(end))
    try:
        yield forwards
    finally:
        for hook in hooks:
            hook.remove()


class StockGenerate:
    """``generate`` of an unmodified model; batches are padded on the left."""

    name = "generate"

    def __init__(self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...]) -> None:
        self._model, self._end_tokens = model, end_tokens
        pad = end_tokens[0] if end_tokens else 0
        self._settings: dict[str, Any] = {
            "max_new_tokens": max_tokens, "do_sample": False, "use_cache": True, "pad_token_id": pad,
            "eos_token_id": list(end_tokens) or None,
        }  # fmt: skip

    def renew(self) -> None:
        """Do nothing: ``generate`` keeps no history."""

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Generate from a batch of prompts; a forward gives one token to each."""
        outputs, forwards, first_s = self._timed_run(prompts)
        return Run(outputs, sum(map(len, outputs)), first_s, sum(duration for _, duration in forwards[1:]), 0.0, 0)

    def _timed_run(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[tuple[float, float]], float]:
        """Return the outputs, end and duration of each forward, and the seconds to the end of the first one."""
        with _timed(self._model) as forwards:
            started = time.perf_counter()
            outputs = self._generate(prompts)
        return outputs, forwards, forwards[0][0] - started

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        width, device = max(len(prompt.ids) for prompt in prompts), self._model.device
        tokens = torch.full((len(prompts), width), self._settings["pad_token_id"], device=device)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids, device=device)
            mask[row, width - len(prompt.ids) :] = 1
        settings = dict(self._settings)
        with ExitStack() as stack:
            known = prompts[0].known
            if known is not None:
                assert len(prompts) == 1, "a guided generate takes one prompt at a time"
                settings["max_new_tokens"] = len(known)
                stack.enter_context(guided_generate(self._model, width, known))
            generated = self._model.generate(input_ids=tokens, attention_mask=mask, **settings)
        return [self._ended(row[width:]) for row in generated.tolist()]

    def _ended(self, ids: list[int]) -> list[int]:
        """Cut the padding behind the first end token."""
        ends = [index for index, token in enumerate(ids) if token in self._end_tokens]
        return ids[: ends[0] + 1] if ends else ids


class StockPromptLookup(StockGenerate):
    """``generate`` with transformers' own prompt lookup, one prompt at a time."""

    name = "generate + lookup"

    def __init__(self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...]) -> None:
        super().__init__(model, max_tokens, end_tokens)
        self._settings["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Generate from each prompt in turn."""
        outputs: list[list[int]] = []
        steps, prefill_s, forward_s = 0, 0.0, 0.0
        for prompt in prompts:
            own, forwards, first_s = self._timed_run([prompt])
            outputs += own
            steps += len(forwards)
            prefill_s += first_s
            forward_s += sum(duration for _, duration in forwards[1:])
        accepted = {"prompt_lookup": sum(map(len, outputs)) - steps}
        return Run(outputs, steps, prefill_s, forward_s, None, None, accepted)
