"""Steps of a model by the attention kernels in Triton's interpreter, over 532 tokens, so that rows merge three splits.

It takes minutes: ``make prove`` runs it. ``test_slot_attention.py`` has the kernels alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.cuda.static_runner import StaticRunner
from outrider.engine.forward import exactness
from outrider.engine.forward.attention import TREE_ATTENTION
from tests.engine.cuda.test_slot_attention import INTERPRETED, needs_triton
from tests.helpers.models import FAMILIES


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run on no CPU but in the interpreter")
@pytest.mark.timeout(3000)
def test_steps_of_a_family_are_exact_over_three_splits() -> None:
    config = deepcopy(FAMILIES["qwen3"])
    config.max_position_embeddings, config.num_hidden_layers = 1024, 1
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=TREE_ATTENTION).eval()
    runner = StaticRunner(model, 2, 700, 64)
    assert len(exactness._tokens_of(runner)) == 532
    assert exactness.check_attention(runner) is None
    assert exactness.check(runner) is None


@needs_triton
@pytest.mark.proof
@pytest.mark.timeout(3000)
@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter itself")
def test_in_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "family", __file__]
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "1"}, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
