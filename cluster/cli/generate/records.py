"""Records of ``outrider generate``, their results and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.cluster.cli.generate.prompt_file import PromptRecord

if TYPE_CHECKING:
    from outrider.decoding.request import SpecStats, StepOutput


@dataclass(slots=True)
class Record:
    """One record of the file and its result."""

    entry: PromptRecord
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stats: SpecStats | None = None  # set once it is generated
    error: str | None = None  # reason why it was not generated

    @property
    def finished(self) -> bool:
        """Return whether the record is generated or has failed."""
        return self.stats is not None or self.error is not None

    def take(self, output: StepOutput) -> None:
        """Add the output of one step."""
        self.token_ids += output.token_ids
        self.text += output.text
        if output.finish_reason is not None:
            self.finish_reason, self.stats = str(output.finish_reason), output.stats

    def result(self) -> dict[str, Any]:
        """Return the JSON line of the record; ``prefill_s`` and ``decode_s`` are seconds."""
        if self.stats is None:
            return {"id": self.entry.id, "error": self.error}
        return {
            "id": self.entry.id,
            "output_token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "steps": self.stats.steps,
            "tokens_per_step": round(self.stats.tokens_per_step(len(self.token_ids)), 4),
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "accepted_by_source": self.stats.accepted_by_source,
            "prefill_s": round(self.stats.prefill_s, 6),
            "decode_s": round(self.stats.decode_s, 6),
        }

    def readable(self) -> str:
        """Return the record as text for people."""
        if self.stats is None:
            return f"[{self.entry.id}] not generated: {self.error}\n"
        count = len(self.token_ids)
        rate = self.stats.tokens_per_step(count)
        return f"[{self.entry.id}] {self.text.strip()}\n  ({count} tokens, {rate:.2f} per step, {self.finish_reason})\n"


def summarize(records: Sequence[Record], wall_s: float) -> dict[str, Any]:
    """Return totals over all generated records."""
    stats = [record.stats for record in records if record.stats is not None]
    tokens = sum(len(record.token_ids) for record in records)
    steps = sum(one.steps for one in stats)
    by_source: dict[str, int] = {}
    for one in stats:
        for source, count in one.accepted_by_source.items():
            by_source[source] = by_source.get(source, 0) + count
    return {
        "records": len(stats),
        "failed": len(records) - len(stats),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "output_tokens": tokens,
        "steps": steps,
        "tokens_per_step": round(tokens / steps, 4) if steps else 0.0,
        "drafted": sum(one.drafted for one in stats),
        "accepted": sum(one.accepted for one in stats),
        "accepted_by_source": by_source,
        "prefill_s": round(sum(one.prefill_s for one in stats), 3),
        "decode_s": round(sum(one.decode_s for one in stats), 3),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 2),
    }


def readable_summary(summary: dict[str, Any]) -> str:
    """Return the summary as one line for people."""
    parts = [
        f"{summary['records']} records, {summary['output_tokens']} tokens in {summary['wall_s']:.1f} s",
        f"{summary['tokens_per_s']:.1f} tokens/s",
        f"{summary['tokens_per_step']:.2f} tokens per step",
        f"{summary['accepted']} of {summary['drafted']} drafted tokens accepted",
    ]
    if not summary["lossless"]:
        parts.append(f"{summary['strategy']} is lossy")
    group = summary.get("group")
    if group is not None:
        parts.append(f"{group['mean_width']:.2f} of {summary['world_size']} ranks on average, {group['losses']} lost")
        parts.append(f"exchange {100 * group['exchange_share']:.1f} % of the steps")
    if summary["failed"]:
        parts.append(f"{summary['failed']} records failed")
    return ", ".join(parts)
