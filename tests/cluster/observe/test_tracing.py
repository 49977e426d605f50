"""Traces as a real collector gets them over OTLP/HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from outrider.cluster.http.api import Service, create_api
from outrider.cluster.observe.tracing import Tracing, open_tracing
from outrider.cluster.serving.generation import EnginePort
from outrider.configs.schema import Config, ConfigError, load_config
from outrider.configs.slices import ModelOptions, ServerOptions, SpeculationOptions
from tests.cluster.circle import TEXT, TOKENIZER, served
from tests.helpers.waiting import eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra tracing is not installed")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """What was sent to it."""

    endpoint: str = ""
    paths: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> bytes:
        request = ExportTraceServiceRequest.FromString(body)
        self.paths.append(path)
        for resource in request.resource_spans:
            named = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return bytes(ExportTraceServiceResponse().SerializeToString())


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            answer = collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: a test that fails says enough."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, Any]:
    def value(entry: Any) -> Any:
        kind = entry.WhichOneof("value")
        return [value(item) for item in entry.array_value.values] if kind == "array_value" else getattr(entry, kind)

    return {entry.key: value(entry.value) for entry in span.attributes}


@dataclass
class Traced:
    """A server whose traces are collected when it is closed."""

    url: str
    tracing: Tracing
    collector: Collector

    def finish(self) -> list[Span]:
        asyncio.run(self.tracing.close())
        assert set(self.collector.paths) == {"/v1/traces"} and self.collector.services == {"outrider"}
        return self.collector.spans


@pytest.fixture
def traced(circle_engine: EnginePort) -> Iterator[Traced]:
    with collecting() as collector:
        config = Config(
            model=ModelOptions(path="models/circle"),
            speculation=SpeculationOptions(strategy="llma"),
            server=ServerOptions(otlp_endpoint=collector.endpoint),
        )
        tracing = open_tracing(config)
        assert tracing is not None
        app = create_api(Service(circle_engine, TOKENIZER, listeners=[tracing.on_output]))
        app.add_middleware(tracing.middleware)
        with served(app) as url:
            yield Traced(url, tracing, collector)


def body(**changes: Any) -> dict[str, Any]:
    return TEXT | {"prompt": "<abc<abc", "max_tokens": 40, "ignore_eos": True} | changes


def test_a_generation_is_a_span_with_the_engines_times(traced: Traced) -> None:
    began_ns = time.time_ns()
    with OpenAI(base_url=f"{traced.url}/v1", api_key="secret-key", max_retries=0, timeout=60) as client:
        usage = client.chat.completions.create(
            model="circle",
            messages=[{"role": "user", "content": "private words <abcdefgh-é_日:🦙;"}],
            max_tokens=40,
            temperature=0,
        ).usage
    ended_ns = time.time_ns()
    spans = {span.name: span for span in traced.finish()}
    assert spans.keys() == {"chat circle", "queue", "prefill", "decode"} and usage is not None
    server = spans["chat circle"]
    assert server.kind == Span.SPAN_KIND_SERVER and not server.parent_span_id
    seen = attributes(server)
    assert seen["gen_ai.operation.name"] == "chat" and seen["gen_ai.request.model"] == seen["gen_ai.response.model"] == "circle"
    assert seen["gen_ai.usage.prompt_tokens"] == seen["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert seen["gen_ai.usage.completion_tokens"] == seen["gen_ai.usage.output_tokens"] == usage.completion_tokens
    assert (seen["gen_ai.request.max_tokens"], seen["gen_ai.request.temperature"], seen["gen_ai.request.n"]) == (40, 0.0, 1)
    assert seen["gen_ai.response.finish_reasons"] == ["length"] and seen["http.response.status_code"] == 200
    assert seen["outrider.strategy"] == "llma" and seen["outrider.drafted"] >= seen["outrider.accepted"] > 0
    assert seen["outrider.steps"] + seen["outrider.accepted"] == usage.completion_tokens
    assert seen["gen_ai.request.id"].startswith("chatcmpl-") and seen["gen_ai.latency.e2e"] > 0
    bounds = [began_ns, server.start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent_span_id == server.span_id and spans[name].trace_id == server.trace_id
        assert spans[name].start_time_unix_nano in (bounds[-1], server.start_time_unix_nano)
        bounds.append(spans[name].end_time_unix_nano)
    assert bounds == sorted(bounds) and bounds[-1] <= server.end_time_unix_nano <= ended_ns
    assert spans["decode"].end_time_unix_nano > spans["decode"].start_time_unix_nano
    told = b"".join(span.SerializeToString() for span in spans.values())
    assert b"private" not in told and b"secret-key" not in told


def test_the_clients_trace_goes_on_and_is_returned(traced: Traced) -> None:
    header = f"00-{TRACE_ID}-{PARENT_ID}-01"
    answer = httpx.post(f"{traced.url}/v1/completions", json=body(stream=True), headers={"traceparent": header}, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n")
    plain = httpx.post(f"{traced.url}/v1/completions", json=body(), timeout=60).headers["traceparent"]
    assert httpx.get(f"{traced.url}/health", timeout=60).headers.get("traceparent") is None
    unsampled = f"00-{TRACE_ID}-{PARENT_ID}-00"
    quiet = httpx.post(f"{traced.url}/v1/completions", json=body(), headers={"traceparent": unsampled}, timeout=60)
    assert quiet.headers["traceparent"].startswith(f"00-{TRACE_ID}") and quiet.headers["traceparent"].endswith("-00")
    servers = [span for span in traced.finish() if span.name == "text_completion circle"]
    mine = next(span for span in servers if span.trace_id.hex() == TRACE_ID)
    assert mine.parent_span_id.hex() == PARENT_ID
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{mine.span_id.hex()}-01"
    other = next(span for span in servers if span is not mine)
    assert plain.startswith(f"00-{other.trace_id.hex()}-{other.span_id.hex()}-0")
    assert len(servers) == 2


def test_each_choice_has_its_times_and_prompts_count_once(traced: Traced) -> None:
    asked = body(n=2, prompt=["<abc", "<abcdef"], temperature=0.5, seed=1)
    usage = httpx.post(f"{traced.url}/v1/completions", json=asked, timeout=60).json()["usage"]
    spans = traced.finish()
    choices = sorted(attributes(span)["outrider.choice"] for span in spans if span.name == "decode")
    assert choices == [0, 1, 2, 3] and len(spans) == 1 + 3 * 4
    seen = attributes(next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER))
    assert seen["gen_ai.request.n"] == 4 and seen["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert seen["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"] == 11
    assert seen["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 160


def test_refused_and_abandoned_requests_have_spans_too(traced: Traced) -> None:
    assert httpx.post(f"{traced.url}/v1/completions", json=body(max_tokens=0), timeout=60).status_code == 400
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{traced.url}/v1/completions", json=body(max_tokens=10_000, stream=True)) as stream,
    ):
        next(stream.iter_lines())
    eventually(lambda: httpx.get(f"{traced.url}/health", timeout=60).json()["running"] == 0)
    refused, left = sorted(map(attributes, traced.finish()), key=lambda seen: seen["http.response.status_code"], reverse=True)
    assert refused["http.response.status_code"] == 400 and "outrider.steps" not in refused
    assert left["http.response.status_code"] == 200 and 0 < left["gen_ai.usage.completion_tokens"] < 10_000
    assert left.get("gen_ai.response.finish_reasons", []) == []


@pytest.mark.slow
def test_a_collector_that_is_away_costs_nothing(circle_engine: EnginePort) -> None:
    with collecting() as collector:
        gone = collector.endpoint
    tracing = open_tracing(Config(server=ServerOptions(otlp_endpoint=f"{gone}/v1/traces")))
    assert tracing is not None
    app = create_api(Service(circle_engine, TOKENIZER, listeners=[tracing.on_output]))
    app.add_middleware(tracing.middleware)
    with served(app) as url:
        assert httpx.post(f"{url}/v1/completions", json=body(), timeout=60).status_code == 200
    began = time.monotonic()
    asyncio.run(tracing.close())
    assert time.monotonic() - began < 30


def test_endpoints_are_addresses(tmp_path: Path) -> None:
    assert open_tracing(Config()) is None
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint is 'collector:4317'; allowed: the address of an OTLP/HTTP"):
        load_config(overrides=["server.otlp_endpoint=collector:4317"])
