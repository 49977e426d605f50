"""Throughput, latencies and draft counts of a load."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.experiments.bench.engines.traffic import Journey, ServerCounts


def full_load_s(journeys: Sequence[Journey]) -> float:
    """Return the duration in which a closed loop had all its clients, until the first one had nothing left to ask.

    The rest has an ever lower concurrency, the same for all servers, and would make a run at 32 clients look like one at 16.
    """
    last_sent_s = max(journey.sent_s for journey in journeys)
    return min(journey.last_s for journey in journeys if journey.last_s > last_sent_s)


def measured(journeys: Sequence[Journey], counts: ServerCounts, closed: bool) -> dict[str, Any]:
    """Return the numbers of one server under one load of finished requests.

    Throughput of a ``closed`` loop is that of the time with all clients (``full_load_s``), else of the whole run. Latencies are
    percentiles in ms from the arrival. Draft counts are None if the server does not tell them.
    """
    assert journeys and all(journey.finished and journey.moments for journey in journeys), "a request did not end"
    wall_s = max(journey.last_s for journey in journeys)
    span_s = full_load_s(journeys) if closed else wall_s
    inside = sum(tokens for journey in journeys for at_s, tokens, _ in journey.moments if at_s <= span_s)
    tokens = sum(len(journey.output) for journey in journeys)
    turns = sum(len(journey.moments) for journey in journeys)
    drafted = sum(rows for journey in journeys for _, _, rows in journey.moments)
    return {
        "requests": len(journeys),
        "output_tokens": tokens,
        "wall_s": round(wall_s, 3),
        "span_s": round(span_s, 3),
        "decode_s": round(sum(journey.last_s - journey.first_s for journey in journeys), 3),
        "tokens_per_s": round(inside / span_s, 2),
        "requests_per_s": round(inside / span_s / (tokens / len(journeys)), 3),
        "ttft_ms": _percentiles([journey.ttft_s for journey in journeys]),
        "tpot_ms": _percentiles([journey.tpot_s for journey in journeys if journey.tpot_s is not None]),
        "e2e_ms": _percentiles([journey.e2e_s for journey in journeys]),
        "steps": counts.steps,
        "tokens_per_step": round(tokens / turns, 3),
        "drafted_per_step": round(drafted / counts.steps, 2) if counts.tells_drafts and counts.steps else None,
        "drafted_per_request_step": round(drafted / turns, 2) if counts.tells_drafts else None,
        "accepted_by_source": counts.accepted_by_source,
        "cached_tokens": counts.cached_tokens,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p99 and mean in ms; None without a value."""
    if not seconds:
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {"p50": round(1e3 * p50, 2), "p99": round(1e3 * p99, 2), "mean": round(1e3 * statistics.fmean(seconds), 2)}


def rows_of_a_cell(repeats: Mapping[str, Sequence[dict[str, Any]]], baseline: str) -> dict[str, dict[str, Any]]:
    """Return a row per server from its repeats (``measured``): medians, and ratios to the baseline of the same repeat.

    ``ratio`` compares tokens per second, ``e2e_ratio`` the mean time from arrival to end, and ``decode_ratio`` the time after the
    first token; more is faster. A server may have fewer repeats than the baseline.
    """
    rows = {}
    for name, own in repeats.items():
        pairs = list(zip(repeats[baseline], own, strict=False))
        ratio = [round(run["tokens_per_s"] / base["tokens_per_s"], 3) for base, run in pairs]
        row: dict[str, Any] = {"ratio": ratio, "ratio_median": round(statistics.median(ratio), 3)}
        row["e2e_ratio"] = [round(base["e2e_ms"]["mean"] / run["e2e_ms"]["mean"], 3) for base, run in pairs]
        if all(base["decode_s"] and run["decode_s"] for base, run in pairs):  # not where every output is one token
            row["decode_ratio"] = [round(base["decode_s"] / run["decode_s"], 3) for base, run in pairs]
        for key in ("tokens_per_s", "requests_per_s", "tokens_per_step", "drafted_per_step", "drafted_per_request_step"):
            row[key] = _median([run[key] for run in own])
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            row[key] = {part: _median([run[key][part] for run in own]) for part in own[0][key]}
        rows[name] = row | {"cached_tokens": _median([run["cached_tokens"] for run in own]), "repeats": list(own)}
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
