"""Tokens of texts, the state of the server, and the document that describes all of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from outrider.cluster.http import request_planner, text_api
from outrider.cluster.http.api import Service
from outrider.cluster.http.documents import version
from outrider.cluster.http.text_api import Tokens
from outrider.engine.text.chat import render_chat
from tests.cluster.circle import CHAT, MESSAGES, TEXT, TOKENIZER, LocalEngine, byte_ids, client_of, start_replica

ROUTES = {
    "/health", "/ping", "/ready", "/version", "/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions",
    "/v1/score", "/v1/compare", "/tokenize", "/detokenize", "/tokenizer_info",
}  # fmt: skip


def test_texts_become_tokens_and_tokens_texts(http: httpx.Client) -> None:
    told = http.post("/tokenize", json={"model": "circle", "prompt": "é a"}).raise_for_status().json()
    assert told == {"count": 4, "max_model_len": 16384, "tokens": byte_ids("é a"), "token_strs": None}
    back = http.post("/detokenize", json={"model": "circle", "tokens": told["tokens"]}).raise_for_status().json()
    assert back == {"prompt": "é a"}
    named = http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True, "add_special_tokens": False}).json()
    assert named["token_strs"] == ["a", "Ġ", "b"]
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": [0, *byte_ids("a")]}).json() == {"prompt": "</s>a"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_tokenizer_is_described_as_clients_of_vllm_read_it(http: httpx.Client) -> None:
    told = http.get("/tokenizer_info").raise_for_status().json()
    assert told["eos_token"] == TOKENIZER.eos_token and told["chat_template"] == TOKENIZER.chat_template
    assert told["bos_token"] is None is TOKENIZER.bos_token
    assert http.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": False}).json()["count"] == 1


@pytest.mark.parametrize("fields", [{}, {"return_token_strs": True}])
def test_a_long_text_has_the_same_answer_as_a_short_one(http: httpx.Client, fields: dict[str, Any]) -> None:
    prompt = 'é "\\\n\x7f\u2028 a' * 5000
    ids = byte_ids(prompt)
    names = TOKENIZER.convert_ids_to_tokens(ids) if fields else None
    told = http.post("/tokenize", json={"prompt": prompt} | fields).raise_for_status()
    assert told.content.decode() == Tokens(count=len(ids), max_model_len=16384, tokens=ids, token_strs=names).model_dump_json()
    assert http.post("/detokenize", json={"tokens": ids}).raise_for_status().json() == {"prompt": prompt}


def test_the_text_of_tokens_is_bounded(circle_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_api, "_MAX_TEXT_BYTES", 100)
    with client_of(Service(circle_engine, TOKENIZER)) as http:
        assert http.post("/detokenize", json={"tokens": [50] * 100}).status_code == 200
        assert http.post("/detokenize", json={"tokens": [50] * 101}).json()["error"]["param"] == "tokens"
        assert http.post("/detokenize", json={"tokens": [0] * 25}).status_code == 200
        assert http.post("/detokenize", json={"tokens": [0] * 26}).status_code == 400  # a token of four characters


LARGE = "x" * (1 << 15)
USER = {"role": "user", "content": "hi"}
LARGE_TOOL = {"type": "function", "function": {"name": "f", "description": LARGE}}
LARGE_CALL = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": LARGE})}}
CHATS_OF_THREADS: dict[str, list[dict[str, Any]]] = {
    "short-texts": [{"messages": [USER]}],
    "long-texts": [
        {"messages": [USER | {"content": LARGE}]},
        {"messages": [USER | {"content": [{"type": "text", "text": "x" * 1024}] * 32}]},
        {"messages": [{"role": "assistant", "reasoning": LARGE}, USER]},
        {"messages": [{"role": "assistant", "reasoning_content": LARGE}, USER]},
        {"messages": [{"role": "assistant", "tool_calls": [LARGE_CALL]}, USER]},
        {"messages": [USER] * 1000},
        {"messages": [USER], "tools": [LARGE_TOOL]},
        {"messages": [USER], "chat_template_kwargs": {"a": LARGE}},
    ],
    "huge-texts": [{"messages": [USER | {"content": LARGE * 40}]}],
}


@pytest.mark.parametrize(("path", "more"), [("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})])
def test_every_text_of_a_chat_counts_as_long(
    circle_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    """The kind of threads in which a chat is rendered follows from all of its texts."""
    seen = set[str]()

    def rendered(*args: Any, **options: Any) -> list[int]:
        seen.add(threading.current_thread().name.rpartition("_")[0])
        return render_chat(*args, **options)

    for module in (request_planner, text_api):
        monkeypatch.setattr(module, "render_chat", rendered)
    with client_of(Service(circle_engine, TOKENIZER)) as http:
        for threads, bodies in CHATS_OF_THREADS.items():
            for body in bodies:
                seen.clear()
                http.post(path, json={"model": "circle"} | body | more)
                assert seen == {threads}, body.keys()


def test_a_chat_has_the_tokens_that_its_usage_counts(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    told = http.post("/tokenize", json={"messages": messages}).raise_for_status().json()
    assert told["tokens"] == byte_ids("[system]s[user]hi>")
    answer = http.post("/v1/chat/completions", json={"model": "circle", "messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == told["count"]
    open_ended = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert open_ended["tokens"] == told["tokens"][:-1]


def test_the_state_of_the_server(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version()}
    assert http.get("/ready").json() == {"status": "ready", "replicas": 1, "of": 1}
    assert http.get("/ping").json() == http.post("/ping").json() == http.get("/health").json()


def test_the_server_is_ready_when_all_replicas_have_loaded_and_as_long_as_one_answers(circle_model: Path) -> None:
    engine = LocalEngine()

    def start() -> None:
        engine.replicas.append(start_replica(circle_model, max_model_len=256))

    with client_of(Service(engine, TOKENIZER, replicas=2)) as http:

        def status() -> int:
            response = http.get("/ready")
            assert response.status_code == 200 or response.json()["error"]["code"] == "not_ready"
            assert ("retry-after" in response.headers) == (response.status_code == 503)
            return response.status_code

        codes = [status()]
        for change in (start, start, lambda: engine.replicas[0].stop(), lambda: engine.replicas[1].stop()):
            change()
            codes.append(status())
    assert codes == [503, 503, 200, 200, 503]


@pytest.fixture(scope="module")
def document(api_server: Any) -> dict[str, Any]:
    return dict(httpx.get(f"{api_server.url}/openapi.json", timeout=60).raise_for_status().json())


def fits(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is one of a schema of the document."""
    return bool(jsonschema.Draft202012Validator({**schema, "components": document["components"]}).is_valid(value))


def schema_of(document: dict[str, Any], path: str, status: str) -> dict[str, Any]:
    return dict(document["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"])


def test_the_document_names_the_routes(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.") and document["info"]["version"] == version()
    assert set(document["paths"]) >= ROUTES and not any(path.startswith("/admin") for path in document["paths"])
    for path in document["paths"].values():
        for route in path.values():
            assert "422" not in route["responses"] and "200" in route["responses"]
    streams = [path for path, routes in document["paths"].items() if "Last-Event-ID" in str(routes)]
    assert sorted(streams) == ["/v1/chat/completions", "/v1/completions"]
    identifiers = [route["operationId"] for path in document["paths"].values() for route in path.values()]
    assert len(set(identifiers)) == len(identifiers)


Bodies = dict[str, list[dict[str, Any]]]
BASES: dict[str, dict[str, Any]] = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT, "/tokenize": {}, "/detokenize": {}}
CALLS = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
# Changes of a body: those that are taken, and those that are refused.
TAKEN: Bodies = {
    "/v1/completions": [
        {}, {"prompt": ["<", "a"]}, {"prompt": [5, 6]}, {"prompt": [[5], [6]]}, {"prompt": ["a", [5]]}, {"stop": "d"},
        {"stop": ["d", "e"]}, {"stop": []}, {"stop": None}, {"best_of": 1}, {"suffix": ""}, {"suffix": None}, {"n": 2},
        {"logprobs": 2}, {"echo": True}, {"logit_bias": {"5": 3}}, {"speculation": {"max_draft_tokens": 0}}, {"cache": "off"},
        {"top_k": -1}, {"top_p": 0}, {"seed": -1}, {"use_beam_search": False},
    ],
    "/v1/chat/completions": [
        {}, {"tools": []}, {"tool_choice": "auto"}, {"prediction": {"type": "content", "content": "x"}}, {"n": 2},
        {"logprobs": True}, {"store": False}, {"stream_options": None}, {"user": "me"},
        {"messages": [{"role": "assistant", "tool_calls": CALLS}]}, {"verbosity": "medium"},
        {"messages": [{"role": "assistant", "content": None, "name": "a"}]},
    ],
    "/tokenize": [{"prompt": "a"}, {"messages": MESSAGES, "return_token_strs": True}],
    "/detokenize": [{"tokens": [5]}],
}  # fmt: skip
REFUSED: Bodies = {
    "/v1/completions": [
        {"prompt": []}, {"prompt": 5}, {"prompt": {}}, {"stop": 5}, {"stop": list("abcdefghijklmnopq")}, {"stop": [""]}, {"n": 0},
        {"stop": "a" * 1001}, {"n": 129}, {"best_of": 2}, {"suffix": "x"}, {"logprobs": 21}, {"wibble": 1}, {"temperature": 3},
        {"seed": 2**63}, {"cache": "on"}, {"speculation": {"wibble": 1}}, {"logit_bias": {"5": 101}}, {"model": None},
    ],
    "/v1/chat/completions": [
        {"messages": []}, {"messages": [{"content": "hi"}]}, {"tool_choice": "any"}, {"tools": [{}]}, {"store": True},
        {"prediction": "x"}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"echo": True},
    ],
    "/tokenize": [{"prompt": 5}],
    "/detokenize": [{"tokens": [-1]}, {}],
}  # fmt: skip


def test_the_document_is_true(document: dict[str, Any], http: httpx.Client) -> None:
    for cases, status, entry in ((TAKEN, 200, "200"), (REFUSED, 400, "4XX")):
        for path, body in ((path, BASES[path] | change) for path, changes in cases.items() for change in changes):
            response = http.post(path, json=body)
            assert response.status_code == status, (path, body, response.text)
            wanted = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert fits(document, wanted, body) is (status == 200), (path, body)
            assert fits(document, schema_of(document, path, entry), response.json()), (path, body, response.text)
    model = document["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fits(document, model, http.get("/v1/models").json())


def test_a_file_becomes_text(http: httpx.Client) -> None:
    page = http.post("/v1/documents/text", content=b"<html><p>nine &amp; ten</p><script>1</script></html>")
    assert page.raise_for_status().json() == {"text": "nine & ten"}
    refused = http.post("/v1/documents/text", content=b"\x89PNG\0")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "body"
    assert "not PDF, HTML or UTF-8 text" in refused.json()["error"]["message"]
    assert http.post("/v1/documents/text").status_code == 400
