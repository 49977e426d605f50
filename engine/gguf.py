"""Models in a ``.gguf`` file, as llama.cpp takes them: weights, tokenizer and chat template, all out of the one file.

transformers reads them, dequantized: what runs is an ordinary model in the type that was asked for. It wants a folder beside the
file and takes what lies there (a ``tokenizer.json``, an adapter) for the model's; here it gets an empty one.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from engine.errors import ModelLoadError, first_line

_PACKAGES = ("gguf", "accelerate")  # by which transformers reads such files


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file, there or not."""
    return path.endswith(".gguf") and not Path(path).expanduser().is_dir()


def load_gguf_config(path: str) -> PreTrainedConfig:
    """The configuration of the model in a file.

    Raises:
        ModelLoadError: no such file, a broken or incomplete one, or an architecture that transformers does not know.
    """
    _check_file(path)
    with _readable(path, "model"), tempfile.TemporaryDirectory() as empty:
        config: PreTrainedConfig = AutoConfig.from_pretrained(empty, gguf_file=_absolute(path))
    return config


def load_gguf_model(path: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model in a file, dequantized.

    Its end tokens are the file's end of sequence and, where it names one, end of turn.

    Args:
        path: of the file.
        dtype: of the weights, once dequantized.
        attention: transformers' ``attn_implementation``.

    Raises:
        ModelLoadError: as ``load_gguf_config``, or weights are missing.
    """
    metadata = _check_file(path)
    with _readable(path, "model"), tempfile.TemporaryDirectory() as empty:
        from transformers import GgufConfig

        model, found = AutoModelForCausalLM.from_pretrained(
            empty, gguf_file=_absolute(path), dtype=dtype, attn_implementation=attention, output_loading_info=True,
            quantization_config=GgufConfig(dequantize=True),
        )  # fmt: skip
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would have them random
        raise ModelLoadError(f"model {path!r} lacks {len(missing)} of its weights, {missing[0]} among them: give a whole file")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = list(dict.fromkeys(number for number in ends if number is not None))
    if ids and isinstance(model.generation_config, GenerationConfig):
        model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else ids
    return model


def load_gguf_tokenizer(path: str) -> Any:
    """The tokenizer in a file, with its chat template.

    Raises:
        ModelLoadError: no such file, a broken one, or a tokenizer that transformers cannot make of it.
    """
    _check_file(path)
    with _readable(path, "the tokenizer of"), tempfile.TemporaryDirectory() as empty:
        return AutoTokenizer.from_pretrained(empty, gguf_file=_absolute(path))


def convert_gguf(path: Path, folder: Path) -> None:
    """Makes an ordinary folder of a file: weights in bfloat16, tokenizer, chat template.

    Raises:
        ModelLoadError: the file cannot be used.
        OSError: the folder cannot be written.
        safetensors.SafetensorError: the same.
    """
    load_gguf_model(str(path), torch.bfloat16, "sdpa").save_pretrained(folder)
    load_gguf_tokenizer(str(path)).save_pretrained(folder)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _check_file(path: str) -> dict[str, Any]:
    """What a file says of its model. Raises ``ModelLoadError`` unless it is there, whole, and as long as its header says."""
    if not Path(path).expanduser().is_file():
        raise ModelLoadError(f"model file {path!r} does not exist: give a .gguf file that is there, or a folder with config.json")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(f"model {path!r} is a GGUF file, to read which {missing[0]} is missing: pip install {missing[0]}")
    with _readable(path, "model"):
        from transformers.integrations.gguf import read_gguf_metadata

        metadata, _ = read_gguf_metadata(_absolute(path))
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise ModelLoadError(f"model {path!r} is one of {parts} parts: join them with llama.cpp's llama-gguf-split --merge")
    size, needed = Path(path).expanduser().stat().st_size, _needed_bytes(path)
    if size < needed:
        raise ModelLoadError(f"model {path!r} is cut off, {size} of {needed} bytes are there: fetch it again")
    return dict(metadata)


def _needed_bytes(path: str) -> int:
    """The length of a file by its header; 0 with a type whose size transformers' header does not know: reading tells then."""
    from transformers.integrations.gguf import GgufHeader

    try:
        header = GgufHeader.from_file(_absolute(path))
    except ValueError:
        return 0
    return int(header.data_start + max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0))


@contextmanager
def _readable(path: str, what: str) -> Iterator[None]:
    """Ends in ``ModelLoadError`` for whatever a file that is broken, or of another kind, leads to."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # it has no narrower type: lengths and names out of the file are taken as they come
        message = f"{what} {path!r} could not be read, it is broken or of an unknown kind"
        raise ModelLoadError(f"{message}: {first_line(error)}") from error
