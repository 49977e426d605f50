"""Metrics of an engine replica in ``/metrics``: name, help, labels, and how to read the value from the replica's counts.

``vllm:`` metrics have vLLM's names, types and labels, so that its dashboards and load generators work; ``outrider:`` metrics have
no counterpart there. Names of counters lack the ``_total`` that the text format adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from actors.description import Description, GroupState
from cache_service.mirror.mirror import MirrorCounts
from decoding.step_output import BudgetCounts
from engine.measures.metrics import MetricsCounts
from engine.measures.strategy_counts import StrategyCounts


@dataclass(frozen=True, slots=True)
class Told:
    """Description and counters of one engine replica."""

    replica: Description
    metrics: MetricsCounts


Value = float | None  # None for no sample
Labelled = Mapping[tuple[str, ...], float]  # values by the values of the family's labels


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of every engine."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    value: Callable[[Told], Value | Labelled]
    labels: tuple[str, ...] = ()  # in addition to ``model_name`` and ``engine``

    def samples(self, told: Told) -> Labelled:
        """Return the values of one replica, by label values."""
        found = self.value(told)
        return found if isinstance(found, Mapping) else {} if found is None else {(): found}


counter, gauge = partial(Family, "counter"), partial(Family, "gauge")


def _by(counts: Mapping[str, float]) -> Labelled:
    return {(label,): count for label, count in counts.items()}


def _strategies(value: Callable[[StrategyCounts], Value]) -> Callable[[Told], Labelled]:
    def samples(told: Told) -> Labelled:
        found = {(one.strategy, "true" if one.lossless else "false"): value(one) for one in told.replica.strategies}
        return {labels: count for labels, count in found.items() if count is not None}

    return samples


def _mirror(value: Callable[[MirrorCounts], float]) -> Callable[[Told], Value]:
    return lambda told: None if told.replica.cache is None else value(told.replica.cache)


def _budget(value: Callable[[BudgetCounts], float]) -> Callable[[Told], Value]:
    return lambda told: None if told.metrics.budget is None else value(told.metrics.budget)


def _group(value: Callable[[GroupState], float], alone: Value = None) -> Callable[[Told], Value]:
    """Return a function that reads the group of ranks, or ``alone`` for a replica without one."""
    return lambda told: alone if told.replica.group is None else value(told.replica.group)


def _kv_usage(told: Told) -> float:
    counts = told.replica.counts
    return counts.running / max(1, counts.running + counts.free_slots)


def _cache_config(told: Told) -> Labelled:
    info, counts = told.replica.info, told.replica.counts
    return {(str(info.max_model_len), str(counts.running + counts.free_slots), info.dtype): 1.0}


def _energy(told: Told) -> Labelled:
    energy = told.replica.energy
    return {} if energy is None else {(energy.source,): energy.steps_j}


def _accepted_by_position(told: Told) -> Labelled:
    return {(str(at),): count for at, count in enumerate(told.metrics.accepted_per_position)}


VLLM: tuple[Family, ...] = (
    gauge("vllm:num_requests_running", "Requests in the steps of the model.", lambda one: one.replica.counts.running),
    gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", lambda one: one.replica.counts.waiting),
    gauge("vllm:kv_cache_usage_perc", "KV slots in use; 1 means all of them.", _kv_usage),
    counter(
        "vllm:prefix_cache_queries",
        "Tokens of requests that might find their KV computed.",
        lambda one: one.replica.counts.prefix_queries,
    ),
    counter(
        "vllm:prefix_cache_hits", "Of these, tokens that were not computed again.", lambda one: one.replica.counts.prefix_hits
    ),
    counter(
        "vllm:num_preemptions",
        "Times that a request lost its slot to a more urgent one.",
        lambda one: one.replica.counts.preemptions,
    ),
    counter("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.", lambda one: one.metrics.prompt_tokens),
    counter("vllm:generation_tokens", "Tokens emitted.", lambda one: one.metrics.generation_tokens),
    counter(
        "vllm:request_success",
        "Requests that have ended, by reason: stop, length, abort or error.",
        lambda one: _by(one.metrics.finished),
        ("finished_reason",),
    ),
    counter("vllm:spec_decode_num_drafts", "Draft trees verified, one a request and step.", lambda one: one.metrics.drafts),
    counter(
        "vllm:spec_decode_num_draft_tokens", "Draft tokens verified, all branches counted.", lambda one: one.metrics.draft_tokens
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted and emitted.",
        lambda one: sum(one.metrics.accepted_per_position),
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Of these, by depth in the draft tree.",
        _accepted_by_position,
        ("position",),
    ),
    gauge(
        "vllm:cache_config_info",
        "The KV memory: as many blocks as there are slots, each of them holds one request's whole context.",
        _cache_config,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
)

_BY_STRATEGY = ("strategy", "lossless")

STEPS: tuple[Family, ...] = (
    gauge(
        "outrider:exact",
        "1 where rows were seen, at the start, to have the same bits in any company; else near-ties may fall either way.",
        lambda one: float(one.replica.info.exact),
    ),
    gauge(
        "outrider:cuda_graph_failures",
        "Sizes of steps on a GPU that could not be captured as CUDA graphs: they are launched kernel by kernel, which is slower.",
        lambda one: float(len(one.replica.info.uncaptured_rows)),
    ),
    counter("outrider:steps", "Forwards of the target model.", lambda one: one.metrics.steps),
    counter(
        "outrider:step_rows", "Rows that these computed: prompt tokens, roots and drafted rows.", lambda one: one.metrics.rows
    ),
    counter(
        "outrider:out_of_memory_steps",
        "Forwards that ran out of device memory, and were computed again in smaller ones.",
        lambda one: one.metrics.out_of_memory_steps,
    ),
    counter("outrider:forward_seconds", "Seconds in these, verification included.", lambda one: one.metrics.forward_s),
    counter(
        "outrider:accepted_tokens_by_source",
        "Accepted draft tokens of requests that have ended, by what drafted them.",
        lambda one: _by(one.metrics.accepted_by_source),
        ("source",),
    ),
    counter(
        "outrider:drafts_by_source",
        "Draft trees that held tokens of a drafter: where past texts had something to say, history and trie.",
        lambda one: _by(one.metrics.drafts_by_source),
        ("source",),
    ),
    counter(
        "outrider:draft_tokens_by_source",
        "Draft tokens verified, by the drafter that proposed them.",
        lambda one: _by(one.metrics.drafted_by_source),
        ("source",),
    ),
    counter("outrider:budget_rows", "Rows that the budget granted.", _budget(lambda budget: budget.granted)),
    counter(
        "outrider:budget_offered_rows", "Rows that drafters had found, from which it chose.", _budget(lambda one: one.offered)
    ),
    counter("outrider:budget_requests", "Requests that were asked for rows, step by step.", _budget(lambda budget: budget.asked)),
    gauge(
        "outrider:budget_least_chance",
        "Chance of acceptance from which a row paid in the latest step.",
        _budget(lambda budget: budget.least_chance),
    ),
    counter("outrider:requests", "Requests that have ended.", _strategies(lambda one: one.requests), _BY_STRATEGY),
    counter("outrider:tokens", "Tokens emitted for these.", _strategies(lambda one: one.tokens), _BY_STRATEGY),
    counter("outrider:request_steps", "Steps in which these emitted tokens.", _strategies(lambda one: one.steps), _BY_STRATEGY),
    counter("outrider:draft_tokens", "Draft tokens for these.", _strategies(lambda one: one.drafted), _BY_STRATEGY),
    counter("outrider:accepted_tokens", "Of these, accepted ones.", _strategies(lambda one: one.accepted), _BY_STRATEGY),
    counter(
        "outrider:request_energy_joules",
        "Energy booked on requests that have ended; absent where nothing is metered.",
        _strategies(lambda one: one.energy_j),
        _BY_STRATEGY,
    ),
    counter(
        "outrider:energy_joules",
        "Energy of the devices while there were requests, by the meter that told it.",
        _energy,
        ("meter",),
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
    gauge("outrider:mirror_connected", "1 while Redis answers.", _mirror(lambda one: one.connected)),
    gauge(
        "outrider:mirror_lag_seconds", "Age of what is read from Redis now; 0 when all is read.", _mirror(lambda one: one.lag_s)
    ),
    gauge("outrider:mirror_waiting_tokens", "Tokens read and not drafted from yet.", _mirror(lambda one: one.waiting_tokens)),
    gauge("outrider:mirror_outbox_bytes", "What waits to be written to Redis.", _mirror(lambda one: one.outbox_bytes)),
    counter("outrider:mirror_published_tokens", "Tokens written to Redis.", _mirror(lambda one: one.published_tokens)),
    counter("outrider:mirror_applied_tokens", "Tokens that came from Redis.", _mirror(lambda one: one.applied_tokens)),
    counter("outrider:mirror_dropped_tokens", "Tokens that Redis never got.", _mirror(lambda one: one.dropped_tokens)),
    counter("outrider:mirror_lost_records", "Records that were written and never came.", _mirror(lambda one: one.lost_records)),
    counter(
        "outrider:mirror_corrupt_records",
        "Records and snapshots that could not be read.",
        _mirror(lambda one: one.corrupt_records + one.corrupt_snapshots),
    ),
    counter(
        "outrider:mirror_failures",
        "Attempts that Redis did not serve, by kind.",
        lambda one: {} if one.replica.cache is None else _by(one.replica.cache.failures),
        ("kind",),
    ),
)

# In an elastic group each replica is one rank; only elastic groups have a `width`.
RANKS: tuple[Family, ...] = (
    gauge(
        "outrider:ranks_ready", "Ranks that share the steps.", _group(lambda one: len(one.ready) if one.width is None else 1, 1)
    ),
    gauge("outrider:ranks", "Ranks that should.", _group(lambda one: one.world_size if one.width is None else 1, 1)),
    gauge(
        "outrider:group_width",
        "Ranks that share the steps now, of other replicas, too.",
        _group(lambda one: one.width or len(one.ready), 1),
    ),
    counter("outrider:rank_losses", "Ranks lost.", _group(lambda one: one.losses)),
    counter(
        "outrider:rank_divergences",
        "Walks left out because their first token was not the leader's.",
        _group(lambda one: one.divergences),
    ),
    counter(
        "outrider:rank_disagreements", "Ranks whose committed text was not the leader's.", _group(lambda one: one.disagreements)
    ),
    counter(
        "outrider:exchange_seconds",
        "Seconds of steps beyond the slowest rank's own: partitioning, messages, waiting, merging.",
        _group(lambda one: one.exchange_s),
    ),
    counter(
        "outrider:exchange_bytes", "Bytes of messages between ranks in these, both ways.", _group(lambda one: one.exchange_bytes)
    ),
)

FAMILIES = VLLM + STEPS + MEMORY + RANKS
