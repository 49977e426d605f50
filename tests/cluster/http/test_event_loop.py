"""The API's event loop goes on while large answers are built and large bodies are checked; both are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.openai_shapes import Answer, AnswerBuilder
from outrider.cluster.http.answers.respond import ResponseForm, respond
from outrider.cluster.http.answers.responses import ResponseBuilder, respond_items
from outrider.cluster.http.api import Service, create_api
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.cluster.serving.generation import Generation, GenerationJob
from outrider.decoding.request import FinishReason, SamplingParams, StepOutput, StepReport, TokenLogprob
from tests.cluster.circle import CHAT, CHATS, COMPLETIONS, CONTEXT, TEXT, TOKENIZER, LocalEngine, check_error

PIECE = 1 << 18  # bytes of JSON: four times what is built in one turn of the loop
TOKENS = 400  # of each prompt and choice
RESPONSES = {"model": "circle", "input": "hi"}
INFO: Any = SimpleNamespace(served_name="circle", strategy="llma", is_lossless=lambda *_: True)
TOOLS = [{"type": "function", "name": "f", "parameters": {"enum": list(range(10_000))}}] * 8  # told again with a response
SHAPES: list[tuple[type[Any], dict[str, Any]]] = [
    (ChatCompletionRequest, CHAT | {"logprobs": True, "top_logprobs": 20, "n": 4}),
    (ChatCompletionRequest, CHAT | {"prompt_logprobs": 20, "return_token_ids": True, "speculation": {"report": True}}),
    (CompletionRequest, TEXT | {"logprobs": 20, "echo": True, "n": 4, "return_token_ids": True}),
    (CompletionRequest, TEXT | {"prompt_logprobs": 20, "n": 4}),
    (ResponsesRequest, RESPONSES | {"speculation": {"report": True}, "tools": TOOLS}),
]


def scored(tokens: int, count: int | None) -> tuple[TokenLogprob, ...] | None:
    if count is None:
        return None
    top = tuple((token, -0.5 * token - 1e-7) for token in range(60, 60 + count))
    return tuple(TokenLogprob(place % 250, -0.25, top, 3) for place in range(tokens))


class AllAtOnce:
    """An engine whose every output is there at once: nothing but the answer's own work lets the loop go on."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def generate(self, *jobs: GenerationJob) -> list[AsyncGenerator[StepOutput, None]]:
        return [self._outputs(job) for job in jobs]

    async def describe(self) -> list[Any]:
        return []

    async def _outputs(self, job: GenerationJob) -> AsyncGenerator[StepOutput, None]:
        yield StepOutput(job.request_id, (), "")
        ids = tuple(place % 250 for place in range(TOKENS))
        report = StepReport(("é",) * TOKENS, ("model",) * TOKENS, 3) if self._body.drafting.report else None
        yield StepOutput(
            job.request_id, ids, "é" * TOKENS, finish_reason=FinishReason.LENGTH, report=report,
            logprobs=scored(TOKENS, getattr(self._body, "num_logprobs", None)),
            prompt_logprobs=scored(TOKENS - 1, getattr(self._body, "num_prompt_logprobs", None)),
        )  # fmt: skip


async def answer_of(body: Any) -> bytes:
    """The answer that is built, whole or as a stream."""
    n = body.n or 1
    jobs = [
        GenerationJob(f"id/{index}", np.arange(TOKENS, dtype=np.int32) % 250, SamplingParams(max_tokens=9)) for index in range(n)
    ]
    echoes = ["prompt"] * n if getattr(body, "echo", None) else ()
    generation, form = Generation(AllAtOnce(body), jobs, n), ResponseForm(bool(body.stream), echoes=echoes)
    if isinstance(body, ResponsesRequest):
        response = await respond_items(ResponseBuilder("id", 5, body, INFO), generation, form)
    else:
        builder = AnswerBuilder("id", 5, body, INFO, TokenBytes(TOKENIZER), jobs, echoes)
        response = await respond(builder, generation, form)
    if not body.stream:
        assert int(response.headers["content-length"]) == len(response.body)
        return bytes(response.body)
    return "".join([event async for event in response.body_iterator]).encode()  # type: ignore[attr-defined]


async def with_heartbeat(bodies: Sequence[Any]) -> tuple[list[bytes], int]:
    """The answers that are built at the same time, and the turns of the loop in the meantime."""
    turns = 0

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    heart = asyncio.create_task(beat())
    try:
        return list(await asyncio.gather(*map(answer_of, bodies))), turns
    finally:
        heart.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "fields"), SHAPES)
def test_the_loop_goes_on_between_the_pieces_of_answers(kind: type[Any], fields: dict[str, Any], stream: bool) -> None:
    """Of several answers that are built at once, too, one piece is built in a turn."""
    body = kind.model_validate(fields | ({"stream": True} if stream else {}))
    answers, turns = asyncio.run(with_heartbeat([body] * 4))
    total = sum(map(len, answers))
    assert turns >= total // PIECE > 0


@pytest.mark.parametrize(("kind", "fields"), SHAPES[:4])
def test_an_answer_in_pieces_is_the_json_of_the_whole(kind: type[Any], fields: dict[str, Any]) -> None:
    written = asyncio.run(answer_of(kind.model_validate(fields)))
    assert Answer.model_validate_json(written).model_dump_json(exclude_unset=True).encode() == written


def test_a_response_in_pieces_is_the_json_of_the_whole() -> None:
    schema = {"a": [1, {"b": None}, 1e-9, [], {}, "\x7f\x1f"], 'c"é': list(range(3000))}
    fields = RESPONSES | {"temperature": 1e-7, "tools": [{"type": "function", "name": "f", "parameters": schema}]}
    body = ResponsesRequest.model_validate(fields | {"speculation": {"report": True}})
    written = asyncio.run(answer_of(body)).decode()
    told = json.loads(written)
    assert told["tools"][0]["parameters"] == schema and len(told["speculation"]["steps"][0]["tokens"]) == TOKENS
    assert json.dumps(told, ensure_ascii=False, separators=(",", ":")) == written


def test_a_token_is_decoded_once() -> None:
    token_bytes = TokenBytes(TOKENIZER)
    backend, asked = token_bytes.backend, list[list[int]]()

    def decode(ids: list[int], **options: Any) -> str:
        asked.append(ids)
        return str(backend.decode(ids, **options))

    token_bytes.backend = SimpleNamespace(decode=decode, id_to_token=backend.id_to_token)
    found = [token_bytes(token) for _ in range(50) for token in (70, 71, 10**6)]
    assert len(asked) == 2 and found[:3] * 50 == found


@contextlib.contextmanager
def calls_in_this_thread(*files: str) -> Iterator[list[str]]:
    """The functions of some files that this thread calls in the block."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and any(file in frame.f_code.co_filename for file in files):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def parts(count: int, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": ""}] * count


def messages(count: int, **fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [{"role": "user"} | fields] * count}


CALLS = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}] * 128
# The route, a body, and the field that a refusal names; None where it is answered.
BODIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "parts": (CHATS, messages(8, content=parts(1000)), None),
    "parts of tokenize": ("/tokenize", {"messages": messages(8, content=parts(1000))["messages"]}, None),
    "parts of compare": ("/v1/compare", messages(8, content=parts(1000)) | {"against": "plain"}, None),
    "items": ("/v1/responses", RESPONSES | {"max_output_tokens": 1, "input": [{"role": "user", "content": ""}] * 2000}, None),
    "too many parts": (CHATS, messages(9, content=parts(1000)), "messages"),
    "too many calls": (CHATS, messages(65, role="assistant", tool_calls=CALLS), "messages"),
    "too many input parts": (
        "/v1/responses", RESPONSES | {"input": [{"role": "user", "content": parts(1000, "input_text")}] * 9}, "input",
    ),
    "too many outputs": (
        "/v1/responses",
        RESPONSES | {"input": [{"type": "function_call_output", "call_id": "a", "output": parts(1000, "input_text")}] * 9},
        "input",
    ),
    "metadata": ("/v1/responses", RESPONSES | {"metadata": {str(number): 1 for number in range(9000)}}, "metadata"),
    "ids": (COMPLETIONS, TEXT | {"prompt": [70] * 100_000}, "prompt"),
    "prompts": (COMPLETIONS, TEXT | {"prompt": [[70] * 100] * 128, "max_tokens": CONTEXT}, "max_tokens"),
    "detokenize": ("/detokenize", {"tokens": [70] * 100_000}, None),
    "biases": (COMPLETIONS, TEXT | {"logit_bias": {str(number): 1 for number in range(100_000)}}, "logit_bias"),
    "nested names": (CHATS, CHAT | {"metadata": {"a": [{str(number): 1 for number in range(9000)}]}}, "metadata"),
    "stops": (COMPLETIONS, TEXT | {"stop": ["a"] * 50_000}, "stop"),
    "names": (COMPLETIONS, {str(number): 1 for number in range(300_000)}, None),
    "texts": (COMPLETIONS, TEXT | {"stop": [""] * 300_000}, None),
    "objects": (COMPLETIONS, TEXT | {"stop": [{}] * 70_000}, None),
    "lists": (COMPLETIONS, TEXT | {"stop": [[]] * 70_000}, None),
}  # fmt: skip


async def posted(service: Service, path: str, content: bytes, **headers: str) -> tuple[httpx.Response, list[str]]:
    """What a route answers, and the functions that check bodies of those that were called in the loop's thread."""
    transport = httpx.ASGITransport(create_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        with calls_in_this_thread("cluster/http/types/", "json/decoder.py") as calls:
            answer = await client.post(path, content=content, headers={"Content-Type": "application/json"} | headers)
    return answer, calls


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_is_checked_in_a_thread(circle_engine: LocalEngine, name: str) -> None:
    path, body, field = BODIES[name]
    content = json.dumps(body).encode()
    answer, calls = asyncio.run(posted(Service(circle_engine, TOKENIZER), path, content))
    assert len(content) > 1 << 14
    assert len(calls) < 200 and "raw_decode" not in calls, answer.text[:300]  # what is left looks at the body as a whole
    if field is not None:
        check_error(answer, 400, param=field)
    elif name in ("names", "texts", "objects", "lists"):
        check_error(answer, 400, "more than")
    else:
        assert answer.status_code == 200, answer.text[:300]


@pytest.mark.parametrize(
    ("path", "content", "headers"),
    [
        (CHATS, json.dumps(messages(1, content=5)).encode(), {}),
        (CHATS, json.dumps(messages(1, content=5)).encode(), {"X-Session-ID": "x" * 600}),
        (CHATS, json.dumps(CHAT | {"modell": 1, "maxtokens": 2}).encode(), {}),
        (COMPLETIONS, json.dumps(TEXT).encode("utf-16"), {}),
        (COMPLETIONS, b'{"model": "circle", "prompt": ', {}),
        (COMPLETIONS, b'{"model": "circle", "prompt": ' + b"9" * 5000 + b"}", {}),
        (COMPLETIONS, b'{"model": "circle", "prompt": NaN, "n": 1e999, "model": "\\ud800"}', {}),
        (COMPLETIONS, b"\xff\xfe{", {}),
        (COMPLETIONS, b"null", {}),
        (COMPLETIONS, b"[1, 2]", {}),
        (COMPLETIONS, json.dumps(TEXT).encode(), {"Content-Type": "text/plain"}),
        ("/v1/compare", json.dumps(CHAT | {"n": 2}).encode(), {}),
        ("/v1/compare", json.dumps([]).encode(), {}),
        ("/tokenize", json.dumps({"prompt": "a", "messages": []}).encode(), {}),
    ],
)
def test_a_long_body_is_answered_as_a_short_one(
    circle_engine: LocalEngine, path: str, content: bytes, headers: dict[str, str]
) -> None:
    service, space = Service(circle_engine, TOKENIZER), b" " * (1 << 15)
    if content.startswith(b"\xff\xfe"):
        space = space.decode().encode("utf-16-le")
    (short, _), (long, _) = (asyncio.run(posted(service, path, sent, **headers)) for sent in (content, content + space))
    assert short.status_code == long.status_code
    assert short.status_code == 200 or short.json() == long.json()


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (COMPLETIONS, {"n": 128, "max_tokens": 400, "logprobs": 20}, "logprobs"),
        (CHATS, {"n": 128, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        (CHATS, {"n": 128, "max_tokens": None, "logprobs": True}, "top_logprobs"),
        (COMPLETIONS, {"prompt": [[70] * 8000] * 8, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[70] * 8000] * 8, "logprobs": 20, "echo": True, "max_tokens": 0}, "logprobs"),
        (COMPLETIONS, {"n": 128, "max_tokens": 9000, "speculation": {"report": True}}, "speculation.report"),
    ],
)
def test_too_many_log_probabilities_are_refused(http: httpx.Client, path: str, fields: dict[str, Any], field: str) -> None:
    body = (CHAT if path == CHATS else TEXT) | fields
    sent = {name: value for name, value in body.items() if value is not None}
    check_error(http.post(path, json=sent), 400, "the maximum per answer is 1048576", "lower n", param=field)


def test_a_whole_context_of_log_probabilities_is_answered(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json=TEXT | {"prompt": [70] * 3000, "prompt_logprobs": 20, "n": 2, "max_tokens": 1})
    assert [len(choice["prompt_logprobs"]) for choice in answer.json()["choices"]] == [3000, 3000]
