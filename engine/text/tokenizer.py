"""The tokenizer of a model, which a process without a model can have, too: nothing here imports torch."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING

from engine.errors import ModelLoadError, first_line
from engine.loading.model_files import find_tokenizer, is_gguf, refuse_missing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_LONG = 1 << 14  # characters


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model.

    Raises:
        ModelLoadError: there is none, or it has no fast implementation, which streaming text needs.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    refuse_missing_folder(path)
    files = find_tokenizer(path)
    try:
        if is_gguf(files):
            from engine.loading.weights.gguf import load_gguf_tokenizer

            tokenizer = load_gguf_tokenizer(files)
        else:
            tokenizer = AutoTokenizer.from_pretrained(files)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the tokenizer of {path!r} could not be loaded: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(f"the tokenizer of {path!r} has no fast implementation: add a tokenizer.json to the model")
    return tokenizer


def load_tokenizer_alone(path: str) -> PreTrainedTokenizerFast:
    """The same tokenizer for a process that has no model: transformers is imported as on a machine without torch.

    That leaves torch's memory out of it. It is for processes that do nothing else with transformers; where that was imported
    before, and for a GGUF file, whose tokenizer transformers reads with the model's tools, this is ``load_tokenizer``.
    """
    if is_gguf(find_tokenizer(path)) or "torch" in sys.modules:
        return load_tokenizer(path)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment] # Python's way to say that a module cannot be imported
    try:
        return load_tokenizer(path)
    finally:
        del sys.modules["torch"]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> list[int]:
    """Return the ids that ``tokenizer.encode`` gives. Of a long text no offsets are computed: that halves the memory it takes."""
    if len(text) < _LONG:
        return list(tokenizer.encode(text, add_special_tokens=special_tokens))
    tokenizer.encode("")  # has the tokenizer behind it set as for this text: without truncation and padding
    (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
    ids: list[int] = encoding.ids
    return ids


def tokenizer_revision(tokenizer: PreTrainedTokenizerFast | None) -> str:
    """32 hexadecimal digits that stand for what the tokenizer makes of a text; the same digits for all models without one."""
    text = "" if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
