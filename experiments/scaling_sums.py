"""What the entries of ``outrider bench scaling`` did, in figures: speeds, ratios, and what a step is made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.competition import Tally, joules_per_token
from experiments.scaling_clocks import Spent
from experiments.scaling_options import PLAIN
from experiments.scaling_process import Entry


@dataclass(frozen=True, slots=True)
class Lap:
    """An entry on one workload, all repeats."""

    tally: Tally
    prompts: int
    spent: Spent
    steps: int  # after first tokens
    output_tokens: int  # of one repeat

    def decode_rates(self) -> list[float]:
        """Tokens per second after the first token, repeat by repeat."""
        tokens = self.tally.tokens / len(self.tally.wall_s) - self.prompts
        return [tokens / (wall - prefill) for wall, prefill in zip(self.tally.wall_s, self.tally.prefill_s, strict=True)]

    def total_rates(self) -> list[float]:
        """Tokens per second, prefill included, repeat by repeat."""
        return [self.tally.tokens / len(self.tally.wall_s) / wall for wall in self.tally.wall_s]


def step_split(lap: Lap) -> dict[str, Any]:
    """Milliseconds of one step after the first token, on average.

    ``recompute`` and ``exchange`` are as the form told them, ``compute`` what is left of the forward, ``propose`` the drafting
    and ``rest`` the engine's other work. Where the exchange cannot be told it is None, and part of ``compute``.

    Returns:
        Those five, ``exchange_share`` of the step, and of a lookahead-parallel group ``rows`` and ``recomputed`` of a rank,
        ``balance``, the mean rank's time as a share of the slowest's, and ``shared_steps``, the share in which others had a part.
    """
    tally, spent, count = lap.tally, lap.spent, max(lap.steps, 1)
    assert tally.propose_s is not None
    forward, propose = sum(tally.forward_s) / count, sum(tally.propose_s) / count
    rest = (sum(tally.wall_s) - sum(tally.prefill_s)) / count - forward - propose
    recompute, exchange = spent.recompute_s / count, None if spent.exchange_s is None else spent.exchange_s / count
    parts = {
        "propose": propose, "compute": forward - (exchange or 0.0) - recompute, "recompute": recompute, "exchange": exchange,
        "rest": rest,
    }  # fmt: skip
    split: dict[str, Any] = {name: None if part is None else round(1e3 * part, 3) for name, part in parts.items()}
    if exchange:
        split["exchange_share"] = round(exchange / (forward + propose + rest), 4)
    if spent.told:
        told = {"rows": spent.rows, "recomputed": spent.recomputed, "balance": spent.balance, "shared_steps": spent.shared}
        split |= {name: round(value / spent.told, 3) for name, value in told.items()}
    return split


def ratios(own: Mapping[str, Sequence[float]], base: Mapping[str, Sequence[float]]) -> list[float]:
    """Own rates over those of another, as the mean over workloads, repeat by repeat."""
    pairs = [[a / b for a, b in zip(own[name], base[name], strict=True)] for name in own]
    return [round(statistics.fmean(repeat), 3) for repeat in zip(*pairs, strict=True)]


def row(lap: Lap) -> dict[str, Any]:
    """An entry on one workload."""
    return {
        "tokens_per_step": round(lap.tally.tokens / lap.tally.steps, 3),
        "tokens_per_s": [round(rate, 2) for rate in lap.total_rates()],
        "decode_tokens_per_s": [round(rate, 2) for rate in lap.decode_rates()],
        "identical": lap.prompts - len(lap.tally.differing),
        "ms": step_split(lap),
    }


def overall(entry: Entry, entries: Sequence[Entry], laps: Mapping[str, Mapping[str, Lap]]) -> dict[str, Any]:
    """An entry over all workloads; each ratio is the mean over them, repeat by repeat.

    Args:
        entry: one of ``entries``.
        entries: all that competed.
        laps: theirs, by label and workload.
    """
    form, own = entry.form, list(laps[entry.label].values())
    tokens = sum(lap.output_tokens for lap in own)
    speeds = [tokens / sum(lap.tally.wall_s[at] for lap in own) for at in range(len(own[0].tally.wall_s))]
    splits = [step_split(lap) for lap in own]
    decode = {label: {name: lap.decode_rates() for name, lap in of.items()} for label, of in laps.items()}
    against = references(entry, entries)
    return {
        "form": form.label, "kind": form.kind, "workers": form.workers, "ranks": form.ranks, "threads": form.rank_threads,
        "strategy": entry.strategy.label, "budget": entry.budget,
        "tokens_per_step": round(sum(lap.tally.tokens for lap in own) / sum(lap.tally.steps for lap in own), 3),
        "tokens_per_s": [round(speed, 2) for speed in speeds],
        "tokens_per_s_per_device": [round(speed / form.workers, 2) for speed in speeds],
        **joules_per_token([lap.tally for lap in own]),
        "identical": sum(lap.prompts - len(lap.tally.differing) for lap in own),
        "records": sum(lap.prompts for lap in own),
        "decode_ratio": {name: ratios(decode[entry.label], decode[other.label]) for name, other in against.items()},
        "ms": {name: _mean([split[name] for split in splits if name in split]) for name in splits[0]},
    }  # fmt: skip


def references(entry: Entry, entries: Sequence[Entry]) -> dict[str, Entry]:
    """What an entry's speed is told against, as far as it ran: plain decoding on one worker and on as many threads as the entry
    has workers (the most where it has one), and the entry's own strategy on these."""
    wanted = {
        "plain": ("one", PLAIN), "plain_threads": ("threads", PLAIN),
        "one": ("one", entry.strategy.label), "one_threads": ("threads", entry.strategy.label),
    }  # fmt: skip
    found = {}
    for name, (kind, strategy) in wanted.items():
        alike = [e for e in entries if (e.form.kind, e.strategy.label) == (kind, strategy)]
        same = [e for e in alike if kind == "one" or entry.form.workers in (1, e.form.workers)]
        if same:
            found[name] = max(same, key=lambda e: e.form.workers)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None
