"""Ways to generate from the same prompts, side by side: transformers' ``generate`` and our engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from decoding.request import Request, SamplingParams
from engine.engine import Engine
from experiments.workloads import run_engine

LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """A record that fits."""

    id: str
    ids: list[int]
    references: list[list[int]]


class Contestant(Protocol):
    """A way to generate."""

    name: str

    def run(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], int]:
        """The output of each prompt, its end token included, and the target forwards that they took."""
        ...


class StockGenerate:
    """``generate`` of an unmodified model; a group of prompts is padded on the left."""

    name = "generate"

    def __init__(self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...]) -> None:
        self._model, self._end_tokens = model, end_tokens
        pad = end_tokens[0] if end_tokens else 0
        self._settings: dict[str, Any] = {
            "max_new_tokens": max_tokens, "do_sample": False, "use_cache": True, "pad_token_id": pad,
            "eos_token_id": list(end_tokens) or None,
        }  # fmt: skip

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], int]:
        """See ``Contestant``. A forward gives one token to each prompt."""
        width, device = max(len(prompt.ids) for prompt in prompts), self._model.device
        tokens = torch.full((len(prompts), width), self._settings["pad_token_id"], device=device)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids, device=device)
            mask[row, width - len(prompt.ids) :] = 1
        generated = self._model.generate(input_ids=tokens, attention_mask=mask, **self._settings)
        outputs = [self._ended(row[width:]) for row in generated.tolist()]
        return outputs, sum(map(len, outputs))

    def _ended(self, ids: list[int]) -> list[int]:
        """Without the padding behind the first end token."""
        ends = [index for index, token in enumerate(ids) if token in self._end_tokens]
        return ids[: ends[0] + 1] if ends else ids


class StockPromptLookup(StockGenerate):
    """``generate`` with transformers' own prompt lookup, which takes one prompt at a time."""

    name = "generate + lookup"

    def __init__(self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...]) -> None:
        super().__init__(model, max_tokens, end_tokens)
        self._settings["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    def run(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], int]:
        """See ``Contestant``."""
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = self._model.register_forward_hook(count)
        try:
            outputs = [super(StockPromptLookup, self).run([prompt])[0][0] for prompt in prompts]
        finally:
            hook.remove()
        return outputs, forwards


class EngineContestant:
    """Our engine with one strategy."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self.name, self.engine, self._params = engine.info.strategy, engine, SamplingParams(max_tokens)

    def run(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], int]:
        """See ``Contestant``. Forwards are counted per request: a step serves several."""
        requests = [Request(str(row), prompt.ids, self._params, prompt.references) for row, prompt in enumerate(prompts)]
        run_engine(self.engine, requests)
        return [request.output_ids.tolist() for request in requests], sum(request.stats.steps for request in requests)
