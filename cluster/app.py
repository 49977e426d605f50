"""The Serve application: an ingress that speaks HTTP and tokenizes, and engine replicas that decode."""

# No postponed annotations here: Serve reads the one of build_app to check the arguments in a configuration file.

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.replica import Description, Replica
from cluster.api import Service, create_api
from cluster.errors import ApiError
from cluster.generation import Job
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
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

    def __init__(self, model: ModelOptions, engine: EngineOptions, speculation: SpeculationOptions) -> None:
        self._replica = Replica(model, engine, speculation)

    async def generate(self, request_id: str, job: Job) -> AsyncIterator[StepOutput | QueueFullError | RequestError]:
        """The outputs of a job, or the one reason why it is not taken."""
        request = Request(request_id, job.prompt_ids, job.params, job.references)
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
        response = cast("DeploymentResponseGenerator[Any]", self._stream.generate.remote(uuid.uuid4().hex, job))
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

    def __init__(self, engine: DeploymentHandle[Any], model: ModelOptions) -> None:
        self._service = Service(HandleEngine(engine), load_tokenizer(model.path))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, made where it runs: it is not sent to the actor."""
        return create_api(self._service)


def build_app(config: Config) -> serve.Application:
    """The application that ``serve.run`` starts and a Serve configuration file names (``cluster.app:build_app``).

    Args:
        config: all of it; each deployment gets its slices, which are plain data.
    """
    server = config.server
    gpus = _default_gpus(config.model.device) if server.gpus_per_replica is None else server.gpus_per_replica
    # More than the engines take, so that it is the engine that queues and refuses.
    ongoing = max(server.max_ongoing_requests, config.engine.max_running + config.engine.max_waiting + 64)
    engine = serve.deployment(
        name="engine",
        num_replicas=server.replicas,
        ray_actor_options={"num_cpus": server.cpus_per_replica, "num_gpus": gpus},
        max_ongoing_requests=ongoing,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=server.stop_timeout_s,
    )(EngineReplica)
    ingress = serve.deployment(
        name="api",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=INGRESS_ONGOING,
        graceful_shutdown_timeout_s=server.stop_timeout_s,
    )(Ingress)
    return ingress.bind(engine.bind(config.model, config.engine, config.speculation), config.model)


def _default_gpus(device: str) -> float:
    """GPUs of a replica. Ray hides them all from an actor that reserves none, so ``auto`` has to be settled here."""
    if device == "auto":
        return 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return 1.0 if device.startswith("cuda") else 0.0
