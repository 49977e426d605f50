"""What families that compute in ways of their own are asked, and what plain decoding answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from tests.helpers.models import COMPILED, VOCAB, engine_over, nearly, run, tiny_model

DTYPES = [param for param in COMPILED if param.values[0] is not torch.float16]
MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
_RNG = np.random.default_rng(5)
_MOTIF = _RNG.integers(1, 40, 15).tolist()
REPEATED, TWICE, LONG = [1, 2, 3, 4] * 6 + [1, 2], _MOTIF * 2 + _MOTIF[:7], _RNG.integers(1, VOCAB, 70).tolist()


def name_of(dtype: torch.dtype) -> str:
    """As configurations name it."""
    return str(dtype).removeprefix("torch.")


class Asked:
    """Prompts, each greedily, and then some of them sampled."""

    def __init__(self, *prompts: list[int], ignore_eos: bool = False) -> None:
        """Asks for the second prompt at a low temperature besides, and for the last at a high one."""
        cool = replace(GREEDY, ignore_eos=ignore_eos, temperature=0.2, seed=3, top_k=8, presence_penalty=-0.2)
        hot = replace(GREEDY, ignore_eos=ignore_eos, temperature=1.1, seed=5, top_p=0.9, repetition_penalty=1.2)
        self._cases = (*((prompt, GREEDY) for prompt in prompts), (prompts[1], cool), (prompts[-1], hot))
        self.prompts = prompts

    def requests(self, answers: Sequence[Sequence[int]] = (), tenant: str | None = None) -> list[Request]:
        """New requests; ``answers`` make references of which parts can be copied."""
        return [
            Request(str(at), prompt, params, references=[nearly(answer) for answer in answers[at : at + 1]], tenant=tenant)
            for at, (prompt, params) in enumerate(self._cases)
        ]

    @cache  # noqa: B019 - they live as long as the tests
    def plain(self, family: str, dtype: str) -> list[list[int]]:
        """The outputs of plain decoding, one request at a time."""
        return run(engine_over(tiny_model(family, dtype).runner, build_drafter("autoregressive", {}), 1), *self.requests())
