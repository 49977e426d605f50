"""The header of a GGUF file (github.com/ggml-org/ggml, docs/gguf.md): what it says of its model, and which tensors it holds.

It is read in a few hundredths of a second, where transformers and the package ``gguf`` take seconds, and before they take a file
that is cut off, or a part of a model, for a model.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of the tensors, where the file says nothing
_STRING, _LIST = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of single values


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the weights."""

    metadata: dict[str, Any]  # single values by key; of lists their lengths
    tensors: dict[str, int]  # elements by name
    file_bytes: int  # that a whole file has at least


def read_header(path: Path) -> GgufHeader:
    """The header of a file.

    Raises:
        OSError: it cannot be read.
        ValueError, struct.error: it is not a GGUF file, or a broken one.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_values = _take(file, "IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and {' and '.join(map(str, _VERSIONS))} are known")
        metadata = {_string(file): _value(file, *_take(file, "I")) for _ in range(num_values)}
        tensors, end = {}, 0
        for _ in range(num_tensors):
            name = _string(file)
            dims = _take(file, f"{_take(file, 'I')[0]}Q")
            kind, offset = _take(file, "IQ")
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            tensors[name] = math.prod(dims)
            end = max(end, offset + tensors[name] // block * block_bytes)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-file.tell() // alignment) * alignment
    return GgufHeader(metadata, tensors, start + end)


def _take(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = f"<{form}"
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: IO[bytes]) -> str:
    (length,) = _take(file, "Q")
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
        file.seek(length * struct.calcsize(f"<{_format(inner)}"), os.SEEK_CUR)
    return length


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"a value in it is of type {kind}, which is not known")
    return _FORMATS[kind]
