"""Metrics of an engine replica in ``/metrics``: name, help, where the value is in the replica's description, and labels."""

# `vllm:` metrics have vLLM's names, types and labels, so that its dashboards and load generators work; `outrider:` metrics have
# no counterpart there. Names of counters lack the `_total` that the text format adds.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from outrider.actors.description import Description, GroupState

Labelled = Mapping[tuple[str, ...], float]  # values by the values of the family's labels


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of every engine."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    value: str | Callable[[Description], float | Labelled | None]  # path of attributes in the description, or a function of it
    labels: tuple[str, ...] = ()  # in addition to ``model_name`` and ``engine``

    def samples(self, source: Description) -> Labelled:
        """Return the values of one replica, by label values; empty if a part of the path is None."""
        found = read_path(source, self.value) if isinstance(self.value, str) else self.value(source)
        if isinstance(found, Sequence):  # by position
            found = {str(at): value for at, value in enumerate(found)}
        if isinstance(found, Mapping):
            return {labels if isinstance(labels, tuple) else (labels,): value for labels, value in found.items()}
        return {} if found is None else {(): found}


def read_path(source: Any, path: str) -> Any:
    """Return the attribute at a path such as ``cache.lag_s``; None if a part of it is None."""
    for name in path.split("."):
        source = None if source is None else getattr(source, name)
    return source


def _by_strategy(name: str, help: str, count: str) -> Family:
    def samples(source: Description) -> Labelled:
        found = {(one.strategy, "true" if one.lossless else "false"): getattr(one, count) for one in source.strategies}
        return {labels: value for labels, value in found.items() if value is not None}

    return Family("counter", name, help, samples, ("strategy", "lossless"))


def _of_group(value: Callable[[GroupState], float]) -> Callable[[Description], float]:
    """Return a function that reads the group of ranks; 1 for a replica without one."""
    return lambda source: 1 if source.group is None else value(source.group)


def _kv_usage(source: Description) -> float:
    return source.counts.running / max(1, source.counts.running + source.counts.free_slots)


def _cache_config(source: Description) -> Labelled:
    info, counts = source.info, source.counts
    return {(str(info.max_model_len), str(counts.running + counts.free_slots), info.dtype): 1.0}


counter, gauge = partial(Family, "counter"), partial(Family, "gauge")

VLLM: tuple[Family, ...] = (
    gauge("vllm:num_requests_running", "Running requests.", "counts.running"),
    gauge("vllm:num_requests_waiting", "Requests waiting for a KV slot.", "counts.waiting"),
    gauge("vllm:kv_cache_usage_perc", "Fraction of the KV slots in use.", _kv_usage),
    counter("vllm:prefix_cache_queries", "Tokens of requests that may reuse cached KV.", "counts.prefix_queries"),
    counter("vllm:prefix_cache_hits", "Tokens whose cached KV was reused.", "counts.prefix_hits"),
    counter("vllm:num_preemptions", "Preemptions of a request by a more urgent one.", "counts.preemptions"),
    counter("vllm:prompt_tokens", "Prompt tokens of requests that emitted their first token.", "metrics.prompt_tokens"),
    counter("vllm:generation_tokens", "Tokens emitted.", "metrics.generation_tokens"),
    counter(
        "vllm:request_success",
        "Finished requests, by reason: stop, length, abort or error.",
        "metrics.finished",
        ("finished_reason",),
    ),
    counter("vllm:spec_decode_num_drafts", "Draft trees verified, one per request and step.", "metrics.drafts"),
    counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified, including all branches.", "metrics.draft_tokens"),
    counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted and emitted.", "metrics.accepted_tokens"),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by depth in the draft tree.",
        "metrics.accepted_per_position",
        ("position",),
    ),
    gauge(
        "vllm:cache_config_info",
        "KV memory; one block per slot, and each slot holds the whole context of a request.",
        _cache_config,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
)

STEPS: tuple[Family, ...] = (
    gauge(
        "outrider:exact",
        "1 if the startup self-check found rows independent of the rest of the batch; else near-ties may fall either way.",
        "info.exact",
    ),
    gauge(
        "outrider:cuda_graph_failures",
        "Step sizes that could not be captured as CUDA graphs and are launched kernel by kernel, which is slower.",
        lambda one: len(one.info.uncaptured_rows),
    ),
    counter("outrider:steps", "Forward passes of the target model.", "metrics.steps"),
    counter("outrider:step_rows", "Rows computed in forward passes: prompt tokens, roots and draft rows.", "metrics.rows"),
    counter(
        "outrider:out_of_memory_steps",
        "Forward passes that ran out of device memory and were retried in smaller parts.",
        "metrics.out_of_memory_steps",
    ),
    counter("outrider:forward_seconds", "Seconds in forward passes, including verification.", "metrics.forward_s"),
    counter(
        "outrider:accepted_tokens_by_source",
        "Accepted draft tokens of finished requests, by drafter.",
        "metrics.accepted_by_source",
        ("source",),
    ),
    counter(
        "outrider:drafts_by_source",
        "Draft trees with tokens of a drafter; history and trie are drafts from past texts.",
        "metrics.drafts_by_source",
        ("source",),
    ),
    counter("outrider:draft_tokens_by_source", "Draft tokens verified, by drafter.", "metrics.drafted_by_source", ("source",)),
    counter("outrider:budget_rows", "Draft rows granted by the budget.", "metrics.budget.granted"),
    counter("outrider:budget_offered_rows", "Draft rows proposed to the budget.", "metrics.budget.offered"),
    counter("outrider:budget_requests", "Requests asked for draft rows, summed over steps.", "metrics.budget.asked"),
    gauge(
        "outrider:budget_least_chance",
        "Least acceptance probability at which a row paid off in the latest step.",
        "metrics.budget.least_chance",
    ),
    _by_strategy("outrider:requests", "Finished requests.", "requests"),
    _by_strategy("outrider:tokens", "Tokens emitted for finished requests.", "tokens"),
    _by_strategy("outrider:request_steps", "Steps in which finished requests emitted tokens.", "steps"),
    _by_strategy("outrider:draft_tokens", "Draft tokens of finished requests.", "drafted"),
    _by_strategy("outrider:accepted_tokens", "Accepted draft tokens of finished requests.", "accepted"),
    _by_strategy(
        "outrider:request_energy_joules", "Energy attributed to finished requests; absent without an energy meter.", "energy_j"
    ),
    counter(
        "outrider:energy_joules",
        "Energy of the devices while requests were running, by meter.",
        lambda one: None if one.energy is None else {(one.energy.source,): one.energy.steps_j},
        ("meter",),
    ),
    gauge("outrider:idle_power_watts", "Idle power of the devices before the first request.", "energy.idle_w"),
)

MEMORY: tuple[Family, ...] = (
    gauge("outrider:process_resident_bytes", "Resident memory of the replica's process.", "metrics.resident_bytes"),
    gauge("outrider:history_bytes", "Memory of stored outputs.", "metrics.history_bytes"),
    gauge("outrider:cache_connected", "1 if Redis answers.", "cache.connected"),
    gauge("outrider:cache_lag_seconds", "Age of the entries being read from Redis; 0 if all are read.", "cache.lag_s"),
    gauge("outrider:cache_waiting_tokens", "Tokens read from Redis but not yet available to drafters.", "cache.waiting_tokens"),
    gauge("outrider:cache_outbox_bytes", "Bytes waiting to be written to Redis.", "cache.outbox_bytes"),
    counter("outrider:cache_published_tokens", "Tokens written to Redis.", "cache.published_tokens"),
    counter("outrider:cache_applied_tokens", "Tokens received from Redis.", "cache.applied_tokens"),
    counter("outrider:cache_dropped_tokens", "Tokens dropped before they reached Redis.", "cache.dropped_tokens"),
    counter("outrider:cache_lost_records", "Records that were written but never received.", "cache.lost_records"),
    counter(
        "outrider:cache_corrupt_records",
        "Records and snapshots that could not be read.",
        lambda one: None if one.cache is None else one.cache.corrupt_records + one.cache.corrupt_snapshots,
    ),
    counter("outrider:cache_failures", "Failed attempts to access Redis, by kind.", "cache.failures", ("kind",)),
)

# In an elastic group each replica is one rank; only elastic groups have a `width`.
RANKS: tuple[Family, ...] = (
    gauge(
        "outrider:ranks_ready",
        "Ranks that are ready to share steps.",
        _of_group(lambda one: len(one.ready) if one.width is None else 1),
    ),
    gauge("outrider:ranks", "Configured ranks.", _of_group(lambda one: one.world_size if one.width is None else 1)),
    gauge(
        "outrider:group_width",
        "Ranks that share the steps now, including those of other replicas.",
        _of_group(lambda one: one.width or len(one.ready)),
    ),
    counter("outrider:rank_losses", "Lost ranks.", "group.losses"),
    counter(
        "outrider:rank_divergences",
        "Verified paths dropped because their first token differed from the leader's.",
        "group.divergences",
    ),
    counter("outrider:rank_disagreements", "Ranks whose committed text differed from the leader's.", "group.disagreements"),
    counter(
        "outrider:exchange_seconds",
        "Step seconds beyond the slowest rank's compute time: partitioning, messages, waiting, merging.",
        "group.exchange_s",
    ),
    counter("outrider:exchange_bytes", "Bytes of messages between ranks, in both directions.", "group.exchange_bytes"),
)

# Of replicas with ``emulation.device``; their other times are emulated seconds, too.
EMULATED = (
    counter("outrider:emulated_forwards", "Forwards of the emulated GPU.", "emulated.forwards"),
    counter("outrider:emulated_device_seconds", "Emulated seconds of all forwards.", "emulated.device_s"),
    counter(
        "outrider:emulated_late_forwards",
        "Forwards whose computation on the CPU took longer than the time of the emulated GPU.",
        "emulated.late",
    ),
    counter(
        "outrider:emulated_late_seconds",
        "Seconds of late forwards beyond the time of the emulated GPU; they count as the host's.",
        "emulated.late_s",
    ),
    counter(
        "outrider:emulated_hidden_seconds",
        "Wall seconds of ended requests that are no emulated seconds, since emulation.time_dilation made the GPU slower.",
        "emulated.hidden_s",
    ),
    gauge(
        "outrider:emulated_step_ratio",
        "Median time of the latest forwards, relative to that of the emulated GPU.",
        lambda one: one.emulated.ratio if one.emulated and one.emulated.forwards else None,
    ),
    counter(
        "outrider:emulated_exchange_bytes",
        "Bytes that the emulated GPUs of a tensor-parallel or pipeline group would exchange.",
        "emulated.exchange_bytes",
    ),
)

FAMILIES = VLLM + STEPS + MEMORY + RANKS + EMULATED
