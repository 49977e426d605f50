"""OpenTelemetry traces of generations, off unless ``server.otlp_endpoint`` is set. They hold no text, no key and no tenant.

Example: an answer's last output comes 900 ms after it was asked for, with 200 ms of prefill and 600 ms of decoding in its
counters. Its queue is 0-100 ms, its prefill 100-300 ms, its decoding 300-900 ms.
"""

# A request has a server span, whose children are `queue`, `prefill` and `decode` of each choice. Their times are the engine's,
# from the last output of a choice. Attributes follow the gen_ai conventions and vLLM's additional names. A client's `traceparent`
# (W3C Trace Context) is the parent, and the response names its own span.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cluster.serving.generation import GenerationJob
from outrider.configs.schema import Config, ConfigError
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import FinishReason, SpecStats, StepOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
_NS = 1_000_000_000
_COUNTED = ("steps", "drafted", "accepted", "cached_tokens")  # summed fields of SpecStats
_EXPORT_TIMEOUT_S = 5.0  # seconds to send one batch, and the rest when the server ends


@dataclass(slots=True)
class _Exchange:
    """Request in progress, shared by its choices."""

    span: Span
    began_ns: int
    choices: int = 0
    prompts: list[Int32Array] = field(default_factory=list)  # each prompt once, regardless of its number of choices
    completion_tokens: int = 0
    counts: SpecStats = field(default_factory=SpecStats)  # sums over all choices
    reasons: list[str] = field(default_factory=list)


class Tracing:
    """Span recorder that exports in the background; an unreachable collector does not slow requests down."""

    def __init__(self, provider: TracerProvider, model: str, strategy: str) -> None:
        self._provider, self._tracer = provider, provider.get_tracer("outrider")
        self._model, self._strategy = model, strategy
        self._exchange: ContextVar[_Exchange | None] = ContextVar("asked", default=None)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a span around each generation."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
            operation = _OPERATIONS.get(path) if scope["type"] == "http" and scope["method"] == "POST" else None
            if operation is None:
                await app(scope, receive, send)
            else:
                await self._serve(app, scope, receive, send, operation)

        return traced

    async def close(self) -> None:
        """Export the remaining spans."""
        await asyncio.to_thread(self._provider.shutdown)

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, operation: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator, began_ns = TraceContextTextMapPropagator(), time.time_ns()
        parent = propagator.extract(dict(Headers(scope=scope)))
        attributes = {"gen_ai.operation.name": operation, "gen_ai.request.model": self._model}
        name = f"{operation} {self._model}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=began_ns)
        exchange, carrier = _Exchange(span, began_ns), dict[str, str]()
        propagator.inject(carrier, set_span_in_context(span))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(carrier)
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        token = self._exchange.set(exchange)
        try:
            await app(scope, receive, named)
        except asyncio.CancelledError:
            span.set_attribute("error.type", "cancelled")  # the client has left, or the server stops
            raise
        finally:
            self._exchange.reset(token)
            span.set_attributes(_totals(exchange))
            span.end()

    def on_output(self, job: GenerationJob) -> Callable[[StepOutput], None] | None:
        """Return a listener that adds a choice's times to its request's span; None outside of a traced HTTP request."""
        exchange = self._exchange.get()
        if exchange is None or not exchange.span.is_recording():
            return None
        self._begin(exchange, job)

        def hear(output: StepOutput) -> None:
            exchange.completion_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._finish(exchange, job, output)

        return hear

    def _begin(self, exchange: _Exchange, job: GenerationJob) -> None:
        exchange.choices += 1
        params, answer_id = job.params, job.request_id.rpartition("/")[0]
        if not any(job.prompt_ids is prompt for prompt in exchange.prompts):
            exchange.prompts.append(job.prompt_ids)
        exchange.span.set_attributes(
            {
                "gen_ai.request.id": answer_id,
                "gen_ai.response.id": answer_id,
                "gen_ai.response.model": job.adapter or self._model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": exchange.choices,
                "outrider.strategy": job.strategy or self._strategy,
            }
        )

    def _finish(self, exchange: _Exchange, job: GenerationJob, output: StepOutput) -> None:
        exchange.reasons.append(str(output.finish_reason))
        if output.finish_reason is FinishReason.ERROR and output.fault_field is None:
            from opentelemetry.trace import Status, StatusCode

            exchange.span.set_status(Status(StatusCode.ERROR))  # without the message, which may hold text of the client
        if output.stats is not None:
            self._write_times(exchange, job, output.stats)

    def _write_times(self, exchange: _Exchange, job: GenerationJob, stats: SpecStats) -> None:
        """Write the child spans of a choice whose last output has just arrived."""
        from opentelemetry.trace import set_span_in_context

        end_ns = time.time_ns()
        first_ns = end_ns - int(stats.decode_s * _NS)
        admitted_ns = first_ns - int(stats.prefill_s * _NS)
        parent = set_span_in_context(exchange.span)
        attributes = {"outrider.choice": int(job.request_id.rpartition("/")[2])}
        bounds = (exchange.began_ns, max(exchange.began_ns, admitted_ns), max(exchange.began_ns, first_ns), end_ns)
        for name, start, end in zip(("queue", "prefill", "decode"), bounds, bounds[1:], strict=False):
            self._tracer.start_span(name, parent, attributes=attributes, start_time=start).end(end)
        if exchange.choices == 1:  # of several choices, only the child spans have the times
            exchange.span.set_attributes(
                {
                    "gen_ai.latency.time_in_queue": (bounds[1] - bounds[0]) / _NS,
                    "gen_ai.latency.time_to_first_token": (bounds[2] - bounds[0]) / _NS,
                    "gen_ai.latency.time_in_model_prefill": stats.prefill_s,
                    "gen_ai.latency.time_in_model_decode": stats.decode_s,
                    "gen_ai.latency.e2e": (end_ns - exchange.began_ns) / _NS,
                }
            )
        for name in _COUNTED:
            setattr(exchange.counts, name, getattr(exchange.counts, name) + getattr(stats, name))


def _totals(exchange: _Exchange) -> dict[str, Any]:
    """Return the attributes that are known at the end of the answer."""
    if not exchange.choices:
        return {}
    prompt, completion = sum(map(len, exchange.prompts)), exchange.completion_tokens
    usage = {"prompt_tokens": prompt, "input_tokens": prompt, "completion_tokens": completion, "output_tokens": completion}
    own = {name: getattr(exchange.counts, name) for name in _COUNTED}
    return {
        **{f"gen_ai.usage.{name}": count for name, count in usage.items()},
        **{f"outrider.{name}": count for name, count in own.items()},
        "gen_ai.response.finish_reasons": exchange.reasons,
    }


def open_tracing(config: Config) -> Tracing | None:
    """Open tracing to ``server.otlp_endpoint``, if set. Raise ``ConfigError`` if the extra ``tracing`` is not installed."""
    endpoint = config.server.otlp_endpoint
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"server.otlp_endpoint needs OpenTelemetry, and {error.name} is missing: pip install -e '.[tracing]', or leave "
            "server.otlp_endpoint out"
        ) from error
    address = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "outrider"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(address, timeout=_EXPORT_TIMEOUT_S)))
    return Tracing(provider, config.model.name, config.speculation.strategy)
