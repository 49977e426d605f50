"""The Serve application: an ingress that speaks HTTP and tokenizes, and engine replicas that decode."""

# No postponed annotations here: Serve reads the one of build_app to check the arguments in a configuration file.

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.replica import CacheAccess, Description, Replica
from cluster.api import Service, create_api
from cluster.cache_actor import CacheActor, HandleCacheAdmin
from cluster.errors import ApiError
from cluster.generation import Job
from cluster.preflight import SECRET_ADVICE, SECRET_VARIABLE
from configs.schema import Config, ConfigError, tenant_names
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions, TenancyOptions
from decoding.request import Request, StepOutput
from engine.errors import QueueFullError, RequestError
from engine.loading import load_tokenizer

logger = logging.getLogger(__name__)

INGRESS_ONGOING = 100_000  # the ingress holds what engines queue, and answers /health whatever they do
HEALTH_PERIOD_S = 3.0
DESCRIBE_TIMEOUT_S = 5.0
ACCEPT_TIMEOUT_S = 60.0  # a replica that died is replaced within that, or the request gets a 503


class EngineReplica:
    """A ``Replica`` as an actor. What the engine refuses is sent as a value: a refusal is no failure of the actor."""

    def __init__(
        self, model: ModelOptions, engine: EngineOptions, speculation: SpeculationOptions, cache: CacheAccess | None
    ) -> None:
        self._replica = Replica(model, engine, speculation, cache)

    async def generate(self, job: Job) -> AsyncIterator[StepOutput | QueueFullError | RequestError]:
        """The outputs of a job, or the one reason why it is not taken."""
        request = Request(job.request_id, job.prompt_ids, job.params, job.references, tenant=job.tenant, public=job.public)
        outputs = self._replica.generate(request)
        try:
            async for output in outputs:
                yield output
        except (QueueFullError, RequestError) as refusal:
            yield refusal
        finally:
            await outputs.aclose()

    async def describe(self) -> Description:
        """The model and the counts; raises ``ReplicaError`` when the engine does not serve."""
        return self._replica.describe()

    def check_health(self) -> None:
        """Raises ``ReplicaError`` when Serve has to replace this actor."""
        self._replica.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_replica"):  # else the model did not load
            self._replica.stop()


class HandleEngine:
    """The ``EnginePort`` over a deployment of ``EngineReplica``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle, self._stream = handle, handle.options(stream=True)

    async def generate(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        """See ``EnginePort.generate``."""
        response = cast("DeploymentResponseGenerator[Any]", self._stream.generate.remote(job))
        finished = False
        try:
            item = await asyncio.wait_for(response.__anext__(), ACCEPT_TIMEOUT_S)
            while not finished:
                finished = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
                if not finished:
                    item = await response.__anext__()
        except (RayError, RayServeException, StopAsyncIteration, TimeoutError) as error:
            logger.exception("an engine replica failed")
            message = f"the engine replica failed or is not answering ({type(error).__name__}); try again"
            raise ApiError(503, message, code="engine_unavailable") from error
        finally:
            if not finished:
                response.cancel()

    async def describe(self) -> list[Description]:
        """See ``EnginePort.describe``."""
        try:
            answers = await self._handle.broadcast("describe").results_async(timeout_s=DESCRIBE_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            logger.exception("no engine replica answers")
            return []
        return [answer for answer in answers if isinstance(answer, Description)]


@serve.ingress()
class Ingress:
    """Takes HTTP requests. It has a tokenizer and no model."""

    def __init__(
        self, engine: DeploymentHandle[Any], model: ModelOptions, tenancy: TenancyOptions, cache: DeploymentHandle[Any] | None
    ) -> None:
        admin = None if cache is None else HandleCacheAdmin(cache)
        self._service = Service(HandleEngine(engine), load_tokenizer(model.path), tenancy, admin)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, made where it runs: it is not sent to the actor."""
        return create_api(self._service)


def build_app(config: Config) -> serve.Application:
    """The application that ``serve.run`` starts and a Serve configuration file names (``cluster.app:build_app``).

    Args:
        config: all of it; each deployment gets its slices, which are plain data. Without ``redis_url`` replicas share nothing.

    Raises:
        configs.schema.ConfigError: outputs are to be shared, and the environment has no secret to derive names from.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if config.redis_url and config.cache.enabled and not secret:
        raise ConfigError(f"{SECRET_VARIABLE} is not set, {SECRET_ADVICE}")
    return application(config, secret.encode())


def application(config: Config, secret: bytes) -> serve.Application:
    """The application with a secret for the names of tenants in Redis; see ``build_app``."""
    server, cache = config.server, config.cache
    gpus = _default_gpus(config.model.device) if server.gpus_per_replica is None else server.gpus_per_replica
    # More than the engines take, so that it is the engine that queues and refuses.
    ongoing = max(server.max_ongoing_requests, config.engine.max_running + config.engine.max_waiting + 64)
    access = None
    if config.redis_url and cache.enabled:
        access = CacheAccess(cache, config.redis_url, secret, tenant_names(config))
    engine = serve.deployment(
        name="engine",
        num_replicas=server.replicas,
        ray_actor_options={"num_cpus": server.cpus_per_replica, "num_gpus": gpus},
        max_ongoing_requests=ongoing,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=server.stop_timeout_s,
    )(EngineReplica).bind(config.model, config.engine, config.speculation, access)
    keeper = None
    if access is not None:
        keeper = serve.deployment(
            name="cache",
            num_replicas=cache.services,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=server.stop_timeout_s,
        )(CacheActor).bind(engine, access, _quotas(config))
    ingress = serve.deployment(
        name="api",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=INGRESS_ONGOING,
        graceful_shutdown_timeout_s=server.stop_timeout_s,
    )(Ingress)
    return ingress.bind(engine, config.model, config.tenancy, keeper)


def _quotas(config: Config) -> dict[str, int]:
    """Bytes of tokens to keep of tenants that have a quota of their own."""
    own = {name: tenant.cache_mib for name, tenant in config.tenancy.tenants.items()}
    return {name: int(mib * 2**20) for name, mib in own.items() if mib is not None}


def _default_gpus(device: str) -> float:
    """GPUs of a replica. Ray hides them all from an actor that reserves none, so ``auto`` has to be settled here."""
    if device == "auto":
        return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return 1.0 if device.startswith("cuda") else 0.0
