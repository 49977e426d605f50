"""Tokenizer of a model, also for processes without a model: this module does not import torch."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING

from outrider.engine.errors import ModelLoadError, first_line
from outrider.engine.library_imports import unbounded_caches
from outrider.engine.loading.model_files import find_tokenizer, is_gguf, refuse_missing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_LONG = 1 << 14  # characters


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model. Raises ``ModelLoadError`` if that fails or it has no fast implementation."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    refuse_missing_folder(path)
    files = find_tokenizer(path)
    try:
        if is_gguf(files):
            from outrider.engine.loading.weights.gguf import load_gguf_tokenizer

            tokenizer = load_gguf_tokenizer(files)
        else:
            tokenizer = AutoTokenizer.from_pretrained(files)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the tokenizer of {path!r} could not be loaded: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):  # which streaming text needs
        raise ModelLoadError(f"the tokenizer of {path!r} has no fast implementation: add a tokenizer.json to the model")
    return tokenizer


def load_tokenizer_alone(path: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer in a process that does nothing else with transformers, hiding torch, if not imported, to save memory."""
    if is_gguf(find_tokenizer(path)) or "torch" in sys.modules:
        return load_tokenizer(path)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silence the warning that torch is missing
    sys.modules["torch"] = None  # type: ignore[assignment] # makes ``import torch`` fail
    try:
        with unbounded_caches():
            return load_tokenizer(path)
    finally:
        del sys.modules["torch"]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> list[int]:
    """Return the ids of ``tokenizer.encode``. For a long text no offsets are computed, which halves the memory."""
    if len(text) < _LONG:
        return list(tokenizer.encode(text, add_special_tokens=special_tokens))
    tokenizer.encode("")  # turns truncation and padding of the backend off
    (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
    ids: list[int] = encoding.ids
    return ids


def tokenizer_revision(tokenizer: PreTrainedTokenizerFast | None) -> str:
    """Return 32 hexadecimal digits that identify the tokenizer's behaviour; the same digits for all models without one."""
    text = "" if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
