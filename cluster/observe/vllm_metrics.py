"""The metrics that vLLM has, too: names, types and labels are its own, so that dashboards and load tools made for it read them
unchanged."""

from __future__ import annotations

from cluster.observe.metric_family import Family, Samples, Told, counter, gauge


def _kv_usage(told: Told) -> float:
    counts = told.replica.counts
    return counts.running / max(1, counts.running + counts.free_slots)


def _cache_config(told: Told) -> Samples:
    info, counts = told.replica.info, told.replica.counts
    return (((str(info.max_model_len), str(counts.running + counts.free_slots), info.dtype), 1.0),)


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
    Family(
        "counter",
        "vllm:request_success",
        "Requests that have ended, by reason: stop, length, abort or error.",
        ("finished_reason",),
        lambda one: (((reason,), count) for reason, count in one.metrics.finished.items()),
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
