"""HTTP API: OpenAI's routes on top of an ``EnginePort``, independent of Ray."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from outrider.cluster.admission.controller import AdmissionController, AdmissionOptions, AdmittedRequest
from outrider.cluster.admission.middleware import AdmissionMiddleware, HostMiddleware
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http import documents, error_handlers
from outrider.cluster.http.admin.api import AdminService, AuditService, BaselineService, add_admin_routes
from outrider.cluster.http.answers.anthropic import MessageBuilder, respond_message
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.openai_shapes import AnswerBuilder
from outrider.cluster.http.answers.predicted import Predicted
from outrider.cluster.http.answers.respond import ResponseForm, respond
from outrider.cluster.http.answers.responses import ResponseBuilder, respond_items
from outrider.cluster.http.answers.resume import StreamHeaders, no_resuming
from outrider.cluster.http.answers.scores import Scores, scores_of
from outrider.cluster.http.answers.stream_guard import StreamGuard
from outrider.cluster.http.checked_bodies import checking_route
from outrider.cluster.http.compare import Baseline, CompareService, Comparison
from outrider.cluster.http.documents import Accept, Authorization, LastEventId, NoEventId, SessionId
from outrider.cluster.http.errors import ApiError, renamed_errors
from outrider.cluster.http.playground import add_playground
from outrider.cluster.http.request_ids import RequestIdMiddleware
from outrider.cluster.http.request_planner import PlannerServices, RequestPlanner
from outrider.cluster.http.tenant_cache import TenantCacheService, add_tenant_cache_routes
from outrider.cluster.http.text_api import Detokenized, FileText, TextService, Tokens
from outrider.cluster.http.text_threads import TextThreads
from outrider.cluster.http.types.anthropic import CountTokensRequest, MessagesRequest
from outrider.cluster.http.types.anthropic import own_name as anthropic_name
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest, ScoreRequest
from outrider.cluster.http.types.responses import ResponsesRequest, own_name
from outrider.cluster.observe.audit import Auditor, Forget, keeps_nothing
from outrider.cluster.observe.metrics import MetricsService
from outrider.cluster.observe.shadow import Shadow
from outrider.cluster.serving.cache_port import CacheAdminPort
from outrider.cluster.serving.draining import Draining
from outrider.cluster.serving.generation import EnginePort, Generation, Listener
from outrider.cluster.serving.health import HealthService
from outrider.configs.slices import CacheOptions, ServerOptions, TenancyOptions
from outrider.engine.loading.model_info import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Service:
    """Handlers of the generating routes, and the services behind all other routes."""

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: PreTrainedTokenizerFast,
        tenancy: TenancyOptions | None = None,  # tenants and their API keys; without it no requests share draft sources
        cache: CacheAdminPort | None = None,  # shared cache, for the admin routes; None if the server has none
        replicas: int = 1,  # configured number of engine replicas
        open_metrics: bool = False,  # serve /metrics without an admin key
        auditor: Auditor | None = None,  # records and replays served requests; None disables audits
        cache_options: CacheOptions | None = None,  # section ``cache`` of the configuration, for /v1/cache
        guard: StreamGuard | None = None,  # padding and cadence of streams; None sends events unchanged
        admission: AdmissionOptions | None = None,  # required keys and limits; None rejects wrong keys only
        baseline: Baseline | None = None,  # baseline deployment for /v1/compare; None if not deployed
        shadow: Shadow | None = None,  # sends served requests to the baseline too; None if disabled
        listeners: Sequence[Listener] = (),  # output hooks of all generations, besides those of the auditor and the shadow
        forget: Forget | None = None,  # deletes audit records in all API replicas; None uses the local auditor's
        tells_engines: Callable[[], Awaitable[bool]] | None = None,  # whether this API exports engine metrics; None: always
        wake: Callable[[], None] | None = None,  # starts an engine (scale from zero); None if one is always running
        device_failures: Callable[[], Mapping[str, int]] = dict,  # device failures of the replicas, by kind
        allowed_origins: Sequence[str] = (),  # origins of web pages that may use the API (CORS)
        warns_of_unknown: bool = False,  # unknown fields are left out with a warning; otherwise they are errors
        sampling_defaults: Mapping[str, float] | None = None,  # of the server: ``server.sampling_defaults``
        spec_decode_metrics: bool = False,  # answers have vLLM's ``metrics.speculative_decoding``
        stream_key: bytes = b"",  # signs the event ids of streams; empty disables event ids
    ) -> None:
        admission = admission or AdmissionOptions()
        heard = (*listeners, *(each.on_output for each in (auditor, shadow) if each is not None))
        self._engine, self._tokenizer, self._token_bytes = engine, tokenizer, TokenBytes(tokenizer)
        self._tenancy = Tenancy(tenancy or TenancyOptions(), admission.require_key)
        self.admission = AdmissionController(self._tenancy, admission)
        others = None if baseline is None else baseline.engine.describe
        self.state = HealthService(engine.describe, replicas, cache, others, wake, self._tenancy.reports_load)
        threads = TextThreads(tokenizer, self.admission.refuse)
        self._answering = PlannerServices(
            threads, self._tenancy, self.admission, self.state.info, heard, stream_key, sampling_defaults or {}
        )
        forget = forget or (keeps_nothing if auditor is None else auditor.forget)
        self.admin = AdminService(self._tenancy, tokenizer, cache, engine.describe, forget)
        self.metrics = MetricsService(
            self._tenancy, self.state.described, replicas, open_metrics, self.admission.counts, auditor, shadow, tells_engines,
            device_failures,
        )  # fmt: skip
        self.audit = AuditService(self._tenancy, self._token_bytes, auditor)
        self.baseline = BaselineService(self._tenancy, shadow)
        self.text = TextService(self._answering.threads, self._tenancy, self._answering.model)
        self.tenant_cache = TenantCacheService(
            self._tenancy, cache, self._answering.model, cache_options or CacheOptions(), forget
        )
        self.compare = CompareService(engine, baseline, self._answering, self._token_bytes)
        self._guard = guard or StreamGuard(ServerOptions())
        self.draining = Draining()
        self._started = int(time.time())
        self._tells_metrics = spec_decode_metrics
        self.allowed_origins, self.warns_of_unknown = allowed_origins, warns_of_unknown

    async def version(self) -> documents.Version:
        """Return the version of this server."""
        return documents.Version(version=documents.version())

    async def models(self, authorization: Authorization = None) -> dict[str, Any]:
        """List the model and its adapters."""
        self._tenancy.tenant_of(authorization)  # clients use this route to validate their key
        info = await self._answering.model()
        return {"object": "list", "data": [self._card(info, name) for name in info.names]}

    async def model(self, name: str, authorization: Authorization = None) -> dict[str, Any]:
        """Return the model or an adapter by its name."""
        if not name:  # the list's path with a slash behind it
            return await self.models(authorization)
        self._tenancy.tenant_of(authorization)
        return self._card(await self._answering.model(name), name)

    async def chat(
        self,
        body: ChatCompletionRequest,
        authorization: Authorization = None,
        session_id: SessionId = None,
        accept: Accept = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        """Generate the assistant's next message."""
        headers = StreamHeaders(accept, last_event_id)
        planner = await self._answering.planner("chatcmpl-", body, authorization, session_id, headers)
        form, admitted, generation = await self._chat(planner, body, body)
        begun = planner.beginning
        answer = AnswerBuilder(
            begun.answer_id, begun.created, body, planner.info, self._token_bytes, admitted.jobs, left_out=planner.left_out,
            tells_metrics=self._tells_metrics,
        )  # fmt: skip
        return await respond(answer, generation, form)

    async def response(
        self,
        body: ResponsesRequest,
        authorization: Authorization = None,
        session_id: SessionId = None,
        last_event_id: NoEventId = None,
    ) -> Response:
        """Generate the items that follow the input: reasoning, a message and function calls."""
        no_resuming(last_event_id)
        planner = await self._answering.planner("resp_", body, authorization, session_id)
        with renamed_errors(own_name, "input"):
            form, _, generation = await self._chat(planner, body.chat, body)
            begun = planner.beginning
            answer = ResponseBuilder(begun.answer_id, begun.created, body, planner.info, planner.left_out)
            return await respond_items(answer, generation, form)

    async def message(
        self,
        body: MessagesRequest,
        authorization: Authorization = None,
        session_id: SessionId = None,
        last_event_id: NoEventId = None,
    ) -> Response:
        """Generate the assistant's next message, in Anthropic's format."""
        no_resuming(last_event_id)
        planner = await self._answering.planner("msg_", body, authorization, session_id)
        with renamed_errors(anthropic_name, "messages"):
            form, admitted, generation = await self._chat(planner, body.chat, body)
            room = planner.info.max_model_len - len(admitted.jobs[0].prompt_ids)
            answer = MessageBuilder(planner.beginning.answer_id, body, planner.info, room, planner.left_out)
            return await respond_message(answer, generation, form)

    async def count_tokens(self, body: CountTokensRequest, authorization: Authorization = None) -> documents.TokenCount:
        """Count the tokens of a message's prompt, in Anthropic's format."""
        planner = await self._answering.planner("msg_", body, authorization, None)
        with renamed_errors(anthropic_name, "messages"):
            return documents.TokenCount(input_tokens=await planner.count(body.chat))

    async def _chat(
        self,
        planner: RequestPlanner,
        chat: ChatCompletionRequest,
        body: ChatCompletionRequest | ResponsesRequest | MessagesRequest,
    ) -> tuple[ResponseForm, AdmittedRequest, Generation]:
        """Return the response form of a chat, its admitted jobs, and its generation, which is not started."""
        planned = await planner.chat(chat)
        (reasoning, calls), shape = planner.reads(chat, self._token_bytes), self._guard.shape(body)
        form = ResponseForm(
            bool(body.stream),
            chat.include_usage,
            prediction=None if chat.prediction is None else Predicted(planned[0].references[0]),
            reasoning=reasoning,
            calls=calls,
            reports_usage=chat.reports_usage,
            shape=shape,
            ids=planner.beginning.events(planned, planner.info, shape.has_period),
        )
        admitted = self.admission.admit(planned, body)
        self.metrics.asked(chat.n or 1, planner.info.served_name)
        return form, admitted, self._answering.generation(self._engine, admitted, chat.n or 1)

    async def embeddings(self, authorization: Authorization = None) -> Response:
        """Raise ``ApiError`` (404, the same status as vLLM), since the model generates text."""
        self._tenancy.tenant_of(authorization)
        info = await self._answering.model()
        message = f"the model {info.served_name!r} generates text and does not support the Embeddings API"
        raise ApiError(404, f"{message}; ask a server of a model made for it", code="not_supported")

    async def completion(
        self,
        body: CompletionRequest,
        authorization: Authorization = None,
        session_id: SessionId = None,
        accept: Accept = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        """Generate the text that follows each prompt."""
        headers = StreamHeaders(accept, last_event_id)
        planner = await self._answering.planner("cmpl-", body, authorization, session_id, headers)
        planned, shape = await planner.completion(body), self._guard.shape(body)
        ids = planner.beginning.events(planned, planner.info, shape.has_period)
        admitted = self.admission.admit(planned, body)
        self.metrics.asked(body.n or 1, planner.info.served_name)
        generation = self._answering.generation(self._engine, admitted, body.n or 1, silent=body.max_tokens == 0)
        echoes = await planner.echoes(body)
        begun, jobs = planner.beginning, admitted.jobs
        answer = AnswerBuilder(
            begun.answer_id, begun.created, body, planner.info, self._token_bytes, jobs, echoes, planner.left_out,
            self._tells_metrics,
        )  # fmt: skip
        form = ResponseForm(bool(body.stream), body.include_usage, body.reports_usage, echoes, shape=shape, ids=ids)
        return await respond(answer, generation, form)

    async def score(
        self,
        body: ScoreRequest,
        authorization: Authorization = None,
        session_id: SessionId = None,
        last_event_id: NoEventId = None,
    ) -> Scores:
        """Return the log-probabilities of choices behind a prompt."""
        no_resuming(last_event_id)
        planner = await self._answering.planner("score-", body, authorization, session_id)
        with renamed_errors(lambda field: body.choices_field if field == "choices" else field, body.prompt_field):
            admitted = self.admission.admit(await planner.score(body), body)
            self.metrics.asked(1, planner.info.served_name)
            generation = self._answering.generation(self._engine, admitted)
            return await scores_of(generation, admitted.jobs, planner.beginning, body.model, self._token_bytes)

    def _card(self, info: ModelInfo, name: str) -> dict[str, Any]:
        form = self._answering.chat_format
        origins: dict[str, tuple[str, str | None]] = dict.fromkeys(info.aliases, (info.served_name, None))
        origins |= {adapter.name: (adapter.path, info.served_name) for adapter in info.adapters}
        root, parent = origins.get(name) or info.adapter_of or (name, None)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "outrider",
            "root": _without_folder(root),
            "parent": parent and _without_folder(parent),
            "max_model_len": info.max_model_len,
            "sampling_defaults": self._answering.defaults(info),  # used where a request leaves a parameter out
            "weights": info.weights,  # quantization formats, otherwise the dtype
            "lossless": info.lossless,  # true if every strategy that a request may choose is lossless
            "reasoning": form.reasoning and list(form.reasoning),  # opening and closing tag, from the chat template
            "tool_calls": form.calls,  # format of tool calls, by the name of vLLM's parser
            "exact": info.exact,  # lossless outputs equal plain decoding bit for bit
            "strategies": info.choices,
            "lossless_strategies": info.lossless_choices,
        }


def create_api(
    service: Service,
    *,
    has_operator_routes: bool = True,
    sends_request_ids: bool = True,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Build the application: the routes, with or without /admin and /metrics, and the middleware in front of them.

    ``sends_request_ids``: answers have the header ``X-Request-Id``, which Ray Serve's proxy adds itself.
    """
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.route_class = checking_route(service.text.threads, service.warns_of_unknown)
    error_handlers.install(app)
    documents.install(app)

    for path, method in (("/ping", "POST"), ("/ping", "GET"), ("/health", "GET")):
        app.add_api_route(path, service.state.health, methods=[method], responses=documents.STATES, response_model=None)
    app.get("/ready", responses=documents.STATES, response_model=None)(service.state.ready)
    app.get("/version")(service.version)
    app.get("/v1/models", responses=_described(documents.Models))(service.models)
    app.get("/v1/models/{name:path}", responses=_described(documents.Model))(service.model)
    app.post("/v1/completions", responses=documents.ANSWERS, response_model=None)(service.completion)
    app.post("/v1/chat/completions", responses=documents.ANSWERS, response_model=None)(service.chat)
    app.post("/v1/responses", responses=documents.RESPONSES, response_model=None)(service.response)
    app.post("/v1/messages", responses=documents.MESSAGES, response_model=None)(service.message)
    app.post("/v1/messages/count_tokens", responses=documents.ANTHROPIC_ERRORS)(service.count_tokens)
    app.post("/v1/score", responses=documents.ERRORS, response_model_exclude_none=True)(service.score)
    app.post("/v1/embeddings", responses=documents.ERRORS, response_model=None, include_in_schema=False)(service.embeddings)
    app.post("/tokenize", responses=_described(Tokens), response_model=None)(service.text.tokenize)
    app.post("/detokenize", responses=_described(Detokenized), response_model=None)(service.text.detokenize)
    app.get("/tokenizer_info", responses=documents.ERRORS)(service.text.tokenizer_info)
    app.post("/v1/documents/text", responses=_described(FileText), response_model=None, openapi_extra=documents.FILE)(
        service.text.text_of_file
    )
    app.post("/v1/compare", responses=_described(Comparison), response_model=None)(service.compare.compare)
    add_tenant_cache_routes(app, service.tenant_cache)
    add_playground(app)
    if has_operator_routes:
        add_operator_routes(app, service)
    # The middleware that is added last runs first: a foreign host is refused before its key is looked up.
    app.add_middleware(AdmissionMiddleware, admission=service.admission)
    app.add_middleware(service.draining.middleware)
    app.add_middleware(HostMiddleware, names=service.admission.allowed_names, refuse=service.admission.refuse)
    if service.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.allowed_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    app.add_middleware(RequestIdMiddleware, sends=sends_request_ids)
    return app


def add_operator_routes(app: FastAPI, service: Service) -> None:
    """Add the operator's routes, /admin and /metrics, to an application."""
    add_admin_routes(app, service.admin)
    app.get("/admin/audit")(service.audit.counters)
    app.post("/admin/audit", response_model=None)(service.audit.run)
    app.get("/admin/baseline")(service.baseline.summary)
    app.get("/metrics", response_class=PlainTextResponse, responses=documents.ERRORS)(service.metrics.metrics)


def _without_folder(name: str) -> str:
    # Clients must not see the operator's folders.
    return Path(name).name if Path(name).is_absolute() else name


def _described(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI ``responses`` of a route that returns ``model``."""
    return documents.ERRORS | {200: {"model": model}}
