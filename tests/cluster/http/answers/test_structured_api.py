"""Structured output through OpenAI's own client: the text is of the form that was asked for, drafted or not."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from outrider.engine.text import grammar as grammar_module
from tests.cluster.circle import CHATS, COMPLETIONS, MESSAGES, check_error

SCHEMA = {
    "type": "object",
    "properties": {"abc": {"enum": ["abcdef", "<", "é_日"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["abc", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a_form", "schema": SCHEMA, "strict": True}}
DOCUMENTS = ['{"abc":"abcdef","n":0}', '{"abc": "é_日", "n": 3}', "abcdef"]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a_form", "schema": schema}}


def chat(client: OpenAI, body: dict[str, Any], drafted: bool = True, **arguments: Any) -> tuple[str, str]:
    speculation = {} if drafted else {"max_draft_tokens": 0}
    extra = {"reference_documents": DOCUMENTS, "speculation": speculation, **body}
    answer = client.chat.completions.create(
        model="circle", messages=MESSAGES, **{"max_tokens": 300, "temperature": 1.0, **arguments}, extra_body=extra
    )
    (choice,) = answer.choices
    return str(choice.message.content), choice.finish_reason


@pytest.mark.parametrize("arguments", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_p": 0.6}, {"seed": 3}], ids=str)
def test_json_schema(client: OpenAI, arguments: dict[str, Any]) -> None:
    text, reason = chat(client, {"response_format": FORM}, **arguments)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    assert chat(client, {"response_format": FORM}, drafted=False, **arguments) == (text, reason)


def test_every_name_of_the_same_form_gives_the_same(client: OpenAI) -> None:
    bodies = [
        {"response_format": FORM},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ]
    assert len({chat(client, body, seed=5) for body in bodies}) == 1


def test_choice_and_regex(client: OpenAI) -> None:
    choices = ["abcdef", "é_日", "nothing of the kind"]
    for body in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        assert chat(client, body, temperature=0) == ("é_日", "stop") or chat(client, body, temperature=0)[0] in choices
    text, reason = chat(client, {"guided_regex": "[x-z]{3}[0-9]{2}"}, seed=4)
    assert re.fullmatch("[x-z]{3}[0-9]{2}", text) and reason == "stop"
    text, _ = chat(client, {"structured_outputs": {"grammar": 'start: "x" start "y" | "z"'}}, temperature=0, max_tokens=9)
    assert text == "x" * text.count("x") + "z" + "y" * text.count("y") or set(text) <= set("xz")


TAG = {
    "structures": [{"begin": "<abc=f>", "schema": {"enum": ["é_日", 3]}, "end": "</abc>"}],
    "triggers": ["<abc"],
}


@pytest.mark.parametrize("arguments", [{"temperature": 0}, {"seed": 1}, {"seed": 2}], ids=str)
def test_text_is_free_before_a_structural_tag(client: OpenAI, arguments: dict[str, Any]) -> None:
    """The model says the trigger by itself, and would go on otherwise."""
    form = {"type": "structural_tag", **TAG}
    text, reason = chat(client, {"response_format": form}, max_tokens=60, **arguments)
    if arguments == {"temperature": 0}:
        assert re.match(r'<abc=f>("é_日"|3)</abc>', text), text
    assert re.fullmatch(r'((?!<abc)[^\0]|<abc=f>("é_日"|3)</abc>)*', text) or reason == "length"
    for body, drafted in (
        ({"response_format": form}, False),
        ({"structured_outputs": {"structural_tag": TAG}}, True),
        ({"structured_outputs": {"structural_tag": json.dumps(form)}}, True),
    ):
        assert chat(client, body, drafted, max_tokens=60, **arguments) == (text, reason)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "format": {}, **TAG}}, "response_format.type"),
        ({"response_format": {"type": "text", **TAG}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", **TAG, "triggers": ["x"]}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ],
)
def test_a_faulty_structural_tag_is_refused(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    check_error(http.post(COMPLETIONS, json={"model": "circle", "prompt": "<", "max_tokens": 4, **body}), 400, param=param)


def test_completions_streams_and_logprobs(client: OpenAI, http: httpx.Client) -> None:
    body = {"model": "circle", "prompt": "<", "max_tokens": 200, "seed": 3, "logprobs": 1, "response_format": FORM}
    answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    pieces = client.completions.create(
        model="circle", prompt="<", max_tokens=200, seed=3, stream=True, extra_body={"response_format": FORM}
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == choice["text"]


def test_json_object_is_cut_where_the_tokens_end(client: OpenAI) -> None:
    text, reason = chat(client, {"response_format": {"type": "json_object"}}, temperature=0, max_tokens=20)
    assert text.lstrip().startswith("{") and reason in ("length", "stop")
    assert chat(client, {"response_format": {"type": "text"}}, temperature=0, max_tokens=3) == ("<ab", "length")


CYCLE = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
COSTLY = {"type": "integer", "multipleOf": 9999991}  # compiles for 200 s
PATTERNS = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}
INTERSECTED = "start: T\nT: " + " & ".join(f"/(?s:.*)a{number}(?s:.*)/" for number in range(40))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "stream"), [(CHATS, True), (COMPLETIONS, False)])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": schema_format(COSTLY)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(CYCLE)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(PATTERNS)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"grammar": INTERSECTED}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": COSTLY}}, "structured_outputs.json"),
        ({"guided_json": CYCLE}, "guided_json"),
        ({"guided_regex": r"(?P<a>x){0}y\b\Bz"}, "guided_regex"),
    ],
    ids=["multipleOf", "cycle", "allOf", "grammar", "json", "guided_json", "guided_regex"],
)
def test_what_cannot_be_compiled_is_refused(
    http: httpx.Client, body: dict[str, Any], param: str, path: str, stream: bool
) -> None:
    asked = {"messages": MESSAGES} if path == CHATS else {"prompt": "<"}
    check_error(http.post(path, json={"model": "circle", "max_tokens": 4, "stream": stream, **asked, **body}), 400, param=param)


def test_responses_that_cannot_be_compiled_are_refused(http: httpx.Client) -> None:
    for schema, stream in ((COSTLY, False), (CYCLE, True), (PATTERNS, True)):
        form = {"type": "json_schema", "name": "a_form", "schema": schema}
        body = {"model": "circle", "input": "hi", "stream": stream, "text": {"format": form}}
        check_error(http.post("/v1/responses", json=body), 400, param="text.format.schema")


def test_a_grammar_fails_the_request_by_its_own_fault_in_the_middle(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_DEBT_S", -1.0)
    body = {"model": "circle", "prompt": "<", "max_tokens": 4, "guided_regex": "[a-z]+"}
    check_error(http.post(COMPLETIONS, json=body), 400, param="guided_regex")
    monkeypatch.undo()
    assert http.post(COMPLETIONS, json=body).status_code == 200
