"""Workloads with known outputs as token ids, read with the fast tokenizer alone; GGUF files also need transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outrider.decoding.replay import KnownText


class TextTokenizer:
    """Fast tokenizer, and the token that ends a text."""

    def __init__(self, path: Path) -> None:
        """Load from a GGUF file, a model name, or a folder with ``tokenizer.json``. Raises ``PromptFileError``."""
        from outrider.engine.errors import ModelLoadError
        from outrider.engine.loading.model_files import find_tokenizer

        try:
            files = find_tokenizer(str(path))
            self._tokenizer, end_token = _of_gguf(files) if files.endswith(".gguf") else _of_folder(Path(files))
        except ModelLoadError as error:
            raise PromptFileError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        size = self._tokenizer.get_vocab_size()
        end = self._tokenizer.token_to_id(end_token)
        self.end_token_id: int = size if end is None else end  # a new id if the folder names no end token
        self.vocab_size: int = max(size, self.end_token_id + 1)

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """Return the token ids of each text, with ``special_tokens`` including the tokenizer's beginning-of-text token."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=special_tokens)]


def _of_folder(folder: Path) -> tuple[Tokenizer, str]:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise PromptFileError(f"tokenizer {str(folder)!r} has no tokenizer.json: give a fast tokenizer's folder, or a .gguf file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise PromptFileError(f"{path} could not be read: {error}") from error
    return tokenizer, _end_token(folder / "tokenizer_config.json")


def _of_gguf(path: str) -> tuple[Tokenizer, str]:
    from outrider.engine.text.tokenizer import load_tokenizer  # imports transformers, which is slow

    tokenizer = load_tokenizer(path)
    return tokenizer.backend_tokenizer, tokenizer.eos_token or ""


def _end_token(config: Path) -> str:
    try:
        entry = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise PromptFileError(f"{config} could not be read: {error}") from error
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def read_known_texts(path: Path, tokenizer: TextTokenizer, max_tokens: int | None, limit: int | None = None) -> list[KnownText]:
    """Return up to ``limit`` records of a workload file, each with its output and one end token, cut to ``max_tokens``.

    Raises ``PromptFileError`` if the file cannot be read, or a record has no ``output`` or a prompt without tokens.
    """
    records = read_prompts(path)[:limit]
    for number, record in enumerate(records, start=1):
        if record.output is None:
            raise PromptFileError(f"{path}: record {number} ({record.id}) has no string `output`, which a replay follows")
    return known_texts(records, tokenizer, max_tokens)


def known_texts(records: Sequence[PromptRecord], tokenizer: TextTokenizer, max_tokens: int | None) -> list[KnownText]:
    """Tokenize records with outputs; see ``read_known_texts``."""
    from outrider.decoding.replay import KnownText

    prompts = tokenizer.encode([record.prompt for record in records], special_tokens=True)
    outputs = tokenizer.encode([record.output or "" for record in records])
    texts = []
    for record, prompt, output in zip(records, prompts, outputs, strict=True):
        if not prompt:
            raise PromptFileError(f"record {record.id}: the prompt holds no token")
        references = tuple(np.asarray(ids, np.int32) for ids in tokenizer.encode(record.references))
        known = np.asarray([*output, tokenizer.end_token_id][:max_tokens], np.int32)
        texts.append(KnownText(record.id, np.asarray(prompt, np.int32), references, known))
    return texts
