"""Log-probabilities of the tokens of a prompt, for requests that ask: its rows' logits are computed beside those of the trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from decoding.request import TokenLogprob
from decoding.sampling.sampler import token_logprobs
from engine.forward.batch import Batch, Work

_TOGETHER = 64  # rows whose logarithms are in memory at once


def asks(works: Sequence[Work]) -> bool:
    """Whether any of a step's requests lacks log-probabilities of its prompt."""
    return any(work.request.prompt_logprobs is not None for work in works)


def with_prompt_rows(works: Sequence[Work], batch: Batch) -> Batch:
    """The batch with the rows of prompts that are to be scored behind all others in ``logit_rows``.

    The row of a prompt's token i gives the log-probability of token i + 1, so that the first token has none, and the row of the
    last one is the tree's root, which is wanted anyway.

    Example: tokens 4 to 6 of a prompt of 10 are computed by the rows 20 to 22, which tell of the tokens 5 to 7.
    """
    rows = [np.arange(segment.offset, segment.offset + _count(work)) for work, segment in zip(works, batch.segments, strict=True)]
    return dataclasses.replace(batch, logit_rows=np.concatenate([batch.logit_rows, *rows]))


def score(works: Sequence[Work], logits: torch.Tensor) -> None:
    """Keeps what [n, vocab] logits of the rows that ``with_prompt_rows`` added tell of prompts (``Request.prompt_scores``)."""
    first = 0
    for work in works:
        request, count = work.request, _count(work)
        if not count:
            continue
        assert request.prompt_logprobs is not None and work.start <= len(request.prompt_scores), request.request_id
        del request.prompt_scores[work.start :]  # computed again after a preemption
        tokens = request.tokens[work.start + 1 : work.start + 1 + count].tolist()
        for begin in range(0, count, _TOGETHER):
            part = slice(begin, min(begin + _TOGETHER, count))
            request.prompt_scores += _scored(logits[first:][part], tokens[part], request.prompt_logprobs)
        first += count
    assert first == len(logits), (first, len(logits))


def _count(work: Work) -> int:
    """Rows of a work that tell of a token of the prompt."""
    if work.request.prompt_logprobs is None:
        return 0
    return max(0, min(work.end, work.request.num_prompt - 1) - work.start)


def _scored(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    chosen = logits.gather(-1, torch.tensor(tokens).to(logits.device)[:, None])
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    entries = token_logprobs(logits, tokens, count)
    return [dataclasses.replace(entry, rank=rank) for entry, rank in zip(entries, ranks, strict=True)]
