"""Sections of the configuration, one for each class that reads it, with all defaults. Plain: the engine needs no pydantic."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Weights = Literal["auto", "dequantized", "int8", "int4"]
# Draft models that are the quantized target itself: the value of speculation.draft_model, and its model.weights.
SELF: dict[str, Weights] = {"self:int8": "int8", "self:int4": "int4"}
KEPT = 2  # KV slots for ended requests, per slot of a running request
# Sampling parameters with a default of the model or the server, with their bounds; those of requests.
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, 2**31), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
}  # fmt: skip
_STRICT = {"extra": "forbid"}  # an unknown key is an error (read by pydantic)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model and its representation in memory."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str = "demo_model"  # folder (of an adapter, too), .gguf file, name on the hub, or smollm2-135m-instruct, from PyPI
    revision: str | None = None  # branch, tag or commit of a model on the hub, which path names; when absent its newest
    # name in the API, or a list of names; when absent the last part of the path, without .gguf
    served_name: str | tuple[str, ...] | None = None
    dtype: Dtype = "auto"  # auto: the checkpoint's, bfloat16 for a .gguf file
    # auto: as in the checkpoint, so that those of a .gguf file stay quantized on a CPU; dequantized: all in dtype; int8, int4:
    # quantized at load, on a CPU, which changes the model
    weights: Weights = "auto"
    device: str = "auto"  # auto: cuda if there is one, else cpu
    # tokens of prompt and output together; when absent the model's own context, or on a GPU with too little memory for it the
    # longest of 128k, 64k, 32k, 16k, 8k and 4k that fits
    max_model_len: int | None = None
    threads: int | None = None  # torch threads on a CPU; when absent all cores, or cpus_per_replica where several share them
    # LoRA adapters by the name that requests give as model: folders with adapter_config.json and adapter_model.safetensors
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the model's name in the API, the first of several."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the model in the API."""
        given = (self.served_name,) if isinstance(self.served_name, str) else self.served_name or ()
        return tuple(dict.fromkeys(filter(None, given))) or (self._default_name,)

    @property
    def _default_name(self) -> str:
        name, revision = self.path, self.revision
        return PurePath(name if revision is None else name.removesuffix(f"@{revision}")).name.removesuffix(".gguf")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sharing of the device among requests by the step loop."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    max_running: int = 8  # requests in one step, each with a KV slot
    max_step_tokens: int = 512  # rows of one forward: longer prefills are split into chunks
    max_waiting: int = 256  # requests that may wait for a slot; more are refused
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # fcfs: in order of arrival; priority: the request's, lower first
    # with priority: a request that waited longer goes first, whatever the priorities, and keeps its slot
    max_wait_s: float = 30.0
    # strict: outputs equal plain decoding's to the last bit, see engine/forward/exactness.py; rounding, on a GPU: except for
    # near-ties
    exact: Literal["strict", "rounding"] = "strict"
    compile: bool = False  # on a GPU: torch.compile fuses the small operations of each layer; the start takes longer
    # a prompt reuses the KV of its common prefix with an earlier one of the same tenant, if still in memory
    prefix_caching: bool = True
    # KV slots: those beyond max_running keep the KV of ended requests for prefix caching. When absent three times max_running,
    # the additional ones limited to the rest of a GPU's share, or on a CPU to a quarter of the memory; max_running if ranks share
    # the steps
    kv_slots: int | None = None
    # Fraction of a GPU's memory for the weights, KV slots and steps of a replica; replicas that share a GPU each take
    # server.gpus_per_replica times that
    gpu_memory_utilization: float = 0.9

    @property
    def kept_slots(self) -> int | None:
        """Return the KV slots beyond ``max_running``; None: as many as memory allows, up to ``most_slots`` in total."""
        if self.kv_slots is None:
            return None if self.prefix_caching else 0
        return self.kv_slots - self.max_running

    def most_slots(self, parallel: bool) -> int:
        """Return the KV slots if memory allows. ``parallel``: for ranks that share the steps."""
        if self.kept_slots is None:
            return self.max_running if parallel else (1 + KEPT) * self.max_running
        return self.max_running + self.kept_slots


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Drafter and its limits."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    strategy: str = "auto"
    # Most drafted rows of a request per step and rank; when absent as many as pay off on the device, up to 64.
    max_draft_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the strategy, such as match_length
    # strategies that requests may choose instead: "NAME" or "NAME:option=value,..."; several settings of one strategy with a name
    # each, "SETTING = NAME:option=value,..."
    strategies: tuple[str, ...] = ()
    # Like model.path, or self:int8, self:int4: the model itself, quantized. Required by speculative, spectr, bild and mjsd
    draft_model: str | None = None
    exact: bool = True  # refuse strategies that do not preserve the model's output (bild, mjsd)
    # Strategies draft all rows that their options ask for, as in their papers, and not only as many as pay off; the default of
    # requests, which may choose
    as_published: bool = False
    # Most drafted rows of such a request per step and rank; when absent 64, with as_published 512
    largest_tree: int | None = None
    max_settings: int = 8  # sets of options that requests may use at a time, beside the configured ones; 0: requests set none
    request_options: tuple[str, ...] = ()  # costly options that requests may set too, such as trie.capacity

    @property
    def most_draft_tokens(self) -> int:
        """Return the limit per request, step and rank: the engine makes room for trees of this size."""
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        if self.largest_tree is not None:
            return self.largest_tree
        return 512 if self.as_published else 64

    @property
    def usual_draft_tokens(self) -> int:
        """Return the limit of requests that are not drafted for as published."""
        return min(64, self.most_draft_tokens) if self.max_draft_tokens is None else self.max_draft_tokens


@dataclass(frozen=True, slots=True)
class ParallelismOptions:
    """Cooperation of several ranks, each with a copy or a part of the model, on one request."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    # lookahead: ranks with the whole model share each step's draft tree; tensor: each has a slice of every layer (DeepSpeed);
    # pipeline: each has some of the layers
    mode: Literal["none", "lookahead", "tensor", "pipeline"] = "none"
    world_size: int | Literal["auto"] = "auto"  # ranks of one group; auto: the replicas of a node, as many as the load allows
    rank_timeout_s: float = 2.0  # a rank without a sign of life for this long is lost
    step_timeout_s: float = 60.0  # a rank that does not answer a step for this long is lost, even with signs of life
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"  # placement of a group's ranks on nodes
    adaptive: bool = True  # share a step only if that was faster recently; false: always
    pin_threads: bool = False  # CPU: pin each rank's compute thread to separate cores


@dataclass(frozen=True, slots=True)
class EmulationOptions:
    """GPUs that are emulated: a forward on the CPU takes a GPU's time by sleeping. Real GPUs need none of it."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    device: Literal["A100-80", "H100", "L40S", "L4"] | None = None  # GPU of each rank; when absent nothing is emulated
    # model whose forwards are timed: a known name, such as llama-3.1-8b, or a folder with its config.json
    model: str | None = None
    time_dilation: float = 1.0  # factor of all times of devices and links, 1 to 16, for more ranks than processor cores
    # JSON lines with prompt and output, which requests follow; when absent model.path computes within the emulated time
    outputs: str | None = None
    link: Literal["nvlink", "pcie", "ethernet"] | None = None  # between ranks; when absent NVLink where the GPU has it, else PCIe
    bits: Literal[16, 8, 4] = 16  # of a weight
    # strict: forwards of 64 rows, the engine's default on a GPU; graphs: of the rows of the next CUDA graph, as with
    # engine.exact=rounding; eager: of any rows, launched from Python
    form: Literal["strict", "graphs", "eager"] = "strict"
    drafter_ms: float = 0.0  # milliseconds that each call of the drafter takes longer, to check that no host time is hidden


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Addresses of the service and resources of each engine replica."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    host: str = "127.0.0.1"  # 0.0.0.0: reachable from other machines
    port: int = 8000
    admin_port: int | None = None  # port of /admin and /metrics; when absent the main port on loopback, else the one after port
    admin_host: str = "127.0.0.1"  # address of admin_port, on the node of the API's actor
    # Host names that clients may use, besides localhost and IP addresses; "*": any. When absent none on loopback, else any.
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()  # web pages of these origins may use the API, such as https://app.example; "*": any
    ssl_certfile: str | None = None  # certificate chain (PEM); with ssl_keyfile the port speaks HTTPS. Read on every node
    ssl_keyfile: str | None = None  # private key of the certificate (PEM)
    unknown_fields: Literal["refuse", "warn"] = "refuse"  # in requests; warn: they are left out, with a line in the log
    require_key: bool | None = None  # requests need a tenant's API key; when absent, unless host is loopback
    # choices that run or wait; more get a 429. When absent the total capacity and queue length of the engines
    max_queued: int | None = None
    # Engines, each with its own copy of the model, or groups of parallelism.world_size; 0 (with max_replicas): none when idle
    replicas: int = 1
    max_replicas: int | None = None  # most engines under load, reduced to replicas afterwards; when absent always replicas
    # Tokens per second of an engine above which another one is added; when absent only running and waiting choices count, with
    # engine.max_running per engine
    target_tokens_per_s: float | None = None
    cpus_per_replica: float = 1.0  # reserved by Ray for each rank; the threads that torch uses are model.threads
    gpus_per_replica: float | None = None  # for each rank; when absent one if the model is on cuda, else none
    # Choice of the replica for a request. prefix: the one with most of its prompt cached, unless it is much busier than others;
    # load: of two, the one with fewer requests
    routing: Literal["prefix", "load"] = "prefix"
    # Sampling parameters of requests that leave them out, such as {temperature: 0.7}; before those of the model's
    # generation_config.json
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    # vLLM's metrics.speculative_decoding in answers of one choice, with the usage
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    start_timeout_s: float = 600.0  # a model that is not ready by then is an error
    stop_timeout_s: float = 5.0  # for running requests to finish when the server stops
    resume_timeout_s: float = 120.0  # for another replica to take over a request whose replica was lost
    stream_guard: Literal["none", "cadence", "pad", "both"] = "none"  # hides decoding steps in the packets of a stream
    otlp_endpoint: str | None = None  # OTLP/HTTP collector for traces, such as http://127.0.0.1:4318; none when absent
    api_replicas: int = 1  # API processes, each on a different node, with its share of max_queued and of rate limits
    api_resource: str | None = None  # custom resource of Ray: processes without a model run only on nodes that offer it
    ray_address: str | None = None  # running cluster to join ("auto", "host:port"); when absent a private one is started

    @property
    def most_replicas(self) -> int:
        """Return the most engines under any load."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class BaselineOptions:
    """Deployment for comparison of answers (``POST /v1/compare``), beside the engine and independent of it."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    enabled: bool = False
    # The same model without drafting: on one rank, or on ranks with parts of it (``parallelism.mode``)
    kind: Literal["plain", "tensor", "pipeline"] = "plain"
    replicas: int = 1
    world_size: int = 2  # ranks of each replica, for kinds tensor and pipeline
    # Fraction of served requests that it also answers in the background when idle; results are at /admin/baseline
    shadow: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sharing of outputs between replicas, so that each drafts from the texts of all."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    enabled: bool = True  # false: each replica drafts from its own outputs only
    prefix: str = "outrider"  # prefix of all keys in Redis
    tenant_mib: float = 64.0  # tokens kept per tenant; a token takes 2 bytes, 3 in vocabularies above 65,536
    public_mib: float = 256.0  # tokens of the public corpus
    ttl_s: float = 30 * 86400.0  # older outputs are deleted
    services: int = 1  # actors that maintain Redis; one works, the others stand by
    timeout_s: float = 1.0  # limit per operation in Redis; none is on the decoding path
    start_timeout_s: float = 30.0  # longest wait of a new replica for the shared cache


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """Keys, limits and scheduling weight of a tenant."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    keys: tuple[str, ...] = ()  # hashes of its API keys, "sha256:HEX"; see outrider new-key
    cache_mib: float | None = None  # instead of cache.tenant_mib
    requests_per_minute: int | None = None  # for each of its keys, instead of limits.requests_per_minute
    tokens_per_minute: int | None = None  # for each of its keys, instead of limits.tokens_per_minute
    max_concurrent: int | None = None  # for each of its keys, instead of limits.max_concurrent
    weight: float = 1.0  # its share of slots, queue places and prefill rows, relative to the other tenants
    min_priority: int = 0  # the most urgent priority that its requests may ask for; also their default if above 0


@dataclass(frozen=True, slots=True)
class TenancyOptions:
    """Tenants. Only requests of one tenant share drafts; requests without a tenant neither use nor add shared drafts."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    tenants: dict[str, TenantOptions] = field(default_factory=dict)  # by name
    anonymous: str | None = None  # tenant of requests without a key, for a single-user server on loopback
    admin_keys: tuple[str, ...] = ()  # hashes of the keys for /admin, which is closed without any
    keys_file: str | None = None  # yaml with more tenants and admin_keys, such as a mounted secret; reloaded when it changes


@dataclass(frozen=True, slots=True)
class LimitsOptions:
    """Limits of one API key, and of one request. All requests without a key count as one key."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    requests_per_minute: int | None = None  # requests in any 60 seconds; no limit when absent
    tokens_per_minute: int | None = None  # prompts, reference documents and answers count; the longest answer is reserved
    max_concurrent: int | None = None  # choices at once
    max_request_bytes: int = 8 * 2**20  # size of a request's body
    max_prompt_tokens: int | None = None  # the model's context when absent
    max_reference_tokens: int = 2**18  # total of reference_documents and prediction of a request
    # limit per choice: larger requests are refused; also the limit of requests without max_tokens
    max_output_tokens: int | None = None
    request_timeout_s: float | None = None  # seconds from arrival to the last token; a request may set a shorter timeout


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Served requests that may be replayed without drafts, to verify that drafting changed nothing. See ``outrider audit``."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    keep: int = 64  # latest choices whose prompt and output stay in the API's memory for replay on demand; 0: none
    # fraction of served choices that are replayed in the background, when slots are free and no request waits
    sample: float = 0.0
    private: bool = False  # also choices without a tenant, and of requests with cache private or off
