"""Metrics of an engine replica in ``/metrics``: name, help, labels, and how to read the value from the replica's counts."""

# `vllm:` metrics have vLLM's names, types and labels, so that its dashboards and load generators work; `outrider:` metrics have
# no counterpart there. Names of counters lack the `_total` that the text format adds.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from outrider.actors.description import Description, GroupState
from outrider.cache_service.client.cache_client import CacheClientCounts
from outrider.decoding.request import BudgetCounts
from outrider.engine.measures.metrics import EmulatedCounts, MetricsCounts, StrategyCounts


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
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
    value: Callable[[ReplicaMetrics], Value | Labelled]
    labels: tuple[str, ...] = ()  # in addition to ``model_name`` and ``engine``

    def samples(self, source: ReplicaMetrics) -> Labelled:
        """Return the values of one replica, by label values."""
        found = self.value(source)
        return found if isinstance(found, Mapping) else {} if found is None else {(): found}


counter, gauge = partial(Family, "counter"), partial(Family, "gauge")


def _by(counts: Mapping[str, float]) -> Labelled:
    return {(label,): count for label, count in counts.items()}


def _strategies(value: Callable[[StrategyCounts], Value]) -> Callable[[ReplicaMetrics], Labelled]:
    def samples(source: ReplicaMetrics) -> Labelled:
        found = {(one.strategy, "true" if one.lossless else "false"): value(one) for one in source.replica.strategies}
        return {labels: count for labels, count in found.items() if count is not None}

    return samples


def _cache(value: Callable[[CacheClientCounts], float]) -> Callable[[ReplicaMetrics], Value]:
    return lambda source: None if source.replica.cache is None else value(source.replica.cache)


def _budget(value: Callable[[BudgetCounts], float]) -> Callable[[ReplicaMetrics], Value]:
    return lambda source: None if source.metrics.budget is None else value(source.metrics.budget)


def _group(value: Callable[[GroupState], float], alone: Value = None) -> Callable[[ReplicaMetrics], Value]:
    """Return a function that reads the group of ranks, or ``alone`` for a replica without one."""
    return lambda source: alone if source.replica.group is None else value(source.replica.group)


def _emulated(value: Callable[[EmulatedCounts], Value]) -> Callable[[ReplicaMetrics], Value]:
    return lambda source: None if source.replica.emulated is None else value(source.replica.emulated)


def _kv_usage(source: ReplicaMetrics) -> float:
    counts = source.replica.counts
    return counts.running / max(1, counts.running + counts.free_slots)


def _cache_config(source: ReplicaMetrics) -> Labelled:
    info, counts = source.replica.info, source.replica.counts
    return {(str(info.max_model_len), str(counts.running + counts.free_slots), info.dtype): 1.0}


def _energy(source: ReplicaMetrics) -> Labelled:
    energy = source.replica.energy
    return {} if energy is None else {(energy.source,): energy.steps_j}


def _accepted_by_position(source: ReplicaMetrics) -> Labelled:
    return {(str(at),): count for at, count in enumerate(source.metrics.accepted_per_position)}


VLLM: tuple[Family, ...] = (
    gauge("vllm:num_requests_running", "Running requests.", lambda one: one.replica.counts.running),
    gauge("vllm:num_requests_waiting", "Requests waiting for a KV slot.", lambda one: one.replica.counts.waiting),
    gauge("vllm:kv_cache_usage_perc", "Fraction of the KV slots in use.", _kv_usage),
    counter(
        "vllm:prefix_cache_queries",
        "Tokens of requests that may reuse cached KV.",
        lambda one: one.replica.counts.prefix_queries,
    ),
    counter("vllm:prefix_cache_hits", "Tokens whose cached KV was reused.", lambda one: one.replica.counts.prefix_hits),
    counter(
        "vllm:num_preemptions",
        "Preemptions of a request by a more urgent one.",
        lambda one: one.replica.counts.preemptions,
    ),
    counter(
        "vllm:prompt_tokens", "Prompt tokens of requests that emitted their first token.", lambda one: one.metrics.prompt_tokens
    ),
    counter("vllm:generation_tokens", "Tokens emitted.", lambda one: one.metrics.generation_tokens),
    counter(
        "vllm:request_success",
        "Finished requests, by reason: stop, length, abort or error.",
        lambda one: _by(one.metrics.finished),
        ("finished_reason",),
    ),
    counter("vllm:spec_decode_num_drafts", "Draft trees verified, one per request and step.", lambda one: one.metrics.drafts),
    counter(
        "vllm:spec_decode_num_draft_tokens",
        "Draft tokens verified, including all branches.",
        lambda one: one.metrics.draft_tokens,
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens accepted and emitted.",
        lambda one: sum(one.metrics.accepted_per_position),
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by depth in the draft tree.",
        _accepted_by_position,
        ("position",),
    ),
    gauge(
        "vllm:cache_config_info",
        "KV memory; one block per slot, and each slot holds the whole context of a request.",
        _cache_config,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
)

_BY_STRATEGY = ("strategy", "lossless")

STEPS: tuple[Family, ...] = (
    gauge(
        "outrider:exact",
        "1 if the startup self-check found rows independent of the rest of the batch; else near-ties may fall either way.",
        lambda one: float(one.replica.info.exact),
    ),
    gauge(
        "outrider:cuda_graph_failures",
        "Step sizes that could not be captured as CUDA graphs and are launched kernel by kernel, which is slower.",
        lambda one: float(len(one.replica.info.uncaptured_rows)),
    ),
    counter("outrider:steps", "Forward passes of the target model.", lambda one: one.metrics.steps),
    counter(
        "outrider:step_rows",
        "Rows computed in forward passes: prompt tokens, roots and draft rows.",
        lambda one: one.metrics.rows,
    ),
    counter(
        "outrider:out_of_memory_steps",
        "Forward passes that ran out of device memory and were retried in smaller parts.",
        lambda one: one.metrics.out_of_memory_steps,
    ),
    counter("outrider:forward_seconds", "Seconds in forward passes, including verification.", lambda one: one.metrics.forward_s),
    counter(
        "outrider:accepted_tokens_by_source",
        "Accepted draft tokens of finished requests, by drafter.",
        lambda one: _by(one.metrics.accepted_by_source),
        ("source",),
    ),
    counter(
        "outrider:drafts_by_source",
        "Draft trees with tokens of a drafter; history and trie are drafts from past texts.",
        lambda one: _by(one.metrics.drafts_by_source),
        ("source",),
    ),
    counter(
        "outrider:draft_tokens_by_source",
        "Draft tokens verified, by drafter.",
        lambda one: _by(one.metrics.drafted_by_source),
        ("source",),
    ),
    counter("outrider:budget_rows", "Draft rows granted by the budget.", _budget(lambda budget: budget.granted)),
    counter("outrider:budget_offered_rows", "Draft rows proposed to the budget.", _budget(lambda one: one.offered)),
    counter(
        "outrider:budget_requests", "Requests asked for draft rows, summed over steps.", _budget(lambda budget: budget.asked)
    ),
    gauge(
        "outrider:budget_least_chance",
        "Least acceptance probability at which a row paid off in the latest step.",
        _budget(lambda budget: budget.least_chance),
    ),
    counter("outrider:requests", "Finished requests.", _strategies(lambda one: one.requests), _BY_STRATEGY),
    counter("outrider:tokens", "Tokens emitted for finished requests.", _strategies(lambda one: one.tokens), _BY_STRATEGY),
    counter(
        "outrider:request_steps",
        "Steps in which finished requests emitted tokens.",
        _strategies(lambda one: one.steps),
        _BY_STRATEGY,
    ),
    counter("outrider:draft_tokens", "Draft tokens of finished requests.", _strategies(lambda one: one.drafted), _BY_STRATEGY),
    counter(
        "outrider:accepted_tokens",
        "Accepted draft tokens of finished requests.",
        _strategies(lambda one: one.accepted),
        _BY_STRATEGY,
    ),
    counter(
        "outrider:request_energy_joules",
        "Energy attributed to finished requests; absent without an energy meter.",
        _strategies(lambda one: one.energy_j),
        _BY_STRATEGY,
    ),
    counter(
        "outrider:energy_joules",
        "Energy of the devices while requests were running, by meter.",
        _energy,
        ("meter",),
    ),
    gauge(
        "outrider:idle_power_watts",
        "Idle power of the devices before the first request.",
        lambda one: None if one.replica.energy is None else one.replica.energy.idle_w,
    ),
)

MEMORY: tuple[Family, ...] = (
    gauge("outrider:process_resident_bytes", "Resident memory of the replica's process.", lambda one: one.metrics.resident_bytes),
    gauge("outrider:history_bytes", "Memory of stored outputs.", lambda one: one.metrics.history_bytes),
    gauge("outrider:cache_connected", "1 if Redis answers.", _cache(lambda one: one.connected)),
    gauge(
        "outrider:cache_lag_seconds",
        "Age of the entries being read from Redis; 0 if all are read.",
        _cache(lambda one: one.lag_s),
    ),
    gauge(
        "outrider:cache_waiting_tokens",
        "Tokens read from Redis but not yet available to drafters.",
        _cache(lambda one: one.waiting_tokens),
    ),
    gauge("outrider:cache_outbox_bytes", "Bytes waiting to be written to Redis.", _cache(lambda one: one.outbox_bytes)),
    counter("outrider:cache_published_tokens", "Tokens written to Redis.", _cache(lambda one: one.published_tokens)),
    counter("outrider:cache_applied_tokens", "Tokens received from Redis.", _cache(lambda one: one.applied_tokens)),
    counter(
        "outrider:cache_dropped_tokens",
        "Tokens dropped before they reached Redis.",
        _cache(lambda one: one.dropped_tokens),
    ),
    counter(
        "outrider:cache_lost_records",
        "Records that were written but never received.",
        _cache(lambda one: one.lost_records),
    ),
    counter(
        "outrider:cache_corrupt_records",
        "Records and snapshots that could not be read.",
        _cache(lambda one: one.corrupt_records + one.corrupt_snapshots),
    ),
    counter(
        "outrider:cache_failures",
        "Failed attempts to access Redis, by kind.",
        lambda one: {} if one.replica.cache is None else _by(one.replica.cache.failures),
        ("kind",),
    ),
)

# In an elastic group each replica is one rank; only elastic groups have a `width`.
RANKS: tuple[Family, ...] = (
    gauge(
        "outrider:ranks_ready",
        "Ranks that are ready to share steps.",
        _group(lambda one: len(one.ready) if one.width is None else 1, 1),
    ),
    gauge("outrider:ranks", "Configured ranks.", _group(lambda one: one.world_size if one.width is None else 1, 1)),
    gauge(
        "outrider:group_width",
        "Ranks that share the steps now, including those of other replicas.",
        _group(lambda one: one.width or len(one.ready), 1),
    ),
    counter("outrider:rank_losses", "Lost ranks.", _group(lambda one: one.losses)),
    counter(
        "outrider:rank_divergences",
        "Verified paths dropped because their first token differed from the leader's.",
        _group(lambda one: one.divergences),
    ),
    counter(
        "outrider:rank_disagreements",
        "Ranks whose committed text differed from the leader's.",
        _group(lambda one: one.disagreements),
    ),
    counter(
        "outrider:exchange_seconds",
        "Step seconds beyond the slowest rank's compute time: partitioning, messages, waiting, merging.",
        _group(lambda one: one.exchange_s),
    ),
    counter(
        "outrider:exchange_bytes", "Bytes of messages between ranks, in both directions.", _group(lambda one: one.exchange_bytes)
    ),
)

# Of replicas with ``emulation.device``; their other times are emulated seconds, too.
EMULATED = (
    counter("outrider:emulated_forwards", "Forwards of the emulated GPU.", _emulated(lambda one: one.forwards)),
    counter("outrider:emulated_device_seconds", "Emulated seconds of all forwards.", _emulated(lambda one: one.device_s)),
    counter(
        "outrider:emulated_late_forwards",
        "Forwards whose computation on the CPU took longer than the time of the emulated GPU.",
        _emulated(lambda one: one.late),
    ),
    counter(
        "outrider:emulated_late_seconds",
        "Seconds of late forwards beyond the time of the emulated GPU; they count as the host's.",
        _emulated(lambda one: one.late_s),
    ),
    counter(
        "outrider:emulated_hidden_seconds",
        "Wall seconds of ended requests that are no emulated seconds, since emulation.time_dilation made the GPU slower.",
        _emulated(lambda one: one.hidden_s),
    ),
    gauge(
        "outrider:emulated_step_ratio",
        "Median time of the latest forwards, relative to that of the emulated GPU.",
        _emulated(lambda one: one.ratio if one.forwards else None),
    ),
    counter(
        "outrider:emulated_exchange_bytes",
        "Bytes that the emulated GPUs of a tensor-parallel or pipeline group would exchange.",
        _emulated(lambda one: one.exchange_bytes),
    ),
)

FAMILIES = VLLM + STEPS + MEMORY + RANKS + EMULATED
