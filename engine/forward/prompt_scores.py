"""Log-probabilities of prompt tokens, computed in the same forward pass as the draft trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from outrider.decoding.request import TokenLogprob
from outrider.decoding.sampling.sampler import token_logprobs
from outrider.engine.forward.batch import Batch, ScheduledRequest

_TOGETHER = 64  # rows whose log-softmax is in memory at once


def asks(works: Sequence[ScheduledRequest]) -> bool:
    """Return whether any request of the step asks for prompt log-probabilities."""
    return any(work.request.prompt_logprobs is not None for work in works)


def with_prompt_rows(works: Sequence[ScheduledRequest], batch: Batch) -> Batch:
    """Return the batch with the prompt rows to score appended to ``logit_rows``.

    Example: tokens 4 to 6 of a prompt of 10 are computed by rows 20 to 22, which score tokens 5 to 7.
    """
    rows = [np.arange(segment.offset, segment.offset + _count(work)) for work, segment in zip(works, batch.segments, strict=True)]
    return dataclasses.replace(batch, logit_rows=np.concatenate([batch.logit_rows, *rows]))


def score(works: Sequence[ScheduledRequest], logits: torch.Tensor) -> None:
    """Store prompt scores in ``Request.prompt_scores``; ``logits``, [n, vocab], are of the rows of ``with_prompt_rows``."""
    first = 0
    for work in works:
        request, count = work.request, _count(work)
        if not count:
            continue
        assert request.prompt_logprobs is not None and work.start <= len(request.prompt_scores), request.request_id
        del request.prompt_scores[work.start :]  # recomputed after a preemption
        tokens = request.tokens[work.start + 1 : work.start + 1 + count].tolist()
        for begin in range(0, count, _TOGETHER):
            part = slice(begin, min(begin + _TOGETHER, count))
            request.prompt_scores += _scored(logits[first:][part], tokens[part], request.prompt_logprobs)
        first += count
    assert first == len(logits), (first, len(logits))


def _count(work: ScheduledRequest) -> int:
    if work.request.prompt_logprobs is None:
        return 0
    # The row of token i scores token i + 1. The last token's row is the root of the tree.
    return max(0, min(work.end, work.request.num_prompt - 1) - work.start)


def _scored(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    chosen = logits.gather(-1, torch.tensor(tokens).to(logits.device)[:, None])
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    entries = token_logprobs(logits, tokens, count)
    return [dataclasses.replace(entry, rank=rank) for entry, rank in zip(entries, ranks, strict=True)]
