"""A minute that says whether anything else is worth its time: models start with the defaults, and say what transformers says."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.accelerator import accelerator
from outrider.engine.cuda.static_runner import StaticRunner, lacks_graphs
from outrider.engine.engine import Engine
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.bench.record import ROOT
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import empty_cache, is_cuda
from outrider.experiments.gpu_suite.report import Report, Setting

# cuBLASLt without split-K, as vLLM sets it for outputs that do not depend on the batch. Read when CUDA starts.
_NO_SPLIT_K = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
# Part of the spread of a position's logits that a near-tie may be apart; half precision rounds logits by some hundredths of it.
_NEAR_TIE = {"float32": 0.001, "bfloat16": 0.1, "float16": 0.1}


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``smoke``.

    Raises:
        RuntimeError: what was found is a reason to stop.
    """
    models.release(setting, kept)
    sizes = ("tiny", "1b") if is_cuda(setting.device) else ("tiny",)
    reasons: list[str] = []
    for size in sizes:
        with report.attempt(size):
            reasons += _start(setting, report, size)
        reasons += [f"{size} did not start"] if size not in report.found else []
        gc.collect()
        empty_cache(setting.device)
    with report.attempt("any number of rows"):
        _any_rows(setting, report, sizes[-1])
    report.found["go"] = not reasons
    report.line("smoke", "NO-GO: " + "; ".join(reasons) if reasons else "GO")
    report.say(report.lines[-1]["value"])
    if reasons:
        raise RuntimeError("; ".join(reasons))


def _start(setting: Setting, report: Report, size: str) -> list[str]:
    """Load a model with the defaults, compare an answer, and return the reasons not to go on."""
    folder = setting.scratch / "smoke" / size
    models.save_model(size, "cpu" if setting.double else setting.device, getattr(torch, setting.dtype), setting.seed, folder)
    on_gpu = setting.device.startswith("cuda")
    prompt_tokens, count = (600, 64) if is_cuda(setting.device) else (300, 16)
    prompt = np.random.default_rng(setting.seed).integers(0, 256, prompt_tokens).tolist()
    expected, logits = _generated(setting, str(folder), prompt, count)
    gc.collect()
    empty_cache(setting.device)
    began = time.perf_counter()
    # What ``put_off`` leaves out makes drafts faster, and takes a minute with a vocabulary of 128k.
    options = ModelOptions(str(folder), dtype=setting.dtype, device=setting.device)  # type: ignore[arg-type]
    engine = Engine.load(options, EngineOptions(), SpeculationOptions(), defer_warmup=True)
    loaded_s = time.perf_counter() - began
    runner: ModelRunner = engine._executor.runner  # type: ignore[attr-defined]
    failures = dict(runner.capture_failures) if isinstance(runner, StaticRunner) else {}
    request = Request("smoke", prompt, SamplingParams(count, ignore_eos=True), [expected])
    engine.add(request)
    while engine.has_work:
        engine.step()
    found: dict[str, Any] = {
        "loaded_s": round(loaded_s, 1), "exact": runner.exact, "form": runner.calibration_key(), "capture_failures": failures,
        "lacks_graphs": lacks_graphs(runner.model.config, runner.cache.shape) if on_gpu else "on a CPU",
        "max_model_len": engine.info.max_model_len, "kv_slots": runner.cache.slots, "steps": request.stats.steps,
        "drafted": request.stats.drafted,
    }  # fmt: skip
    if on_gpu:
        found["reserved_gib"] = round(accelerator().reserved(runner.model.device) / 2**30, 2)
    found |= _difference(request.output_ids.tolist(), expected, logits)
    report.found[size] = found
    rows, graphs = found["form"]["rows"] or "any", found["form"].get("graphs", "none")
    report.line(f"{size}: exact {runner.exact}, rows {rows}, graphs {graphs}, started in {loaded_s:.0f} s", found["told"])
    report.say(str(found))
    reasons = [] if runner.exact else [f"{size} is not exact"]
    reasons += [f"{size}: graphs were not captured: {failures}"] if failures else []
    if found.get("gap", 0.0) > _NEAR_TIE[setting.dtype]:
        reasons.append(f"{size} says other things than transformers: {found['told']}")
    return reasons


@torch.inference_mode()
def _generated(setting: Setting, folder: str, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of transformers' ``generate``, and [count, vocab] logits in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, setting.dtype), device_map={"": torch.device(setting.device)}
    ).eval()
    ids = torch.tensor([prompt], device=setting.device)
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return found.sequences[0, len(prompt) :].tolist(), torch.cat([step.float().cpu() for step in found.logits])


def _difference(ours: list[int], theirs: list[int], logits: torch.Tensor) -> dict[str, Any]:
    """Return where two answers part, and by how much transformers preferred its own token, in spreads of its logits."""
    at = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)
    if at is None:
        return {"told": f"{len(ours)} tokens as transformers"}
    row = logits[at]
    gap = float((row[theirs[at]] - row[ours[at]]) / row.std())
    return {"told": f"differs at token {at} by {gap:.4f} spreads of the logits", "differs_at": at, "gap": gap}


def _any_rows(setting: Setting, report: Report, size: str) -> None:
    """Tell what the check of exactness says of forwards of any number of rows, in a process with cuBLASLt without split-K."""
    command = [sys.executable, "-m", "outrider.experiments.gpu_suite.parts.any_rows"]
    command += [size, setting.device, setting.dtype, str(setting.seed)]
    command += ["--double"] if setting.double else []
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | _NO_SPLIT_K, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=max(30.0, report.left_s() + 20.0),
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"exit code {ran.returncode}: {ran.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    report.found["any_rows"] = found
    said = found["check"] or "exact"
    what = f"{size}: forwards of any number of rows, cuBLASLt without split-K"
    report.line(what, said, goal="exact", met=found["check"] is None)
    other = {name: number for name, number in found["differing"].items() if number}
    report.line(f"{size}: of its modules, other bits in other company", ", ".join(other) if other else "none")
