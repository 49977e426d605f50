"""Streams that are cut off anywhere and go on at another process, whose steps are others: nothing is told twice or missing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.answers import stream_guard
from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.reasoning import Thought
from outrider.cluster.http.answers.respond import ChoiceReader, ReasoningFormat, ResponseForm, ToolCallFormat
from outrider.cluster.http.answers.resume import ResumePoint, StreamHeaders, signature_of
from outrider.cluster.http.answers.stream_guard import StreamGuard
from outrider.cluster.http.api import Service, create_api
from outrider.cluster.http.types.openai import CompletionRequest
from outrider.configs.slices import ServerOptions, SpeculationOptions, TenancyOptions, TenantOptions
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.text.chat_format import CALL_MARKS, HARMONY, CallForm, Tags
from tests.cluster.circle import (
    CHAT,
    CHATS,
    CIRCLE,
    COMPLETIONS,
    MESSAGES,
    TEXT,
    TOKENIZER,
    LocalEngine,
    bearer,
    byte_ids,
    check_error,
    client_of,
    local_engine,
    save_saying,
    served,
)
from tests.cluster.commands import REPOSITORY
from tests.helpers.waiting import eventually

LAST = "Last-Event-ID"
EVENTS = {"Accept": "text/event-stream"}
USAGE = {"stream_options": {"include_usage": True}}
KEYS = {name: f"outrider-{name}" for name in ("acme", "umbrella")}
TENANTS = {name: TenantOptions(keys=(hash_key(key),)) for name, key in KEYS.items()}
SAID = [
    "<think>",
    "Two and",
    " two",
    "</think>",
    "Let me ",
    "look. ",
    '<tool_call>{"name": "look", "argum',
    'ents": {"at"',
    ': "é',
]
SAID += ["日", '"}}', "</tool_call>", "<tool_call>", '{"name": "look", "arguments": {"x"', ": [1", "]}}</tool_call>\n"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% if no %}<think></think>{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
LETTERS = {"type": "object", "properties": {"a": {"enum": ["xyz", "zyx"]}}, "required": ["a"], "additionalProperties": False}

KEY = b"a key of all API processes"

Event = tuple[str, Any]  # the id and the object of a chunk


def signing(engine: LocalEngine, tokenizer: PreTrainedTokenizerFast, *more: Any, key: bytes = KEY, **named: Any) -> Service:
    """Return a service that gives events ids."""
    return Service(engine, tokenizer, *more, stream_key=key, **named)


def signed(*parts: str, key: bytes = KEY) -> str:
    """Return an id of these parts, signed."""
    name = ".".join(parts)
    return f"{name}.{signature_of(name, key)}"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two API processes: what one begins the other ends."""

    first: httpx.Client
    second: httpx.Client


@pytest.fixture(scope="module")
def slow_engine(circle_model: Path) -> Iterator[LocalEngine]:
    """The circle with one token a step, which offers strategies whose streams cannot be gone on with."""
    apart = SpeculationOptions("autoregressive", strategies=("spectr", "bild"), draft_model=str(circle_model), exact=False)
    with local_engine(circle_model, apart) as engine:
        yield engine


@pytest.fixture(scope="module")
def circles(circle_engine: LocalEngine, slow_engine: LocalEngine) -> Iterator[Pair]:
    """Over the circle: the first takes several tokens a step, the second one."""
    with client_of(signing(circle_engine, TOKENIZER)) as first, client_of(signing(slow_engine, TOKENIZER)) as second:
        yield Pair(first, second)


@pytest.fixture(scope="module")
def callers(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """As ``circles``, over a model that reasons, speaks and calls tools."""
    path = save_saying(circle_model, tmp_path_factory.mktemp("models") / "caller", SAID, TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    with (
        local_engine(path) as fast,
        local_engine(path, SpeculationOptions("autoregressive")) as slow,
        client_of(signing(fast, tokenizer)) as first,
        client_of(signing(slow, tokenizer)) as second,
    ):
        yield Pair(first, second)


def stream(http: httpx.Client, path: str, body: dict[str, Any], last: str | None = None) -> list[Event]:
    """The events of a stream that ends well, the last of them ``[DONE]``, which has no id."""
    answer = http.post(path, json=body | {"stream": True}, headers=EVENTS if last is None else {LAST: last})
    assert answer.status_code == 200, answer.text
    found: list[Event] = []
    for event in answer.text.split("\n\n")[:-1]:
        *ids, data = event.split("\n")
        assert data.startswith("data: ") and len(ids) == (data != "data: [DONE]"), event
        found.append((ids[0].removeprefix("id: "), json.loads(data[6:])) if ids else ("", None))
    assert [event for _, event in found].index(None) == len(found) - 1
    return found[:-1]


def told(events: list[Event]) -> dict[str, Any]:
    """All that a client has of an answer, by choice and kind: pieces joined, and lists of what may be told once."""
    found: dict[str, Any] = {
        "of all": [{(chunk["id"], chunk["created"], chunk["model"], chunk["lossless"]) for _, chunk in events}]
    }
    for _, chunk in events:
        if not chunk["choices"]:
            found.setdefault("usage", []).append({**chunk["usage"], "prompt_tokens_details": None})
        for choice in chunk["choices"]:
            delta, own = choice.get("delta", {}), found.setdefault(str(choice["index"]), {})
            for name in ("content", "reasoning"):
                own[name] = own.get(name, "") + (delta.get(name) or "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            own["text"] = own.get("text", "") + choice.get("text", "")
            own.setdefault("token_ids", []).extend(choice.get("token_ids") or ())
            for name, values in (choice.get("logprobs") or {}).items():
                own.setdefault(f"logprobs.{name}", []).extend(values or ())
            for call in delta.get("tool_calls", ()):
                calls = own.setdefault("calls", [])
                if "id" in call:
                    calls.append([call["index"], call["id"], call["function"]["name"], ""])
                assert call["index"] == len(calls) - 1
                calls[-1][3] += call["function"]["arguments"]
            once = {"role": delta.get("role"), "finish_reason": choice["finish_reason"]}
            for holder, name in itertools.product((chunk, choice), ("prompt_token_ids", "prompt_logprobs")):
                once |= {name: holder[name]} if name in holder else {}
            for name, value in once.items():
                own.setdefault(name, []).extend([] if value is None else [value])
    return found


CIRCLES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy chat": (CHATS, CHAT | {"max_tokens": 12} | USAGE),
    "sampled without a seed": (CHATS, CHAT | {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}),
    "n": (CHATS, CHAT | {"n": 2, "temperature": 1.2, "max_tokens": 8, "logprobs": True, "top_logprobs": 1} | USAGE),
    "echo": (COMPLETIONS, TEXT | {"prompt": ["é日<abc", "<"], "echo": True, "logprobs": 1, "max_tokens": 10}),
    "scored": (COMPLETIONS, TEXT | {"prompt": "<abcd", "echo": True, "logprobs": 1, "max_tokens": 0}),
    "stop": (COMPLETIONS, TEXT | {"max_tokens": 99, "stop": [":x", "日:🦙;"]} | USAGE),
    "token ids": (COMPLETIONS, TEXT | {"prompt": CIRCLE[:10], "max_tokens": 12, "return_token_ids": True, "prompt_logprobs": 1}),
    "token ids of a chat": (CHATS, CHAT | {"n": 2, "max_tokens": 5, "return_token_ids": True, "prompt_logprobs": 0}),
    "JSON": (CHATS, CHAT | {"temperature": 1.0, "max_tokens": 16, "structured_outputs": {"json": LETTERS}}),
    "usage in every chunk": (
        COMPLETIONS,
        TEXT | {"max_tokens": 12, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
}
CALLS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS, "logprobs": True, "return_token_ids": True} | USAGE,
    "no reasoning": {"tools": TOOLS, "include_reasoning": False, "parallel_tool_calls": False},
    "no tools": {},
}


def check_cut_anywhere(services: Pair, path: str, body: dict[str, Any]) -> list[Event]:
    """Cuts a stream of the second process after every event and goes on at the first; then one that is cut after each event."""
    whole = stream(services.second, path, body)
    expected = told(whole)
    for cut in range(1, len(whole) + 1):
        rest = stream(services.first, path, body, whole[cut - 1][0])
        assert told(whole[:cut] + rest) == expected, (cut, whole[cut - 1], rest)
        assert not rest or rest[-1][0] == whole[-1][0]  # the end is told in the same words
    events, turns = whole[:1], itertools.cycle((services.first, services.second))
    while rest := stream(next(turns), path, body, events[-1][0]):
        events.append(rest[0])
    assert told(events) == expected
    return events


@pytest.mark.slow
@pytest.mark.parametrize("name", CIRCLES)
def test_a_stream_goes_on_wherever_it_is_cut(circles: Pair, name: str) -> None:
    path, body = CIRCLES[name]
    drafts = {"reference_documents": [CIRCLE * 2, '{"a": "xyz"}']}  # the first process takes several tokens a step
    events = check_cut_anywhere(circles, path, body | drafts)
    assert len(events) > (name != "scored")


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_reasoning_and_calls_go_on(callers: Pair, name: str) -> None:
    body = {"model": "caller", "messages": MESSAGES, "temperature": 0, "max_tokens": 40} | CALLS[name]
    events = check_cut_anywhere(callers, CHATS, body | {"reference_documents": ["".join(SAID)]})
    own = told(events)["0"]
    assert own["reasoning"] == ("" if name == "no reasoning" else "Two and two")
    if name != "no tools":
        calls = [call[2:] for call in own["calls"]]
        assert calls == [["look", '{"at": "é日"}'], ["look", '{"x": [1]}']][: len(calls)] and own["finish_reason"] == [
            "tool_calls"
        ]
        assert len({call[1] for call in own["calls"]}) == len(calls) == (1 if name == "no reasoning" else 2)


def test_ids_come_only_where_events_are_asked_for(circles: Pair) -> None:
    body = TEXT | {"stream": True}
    for accept, has_ids in (
        ("*/*", False), ("application/json", False), ("text/event-streams", False), ("", False),
        ("application/json, Text/Event-Stream;q=0.9", True),
    ):  # fmt: skip
        text = circles.first.post(COMPLETIONS, json=body, headers={"Accept": accept}).text
        assert ("id: " in text.replace('"id": ', "")) is has_ids and text.startswith("id: " if has_ids else "data: ")
    whole = circles.first.post(COMPLETIONS, json=TEXT, headers=EVENTS).json()
    assert whole["choices"][0]["text"] == "abcd"


def test_a_guarded_stream_stays_guarded(circle_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_guard, "PERIOD_S", 0.02)
    guard = StreamGuard(ServerOptions(stream_guard="both"))
    body = TEXT | {"max_tokens": 60, "stream": True, "speculation": {"max_draft_tokens": 0}} | USAGE
    with client_of(signing(circle_engine, TOKENIZER, guard=guard)) as http:
        whole = stream(http, COMPLETIONS, body)
        last = whole[len(whole) // 2][0]
        wire = http.post(COMPLETIONS, json=body, headers={LAST: last}).content.split(b"\n\n")[:-2]
        assert {len(event) + 2 for event in wire} == {512} and len(wire) >= 3
        assert told(whole[: len(whole) // 2 + 1] + stream(http, COMPLETIONS, body, last)) == told(whole)


def refused(http: httpx.Client, body: dict[str, Any], last: str, *words: str, path: str = COMPLETIONS, key: str = "") -> None:
    answer = http.post(path, json={"stream": True} | body, headers={LAST: last} | bearer(key or None))
    check_error(answer, 400, LAST, *words, param=LAST, code="invalid_value")


@pytest.mark.slow
def test_what_cannot_be_gone_on_with(circles: Pair) -> None:
    http, body = circles.second, TEXT | {"stream": True}
    last = stream(http, COMPLETIONS, body)[1][0]
    name, created, digest, model, usage, choice, signature = last.split(".")
    begun = f"{created}.{digest}.{model}"
    unsigned = last.removesuffix(f".{signature}")
    wrong = ["", "7", "null", f"{last}.", f"{last}{last}", last.upper(), f"{name[:-1]}.{begun}.{usage}.{choice}"]
    wrong += [f"{name}.{begun}.{usage}", f"{name}.{begun}.2.{choice}", f"{name}.{begun}.0.-1-0-0-0-0"]
    wrong += [last.replace("cmpl-", "chatcmpl-"), f"{name}.{begun}.{usage}.{choice}f-1"]
    changed = f"{name}.999999999999.{digest}.{model}.{usage}.{choice}.{signature}"
    for value in (unsigned, f"{unsigned}.{'0' * 32}", signed(unsigned, key=b"another"), changed):
        refused(http, body, value, "signature", "OUTRIDER_CACHE_SECRET", "send the request again")
    assert signed(unsigned) == last
    for value in wrong:
        refused(http, body, value, "not an event id", "leave it out")
    refused(http, CHAT, last, "not an event id", path=CHATS)
    refused(http, body, signed(unsigned, choice), "2 choices", "the request has 1")
    for other in ({"seed": 3}, {"prompt": "a"}, {"max_tokens": 5}, {"stream_options": {"include_usage": True}}):
        refused(http, body | other, last, "another request", "same body")
    refused(http, TEXT | {"stream": False}, last, "stream: true")
    answer = http.post(COMPLETIONS, json=body, headers={LAST: "a" * 9000})
    check_error(answer, 400, param=LAST, code="invalid_value")
    items = {"model": "circle", "input": "a", "stream": True}
    refused(http, items, last, "cannot be resumed", "/v1/chat/completions", path="/v1/responses")
    assert "id: " not in http.post("/v1/responses", json=items, headers=EVENTS).text.replace('"id": ', "")


@pytest.mark.parametrize(
    ("speculation", "word"),
    [({"report": True}, "speculation.report"), ({"strategy": "spectr"}, "samples on its own"), ({"strategy": "bild"}, "lossy")],
)
def test_streams_that_would_come_out_otherwise_have_no_ids(circles: Pair, speculation: dict[str, Any], word: str) -> None:
    http, body = circles.second, TEXT | {"temperature": 1.0, "speculation": speculation}
    assert http.post(COMPLETIONS, json=body | {"stream": True}, headers=EVENTS).text.startswith("data: ")
    plain = TEXT | {"temperature": 1.0, "speculation": speculation | {"max_draft_tokens": 0, "report": None}}
    assert len(stream(http, COMPLETIONS, plain)) > 1
    if word == "samples on its own":
        assert len(stream(http, COMPLETIONS, body | {"temperature": 0})) > 1
    name = stream(http, COMPLETIONS, TEXT)[0][0].split(".")[:-1]
    name[2] = digest_of(body)
    refused(http, body, signed(*name), word, "send the request again")


def digest_of(body: dict[str, Any]) -> str:
    """As an id has it, of a request without a key."""
    return ResumePoint.of("cmpl-", CompletionRequest(**body, stream=True), None, StreamHeaders("text/event-stream"), KEY).digest


def test_another_model_goes_on_with_nothing(circles: Pair) -> None:
    last = stream(circles.first, COMPLETIONS, TEXT)[1][0].split(".")[:-1]
    last[3] = f"{int(last[3], 16) ^ 1:08x}"
    answer = circles.second.post(COMPLETIONS, json=TEXT | {"stream": True}, headers={LAST: signed(*last)})
    check_error(answer, 400, LAST, "the model was replaced", "send the request again", param=LAST, code="resumed_otherwise")


def test_another_text_is_found_out(circles: Pair) -> None:
    body = TEXT | {"max_tokens": 12, "logit_bias": {str(byte_ids("x")[0]): 0}}
    whole = stream(circles.first, COMPLETIONS, body)
    *first, choice, _ = whole[-2][0].split(".")
    content, check, *rest = choice.split("-")
    for told_otherwise in (f"{content}-{int(check, 16) ^ 1:x}", f"ff-{check}"):
        last = signed(*first, "-".join([told_otherwise, *rest]))
        text = circles.second.post(COMPLETIONS, json=body | {"stream": True}, headers={LAST: last}).text
        (event,) = text.split("\n\n")[:-1]
        error = json.loads(event.removeprefix("data: "))["error"]
        assert (error["code"], error["param"]) == ("resumed_otherwise", LAST) and "send the request again" in error["message"]


def test_a_stream_is_its_tenants(circle_engine: LocalEngine) -> None:
    with client_of(signing(circle_engine, TOKENIZER, TenancyOptions(tenants=TENANTS))) as http:
        acme = bearer(KEYS["acme"])
        answer = http.post(COMPLETIONS, json=TEXT | {"stream": True}, headers=EVENTS | acme).text
        last = answer.partition("\n")[0].removeprefix("id: ")
        refused(http, TEXT, last, "another request", "same key", key=KEYS["umbrella"])
        refused(http, TEXT, last, "another request", "same key")
        assert http.post(COMPLETIONS, json=TEXT | {"stream": True}, headers={LAST: last} | acme).status_code == 200
        check_error(http.post(COMPLETIONS, json=TEXT, headers={LAST: last} | bearer("wrong")), 401)


def test_the_old_generation_makes_room(slow_engine: LocalEngine) -> None:
    """Nobody told the replica that the process is gone which it computes for."""
    body = TEXT | {"max_tokens": 16000, "ignore_eos": True, "stream": True}
    with served(signing(slow_engine, TOKENIZER)) as dying, client_of(signing(slow_engine, TOKENIZER)) as other:
        (replica,) = slow_engine.replicas
        with httpx.Client(base_url=dying, timeout=60) as http, http.stream("POST", COMPLETIONS, json=body, headers=EVENTS) as old:
            lines = old.iter_lines()
            last = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
            with other.stream("POST", COMPLETIONS, json=body, headers={LAST: last}) as new:
                going = new.iter_lines()
                assert next(going).startswith(last[: last.index(".")].join(("id: ", "")))
                assert any('"code": "stream_taken"' in line for line in lines)  # the old one ends
                old.close()
                assert len(list(itertools.islice(going, 30))) == 30
                assert (counts := replica.describe().counts).running == 1 and counts.waiting == 0
        eventually(lambda: replica.describe().counts.running == 0)


def test_a_server_without_a_key_gives_no_ids(circle_engine: LocalEngine) -> None:
    with client_of(Service(circle_engine, TOKENIZER)) as http:
        assert http.post(COMPLETIONS, json=TEXT | {"stream": True}, headers=EVENTS).text.startswith("data: ")
        refused(http, TEXT, "7", "does not sign events", "OUTRIDER_CACHE_SECRET")


def test_of_clients_of_one_stream_one_gets_it(slow_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.actors.replica.RESUME_PERIOD_S", math.inf)
    body = TEXT | {"max_tokens": 16000, "ignore_eos": True, "stream": True}
    with client_of(signing(slow_engine, TOKENIZER)) as http:
        with http.stream("POST", COMPLETIONS, json=body, headers=EVENTS) as old:
            last = next(line for line in old.iter_lines() if line.startswith("id: ")).removeprefix("id: ")
            with http.stream("POST", COMPLETIONS, json=body, headers={LAST: last}) as first:
                going = first.iter_lines()
                next(going)
                for _ in range(3):
                    answer = http.post(COMPLETIONS, json=body, headers={LAST: last})
                    check_error(answer, 409, "another client", param=LAST, code="stream_taken")
                    assert answer.headers["Retry-After"] == "1"
                assert len(list(itertools.islice(going, 30))) == 30
        eventually(lambda: slow_engine.replicas[0].describe().counts.running == 0)


class Dying:
    """An API whose process dies, in the middle of an event, in its first answers."""

    def __init__(self, app: Any, deaths: int) -> None:
        self._app, self.deaths, self.begun = app, deaths, list[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        left = 5

        async def sending(message: Any) -> None:
            nonlocal left
            if message["type"] == "http.response.body" and self.deaths and not (left := left - 1):
                self.deaths -= 1
                await send(message | {"body": message["body"][: len(message["body"]) // 2], "more_body": True})
                raise SystemError("the process has died")
            await send(message)

        self.begun += [value.decode() for name, value in scope.get("headers", ()) if name == b"last-event-id"]
        await self._app(scope, receive, sending)


def test_the_example_of_the_docs(
    circle_engine: LocalEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.actors.replica.RESUME_PERIOD_S", 0.1)
    (source,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/http-api.md").read_text(encoding="utf-8"), re.DOTALL)
    app: Any = Dying(create_api(signing(circle_engine, TOKENIZER)), deaths=3)
    with served(app) as url:
        for old, new in (("http://127.0.0.1:8000", url), ("smollm2-135m-instruct", "circle"), ("sleep(1)", "sleep(0.01)")):
            assert old in source
            source = source.replace(old, new)
        exec(source, {})
        beginning = ResumePoint(app.begun[0].partition(".")[0], 0)
        body = {"model": "circle", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 200}
        whole = httpx.post(f"{url}{CHATS}", json=body | {"seed": beginning.seed}, timeout=60).json()
    assert capsys.readouterr().out == whole["choices"][0]["message"]["content"] + "\n"
    assert len(set(app.begun)) == 3 and app.deaths == 0  # one that was told to wait comes again with the same id


FORMS: list[CallForm | None] = [*CALL_MARKS, None]
PIECES = ["<think>", "</think>", "<think>a b</think>", '{"name": "f", "arguments": {"a": 1}}', *SAID, " ", "\n", ";", "{", "["]
PIECES += [mark for marks in CALL_MARKS.values() for mark in marks]
THINK, TOKEN_BYTES = Tags("<think>", "</think>"), TokenBytes(TOKENIZER)


@given(st.sampled_from(FORMS), st.booleans(), st.lists(st.sampled_from(PIECES), max_size=6), st.data())
def test_parts_do_not_depend_on_how_steps_cut(form: CallForm | None, told: bool, said: list[str], data: st.DataObject) -> None:
    text = "".join(said)
    tags = HARMONY if form == "harmony" else THINK
    asked = ResponseForm(
        True, echoes=["é "] if form is None else (), reasoning=ReasoningFormat(tags, None, TOKEN_BYTES, told) if form else None,
        calls=ToolCallFormat(form) if form else None,
    )  # fmt: skip

    def read(cuts: list[int]) -> str:
        reader, found = ChoiceReader(asked, 0, "chatcmpl-7"), ""
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            reason = FinishReason.STOP if end == len(text) else None
            for part in reader.read(StepOutput("", (), text[start:end], reason)):
                found += f"\0{part.id}{part.name}{part.arguments}" if isinstance(part, Call) else ""
                found += "" if isinstance(part, Call) else part if isinstance(part, str) else part.text
                found += "\1" if isinstance(part, Thought) and not part.text else ""
        return found

    cuts = sorted(data.draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=6)))
    assert read(cuts) == read([])
