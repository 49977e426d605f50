"""Self-check at engine start that every number of a row depends on its preceding tokens alone, bit for bit.

Library kernels add in an order that depends on the number of rows and the context. So on a CPU, our own code computes products
and attention in text order (``engine.cpu.linear_kernel``, ``engine.cpu.attention_kernel``). On a GPU, and wherever that form
fails, every forward pass has the same number of rows, padded, and attention in text order. The rest of a model's code (norms,
activations) may still depend on the number of rows, so ``check`` tests it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.decoding.arrays import Int32Array
from outrider.decoding.tree import DraftTree
from outrider.engine.cuda.slot_attention import SPLIT
from outrider.engine.cuda.static_runner import StaticRunner
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.batch import DummySequence, ScheduledDummy, pack
from outrider.engine.forward.runner import ModelRunner

_TOKENS = 76  # computed one by one; deliberately not a round number
_TOKENS_ON_GPU = 2 * SPLIT + 20  # the last of them merge three splits of the attention kernels
_TREE_ROWS = 65  # root and default maximum of drafted rows per request
_MANY = (257, 300)  # rows of a prefill chunk
_PIECE = 50
_NEAR = 8  # compared tokens at the end of a text
_BLOCK_ROWS = 32  # rows of logits compared at once
_LAST = 4  # tokens that the whole model computes one by one
# Allowed median difference between tree attention and the model's own, relative to the size of a row's logits. In half precision
# both round, by some hundredths; a wrong kind of attention differs by more, except in models that hardly use attention.
_STRAYING = {torch.float64: 0.02, torch.float32: 0.02}
_STRAYING_HALF = 0.15


@dataclass(slots=True)
class _Found:
    rows: int = 0
    differing: int = 0

    def compare(self, expected: torch.Tensor, given: torch.Tensor) -> None:
        assert expected.shape == given.shape, (expected.shape, given.shape)
        self.rows += len(expected)
        self.differing += int((expected != given).flatten(1).any(1).sum())


@torch.inference_mode()
def check(runner: ModelRunner, tree_rows: int = _TREE_ROWS) -> str | None:
    """Compute tokens alone and in different batches, slots and chunks, and return a difference in any bit as text, or None.

    ``tree_rows``: rows of the largest tree, its root included. It writes to the first two slots.
    """
    vocab, longest = int(runner.model.config.get_text_config().vocab_size), _longest(runner)
    tokens = np.random.default_rng(0).integers(0, vocab, max(_MANY) + _LAST).astype(np.int32)
    found = _Found()
    # Numbers of rows, and on a GPU the borders of the attention kernels' splits, are tried on the first layer of each kind.
    if runner.fixed_rows is None:
        with first_layers(runner.model) as layers:
            _every_number_of_rows(runner, tokens[: min(_TOKENS, longest)], layers, found)
            if not found.differing:
                _many_rows(runner, tokens[: min(len(tokens), longest)], layers, found)
    elif isinstance(runner, StaticRunner):
        # Graphs do not follow a shortened model; ``check_graphs`` compares them with the model's code.
        with first_layers(runner.model), runner.uncaptured():
            _splits(runner, _tokens_of(runner), found)
    # Chunked prefill and trees are tried on all layers.
    for reach in (0,) if runner.rope is None else (0, runner.rope.border + 1):  # once per set of frequencies
        if not found.differing:
            _trees(runner, tokens, found, reach)
            if tree_rows > (runner.fixed_rows or _TREE_ROWS):
                _largest_tree(runner, tokens, found, reach, tree_rows)
    return f"{found.differing} of {found.rows} rows changed with the other rows of the batch" if found.differing else None


@torch.inference_mode()
def check_attention(runner: ModelRunner) -> str | None:
    """Compare tree attention with the stock model's own; return a difference beyond rounding as text, or None."""
    # This finds errors that ``check`` cannot see: positions that a model counts itself, or an unsupported kind of attention.
    model, tokens = runner.model, _tokens_of(runner)
    with first_layers(model), _uncaptured(runner):  # graphs compute all layers
        ours = _text_logits(runner, tokens)
        model.set_attn_implementation("eager")
        try:
            with _eager():
                given = model(input_ids=torch.from_numpy(tokens).long()[None].to(ours.device), use_cache=False)
        finally:
            model.set_attn_implementation(TREE_ATTENTION)
    return _straying(ours, given.logits[0], model.dtype)


def _eager() -> AbstractContextManager[None]:
    # Layers are compiled for tree attention only; without a compiled layer, the import of torch's compiler is not worth its time.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@torch.inference_mode()
def check_graphs(runner: ModelRunner) -> str | None:
    """Compare captured CUDA graphs of each size with the model's code; return a difference beyond rounding as text, or None."""
    if not isinstance(runner, StaticRunner):
        return None
    tokens = _tokens_of(runner)
    for rows in runner.calibration_key()["graphs"]:
        count = min(rows, len(tokens))
        _prefill(runner, 0, tokens[:-count], max(1, len(tokens)))
        given = _chain(runner, tokens, len(tokens) - count)
        with runner.uncaptured():
            _prefill(runner, 0, tokens[:-count], max(1, len(tokens)))
            expected = _chain(runner, tokens, len(tokens) - count)
        fault = _straying(given, expected, runner.model.dtype)
        if fault is not None:
            return f"a CUDA graph of {rows} rows differs from the model: {fault}"
    return None


def _straying(ours: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return the median difference of [n, vocab] logits as text if it is beyond rounding."""
    # In blocks of rows: the KV slots leave a GPU little memory, and a vocabulary may have 256,000 tokens.
    apart = [
        (a.float() - b.float()).norm(dim=1) / (b.float() - b.float().mean(1, keepdim=True)).norm(dim=1)
        for a, b in zip(ours.split(_BLOCK_ROWS), own.split(_BLOCK_ROWS), strict=True)
    ]
    straying = float(torch.cat(apart).median())
    fine = straying <= _STRAYING.get(dtype, _STRAYING_HALF)
    return None if fine else f"logits differ by {straying:.2g} of their magnitude"


def _tokens_of(runner: ModelRunner) -> Int32Array:
    """Return random tokens, as many as the checks need on this device and as slot and positions allow."""
    most = _TOKENS_ON_GPU if isinstance(runner, StaticRunner) else _TOKENS
    vocab = int(runner.model.config.get_text_config().vocab_size)
    return np.random.default_rng(0).integers(0, vocab, min(most, _longest(runner))).astype(np.int32)


def _uncaptured(runner: ModelRunner) -> AbstractContextManager[None]:
    return runner.uncaptured() if isinstance(runner, StaticRunner) else nullcontext()


def _text_logits(runner: ModelRunner, tokens: Int32Array) -> torch.Tensor:
    """Return the logits of a text, [n, vocab]; on a GPU in chunks of the most rows that its attention kernels take."""
    piece = runner.sizes[-1] if isinstance(runner, StaticRunner) else len(tokens)
    return torch.cat(
        [_chain(runner, tokens[: start + piece], start, reach=len(tokens)) for start in range(0, len(tokens), piece)]
    )


def _chain(runner: ModelRunner, tokens: Int32Array, start: int, reach: int = 0) -> torch.Tensor:
    count = len(tokens) - start
    return _logits(runner, tokens[: start + 1], start, tokens[start + 1 :], range(-1, count - 1), reach)


def _longest(runner: ModelRunner) -> int:
    positions = getattr(runner.model.config.get_text_config(), "max_position_embeddings", None)
    return min(runner.cache.capacity, positions or runner.cache.capacity)


@contextmanager
def first_layers(model: PreTrainedModel) -> Iterator[int]:
    """Shorten the model to its first layers, enough for one layer of each kind, and yield their number."""
    config = model.config.get_text_config()
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not lists:
        yield int(config.num_hidden_layers)
        return
    name, layers = lists[0]
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds: dict[object, int] = {}
    for number, layer in enumerate(layers):
        shapes = tuple((name, type(module), tuple(map(tuple, _shapes(module)))) for name, module in layer.named_modules())
        kinds.setdefault((types[number], shapes), number)
    count = 1 + max(kinds.values())
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, torch.nn.ModuleList(list(layers)[:count]))
    try:
        yield count
    finally:
        setattr(model.get_submodule(parent), child, layers)


def _shapes(module: torch.nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters(recurse=False)]


def _every_number_of_rows(runner: ModelRunner, tokens: Int32Array, layers: int, found: _Found) -> None:
    """Compare the last 2, 3, 4, ... tokens in one forward pass with the same tokens one by one."""
    count = len(tokens)
    logits = torch.cat([_logits(runner, tokens[: at + 1], at) for at in range(count)])
    expected = _entries(runner, 0, count, layers)
    most = min(_TREE_ROWS, count)
    if count > most:
        _prefill(runner, 0, tokens[: count - most], count)
    for rows in range(most, 1, -1):  # each begins one token later: a recurrent state cannot go back
        given = _logits(runner, tokens[: count - rows + 1], count - rows, tokens[count - rows + 1 :], range(-1, rows - 1))
        found.compare(logits[count - rows :], given)
        found.compare(expected, _entries(runner, 0, count, layers))


def _many_rows(runner: ModelRunner, tokens: Int32Array, layers: int, found: _Found) -> None:
    """Compare a prompt in small chunks with its beginning in one forward pass, in another slot if there are several."""
    _prefill(runner, 0, tokens, _PIECE)
    expected, states, slot = _entries(runner, 0, len(tokens), layers), runner.state(0), min(1, runner.cache.slots - 1)
    for rows in (min(rows, len(tokens)) for rows in _MANY):
        _prefill(runner, slot, tokens[:rows], rows)
        found.compare(expected[:rows], _entries(runner, slot, rows, layers))
    if len(states):
        _prefill(runner, slot, tokens, len(tokens))
        found.compare(states[None], runner.state(slot)[None])


def _splits(runner: StaticRunner, tokens: Int32Array, found: _Found) -> None:
    """Compare tokens near the borders of splits, and the last ones, one by one with rows of a chain and of a tree."""
    rows, count = runner.sizes[-1], min(len(tokens), runner.cache.capacity - _NEAR)  # the tree ends behind its text
    ends = [end for end in (SPLIT + 4, 2 * SPLIT + 4, count) if end <= count]
    for end in ends:  # shorter texts first: a tree writes behind the end of its text
        _prefill(runner, 0, tokens[:end], rows)
        chosen = range(max(0, end - _NEAR), end)
        plain = torch.cat([_logits(runner, tokens[: at + 1], at) for at in chosen])
        for first in (max(0, end - rows), chosen[0]):
            # For a single row, kernel 1 computes the context; in a chain, kernel 2 computes a part of it.
            chain = _logits(runner, tokens[: first + 1], first, tokens[first + 1 : end], range(-1, end - first - 1))
            found.compare(plain, chain[-len(chosen) :])
        # Each token of the text follows a sibling: its entry index differs from its position.
        pairs = [token for at in chosen[1:] for token in (0, int(tokens[at]))]
        parents = [-1] + [max(0, 2 * (at // 2)) for at in range(len(pairs))]
        tree = _logits(runner, tokens[: chosen[0] + 1], chosen[0], pairs[: rows - 1], parents[:rows])
        path = [row for row in range(0, 2 * len(chosen), 2) if row < len(tree)]
        found.compare(plain[: len(path)], _rows(tree, path))


def _entries(runner: ModelRunner, slot: int, length: int, layers: int) -> torch.Tensor:
    return runner.entries(slot, length, layers)


def _trees(runner: ModelRunner, tokens: Int32Array, found: _Found, reach: int) -> None:
    """Compare the last tokens one by one with trees, different prefill chunks and another request in the batch."""
    most = runner.fixed_rows or _TREE_ROWS
    length = max(1, min(_TOKENS - 1, _longest(runner) - min(most, 8) - _LAST))
    _prefill(runner, 0, tokens[:length], length, reach)
    plain = torch.cat([_logits(runner, tokens[: length + 1 + k], length + k, reach=reach) for k in range(_LAST)])
    a, b, c = tokens[length + 1 : length + _LAST].tolist()
    root = int(tokens[length])
    _prefill(runner, 0, tokens[:length], max(1, length // 3), reach)  # the same entries in other chunks
    siblings = max(1, min(most - 1, runner.cache.capacity - length - 1))
    crowd = _logits(runner, tokens[: length + 1], length, [a] * siblings, [-1] + [0] * siblings, reach)
    found.compare(_rows(plain, [0] + [1] * siblings), crowd)
    # The path root, a, b, c, with other tokens between its rows.
    rows, parents = [c, a, b, root, b, c], [-1, 0, 0, 1, 2, 2, 5]
    tree = _logits(runner, tokens[: length + 1], length, rows[: most - 1], parents[:most], reach)
    path = [row for row in (0, 2, 5, 6) if row < len(tree)]
    found.compare(plain[: len(path)], _rows(tree, path))
    if runner.cache.slots > 1:
        text = tokens[: length + 1]  # all rows in one slot, only the last in the other
        lines = [(DummySequence(slot, text, rope_length=reach), start) for slot, start in ((1, 0), (0, length))]
        works = [ScheduledDummy(line, start, length + 1, _tree(root)) for line, start in lines]
        found.compare(_rows(plain, [0, 0]), runner.forward(pack(works)))


def _largest_tree(runner: ModelRunner, tokens: Int32Array, found: _Found, reach: int, rows: int) -> None:
    """Compare the last tokens one by one with a tree of the largest size, in which they are the last rows."""
    length = max(1, min(_TOKENS - 1, _longest(runner) - _LAST))
    _prefill(runner, 0, tokens[:length], length, reach)
    plain = torch.cat([_logits(runner, tokens[: length + 1 + k], length + k, reach=reach) for k in range(_LAST)])
    path = tokens[length + 1 : length + _LAST].tolist()
    others = min(rows, runner.cache.capacity - length) - 1 - len(path)
    if others < 1:
        return
    _prefill(runner, 0, tokens[:length], length, reach)  # a recurrent state cannot go back
    # Branches of three other tokens each below the root, then the path.
    branches = [at - 1 if (at - 1) % 3 else 0 for at in range(1, others + 1)]
    parents = [-1, *branches, 0, *range(others + 1, others + len(path))]
    tree = _logits(runner, tokens[: length + 1], length, [path[0]] * others + path, parents, reach)
    found.compare(plain, _rows(tree, [0, *range(others + 1, others + 1 + len(path))]))


def _rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return tensor[torch.tensor(rows).to(tensor.device)]


def _prefill(runner: ModelRunner, slot: int, tokens: Int32Array, piece: int, reach: int = 0) -> None:
    for start in range(0, len(tokens), piece):
        runner.forward(
            pack([ScheduledDummy(DummySequence(slot, tokens, rope_length=reach), start, min(start + piece, len(tokens)), None)])
        )


def _logits(
    runner: ModelRunner, tokens: Int32Array, start: int, rows: Sequence[int] | Int32Array = (), parents: Sequence[int] = (-1,),
    reach: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return the logits, [n, vocab], of a tree below the last token, which is its root."""
    tree = _tree(int(tokens[-1]), rows, parents)
    return runner.forward(pack([ScheduledDummy(DummySequence(0, tokens, rope_length=reach), start, len(tokens), tree)])).clone()


def _tree(root: int, rows: Sequence[int] | Int32Array = (), parents: Sequence[int] = (-1,)) -> DraftTree:
    return DraftTree(
        np.array([root, *rows], np.int32), np.array(parents, np.int32), np.zeros(len(rows) + 1, np.int8), len(rows) + 1
    )
