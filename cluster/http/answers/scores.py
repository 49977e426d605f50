"""Response of ``/v1/score``, in vLLM's format with further fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from outrider.cluster.http.answers.logprobs import TokenBytes, finite
from outrider.cluster.http.answers.openai_shapes import PromptTokensDetails, Usage
from outrider.cluster.http.answers.resume import ResumePoint
from outrider.cluster.serving.generation import Generation, GenerationJob


class Score(BaseModel):
    """Score of one choice or pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float  # log-probability: the sum of ``token_logprobs``
    probability: float  # share of the choice among all choices of its prompt
    tokens: list[str]
    token_logprobs: list[float]


class Scores(BaseModel):
    """Response to ``/v1/score``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


async def scores_of(
    generation: Generation, jobs: Sequence[GenerationJob], beginning: ResumePoint, model: str, token_bytes: TokenBytes
) -> Scores:
    """Run the generation of jobs with choices, and return the scores in their order."""
    found: dict[int, tuple[tuple[float, ...], ...]] = {}
    async with generation:
        async for index, output in generation.outputs():
            if output.scores is not None:
                found[index] = output.scores
    data: list[Score] = []
    for index, job in enumerate(jobs):
        logprobs = [[finite(value) for value in values] for values in found[index]]
        sums = list(map(sum, logprobs))
        weights = [math.exp(total - max(sums)) for total in sums]
        for choice, values, total, weight in zip(job.choices, logprobs, sums, weights, strict=True):
            names = [token_bytes.name(token) for token in choice]
            share = weight / sum(weights)
            data.append(Score(index=len(data), score=total, probability=share, tokens=names, token_logprobs=values))
    tokens = generation.prompt_tokens + sum(len(entry.tokens) for entry in data)
    usage = Usage(
        prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.cached_tokens),
        energy_joules=None if generation.energy_j is None else round(generation.energy_j, 3),
    )  # fmt: skip
    return Scores(id=beginning.answer_id, created=beginning.created, model=model, data=data, usage=usage)
