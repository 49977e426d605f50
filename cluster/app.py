"""The Ray Serve application: an ingress that speaks HTTP and tokenizes, and engine replicas that decode."""
# Nothing here imports torch or a model library, because most processes that import this module compute nothing.

# No postponed annotations here: Serve reads build_app's annotation to validate the arguments of a configuration file.

import asyncio
import contextlib
import dataclasses
import hashlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from outrider.actors.heap import paused_collector, trim_heap
from outrider.cluster.admission.controller import admission_options, capacity
from outrider.cluster.cli.launch.preflight import (
    LaunchError,
    baseline_parallelism,
    check_address,
    check_secret,
    group_size,
    most_ranks,
    options_of_a_rank,
    redis_address,
)
from outrider.cluster.http.admin.port import AdminPort
from outrider.cluster.http.answers.stream_guard import StreamGuard
from outrider.cluster.http.api import Service, create_api
from outrider.cluster.http.compare import Baseline
from outrider.cluster.http.request_ids import log_request_ids
from outrider.cluster.observe.audit import Auditor
from outrider.cluster.observe.device_failures import DeviceFailures
from outrider.cluster.observe.shadow import Shadow
from outrider.cluster.observe.tracing import open_tracing
from outrider.cluster.serving import autoscaling
from outrider.cluster.serving.cache_actor import CacheActor, CacheSettings, HandleCacheAdmin
from outrider.cluster.serving.engine_replica import EngineReplica
from outrider.cluster.serving.generation import EnginePort
from outrider.cluster.serving.handle_engine import ACCEPT_TIMEOUT_S, DESCRIBE_TIMEOUT_S, HandleEngine
from outrider.cluster.serving.handles import ApiReplicas
from outrider.cluster.serving.membership import MembershipActor, MembershipOptions
from outrider.cluster.serving.prefix_router import PrefixRouter
from outrider.cluster.serving.secrets import stream_key
from outrider.cluster.serving.serve_limits import use_bounded_receive
from outrider.configs.keys_file import with_tenants_of_file
from outrider.configs.schema import MAX_WORLD_SIZE, Config, ConfigError, check_values, tenant_names
from outrider.configs.server_checks import admin_address, admin_names
from outrider.configs.slices import ParallelismOptions, ServerOptions, SpeculationOptions
from outrider.configs.tenancy_checks import is_loopback
from outrider.decoding.request import PLAIN
from outrider.engine.text.tokenizer import load_tokenizer_alone

INGRESS_ONGOING = 100_000  # the ingress holds all queued requests and must still answer /health
ENGINE_ONGOING = 512  # requests that Serve sends to a replica at once; the engine's own queue does the admission
GRAIN = 0.001  # amount of `server.api_resource` that one actor reserves
_POLL_S = 0.25
HEALTH_PERIOD_S = 3.0
HEALTH_TIMEOUT_S = 5.0  # Serve replaces a replica that misses three checks in a row
SWITCH_S = 1e-4  # thread switch interval in seconds: threads that process text must not hold up the event loop


@serve.ingress()
class Ingress:
    """HTTP entry point with a tokenizer and no model."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        cache: DeploymentHandle[Any] | None,
        config: Config,
        baseline: DeploymentHandle[Any] | None = None,
    ) -> None:
        use_bounded_receive()
        log_request_ids()
        sys.setswitchinterval(SWITCH_S)
        admin, server = None if cache is None else HandleCacheAdmin(cache), config.server
        # The leader of a lookahead group is a rank too: it counts as lost after `rank_timeout_s`, if that is shorter.
        patience_s = min(config.parallelism.rank_timeout_s, DESCRIBE_TIMEOUT_S)
        if config.parallelism.mode != "lookahead":
            patience_s = DESCRIBE_TIMEOUT_S
        address = admin_address(server)
        self._admin_port = None if address is None else AdminPort(*address, admin_names(server))
        self._tracing = open_tracing(config)
        # With zero replicas at first, the first request waits for the model.
        accept_s = ACCEPT_TIMEOUT_S if server.replicas else server.start_timeout_s
        failures, version = DeviceFailures(), version_of(config)
        port = HandleEngine(engine, server.resume_timeout_s, patience_s, server.most_replicas, accept_s, version, failures)
        self._has_only_others, self._start_timeout_s = port.has_only_others, server.start_timeout_s
        with paused_collector():
            tokenizer = load_tokenizer_alone(config.model.path)
        is_open = address is not None or is_loopback(server.host)
        auditor = self._auditor = Auditor(port, config.audit, config.speculation, config.engine)
        apis = None if server.api_replicas == 1 else ApiReplicas()
        other = None if baseline is None else _baseline_of(config, baseline, failures)
        self._service = Service(
            port, tokenizer, config.tenancy, admin, server.replicas, is_open, auditor,
            guard=StreamGuard(server), admission=admission_options(config),
            cache_options=config.cache,
            baseline=other, shadow=None if other is None or not config.baseline.shadow else _shadow_of(config, port, other),
            listeners=() if self._tracing is None else (self._tracing.on_output,), wake=None if server.replicas else port.wake,
            forget=None if apis is None else apis.forget, tells_engines=None if apis is None else apis.leads,
            device_failures=failures.counts, sampling_defaults=server.sampling_defaults, stream_key=stream_key(),
            spec_decode_metrics=server.per_request_spec_decode_metrics != "none", allowed_origins=server.allowed_origins,
            warns_of_unknown=server.unknown_fields == "warn",
        )  # fmt: skip
        trim_heap()  # loading the tokenizer allocated more than it keeps

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the application inside the replica, so that it is not sent to the actor."""
        app = create_api(
            self._service, has_operator_routes=self._admin_port is None, sends_request_ids=False, lifespan=self._alive
        )
        if self._tracing is not None:
            app.add_middleware(self._tracing.middleware)
        return app

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; see ``Draining.stop``."""
        return await self._service.draining.stop(timeout_s)

    async def forget(self, tenant: str, request_id: str | None) -> None:
        """Delete what this API replica keeps for audits; see ``Auditor.forget``."""
        await self._auditor.forget(tenant, request_id)

    async def name(self) -> str:
        """Return the replica tag by which the other API replicas know this one."""
        return str(serve.get_replica_context().replica_tag)

    @contextlib.asynccontextmanager
    async def _alive(self, app: FastAPI) -> AsyncIterator[None]:
        # In a redeploy with another model the old API stops once this one is up, so wait until an engine of this model exists.
        deadline_s = time.monotonic() + self._start_timeout_s
        while await self._has_only_others() and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        async with contextlib.AsyncExitStack() as parts:
            if self._tracing is not None:
                parts.push_async_callback(self._tracing.close)
            if self._admin_port is not None:
                await parts.enter_async_context(self._admin_port.serving(self._service))
            yield


def build_app(config: Config) -> serve.Application:
    """Build the application for ``serve.run`` and for Serve configuration files (``cluster.app:build_app``).

    Raises ``ConfigError`` for a value that is not allowed, an unusable key file, or shared outputs without a secret.
    """
    check_values(config)
    check_address(config)
    try:
        check_secret(config)
    except LaunchError as error:
        raise ConfigError(str(error)) from None
    return application(config)


def application(config: Config) -> serve.Application:
    """Build the application of a checked configuration whose ``redis_url`` holds no password; see ``build_app``."""
    config = config.model_copy(update={"tenancy": with_tenants_of_file(config.tenancy)})
    server, cache, place, baseline = config.server, config.cache, None, None
    if redis_address(config.redis_url) and cache.enabled:
        place = CacheSettings(cache, config.redis_url, tenant_names(config), version_of(config))
    engine = _engines("engine", server.replicas, server.most_replicas, config, place, _membership_options(config))
    if config.baseline.enabled:  # the engine without drafting and shared cache, with its own parallelism
        parallelism, options = baseline_parallelism(config), config.engine
        if parallelism.mode != "none":  # ranks that hold parts of a model do not compile it
            options = dataclasses.replace(options, compile=False)
        changes = {"speculation": SpeculationOptions(PLAIN, max_draft_tokens=0), "engine": options, "parallelism": parallelism}
        replicas = config.baseline.replicas
        baseline = _engines("baseline", replicas, replicas, config.model_copy(update=changes))
    cache_server = None
    if place is not None:
        cache_server = serve.deployment(
            name="cache",
            num_replicas=cache.services,
            ray_actor_options=_without_model(server),
            graceful_shutdown_timeout_s=server.stop_timeout_s,
        )(CacheActor).bind(engine, place, _quotas(config))
    ingress = serve.deployment(
        name="api",
        ray_actor_options=_without_model(server),
        max_ongoing_requests=INGRESS_ONGOING,
        **_api_replicas(server),
        graceful_shutdown_timeout_s=server.stop_timeout_s,
    )(Ingress)
    return ingress.bind(engine, cache_server, config, baseline)


def version_of(config: Config) -> str:
    """Return hexadecimal digits that identify the configured model; token ids are only valid within one version."""
    # During a redeploy, engines of the old and the new model run at once, and each API uses those of its version.
    # The number of threads does not change the model.
    model = dataclasses.replace(config.model, threads=None)
    return hashlib.blake2b(repr(model).encode(), digest_size=8).hexdigest()


def _engines(
    name: str,
    replicas: int,
    most_replicas: int,
    config: Config,
    place: CacheSettings | None = None,
    membership: MembershipOptions | None = None,
) -> serve.Application:
    """Return a deployment of engine replicas with their number, resources, request limit and health checks."""
    server, gpus = config.server, gpus_of_a_rank(config)
    # Above what admission and the engine accept, even if a single replica is left: Serve must never queue, the engine refuses
    # requests itself.
    most = max(capacity(config), config.engine.max_running + config.engine.max_waiting)
    return serve.deployment(
        name=name,
        **_number(replicas, most_replicas, config),
        ray_actor_options={"num_cpus": server.cpus_per_replica, "num_gpus": gpus},
        max_ongoing_requests=max(ENGINE_ONGOING, most + 64),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=server.stop_timeout_s,
        **_placement(config.parallelism, server.cpus_per_replica, gpus),
        **_routing(config, most_replicas),
    )(EngineReplica).bind(
        config.model, options_of_a_rank(config.engine, gpus), config.speculation, config.parallelism, place,
        server.start_timeout_s, membership, _has_devices_alone(config, gpus), version_of(config),
        None if config.emulation.device is None else config.emulation,
    )  # fmt: skip


def _api_replicas(server: ServerOptions) -> dict[str, Any]:
    if server.api_replicas == 1:
        # A redeploy starts the new API before it stops the old one.
        return {"max_surge_percent": 100}
    # One per node: each has an operator port there, and a lost node takes only one API with it.
    return {"num_replicas": server.api_replicas, "max_replicas_per_node": 1}


def _without_model(server: ServerOptions) -> dict[str, Any]:
    """Return the resources of an actor without a model: none, or a fraction of ``server.api_resource``."""
    return {"num_cpus": 0, **({} if server.api_resource is None else {"resources": {server.api_resource: GRAIN}})}


def _baseline_of(config: Config, handle: DeploymentHandle[Any], failures: DeviceFailures) -> Baseline:
    gpus, server = gpus_of_a_rank(config), config.server
    replicas, version = config.baseline.replicas, version_of(config)
    port = HandleEngine(handle, server.resume_timeout_s, replicas=replicas, version=version, failures=failures)
    # CPUs and fractions of a GPU are shared with the engine, whole GPUs are not.
    return Baseline(port, config.baseline.kind, shares_devices=not gpus or gpus != int(gpus))


def _shadow_of(config: Config, engine: EnginePort, baseline: Baseline) -> Shadow:
    options = config.parallelism
    # If the replicas of a node are each other's ranks, all of them compute a request.
    wide = config.server.replicas if options.mode == "lookahead" and options.world_size == "auto" else group_size(options)
    devices = min(wide, MAX_WORLD_SIZE), group_size(baseline_parallelism(config))
    return Shadow(engine, baseline.engine, baseline.kind, config.baseline.shadow, devices, baseline.shares_devices)


def _membership_options(config: Config) -> MembershipOptions | None:
    """Return how the replicas of a node find each other to form a lookahead group; None if they do not."""
    options, server = config.parallelism, config.server
    if options.mode != "lookahead" or options.world_size != "auto" or server.replicas == 1:
        return None
    deployment = serve.deployment(name="membership", ray_actor_options=_without_model(server), graceful_shutdown_timeout_s=0.0)
    return MembershipOptions(deployment(MembershipActor).bind(), most_ranks(config))


def _has_devices_alone(config: Config, gpus: float) -> bool:
    """Return whether a replica shares its devices with no other: it has whole GPUs, or is the only replica on CPUs."""
    return gpus == int(gpus) if gpus else config.server.most_replicas == 1 and not config.baseline.enabled


def _number(replicas: int, most_replicas: int, config: Config) -> dict[str, Any]:
    """Return deployment options for a fixed number of replicas, or for autoscaling."""
    if most_replicas == replicas:
        return {"num_replicas": replicas}
    targets = {"requests": config.engine.max_running, "tokens_per_s": config.server.target_tokens_per_s}
    policy = AutoscalingPolicy(policy_function=autoscaling.LoadPolicy, policy_kwargs=targets)
    options = AutoscalingConfig(
        min_replicas=replicas, max_replicas=most_replicas, initial_replicas=max(1, replicas),
        policy=policy, look_back_period_s=autoscaling.WINDOW_S,
        upscale_delay_s=autoscaling.UP_S, downscale_delay_s=autoscaling.DOWN_S,
    )  # fmt: skip
    return {"autoscaling_config": options}


def _placement(parallelism: ParallelismOptions, cpus: float, gpus: float) -> dict[str, Any]:
    """Return deployment options that reserve a bundle per rank of a replica's group; the first is the replica's own."""
    world_size = group_size(parallelism)
    if world_size == 1:
        return {}
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    return {"placement_group_bundles": [bundle] * world_size, "placement_group_strategy": parallelism.placement}


def _routing(config: Config, replicas: int) -> dict[str, Any]:
    """Return deployment options for the request router; none for Serve's own router or a single replica."""
    if config.server.routing == "load" or replicas == 1:
        return {}
    slots, tenants = config.engine.most_slots(config.parallelism.mode != "none"), len(tenant_names(config))
    kwargs = {"slots": slots, "tenants": tenants * (1 + len(config.model.adapters))}
    # Any, because Serve annotates both values as dicts.
    router: Any = {"request_router_class": PrefixRouter, "request_router_kwargs": kwargs}
    return {"request_router_config": RequestRouterConfig(**router)}


def _quotas(config: Config) -> dict[str, int]:
    own = {name: tenant.cache_mib for name, tenant in config.tenancy.tenants.items()}
    return {name: int(mib * 2**20) for name, mib in own.items() if mib is not None}


def gpus_of_a_rank(config: Config) -> float:
    """Return the number of GPUs that Ray reserves for each copy of the model."""
    device = config.model.device
    if config.server.gpus_per_replica is not None:
        return config.server.gpus_per_replica
    # `auto` is resolved here, because Ray hides all GPUs from an actor that reserves none.
    if device == "auto":
        return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return 1.0 if device.startswith("cuda") else 0.0
