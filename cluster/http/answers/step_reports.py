"""Reports of steps, with ``speculation: {"report": true}``: who drafted each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from decoding.request import StepReport


class ReportedToken(BaseModel):
    """A token that was emitted."""

    text: str  # what it released: "" for a part of a character, and what stop strings held back with the token that decides it
    source: str  # model, prompt, document, output, trie, public, or the drafter's name: see decoding.budget.attribution


class ReportedStep(BaseModel):
    """A forward of the target model that emitted tokens, and these."""

    tokens: list[ReportedToken]
    drafted: int  # tokens that were verified
    accepted: int  # of these, emitted


class Reported(BaseModel):
    """Steps of a choice, in order. All texts together are what the model wrote: without an echo, with the calls of tools."""

    steps: list[ReportedStep]


def reported(reports: Sequence[StepReport]) -> Reported:
    """Reports as they are answered."""
    steps = []
    for report in reports:
        pairs = zip(report.pieces, report.sources, strict=True)
        tokens = [ReportedToken(text=text, source=source) for text, source in pairs]
        steps.append(ReportedStep(tokens=tokens, drafted=report.drafted, accepted=report.accepted))
    return Reported(steps=steps)
