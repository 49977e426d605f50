"""From one row of logits to one token, with randomness that is a function of (seed, position) alone.

The draw is the Gumbel-max trick (``argmax(logits + noise)`` has the distribution ``softmax(logits)``) with noise from a
counter-based generator (Philox) whose key is the request's seed and whose counter is the absolute position of the token. Nothing
else enters: not the draft, the batch, the replica or the number of draws before. So the same seed gives the same text under every
strategy, after a preemption and after a failover, and tests of sampling are equality tests.

The chain from the model's logits to the token, as in vLLM: grammar, bias, minimum length and penalties
(``decoding.sampling.penalties``), then the argmax of a greedy request, or temperature, min-p, top-k, top-p and the draw.
Log-probabilities are of the model's raw logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from decoding.request import SamplingParams, TokenLogprob
from decoding.sampling.penalties import LogitRules
from decoding.sampling.philox import UInt64Array, raw_stream
from decoding.sampling.ranking import argmax_rows
from decoding.sampling.row_draw import draw_row


def gumbel(raw: UInt64Array) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise from 64-bit random numbers, each by itself."""
    noise: npt.NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-53  # uniform in (0, 1), both ends excluded
    for _ in range(2):  # in place: of a large vocabulary, new memory costs more than the logarithms
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def gumbel_noise(seed: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for one position.

    Args:
        seed: of the request, below 2**63.
        position: absolute index of the token to choose; prompt tokens count.
        count: the size of the vocabulary.

    Returns:
        [count] float64. Entry t belongs to token t, whatever ``count`` is. Built on the raw Philox stream, which numpy keeps
        stable across versions, and not on its distributions, which it may change.
    """
    return gumbel(raw_stream(seed, position, count))


def warp(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then min-p, then top-k, then top-p, in vLLM's order; excluded tokens become -inf.

    Min-p (arXiv 2407.01082, section 3) keeps the tokens whose probability is at least ``min_p`` times the highest. Example: with
    probabilities 0.5, 0.3, 0.15, 0.05 and min_p 0.3 the bar is 0.15: three tokens are left.

    Args:
        logits: [vocab] floating point.
        params: of a request that is not greedy.

    Returns:
        [vocab] float32, or float64 where the logits are. Ties at the edge of top-k are all kept; the sort behind top-p is stable,
        so that equal logits are cut by token id. The most likely token is always kept.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / params.temperature
    if params.min_p > 0.0:
        probs = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if 0 < params.top_k < scores.shape[-1]:
        threshold = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.sort(scores, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the mass before a token already reaches top_p
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), -torch.inf)
    return scores


def choose(
    logits: torch.Tensor,
    params: SamplingParams,
    position: int,
    rules: LogitRules | None = None,
    barred: Collection[int] = (),
) -> int:
    """The token that the target model emits at ``position``.

    Args:
        logits: [vocab] floating point, the row of the prefix that ends before ``position``.
        params: the request's; greedy gives the argmax, the lowest id among equals.
        position: absolute index of the token to choose.
        rules: the request's grammar, bias and penalties, with the same prefix pushed; None where it has none.
        barred: tokens that may not come yet (see ``LogitRules.apply``); needs ``rules``.
    """
    if rules is not None:
        if rules.grammar is not None and (params.greedy or not params.truncates):
            # The best of all tokens, noise included, is the best of those allowed if it is one of them: no mask is needed.
            token = _choose(rules.apply(logits, barred, constrained=False), params, position)
            if rules.grammar.accepts(token):
                return token
        logits = rules.apply(logits, barred)
    return _choose(logits, params, position)


def _choose(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token at ``position``, by the logits after the rules."""
    if params.greedy:
        return int(argmax_rows(logits[None])[0])
    token = draw_row(logits, params, position)
    if token is not None:
        return token
    scores = warp(logits, params).to(device="cpu", dtype=torch.float64).numpy()
    scores += gumbel_noise(params.seed, position, len(scores))
    return int(scores.argmax())


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of emitted tokens and of the most likely alternatives.

    Args:
        logits: [n, vocab] the model's raw logits of the rows below which the tokens were emitted.
        token_ids: [n] the emitted tokens.
        count: alternatives of each; the whole vocabulary where that is smaller.

    Returns:
        [n]. Computed in float32, or float64 where the logits are. Which of equals comes last is not promised.
    """
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(rows, dim=-1)
    emitted = logprobs.gather(-1, torch.tensor(token_ids).to(rows.device)[:, None])[:, 0].tolist()
    best = torch.topk(logprobs, min(count, rows.shape[-1]), dim=-1)
    found = []
    for token, logprob, values, ids in zip(token_ids, emitted, best.values.tolist(), best.indices.tolist(), strict=True):
        top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(token, logprob, tuple(top)))
    return tuple(found)
