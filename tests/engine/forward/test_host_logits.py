"""Which logits of a step reach the host where the model is on another device: those that a choice looks at, and no others."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import engine_over, tiny_model

PROMPT = [5, 6, 7, 5, 6]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, and counts the rows that are copied from there."""

    is_cpu = False
    copied: ClassVar[list[int]] = []

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """The numbers as they are."""
        self.copied.append(1 if self.dim() == 1 else len(self))
        return self.as_subclass(torch.Tensor)  # type: ignore[arg-type]


class FarExecutor(LocalExecutor):
    """Computes as any other; its logits are elsewhere."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.runner = Far(runner)  # type: ignore[assignment]


class Far:
    """A runner's forward whose logits are elsewhere."""

    hidden = None

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.rope = runner, runner.rope

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner``."""
        return self._runner.forward(batch).as_subclass(Elsewhere)  # type: ignore[arg-type]


def requests() -> list[Request]:
    """Two greedy ones, a sampled one, and one with log-probabilities."""
    kinds = [{}, {}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}, {"logprobs": 2}]
    return [
        Request(str(at), PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, **kind))  # type: ignore[arg-type]
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("strategy", ["autoregressive", "jacobi"])
def test_only_rows_that_a_choice_looks_at_are_copied(strategy: str) -> None:
    runner = tiny_model("llama", "float32").runner
    outputs = []
    for executor in (LocalExecutor(runner), FarExecutor(runner)):
        asked = requests()
        engine = engine_over(runner, build_drafter(strategy, {}), executor=executor)
        for request in asked:
            engine.add(request)
        with torch.inference_mode():
            while engine.has_work:
                Elsewhere.copied.clear()
                emitted = {output.request_id: len(output.token_ids) for output in engine.step()}
                if executor.runner is not runner:
                    looked_at = emitted.get("2", 0) + emitted.get("3", 0)
                    assert sum(Elsewhere.copied) == looked_at  # a row for each token
                    assert len(Elsewhere.copied) <= 1 + max(0, looked_at - 2)  # the roots of both at once
        outputs.append([request.output_ids.tolist() for request in asked])
        drafted = sum(request.stats.drafted for request in asked[2:])
        assert drafted > 0 or strategy == "autoregressive"
    assert outputs[0] == outputs[1]
