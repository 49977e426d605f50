"""The HTTP interface: OpenAI's routes on top of an ``EnginePort``. It knows nothing of Ray."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import PreTrainedTokenizerFast

from actors.lookahead_parallel import GroupState
from actors.replica import Description
from cluster import errors
from cluster.admin_api import AdminService, CacheAdminPort, add_admin_routes
from cluster.answers import AnswerBuilder, PromptTokensDetails, Usage
from cluster.errors import ApiError
from cluster.generation import EnginePort, Generation, Planner
from cluster.logprobs import TokenBytes
from cluster.openai_types import ChatCompletionRequest, CompletionRequest, SpeculationChoice
from cluster.tenancy import Tenancy
from configs.slices import TenancyOptions
from decoding.request import TokenLogprob
from engine.loading import ModelInfo

logger = logging.getLogger(__name__)

Authorization = Annotated[str | None, Header()]

# A proxy must not collect chunks before it passes them on.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Service:
    """What the routes do."""

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: PreTrainedTokenizerFast,
        tenancy: TenancyOptions | None = None,
        cache: CacheAdminPort | None = None,
        replicas: int = 1,
    ) -> None:
        """
        Args:
            engine: the replicas.
            tokenizer: of the model.
            tenancy: whose requests share drafts; nobody's when absent.
            cache: the shared memory, for the admin routes; None where there is none.
            replicas: how many there should be.
        """
        self._engine, self._tokenizer, self._configured = engine, tokenizer, replicas
        self._tenancy = Tenancy(tenancy or TenancyOptions())
        self.admin = AdminService(self._tenancy, tokenizer, cache, engine.describe)
        self._token_bytes = TokenBytes(tokenizer)
        self._info: ModelInfo | None = None  # asked for once
        self._started = int(time.time())

    async def health(self) -> Response:
        """200 with the load of all replicas, ``degraded`` where ranks or replicas are missing; 503 while none answers."""
        replicas = await self._replicas()
        groups = [replica.group for replica in replicas if replica.group is not None]
        whole = len(replicas) >= self._configured and not any(group.degraded for group in groups)
        return JSONResponse(
            {
                "status": "ok" if whole else "degraded",
                "model": replicas[0].info.served_name,
                "replicas": len(replicas),
                "running": sum(replica.counts.running for replica in replicas),
                "waiting": sum(replica.counts.waiting for replica in replicas),
                "free_slots": sum(replica.counts.free_slots for replica in replicas),
                "shared_cache": _cache_state(replicas),
                **({"ranks": _ranks_state(groups, self._configured)} if groups else {}),
            }
        )

    async def models(self, authorization: str | None) -> dict[str, Any]:
        """The list of the one model. Clients ask for it to see whether their key is good."""
        self._tenancy.tenant_of(authorization)
        return {"object": "list", "data": [self._card(await self._model())]}

    async def model(self, name: str, authorization: str | None) -> dict[str, Any]:
        """The model by its name."""
        self._tenancy.tenant_of(authorization)
        return self._card(await self._model(name))

    async def chat(self, body: ChatCompletionRequest, authorization: str | None) -> Response:
        """The assistant's next message."""
        sharing = self._tenancy.sharing(authorization, body.cache)
        info = await self._model(body.model)
        answer = AnswerBuilder("chat", "chatcmpl", info.served_name, _is_lossless(info, body), self._token_bytes)
        generation = Generation(self._engine, Planner(self._tokenizer, info, answer.id, sharing).chat(body))
        return await _respond(answer, generation, 1, bool(body.stream), body.include_usage)

    async def completion(self, body: CompletionRequest, authorization: str | None) -> Response:
        """The text that follows each prompt."""
        sharing = self._tenancy.sharing(authorization, body.cache)
        info = await self._model(body.model)
        answer = AnswerBuilder("text", "cmpl", info.served_name, _is_lossless(info, body), self._token_bytes)
        generation = Generation(self._engine, Planner(self._tokenizer, info, answer.id, sharing).completion(body))
        return await _respond(answer, generation, len(body.prompt), bool(body.stream), body.include_usage)

    async def _model(self, name: str | None = None) -> ModelInfo:
        """What is served; a 404 when the caller named something else."""
        if self._info is None:
            self._info = (await self._replicas())[0].info
        if name is not None and name != self._info.served_name:
            message = f"the model {name!r} does not exist; this server has {self._info.served_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._info

    async def _replicas(self) -> list[Description]:
        """At least one."""
        replicas = await self._engine.describe()
        if not replicas:
            raise ApiError(503, "no engine replica is answering; it may be starting", code="engine_unavailable")
        return replicas

    def _card(self, info: ModelInfo) -> dict[str, Any]:
        return {
            "id": info.served_name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "max_model_len": info.max_model_len,
            "lossless": info.lossless,  # whatever is asked for
            "strategies": info.choices,
            "lossless_strategies": info.lossless_choices,
        }


def create_api(service: Service) -> FastAPI:
    """The application. Routes are the only thing it has: they unpack a request and call the service."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)

    @app.get("/health")
    async def health() -> Response:
        return await service.health()

    @app.get("/v1/models")
    async def models(authorization: Authorization = None) -> dict[str, Any]:
        return await service.models(authorization)

    @app.get("/v1/models/{name:path}")
    async def model(name: str, authorization: Authorization = None) -> dict[str, Any]:
        return await service.model(name, authorization)

    @app.post("/v1/completions", response_model=None)
    async def completion(body: CompletionRequest, authorization: Authorization = None) -> Response:
        return await service.completion(body, authorization)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatCompletionRequest, authorization: Authorization = None) -> Response:
        return await service.chat(body, authorization)

    add_admin_routes(app, service.admin)
    return app


def _cache_state(replicas: Sequence[Description]) -> str:
    """``off``, ``connected``, or ``degraded``: a replica drafts from what it has, and what it says waits."""
    mirrors = [replica.cache for replica in replicas if replica.cache is not None]
    if not mirrors:
        return "off"
    return "connected" if all(mirror.connected for mirror in mirrors) else "degraded"


def _ranks_state(groups: Sequence[GroupState], configured: int) -> dict[str, Any]:
    """The ranks of all groups together. ``of`` counts those of groups that do not answer, too.

    Elastic groups are made up of the replicas themselves: each replica is one rank. ``width`` is that of the widest group.
    """
    ready = [len(group.ready) if group.width is None else 1 for group in groups]
    of = [group.world_size if group.width is None else 1 for group in groups]
    return {
        "ready": sum(ready),
        "of": sum(of) + max(0, configured - len(groups)) * max(of),
        "width": max(group.width or len(group.ready) for group in groups),
        "refilling": sum(len(group.refilling) for group in groups),
        "losses": sum(group.losses for group in groups),
        "last_loss": next((group.last_loss for group in groups if group.last_loss is not None), None),
        "divergences": sum(group.divergences for group in groups),
        "disagreements": sum(group.disagreements for group in groups),
    }


def _is_lossless(info: ModelInfo, body: ChatCompletionRequest | CompletionRequest) -> bool:
    """Whether the strategy that a request asks for leaves the law of its answer alone; of an unknown one it does not matter."""
    speculation = body.speculation or SpeculationChoice()
    return info.is_lossless(speculation.strategy, speculation.max_draft_tokens)


async def _respond(answer: AnswerBuilder, generation: Generation, choices: int, stream: bool, include_usage: bool) -> Response:
    """Starts the generation, so that a refusal is an HTTP status also for a stream, and answers with it."""
    if stream:
        await generation.__aenter__()
        events = _events(answer, generation, choices, include_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
    texts: list[list[str]] = [[] for _ in range(choices)]
    reasons: list[Any] = [None] * choices
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
    async with generation:
        async for index, output in generation.outputs():
            texts[index].append(output.text)
            reasons[index] = output.finish_reason
            logprobs[index] += output.logprobs or ()
    whole = answer.whole(["".join(pieces) for pieces in texts], reasons, logprobs, _usage(generation))
    return Response(whole.to_json(), media_type="application/json")


async def _events(answer: AnswerBuilder, generation: Generation, choices: int, include_usage: bool) -> AsyncIterator[str]:
    """The server-sent events of a started generation. A failure is an event with the error, and no ``[DONE]`` follows it."""
    opened = [False] * choices
    try:
        async for index, output in generation.outputs():
            if not opened[index]:
                opened[index] = True
                opening = answer.opening(index)
                if opening is not None:
                    yield opening.to_event(include_usage)
            if output.text or output.logprobs:
                yield answer.piece(index, output.text, output.logprobs or ()).to_event(include_usage)
            if output.finish_reason is not None:
                yield answer.end(index, output.finish_reason).to_event(include_usage)
        if include_usage:
            yield answer.usage(_usage(generation)).to_event(include_usage)
        yield "data: [DONE]\n\n"
    except Exception as error:
        logger.exception("a stream broke off")
        yield f"data: {json.dumps(errors.api_error(error).body())}\n\n"
    finally:
        await generation.__aexit__()


def _usage(generation: Generation) -> Usage:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    details = PromptTokensDetails(cached_tokens=generation.cached_tokens)
    usage = Usage(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, prompt_tokens_details=details
    )
    if generation.energy_j is not None:
        usage.energy_joules = round(generation.energy_j, 3)
    return usage
