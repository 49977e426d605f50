"""The target model as drafters may ask it before the first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from decoding.budget.latency import LatencyCurve
from decoding.jit import cache_folder
from decoding.tree import Int32Array
from engine.forward.runner import ModelRunner
from engine.loading.model import ModelInfo
from engine.loading.model_tables import bigram_table, cached_table, unigram_ranking
from engine.measures.calibration import CalibrationFile

_TABLE_WIDTH = 32  # tables are kept this wide, so that drafters that ask for less share one file


class LocalTarget:
    """The model of this process as ``decoding.drafters.base.Target``. Used while no request has a slot: slots are written to."""

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
            folder: where tables and the latency curve are kept; the user's cache when absent.
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
        self._info = info
        self._curve: LatencyCurve | None = None

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

    def latency(self) -> LatencyCurve:
        """See ``Target``: as it was measured on this device before, or is now. Asked again, it is the same."""
        if self._curve is None:
            self._curve = CalibrationFile(self._kept_in(), self._runner, self._info).curve()
        return self._curve

    def _check_width(self, width: int) -> None:
        if not 1 <= width <= self.vocab_size:
            raise ValueError(f"width must be between 1 and {self.vocab_size}, the size of the vocabulary, got {width}")

    def _cached(self, kind: str, shape: tuple[int, ...], build: Callable[[], Int32Array]) -> Int32Array:
        return cached_table(self._kept_in(), f"{self._revision}-{kind}", shape, self.vocab_size, build)

    def _kept_in(self) -> Path:
        return cache_folder() if self._folder is None else self._folder


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
