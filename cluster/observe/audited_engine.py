"""An ``EnginePort`` that hands every finished choice to the auditor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from actors.replica import Description
from cluster.observe.audit import Auditor
from cluster.serving.generation import EnginePort, Job
from decoding.request import FinishReason, StepOutput


class AuditedEngine:
    """The ``EnginePort`` of another one. Jobs that the auditor does not want go straight through."""

    def __init__(self, engine: EnginePort, auditor: Auditor) -> None:
        self._engine, self._auditor = engine, auditor

    def generate(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        """See ``EnginePort.generate``."""
        return self._heard(job) if self._auditor.wants(job) else self._engine.generate(job)

    async def describe(self) -> list[Description]:
        """See ``EnginePort.describe``."""
        return await self._engine.describe()

    async def _heard(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        tokens = list(job.emitted)
        async with contextlib.aclosing(self._engine.generate(job)) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._auditor.served(job, tokens, output.finish_reason)
                yield output
