"""Every metric of ``/metrics``: its name, what it says, its labels, and where its value is in what an engine replica tells.

Names, types and labels of ``vllm:`` are vLLM's own, so that dashboards and load tools made for it read them unchanged;
``outrider:`` is what it has no name for. Names of counters are without the ``_total`` that the text form adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from actors.replica import Description
from cache_service.mirror import MirrorCounts
from decoding.budget import BudgetCounts
from engine.metrics import MetricsCounts
from engine.strategy_counts import StrategyCounts


@dataclass(frozen=True, slots=True)
class Told:
    """What one engine replica says of itself, with its counters."""

    replica: Description
    metrics: MetricsCounts


Samples = Iterable[tuple[tuple[str, ...], float]]  # values of the labels, value


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of every engine."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    labels: tuple[str, ...]  # beside ``model_name`` and ``engine``
    samples: Callable[[Told], Samples]


def _counter(name: str, help: str, value: Callable[[Told], float | None]) -> Family:
    return Family("counter", name, help, (), _single(value))


def _gauge(name: str, help: str, value: Callable[[Told], float | None]) -> Family:
    return Family("gauge", name, help, (), _single(value))


def _single(value: Callable[[Told], float | None]) -> Callable[[Told], Samples]:
    """One sample without labels; none where there is no value."""

    def samples(told: Told) -> Samples:
        found = value(told)
        return () if found is None else (((), found),)

    return samples


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


def _kv_usage(told: Told) -> float:
    counts = told.replica.counts
    return counts.running / max(1, counts.running + counts.free_slots)


def _cache_config(told: Told) -> Samples:
    info, counts = told.replica.info, told.replica.counts
    return (((str(info.max_model_len), str(counts.running + counts.free_slots), info.dtype), 1.0),)


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


VLLM: tuple[Family, ...] = (
    _gauge("vllm:num_requests_running", "Requests in the steps of the model.", lambda one: one.replica.counts.running),
    _gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", lambda one: one.replica.counts.waiting),
    _gauge("vllm:kv_cache_usage_perc", "KV slots in use; 1 means all of them.", _kv_usage),
    _counter(
        "vllm:prefix_cache_queries",
        "Tokens of requests that might find their KV computed.",
        lambda one: one.replica.counts.prefix_queries,
    ),
    _counter(
        "vllm:prefix_cache_hits", "Of these, tokens that were not computed again.", lambda one: one.replica.counts.prefix_hits
    ),
    _counter(
        "vllm:num_preemptions",
        "Times that a request lost its slot to a more urgent one.",
        lambda one: one.replica.counts.preemptions,
    ),
    _counter("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.", lambda one: one.metrics.prompt_tokens),
    _counter("vllm:generation_tokens", "Tokens emitted.", lambda one: one.metrics.generation_tokens),
    Family(
        "counter",
        "vllm:request_success",
        "Requests that have ended, by reason: stop, length, abort or error.",
        ("finished_reason",),
        lambda one: (((reason,), count) for reason, count in one.metrics.finished.items()),
    ),
    _counter("vllm:spec_decode_num_drafts", "Draft trees verified, one a request and step.", lambda one: one.metrics.drafts),
    _counter(
        "vllm:spec_decode_num_draft_tokens", "Draft tokens verified, all branches counted.", lambda one: one.metrics.draft_tokens
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted and emitted.",
        lambda one: sum(one.metrics.accepted_per_position),
    ),
    Family(
        "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Of these, by depth in the draft tree.",
        ("position",),
        lambda one: (((str(at),), count) for at, count in enumerate(one.metrics.accepted_per_position)),
    ),
    Family(
        "gauge",
        "vllm:cache_config_info",
        "The KV memory: as many blocks as there are slots, each of them holds one request's whole context.",
        ("block_size", "num_gpu_blocks", "cache_dtype"),
        _cache_config,
    ),
)

_BY_STRATEGY = ("strategy", "lossless")

STEPS: tuple[Family, ...] = (
    _counter("outrider:steps", "Forwards of the target model.", lambda one: one.metrics.steps),
    _counter(
        "outrider:step_rows", "Rows that these computed: prompt tokens, roots and drafted rows.", lambda one: one.metrics.rows
    ),
    _counter("outrider:forward_seconds", "Seconds in these, verification included.", lambda one: one.metrics.forward_s),
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
    _counter("outrider:budget_rows", "Rows that the budget granted.", _budget(lambda budget: budget.granted)),
    _counter(
        "outrider:budget_offered_rows",
        "Rows that drafters had found, from which it chose.",
        _budget(lambda budget: budget.offered),
    ),
    _counter(
        "outrider:budget_requests", "Requests that were asked for rows, step by step.", _budget(lambda budget: budget.asked)
    ),
    _gauge(
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
    _gauge(
        "outrider:idle_power_watts",
        "Power that the devices drew before the first request.",
        lambda one: None if one.replica.energy is None else one.replica.energy.idle_w,
    ),
)

MEMORY: tuple[Family, ...] = (
    _gauge("outrider:process_resident_bytes", "Memory of the replica's process.", lambda one: one.metrics.resident_bytes),
    _gauge("outrider:history_bytes", "Memory of remembered outputs.", lambda one: one.metrics.history_bytes),
    _gauge("outrider:mirror_connected", "1 while Redis answers.", _mirror(lambda mirror: mirror.connected)),
    _gauge(
        "outrider:mirror_lag_seconds",
        "Age of what is read from Redis now; 0 when all is read.",
        _mirror(lambda mirror: mirror.lag_s),
    ),
    _gauge(
        "outrider:mirror_waiting_tokens", "Tokens read and not drafted from yet.", _mirror(lambda mirror: mirror.waiting_tokens)
    ),
    _gauge("outrider:mirror_outbox_bytes", "What waits to be written to Redis.", _mirror(lambda mirror: mirror.outbox_bytes)),
    _counter("outrider:mirror_published_tokens", "Tokens written to Redis.", _mirror(lambda mirror: mirror.published_tokens)),
    _counter("outrider:mirror_applied_tokens", "Tokens that came from Redis.", _mirror(lambda mirror: mirror.applied_tokens)),
    _counter("outrider:mirror_dropped_tokens", "Tokens that Redis never got.", _mirror(lambda mirror: mirror.dropped_tokens)),
    _counter(
        "outrider:mirror_lost_records", "Records that were written and never came.", _mirror(lambda mirror: mirror.lost_records)
    ),
    _counter(
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
    _gauge("outrider:ranks_ready", "Ranks that share the steps.", _ranks_ready),
    _gauge("outrider:ranks", "Ranks that should.", _ranks),
    _gauge("outrider:group_width", "Ranks that share the steps now, of other replicas, too.", _width),
    _counter("outrider:rank_losses", "Ranks lost.", lambda one: one.replica.group.losses if one.replica.group else None),
    _counter(
        "outrider:rank_divergences",
        "Walks left out because their first token was not the leader's.",
        lambda one: one.replica.group.divergences if one.replica.group else None,
    ),
    _counter(
        "outrider:rank_disagreements",
        "Ranks whose committed text was not the leader's.",
        lambda one: one.replica.group.disagreements if one.replica.group else None,
    ),
    _counter(
        "outrider:exchange_seconds",
        "Seconds of steps beyond the slowest rank's own: dealing, messages, waiting, merging.",
        lambda one: one.replica.group.exchange_s if one.replica.group else None,
    ),
)

FAMILIES = VLLM + STEPS + MEMORY + RANKS
