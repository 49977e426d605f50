"""First checks: models start and answer as transformers does; forwards of any number of rows are exact."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.forward import exactness
from engine.forward.cuda.static_runner import StaticRunner, has_graphs, lacks_graphs
from engine.forward.runner import ModelRunner
from experiments.bench.workloads import run_engine
from experiments.gpu_suite import models
from experiments.gpu_suite.device import empty_cache, is_cuda, reserved_gib
from experiments.gpu_suite.outputs import difference
from experiments.gpu_suite.worker import Report, Setting

# Near-tie of two tokens, in standard deviations of a position's logits; half precision rounds logits by some hundredths of it.
_NEAR_TIE = {"float32": 0.001, "bfloat16": 0.1, "float16": 0.1}
_CAPACITY = 512
_ROWS = (*range(1, 66), 128, 257, 300, 512)  # the check computes 1 to 65 rows, and pieces of 50, 257 and 300


def measure_smoke(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Start a tiny model and, on a GPU, one of a billion parameters; raise ``RuntimeError`` if the result is NO-GO."""
    models.release(setting, kept)
    reasons: list[str] = []
    for size in ("tiny", "1b") if is_cuda(setting.device) else ("tiny",):
        with report.attempt(size):
            reasons += _start(setting, report, size)
        reasons += [f"{size} did not start"] if size not in report.found else []
        empty_cache(setting.device)
    report.found["go"] = not reasons
    report.line("smoke", "NO-GO: " + "; ".join(reasons) if reasons else "GO")
    report.say(report.lines[-1]["value"])
    if reasons:
        raise RuntimeError("; ".join(reasons))


def _start(setting: Setting, report: Report, size: str) -> list[str]:
    """Load a model with the defaults, compare an answer, and return the reasons for NO-GO."""
    folder = setting.scratch / "smoke" / size
    models.save_model(setting, size, folder)
    on_gpu = setting.device.startswith("cuda")
    prompt_tokens, count = (600, 64) if is_cuda(setting.device) else (300, 16)
    prompt = np.random.default_rng(models.SEED).integers(0, 256, prompt_tokens).tolist()
    expected, logits = _generated(setting, str(folder), prompt, count)
    empty_cache(setting.device)
    began = time.perf_counter()
    # ``put_off`` leaves out what only makes drafts faster, and takes a minute with a vocabulary of 128k.
    options = ModelOptions(str(folder), dtype=setting.dtype, device=setting.device)  # type: ignore[arg-type]
    engine = Engine.load(options, EngineOptions(), SpeculationOptions(), put_off=True)
    loaded_s = time.perf_counter() - began
    runner: ModelRunner = engine._executor.runner  # type: ignore[attr-defined]
    failures = dict(runner.capture_failures) if isinstance(runner, StaticRunner) else {}
    request = Request("smoke", prompt, SamplingParams(count, ignore_eos=True), [expected])
    run_engine(engine, [request])
    found: dict[str, Any] = {
        "loaded_s": round(loaded_s, 1), "exact": runner.exact, "form": runner.form(), "capture_failures": failures,
        "lacks_graphs": lacks_graphs(runner.model.config, runner.cache.shape) if on_gpu else "on a CPU",
        "max_model_len": engine.info.max_model_len, "kv_slots": runner.cache.slots, "steps": request.stats.steps,
        "drafted": request.stats.drafted, "reserved_gib": reserved_gib(setting.device),
    }  # fmt: skip
    found |= compared(request.output_ids.tolist(), expected, logits)
    report.found[size] = found
    rows, graphs = found["form"]["rows"] or "any", found["form"].get("graphs", "none")
    report.line(f"{size}: exact {runner.exact}, rows {rows}, graphs {graphs}, started in {loaded_s:.0f} s", found["answer"])
    report.say(str(found))
    reasons = [] if runner.exact else [f"{size} is not exact"]
    reasons += [f"{size}: graphs were not captured: {failures}"] if failures else []
    if found.get("gap", 0.0) > _NEAR_TIE[setting.dtype]:
        reasons.append(f"{size} does not answer as transformers: {found['answer']}")
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


def compared(ours: list[int], theirs: list[int], logits: torch.Tensor) -> dict[str, Any]:
    """Return where two answers differ, and by how many standard deviations of its logits transformers preferred its token."""
    at = difference(ours, theirs)
    if at is None:
        return {"answer": f"{len(ours)} tokens as transformers"}
    row = logits[at]
    gap = float((row[theirs[at]] - row[ours[at]]) / row.std())
    return {"answer": f"differs at token {at}, gap {gap:.4f}", "differs_at": at, "gap": gap}


def measure_any_rows(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Check forwards of any number of rows, in a worker in which cuBLASLt has no split-K."""
    size = "1b" if is_cuda(setting.device) else "tiny"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if is_cuda(setting.device):
        torch.backends.cuda.preferred_blas_library("cublaslt")
    model = models.device_model(size, setting.device, getattr(torch, setting.dtype))
    if has_graphs(model):  # a step for each number of rows, computed without a graph and without empty rows
        runner: ModelRunner = StaticRunner(model, 2, _CAPACITY, None, _ROWS)
    else:
        runner = ModelRunner(model, 2, _CAPACITY)
    check = report.found["check"] = exactness.check(runner)
    what = f"{size}: forwards of any number of rows, cuBLASLt without split-K"
    report.line(what, check or "exact", goal="exact", met=check is None)
    found = report.found["differing"] = differing(model)
    named = ", ".join(f"{name}: {number}" for name, number in found.items() if number)
    report.line(f"{size}: modules whose bits depend on the number of rows", named or "none")


@torch.inference_mode()
def differing(model: PreTrainedModel) -> dict[str, int]:
    """Return how many numbers of rows change the bits of the first row, for each kind and shape of a product or norm."""
    torch.manual_seed(models.SEED)
    kinds: dict[str, Any] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and not isinstance(module, torch.nn.Embedding):
            kinds.setdefault(f"{type(module).__name__} {'x'.join(map(str, weight.shape))}", module)
    found = {}
    for name, module in kinds.items():
        rows = torch.randn(_ROWS[-1], module.weight.shape[-1], device=model.device).to(model.dtype)
        alone = module(rows[:1])
        found[name] = sum(not torch.equal(module(rows[:count])[:1], alone) for count in _ROWS)
    return found
