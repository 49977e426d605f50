"""Whether forwards of any number of rows are exact, in a process of its own: python -m experiments.gpu_suite.parts.any_rows

CUBLAS_WORKSPACE_CONFIG and CUBLASLT_WORKSPACE_SIZE are set before it starts. The last line of stdout is JSON: what the check of
exactness says, and for each kind of module, how many numbers of rows gave the first row other bits than it has alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.engine.cuda.static_runner import StaticRunner, has_graphs
from outrider.engine.forward import exactness
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.gpu_suite.device import is_cuda, measured_on
from outrider.experiments.gpu_suite.models import device_model

_CAPACITY = 512
_ROWS = (*range(1, 66), 128, 257, 300, 512)  # the check computes 1 to 65 rows, and pieces of 50, 257 and 300


def main() -> int:
    """Check, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("device")
    parser.add_argument("dtype")
    parser.add_argument("seed", type=int)
    parser.add_argument("--double", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if is_cuda(args.device):
        torch.backends.cuda.preferred_blas_library("cublaslt")
    with measured_on(args.device, args.double):
        model = device_model(args.size, args.device, getattr(torch, args.dtype), args.seed)
        if has_graphs(model):  # a step of each number of rows, computed without a graph and without rows beyond
            runner: ModelRunner = StaticRunner(model, 2, _CAPACITY, None, _ROWS)
        else:
            runner = ModelRunner(model, 2, _CAPACITY)
        found = {"check": exactness.check(runner), "differing": differing(model, args.seed)}
    print(json.dumps(found))
    return 0


@torch.inference_mode()
def differing(model: PreTrainedModel, seed: int) -> dict[str, int]:
    """Return for each kind and shape of a product or a norm of a model the numbers of rows that change the bits of a row."""
    torch.manual_seed(seed)
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


if __name__ == "__main__":
    sys.exit(main())
