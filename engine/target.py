"""The target model as drafters may ask it before the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from decoding.budget.latency import LatencyCurve
from decoding.jit import cache_folder
from decoding.tree import Int32Array
from engine.forward.batch import Work
from engine.forward.runner import ModelRunner
from engine.loading.model_info import ModelInfo
from engine.loading.model_tables import bigram_rows, bigram_table, cached_table, keep_table, kept_table, unigram_ranking
from engine.measures.calibration import CalibrationFile
from engine.measures.latency import glance
from engine.measures.live_curve import LiveCurve

_CHORE_ROWS = 64  # of a forward that somebody may come to wait for
_BETWEEN_TEXTS = "<|endoftext|>"  # as GPT-2's tokenizer has it, and those that came of it
_TABLE_WIDTH = 32  # tables are kept this wide, so that drafters that ask for less share one file


class LocalTarget:
    """The model of this process as ``decoding.drafters.base.Target``. Asked while no request has a slot: slots are written to."""

    def __init__(
        self,
        runner: ModelRunner,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerFast | None = None,
        folder: Path | None = None,
        chores: list[Iterator[None]] | None = None,
    ) -> None:
        """
        Args:
            runner: of the model.
            info: of it, too.
            tokenizer: None where there is none.
            folder: where tables and the latency curve are kept; the user's cache when absent.
            chores: where what takes long is put off to, a piece at a time; until it is done there are sensible values. All is
                done at once when absent.
        """
        self.vocab_size = info.vocab_size
        self.end_token_ids = info.eos_token_ids
        self.max_model_len = info.max_model_len
        self._runner, self._tokenizer = runner, tokenizer
        self._folder = cache_folder() if folder is None else folder
        self._before = _token_before(tokenizer, runner.model.config.get_text_config(), info)
        self._revision = f"{info.model_revision}-{info.tokenizer_revision}"
        self._info = info
        self._live: LiveCurve | None = None
        self._chores = chores

    def bigram_table(self, width: int) -> Int32Array:
        """See ``Target``: [vocab, width] int32. Built when asked for the first time for a model: a forward over its vocabulary.

        Raises:
            ValueError: ``width`` is not between 1 and the size of the vocabulary.
        """
        self._check_width(width)
        kept = min(max(width, _TABLE_WIDTH), self.vocab_size)
        context = "alone" if self._before is None else f"bos{self._before}"
        name, shape = f"{self._revision}-bigram-{kept}-{context}", (self.vocab_size, kept)
        if self._chores is None or kept_table(self._folder, name, shape, self.vocab_size) is not None:
            table = cached_table(
                self._folder, name, shape, self.vocab_size,
                lambda: bigram_table(self._runner, self.vocab_size, kept, self._before),
            )  # fmt: skip
            return np.ascontiguousarray(table[:, :width])
        given = np.zeros((self.vocab_size, width), np.int32)
        self._chores.append(self._fill_bigrams(name, np.empty(shape, np.int32), given))
        return given

    def _fill_bigrams(self, name: str, table: Int32Array, given: Int32Array) -> Iterator[None]:
        """Writes the table that was given before, a few tokens at a time."""
        kept = kept_table(self._folder, name, table.shape, self.vocab_size)  # who asked before may have had it made
        if kept is not None:
            given[:] = kept[:, : given.shape[1]]
            return
        for done in bigram_rows(self._runner, table, self._before, _CHORE_ROWS):
            given[:done] = table[:done, : given.shape[1]]
            yield
        keep_table(self._folder, name, table)

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
        """See ``Target``: as it was measured on this device before, or is now; a rough one until it is, where that is put off."""
        if self._live is None:
            file = CalibrationFile(self._folder, self._runner, self._info)
            curve = file.curve() if self._chores is None else file.kept()
            if curve is None and self._chores is not None:
                curve = glance(self._runner, self.max_model_len)
                self._chores.append(self._calibrate(file))
            assert curve is not None
            self._live = LiveCurve(curve)
        return self._live.curve

    def _calibrate(self, file: CalibrationFile) -> Iterator[None]:
        self._live = LiveCurve((yield from file.curve_in_pieces()))

    def stepped(self, works: Sequence[Work], seconds: float) -> None:
        """Has the curve, if anyone asked for it, follow a step that nobody else shared."""
        if self._live is not None:
            self._live.stepped(works, seconds)

    def _check_width(self, width: int) -> None:
        if not 1 <= width <= self.vocab_size:
            raise ValueError(f"width must be between 1 and {self.vocab_size}, the size of the vocabulary, got {width}")

    def _cached(self, kind: str, shape: tuple[int, ...], build: Callable[[], Int32Array]) -> Int32Array:
        return cached_table(self._folder, f"{self._revision}-{kind}", shape, self.vocab_size, build)


def _token_before(tokenizer: PreTrainedTokenizerFast | None, config: PreTrainedConfig, info: ModelInfo) -> int | None:
    """The token that stands before each in the bigram table; None where the model offers none.

    A trained model reads a token at position 0 as the beginning of a text, of which it says little: most models never saw another
    token there than one that begins or ends a text. So, of those that there are, the first of: the beginning of sequence that the
    tokenizer puts before a text, ``<|endoftext|>``, which stands between the texts that a model was trained on, the tokenizer's
    beginning of sequence though it does not add it, that of the model's configuration, and the end of a text.

    Example: SmolLM2-Instruct, whose tokenizer adds nothing, has ``<|endoftext|>`` before each token, and not its beginning of
    sequence ``<|im_start|>``, behind which it expects who speaks.
    """
    begins = None if tokenizer is None else tokenizer.bos_token_id
    added = tokenizer is not None and begins is not None and tokenizer("a").input_ids[:1] == [begins]
    between = None if tokenizer is None else tokenizer.get_added_vocab().get(_BETWEEN_TEXTS)
    offered = (begins if added else None, between, begins, getattr(config, "bos_token_id", None), *info.eos_token_ids)
    return next((int(token) for token in offered if isinstance(token, int) and 0 <= token < info.vocab_size), None)
