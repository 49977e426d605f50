"""Outputs of a request with their times."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.decoding.request import FinishReason, StepOutput


@dataclass(slots=True)
class TimedRun:
    """Outputs of one choice as they arrived."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    error: str | None = None  # reason why the request was ended
    steps: int = 0
    first: int = 0  # tokens at ttft_s: can be more than one if little of the prompt had to be computed
    ttft_s: float = 0.0
    latency_s: float = 0.0
    energy_j: float | None = None  # None if the hardware does not count it

    @property
    def tokens_per_s(self) -> float | None:
        """Return the speed after the first step; None if only one step emitted tokens."""
        took_s, rest = self.latency_s - self.ttft_s, len(self.token_ids) - self.first
        return rest / took_s if rest and took_s > 0 else None

    def on_output(self, output: StepOutput, latency_s: float) -> None:
        """Add an output that arrived ``latency_s`` after the request."""
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
