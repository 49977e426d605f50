"""The HTTP interface: OpenAI's routes on top of an ``EnginePort``. It knows nothing of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header
from fastapi.responses import Response
from transformers import PreTrainedTokenizerFast

from actors.replica import Description
from cluster.admission.controller import AdmissionController, AdmissionOptions
from cluster.admission.middleware import AdmissionMiddleware, HostMiddleware
from cluster.admission.tenancy import Tenancy
from cluster.http import documents, errors
from cluster.http.admin.api import AdminService, add_admin_routes
from cluster.http.admin.audit import AuditService, add_audit_routes
from cluster.http.answers.extras import Extras
from cluster.http.answers.logprobs import TokenBytes
from cluster.http.answers.openai_shapes import AnswerBuilder
from cluster.http.answers.predicted import Predicted
from cluster.http.answers.respond import Form, respond
from cluster.http.answers.stream_guard import StreamGuard
from cluster.http.answers.tool_calls import OPENING
from cluster.http.errors import ApiError
from cluster.http.job_planner import Planner
from cluster.http.playground import add_playground
from cluster.http.tenant_cache import TenantCacheService, add_tenant_cache_routes
from cluster.http.text_api import TextService, add_text_routes
from cluster.http.text_threads import TextThreads
from cluster.http.types.completion_fields import CompletionFields
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.observe.audit import Auditor
from cluster.observe.audited_engine import AuditedEngine
from cluster.observe.metrics import MetricsService, add_metrics_route
from cluster.serving.cache_port import CacheAdminPort
from cluster.serving.compare import Baseline, CompareService, add_compare_route
from cluster.serving.draining import Draining
from cluster.serving.generation import EnginePort, Generation
from cluster.serving.health import HealthService, add_health_routes
from cluster.serving.readiness import Readiness
from configs.slices import CacheOptions, ServerOptions, TenancyOptions
from engine.loading.model import ModelInfo
from engine.text.chat import marks_tool_calls

Authorization = Annotated[str | None, Header(include_in_schema=False)]


class Service:
    """What the routes do."""

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: PreTrainedTokenizerFast,
        tenancy: TenancyOptions | None = None,
        cache: CacheAdminPort | None = None,
        replicas: int = 1,
        open_metrics: bool = False,
        auditor: Auditor | None = None,
        cache_options: CacheOptions | None = None,
        guard: StreamGuard | None = None,
        admission: AdmissionOptions | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        """
        Args:
            engine: the replicas.
            tokenizer: of the model.
            tenancy: whose requests share drafts; nobody's when absent.
            cache: the shared memory, for the admin routes; None where there is none.
            replicas: how many there should be.
            open_metrics: /metrics needs no key; otherwise it is the operator's.
            auditor: hears what is served; None where nothing is audited.
            cache_options: the slice ``cache`` of the configuration, for what tenants are told; its defaults when absent.
            guard: of streams; None where they leave as they come.
            admission: who may come in; whoever has no wrong key when absent.
            baseline: deployed beside the engine, for comparisons; None where there is none.
        """
        self._engine = engine if auditor is None else AuditedEngine(engine, auditor)
        self._tokenizer, self._threads = tokenizer, TextThreads(tokenizer)
        self._tenancy = Tenancy(tenancy or TenancyOptions(), admission is not None and admission.require_key)
        self.admission = AdmissionController(self._tenancy, admission)
        self.admin = AdminService(self._tenancy, tokenizer, cache, engine.describe, auditor)
        self.metrics = MetricsService(self._tenancy, engine.describe, replicas, open_metrics, auditor, self.admission.counts)
        self._token_bytes = TokenBytes(tokenizer)
        self.audit = AuditService(self._tenancy, self._token_bytes, auditor)
        self.text = TextService(self._threads, self._tenancy, self._model)
        self.tenant_cache = TenantCacheService(self._tenancy, cache, self._model, cache_options or CacheOptions(), auditor)
        self._info: ModelInfo | None = None  # asked for once
        self._guard = guard or StreamGuard(ServerOptions())
        ready = Readiness(engine.describe, replicas, cache, None if baseline is None else baseline.engine.describe)
        self.state = HealthService(self._replicas, replicas, ready)
        self.compare = CompareService(
            self._engine, baseline, self._threads, self._tenancy, self.admission, self._model, self._token_bytes
        )
        self.draining = Draining()
        self._started = int(time.time())

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
        answer, planner = await self._begin("chat", "chatcmpl", body, authorization)
        planned = await planner.chat(body)
        form = Form(
            bool(body.stream),
            body.include_usage,
            prediction=None if body.prediction is None else Predicted(planned[0].references[0]),
            reads_calls=marks_tool_calls(self._tokenizer, body.shown_tools, OPENING),
            most_calls=1 if body.parallel_tool_calls is False else None,
            reports_usage=body.reports_usage,
            shape=self._guard.shape(body),
        )
        engine, jobs = self.admission.admit(self._engine, planned, body)
        generation = Generation(engine, jobs, body.n or 1)
        answer.extras = Extras.asked(body, jobs, self._token_bytes)
        self.metrics.asked(body.n or 1, body.model)
        return await respond(answer, generation, form)

    async def completion(self, body: CompletionRequest, authorization: str | None) -> Response:
        """The text that follows each prompt."""
        answer, planner = await self._begin("text", "cmpl", body, authorization)
        engine, jobs = self.admission.admit(self._engine, await planner.completion(body), body)
        generation = Generation(engine, jobs, body.n or 1, silent=body.max_tokens == 0)
        self.metrics.asked(body.n or 1, body.model)
        echoes, shape = await planner.echoes(body), self._guard.shape(body)
        answer.extras = Extras.asked(body, jobs, self._token_bytes, echoes)
        form = Form(bool(body.stream), body.include_usage, body.reports_usage, echoes, shape=shape)
        return await respond(answer, generation, form)

    async def _begin(
        self, kind: Literal["chat", "text"], prefix: str, body: CompletionFields, authorization: str | None
    ) -> tuple[AnswerBuilder, Planner]:
        """An answer with its id, and who plans its jobs. Raises ``ApiError`` for a wrong key or another model."""
        sharing = self._tenancy.sharing(authorization, body.cache)
        info = await self._model(body.model)
        lossless = info.is_lossless(body.drafting.strategy, body.drafting.max_draft_tokens)
        answer = AnswerBuilder(kind, prefix, info.served_name, lossless, self._token_bytes, body.skips_special)
        return answer, Planner(self._threads, info, answer.id, sharing, self.admission)

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
            "exact": info.exact,  # lossless outputs are plain decoding's to the last bit
            "strategies": info.choices,
            "lossless_strategies": info.lossless_choices,
        }


def create_api(
    service: Service,
    *,
    has_operator_routes: bool = True,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The application. Routes are the only thing it has: they unpack a request and call the service.

    Args:
        service: does what they say.
        has_operator_routes: /admin and /metrics are among them; false where they have a port of their own.
        lifespan: what lives as long as the application.
    """
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, lifespan=lifespan)
    errors.install(app)
    documents.install(app)

    add_health_routes(app, service.state)

    @app.get("/version")
    async def version() -> documents.Version:
        return documents.Version(version=documents.version())

    @app.get("/v1/models", responses=documents.ERRORS | {200: {"model": documents.Models}})
    async def models(authorization: Authorization = None) -> dict[str, Any]:
        return await service.models(authorization)

    @app.get("/v1/models/{name:path}", responses=documents.ERRORS | {200: {"model": documents.Model}})
    async def model(name: str, authorization: Authorization = None) -> dict[str, Any]:
        return await service.model(name, authorization)

    @app.post("/v1/completions", responses=documents.ANSWERS, response_model=None)
    async def completion(body: CompletionRequest, authorization: Authorization = None) -> Response:
        return await service.completion(body, authorization)

    @app.post("/v1/chat/completions", responses=documents.ANSWERS, response_model=None)
    async def chat(body: ChatCompletionRequest, authorization: Authorization = None) -> Response:
        return await service.chat(body, authorization)

    add_text_routes(app, service.text)
    add_compare_route(app, service.compare)
    add_tenant_cache_routes(app, service.tenant_cache)
    add_playground(app)
    if has_operator_routes:
        add_operator_routes(app, service)
    app.add_middleware(AdmissionMiddleware, admission=service.admission)
    app.add_middleware(service.draining.middleware)
    app.add_middleware(HostMiddleware, names=service.admission.allowed_names, refuse=service.admission.refuse)
    return app


def add_operator_routes(app: FastAPI, service: Service) -> None:
    """Gives an application what is the operator's: /admin and /metrics."""
    add_admin_routes(app, service.admin)
    add_audit_routes(app, service.audit)
    add_metrics_route(app, service.metrics)
