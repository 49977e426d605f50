"""Prints what models come to on four GPUs, as a table in Markdown: ``python -m experiments.gpu_suite.plan_table``.

Each cell is a start with the defaults, planned from a configuration in ``model_configs`` and a card's data sheet.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers.utils import logging

from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.cards import CARDS, Card
from outrider.engine.loading.plan import plan

CONFIGS = Path(__file__).with_name("model_configs")
SERVED = (
    "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B",
    "Qwen3-14B", "Mistral-7B-v0.3", "Mistral-Nemo-12B", "Gemma-2-9B", "Gemma-3-12B", "OLMo-2-13B", "SmolLM2-1.7B",
)  # fmt: skip
ROUNDED = ("Mixtral-8x7B", "GPT-OSS-20B", "Phi-4-mini", "Qwen3-30B-A3B")  # not exact on a GPU
LARGE = ("Qwen2.5-32B", "Llama-3.3-70B")
COLUMNS = ("A100-80", "H100", "L40S", "L4")
_OPTION = re.compile(r"(?:engine|model|parallelism)\.\w+(?:=\w+)?")


def cell(model: str, card: Card) -> str:
    """Return KV slots, their length and the time of a step; or the options that a refusal names."""
    try:
        found = plan(ModelOptions(str(CONFIGS / model)), EngineOptions(), SpeculationOptions(), ParallelismOptions(), card)
    except ModelLoadError as error:
        options = [option for option in _OPTION.findall(str(error)) if option != "model.device=cpu"]
        return f"no: {' or '.join(f'`{option}`' for option in options)}" if options else "no"
    assert found.graphs, model
    slots = found.footprint
    return f"{slots.kv_slots} x {slots.max_model_len:,}, {found.step_ms[1]:.1f} ms"


def table() -> str:
    """Return the whole table."""
    lines = [f"| model | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for model in (*SERVED, *LARGE, *ROUNDED):
        lines.append(f"| {model} | {' | '.join(cell(model, CARDS[name]) for name in COLUMNS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(table())
