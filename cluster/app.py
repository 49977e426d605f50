"""The Serve application: an ingress that speaks HTTP and tokenizes, and engine replicas that decode."""

# No postponed annotations here: Serve reads the one of build_app to check the arguments in a configuration file.

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.heap import spare_collector
from actors.lookahead.elastic import Elastic
from actors.lookahead.group import Group
from actors.ranks import Ranks
from actors.replica import Description, Replica
from actors.sharded.actors import actor_group
from actors.sharded.group import ShardedGroup, whole_model
from cluster.admission.controller import admission_options, capacity
from cluster.cli.launch.preflight import LaunchError, baseline_parallelism, check_address, check_secret, group_size, redis_address
from cluster.http.admin.port import AdminPort
from cluster.http.answers.stream_guard import StreamGuard
from cluster.http.api import Service, create_api
from cluster.observe.audit import Auditor
from cluster.observe.tracing import open_tracing
from cluster.serving.cache_actor import CacheActor, CachePlace, HandleCacheAdmin
from cluster.serving.compare import Baseline
from cluster.serving.generation import EnginePort, Job
from cluster.serving.handle_engine import BEAT_S, DESCRIBE_TIMEOUT_S, HandleEngine
from cluster.serving.membership import MembershipActor, MembershipClient, MembershipOptions
from configs.keys_file import with_tenants_of_file
from configs.schema import MAX_WORLD_SIZE, Config, ConfigError, check_values, tenant_names
from configs.server_checks import admin_address, admin_names
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, ServerOptions, SpeculationOptions
from configs.tenancy_checks import is_loopback
from decoding.request import PLAIN, Request, StepOutput
from decoding.tree import Int32Array
from engine.errors import QueueFullError, RequestError
from engine.loading.model import load_tokenizer
from engine.measures.energy import open_meter

logger = logging.getLogger(__name__)

INGRESS_ONGOING = 100_000  # the ingress holds what engines queue, and answers /health whatever they do
GRAIN = 0.001  # of a resource
HEALTH_PERIOD_S = 3.0
HEALTH_TIMEOUT_S = 5.0  # Serve replaces a replica that misses three in a row


class EngineReplica:
    """A ``Replica`` as an actor. What the engine refuses is sent as a value: a refusal is no failure of the actor."""

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        parallelism: ParallelismOptions,
        cache: CachePlace | None,
        start_timeout_s: float,
        membership: MembershipOptions | None = None,
        metered: bool = True,
    ) -> None:
        elastic = None if membership is None else Elastic(parallelism, membership.secret, membership.world_size)
        ranks = elastic or _ranks(model, engine, speculation, parallelism, start_timeout_s)
        if isinstance(ranks, ShardedGroup):
            model = whole_model(model)
        self._replica = Replica(
            model, engine, speculation, None if cache is None else cache.access(), ranks, open_meter if metered else None
        )
        self._references: WeakValueDictionary[tuple[str, int], Int32Array] = WeakValueDictionary()  # by answer and place
        spare_collector()
        if membership is not None and elastic is not None:
            self._membership_client = MembershipClient(membership.actor, elastic.address, elastic.meet)

    async def generate(self, job: Job) -> AsyncIterator[StepOutput | QueueFullError | RequestError | None]:
        """The outputs of a job, with None for a beat among them, or the one reason why it is not taken."""
        request = Request(
            job.request_id, job.prompt_ids, job.params, self._shared(job),
            tenant=job.tenant, public=job.public, emitted=job.emitted,
            strategy=job.strategy, max_draft_tokens=job.max_draft_tokens, priority=job.priority,
            account=job.account, weight=job.weight,
            siblings=job.siblings, report=job.report, prompt_logprobs=job.prompt_logprobs, suspect=job.suspect,
        )  # fmt: skip
        outputs = self._replica.generate(request, BEAT_S)
        try:
            async for output in outputs:
                yield output
        except (QueueFullError, RequestError) as refusal:
            yield refusal
        finally:
            await outputs.aclose()

    def _shared(self, job: Job) -> tuple[Int32Array, ...]:
        """The texts that an answer may repeat, in one copy for all its choices that are here: each came with its own."""
        answer = job.request_id.rpartition("/")[0]
        return tuple(self._references.setdefault((answer, place), text) for place, text in enumerate(job.references))

    async def describe(self) -> Description:
        """The model and the counts; raises ``ReplicaError`` when the engine does not serve."""
        return self._replica.describe()

    def check_health(self) -> None:
        """Raises ``ReplicaError`` when Serve has to replace this actor."""
        self._replica.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_attendance"):
            self._membership_client.close()
        if hasattr(self, "_replica"):  # else the model did not load
            self._replica.stop()


@serve.ingress()
class Ingress:
    """Takes HTTP requests. It has a tokenizer and no model."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        cache: DeploymentHandle[Any] | None,
        config: Config,
        baseline: DeploymentHandle[Any] | None = None,
    ) -> None:
        admin, server = None if cache is None else HandleCacheAdmin(cache), config.server
        # The leader of a group is a rank like the others: it is missed after as long a silence, where that is not longer.
        patience_s = min(config.parallelism.rank_timeout_s, DESCRIBE_TIMEOUT_S)
        if config.parallelism.mode != "lookahead":
            patience_s = DESCRIBE_TIMEOUT_S
        address = admin_address(server)
        self._admin_port = None if address is None else AdminPort(*address, admin_names(server))
        self._tracing = open_tracing(config)
        port = HandleEngine(engine, server.resume_timeout_s, patience_s, server.replicas)
        asked: EnginePort = port if self._tracing is None else self._tracing.traced(port)
        tokenizer, is_open = load_tokenizer(config.model.path), address is not None or is_loopback(server.host)
        auditor = Auditor(port, config.audit, config.speculation, config.engine)
        self._service = Service(
            asked, tokenizer, config.tenancy, admin, server.replicas, is_open, auditor,
            guard=StreamGuard(server), admission=admission_options(config),
            cache_options=config.cache,
            baseline=None if baseline is None else _baseline_of(config, baseline),
        )  # fmt: skip

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, made where it runs: it is not sent to the actor."""
        app = create_api(self._service, has_operator_routes=self._admin_port is None, lifespan=self._alive)
        if self._tracing is not None:
            app.add_middleware(self._tracing.middleware)
        return app

    async def drain(self, timeout_s: float) -> int:
        """Takes nothing new and waits for what runs; see ``Draining.stop``."""
        return await self._service.draining.stop(timeout_s)

    @contextlib.asynccontextmanager
    async def _alive(self, app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as parts:
            if self._tracing is not None:
                parts.push_async_callback(self._tracing.close)
            if self._admin_port is not None:
                await parts.enter_async_context(self._admin_port.serving(self._service))
            yield


def build_app(config: Config) -> serve.Application:
    """The application that ``serve.run`` starts and a Serve configuration file names (``cluster.app:build_app``).

    Args:
        config: all of it; each deployment gets its slices, which are plain data. Without ``redis_url`` replicas share nothing.

    Raises:
        configs.schema.ConfigError: a value that is not allowed; outputs are to be shared, and the environment has no secret to
            derive names from; or the file of keys cannot be used.
    """
    check_values(config)
    check_address(config)
    try:
        check_secret(config)
    except LaunchError as error:
        raise ConfigError(str(error)) from None
    return application(config)


def application(config: Config) -> serve.Application:
    """The application of a configuration that was checked; see ``build_app``. Its ``redis_url`` holds no password."""
    config = config.model_copy(update={"tenancy": with_tenants_of_file(config.tenancy)})
    server, cache = config.server, config.cache
    gpus = gpus_of_a_rank(config)
    # More than admission lets in and the engine takes, also when a single replica is left: Serve never queues, the engine
    # refuses.
    most = max(capacity(config), config.engine.max_running + config.engine.max_waiting)
    ongoing = max(server.max_ongoing_requests, most + 64)
    place = None
    if redis_address(config.redis_url) and cache.enabled:
        place = CachePlace(cache, config.redis_url, tenant_names(config))
    engine = serve.deployment(
        name="engine",
        num_replicas=server.replicas,
        **_of_engines(config, gpus, ongoing),
        **_placement(config.parallelism, server.cpus_per_replica, gpus),
    )(EngineReplica).bind(
        config.model, config.engine, config.speculation, config.parallelism, place, server.start_timeout_s,
        _membership_options(config), _has_devices_alone(config, gpus),
    )  # fmt: skip
    keeper = None
    if place is not None:
        keeper = serve.deployment(
            name="cache",
            num_replicas=cache.services,
            ray_actor_options=_without_model(server),
            graceful_shutdown_timeout_s=server.stop_timeout_s,
        )(CacheActor).bind(engine, place, _quotas(config))
    ingress = serve.deployment(
        name="api",
        ray_actor_options=_without_model(server),
        max_ongoing_requests=INGRESS_ONGOING,
        max_surge_percent=100,  # a redeploy stops it when the next one answers: no request finds none
        graceful_shutdown_timeout_s=server.stop_timeout_s,
    )(Ingress)
    return ingress.bind(engine, keeper, config, _baseline(config, gpus, ongoing) if config.baseline.enabled else None)


def _of_engines(config: Config, gpus: float, ongoing: int) -> dict[str, Any]:
    """Deployment options of whatever holds a model: what it reserves, takes at once, and when Serve replaces it."""
    return {
        "ray_actor_options": {"num_cpus": config.server.cpus_per_replica, "num_gpus": gpus},
        "max_ongoing_requests": ongoing,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.server.stop_timeout_s,
    }


def _without_model(server: ServerOptions) -> dict[str, Any]:
    """What an actor reserves that computes little: nothing, or a grain of the resource that nodes for such actors offer."""
    return {"num_cpus": 0, **({} if server.api_resource is None else {"resources": {server.api_resource: GRAIN}})}


def _baseline(config: Config, gpus: float, ongoing: int) -> serve.Application:
    """The deployment that answers are compared with: the engine without drafts and memory, and with ranks of its own kind."""
    server, parallelism, engine = config.server, baseline_parallelism(config), config.engine
    if parallelism.mode != "none":  # parts of a model are not compiled
        engine = dataclasses.replace(engine, compile=False)
    return serve.deployment(
        name="baseline",
        num_replicas=config.baseline.replicas,
        **_of_engines(config, gpus, ongoing),
        **_placement(parallelism, server.cpus_per_replica, gpus),
    )(EngineReplica).bind(
        config.model, engine, SpeculationOptions(PLAIN, max_draft_tokens=0), parallelism, None,
        server.start_timeout_s, None, _has_devices_alone(config, gpus),
    )  # fmt: skip


def _baseline_of(config: Config, handle: DeploymentHandle[Any]) -> Baseline:
    """The baseline as comparisons see it. Processors are shared with the engine, and whole GPUs are not."""
    gpus, server = gpus_of_a_rank(config), config.server
    port = HandleEngine(handle, server.resume_timeout_s, replicas=config.baseline.replicas)
    return Baseline(port, config.baseline.kind, shares_devices=not gpus or gpus != int(gpus))


def _ranks(
    model: ModelOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    parallelism: ParallelismOptions,
    start_timeout_s: float,
) -> Ranks | None:
    """Who shares the steps of the replica in this actor; None where it computes alone."""
    if parallelism.mode == "tensor" or parallelism.mode == "pipeline":
        return actor_group(parallelism.mode, model, parallelism, start_timeout_s)
    if group_size(parallelism) > 1:
        return Group(model, engine, speculation, parallelism, start_timeout_s=start_timeout_s)
    return None


def _membership_options(config: Config) -> MembershipOptions | None:
    """How the replicas of a node find each other; None where they have nothing to do with each other."""
    options, server = config.parallelism, config.server
    if options.mode != "lookahead" or options.world_size != "auto" or server.replicas == 1:
        return None
    deployment = serve.deployment(name="membership", ray_actor_options=_without_model(server), graceful_shutdown_timeout_s=0.0)
    return MembershipOptions(deployment(MembershipActor).bind(), secrets.token_bytes(32), min(server.replicas, MAX_WORLD_SIZE))


def _has_devices_alone(config: Config, gpus: float) -> bool:
    """Whether no other replica computes on a replica's devices: whole GPUs are its own, processors where there is one replica."""
    return gpus == int(gpus) if gpus else config.server.replicas == 1 and not config.baseline.enabled


def _placement(parallelism: ParallelismOptions, cpus: float, gpus: float) -> dict[str, Any]:
    """Deployment options that reserve a bundle for each rank of a replica's group; its own is the first."""
    world_size = group_size(parallelism)
    if world_size == 1:
        return {}
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    return {"placement_group_bundles": [bundle] * world_size, "placement_group_strategy": parallelism.placement}


def _quotas(config: Config) -> dict[str, int]:
    """Bytes of tokens to keep of tenants that have a quota of their own."""
    own = {name: tenant.cache_mib for name, tenant in config.tenancy.tenants.items()}
    return {name: int(mib * 2**20) for name, mib in own.items() if mib is not None}


def gpus_of_a_rank(config: Config) -> float:
    """GPUs that Ray reserves for each copy of the model. It hides them all from an actor that reserves none, so that ``auto`` has
    to be settled here."""
    device = config.model.device
    if config.server.gpus_per_replica is not None:
        return config.server.gpus_per_replica
    if device == "auto":
        return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return 1.0 if device.startswith("cuda") else 0.0
