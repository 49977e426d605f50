"""Much text as token ids, to fill a trie with and to draw contexts from: a corpus, or a synthetic one where there is none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.cli.generate.known_texts import TextTokenizer
from cluster.cli.generate.prompt_file import PromptFileError
from decoding.tree import Int32Array

MAX_TOKENS = 512  # of a text; longer ones are cut into several
MIN_HELD_OUT = 64  # tokens of a text that is held out
HELD_OUT_EVERY = 20
CHANGED_SHARE = 0.05  # of the tokens, from the second showing of a text on
_SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")


@dataclass(frozen=True, slots=True)
class Texts:
    """What fills the trie, and what it never saw."""

    fill: list[Int32Array]
    held_out: list[Int32Array]
    vocab_size: int
    about: dict[str, Any]  # for the record


def corpus_texts(paths: Sequence[Path], tokenizer_folder: Path, tokens: int, seed: int) -> Texts:
    """Texts of files and folders: the ``text`` of each line of ``.jsonl`` and ``.jsonl.gz``, and whole ``.txt`` files.

    Where the corpus has too few tokens it is shown again, each time with some tokens replaced by others of the corpus.

    Raises:
        PromptFileError: a file or the tokenizer cannot be read, or the corpus is too small to hold texts out of it.
    """
    tokenizer = TextTokenizer(tokenizer_folder)
    files = [file for path in paths for file in _files(path)]
    pieces: list[Int32Array] = []
    total = 0
    for batch in _batches(text for file in files for text in _read(file)):
        for ids in tokenizer.encode(batch):
            pieces.extend(np.asarray(ids[at : at + MAX_TOKENS], np.int32) for at in range(0, len(ids), MAX_TOKENS))
            total += len(ids)
        if total > tokens * (1 + 2 / HELD_OUT_EVERY):
            break
    fill, held_out = _split([piece for piece in pieces if len(piece) > 1])
    if not held_out:
        raise PromptFileError(f"the corpus holds {total} tokens, too few to measure on: give more files")
    fill, shown = _repeated(fill, tokens, np.random.default_rng(seed))
    return Texts(fill, held_out, tokenizer.vocab_size, {"kind": "corpus", "files": len(files), "shown": round(shown, 2)})


def _split(pieces: Sequence[Int32Array]) -> tuple[list[Int32Array], list[Int32Array]]:
    """The texts to fill with, and those that are long enough of every so many."""
    fill = [piece for number, piece in enumerate(pieces) if number % HELD_OUT_EVERY]
    return fill, [piece for piece in pieces[::HELD_OUT_EVERY] if len(piece) >= MIN_HELD_OUT]


def _repeated(texts: list[Int32Array], tokens: int, rng: np.random.Generator) -> tuple[list[Int32Array], float]:
    """Exactly so many tokens, and how often the texts are shown for it."""
    given = sum(len(text) for text in texts)
    words, filled, total, at = np.concatenate(texts), [], 0, 0
    while total < tokens:
        text = texts[at % len(texts)][: tokens - total]
        if at >= len(texts):
            changed = rng.random(len(text)) < CHANGED_SHARE
            text = np.where(changed, words[rng.integers(0, len(words), len(text))], text).astype(np.int32)
        filled.append(text)
        total += len(text)
        at += 1
    return filled, total / given


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not found:
        raise PromptFileError(f"corpus {str(path)!r} holds no {', '.join(_SUFFIXES)} file")
    return found


def _read(path: Path) -> Iterator[str]:
    try:
        if path.name.endswith(".txt"):
            yield path.read_text(encoding="utf-8")
            return
        with gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise PromptFileError(f"{path} could not be read as texts, one JSON object with 'text' a line: {error!r}") from error


def _batches(texts: Iterator[str], size: int = 512) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
