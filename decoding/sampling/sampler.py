"""Choice of a token from one row of logits, with randomness that is a function of (seed, position) alone.

The draw is the Gumbel-max trick (``argmax(logits + noise)`` has the distribution ``softmax(logits)``) with noise from a
counter-based generator (Philox): the key is the request's seed, the counter the absolute position of the token. So the same seed
gives the same text under every strategy, after a preemption and after a failover. The order of operations is vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from outrider.decoding.arrays import Float64Array, UInt64Array
from outrider.decoding.request import SamplingParams, TokenLogprob
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.sampling.philox import raw_stream
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.sampling.row_draw import draw_row


def gumbel(raw: UInt64Array) -> Float64Array:
    """Convert 64-bit random numbers to standard Gumbel noise, element by element."""
    noise: Float64Array = (raw >> np.uint64(11)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-53  # uniform in (0, 1), both ends excluded
    for _ in range(2):  # in-place: for a large vocabulary, allocation costs more than the logarithms
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def gumbel_noise(seed: int, position: int, count: int) -> Float64Array:
    """Return standard Gumbel noise for the token at an absolute position, [count]; entry t does not depend on ``count``."""
    # numpy keeps the raw Philox stream stable across versions, but not its distributions.
    return gumbel(raw_stream(seed, position, count))


def warp(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply temperature, min-p (arXiv 2407.01082, section 3), top-k and top-p in vLLM's order; excluded tokens become -inf."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / params.temperature
    if params.min_p > 0.0:
        probs = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if 0 < params.top_k < scores.shape[-1]:
        # Ties at the edge are all kept.
        threshold = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if params.top_p < 1.0:
        # Stable, so that equal logits are cut by token id. No mass stands before the most likely token, which is always kept.
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
    """Return the token that the target model emits at an absolute position; of equal ones a greedy request gets the lowest id.

    Args:
        logits: [vocab] floating point, the row of the prefix that ends before ``position``.
        rules: logits processors with the same prefix pushed; None if the request has none.
        barred: tokens excluded by ``min_tokens`` (see ``LogitRules.apply``); requires ``rules``.
    """
    if rules is not None:
        if rules.grammar is not None and (params.greedy or not params.truncates):
            # If the best token overall, noise included, is allowed, it is also the best allowed one: no mask is needed.
            token = _choose(rules.apply(logits, barred, constrained=False), params, position)
            if rules.grammar.accepts(token):
                return token
        logits = rules.apply(logits, barred)
    return _choose(logits, params, position)


def _choose(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    if params.greedy:
        return int(argmax_rows(logits[None])[0])
    token = draw_row(logits, params, position)
    if token is not None:
        return token
    scores = warp(logits, params).to(device="cpu", dtype=torch.float64).numpy()
    scores += gumbel_noise(params.seed, position, len(scores))
    return int(scores.argmax())


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], count: int, alternatives: Sequence[int] = ()
) -> tuple[TokenLogprob, ...]:
    """Return the raw log-probabilities of [n] emitted tokens, each with ``alternatives`` or the ``count`` most likely."""
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(rows, dim=-1)
    emitted = logprobs.gather(-1, torch.tensor(token_ids).to(rows.device)[:, None])[:, 0].tolist()
    if alternatives:
        chosen = logprobs[:, list(alternatives)].tolist(), [alternatives] * len(rows)
    else:
        best = torch.topk(logprobs, min(count, rows.shape[-1]), dim=-1)
        chosen = best.values.tolist(), best.indices.tolist()
    found = []
    for token, logprob, values, ids in zip(token_ids, emitted, *chosen, strict=True):
        # torch promises no order of ties: they are reported by token id.
        top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(token, logprob, tuple(top)))
    return tuple(found)
