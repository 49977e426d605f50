"""Inputs and results of an audit: the served choice, and where plain decoding differs from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cluster.serving.generation import Job
from decoding.request import FinishReason


class Result(enum.StrEnum):
    """What came of one audit."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    SKIPPED = "skipped"  # plain decoding need not give the same tokens: the strategy is lossy, or draws on its own
    FAILED = "failed"  # it could not be computed again
    DROPPED = "dropped"  # the engine had no time for it


@dataclass(frozen=True, slots=True)
class Served:
    """A choice that was served to its end."""

    job: Job
    token_ids: tuple[int, ...]  # [m]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the tokens part. A token is None where that side had ended, for the reason that it gives."""

    position: int  # in the output, from 0
    served: int | None
    plain: int | None
    served_logprob: float | None = None  # of the model, after what both have in common; None where it is not known
    plain_logprob: float | None = None

    @property
    def gap(self) -> float | None:
        """How much likelier the model finds plain decoding's token than the one served, as a difference of log-probabilities.

        Where the model is not served exactly, near-ties may part: the gap is then within the rounding of the logits. A large one,
        or any where it is, is a fault.
        """
        if self.served_logprob is None or self.plain_logprob is None:
            return None
        return self.plain_logprob - self.served_logprob


@dataclass(frozen=True, slots=True)
class Audit:
    """One choice and what came of its audit."""

    request_id: str
    strategy: str | None  # that drafted; None: the server's own
    result: Result
    tokens: int  # served
    difference: Difference | None = None
    detail: str | None = None  # why it was skipped or failed, or how the ends differ


class ReplayError(RuntimeError):
    """A choice could not be computed again; the message says why."""
