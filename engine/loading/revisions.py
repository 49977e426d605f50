"""Fingerprints of a model and a tokenizer: names of tables on disk, and of shared memory."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_HASH_WHOLE_BYTES = 2**26  # weights up to this size are hashed whole, in a fraction of a second; larger ones are sampled
_SAMPLES = 4096  # elements of each larger tensor that are hashed


def model_revision(model: PreTrainedModel) -> str:
    """32 hexadecimal digits that stand for the weights and the configuration.

    Names, types and shapes of all weights count, and their contents: whole up to ``_HASH_WHOLE_BYTES``, of larger models evenly
    spaced elements of each tensor.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # where it came from is not what it is
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    whole = sum(tensor.nbytes for tensor in model.parameters()) <= _HASH_WHOLE_BYTES
    for name, tensor in model.named_parameters():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        chosen = flat if whole else flat[:: max(1, len(flat) // _SAMPLES)]
        digest.update(chosen.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def tokenizer_revision(tokenizer: PreTrainedTokenizerFast | None) -> str:
    """32 hexadecimal digits that stand for what the tokenizer makes of a text; the same digits for all models without one."""
    text = "" if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
