"""Outputs of a step for a request: the acceptance, the emitted tokens with log-probabilities and reports, and the counters."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words; ``abort`` and ``error`` are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class SpecStats:
    """Counters of one request. ``steps`` are forwards that emitted tokens, the one that ends the prefill included."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt: their KV was there already
    prefill_s: float = 0.0  # from admission to the first token
    decode_s: float = 0.0  # from the first token to the last
    propose_s: float = 0.0
    forward_s: float = 0.0  # the request's share of its steps is the whole step: steps are shared
    energy_j: float | None = None  # its share of what the devices used in its steps; None where nothing measured it

    def tokens_per_step(self, emitted: int) -> float:
        """Emitted tokens per target forward; 0.0 before the first."""
        return emitted / self.steps if self.steps else 0.0


@dataclass(slots=True)  # not frozen, which would take longer to make: there is one for each request in each step
class Acceptance:
    """What verification kept of a tree: the accepted rows in order of depth, and the target's own token after them."""

    rows: tuple[int, ...]
    next_token: int

    @property
    def count(self) -> int:
        """Tokens emitted: accepted drafts and the bonus token."""
        return len(self.rows) + 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found an emitted token: natural logarithms of the softmax of its raw logits, before bias, penalties,
    temperature and truncation (vLLM's ``raw_logprobs``)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens and theirs, the most likely first, equals by token id
    rank: int | None = None  # among all tokens, 1 the most likely; told of tokens of a prompt only


@dataclass(frozen=True, slots=True)
class StepReport:
    """Who drafted what a step emitted, for requests that ask (see ``decoding.budget.attribution``)."""

    pieces: tuple[str, ...]  # of the output's ``text``, one for each token: what it released; "" for a part of a character
    sources: tuple[str, ...]  # one for each token: ``model`` for the target's own, else what drafted it
    drafted: int  # rows that were verified, accepted ones included

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return sum(source != "model" for source in self.sources)


@dataclass(slots=True)  # not frozen, which would take longer to make: there is one for each request in each step
class StepOutput:
    """What one step gives one request. ``text`` is what can be shown now: unfinished characters and possible beginnings of stop
    strings are held back until they are decided."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR
    stats: SpecStats | None = None  # set with the finish reason
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of token_ids, where the request asks for them
    report: StepReport | None = None  # where the request asks for it
    # Of the first output with tokens, where the request asks for it: one for each token of the prompt from the second on.
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    fault_field: str | None = None  # set with error: the request's field that is at fault; None: a step failed
    alone: bool | None = None  # set without tokens: whether the next step computes this request, which is quarantined, alone


def merge_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    """Consecutive outputs of a choice as one; of none, one without tokens.

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
        elif values and isinstance(values[0], tuple):  # token ids, log-probabilities: one after the other
            changes[part.name] = tuple(item for value in values for item in value)
        elif values:
            changes[part.name] = values[-1]
    return StepOutput(**changes)


@dataclass(frozen=True, slots=True)
class BudgetCounts:
    """What a budget has decided since its start."""

    asked: int = 0  # times that a request was asked for rows
    offered: int = 0  # rows that were found likely enough to be looked at
    granted: int = 0  # of these, rows that were drafted
    least_chance: float = 0.0  # of the latest step: a row of a lower chance does not pay
