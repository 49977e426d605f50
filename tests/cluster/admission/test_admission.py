"""Who may come in, over real HTTP with a real engine: keys, rates, sizes, places, deadlines, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.responses import PlainTextResponse

from outrider.cache_service.namespace import hash_key
from outrider.cluster.admission import controller, middleware
from outrider.cluster.admission.controller import REFUSALS, AdmissionCounts, AdmissionOptions
from outrider.cluster.admission.http_limits import LimitedProtocol
from outrider.cluster.http.api import Service
from outrider.configs.slices import EngineOptions, LimitsOptions, SpeculationOptions, TenancyOptions, TenantOptions
from outrider.engine.text.tokenizer import load_tokenizer
from tests.cluster.circle import ENDLESS, LocalEngine, bearer, local_engine, served
from tests.helpers.waiting import eventually

ACME, UMBRELLA, ADMIN = "outrider-acme", "outrider-umbrella", "outrider-admin"
MAX_RUNNING = 2
TENANTS = {
    "acme": TenantOptions(keys=(hash_key(ACME),)),
    "umbrella": TenantOptions(keys=(hash_key(UMBRELLA),), requests_per_minute=100, tokens_per_minute=5000, max_concurrent=100),
}
KEYED = TenancyOptions(tenants=TENANTS, admin_keys=(hash_key(ADMIN),))
SHORT = {"model": "circle", "prompt": "<", "max_tokens": 3, "temperature": 0}


async def slow_answers(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that takes longer for an answer than headers may take to come."""
    await asyncio.sleep(0.4)
    await PlainTextResponse("late")(scope, receive, send)


@dataclass(frozen=True)
class House:
    """A served application with a door."""

    url: str
    service: Service
    engine: LocalEngine

    def post(self, body: object, key: str | None = None, path: str = "/v1/completions") -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=bearer(key), timeout=60)

    def counts(self) -> AdmissionCounts:
        return self.service.admission.counts()

    def is_empty(self) -> bool:
        (engine,) = [replica.describe().counts for replica in self.engine.replicas]
        return (self.counts().in_flight, engine.running, engine.waiting, engine.free_slots) == (0, 0, 0, MAX_RUNNING)

    @contextlib.contextmanager
    def streaming(self, key: str | None = None, **fields: object) -> Iterator[httpx.Response]:
        """A stream that has begun and does not end by itself."""
        with (
            httpx.Client(timeout=60) as client,
            client.stream(
                "POST", f"{self.url}/v1/completions", json=ENDLESS | {"stream": True} | fields, headers=bearer(key)
            ) as response,
        ):
            yield response


@pytest.fixture(scope="module")
def engine(circle_model: Path) -> Iterator[LocalEngine]:
    with local_engine(circle_model, SpeculationOptions("autoregressive"), EngineOptions(max_running=MAX_RUNNING)) as made:
        yield made


@pytest.fixture
def house(engine: LocalEngine, circle_model: Path) -> Iterator[Callable[..., House]]:
    """Opens a house; when the test ends, nobody may be left in it."""
    tokenizer = load_tokenizer(str(circle_model))
    with contextlib.ExitStack() as open_houses:
        houses: list[House] = []

        def build(
            tenancy: TenancyOptions | None = None,
            capacity: int | None = None,
            required: bool = False,
            names: frozenset[str] | None = None,
            **limits: object,
        ) -> House:
            admission = AdmissionOptions(required, capacity, LimitsOptions(**limits), names)
            service = Service(engine, tokenizer, tenancy, admission=admission)
            houses.append(House(open_houses.enter_context(served(service)), service, engine))
            return houses[-1]

        yield build
        eventually(lambda: all(house.is_empty() for house in houses))


def error_of(response: httpx.Response) -> dict[str, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.slow
@pytest.mark.parametrize("asks", [0, 2])
@pytest.mark.parametrize("slow", [b"", b"\r\n", b"GET", b"GET / HTTP/1.1\r\nHost: a\r\n"])
def test_headers_have_a_deadline(asks: int, slow: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "header_timeout_s", 0.3)
    with served(slow_answers, http=LimitedProtocol, timeout_keep_alive=1) as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=20) as client:
            for _ in range(asks):
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert client.recv(65536).endswith(b"late"), "an answer takes the time that it takes"
            client.sendall(slow)
            assert client.recv(65536) == b"", "closed"


def test_a_key_is_required_for_all_but_the_states(house: Callable[..., House]) -> None:
    keyed = house(KEYED, required=True)
    with httpx.Client(base_url=keyed.url, timeout=60) as http:
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/v1/models/circle"),
            ("GET", "/v1/whatever"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/tokenizer_info"),
        ]:
            for headers in ({}, bearer("wrong"), bearer(ADMIN), {"Authorization": ACME}):
                refused = http.request(method, path, headers=headers, content="{not JSON" if method == "POST" else None)
                assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key"), path
                assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/ping", "/version", "/openapi.json"):
            assert http.get(path).status_code == 200
        assert http.get("/v1/models", headers=bearer(ACME)).status_code == 200
        assert http.post("/tokenize", json={"prompt": "ab"}, headers=bearer(ACME)).json()["count"] == 2
    assert keyed.post(SHORT, ACME).json()["choices"][0]["text"] == "abc"
    assert keyed.counts().refused["invalid_api_key"] == 32
    assert keyed.counts().requests == 1


def test_keys_are_rotated_without_a_restart(house: Callable[..., House], tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def write(text: str) -> None:  # as Kubernetes does: another file takes the place of the former one
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(path)

    def status(key: str) -> int:
        return httpx.get(f"{rotated.url}/v1/models", headers=bearer(key)).status_code

    def keys(*own: str) -> str:
        return f"tenants:\n  acme:\n    keys: [{', '.join(hash_key(key) for key in own)}]\n"

    write(keys("old"))
    rotated = house(TenancyOptions(tenants={"acme": TenantOptions()}, keys_file=str(path)), required=True)
    assert (status("old"), status("new")) == (200, 401)
    write(keys("old", "new"))
    assert (status("old"), status("new")) == (200, 200)
    write(keys("new"))
    assert (status("old"), status("new")) == (401, 200)
    for broken in ("tenants: {acme: {keys: [new]}}", "{", "tenants: {}\n"):  # the last one would lock everybody out
        write(broken)
        assert (status("old"), status("new")) == (401, 200)
    path.unlink()
    assert status("new") == 200
    write(f"tenants:\n  late:\n    keys: [{hash_key('late')}]\n    max_concurrent: 1\nadmin_keys: [{hash_key(ADMIN)}]\n")
    assert (status("new"), status("late")) == (401, 200)
    assert httpx.get(f"{rotated.url}/admin/cache/stats", headers=bearer(ADMIN)).status_code == 404  # there is no cache

    engine = rotated.engine
    engine.jobs.clear()
    assert rotated.post(SHORT, "late").status_code == 200
    assert engine.jobs[0].tenant is None  # no cache client was told of this tenant
    refused = rotated.post(SHORT | {"cache": "tenant"}, "late")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "cache")
    with rotated.streaming("late"):
        assert error_of(rotated.post(SHORT, "late"))["code"] == "too_many_concurrent"


def test_requests_in_a_minute(house: Callable[..., House]) -> None:
    limited = house(KEYED, requests_per_minute=2)
    for left in (1, 0):
        answer = limited.post(SHORT, ACME)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in answer.headers
    with OpenAI(base_url=f"{limited.url}/v1", api_key=ACME, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="circle", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.code == "rate_limit_exceeded"
        retry_s, retry_ms = (int(caught.value.response.headers[name]) for name in ("retry-after", "retry-after-ms"))
        assert 1 <= retry_s <= 60 and retry_s - 1 <= retry_ms / 1000 <= retry_s
        assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError):  # what generates nothing counts, too
            client.models.list()
    assert [limited.post(SHORT).status_code for _ in range(3)] == [200, 200, 429]  # those without a key are one
    other = limited.post(SHORT, UMBRELLA)
    assert (other.status_code, other.headers["x-ratelimit-limit-requests"]) == (200, "100")
    assert limited.counts().refused == dict.fromkeys(REFUSALS, 0) | {"rate_limit_exceeded": 3}


def test_tokens_in_a_minute_are_reserved_and_given_back(house: Callable[..., House]) -> None:
    limited = house(KEYED, tokens_per_minute=100)

    def left(answer: httpx.Response) -> int:
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    ending = {"model": "circle", "prompt": "rst", "max_tokens": 40, "temperature": 0}  # "uvw." and the end token
    assert left(limited.post(ending, ACME)) == 100 - 43
    eventually(lambda: limited.counts().in_flight == 0)
    assert left(limited.post(ending | {"n": 2}, ACME)) == 100 - 8 - 3 - 80
    eventually(lambda: limited.counts().in_flight == 0)
    used = 8 + 3 + 2 * 5
    assert left(limited.post(SHORT, ACME)) == 100 - used - 4
    eventually(lambda: limited.counts().in_flight == 0)

    refused = limited.post(ending | {"max_tokens": 90}, ACME)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert "100 tokens a minute" in error_of(refused)["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) == 100 - used - 4  # a refusal costs nothing
    for wrong in (SHORT | {"temperature": 9}, SHORT | {"model": "other"}):
        assert limited.post(wrong, ACME).headers["x-ratelimit-remaining-tokens"] == str(100 - used - 4)

    assert left(limited.post(SHORT, UMBRELLA)) == 5000 - 4
    with limited.streaming(UMBRELLA, max_tokens=4000) as stream:  # a client that leaves gets back what it did not use
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) == 5000 - 4 - 4001
    eventually(limited.is_empty)
    assert left(limited.post(SHORT, UMBRELLA)) > 5000 - 4 - 4001


def test_requests_of_a_key_at_once(house: Callable[..., House]) -> None:
    limited = house(KEYED, max_concurrent=1)
    with limited.streaming(ACME):
        refused = limited.post(SHORT, ACME)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_concurrent")
        assert refused.headers["retry-after"] == "1"
        assert limited.post(SHORT).status_code == limited.post(SHORT, UMBRELLA).status_code == 200
    eventually(limited.is_empty)
    assert limited.post(SHORT, ACME).status_code == 200


def test_choices_count_as_requests_do(house: Callable[..., House]) -> None:
    """Three requests of 88 choices took all places in spite of ``max_concurrent``."""
    limited = house(KEYED, max_concurrent=3)
    never = limited.post(SHORT | {"n": 88}, ACME)
    assert (never.status_code, error_of(never)["param"]) == (400, "n") and "max_concurrent" in error_of(never)["message"]
    with limited.streaming(ACME, n=2):
        later = limited.post(SHORT | {"n": 2}, ACME)
        assert (later.status_code, error_of(later)["code"]) == (429, "too_many_concurrent")
    eventually(limited.is_empty)
    assert limited.post(SHORT | {"prompt": ["<"] * 3}, ACME).status_code == 200


def test_a_tenant_leaves_places_for_the_others(house: Callable[..., House]) -> None:
    """Of twelve places one may hold half of what the others leave, and twice as much of weight two as there is left free."""
    tenants = TENANTS | {"umbrella": TenantOptions(keys=(hash_key(UMBRELLA),), weight=2.0)}
    shared = house(TenancyOptions(tenants=tenants), capacity=12)
    with shared.streaming(ACME, n=6):
        refused = shared.post(SHORT, ACME)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
        assert "this tenant has 6 running or waiting choices" in error_of(refused)["message"] and refused.headers["retry-after"]
        with shared.streaming(UMBRELLA, n=4):
            other = shared.post(SHORT, UMBRELLA)
            told = error_of(other)["message"].partition(";")[0]
            assert other.status_code == 429 and re.findall(r"\d+", told)[:3] == ["4", "1", "12"]  # its own load alone
            with shared.streaming():
                assert shared.post(SHORT).status_code == 429
    eventually(shared.is_empty)
    assert [shared.post(SHORT | {"n": 6}, ACME).status_code for _ in range(3)] == [200] * 3  # those that ended hold nothing
    alone = house(capacity=12)
    with alone.streaming(n=12):
        assert alone.post(SHORT).status_code == 429
    eventually(alone.is_empty)


def test_one_tenants_requests_are_answered_beside_anothers_flood(house: Callable[..., House]) -> None:
    """All slots are the flood's, for minutes; a request of another tenant takes one."""
    shared = house(KEYED)
    with shared.streaming(ACME, n=MAX_RUNNING), shared.streaming(ACME, n=4):
        assert shared.post(SHORT, UMBRELLA).json()["choices"][0]["text"] == "abc"
        assert shared.post(SHORT, UMBRELLA).json()["choices"][0]["text"] == "abc"


def test_a_large_body_is_refused_before_it_is_sent(house: Callable[..., House]) -> None:
    limited = house(max_request_bytes=2000)
    address = urlsplit(limited.url)
    for path in (b"/v1/completions", b"/tokenize"):
        with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
            connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n{" % path)
            head = connection.recv(65536)
            assert head.startswith(b"HTTP/1.1 413")

    def pieces() -> Iterator[bytes]:  # whose length nobody knows
        for _ in range(4000):
            yield b" " * 1000

    with contextlib.suppress(httpx.WriteError):  # it may close before all is sent
        refused = httpx.post(f"{limited.url}/v1/completions", content=pieces(), timeout=20)
        assert (refused.status_code, error_of(refused)["code"]) == (413, "request_too_large")
        assert "limits.max_request_bytes" in error_of(refused)["message"]
    assert limited.post(SHORT | {"reference_documents": ["x" * 1500]}).status_code == 200
    assert limited.post(SHORT | {"user": "x" * 2000}).status_code == 413
    assert limited.counts().refused["request_too_large"] == 4
    assert limited.counts().requests == 1


def test_lengths_of_prompts_and_answers(house: Callable[..., House]) -> None:
    limited = house(max_prompt_tokens=12, max_output_tokens=5)
    chat = {"model": "circle", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    long = [{"role": "user", "content": "hi" * 6}]
    for path, body, param, code in [
        ("/v1/completions", SHORT | {"prompt": "<" * 13}, "prompt", "context_length_exceeded"),
        ("/v1/chat/completions", chat | {"messages": long}, "messages", "context_length_exceeded"),
        ("/v1/completions", SHORT | {"max_tokens": 6}, "max_tokens", "invalid_value"),
        ("/v1/chat/completions", chat | {"max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
        ("/v1/chat/completions", chat | {"max_tokens": 6}, "max_tokens", "invalid_value"),
        ("/v1/chat/completions", chat | {"min_tokens": 6}, "min_tokens", "invalid_value"),
    ]:  # fmt: skip
        refused = limited.post(body, path=path)
        assert (refused.status_code, error_of(refused)["param"], error_of(refused)["code"]) == (400, param, code)
    whole = limited.post(chat | {"max_tokens": None}, path="/v1/chat/completions").json()
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (5, "length")
    assert limited.post(SHORT | {"prompt": "<" * 12, "max_tokens": 5}).status_code == 200


def test_a_full_house_refuses_before_it_reads(house: Callable[..., House]) -> None:
    full = house(capacity=4)
    with full.streaming(n=2), full.streaming():
        late = full.post(SHORT | {"n": 2})  # one place is left
        assert (late.status_code, error_of(late)["code"]) == (429, "queue_full")
        assert "server.max_queued" in error_of(late)["message"]
        with full.streaming():
            for content in ("{not JSON", json.dumps(SHORT)):
                refused = httpx.post(f"{full.url}/v1/completions", content=content, timeout=20)
                assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
                assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert httpx.get(f"{full.url}/health").status_code == httpx.get(f"{full.url}/v1/models").status_code == 200
            assert full.counts().in_flight == 3
    eventually(full.is_empty)
    assert full.counts().refused["queue_full"] == 3
    with full.streaming(n=4):  # all places are back, and no more than those
        assert full.post(SHORT).status_code == 429
    eventually(full.is_empty)
    assert full.post(SHORT).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("configured", [None, 0.5])
def test_deadlines(house: Callable[..., House], configured: float | None) -> None:
    hurried = house(request_timeout_s=configured)
    body = ENDLESS | {"timeout": 0.5 if configured is None else 1000}  # it may ask for less only
    late = hurried.post(body)
    assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")
    assert "took longer than 0.5 s" in error_of(late)["message"] and error_of(late)["type"] == "server_error"
    assert hurried.post(body | {"n": 3}).status_code == 504
    with hurried.streaming(timeout=0.4) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert stream.status_code == 200 and len(events) > 1
    assert json.loads(events[0])["choices"][0]["text"]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    with hurried.streaming(timeout=60, n=MAX_RUNNING), hurried.streaming(timeout=0.2) as waiting:  # for a slot, all the time
        assert "deadline_exceeded" in waiting.read().decode()
    assert hurried.post(SHORT | {"timeout": 30}).json()["choices"][0]["text"] == "abc"
    assert hurried.post(SHORT | {"timeout": 0}).json()["error"]["param"] == "timeout"
    eventually(lambda: hurried.counts().refused["deadline_exceeded"] >= 4)


@pytest.mark.parametrize("stream", [False, True])
def test_fifty_clients_that_leave(house: Callable[..., House], stream: bool) -> None:
    left = house(capacity=50)

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            tasks = [
                asyncio.create_task(http.post(f"{left.url}/v1/completions", json=ENDLESS | {"stream": stream})) for _ in range(50)
            ]
            await asyncio.to_thread(eventually, lambda: left.counts().in_flight == 50)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    eventually(left.is_empty)
    with left.streaming(n=50):  # each gave back what it had, once
        assert left.post(SHORT).status_code == 429
    eventually(left.is_empty)
    assert left.counts().requests == 51


def test_a_client_that_leaves_while_it_sends(house: Callable[..., House]) -> None:
    left = house(capacity=1)
    address = urlsplit(left.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        assert left.post(SHORT).status_code == 200  # who sends slowly holds no place
    assert left.post(SHORT).status_code == 200
    assert left.counts() == AdmissionCounts(dict.fromkeys(REFUSALS, 0), left.counts().in_flight, 2)


def test_texts_to_repeat_are_tokenized_once_shared_bounded_and_billed(house: Callable[..., House]) -> None:
    limited = house(KEYED, max_reference_tokens=100)
    before = len(limited.engine.jobs)
    body = SHORT | {"prompt": ["<", "<a"], "n": 2, "reference_documents": ["x" * 40, "y" * 60]}
    answer = limited.post(body, UMBRELLA)
    assert answer.status_code == 200, answer.text
    jobs = limited.engine.jobs[before:]
    assert len(jobs) == 4 and {len(text) for text in jobs[0].references} == {40, 60}
    assert all(job.references is jobs[0].references for job in jobs)
    used = 5000 - int(limited.post(SHORT, UMBRELLA).headers["x-ratelimit-remaining-tokens"])
    assert used == 1 + 2 + 40 + 60 + 4 * 3 + 1 + 3
    for fields, param in (
        ({"reference_documents": ["x" * 40, "y" * 61, "z"]}, "reference_documents[1]"),
        ({"reference_documents": ["x" * 101]}, "reference_documents[0]"),
    ):
        refused = limited.post(SHORT | fields, UMBRELLA)
        assert (refused.status_code, error_of(refused)["code"], error_of(refused)["param"]) == (400, "too_many_references", param)
        assert "limits.max_reference_tokens" in error_of(refused)["message"]
    chat = {"model": "circle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    predicted = {"prediction": {"type": "content", "content": "x" * 60}}
    refused = limited.post(chat | predicted | {"reference_documents": ["x" * 41]}, UMBRELLA, "/v1/chat/completions")
    assert error_of(refused)["param"] == "reference_documents[0]"
    predicted["prediction"]["content"] = "x" * 101
    refused = limited.post(chat | predicted, UMBRELLA, "/v1/chat/completions")
    assert error_of(refused)["param"] == "prediction"
    assert limited.counts().refused["too_many_references"] == 4
    assert len(limited.engine.jobs) == before + 5


class NotedTokenizer:
    """A tokenizer of which it is known whether it is at work on a long text."""

    def __init__(self, backend: Any) -> None:
        self.__dict__ |= {"backend": backend, "busy": 0, "seen": 0, "calls": 0}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.backend, name)
        if name not in ("encode_batch", "encode_batch_fast", "decode_batch", "decode"):
            return found

        def call(texts: Any, **options: Any) -> Any:
            long = sum(map(len, texts)) > 1000 if name != "decode" else len(texts) > 1000
            self.__dict__["busy"] += long
            self.__dict__["calls"] += long
            try:
                return found(texts, **options)
            finally:
                self.__dict__["busy"] -= long

        return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SHORT | {"prompt": ["<"] * 128, "reference_documents": ["x" * 2**19, "y" * 2**19]}),
        ("/v1/completions", SHORT | {"prompt": "x" * 2**20}),
        ("/v1/chat/completions", {"model": "circle", "messages": [{"role": "user", "content": "x" * 2**20}]}),
        ("/tokenize", {"prompt": "x" * 2**20}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 2**18}] * 4}),
        ("/detokenize", {"tokens": [50] * 2**20}),
    ],
)
def test_others_are_answered_while_a_large_body_is_worked_on(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, path: str, body: object
) -> None:
    wide = house(max_reference_tokens=2**20)
    tokenizer = wide.service.text.threads.tokenizer
    noted = NotedTokenizer(tokenizer.backend_tokenizer)
    monkeypatch.setattr(tokenizer, "_tokenizer", noted)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=wide.url, timeout=60) as http:
        large = pool.submit(wide.post, body, None, path)
        while not large.done():
            busy = noted.busy
            http.get("/health").raise_for_status()
            noted.seen += bool(busy and noted.busy)  # the whole time
    assert large.result().status_code in (200, 400), large.result().text
    assert noted.seen


def test_work_on_texts_ends_with_the_text_at_which_the_client_leaves(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = house(max_reference_tokens=2**24)
    tokenizer = wide.service.text.threads.tokenizer
    noted = NotedTokenizer(tokenizer.backend_tokenizer)
    monkeypatch.setattr(tokenizer, "_tokenizer", noted)
    address = urlsplit(wide.url)
    content = json.dumps(SHORT | {"reference_documents": ["x" * 2**17] * 60}).encode()
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        eventually(lambda: noted.calls > 0)
    eventually(wide.is_empty)
    eventually(lambda: not noted.busy)
    assert 0 < noted.calls < 60


@dataclass
class Stalled:
    """A body that has begun and does not go on."""

    connection: socket.socket

    def status(self) -> int:
        """Of the answer, once it has come; 0 where the connection was closed without one."""
        self.connection.settimeout(60)
        head = self.connection.recv(65536)
        return int(head.split()[1]) if head else 0

    def is_answered(self) -> bool:
        self.connection.settimeout(0.01)
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK)) or True
        except TimeoutError:
            return False


@contextlib.contextmanager
def stalled(house: House, size: int, key: str | None = None, path: str = "/v1/completions") -> Iterator[Stalled]:
    address = urlsplit(house.url)
    secret = b"" if key is None else b"Authorization: Bearer %s\r\n" % key.encode()
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: 5000\r\n\r\n" % (path.encode(), secret))
        connection.sendall(b" " * size)
        yield Stalled(connection)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_bodies_that_do_not_come_hold_a_bounded_number_of_bytes(
    house: Callable[..., House], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "UPLOADS", 4)
    monkeypatch.setattr(controller, "KEY_UPLOADS", 2)
    limited = house(KEYED, max_request_bytes=5000)
    small = SHORT if path == "/v1/completions" else {"prompt": "a"}
    with contextlib.ExitStack() as uploads:

        def begin(key: str | None, status: int | None = None) -> None:
            before = limited.counts().upload_bytes
            begun = uploads.enter_context(stalled(limited, 4000, key, path))
            if status is None:
                eventually(lambda: limited.counts().upload_bytes == before + 4000)
                assert not begun.is_answered()
            else:
                assert begun.status() == status

        begin(ACME)
        begin(ACME)
        begin(ACME, 429)
        assert limited.post(small, ACME, path).status_code == 200  # what is small enough
        begin(UMBRELLA)
        begin(UMBRELLA)
        begin(None)
        assert limited.counts().upload_bytes == 20_000
        begin(None, 503)
        assert limited.counts().upload_bytes == 20_000
        full = limited.post(small, None, path)
        assert (full.status_code, error_of(full)["code"]) == (503, "uploads_full")
        assert full.headers["retry-after"] == "1" and full.headers["connection"] == "close"
        assert "4 * limits.max_request_bytes" in error_of(full)["message"]
    eventually(lambda: limited.counts().upload_bytes == 0)  # they have left
    assert limited.post(small, None, path).status_code == 200
    assert (limited.counts().refused["too_many_uploads"], limited.counts().refused["uploads_full"]) == (1, 2)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_does_not_come_is_given_up(house: Callable[..., House], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.2)
    limited = house()
    with stalled(limited, 100, None, path) as upload:
        assert upload.status() == 408
    eventually(lambda: limited.counts().upload_bytes == 0)
    assert limited.counts().refused["body_timeout"] == 1
    assert limited.post(SHORT).status_code == 200


def test_every_keyed_route_counts_as_a_request(house: Callable[..., House]) -> None:
    limited = house(KEYED, requests_per_minute=7)
    routes: list[tuple[str, str, dict[str, object] | None]] = [
        ("GET", "/v1/models", None), ("GET", "/v1/models/circle", None), ("GET", "/v1/cache", None),
        ("POST", "/tokenize", {"prompt": "a"}), ("POST", "/detokenize", {"tokens": [5]}), ("POST", "/v1/completions", SHORT),
        ("GET", "/v1/whatever", None),
    ]  # fmt: skip
    with httpx.Client(base_url=limited.url, headers=bearer(ACME), timeout=60) as http:
        for left, (method, path, body) in zip(range(6, -1, -1), routes, strict=True):
            assert int(http.request(method, path, json=body).headers["x-ratelimit-remaining-requests"]) == left, path
        for method, path, body in routes:
            refused = http.request(method, path, json=body)
            assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded"), path
            assert "retry-after" in refused.headers
        for path in ("/health", "/ready", "/version"):
            assert http.get(path).status_code == 200
    assert limited.counts().refused["rate_limit_exceeded"] == len(routes)
    assert limited.post({"tokens": [5]}, None, "/detokenize").status_code == 200  # of another


FOREIGN_HOSTS = (
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "",
    "[::1]evil", "[::1", "localhost:80@evil", "localhost:", "localhost:99999", "localhost:0", "localhost:8x", "user@localhost",
    "localhost/evil", "[localhost]", "[127.0.0.1]", "::1", "localhost..", "[::1]:80:80", "localhost evil", "[::1%25lo]",
)  # fmt: skip


def test_a_page_that_has_its_own_name_lead_here_is_refused(house: Callable[..., House]) -> None:
    local = house(names=frozenset({"outrider.example"}))
    port = urlsplit(local.url).port
    own = ["localhost", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", "LOCALHOST.", "10.0.0.7:8000", "Outrider.Example:8000"]
    with httpx.Client(base_url=local.url, timeout=60) as http:
        for path in ("/", "/health", "/v1/models", "/metrics", "/v1/cache"):
            for host in own:
                assert http.get(path, headers={"Host": host}).status_code in (200, 403 if path == "/metrics" else 200), (
                    path,
                    host,
                )
            for host in (*FOREIGN_HOSTS, f"evil.example:{port}"):
                refused = http.get(path, headers={"Host": host})
                assert (refused.status_code, error_of(refused)["code"]) == (403, "host_not_allowed"), (path, host)
                assert "server.allowed_hosts" in error_of(refused)["message"]
    assert local.counts().refused["host_not_allowed"] == 5 * (len(FOREIGN_HOSTS) + 1)
    assert httpx.get(f"{house().url}/health", headers={"Host": "evil.example"}, timeout=60).status_code == 200  # where any may be


def test_a_page_of_another_site_has_nothing_computed(house: Callable[..., House]) -> None:
    for names in (frozenset({"friend.example"}), None):
        here = house(names=names)
        port = urlsplit(here.url).port
        foreign: list[dict[str, str]] = [
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": f"http://127.0.0.1.evil.example:{port}"},
            {"Origin": f"http://127.0.0.1:{port}@evil.example"},
            {"Sec-Fetch-Site": "same-site", "Origin": "https://evil.example"},
        ]
        own: list[dict[str, str]] = [
            {}, {"Origin": here.url}, {"Sec-Fetch-Site": "same-origin", "Origin": "https://proxied.example"},
            {"Sec-Fetch-Site": "none"}, {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
        ]  # fmt: skip
        if names is not None:
            own.append({"Sec-Fetch-Site": "cross-site", "Origin": "https://Friend.example"})
        form_types = ("text/plain", "Text/Plain; charset=utf-8", "multipart/form-data; boundary=x", "")
        with httpx.Client(base_url=here.url, timeout=60) as http:
            for kind in form_types:
                for headers in foreign:
                    refused = http.post("/v1/documents/text", content=b"a", headers=headers | {"Content-Type": kind})
                    assert (refused.status_code, error_of(refused)["code"]) == (403, "origin_not_allowed"), (kind, headers)
                for headers in own:
                    taken = http.post("/v1/documents/text", content=b"a", headers=headers | {"Content-Type": kind})
                    assert taken.status_code == 200, (kind, headers)
            asked = foreign[1] | {"Content-Type": "application/octet-stream"}  # a browser asks first, and is not answered
            assert http.post("/v1/documents/text", content=b"a", headers=asked).status_code == 200
            assert http.get("/v1/models", headers=foreign[1]).status_code == 200
        assert here.counts().refused["origin_not_allowed"] == len(form_types) * len(foreign)
