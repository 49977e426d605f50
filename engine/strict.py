"""Exactness to the last bit: every number of a row is a function of the tokens before it alone.

In floating point, a matrix product of one row and one of many take other kernels, which round otherwise, and where the two best
tokens are as good as even, rounding decides which one is emitted. Re-deciding such tokens in a forward of one row does not help
to the end: the keys and values of all rows before it were rounded otherwise, too (``experiments/near_ties.py`` counts what is
left). So ``engine.exact=strict`` has one shape instead of two: every forward computes the same number of rows, plain decoding as
well as trees and prefills, with nothing in the rows that are not needed; and the attention of a row goes through what it sees in
the order of the text, wherever that lies. Then the arithmetic of a row is the same whoever sits beside it.

Whether a device's kernels are of this kind, that a row's place among the rows does not matter, is not promised by anybody:
``check_strict`` looks, at every start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from decoding.tree import DraftTree, Int32Array
from engine.batch import Line, LineWork, pack
from engine.errors import ModelLoadError
from engine.runner import ModelRunner

# Rows of every forward. On a GPU the weights are read once for 64 rows as for one; on a CPU each row costs time.
_ROWS = {"cuda": 64, "cpu": 16}
_PREFIX = 75  # tokens before the probed rows: no multiple of anything


def strict_rows(model: PreTrainedModel) -> int:
    """Rows of every forward of a model.

    Raises:
        ModelLoadError: its layers compute rows in groups whose sizes depend on the others.
    """
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        name = type(model).__name__
        raise ModelLoadError(f"engine.exact=strict is not for {name}: how many rows an expert gets depends on the others' tokens")
    return _ROWS[model.device.type]


@torch.inference_mode()
def check_strict(runner: ModelRunner) -> None:
    """Computes a few tokens in other company, at other places and in other cuts, and compares every bit of their logits.

    Used while no request has a slot: the first slot is written to.

    Args:
        runner: with ``fixed_rows``.

    Raises:
        ModelLoadError: they differ, so that the engine cannot be strict on this device.
    """
    rows = runner.fixed_rows
    assert rows is not None
    vocab = int(runner.model.config.get_text_config().vocab_size)
    capacity = runner.cache.capacity
    length = max(1, min(_PREFIX, capacity - rows - 4))
    tokens = np.random.default_rng(0).integers(0, vocab, length + 4).astype(np.int32)
    root, (a, b, c) = int(tokens[length]), tokens[length + 1 :].tolist()
    _prefill(runner, tokens[:length], length)
    plain = [_logits(runner, tokens[: length + 1 + k], length + k, [tokens[length + k]], [-1])[0] for k in range(4)]
    _prefill(runner, tokens[:length], max(1, length // 3))  # the same entries again, computed in other cuts
    siblings = min(rows - 1, capacity - length - 1)
    crowd = _logits(runner, tokens[: length + 1], length, [root] + [a] * siblings, [-1] + [0] * siblings)
    # The path root, a, b, c, with other tokens between its rows.
    tree = _logits(runner, tokens[: length + 1], length, [root, c, a, b, root, b, c][:rows], [-1, 0, 0, 1, 2, 2, 5][:rows])
    pairs = [(plain[0], crowd[0]), *((plain[1], row) for row in crowd[1:])]
    pairs += [(expected, tree[row]) for expected, row in zip(plain, (0, 2, 5, 6), strict=True) if row < len(tree)]
    differing = sum(not torch.equal(expected, given) for expected, given in pairs)
    if differing:
        raise ModelLoadError(
            f"engine.exact=strict cannot be kept on {runner.model.device}: {differing} of {len(pairs)} rows were computed "
            "otherwise in other company. Set engine.exact=rounding, where near-ties may fall either way"
        )


def _prefill(runner: ModelRunner, tokens: Int32Array, chunk: int) -> None:
    for start in range(0, len(tokens), chunk):
        runner.forward(pack([LineWork(Line(0, tokens), start, min(start + chunk, len(tokens)), None)]))


def _logits(runner: ModelRunner, tokens: Int32Array, start: int, rows: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
    """[n, vocab] of a tree below the last of the tokens."""
    arrays = np.array(rows, np.int32), np.array(parents, np.int32), np.zeros(len(rows), np.int8)
    return runner.forward(pack([LineWork(Line(0, tokens), start, len(tokens), DraftTree(*arrays, len(rows)))])).clone()
