"""Tables computed from the model alone (N-Grammys, arXiv 2411.03786, section 4.1), and the folder that keeps them.

A table is a hint to a drafter: a wrong one costs speed and changes no output. So a file is believed when its name, shape, type
and range are right, and built again, with a warning, when they are not.
"""

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

from decoding.private_files import keep_file, open_private
from decoding.tree import Int32Array
from engine.errors import ModelLoadError
from engine.forward.batch import Batch, Segment
from engine.forward.runner import ModelRunner

logger = logging.getLogger(__name__)

_FORMAT = "1"  # part of every name: raise it when a table is computed otherwise
_MAX_LOGITS = 2**25  # logits of one forward: 128 MiB in float32
_MAX_ROWS = 512  # tokens of one forward
_EMBEDDING_ROWS = 8192  # rows of an embedding that are converted at once


class TableProgress:
    """A line every few seconds for what takes longer than two."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """The line begins with what is being done, in so many steps."""
        self._what, self._total, self._clock = what, total, clock
        self._started = clock()
        self._next = self._started + 2.0

    def update(self, done: int) -> None:
        """Says how far it is, if it is time to."""
        now = self._clock()
        if now < self._next or done == 0:
            return
        self._next = now + 5.0
        left_s = (now - self._started) / done * (self._total - done)
        # A warning, so that it shows on stderr where nobody set up logging: a start that takes long is worth a line.
        logger.warning("%s: %d %% done, about %.0f s left", self._what, 100 * done // self._total, left_s)


def cached_table(folder: Path, name: str, shape: tuple[int, ...], limit: int, build: Callable[[], Int32Array]) -> Int32Array:
    """A table from its file, or built and kept there.

    Args:
        folder: is made when it does not exist. Where it cannot be written to, a warning says so, and the table is built again at
            the next start.
        name: of the file, without suffix; it must tell apart everything that the contents depend on.
        shape: the table must have.
        limit: entries are at least 0 and below it.
        build: makes the table.

    Returns:
        ``shape`` int32.
    """
    table = kept_table(folder, name, shape, limit)
    if table is None:
        table = _checked(build(), shape, limit)
        keep_table(folder, name, table)
    return table


def kept_table(folder: Path, name: str, shape: tuple[int, ...], limit: int) -> Int32Array | None:
    """A table from its file, see ``cached_table``; None where it has to be built."""
    path = _path(folder, name)
    try:
        # Mapped, so that a damaged header cannot ask for more memory than the file is long; an object array cannot be mapped.
        with open_private(path):
            return _checked(np.array(np.lib.format.open_memmap(path, mode="r")), shape, limit)
    except FileNotFoundError:
        logger.debug("no table at %s yet", path)
    except (OSError, ValueError, EOFError, tokenize.TokenError) as error:
        logger.warning("the table at %s cannot be used and is built again: %s", path, error)
    return None


def keep_table(folder: Path, name: str, table: Int32Array) -> None:
    """Writes the file of a table, see ``cached_table``."""
    try:
        written = io.BytesIO()
        np.save(written, table, allow_pickle=False)
        keep_file(_path(folder, name), written.getbuffer())
    except OSError as error:
        logger.warning("a table could not be kept and will be built again at the next start: %s", error)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}-v{_FORMAT}.npy"


def _checked(table: npt.NDArray[np.int32], shape: tuple[int, ...], limit: int) -> Int32Array:
    if table.dtype != np.int32 or table.shape != shape:
        raise ValueError(f"expected int32 {shape}, got {table.dtype} {table.shape}")
    if table.size and not (table.min() >= 0 and table.max() < limit):
        raise ValueError(f"entries must be between 0 and {limit - 1}, got {table.min()} to {table.max()}")
    return table


def bigram_table(runner: ModelRunner, vocab_size: int, width: int, bos: int | None) -> Int32Array:
    """The table of ``bigram_rows``, all at once.

    Returns:
        [vocab_size, width] int32, the most likely first.
    """
    table = np.empty((vocab_size, width), np.int32)
    progress = TableProgress(f"building the table of bigrams of {type(runner.model).__name__}", vocab_size)
    for done in bigram_rows(runner, table, bos):
        progress.update(done)
    return table


def bigram_rows(runner: ModelRunner, table: Int32Array, bos: int | None, most_rows: int = _MAX_ROWS) -> Iterator[int]:
    """Fills a table of the most likely next tokens after each token alone, or after the beginning of a sequence and the token.

    Many tokens are computed in one forward, as rows that do not see each other: all of them at position 0, or, with ``bos``, as
    branches below it.

    Example: with ``bos`` = 1, the rows ``1 a b c`` at the positions 0 1 1 1 give what follows ``1 a``, ``1 b`` and ``1 c``.

    Args:
        runner: slot 0 is written to.
        table: [vocab_size, width] int32 to be written, the most likely first; ``width`` is at most ``vocab_size``.
        bos: token that stands before each; None for the token alone.
        most_rows: of a forward.

    Yields:
        After each forward, how many tokens are done.
    """
    vocab_size, width = table.shape
    first = 0 if bos is None else 1
    rows = min(most_rows, _MAX_LOGITS // vocab_size, runner.cache.capacity - first)
    if runner.fixed_rows is not None and rows >= runner.fixed_rows:  # with the row of ``bos``, whole forwards
        rows = rows // runner.fixed_rows * runner.fixed_rows - first
    rows = max(1, rows)
    for start in range(0, vocab_size, rows):
        tokens = np.arange(start, min(start + rows, vocab_size))
        runner.cache.prefixes.cut(0, 0)
        logits = runner.forward(_apart(tokens, bos))
        table[tokens] = torch.topk(logits.float(), width, dim=-1).indices.to("cpu", torch.int32).numpy()
        yield start + len(tokens)


def _apart(tokens: npt.NDArray[np.int64], bos: int | None) -> Batch:
    """Rows that see themselves and ``bos`` only; its own logits are not wanted."""
    first = 0 if bos is None else 1
    mask = np.eye(first + len(tokens), dtype=np.bool_)
    mask[:, :first] = True
    ids = tokens if bos is None else np.concatenate([[bos], tokens])
    positions = np.full(len(ids), first, np.int64)
    positions[:first] = 0
    parents = np.full(len(tokens), -1, np.int32)  # each alone below what is before them
    return Batch(ids, positions, (Segment(0, 0, 0, len(ids), mask, (), parents),), np.arange(first, len(ids)), (0,))


def unigram_distances(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """How far each token's output embedding is from the mean of all, as the input embeddings measure it.

    ``d(x)^2 = (u_x - mean) S (u_x - mean)`` with ``S = V^T V``, so that tokens are near which change the logits alike whatever
    token comes before. (The paper's listing ranks by ``mean S u_x``, another quantity; its text is followed here.)

    Example: V = the identity, U = [[0, 0], [2, 0], [1, 3]] has the mean [1, 1] and the squared distances 2, 2 and 4.

    Args:
        inputs: V, [vocab, d] input embeddings.
        outputs: U, [vocab, d] output embeddings.

    Returns:
        [vocab] squared distances, float32, or float64 where the embeddings are. Converted some rows at a time: what comes on top
        of the embeddings is small.
    """
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    covariance = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=dtype, device=inputs.device)
    for part in inputs.split(_EMBEDDING_ROWS):
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
    """[vocab_size] int32: tokens by ``unigram_distances``, the nearest first, the lower id of equals.

    Raises:
        ModelLoadError: input and output embeddings are not of one width, or there are none.
    """
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs is None or outputs is None or inputs.weight.shape[1] != outputs.weight.shape[1]:
        raise ModelLoadError(
            f"{type(model).__name__} has no unigram ranking, since its input and output embeddings are not of one width: "
            "choose another strategy, or a bigram table as wide as there are rows"
        )
    distances = unigram_distances(inputs.weight[:vocab_size], outputs.weight[:vocab_size])
    ranking: Int32Array = torch.argsort(distances, stable=True).to("cpu", torch.int32).numpy()
    return ranking
