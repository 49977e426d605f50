"""What came of a request, with the times at which it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoding.request import FinishReason, StepOutput


@dataclass(slots=True)
class TimedRun:
    """The outputs of one choice, as they were heard."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    error: str | None = None  # why it was broken off
    steps: int = 0
    first: int = 0  # tokens that came at ttft_s: more than one where little of the prompt was to be computed
    ttft_s: float = 0.0
    latency_s: float = 0.0
    energy_j: float | None = None  # as hardware counted it, where it did

    @property
    def tokens_per_s(self) -> float | None:
        """Those after the first step, over the time since; None where there was one step only."""
        took_s, rest = self.latency_s - self.ttft_s, len(self.token_ids) - self.first
        return rest / took_s if rest and took_s > 0 else None

    def hear(self, output: StepOutput, latency_s: float) -> None:
        """Takes in an output that came so long after the choice began."""
        self.latency_s = latency_s
        if output.token_ids:
            if not self.steps:
                self.ttft_s, self.first = latency_s, len(output.token_ids)
            self.steps += 1
        self.token_ids += output.token_ids
        self.text += output.text
        self.reason, self.error = output.finish_reason, output.error
        if output.stats is not None:
            self.energy_j = output.stats.energy_j
