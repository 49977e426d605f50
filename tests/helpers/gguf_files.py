"""Tiny GGUF files, as llama.cpp's converter writes them, and wheels with such a file in them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.engine.loading.model_files import PackagedModel
from outrider.experiments.peers.gguf_file import describe_llama, llama_tensors
from tests.helpers.models import END

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def save_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: Path | str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    without: str = "",
    with_tokenizer: bool = True,
) -> Path:
    """A Llama as a GGUF file.

    Args:
        path: of the file.
        model: in float32.
        tokenizer: folder with a byte-level ``tokenizer.json``.
        kind: of the matrices.
        architecture: that the file claims.
        extra: further metadata; numbers and strings.
        tensors: further ones.
        without: a part of the names of tensors that are left out.
        with_tokenizer: the file holds one.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    describe_llama(writer, model.config)
    if with_tokenizer:
        _add_tokenizer(writer, Path(tokenizer))
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, weight in llama_tensors(model):
        if not without or without not in name:
            matrix = weight.ndim == 2 and kind != gguf.GGMLQuantizationType.F32
            data = gguf.quantize(weight, kind) if matrix else weight
            writer.add_tensor(name, data, raw_dtype=kind if matrix else None)
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_weights(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    """Gives the matrices the values that they have after quantization. Rows keep theirs wherever they stand."""
    for weight in model.parameters():
        if weight.ndim == 2:
            values = gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind)
            weight.data = torch.from_numpy(np.array(values))


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token == END else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]])
    writer.add_eos_token_id(tokens.index(END))
    writer.add_chat_template(TEMPLATE)


def wheel_of(folder: Path, file: Path, package: str = "tiny-model", version: str = "1.0") -> PackagedModel:
    """A wheel that pip takes, with a file in it, and what is known of it."""
    stem = package.replace("-", "_")
    path, info = folder / f"{stem}-{version}-py3-none-any.whl", f"{stem}-{version}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: no-such-package\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": "Apache License\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(name, text)
        wheel.write(file, f"{stem}/model.gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return PackagedModel(
        package=package, version=version, wheel=path.name, sha256=digest, wheel_bytes=path.stat().st_size,
        gguf=f"{stem}/model.gguf", licence_file=f"{info}/LICENSE", licence="Apache-2.0", origin="somebody/tiny",
        folder_bytes=2**20,
    )  # fmt: skip
