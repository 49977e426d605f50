"""Compile the attention kernels for GPUs that are not here: registers, shared memory and spills, by model family and card.

    python -m experiments.gpu_suite.compile_kernels                  # writes a record and prints its table
    python -m experiments.gpu_suite.compile_kernels --record FILE    # prints the table of a record

Triton brings the assembler, so neither a GPU nor a driver is needed. Nothing runs, and nothing here is a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from outrider.engine.cuda.slot_attention import BLOCK_N, block_sizes, launch_sizes
from outrider.engine.cuda.slot_kernels import context_kernel, path_kernel
from outrider.experiments.bench.record import RESULTS, write_record

KERNELS = {"context": context_kernel, "path": path_kernel}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CLEAN = "clean"  # verdict of a cell: no spills, fits, and both kernels compute alike


@dataclass(frozen=True)
class Shape:
    """Attention of a layer; ``source`` says where the figures are from."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Arch:
    """Limits of an SM: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

    cards: str
    shared_kib: int  # of an SM; a block may have 1 KiB less, and the driver takes 1 KiB of each block
    warps: int


ARCHS = {
    (8, 0): Arch("A100", 164, 64),
    (8, 6): Arch("A10, RTX 30", 100, 48),
    (8, 9): Arch("L4, L40S, RTX 40", 100, 48),
    (9, 0): Arch("H100, H200", 228, 64),
    (10, 0): Arch("B200", 228, 64),
    (12, 0): Arch("RTX 50", 100, 48),
}
_CONFIG = "config.json of {} on the Hugging Face Hub"
FAMILIES = {
    "Llama-3.1-8B": Shape(32, 8, 128, source=_CONFIG.format("meta-llama/Llama-3.1-8B")),
    "Llama-3.2-1B": Shape(32, 8, 64, source=_CONFIG.format("meta-llama/Llama-3.2-1B")),
    "Llama-2-7B": Shape(32, 32, 128, source=_CONFIG.format("meta-llama/Llama-2-7b-hf")),
    "Qwen2.5-7B": Shape(28, 4, 128, source=_CONFIG.format("Qwen/Qwen2.5-7B")),
    "Qwen2.5-14B": Shape(40, 8, 128, source=_CONFIG.format("Qwen/Qwen2.5-14B")),
    "Qwen3-0.6B": Shape(16, 8, 128, source=_CONFIG.format("Qwen/Qwen3-0.6B")),
    "Mistral-7B-v0.1": Shape(32, 8, 128, 4096, source=_CONFIG.format("mistralai/Mistral-7B-v0.1")),
    "Gemma-2-9B, windowed layers": Shape(16, 8, 256, 4096, 50.0, _CONFIG.format("google/gemma-2-9b")),
    "Gemma-2-9B, other layers": Shape(16, 8, 256, None, 50.0, _CONFIG.format("google/gemma-2-9b")),
    "Gemma-3-12B, windowed layers": Shape(16, 8, 256, 1024, None, _CONFIG.format("google/gemma-3-12b-pt")),
    "Gemma-3-12B, other layers": Shape(16, 8, 256, source=_CONFIG.format("google/gemma-3-12b-pt")),
    "SmolLM2-135M": Shape(9, 3, 64, source=_CONFIG.format("HuggingFaceTB/SmolLM2-135M")),
    "Phi-3-mini-4k": Shape(32, 32, 96, 2047, source=_CONFIG.format("microsoft/Phi-3-mini-4k-instruct")),
    "StarCoderBase-1B (MQA)": Shape(16, 1, 128, source=_CONFIG.format("bigcode/starcoderbase-1b")),
}


def compiled(kernel: Any, capability: tuple[int, int], shape: Shape, dtype: str) -> Any:
    """Return a kernel as Triton compiles it for a GPU of a capability, with aligned pointers and strides."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes: dict[str, Any] = launch_sizes(capability, shape.head_dim, shape.heads // shape.kv_heads, DTYPES[dtype])
    options = {name: sizes.pop(name) for name in tuple(sizes) if name.islower()}
    constants = {**sizes, "WINDOW": shape.window or 0, "CAP": shape.softcap or 0.0}
    types = dict.fromkeys(("query", "key", "value", "keys", "values", "output"), f"*{dtype}")
    types |= {"states": "*fp32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("slots", "starts", "positions", "entry", "path", "tiles"), "*i32")
    whole = [at for at, name in enumerate(kernel.arg_names) if name != "scale" and name not in constants]
    aligned: dict[Any, Any] = {(at,): [["tt.divisibility", 16]] for at in whole}
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constexprs=constants, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


def arithmetic(code: Any, rows: int) -> list[str]:
    """Return what fixes the order of additions: the products' instructions, and how they and a row's sums lie on threads.

    Products of Hopper and before are values of the intermediate form, Blackwell's lie in tensor memory.
    """
    text = code.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#tt.*)$", text, re.MULTILINE))
    products = re.findall(r"(?:warp_group_dot|tt\.dot) .* -> (tensor<.*>) loc", text)
    products += re.findall(r"tc_gen5_mma .*? : (.*) loc", text)
    sums = re.findall(rf"\}}\) : \((tensor<{rows}x{BLOCK_N}xf32, #\w+>)\) -> ", text)
    assert products and sums, "the compiler's intermediate form has changed: compare its products and reductions anew"
    found = {re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), each) for each in products + sums}
    return sorted(found | set(instructions(code)))


def instructions(code: Any) -> list[str]:
    """Return the instructions of the products."""
    found = set(re.findall(r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.[\w.:]+", code.asm["ptx"]))
    return sorted(found) or ["fma.rn.f32"]


def resources(code: Any) -> dict[str, int]:
    """Return the registers of a thread, the bytes that it spills, and the bytes of shared memory of a block."""
    import triton

    with tempfile.NamedTemporaryFile() as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", usage)[0]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled_bytes": stack + local, "shared_bytes": int(code.metadata.shared)}


def programs(arch: Arch, warps: int, registers: int, shared_bytes: int, tensor_columns: int) -> dict[str, int]:
    """Return how many programs an SM has room for, by each of its resources."""
    of_warp = -(-registers * 32 // 256) * 256  # registers are given out by 256, and warps to four quarters of an SM
    by = {
        "registers": (65536 // of_warp) // 4 * 4 // warps,
        "shared": (arch.shared_kib << 10) // (shared_bytes + 1024),
        "warps": arch.warps // warps,
    }
    return by | ({"tensor_memory": 512 // tensor_columns} if tensor_columns else {})


def compile_cell(family: str, capability: tuple[int, int], dtype: str) -> dict[str, Any]:
    """Return what both kernels take for a family on a GPU, and a verdict."""
    arch, shape = ARCHS[capability], FAMILIES[family]
    sizes = block_sizes(capability, shape.head_dim, DTYPES[dtype])
    codes = {name: compiled(kernel, capability, shape, dtype) for name, kernel in KERNELS.items()}
    cell: dict[str, Any] = {"family": family, "arch": f"sm_{capability[0]}{capability[1]}", "dtype": dtype}
    cell |= {"block_rows": sizes.rows, "warps": sizes.warps, "stages": sizes.stages, "most_registers": sizes.registers}
    for name, code in codes.items():
        found = resources(code)
        room = programs(arch, sizes.warps, found["registers"], found["shared_bytes"], code.metadata.tmem_size)
        cell[name] = found | {"programs_per_sm": min(room.values()), "room": room}
    context, path = codes.values()
    cell["instructions"] = instructions(context)
    cell["same_arithmetic"] = arithmetic(context, sizes.rows) == arithmetic(path, sizes.rows)
    # Products in float32 are sums of fma; there the compiler's option alone keeps it from contracting the rest.
    cell["contracted"] = dtype != "fp32" and any("fma." in code.asm["ptx"] for code in codes.values())
    return cell | {"verdict": verdict(cell, arch)}


def verdict(cell: Mapping[str, Any], arch: Arch) -> str:
    """Return ``CLEAN``, or what a reader must know of a cell."""
    if cell["contracted"] or not cell["same_arithmetic"]:
        return "the kernels round differently"
    if max(cell[name]["shared_bytes"] for name in KERNELS) > (arch.shared_kib - 1) << 10:
        return "does not fit in shared memory"
    spilled = {name: cell[name]["spilled_bytes"] for name in KERNELS if cell[name]["spilled_bytes"]}
    return f"spills {', '.join(f'{count} B a thread in {name}' for name, count in spilled.items())}" if spilled else CLEAN


def compile_all(processes: int) -> list[dict[str, Any]]:
    """Return the cells of all families, GPUs and types, compiled in so many processes."""
    keys = list(itertools.product(FAMILIES, ARCHS, DTYPES))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # so that code which an earlier compiler made is not taken
        cells = []
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for cell in pool.map(compile_cell, *zip(*keys, strict=True)):
                cells.append(cell)
                where = f"{cell['family']}, {cell['arch']}, {cell['dtype']}"
                print(f"{len(cells)}/{len(keys)} {where}: {cell['verdict']}", file=sys.stderr, flush=True)
    return cells


def table(cells: Iterable[Mapping[str, Any]]) -> str:
    """Return Markdown: block rows, registers of both kernels, shared memory, programs of an SM, and what is wrong."""
    by_key = {(cell["family"], cell["dtype"], cell["arch"]): cell for cell in cells}
    archs = list(dict.fromkeys(arch for _, _, arch in by_key))
    cards = {f"sm_{major}{minor}": arch.cards for (major, minor), arch in ARCHS.items()}
    lines = ["| | " + " | ".join(f"{cards.get(arch, '')} ({arch})" for arch in archs) + " |", "|---" * (1 + len(archs)) + "|"]
    alike: dict[tuple[str, str], list[str]] = {}  # types by family and row: those of 16 bits take the same
    for family, dtype in dict.fromkeys((family, dtype) for family, dtype, _ in by_key):
        row = " | ".join(_entry(by_key[family, dtype, arch]) for arch in archs)
        alike.setdefault((family, row), []).append(dtype)
    lines += [f"| {family}, {' and '.join(dtypes)} | {row} |" for (family, row), dtypes in alike.items()]
    return "\n".join(lines)


def _entry(cell: Mapping[str, Any]) -> str:
    registers, shared, room = (
        [cell[name][figure] for name in KERNELS] for figure in ("registers", "shared_bytes", "programs_per_sm")
    )
    both = f"{cell['block_rows']}: {'/'.join(map(str, registers))}, {max(shared) / 1024:.0f} K, {'/'.join(map(str, room))}"
    return both if cell["verdict"] == CLEAN else f"{both}; {cell['verdict']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m outrider.experiments.gpu_suite.compile_kernels", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile at once")
    parser.add_argument("--record", type=Path, help="print the table of this record, and compile nothing")
    args = parser.parse_args(arguments)
    if args.record is not None:
        print(table(json.loads(args.record.read_text(encoding="utf-8"))["results"]["cells"]))
        return 0
    started = datetime.now(UTC)
    cells = compile_all(args.processes)
    config = {
        "families": {name: asdict(shape) for name, shape in FAMILIES.items()},
        "archs": {f"sm_{major}{minor}": asdict(arch) for (major, minor), arch in ARCHS.items()},
    }
    path = write_record("triton-compile", config, {"cells": cells}, None, started, folder=args.out)
    print(table(cells))
    print(path.name, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
