"""Contestants of transformers: greedy ``generate``, its prompt lookup, and its assisted generation."""

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


class _Forwards:
    """Times of a model's forwards, apart for whole ones and early exits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.whole: list[tuple[float, float]] = []  # end, duration
        self.early: list[tuple[float, float]] = []
        self._model, self._layers, self._started = model, model.config.num_hidden_layers, 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the forwards of the block."""
        hooks = (self._model.register_forward_pre_hook(self._begin), self._model.register_forward_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _end(self, *_: object) -> None:
        now = time.perf_counter()
        whole = self._model.config.num_hidden_layers == self._layers
        (self.whole if whole else self.early).append((now, now - self._started))


def _seconds(forwards: Sequence[tuple[float, float]], after: float) -> float:
    return sum(duration for end, duration in forwards if end > after)


class StockGenerate:
    """``generate`` of an unmodified model; batches are padded on the left."""

    name = "generate"
    source: str | None = None  # name of its accepted drafts

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
        forwards, started = _Forwards(self._model), time.perf_counter()
        with forwards.timed():
            outputs = self._generate(prompts)
        first_end = forwards.whole[0][0]
        return Run(outputs, sum(map(len, outputs)), first_end - started, _seconds(forwards.whole, first_end), 0.0, 0)

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


class _StockDrafting(StockGenerate):
    """``generate`` with drafts, one prompt at a time."""

    _assistant: PreTrainedModel | None = None

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Generate from each prompt in turn."""
        assert self.source is not None
        runs = [self._run(prompt) for prompt in prompts]
        outputs, steps = [run.outputs[0] for run in runs], sum(run.steps for run in runs)
        return Run(
            outputs, steps, sum(run.prefill_s for run in runs), sum(run.forward_s for run in runs),
            sum(run.propose_s or 0.0 for run in runs) or None, None, {self.source: sum(map(len, outputs)) - steps},
        )  # fmt: skip

    def _run(self, prompt: Prompt) -> Run:
        forwards, assisting = _Forwards(self._model), _Forwards(self._assistant or self._model)
        started = time.perf_counter()
        with forwards.timed(), ExitStack() as stack:
            if self._assistant is not None:
                stack.enter_context(assisting.timed())
            outputs = self._generate([prompt])
        first_end = forwards.whole[0][0]
        drafting = _seconds(forwards.early + assisting.whole, first_end)
        return Run(outputs, len(forwards.whole), first_end - started, _seconds(forwards.whole, first_end), drafting)


class StockPromptLookup(_StockDrafting):
    """``generate`` with transformers' own prompt lookup."""

    name = "generate + lookup"
    source = "prompt_lookup"

    def __init__(self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...]) -> None:
        super().__init__(model, max_tokens, end_tokens)
        self._settings["prompt_lookup_num_tokens"] = LOOKUP_TOKENS


class StockAssisted(_StockDrafting):
    """``generate`` with transformers' assisted generation, by a model with the same tokenizer or by early exit.

    An early exit runs the first layers, the last norm and the output head, and drafts badly unless the model was trained for it.
    With an assistant model ``prefill_s`` ends after the target's first forward, which follows the first draft.
    """

    source = "assistant"

    def __init__(
        self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...], assistant: PreTrainedModel | int
    ) -> None:
        """Draft with ``assistant``, a model or a number of layers of the target."""
        super().__init__(model, max_tokens, end_tokens)
        if isinstance(assistant, int):
            self.name = f"generate + early exit {assistant}"
            self._settings["assistant_early_exit"] = assistant
        else:
            self.name, self._assistant = "generate + assistant", assistant
            self._settings["assistant_model"] = assistant
