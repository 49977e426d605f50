"""A trained model on real text: what drafts bring, and whether they change an output."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.request import PLAIN
from outrider.engine.engine import load_runner
from outrider.engine.text.chat import render_chat
from outrider.experiments.bench.engines.contestants import Prompt, Run, SharedModel
from outrider.experiments.bench.record import ROOT, spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import empty_cache, is_cuda, shown, wait
from outrider.experiments.gpu_suite.report import Report, Setting, UnavailableError

_STRATEGIES = (PLAIN, "llma", "auto")
_PASSAGES, _PASSAGE_CHARS = 8, 1500
_QUESTION = "Repeat the most important sentences of this text.\n\n"


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``real``: passages of this project's documents as prompts.

    Raises:
        UnavailableError: there is no trained model, or its context is too short.
    """
    if setting.real_model is None:
        raise UnavailableError(setting.no_real_model)
    models.release(setting, kept)
    device = setting.device
    # The double and a CPU take the memory of the machine: no slots for more than is asked.
    length = None if is_cuda(device) else 1024
    model = ModelOptions(str(setting.real_model), dtype=setting.dtype, device=device, max_model_len=length)  # type: ignore[arg-type]
    options = EngineOptions() if is_cuda(device) else EngineOptions(max_running=1)
    loaded, runner = load_runner(model, options, SpeculationOptions(), 1)
    report.found["model"] = {
        "name": setting.real_model.name, "num_parameters": loaded.model.num_parameters(), "exact": runner.exact,
        "form": runner.calibration_key(), "max_model_len": loaded.max_model_len,
    }  # fmt: skip
    assert loaded.tokenizer is not None
    prompts = [
        Prompt(f"passage/{number}", ids, [])
        for number, text in enumerate(passages())
        if len(ids := render_chat(loaded.tokenizer, [{"role": "user", "content": _QUESTION + text}])) + setting.max_tokens
        < loaded.max_model_len
    ]
    if not prompts:
        raise UnavailableError(f"no passage fits {loaded.max_model_len} tokens")
    shared = SharedModel(loaded, options, SpeculationOptions().most_draft_tokens, runner=runner, kept=setting.scratch / "real")
    rows: dict[str, list[tuple[float, Run]]] = {}
    strategies = _STRATEGIES if is_cuda(device) else _STRATEGIES[:2]  # on a CPU the tables of auto take minutes
    for number, strategy in enumerate(strategies):
        ends = report.ends_left_s(number, len(strategies))
        contestant = shared.contestant(parse_strategy(strategy), setting.max_tokens)
        contestant.run(prompts[:1])
        contestant.renew()
        rows[strategy] = []
        for prompt in prompts:
            if rows[strategy] and report.left_s() < ends:
                break
            wait(device)
            began = time.perf_counter()
            run = contestant.run([prompt])
            rows[strategy].append((time.perf_counter() - began, run))
        report.found[strategy] = _tell(report, strategy, rows[strategy], rows[PLAIN])
        report.save()
    del shared, runner, loaded
    gc.collect()
    empty_cache(device)


def passages() -> list[str]:
    """Return the beginnings of the longest documents."""
    texts = sorted((path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")), key=len, reverse=True)
    return [text[:_PASSAGE_CHARS] for text in texts[:_PASSAGES]]


def _tell(report: Report, strategy: str, own: Sequence[tuple[float, Run]], plain: Sequence[tuple[float, Run]]) -> dict[str, Any]:
    pairs = list(zip(own, plain, strict=False))
    tokens, steps = sum(len(run.outputs[0]) for _, run in own), sum(run.steps for _, run in own)
    same = sum(run.outputs == base.outputs for (_, run), (_, base) in pairs)
    figures = {
        "runs": len(own), "compared": len(pairs), "identical": same, "tokens": tokens,
        "tokens_per_s": round(tokens / sum(seconds for seconds, _ in own), 2), "tokens_per_step": round(tokens / steps, 3),
        "ratio": spread([base_s / seconds for (seconds, _), (base_s, _) in pairs], 4),
    }  # fmt: skip
    what = f"{strategy}: {figures['tokens_per_s']:.1f} tok/s, {figures['tokens_per_step']:.2f} tok/step"
    report.line(what, *shown(figures["ratio"], " x plain"), f"{same} of {len(pairs)} identical", same == len(pairs))  # type: ignore[arg-type]
    return figures
