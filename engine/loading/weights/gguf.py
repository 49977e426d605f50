"""Models in a ``.gguf`` file of llama.cpp: weights, tokenizer and chat template, all from the one file."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from outrider.engine.cpu.block_formats import FORMATS
from outrider.engine.errors import ModelLoadError, first_line
from outrider.engine.library_imports import values_on_cpu, without_compiler
from outrider.engine.loading.weights.packing import keep_blocks, packable

logger = logging.getLogger(__name__)

_PACKAGES = ("gguf", "accelerate")  # needed by transformers to read GGUF files
# Pre-tokenizers by llama.cpp's names (llama-vocab.cpp): GPT-2's, and GPT-2's with single digits, which transformers ignores.
# transformers knows others by name.
_AS_GPT2 = {"default", "exaone4", "gpt-2", "jais", "mpt", "olmo", "phi-2", "trillion"}
_DIGITS_APART = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # default alignment of the tensors in bytes
_STRING, _LIST = 8, 9
_UNQUANTIZED = {"F16", "F32", "F64", "BF16"}
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # ``struct`` formats


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a GGUF file (github.com/ggml-org/ggml, docs/gguf.md), read fast and with checks for truncated and split files."""

    metadata: dict[str, Any]  # single values, and lengths of lists, by key
    tensors: dict[str, int]  # number of elements by name
    kinds: dict[str, str]  # ggml's names of the types, by tensor name
    file_bytes: int  # least size of a complete file


def load_gguf_config(path: str) -> PreTrainedConfig:
    """Load the configuration of the model in a file. Raises ``ModelLoadError`` if the file is broken or not supported."""
    _header(path)
    # From an empty folder, because transformers would use files beside the file for the model.
    with _readable(path, "model"), tempfile.TemporaryDirectory() as empty:
        config: PreTrainedConfig = AutoConfig.from_pretrained(empty, gguf_file=_absolute(path))
    return config


def load_gguf_model(path: str, dtype: torch.dtype, attention: str, packed: bool = False) -> PreTrainedModel:
    """Load the model in a file. Its end tokens are the file's end of sequence and, if named, end of turn.

    Args:
        dtype: of the weights after dequantization.
        packed: keep matrices quantized where CPU kernels exist. Results are equal to the dequantized ones to the last bit.

    Raises:
        ModelLoadError: the file is broken or not supported, or weights are missing or left over.
    """
    header = _header(path)
    kept: dict[str, tuple[str, Any, Any]] = {}
    with _readable(path, "model"), _read_once(kept if packed else None), tempfile.TemporaryDirectory() as empty:
        from transformers import GgufConfig

        with without_compiler(), values_on_cpu():
            model, found = AutoModelForCausalLM.from_pretrained(
                empty, gguf_file=_absolute(path), dtype=dtype, attn_implementation=attention, output_loading_info=True,
                quantization_config=GgufConfig(dequantize=True),
            )  # fmt: skip
        if packed:
            try:
                keep_blocks(model, kept)
            except ModelLoadError as error:
                raise ModelLoadError(f"model {path!r} could not be read: {error}") from error
            _tell_unpacked(path, header, dtype)
    _refuse_unread(path, model, header, sorted(found["missing_keys"]))
    ends = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = list(dict.fromkeys(number for number in ends if number is not None))
    if ids:
        model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else ids
    model.config.architectures = [type(model).__name__]  # as in a folder converted from the file
    return model


def load_gguf_tokenizer(path: str) -> Any:
    """Load the tokenizer in a file, with its chat template. Raises ``ModelLoadError`` if it is broken or not supported."""
    header = _header(path)
    with _readable(path, "the tokenizer of"), tempfile.TemporaryDirectory() as empty:
        tokenizer = AutoTokenizer.from_pretrained(empty, gguf_file=_absolute(path))
        if header.metadata.get("tokenizer.ggml.model") == "gpt2":
            _cut_as_named(path, tokenizer.backend_tokenizer, header.metadata.get("tokenizer.ggml.pre", "default"))
    return tokenizer


def _cut_as_named(path: str, tokenizer: Tokenizer, name: str) -> None:
    """Set the pre-tokenizer that the file names. Raises ``ModelLoadError`` if it is unknown.

    Example: before a 2, two line breaks are one token for SmolLM2; with GPT-2's way alone they would be two.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if name in _DIGITS_APART:
        apart = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, tokenizer.pre_tokenizer])
    elif name not in _AS_GPT2 and name not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelLoadError(
            f"the tokenizer of {path!r} uses an unknown pre-tokenizer ({name}): give the model's folder with tokenizer.json"
        )


def convert_gguf(path: Path, folder: Path) -> None:
    """Convert a file to an ordinary folder: weights in bfloat16, tokenizer, chat template. Raises ``ModelLoadError``."""
    # transformers would import torch's compiler, which takes seconds, to ask whether the model is compiled.
    with _read_once(), mock.patch("transformers.modeling_utils.unwrap_model", lambda model, **_: model):
        load_gguf_model(str(path), torch.bfloat16, "sdpa").save_pretrained(folder)
        load_gguf_tokenizer(str(path)).save_pretrained(folder)


@contextmanager
def _read_once(kept: dict[str, tuple[str, Any, Any]] | None = None) -> Iterator[None]:
    """Patch transformers to read a file once, and to draw its progress bar on a terminal only."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(reading, "tqdm", partial(reading.tqdm, disable=None)))
        # It reads the file for configuration, weights and tokenizer, seconds each, and maps all names again for each module.
        if isinstance(gguf.GGUFReader, type):  # otherwise an outer block has patched it
            patched.enter_context(mock.patch.object(gguf, "GGUFReader", cache(_reader())))
            patched.enter_context(mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
            patched.enter_context(mock.patch.object(reading, "_gguf_parse_value", _parsed_once(reading._gguf_parse_value)))
        # ``kept`` receives matrices that can stay quantized, see ``keep_blocks``; if None, all are dequantized.
        if kept is not None:
            reads = partial(_read_tensors, reading.load_gguf_checkpoint, kept)
            patched.enter_context(mock.patch.object(reading, "load_gguf_checkpoint", reads))
        yield


def _reader() -> type[Any]:
    """Return a ``GGUFReader`` over a plain array, whose many slices are faster than those of a ``memmap``."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    return Reader


def _parsed_once(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that parses each value of a reader, which outlives it, once."""
    found: dict[int, Any] = {}

    def parsed(value: Any, kind: Any) -> Any:
        if id(value) not in found:
            found[id(value)] = parse(value, kind)
        return found[id(value)]

    return parsed


def _read_tensors(
    read: Callable[..., dict[str, Any]],
    kept: dict[str, tuple[str, Any, Any]],
    path: str,
    return_tensors: bool = False,
    model_to_load: PreTrainedModel | None = None,
    torch_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Replace transformers' ``load_gguf_checkpoint``: read one tensor at a time; those that stay quantized take no memory."""
    from gguf import GGUFReader, dequantize
    from transformers import modeling_gguf_pytorch_utils as reading

    found = read(path, return_tensors=False)
    if not return_tensors:
        return found
    assert model_to_load is not None
    reader = GGUFReader(path)
    architecture = reading.read_field(reader, "general.architecture")[0]
    processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=found["config"])
    names, allowed = reading.get_gguf_hf_weights_map(model_to_load, processor), packable(model_to_load)
    tensors = found["tensors"] = {}

    def processed(numbers: Any, name: str) -> Any:
        return processor.process(weights=numbers, name=name, tensor_key_mapping=names, parsed_parameters=found)

    for tensor in reader.tensors:
        if tensor.tensor_type.name in FORMATS and names.get(tensor.name) in allowed:
            size, rows = (int(number) for number in tensor.shape)
            # Processing the row numbers instead of the tensor shows whether it only permutes rows.
            order = processed(np.arange(rows, dtype=np.int64)[:, None], tensor.name)
            if order.weights.shape == (rows, 1) and (np.sort(order.weights[:, 0]) == np.arange(rows)).all():
                name = names[order.name]
                kept[name] = tensor.tensor_type.name, tensor.data, order.weights[:, 0]
                tensors[name] = torch.empty((), dtype=torch_dtype).expand(rows, size)
                continue
        done = processed(dequantize(tensor.data, tensor.tensor_type), tensor.name)
        if done.name in names:
            tensors[names[done.name]] = torch.from_numpy(np.copy(done.weights)).to(torch_dtype)
    return found


def _tell_unpacked(path: str, header: GgufHeader, dtype: torch.dtype) -> None:
    """Warn if weights in quantized formats without kernels are dequantized."""
    others = sorted({kind for kind in header.kinds.values() if kind not in FORMATS and kind not in _UNQUANTIZED})
    if others:
        held = str(dtype).removeprefix("torch.")
        logger.warning("%s: weights in %s are stored as %s, for which there are no kernels", path, ", ".join(others), held)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _header(path: str) -> GgufHeader:
    """Return a file's header. Raises ``ModelLoadError`` if it is missing, incomplete or not supported."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelLoadError(f"model file {path!r} does not exist: give an existing .gguf file, or a folder with config.json")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(f"model {path!r} is a GGUF file, which requires {missing[0]}: pip install {missing[0]}")
    with _readable(path, "model"):
        header = read_header(file)
    parts, size = header.metadata.get("split.count", 1), file.stat().st_size
    if parts > 1:
        raise ModelLoadError(f"model {path!r} is one of {parts} parts: join them with llama.cpp's llama-gguf-split --merge")
    if size < header.file_bytes:
        raise ModelLoadError(f"model {path!r} is truncated ({size} of {header.file_bytes} bytes): download it again")
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise ModelLoadError(f"model {path!r} has no tokenizer: give a file with one, or a folder with config.json")
    if _scales_positions(header):
        raise ModelLoadError(
            f"model {path!r} uses rope scaling, which transformers ignores in GGUF files, so that outputs would "
            "differ: give the model's folder with config.json"
        )
    return header


def _scales_positions(header: GgufHeader) -> bool:
    """Return whether rotary positions are scaled: by factors per frequency, as in Llama 3.1 and Phi-3, or by a rule."""
    architecture = header.metadata.get("general.architecture")
    rule = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    by_rule = rule != "none" and architecture != "gpt-oss"  # transformers reads the rule for gpt-oss
    return by_rule or any(name.startswith(("rope_freqs", "rope_factors")) for name in header.tensors)


def _refuse_unread(path: str, model: PreTrainedModel, header: GgufHeader, lacking: list[str]) -> None:
    """Raise ``ModelLoadError`` unless all weights of the model are in the file, and all of the file in the model."""
    if lacking:  # transformers would initialize them randomly
        raise ModelLoadError(f"model {path!r} lacks {len(lacking)} of its weights, {lacking[0]} among them: give a whole file")
    tied = header.tensors.get("output.weight", 0) if model.config.get_text_config().tie_word_embeddings else 0
    held, taken = sum(header.tensors.values()) - tied, model.num_parameters()
    if held != taken:
        raise ModelLoadError(
            f"model {path!r} holds {held} weights, but transformers loads a {type(model).__name__} with {taken}: some are "
            "ignored, so that outputs would differ; give the model's folder with config.json"
        )


@contextmanager
def _readable(path: str, what: str) -> Iterator[None]:
    """Turn any error of reading a broken or unknown file into ``ModelLoadError``."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # unchecked lengths and names of the file can cause any error
        message = f"{what} {path!r} could not be read: it is corrupt or of an unknown format"
        raise ModelLoadError(f"{message}: {first_line(error)}") from error


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises ``OSError``; ``ValueError`` or ``struct.error`` for a broken file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_values = _take(file, "IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported: {' and '.join(map(str, _VERSIONS))}")
        metadata = {_string(file): _value(file, *_take(file, "I")) for _ in range(num_values)}
        tensors, kinds, end = {}, {}, 0
        for _ in range(num_tensors):
            name = _string(file)
            dims = _take(file, f"{_take(file, 'I')[0]}Q")
            kind, offset = _take(file, "IQ")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            tensors[name], kinds[name] = math.prod(dims), GGMLQuantizationType(kind).name
            if dims and dims[0] % block:
                raise ValueError(
                    f"{name} has rows of {dims[0]} numbers, which is not a multiple of the {kinds[name]} block size {block}"
                )
            end = max(end, offset + tensors[name] // block * block_bytes)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-file.tell() // alignment) * alignment
    return GgufHeader(metadata, tensors, kinds, start + end)


def _take(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = f"<{form}"
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: IO[bytes]) -> str:
    (length,) = _take(file, "Q")
    # A corrupt length must not allocate that much memory.
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError(f"a string in it has {length} bytes, more than the file")
    return file.read(length).decode()


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _LIST:
        return _take(file, _format(kind))[0]
    inner, length = _take(file, "IQ")
    if inner == _STRING:
        for _ in range(length):
            _string(file)
    else:
        # Only the length of a list is returned: its entries are skipped.
        file.seek(length * struct.calcsize(f"<{_format(inner)}"), os.SEEK_CUR)
    return length


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"it has a value of unknown type {kind}")
    return _FORMATS[kind]
