"""Outputs of a step for a request: acceptance, emitted tokens with log-probabilities and reports, and counters."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.StrEnum):
    """Reason why a request ended, in OpenAI's words; ``abort`` and ``error`` are Outrider's own."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class SpecStats:
    """Counters of one request. ``steps`` counts forwards that emitted tokens, including the one that ends the prefill."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was cached
    prefill_s: float = 0.0  # from admission to the first token
    decode_s: float = 0.0  # from the first token to the last
    propose_s: float = 0.0
    forward_s: float = 0.0  # each request counts its whole steps, although steps are shared
    energy_j: float | None = None  # its share of the devices' energy in its steps; None if not measured

    def tokens_per_step(self, emitted: int) -> float:
        """Return emitted tokens per target forward; 0.0 before the first."""
        return emitted / self.steps if self.steps else 0.0


@dataclass(slots=True)  # not frozen: frozen instances are slower to create, and every request gets one per step
class Acceptance:
    """Verification result of one tree: accepted rows in order of depth, and the target's own next token (bonus token)."""

    rows: tuple[int, ...]
    next_token: int

    @property
    def count(self) -> int:
        """Return the number of emitted tokens: accepted drafts and the bonus token."""
        return len(self.rows) + 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token before bias, penalties, temperature and truncation (vLLM's ``raw_logprobs``), natural log."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the likeliest tokens, in descending order, ties by token id
    rank: int | None = None  # rank among all tokens, 1 is the likeliest; set for prompt tokens only


@dataclass(frozen=True, slots=True)
class StepReport:
    """Drafter of each token that a step emitted, for requests with ``report`` (see ``decoding.budget.attribution``)."""

    pieces: tuple[str, ...]  # parts of the output's ``text``, one per token; "" for an incomplete character
    sources: tuple[str, ...]  # one per token: ``model`` for the target's own, else the draft source
    drafted: int  # verified rows, accepted ones included

    @property
    def accepted(self) -> int:
        """Return the number of drafted tokens that were emitted."""
        return sum(source != "model" for source in self.sources)


@dataclass(slots=True)  # not frozen: frozen instances are slower to create, and every request gets one per step
class StepOutput:
    """Output of one step for one request. ``text`` excludes incomplete characters and possible beginnings of stop strings."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR
    stats: SpecStats | None = None  # set with the finish reason
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, if requested
    report: StepReport | None = None  # if requested
    # If requested, in the first output with tokens: one for each prompt token from the second on.
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    fault_field: str | None = None  # set with error: the faulty field of the request; None: a step failed
    alone: bool | None = None  # set without tokens: whether the next step runs this quarantined request alone


def merge_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    """Merge consecutive outputs of a choice into one; without outputs, return one without tokens.

    Example: ``(7,) "ab"`` and ``(8, 9) "c"`` are ``(7, 8, 9) "abc"``.
    """
    if not outputs:
        return StepOutput("", (), "")
    if len(outputs) == 1:
        return outputs[0]
    changes: dict[str, Any] = {}
    for part in dataclasses.fields(StepOutput):
        values = [value for output in outputs if (value := getattr(output, part.name)) is not None]
        if part.name == "text":
            changes["text"] = "".join(values)
        elif values and isinstance(values[0], tuple):  # token ids, log-probabilities: concatenated
            changes[part.name] = tuple(item for value in values for item in value)
        elif values:
            changes[part.name] = values[-1]
    return StepOutput(**changes)


@dataclass(frozen=True, slots=True)
class BudgetCounts:
    """Decisions of a draft budget since its start."""

    asked: int = 0  # times that a request was considered for drafting
    offered: int = 0  # candidate rows that were likely enough to be considered
    granted: int = 0  # offered rows that were drafted
    least_chance: float = 0.0  # lowest acceptance probability at which a row paid off in the latest step
