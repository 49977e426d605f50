"""Linear layers over weights as they lie in memory: every output has the same bits whatever rows are computed beside it.

A library's product takes another kernel for one row than for two, and adds up in another order. Here the numbers of a row and of
an output are multiplied lane by lane along the inner size, in its order, into one register, whose lanes are added up in one
fixed order at the end. How many rows and outputs share a tile decides only how often a weight is loaded.

Types: bfloat16 and float16, both with sums in float32, and float32. In bfloat16 processors with AVX512-BF16 multiply pairs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core.registry import cpu_target

from decoding.jit import compiled, compiled_callback
from engine.native.lanes import Generator, claim, primitive

FEATURES = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))  # of the processor that is compiled for
_PAIRS = "+avx512bf16" in FEATURES
_LANES = 16 if "+avx512f" in FEATURES else 8 if "+avx2" in FEATURES else 4  # float32 numbers of a register
_SUMS = 8 if _LANES == 8 else 16  # registers that hold sums: a processor with AVX2 has sixteen in all, the others 32
TILE_ROWS = 4
GROUP = _SUMS  # outputs of a tile of one row: the outputs of a layer must be so many at least
_COUNTER = 8  # int64 numbers from one counter to the next: they lie in cache lines of their own

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


class Linear(ctypes.Structure):
    """A layer's work. Addresses are those of the first element, strides count bytes; the numbers of a row lie side by side."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, size]
        ("input_stride", ctypes.c_int64),
        ("weight", ctypes.c_int64),  # [outputs, size]
        ("weight_stride", ctypes.c_int64),
        ("bias", ctypes.c_int64),  # [outputs] float32
        ("output", ctypes.c_int64),  # [rows, outputs]
        ("output_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("outputs", ctypes.c_int64),  # at least ``GROUP``
        ("threads", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # address of ``counters(threads)``, all 0
    )


def counters(threads: int) -> int:
    """How many int64 numbers count what so many threads have taken."""
    return _COUNTER * (threads + 1)


def _outputs_of(rows: int) -> int:
    """Outputs of a tile of so many rows."""
    return _SUMS // (rows if rows != 3 else 4)


class _Tile:
    """Code for the products of a few rows with a few outputs."""

    def __init__(self, builder: Any, like: Any, rows: int, addresses: dict[str, Any]) -> None:
        """
        Args:
            builder: of the function that calls.
            like: numba's type of the numbers: uint16 for bfloat16, int16 for float16, float32.
            rows: of the tile.
            addresses: ``input``, ``input_stride``, ``weight``, ``weight_stride``, ``size``, ``bias``, ``output``,
                ``output_stride`` as 64-bit integers.
        """
        self._builder, self._like, self._rows, self._outputs = builder, like, rows, _outputs_of(rows)
        self._at = addresses
        self._floats, self._ints = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_I32, _LANES)
        self._bytes = 4 if like == types.float32 else 2

    def emit(self) -> None:
        """Adds up the products, then writes them."""
        self._write(self._sums())

    def _sums(self) -> list[Any]:
        """A register for each row and output, row by row."""
        b, at = self._builder, self._at
        step = _LANES * (2 if self._like == types.uint16 else 1)  # numbers of a row that are read at once
        before, head, loop = (b.block, b.append_basic_block("head"), b.append_basic_block("products"))
        rest, after = b.append_basic_block("rest"), b.append_basic_block("sums")
        inputs = [b.add(at["input"], b.mul(at["input_stride"], _I64(row))) for row in range(self._rows)]
        weights = [b.add(at["weight"], b.mul(at["weight_stride"], _I64(output))) for output in range(self._outputs)]
        whole = b.and_(at["size"], _I64(-step))
        b.branch(head)
        b.position_at_end(head)
        place, sums = b.phi(_I64), [b.phi(self._floats) for _ in range(self._rows * self._outputs)]
        place.add_incoming(_I64(0), before)
        b.cbranch(b.icmp_signed("<", place, whole), loop, rest)
        b.position_at_end(loop)
        added = self._add(inputs, weights, place, sums, None)
        place.add_incoming(b.add(place, _I64(step)), loop)
        for one, new in zip(sums, added, strict=True):
            one.add_incoming(ir.Constant(self._floats, [0.0] * _LANES), before)
            one.add_incoming(new, loop)
        b.branch(head)
        b.position_at_end(rest)
        left = b.sub(at["size"], whole)
        last = b.append_basic_block("last")
        b.cbranch(b.icmp_signed(">", left, _I64(0)), last, after)
        b.position_at_end(last)
        added = self._add(inputs, weights, whole, sums, b.trunc(left, _I32))
        b.branch(after)
        b.position_at_end(after)
        found = [b.phi(self._floats) for _ in sums]
        for one, old, new in zip(found, sums, added, strict=True):
            one.add_incoming(old, rest)
            one.add_incoming(new, last)
        return found

    def _add(self, inputs: list[Any], weights: list[Any], place: Any, sums: list[Any], left: Any) -> list[Any]:
        """The sums with the products of the numbers from a place on; ``left`` numbers, or as many as a register has."""
        behind = self._builder.mul(place, _I64(self._bytes))
        rows = [self._load(self._builder.add(address, behind), left) for address in inputs]
        added = list(sums)
        for output, address in enumerate(weights):
            weight = self._load(self._builder.add(address, behind), left)
            for row, numbers in enumerate(rows):
                at_sum = row * self._outputs + output
                added[at_sum] = self._multiply_add(numbers, weight, sums[at_sum])
        return added

    def _load(self, address: Any, left: Any) -> tuple[Any, ...]:
        """The numbers at an address: one register of float32, or of pairs of bfloat16 as they are or as two registers."""
        b = self._builder
        if self._like == types.float32:
            return (self._read(address, self._floats, left),)
        if self._like == types.int16:
            halves = self._read(address, ir.VectorType(ir.IntType(16), _LANES), left)
            return (b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), _LANES)), self._floats),)
        pairs = b.bitcast(self._read(address, ir.VectorType(ir.IntType(16), 2 * _LANES), left), self._ints)
        if _PAIRS:
            return (pairs,)
        low = b.shl(pairs, ir.Constant(self._ints, [16] * _LANES))
        high = b.and_(pairs, ir.Constant(self._ints, [0xFFFF0000] * _LANES))
        return b.bitcast(low, self._floats), b.bitcast(high, self._floats)

    def _read(self, address: Any, kind: Any, left: Any) -> Any:
        """A vector at an address; with zeros behind the first ``left`` numbers, which are not read, where there are fewer."""
        b, pointer = self._builder, self._builder.inttoptr(address, kind.as_pointer())
        if left is None:
            return b.load(pointer, align=self._bytes)
        places = ir.VectorType(_I32, kind.count)
        undefined = ir.Constant(places, ir.Undefined)
        spread = b.shuffle_vector(b.insert_element(undefined, left, _I32(0)), undefined, ir.Constant(places, [0] * kind.count))
        there = b.icmp_signed("<", ir.Constant(places, list(range(kind.count))), spread)
        name = f"llvm.masked.load.v{kind.count}{'f32' if kind.element == _FLOAT else 'i16'}.p0"
        function = ir.FunctionType(kind, [pointer.type, _I32, there.type, kind])
        masked = b.module.declare_intrinsic(name, fnty=function)
        return b.call(masked, (pointer, _I32(self._bytes), there, ir.Constant(kind, [0] * kind.count)))

    def _multiply_add(self, left: tuple[Any, ...], right: tuple[Any, ...], addend: Any) -> Any:
        b = self._builder
        if self._like == types.uint16 and _PAIRS:
            name, arguments = "llvm.x86.avx512bf16.dpbf16ps.512", (self._floats, self._ints, self._ints)
            multiply = b.module.declare_intrinsic(name, fnty=ir.FunctionType(self._floats, arguments))
            return b.call(multiply, (addend, left[0], right[0]))
        kind = ir.FunctionType(self._floats, [self._floats] * 3)
        multiply = b.module.declare_intrinsic(f"llvm.fma.v{_LANES}f32", fnty=kind)
        for one, other in zip(left, right, strict=True):
            addend = b.call(multiply, (one, other, addend))
        return addend

    def _write(self, sums: list[Any]) -> None:
        """Adds up the lanes of each register, and writes the totals row by row."""
        b = self._builder
        sums = sums + [ir.Constant(self._floats, [0.0] * _LANES)] * (_SUMS - len(sums))
        totals = [self._totals(sums[first : first + _LANES]) for first in range(0, _SUMS, _LANES)]
        width = min(self._outputs, _LANES)
        for row in range(self._rows):
            for output in range(0, self._outputs, width):
                register, lane = divmod(row * self._outputs + output, _LANES)
                numbers = totals[register]
                if width < _LANES:
                    lanes = ir.Constant(ir.VectorType(_I32, width), list(range(lane, lane + width)))
                    numbers = b.shuffle_vector(numbers, numbers, lanes)
                self._store(numbers, row, output, width)

    def _totals(self, vectors: list[Any]) -> Any:
        """The sums of the lanes of as many registers as one has lanes: half of them are folded onto the other half each time.

        Registers ``v`` and ``v + half`` become one, whose lanes hold half sums of the one and of the other in turns of ``half``.
        """
        half = _LANES // 2
        while half:
            lower = [(lane & ~half) + (_LANES if lane & half else 0) for lane in range(_LANES)]
            masks = [ir.Constant(self._ints, lanes) for lanes in (lower, [lane + half for lane in lower])]
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [self._builder.fadd(*(self._builder.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
            half //= 2
        return vectors[0]

    def _store(self, numbers: Any, row: int, output: int, width: int) -> None:
        b, at, floats = self._builder, self._at, ir.VectorType(_FLOAT, width)
        biases = b.load(b.inttoptr(b.add(at["bias"], _I64(output * 4)), floats.as_pointer()), align=4)
        numbers = b.fadd(numbers, biases)
        address = b.add(b.add(at["output"], b.mul(at["output_stride"], _I64(row))), _I64(output * self._bytes))
        if self._like == types.int16:
            numbers = b.fptrunc(numbers, ir.VectorType(ir.HalfType(), width))
        elif self._like == types.uint16:
            ints = ir.VectorType(_I32, width)
            bits, half = b.bitcast(numbers, ints), ir.Constant(ints, [0x7FFF] * width)
            odd = b.and_(b.lshr(bits, ir.Constant(ints, [16] * width)), ir.Constant(ints, [1] * width))
            rounded = b.add(bits, b.add(odd, half))  # to the nearest, ties to even
            numbers = b.trunc(b.lshr(rounded, ir.Constant(ints, [16] * width)), ir.VectorType(ir.IntType(16), width))
        b.store(numbers, b.inttoptr(address, numbers.type.as_pointer()), align=self._bytes)


_ARGUMENTS = ("rows", "input", "input_stride", "weight", "weight_stride", "size", "bias", "output", "output_stride")


@primitive
def _tile(
    typing: Any, rows: Any, input: Any, input_stride: Any, weight: Any, weight_stride: Any, size: Any, bias: Any, output: Any,
    output_stride: Any, like: Any,
) -> tuple[Any, Generator]:  # fmt: skip
    """Products of one to ``TILE_ROWS`` rows with the ``_outputs_of(rows)`` outputs from an address on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses = dict(zip(_ARGUMENTS, args[:-1], strict=True))
        end = builder.append_basic_block("tile.end")
        choice = builder.switch(addresses["rows"], end)
        for number in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"tile.{number}")
            choice.add_case(_I64(number), block)
            builder.position_at_end(block)
            _Tile(builder, like, number, addresses).emit()
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*([types.int64] * len(_ARGUMENTS)), like), generate


@compiled
def _block(job: Any, row: int, rows: int, first: int, count: int, like: Any, size_of: int) -> None:
    """Up to ``TILE_ROWS`` rows and some outputs."""
    step = _SUMS // (4 if rows == 3 else rows)
    for output in range(first, first + count, step):
        _tile(
            rows,
            job.input + row * job.input_stride,
            job.input_stride,
            job.weight + output * job.weight_stride,
            job.weight_stride,
            job.size,
            job.bias + output * 4,
            job.output + row * job.output_stride + output * size_of,
            job.output_stride,
            like,
        )


@compiled
def _group(job: Any, item: int, items: int, like: Any, size_of: int) -> None:
    """All rows of some outputs. The last outputs may be computed twice: they get the same bits."""
    first = min(item * GROUP, job.outputs - GROUP)
    for row in range(0, job.rows, TILE_ROWS):
        _block(job, row, min(TILE_ROWS, job.rows - row), first, GROUP, like, size_of)


@compiled
def _work(job: Any, like: Any, size_of: int) -> None:
    """What every thread does: its own part of the outputs, then what is left of the others' parts."""
    items = (job.outputs + GROUP - 1) // GROUP
    thread = claim(job.taken)
    for turn in range(job.threads):
        part = (thread + turn) % job.threads
        first, last = part * items // job.threads, (part + 1) * items // job.threads
        counter = job.taken + 8 * _COUNTER * (part + 1)
        while True:
            item = first + claim(counter)
            if item >= last:
                break
            _group(job, item, items, like, size_of)


def _bfloat16(jobs: Any) -> None:
    _work(carray(jobs, 1)[0], np.uint16(0), 2)


def _float16(jobs: Any) -> None:
    _work(carray(jobs, 1)[0], np.int16(0), 2)


def _float32(jobs: Any) -> None:
    _work(carray(jobs, 1)[0], np.float32(0), 4)


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(Linear))))


@cache
def entry_point(dtype: str) -> Any:
    """The C function ``void (Linear *)`` that every thread calls, with its ``address``; see ``attention.entry_point``."""
    return compiled_callback(_SIGNATURE)({"bfloat16": _bfloat16, "float16": _float16, "float32": _float32}[dtype])
