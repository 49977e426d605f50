"""Attention over slots by Triton's kernels: against attention written out in float64, bit for bit against itself, and compiled.

Without a GPU the kernels run in Triton's interpreter, in a process of its own: it must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.accelerator import use
from outrider.engine.cuda.slot_attention import (
    BLOCK_N,
    SPLIT,
    SlotAttention,
    available,
    best_block_rows,
    block_sizes,
    num_splits,
    rows_per_tile,
)
from outrider.engine.cuda.slot_kernels import TRITON
from outrider.engine.cuda.static_runner import StaticRunner
from outrider.engine.cuda.step_buffers import StepRows
from outrider.engine.forward.batch import AttentionCall, DummySequence, ScheduledDummy, pack
from outrider.engine.kv.kv_cache import KVShape
from outrider.experiments.bench.record import RESULTS
from outrider.experiments.device_double.gpu import DoubleGpu
from outrider.experiments.gpu_suite.compile_kernels import ARCHS, CLEAN, DTYPES, FAMILIES, KERNELS, compile_cell, table, verdict
from tests.helpers.attention_reference import reference_attention
from tests.helpers.models import tiny_model, tree_of

INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
CAPACITY, SLOTS, MOST_PATH = 600, 6, 320
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FP32, FP16, BF16 = TOLERANCE
# Heads, KV heads, size, window, bound of the scores, rows of a block. The interpreter takes seconds, and garbles bfloat16.
KINDS = [(4, 1, 64, None, None, 16), (1, 1, 80, 50, None, 64), (14, 2, 32, 65, 2.0, 64)]
CASES: list[Any] = [("cpu", dtype, kind) for dtype, kind in zip((FP32, FP16, FP32), KINDS, strict=True)]
if not INTERPRETED:
    kinds = [(8, 2, 128, None, None, 64), (7, 1, 128, 130, 1.5, 64), (2, 1, 256, 90, 9.0, 64), (7, 1, 64, 1, None, 16)]
    runs = [
        *((BF16, kind) for kind in (*KINDS, *kinds)),
        *((FP16, kind) for kind in kinds[1:3]),
        (FP32, KINDS[0]),
        (FP32, kinds[3]),
    ]
    CASES = [pytest.param("cuda", *run, marks=pytest.mark.gpu) for run in runs]
cases = pytest.mark.parametrize(("device", "dtype", "kind"), CASES)

needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed")

if INTERPRETED:  # NumPy 2.4 refuses what Triton 3.6 asks of it where a tensor bounds a loop
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_bounds(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_bounds

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """Adds in one order, number by number. Triton's own is NumPy's product: with the kernels that some BLAS has for some
        processors a row's sums depend on its company."""
        left, right, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), np.zeros_like(d.data)
        for at in range(left.shape[1]):
            total += left[:, at, None] * right[None, at]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


@dataclass(frozen=True)
class Part:
    """Rows of one sequence: a tree below the first ``start`` tokens, whose parents come before their children."""

    slot: int
    start: int
    parents: Sequence[int]  # -1: the token before ``start``
    known: int = 0  # the first rows, computed in an earlier step

    def line(self, row: int) -> list[int]:
        """The row's ancestors and itself."""
        return [*([] if self.parents[row] < 0 else self.line(self.parents[row])), row]


def chain(slot: int, start: int, rows: int, known: int = 0) -> Part:
    return Part(slot, start, range(-1, rows - 1), known)


def tree(slot: int, start: int, rows: int) -> Part:
    """Several chains, with their rows mixed."""
    return Part(slot, start, [-1 if row < 2 else 7 * row % (row - 1) for row in range(rows)])


def with_siblings(slot: int, start: int, tokens: int) -> Part:
    """A chain in every second row, each token of it with a sibling behind it."""
    return Part(slot, start, [-1 if row < 2 else row // 2 * 2 - 2 for row in range(2 * tokens)])


class Case:
    """Parts one after another, with rows between them that compute nothing, and random inputs. What no row may read is NaN."""

    def __init__(self, parts: Sequence[Part], attention: SlotAttention) -> None:
        shape, self.attention, self.parts, capacity = attention.shape, attention, parts, attention.capacity
        self.entries = [part.start + torch.randperm(capacity - part.start)[: len(part.parents)] for part in parts]
        self.offsets = [1 + sum(len(other.parents) - other.known + 1 for other in parts[:at]) for at in range(len(parts))]
        total = self.offsets[-1] + len(parts[-1].parents) - parts[-1].known + 2
        self.rows = self._rows(total, attention.rows_of_tile)
        self.keys, self.values = (torch.full((SLOTS, shape.kv_heads, capacity, shape.head_dim), torch.nan) for _ in range(2))
        self.query, self.key, self.value = (  # as models hand them over: heads between rows
            torch.randn(1, total, heads, shape.head_dim).to(shape.dtype).transpose(1, 2)
            for heads in (attention.heads, shape.kv_heads, shape.kv_heads)
        )
        for part, entries in zip(parts, self.entries, strict=True):
            for cache in (self.keys, self.values):
                cache[part.slot, :, : part.start] = torch.randn(shape.kv_heads, part.start, shape.head_dim)
                cache[part.slot, :, entries[: part.known]] = torch.randn(shape.kv_heads, part.known, shape.head_dim)
        self.keys, self.values = self.keys.to(shape.dtype), self.values.to(shape.dtype)

    def _rows(self, total: int, per_tile: int) -> StepRows:
        slot, start, position, entry = (torch.full((total,), fill, dtype=torch.int32) for fill in (7**9, 7**9, -1, 7**9))
        path, tiles = torch.full((total, MOST_PATH), 7**9, dtype=torch.int32), [[0, 0]]
        for part, offset, entries in zip(self.parts, self.offsets, self.entries, strict=True):
            rows = len(part.parents) - part.known
            for at, row in enumerate(range(part.known, len(part.parents)), offset):
                line = part.line(row)
                slot[at], start[at], entry[at], position[at] = part.slot, part.start, entries[row], part.start + len(line) - 1
                path[at, : len(line)] = entries[line]
            tiles += [[offset + row, min(per_tile, rows - row)] for row in range(0, rows, per_tile)]
        tensors = (slot, start, position, entry, path, torch.tensor([*tiles, [0, 0]], dtype=torch.int32))
        return StepRows(*(tensor.to(self.attention.shape.device) for tensor in tensors))

    def attend(self, **options: Any) -> torch.Tensor:
        """[rows, heads, head_dim]."""
        device = self.attention.shape.device
        self.keys, self.values = self.keys.to(device), self.values.to(device)
        query, key, value = (each.to(device) for each in (self.query, self.key, self.value))
        output = torch.full_like(query.transpose(1, 2), torch.nan, memory_format=torch.contiguous_format)
        self.attention._states.fill_(torch.nan)
        self.attention.attend(AttentionCall(0, query, key, value, **options), self.keys, self.values, self.rows, output)
        return output[0].cpu()


def attention_of(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, size: int, block: int, capacity: int = CAPACITY
) -> SlotAttention:
    return SlotAttention(KVShape(1, kv_heads, size, dtype, torch.device(device)), heads, 350, capacity, block)


@needs_triton
@cases
def test_it_is_attention(device: str, dtype: torch.dtype, kind: tuple[Any, ...]) -> None:
    heads, kv_heads, size, window, cap, block = kind
    torch.manual_seed(3)
    at_borders = [tree(0, BLOCK_N, 5), tree(3, SPLIT, 6), chain(1, SPLIT - 1, 3), chain(4, 2 * SPLIT - 2, 4), tree(5, 37, 3)]
    case = Case([chain(2, 0, SPLIT + 4, known=SPLIT + 1), *at_borders], attention_of(device, dtype, heads, kv_heads, size, block))
    keys, values, scale = case.keys.clone(), case.values.clone(), 0.3 if cap is None else None
    output = case.attend(scaling=scale, window=window, softcap=cap)
    assert (output[case.rows.position.cpu() < 0] == 0).all() and not output.isnan().any()
    for part, offset, entries in zip(case.parts, case.offsets, case.entries, strict=True):
        for at, row in enumerate(range(part.known, len(part.parents)), offset):
            keys[part.slot, :, entries[row]], values[part.slot, :, entries[row]] = case.key[0, :, at], case.value[0, :, at]
            seen = torch.cat([torch.arange(part.start), entries[part.line(row)]])[-(window or 0) :]
            of_row = case.query[0, :, at, None], keys[part.slot, :, seen], values[part.slot, :, seen]
            right = reference_attention(*of_row, torch.ones(1, len(seen), dtype=torch.bool), scale or size**-0.5, cap)[0]
            error = (output[at] - right).abs().max()
            assert error < TOLERANCE[dtype], (part.slot, row, error)
    for stored, expected in ((case.keys, keys), (case.values, values)):  # the new entries and no others
        assert torch.equal(stored.cpu().nan_to_num(9), expected.nan_to_num(9))


# Parts, which of them is the text, and every how manieth of its rows.
WAYS: list[tuple[list[Part], int, int]] = [
    *(([chain(1, start, 1)], 0, 1) for start in (0, 63, 64, SPLIT - 1, SPLIT, SPLIT + 2, 2 * SPLIT + 1)),
    ([with_siblings(3, SPLIT - 2, 5)], 0, 2),
    ([tree(0, BLOCK_N, 2), chain(2, SPLIT - 28, 31, known=26), chain(4, 2 * SPLIT, 1)], 1, 1),
    ([chain(5, 30, 2), chain(0, SPLIT, 3)], 1, 1),
    ([chain(0, 0, 66, known=63)], 0, 1),
    ([chain(0, SPLIT // 2, SPLIT // 2 + 3, known=SPLIT // 2 - 2)], 0, 1),
    ([chain(0, 2 * SPLIT - 3, 5)], 0, 1),
]


@needs_triton
@cases
def test_a_token_has_the_same_bits_however_it_is_computed(device: str, dtype: torch.dtype, kind: tuple[Any, ...]) -> None:
    heads, kv_heads, size, window, cap, block = kind
    torch.manual_seed(5)
    attention = attention_of(device, dtype, heads, kv_heads, size, block)
    query, key, value = (torch.randn(each, CAPACITY, size).to(dtype) for each in (heads, kv_heads, kv_heads))
    seen: dict[int, list[torch.Tensor]] = {}
    for parts, which, every in WAYS:
        case = Case(parts, attention)
        part, offset, entries = parts[which], case.offsets[which], case.entries[which]
        first, end = part.start + part.known, part.start + len(part.parents) // every
        rows = slice(offset, offset + len(part.parents) - part.known, every)
        old = torch.cat([torch.arange(part.start), entries[: part.known]])
        case.keys[part.slot, :, old], case.values[part.slot, :, old] = key[:, :first], value[:, :first]
        for given, of_text in ((case.query, query), (case.key, key), (case.value, value)):
            given[0, :, rows] = of_text[:, first:end]
        for position, output in zip(range(first, end), case.attend(window=window, softcap=cap)[rows], strict=True):
            seen.setdefault(position, []).append(output)
    wanted = (63, 64, *range(SPLIT - 2, SPLIT + 3), 2 * SPLIT + 1)
    assert all(len(seen[position]) > 1 for position in wanted), sorted(seen)
    for position, outputs in seen.items():
        assert all(torch.equal(outputs[0], output) for output in outputs), position


@needs_triton
@cases
def test_a_row_has_the_same_bits_whatever_the_capacity(device: str, dtype: torch.dtype, kind: tuple[Any, ...]) -> None:
    """An engine without drafts, one with another ``max_model_len`` and the ranks of a group have slots of other sizes."""
    heads, kv_heads, size, window, cap, block = kind
    torch.manual_seed(11)
    parts, outputs = [chain(1, SPLIT + 30, 3), tree(2, BLOCK_N, 4)], []
    attentions = [attention_of(device, dtype, heads, kv_heads, size, block, each) for each in (300, 4160, 8256, 33_000)]
    first = Case(parts, attentions[0])
    for attention in attentions:
        case = Case(parts, attention)
        case.entries, case.rows = first.entries, first.rows
        case.query, case.key, case.value = first.query, first.key, first.value
        for own, of_first in ((case.keys, first.keys), (case.values, first.values)):
            own[:, :, :300] = of_first
        outputs.append(case.attend(window=window, softcap=cap))
    assert len({num_splits(attention.capacity) for attention in attentions}) == 4
    assert all(torch.equal(outputs[0], output) for output in outputs), [(outputs[0] != each).sum() for each in outputs]


@needs_triton
@pytest.mark.gpu
def test_a_captured_graph_reads_the_rows_anew() -> None:
    torch.manual_seed(7)
    attention = attention_of("cuda", BF16, 14, 2, 128, 64)
    parts = [[chain(1, start, 3), tree(2, 5 * start, 11), tree(slot, 130, 11)] for start, slot in ((7, 3), (64, 3), (3, 0))]
    cases = [Case(each, attention) for each in parts]
    expected = [case.attend() for case in cases]
    held = Case(parts[0], attention)
    query, key, value, keys, values = (each.cuda() for each in (held.query, held.key, held.value, held.keys, held.values))
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.attend(AttentionCall(0, query, key, value), keys, values, held.rows, output)
    for case, outputs in zip(cases, expected, strict=True):
        for name in StepRows.__slots__:
            getattr(held.rows, name).copy_(getattr(case.rows, name))
        news = (case.query, case.key, case.value, case.keys, case.values)
        for to, new in zip((query, key, value, keys, values), news, strict=True):
            to.copy_(new)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output[0].cpu(), outputs)


def test_what_it_takes() -> None:
    assert (rows_per_tile(14, 2), rows_per_tile(8, 8), rows_per_tile(16, 1, 16)) == (9, 64, 1)
    shape = KVShape(1, 2, 16, FP32, torch.device("cpu"))
    on_gpu = replace(shape, device=torch.device("cuda"))
    assert available(on_gpu) == TRITON and not available(shape) and not available(replace(on_gpu, dtype=torch.float64))
    assert best_block_rows(shape) == 16
    for capability, dtype, size, rows_of_block in (
        ((8, 0), BF16, 128, 64),
        ((8, 9), BF16, 128, 32),  # two programs share 100 KB of shared memory
        ((12, 0), FP16, 256, 32),
        ((9, 0), BF16, 256, 64),
        ((9, 0), FP32, 64, 16),
        ((7, 5), FP16, 64, 64),
    ):
        with use(DoubleGpu(capability=capability)):
            assert best_block_rows(replace(on_gpu, dtype=dtype, head_dim=size)) == rows_of_block, (capability, dtype, size)
    attention = attention_of("cpu", FP32, 4, 2, 16, 16)
    rows = StepRows(*(torch.zeros(size, dtype=torch.int32) for size in (3, 3, 3, 3, (3, 5), (2, 2))))
    query, new, cache, output = (
        torch.zeros(size) for size in ((1, 4, 3, 16), (1, 2, 3, 16), (1, 2, CAPACITY, 16), (1, 3, 4, 16))
    )
    call = AttentionCall(0, query, new, new)
    good = {"call": call, "keys": cache, "values": cache, "rows": rows, "output": output}
    bad = [
        {"call": replace(call, **{name: wrong})}
        for name, wrong in (("query", query[:, :2]), ("value", new.half()), ("window", 0))
    ]
    bad += [{"keys": cache[:, :, 1:]}, {"output": output.transpose(1, 2)}]
    bad += [{"rows": replace(rows, entry=rows.entry[:2])}, {"rows": replace(rows, path=rows.path.long())}]
    for changed in bad:  # the kernels would read and write beside the tensors
        with pytest.raises(AssertionError):
            attention.attend(**good | changed)
    with pytest.raises(AssertionError):
        rows_per_tile(32, 1, 16)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(
    "capability", [each if each in ((8, 0), (9, 0)) else pytest.param(each, marks=pytest.mark.proof) for each in ARCHS]
)
def test_both_kernels_compile_to_the_same_arithmetic_without_spills(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for family in ("Llama-3.1-8B", "Gemma-2-9B, windowed layers"):
        cell = compile_cell(family, capability, "bf16")
        assert cell["same_arithmetic"] and not cell["contracted"] and "mma" in cell["instructions"][0], cell
        assert cell["verdict"] == CLEAN and min(cell[name]["programs_per_sm"] for name in KERNELS) >= 1, cell


def test_a_record_holds_every_cell_with_the_sizes_of_today() -> None:
    record = json.loads(sorted(RESULTS.glob("*-triton-compile*.json"))[-1].read_text(encoding="utf-8"))
    cells = record["results"]["cells"]
    archs = {f"sm_{major}{minor}": (major, minor) for major, minor in ARCHS}
    keys = [(cell["family"], archs[cell["arch"]], cell["dtype"]) for cell in cells]
    assert keys == list(product(FAMILIES, ARCHS, DTYPES))
    for cell, (family, capability, dtype) in zip(cells, keys, strict=True):
        sizes = (cell["block_rows"], cell["warps"], cell["stages"], cell["most_registers"])
        assert sizes == block_sizes(capability, FAMILIES[family].head_dim, DTYPES[dtype]), cell
        assert cell["verdict"] == verdict(cell, ARCHS[capability]) and cell["same_arithmetic"], cell
        masked = (family, capability) == ("Phi-3-mini-4k", (8, 0))  # heads of 96 with a window need more than 255 registers
        assert cell["verdict"] == CLEAN or dtype == "fp32" or masked, cell
    lines = table(cells).splitlines()[2:]
    assert all(any(line.startswith(f"| {family}, ") and dtype in line for line in lines) for family, _, dtype in keys)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run on no CPU but in the interpreter")
@pytest.mark.parametrize("fixed_rows", [None, 8])
def test_steps_of_a_model_on_a_cpu(fixed_rows: int | None) -> None:
    usual = tiny_model("gemma3", "float32").runner  # one layer has a window
    static = StaticRunner(deepcopy(usual.model), usual.cache.slots, usual.cache.capacity, fixed_rows, (8,))
    first, second = DummySequence(1, np.arange(1, 40, dtype=np.int32)), DummySequence(3, np.arange(9, 20, dtype=np.int32))
    tree = tree_of([39, 5, 6, 7], [-1, 0, 0, 1])
    for works in (
        [ScheduledDummy(first, 0, 38, None)],
        [ScheduledDummy(first, 38, 39, tree), ScheduledDummy(second, 0, 3, None)],
    ):
        expected, given = (runner.forward(pack(works)) for runner in (usual, static))
        assert torch.allclose(given, expected, atol=1e-5, rtol=0) and given.shape == expected.shape
    assert static._steps  # the last step, at least, was one of a fixed shape


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter itself")
@pytest.mark.parametrize(
    ("chosen", "count"),
    [("cpu and (kind0 or is_attention)", 5), pytest.param("cpu", 3 * len(KINDS) + 2, marks=pytest.mark.proof)],
)
def test_in_the_interpreter(chosen: str, count: int) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, __file__]
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0 and f"{count} passed" in run.stdout, run.stdout + run.stderr
