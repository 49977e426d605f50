"""Target model as drafters see it before the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.jit import cache_folder
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.loading.model_tables import bigram_rows, bigram_table, cached_table, load_table, save_table, unigram_ranking
from outrider.engine.measures.calibration import CalibrationFile
from outrider.engine.measures.latency import LiveCurve

_WARMUP_ROWS = 64  # rows of a deferred forward, small because a request may arrive and wait for it
_BETWEEN_TEXTS = "<|endoftext|>"  # in GPT-2's tokenizer and its descendants
_TABLE_WIDTH = 32  # least width on disk, so that drafters share one file


class LocalTarget:
    """The model of this process as ``decoding.drafters.base.Target``. It overwrites KV slots: use it while all are free."""

    def __init__(
        self,
        runner: ModelRunner,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerFast | None = None,
        folder: Path | None = None,
        warmup: list[Iterator[None]] | None = None,
    ) -> None:
        """Create the target of a runner. Tables and latency curve are stored in ``folder``, the user's cache folder if None."""
        self.vocab_size = info.vocab_size
        self.end_token_ids = info.eos_token_ids
        self.max_model_len = info.max_model_len
        self._runner, self._tokenizer = runner, tokenizer
        self._folder = cache_folder() if folder is None else folder
        self._before = _token_before(tokenizer, runner.model.config.get_text_config(), info)
        self._revision = f"{info.model_revision}-{info.tokenizer_revision}"
        self._info = info
        self._live: LiveCurve | None = None
        # Slow work is added to it as tasks that run in pieces, with approximate values until they are done; if None, it is done
        # at once.
        self._warmup = warmup

    def bigram_table(self, width: int) -> Int32Array:
        """Return the [vocab, width] int32 table of ``Target``, built on first use. Raises ``ValueError`` for a wrong width."""
        self._check_width(width)
        kept = min(max(width, _TABLE_WIDTH), self.vocab_size)
        context = "alone" if self._before is None else f"bos{self._before}"
        name, shape = f"{self._revision}-bigram-{kept}-{context}", (self.vocab_size, kept)
        if self._warmup is None or load_table(self._folder, name, shape, self.vocab_size) is not None:
            table = cached_table(
                self._folder, name, shape, self.vocab_size,
                lambda: bigram_table(self._runner, self.vocab_size, kept, self._before),
            )  # fmt: skip
            return np.ascontiguousarray(table[:, :width])
        given = np.zeros((self.vocab_size, width), np.int32)
        self._warmup.append(self._fill_bigrams(name, np.empty(shape, np.int32), given))
        return given

    def _fill_bigrams(self, name: str, table: Int32Array, given: Int32Array) -> Iterator[None]:
        """Fill ``given``, the zeros returned earlier, in place, a few tokens at a time."""
        kept = load_table(self._folder, name, table.shape, self.vocab_size)  # an earlier task may have built it
        if kept is not None:
            given[:] = kept[:, : given.shape[1]]
            return
        for done in bigram_rows(self._runner, table, self._before, _WARMUP_ROWS):
            given[:done] = table[:done, : given.shape[1]]
            yield
        save_table(self._folder, name, table)

    def unigram_ranking(self, width: int) -> Int32Array:
        """Return the [width] int32 ranking of ``Target``. Raises ``ValueError`` (width) or ``ModelLoadError`` (embeddings)."""
        self._check_width(width)
        ranking = self._cached("unigram", (self.vocab_size,), lambda: unigram_ranking(self._runner.model, self.vocab_size))
        return ranking[:width].copy()

    def latency(self) -> LatencyCurve:
        """Return the latency curve, from disk or measured now; a rough one first if measuring is deferred. See ``Target``."""
        if self._live is None and self._runner.emulated is not None:
            self._live = LiveCurve(self._runner.emulated.roofline.curve())
        if self._live is None:
            file = CalibrationFile(self._folder, self._runner, self._info)
            curve = file.curve() if self._warmup is None else file.cached()
            if curve is None and self._warmup is not None:
                curve = CalibrationFile(self._folder, self._runner, self._info, rough=True).curve()
                self._warmup.append(self._calibrate(file))
            assert curve is not None
            self._live = LiveCurve(curve)
        return self._live.curve

    def _calibrate(self, file: CalibrationFile) -> Iterator[None]:
        self._live = LiveCurve((yield from file.curve_in_pieces()))

    def record_step(self, works: Sequence[ScheduledRequest], seconds: float) -> None:
        """Update the curve, if it is in use, with the time of a step that no other rank shared."""
        if self._live is not None:
            self._live.record_step(works, seconds)

    def _check_width(self, width: int) -> None:
        if not 1 <= width <= self.vocab_size:
            raise ValueError(f"width must be between 1 and {self.vocab_size}, the size of the vocabulary, got {width}")

    def _cached(self, kind: str, shape: tuple[int, ...], build: Callable[[], Int32Array]) -> Int32Array:
        return cached_table(self._folder, f"{self._revision}-{kind}", shape, self.vocab_size, build)


def _token_before(tokenizer: PreTrainedTokenizerFast | None, config: PreTrainedConfig, info: ModelInfo) -> int | None:
    """Return the token that stands before each token in the bigram table; None if the model has none.

    Example: SmolLM2-Instruct, whose tokenizer adds nothing, has ``<|endoftext|>`` before each token, and not ``<|im_start|>``.
    """
    begins = None if tokenizer is None else tokenizer.bos_token_id
    added = tokenizer is not None and begins is not None and tokenizer("a").input_ids[:1] == [begins]
    between = None if tokenizer is None else tokenizer.get_added_vocab().get(_BETWEEN_TEXTS)
    # A model predicts little from a lone token at position 0: most models saw only tokens there that begin or end a text, and
    # ``<|endoftext|>`` stands between the texts of their training data. The first that exists counts.
    offered = (begins if added else None, between, begins, getattr(config, "bos_token_id", None), *info.eos_token_ids)
    return next((int(token) for token in offered if isinstance(token, int) and 0 <= token < info.vocab_size), None)
