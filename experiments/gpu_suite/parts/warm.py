"""Compiles what a strategy calls, ahead of the measurement: python -m experiments.gpu_suite.parts.warm STRATEGY

On a machine that never ran the project, numba takes a minute for all of it. It is kept on disk (``decoding.jit``), so that this
can happen in processes beside others. A tiny model in float64, for which nothing is compiled, stands in for the real one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.sampling.nucleus import compile_nucleus
from outrider.decoding.sampling.ranking import compile_ranking
from outrider.decoding.sampling.row_draw import compile_draws
from outrider.decoding.tree_rows import compile_partition, compile_rows
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.experiments.gpu_suite.models import SIZES, device_model, engines
from outrider.experiments.gpu_suite.texts import made_up

EXECUTOR = "executor"  # in the place of a strategy: what an executor compiles when it is made
CONTEXT = 256


def main() -> int:
    """Compiles, and ends."""
    strategy = sys.argv[1]
    torch.set_num_threads(1)
    if strategy == EXECUTOR:
        compile_rows()
        compile_nucleus()
        compile_ranking(torch.bfloat16)
        compile_draws(torch.bfloat16)
        compile_partition()
        return 0
    model = device_model("tiny", "cpu", torch.float64, 0)
    loaded = LoadedModel(model, None, "tiny", CONTEXT, ())
    with tempfile.TemporaryDirectory() as folder:
        shared = engines(loaded, ModelRunner(model, 1, CONTEXT + 64), Path(folder))
        shared.contestant(parse_strategy(strategy), 32).run(made_up(2, SIZES["tiny"].shape["vocab_size"], 96, 48, 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
