"""Every metric of ``/metrics``: those of vLLM (``vllm_metrics``), and under ``outrider:`` what it has no name for."""

from __future__ import annotations

from collections.abc import Callable

from cache_service.mirror.mirror import MirrorCounts
from cluster.observe.metric_family import Family, Samples, Told, counter, gauge
from cluster.observe.vllm_metrics import VLLM
from decoding.budget.row_budget import BudgetCounts
from engine.measures.strategy_counts import StrategyCounts


def _strategies(value: Callable[[StrategyCounts], float | None]) -> Callable[[Told], Samples]:
    """A sample for each strategy."""

    def samples(told: Told) -> Samples:
        for counts in told.replica.strategies:
            found = value(counts)
            if found is not None:
                yield (counts.strategy, "true" if counts.lossless else "false"), found

    return samples


def _mirror(value: Callable[[MirrorCounts], float]) -> Callable[[Told], float | None]:
    """Of replicas that share what they generate."""
    return lambda told: None if told.replica.cache is None else value(told.replica.cache)


def _budget(value: Callable[[BudgetCounts], float]) -> Callable[[Told], float | None]:
    """Of engines with a strategy that has a budget."""
    return lambda told: None if told.metrics.budget is None else value(told.metrics.budget)


def _ranks_ready(told: Told) -> float:
    group = told.replica.group
    return 1 if group is None or group.width is not None else len(group.ready)


def _ranks(told: Told) -> float:
    """An elastic group is made up of replicas, each of which is one rank."""
    group = told.replica.group
    return 1 if group is None or group.width is not None else group.world_size


def _width(told: Told) -> float:
    group = told.replica.group
    return 1 if group is None else group.width or len(group.ready)


_BY_STRATEGY = ("strategy", "lossless")

STEPS: tuple[Family, ...] = (
    gauge(
        "outrider:exact",
        "1 where rows were seen, at the start, to have the same bits in any company; else near-ties may fall either way.",
        lambda one: float(one.replica.info.exact),
    ),
    counter("outrider:steps", "Forwards of the target model.", lambda one: one.metrics.steps),
    counter(
        "outrider:step_rows", "Rows that these computed: prompt tokens, roots and drafted rows.", lambda one: one.metrics.rows
    ),
    counter("outrider:forward_seconds", "Seconds in these, verification included.", lambda one: one.metrics.forward_s),
    Family(
        "counter",
        "outrider:accepted_tokens_by_source",
        "Accepted draft tokens of requests that have ended, by what drafted them.",
        ("source",),
        lambda one: (((source,), count) for source, count in one.metrics.accepted_by_source.items()),
    ),
    Family(
        "counter",
        "outrider:drafts_by_source",
        "Draft trees that held tokens of a drafter: where past texts had something to say, history and trie.",
        ("source",),
        lambda one: (((source,), count) for source, count in one.metrics.drafts_by_source.items()),
    ),
    Family(
        "counter",
        "outrider:draft_tokens_by_source",
        "Draft tokens verified, by the drafter that proposed them.",
        ("source",),
        lambda one: (((source,), count) for source, count in one.metrics.drafted_by_source.items()),
    ),
    counter("outrider:budget_rows", "Rows that the budget granted.", _budget(lambda budget: budget.granted)),
    counter(
        "outrider:budget_offered_rows",
        "Rows that drafters had found, from which it chose.",
        _budget(lambda budget: budget.offered),
    ),
    counter("outrider:budget_requests", "Requests that were asked for rows, step by step.", _budget(lambda budget: budget.asked)),
    gauge(
        "outrider:budget_least_chance",
        "Chance of acceptance from which a row paid in the latest step.",
        _budget(lambda budget: budget.least_chance),
    ),
    Family("counter", "outrider:requests", "Requests that have ended.", _BY_STRATEGY, _strategies(lambda one: one.requests)),
    Family("counter", "outrider:tokens", "Tokens emitted for these.", _BY_STRATEGY, _strategies(lambda one: one.tokens)),
    Family(
        "counter",
        "outrider:request_steps",
        "Steps in which these emitted tokens.",
        _BY_STRATEGY,
        _strategies(lambda one: one.steps),
    ),
    Family("counter", "outrider:draft_tokens", "Draft tokens for these.", _BY_STRATEGY, _strategies(lambda one: one.drafted)),
    Family(
        "counter", "outrider:accepted_tokens", "Of these, accepted ones.", _BY_STRATEGY, _strategies(lambda one: one.accepted)
    ),
    Family(
        "counter",
        "outrider:request_energy_joules",
        "Energy booked on requests that have ended; absent where nothing is metered.",
        _BY_STRATEGY,
        _strategies(lambda one: one.energy_j),
    ),
    Family(
        "counter",
        "outrider:energy_joules",
        "Energy of the devices while there were requests, by the meter that told it.",
        ("meter",),
        lambda one: () if one.replica.energy is None else (((one.replica.energy.source,), one.replica.energy.steps_j),),
    ),
    gauge(
        "outrider:idle_power_watts",
        "Power that the devices drew before the first request.",
        lambda one: None if one.replica.energy is None else one.replica.energy.idle_w,
    ),
)

MEMORY: tuple[Family, ...] = (
    gauge("outrider:process_resident_bytes", "Memory of the replica's process.", lambda one: one.metrics.resident_bytes),
    gauge("outrider:history_bytes", "Memory of remembered outputs.", lambda one: one.metrics.history_bytes),
    gauge("outrider:mirror_connected", "1 while Redis answers.", _mirror(lambda mirror: mirror.connected)),
    gauge(
        "outrider:mirror_lag_seconds",
        "Age of what is read from Redis now; 0 when all is read.",
        _mirror(lambda mirror: mirror.lag_s),
    ),
    gauge(
        "outrider:mirror_waiting_tokens", "Tokens read and not drafted from yet.", _mirror(lambda mirror: mirror.waiting_tokens)
    ),
    gauge("outrider:mirror_outbox_bytes", "What waits to be written to Redis.", _mirror(lambda mirror: mirror.outbox_bytes)),
    counter("outrider:mirror_published_tokens", "Tokens written to Redis.", _mirror(lambda mirror: mirror.published_tokens)),
    counter("outrider:mirror_applied_tokens", "Tokens that came from Redis.", _mirror(lambda mirror: mirror.applied_tokens)),
    counter("outrider:mirror_dropped_tokens", "Tokens that Redis never got.", _mirror(lambda mirror: mirror.dropped_tokens)),
    counter(
        "outrider:mirror_lost_records", "Records that were written and never came.", _mirror(lambda mirror: mirror.lost_records)
    ),
    counter(
        "outrider:mirror_corrupt_records",
        "Records and snapshots that could not be read.",
        _mirror(lambda mirror: mirror.corrupt_records + mirror.corrupt_snapshots),
    ),
    Family(
        "counter",
        "outrider:mirror_failures",
        "Attempts that Redis did not serve, by kind.",
        ("kind",),
        lambda one: () if one.replica.cache is None else (((kind,), n) for kind, n in one.replica.cache.failures.items()),
    ),
)

RANKS: tuple[Family, ...] = (
    gauge("outrider:ranks_ready", "Ranks that share the steps.", _ranks_ready),
    gauge("outrider:ranks", "Ranks that should.", _ranks),
    gauge("outrider:group_width", "Ranks that share the steps now, of other replicas, too.", _width),
    counter("outrider:rank_losses", "Ranks lost.", lambda one: one.replica.group.losses if one.replica.group else None),
    counter(
        "outrider:rank_divergences",
        "Walks left out because their first token was not the leader's.",
        lambda one: one.replica.group.divergences if one.replica.group else None,
    ),
    counter(
        "outrider:rank_disagreements",
        "Ranks whose committed text was not the leader's.",
        lambda one: one.replica.group.disagreements if one.replica.group else None,
    ),
    counter(
        "outrider:exchange_seconds",
        "Seconds of steps beyond the slowest rank's own: partitioning, messages, waiting, merging.",
        lambda one: one.replica.group.exchange_s if one.replica.group else None,
    ),
)

FAMILIES = VLLM + STEPS + MEMORY + RANKS
