"""The target model as drafters see it before the first request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from decoding.jit import cache_folder
from decoding.sampling import argmax_rows
from decoding.tree import DraftTree, Int32Array
from engine.batch import Batch, Segment
from engine.loading import ModelInfo
from engine.model_tables import bigram_table, cached_table, unigram_ranking
from engine.runner import ModelRunner

_TABLE_WIDTH = 32  # tables are kept this wide, so that drafters that ask for less share one file
_CONTEXT = 256  # tokens before the rows that are timed
_TIMING_S = 1.0  # after so long no new round of timings begins
_LEAST_ROUNDS, _ROUNDS = 2, 8


class LocalTarget:
    """The model of this process as ``decoding.drafters.base.Target``. Used while no request has a slot: slot 0 is written to."""

    def __init__(
        self,
        runner: ModelRunner,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerFast | None = None,
        folder: Path | None = None,
        bos: bool | None = None,
    ) -> None:
        """
        Args:
            runner: of the model.
            info: of the model.
            tokenizer: of the model.
            folder: where tables are kept; the user's cache when absent.
            bos: whether the bigram table sees a beginning of sequence before each token; as the tokenizer does it when absent.

        Raises:
            ValueError: ``bos`` is asked for and the tokenizer has no such token.
        """
        self.vocab_size = info.vocab_size
        self.end_token_ids = info.eos_token_ids
        self.max_model_len = info.max_model_len
        self._runner, self._tokenizer = runner, tokenizer
        self._folder = folder
        self._bos = _bos_token(tokenizer, bos)
        self._revision = f"{info.model_revision}-{info.tokenizer_revision}"
        self._seconds: dict[int, float] = {}  # of a step, by rows

    def bigram_table(self, width: int) -> Int32Array:
        """See ``Target``: [vocab, width] int32. Built when asked for the first time for a model: a forward over its vocabulary.

        Raises:
            ValueError: ``width`` is not between 1 and the size of the vocabulary.
        """
        self._check_width(width)
        kept = min(max(width, _TABLE_WIDTH), self.vocab_size)
        context = "alone" if self._bos is None else f"bos{self._bos}"
        table = self._cached(
            f"bigram-{kept}-{context}",
            (self.vocab_size, kept),
            lambda: bigram_table(self._runner, self.vocab_size, kept, self._bos),
        )
        return np.ascontiguousarray(table[:, :width])

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``Target``: [width] int32.

        Raises:
            ValueError: ``width`` is not between 1 and the size of the vocabulary.
            ModelLoadError: the model's embeddings allow no such ranking.
        """
        self._check_width(width)
        ranking = self._cached("unigram", (self.vocab_size,), lambda: unigram_ranking(self._runner.model, self.vocab_size))
        return ranking[:width].copy()

    def step_seconds(self, rows: Sequence[int]) -> list[float]:
        """See ``Target``: the shortest of a few forwards behind a context of ``_CONTEXT`` tokens, or what fits.

        Rows are a root and branches of one token, under a mask, as in a step with a draft tree. The numbers of rows take turns,
        so that what else the machine does falls on all alike, and the shortest time is the one that it disturbed least. A few
        rounds are made, fewer where they take long. Each answer is kept: asked again, it is the same.

        Raises:
            ValueError: a number below 1, or more rows than a slot holds.
        """
        for count in rows:
            if not 1 <= count <= self._runner.cache.capacity:
                raise ValueError(f"rows must be between 1 and {self._runner.cache.capacity}, the size of a KV slot, got {count}")
        new = [count for count in dict.fromkeys(rows) if count not in self._seconds]
        if new:
            context = max(0, min(_CONTEXT, self.max_model_len - 2, self._runner.cache.capacity - max(new)))
            self._clear(context)
            self._seconds |= self._shortest({count: _star(count, context) for count in new})
        return [self._seconds[count] for count in rows]

    def _shortest(self, batches: Mapping[int, Batch]) -> dict[int, float]:
        for batch in batches.values():
            argmax_rows(self._runner.forward(batch))  # warm: memory is taken and kernels are chosen; the argmax waits for a GPU
        seconds = dict.fromkeys(batches, math.inf)
        begun = time.perf_counter()
        for done in range(_ROUNDS):
            if done >= _LEAST_ROUNDS and time.perf_counter() - begun > _TIMING_S:
                break
            for count, batch in batches.items():
                started = time.perf_counter()
                argmax_rows(self._runner.forward(batch))
                seconds[count] = min(seconds[count], time.perf_counter() - started)
        return seconds

    def _clear(self, length: int) -> None:
        """Zeroes the first entries of slot 0: unwritten memory may hold numbers that are slow to compute with."""
        keys, values = self._runner.cache.entries(0, length)
        for layer in range(len(keys)):
            self._runner.cache.write(layer, 0, 0, torch.zeros_like(keys[layer]), torch.zeros_like(values[layer]))

    def _check_width(self, width: int) -> None:
        if not 1 <= width <= self.vocab_size:
            raise ValueError(f"width must be between 1 and {self.vocab_size}, the size of the vocabulary, got {width}")

    def _cached(self, kind: str, shape: tuple[int, ...], build: Callable[[], Int32Array]) -> Int32Array:
        folder = cache_folder() if self._folder is None else self._folder
        return cached_table(folder, f"{self._revision}-{kind}", shape, self.vocab_size, build)


def _star(rows: int, context: int) -> Batch:
    """A root and ``rows - 1`` branches of one token behind ``context`` entries of slot 0."""
    parents = np.minimum(np.arange(-1, rows - 1, dtype=np.int32), 0)
    tree = DraftTree(np.zeros(rows, np.int32), parents, np.zeros(rows, np.int8), rows)
    mask = None if tree.is_chain else tree.ancestor_mask()
    positions = context + tree.depths().astype(np.int64)
    return Batch(np.zeros(rows, np.int64), positions, (Segment(0, context, 0, rows, mask),), np.arange(rows), (0,))


def _bos_token(tokenizer: PreTrainedTokenizerFast | None, wanted: bool | None) -> int | None:
    """The token that stands before each one in the bigram table, or None."""
    token = None if tokenizer is None else tokenizer.bos_token_id
    if wanted and token is None:
        raise ValueError("bos is asked for, but the tokenizer has no token for the beginning of a sequence")
    if token is None or wanted is False:
        return None
    if wanted is None and tokenizer is not None and tokenizer("a").input_ids[:1] != [token]:
        return None
    return int(token)
