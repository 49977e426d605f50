"""Compile what strategies call, before it is timed: ``python -m experiments.gpu_suite.warm``.

On a machine that never ran the project, numba takes a minute. The code is kept on disk (``decoding.jit``), so another process can
compile it beside the first parts. A tiny float64 model, for which nothing is compiled, replaces the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.bench.record import ROOT

_CONTEXT = 256
_LIMIT_S = 150.0


def start(log: Path) -> subprocess.Popen[bytes]:
    """Start the process that compiles."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "experiments.gpu_suite.warm"]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def finish(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Wait for that process, kill it if it takes too long, and return its exit code and the last lines of its log."""
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return {"exit_code": process.wait(), "log": log.read_text(errors="replace").splitlines()[-6:]}


def main() -> int:
    """Compile."""
    import torch

    from decoding.budget.partition import compile_partition
    from decoding.sampling.nucleus import compile_nucleus
    from decoding.sampling.ranking import compile_ranking
    from decoding.sampling.row_draw import compile_draws
    from decoding.verify.tree_rows import compile_rows
    from engine.forward.runner import ModelRunner
    from engine.loading.model import LoadedModel
    from experiments.gpu_suite.models import SIZES, device_model, engines
    from experiments.gpu_suite.outputs import contestants
    from experiments.gpu_suite.texts import made_up

    torch.set_num_threads(1)
    compile_rows()
    compile_nucleus()
    compile_ranking(torch.bfloat16)
    compile_draws(torch.bfloat16)
    compile_partition()
    model = device_model("tiny", "cpu", torch.float64)
    loaded = LoadedModel(model, None, "tiny", _CONTEXT, ())
    prompts = made_up(2, SIZES["tiny"].shape["vocab_size"], 96, 48)
    with tempfile.TemporaryDirectory() as folder:
        shared = engines(loaded, ModelRunner(model, 1, _CONTEXT + 64), Path(folder))
        for contestant in contestants(shared, 32).values():
            contestant.run(prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
