"""Perplexity of generated text under the target: how likely the model finds what a method made it say."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from decoding.tree import DraftTree
from engine.forward.batch import Line, LineWork, pack
from engine.forward.runner import ModelRunner

CHUNK = 256  # rows of a forward: their logits take CHUNK * vocab floats


def output_nats(
    runner: ModelRunner, prompt_ids: Sequence[int], output_ids: Sequence[int], chunk: int = CHUNK
) -> npt.NDArray[np.float64]:
    """``-log p`` of each token of an output, teacher-forced: p is the softmax of the target's raw logits, in float32 at least.

    Neither temperature nor truncation, bias or penalties are in it. What the runner's first slot held is overwritten.

    Args:
        runner: of the target; no request is in its slots.
        prompt_ids: at least one.
        output_ids: [n].
        chunk: rows of a forward.

    Returns:
        [n] nats.

    Raises:
        ValueError: the prompt is empty, or the sequence is longer than a slot.
    """
    if not len(prompt_ids):
        raise ValueError("prompt must hold at least one token")
    tokens = np.array([*prompt_ids, *output_ids], np.int32)
    if len(tokens) > runner.cache.capacity:
        raise ValueError(f"prompt and output have {len(tokens)} tokens, a slot of the model holds {runner.cache.capacity}")
    if not len(output_ids):
        return np.empty(0)
    runner.cache.prefixes.cut(0, 0)
    first = len(prompt_ids) - 1  # the row after which the output begins
    for start in range(0, first, chunk):
        end = min(start + chunk, first)
        runner.forward(pack([LineWork(Line(0, tokens[:end]), start, end, None)]))
    nats = []
    for start in range(first, len(tokens) - 1, chunk):
        end = min(start + chunk, len(tokens) - 1)
        tree = DraftTree.chain(int(tokens[start]), tokens[start + 1 : end])
        logits = runner.forward(pack([LineWork(Line(0, tokens[: start + 1]), start, start + 1, tree)]))
        expected = torch.from_numpy(tokens[start + 1 : end + 1].astype(np.int64)).to(logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats.append(torch.nn.functional.cross_entropy(logits, expected, reduction="none").double().cpu().numpy())
    return np.concatenate(nats)


def perplexity(nats: Iterable[npt.NDArray[np.float64]]) -> float:
    """``exp`` of the mean of ``-log p`` over all tokens of some outputs.

    Example: two outputs, of one token with probability 1/2 and of three with 1/4 each: exp((ln 2 + 3 ln 4) / 4) = 3.36.

    Raises:
        ValueError: there is no token.
    """
    values = np.concatenate(list(nats) or [np.empty(0)])
    if not len(values):
        raise ValueError("perplexity needs a token at least")
    return math.exp(float(values.mean()))


def until_end(output_ids: Sequence[int], end_tokens: Collection[int]) -> list[int]:
    """An output up to its first end token, that one included: what comes behind it is no text."""
    for at, token in enumerate(output_ids):
        if token in end_tokens:
            return list(output_ids[: at + 1])
    return list(output_ids)
