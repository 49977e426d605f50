"""Tables computed from the model alone (N-Grammys, arXiv 2411.03786, section 4.1), and their files."""

from __future__ import annotations

import io
import logging
import time
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from outrider.decoding.arrays import Int32Array
from outrider.decoding.private_files import open_private, save_file
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import Batch, SequenceRows
from outrider.engine.forward.runner import ModelRunner

logger = logging.getLogger(__name__)

_FORMAT = "1"  # part of every file name: raise it when a computation changes
_MAX_LOGITS = 2**25  # per forward: 128 MiB in float32
_MAX_ROWS = 512  # tokens per forward
_EMBEDDING_ROWS = 8192  # rows converted at once


class TableProgress:
    """Progress log of work that takes more than two seconds, a line every five seconds."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._clock = what, total, clock
        self._started = clock()
        self._next = self._started + 2.0

    def update(self, done: int) -> None:
        """Log the progress if a line is due."""
        now = self._clock()
        if now < self._next or done == 0:
            return
        self._next = now + 5.0
        left_s = (now - self._started) / done * (self._total - done)
        # A warning, so that a slow start shows on stderr even without logging configured.
        logger.warning("%s: %d %% done, about %.0f s left", self._what, 100 * done // self._total, left_s)


def cached_table(folder: Path, name: str, shape: tuple[int, ...], limit: int, build: Callable[[], Int32Array]) -> Int32Array:
    """Return a table [``shape``] int32 from its file, or build and store it; ``name`` must identify all its inputs."""
    table = load_table(folder, name, shape, limit)
    if table is None:
        table = _checked(build(), shape, limit)
        save_table(folder, name, table)
    return table


def load_table(folder: Path, name: str, shape: tuple[int, ...], limit: int) -> Int32Array | None:
    """Return a table from its file, see ``cached_table``; None if it has to be built."""
    path = _path(folder, name)
    try:
        # Mapped: a damaged header cannot allocate more than the file's length, and object arrays are refused.
        with open_private(path):
            return _checked(np.array(np.lib.format.open_memmap(path, mode="r")), shape, limit)
    except FileNotFoundError:
        logger.debug("no table at %s yet", path)
    except (OSError, ValueError, EOFError, tokenize.TokenError) as error:
        logger.warning("the table at %s cannot be used and is rebuilt: %s", path, error)
    return None


def save_table(folder: Path, name: str, table: Int32Array) -> None:
    """Write the file of a table, see ``cached_table``."""
    try:
        written = io.BytesIO()
        np.save(written, table, allow_pickle=False)
        save_file(_path(folder, name), written.getbuffer())
    except OSError as error:
        logger.warning("a table could not be saved and will be rebuilt at the next start: %s", error)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}-v{_FORMAT}.npy"


def _checked(table: npt.NDArray[np.int32], shape: tuple[int, ...], limit: int) -> Int32Array:
    # A wrong table only costs speed. So a file is used if its name, shape, type and range are right, and otherwise built again.
    if table.dtype != np.int32 or table.shape != shape:
        raise ValueError(f"expected int32 {shape}, got {table.dtype} {table.shape}")
    if table.size and not (table.min() >= 0 and table.max() < limit):
        raise ValueError(f"entries must be between 0 and {limit - 1}, got {table.min()} to {table.max()}")
    return table


def bigram_table(runner: ModelRunner, vocab_size: int, width: int, bos: int | None) -> Int32Array:
    """Build the table of ``bigram_rows`` at once: [vocab_size, width] int32, the most likely first."""
    table = np.empty((vocab_size, width), np.int32)
    progress = TableProgress(f"building the table of bigrams of {type(runner.model).__name__}", vocab_size)
    for done in bigram_rows(runner, table, bos):
        progress.update(done)
    return table


def bigram_rows(runner: ModelRunner, table: Int32Array, bos: int | None, most_rows: int = _MAX_ROWS) -> Iterator[int]:
    """Fill a table of the most likely next tokens after each token, or after ``bos`` and the token.

    Example: with ``bos`` = 1, the rows ``1 a b c`` at the positions 0 1 1 1 give what follows ``1 a``, ``1 b`` and ``1 c``.

    Args:
        runner: its slot 0 is overwritten.
        table: [vocab_size, width] int32, filled with the most likely first; ``width`` is at most ``vocab_size``.

    Yields:
        The number of tokens done, after each forward of at most ``most_rows``.
    """
    vocab_size, width = table.shape
    first = 0 if bos is None else 1
    rows = min(most_rows, _MAX_LOGITS // vocab_size, runner.cache.capacity - first)
    if runner.fixed_rows is not None and rows >= runner.fixed_rows:  # fill whole forwards, with the row of ``bos``
        rows = rows // runner.fixed_rows * runner.fixed_rows - first
    rows = max(1, rows)
    for start in range(0, vocab_size, rows):
        tokens = np.arange(start, min(start + rows, vocab_size))
        runner.cache.prefixes.cut(0, 0)
        logits = runner.forward(_apart(tokens, bos))
        table[tokens] = torch.topk(logits.float(), width, dim=-1).indices.to("cpu", torch.int32).numpy()
        yield start + len(tokens)


def _apart(tokens: npt.NDArray[np.int64], bos: int | None) -> Batch:
    """Return a batch of rows that see only themselves and ``bos``, whose own logits are not computed."""
    first = 0 if bos is None else 1
    mask = np.eye(first + len(tokens), dtype=np.bool_)
    mask[:, :first] = True
    ids = tokens if bos is None else np.concatenate([[bos], tokens])
    positions = np.full(len(ids), first, np.int64)
    positions[:first] = 0
    parents = np.full(len(tokens), -1, np.int32)  # each row is a separate root
    return Batch(ids, positions, (SequenceRows(0, 0, 0, len(ids), mask, (), parents),), np.arange(first, len(ids)), (0,))


def unigram_distances(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return [vocab] squared distances of the output embeddings to their mean, in the metric of the input embeddings.

    ``d(x)^2 = (u_x - mean) S (u_x - mean)`` with ``S = V^T V``: tokens are near the mean if they change the logits alike whatever
    token comes before. (The paper's listing ranks by ``mean S u_x``, another quantity; its text is followed here.)

    Example: V = the identity, U = [[0, 0], [2, 0], [1, 3]] has the mean [1, 1] and the squared distances 2, 2 and 4.

    Args:
        inputs: V, [vocab, d] input embeddings.
        outputs: U, [vocab, d] output embeddings. The result has their type, float32 at least.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    covariance = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=dtype, device=inputs.device)
    for part in inputs.split(_EMBEDDING_ROWS):  # in parts, to save memory
        covariance += part.to(dtype).T @ part.to(dtype)
    covariance = covariance.to(outputs.device)
    mean = sum(part.to(dtype).sum(0) for part in outputs.split(_EMBEDDING_ROWS)) / len(outputs)
    distances = []
    for part in outputs.split(_EMBEDDING_ROWS):
        centred = part.to(dtype) - mean
        distances.append(((centred @ covariance) * centred).sum(-1))
    return torch.cat(distances)


@torch.inference_mode()
def unigram_ranking(model: PreTrainedModel, vocab_size: int) -> Int32Array:
    """Return [vocab_size] int32 tokens by ``unigram_distances``, ties by id. Raises ``ModelLoadError`` if widths differ."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs is None or outputs is None or inputs.weight.shape[1] != outputs.weight.shape[1]:
        raise ModelLoadError(
            f"{type(model).__name__} has no unigram ranking, because its input and output embeddings differ in width: "
            "choose another strategy, or a bigram table with as many columns as rows"
        )
    distances = unigram_distances(inputs.weight[:vocab_size], outputs.weight[:vocab_size])
    ranking: Int32Array = torch.argsort(distances, stable=True).to("cpu", torch.int32).numpy()
    return ranking
