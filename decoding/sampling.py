"""From one row of logits to one token, with randomness that is a function of (seed, position) alone.

The draw is the Gumbel-max trick (``argmax(logits + noise)`` has the law ``softmax(logits)``) with noise from a counter-based
generator (Philox) whose key is the request's seed and whose counter is the absolute position of the token. Nothing else enters:
not the draft, the batch, the replica or the number of draws before. So the same seed gives the same text under every strategy,
after a preemption and after a failover, and tests of sampling are equality tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from decoding.request import SamplingParams
from decoding.tree import Int32Array


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
    raw = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(count)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), both ends excluded
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def warp(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then top-k, then top-p, in the order of transformers and vLLM; excluded tokens become -inf.

    Args:
        logits: [vocab] floating point.
        params: ``temperature`` above 0.

    Returns:
        [vocab] float32, or float64 where the logits are. Ties at the edge of top-k are all kept; the sort behind top-p is stable,
        so that equal logits are cut by token id. The most likely token is always kept.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        threshold = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.sort(scores, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the mass before a token already reaches top_p
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), -torch.inf)
    return scores


def argmax_rows(logits: torch.Tensor) -> Int32Array:
    """The most likely token of each row, the lowest id among equals.

    Args:
        logits: [n, vocab] floating point, on any device.

    Returns:
        [n] int32. On a CPU numpy does it: torch's argmax is many times slower there, above all in bfloat16.
    """
    best: Int32Array
    if logits.device.type == "cpu":
        best = logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy().argmax(-1).astype(np.int32)
    else:
        best = torch.argmax(logits, dim=-1).to("cpu", torch.int32).numpy()
    return best


def choose(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token that the target model emits at ``position``.

    Args:
        logits: [vocab] floating point, the row of the prefix that ends before ``position``.
        params: the request's; temperature 0 gives the argmax, the lowest id among equals.
        position: absolute index of the token to choose.
    """
    if params.greedy:
        return int(argmax_rows(logits[None])[0])
    scores = warp(logits, params).to(device="cpu", dtype=torch.float64).numpy()
    return int(np.argmax(scores + gumbel_noise(params.seed, position, len(scores))))
