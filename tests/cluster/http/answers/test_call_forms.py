"""The forms in which models write calls: found in templates, read out of texts cut anywhere, and bound by grammars."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.harmony import HarmonyReader
from outrider.cluster.http.answers.reasoning import Thought
from outrider.cluster.http.answers.tool_calls import Arguments, ToolCallReader, call_id, whole_calls
from outrider.cluster.http.answers.tool_values import value_json
from outrider.cluster.http.types.structural_tag import CallMarks, structural_grammar
from outrider.cluster.http.types.tool_grammar import Offered, call_grammar
from outrider.engine.text.chat import bracketed_tokens
from outrider.engine.text.chat_format import CALL_MARKS, CallForm, ChatFormat, added_tokens
from outrider.engine.text.grammar import GrammarError, Grammars
from tests.cluster.circle import MESSAGES, build_tokenizer, save_saying, speaking

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
        "more": {"$ref": "#/$defs/list"},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"list": {"type": "array", "items": {"type": "boolean"}}},
}
SCHEMAS = {"f": SCHEMA, "g": {}}
FULL = Call("f", json.dumps({"text": "x\n<y>", "count": 3, "kind": "a", "more": [True]}))
BARE = Call("g", "{}")

XML_FULL = (
    "<tool_call>\n<function=f>\n<parameter=text>\nx\n<y>\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
    "<parameter=kind>\na\n</parameter>\n<parameter=more>\n[true]\n</parameter>\n</function>\n</tool_call>"
)
XML_BARE = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
HERMES_FULL = f'<tool_call>\n{{"name": "f", "arguments": {FULL.arguments}}}\n</tool_call>'
ONE, OTHER = f'{{"name": "f", "arguments": {FULL.arguments}}}', '{"name": "g", "arguments": {}}'
LLAMA_ONE, LLAMA_OTHER = ONE.replace("arguments", "parameters"), OTHER.replace("arguments", "parameters")

START, CH, MSG = "<|start|>assistant", "<|channel|>", "<|message|>"
THINKS, SAYS = f"{CH}analysis{MSG}Two.<|end|>{START}", f"{CH}final{MSG}Four."
CALLS = f" to=functions.f{CH}commentary <|constrain|>json{MSG}{FULL.arguments}"
Part = str | Thought | Call

DEEP = "<｜tool▁calls▁begin｜>{}{}<｜tool▁calls▁end｜>"
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{FULL.arguments}\n```<｜tool▁call▁end｜>"
V3_BARE = "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{FULL.arguments}<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}{}<|tool_calls_section_end|>"
KIMI_ONE = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{FULL.arguments}<|tool_call_end|>"
KIMI_OTHER = "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
GLM = (
    "<tool_call>f\n"
    + "\n".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>"
        for name, value in (("text", "x\n<y>"), ("count", 3), ("kind", "a"), ("more", "[true]"))
    )
    + "\n</tool_call>"
)
GEMMA = '<|tool_call>call:f{text: <|"|>x\n<y><|"|>, count: 3, kind: <|"|>a<|"|>, more: [true]}<tool_call|>'

# Form, whether names stand before arguments, a text, and what comes of it.
READ: list[tuple[CallForm, str, list[Part]]] = [
    ("hermes", "plain", ["plain"]),
    ("hermes", " <tool", [" <tool"]),
    ("hermes", "a < b\n", ["a < b\n"]),
    ("hermes", f"Well.\n{HERMES_FULL}\n{HERMES_FULL}\n", ["Well.", FULL, FULL]),
    ("hermes", f"{HERMES_FULL} done", [FULL, " done"]),
    ("hermes", '<tool_call>\n{"name": "g"}\n</tool_call>', [BARE]),
    ("hermes", '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', [BARE]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "g"}</tool_call>', [BARE]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}, "id": {"a": "}"}}</tool_call>', [BARE]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"text":"</tool_call>"}}</tool_call>', [Call("f", '{"text":"</tool_call>"}')]),
    ("hermes", "x <tool_call>no json</tool_call> y", ["x <tool_call>no json</tool_call> y"]),
    ("hermes", 'x <tool_call>{"name": 3}</tool_call>', ['x <tool_call>{"name": 3}</tool_call>']),
    ("hermes", 'x <tool_call>{"name": "f"', ['x <tool_call>{"name": "f"']),
    ("hermes", 'x <tool_call>{"name": "f", "arguments": ', ['x <tool_call>{"name": "f", "arguments": ']),
    # What is broken behind the beginning of the arguments was told before.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "a', [Call("f", '{"text": "a')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": 1</tool_call> y', [Call("f", '{"text": 1'), " y"]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}</tool_call> y', [BARE, " y"]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}} so</tool_call>', [BARE, " so</tool_call>"]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}\n</tool', [BARE]),
    ("qwen3_coder", f"Well.\n{XML_FULL}\n{XML_BARE}\n", ["Well.", FULL, BARE]),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>3</parameter><parameter=count>x</parameter></function></tool_call>",
     [Call("f", '{"text": "3", "count": "x"}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\nno\n</function>\n</tool_call>!",
     ["<tool_call>\n<function=f>\nno\n</function>\n</tool_call>!"]),
    ("qwen3_coder", XML_BARE[:-1], [BARE]),
    ("qwen3_coder", XML_BARE[:-20], [XML_BARE[:-20]]),
    # The opening mark is absent, the function's end is absent, values hold marks.
    ("qwen3_coder", f"I look.\n\n{XML_FULL.removeprefix('<tool_call>')}", ["I look.", FULL]),
    ("qwen3_coder", XML_FULL.replace("</function>\n", ""), [FULL]),
    ("qwen3_coder", XML_FULL.replace("<y>", "echo '</tool_call>'"),
     [Call("f", FULL.arguments.replace("<y>", "echo '</tool_call>'"))]),
    ("qwen3_coder", XML_FULL.replace("<y>", "</parameter> and </function> <z>\n</parameter>\n-"),
     [Call("f", FULL.arguments.replace("<y>", "</parameter> and </function> <z>\\n</parameter>\\n-"))]),
    # Prose that mentions a mark, and tools that were not sent.
    ("qwen3_coder", "Write <tool_call> and <function=f> so.", ["Write <tool_call> and <function=f> so."]),
    ("qwen3_coder", XML_BARE.replace("=g", "=h"), [XML_BARE.replace("=g", "=h")]),
    ("hermes", "Write <tool_call> before it.", ["Write <tool_call> before it."]),
    ("hermes", HERMES_FULL.replace('"f"', '"h"'), [HERMES_FULL.replace('"f"', '"h"')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),  # it requires arguments
    ("hermes", '<tool_call>{"name": "g", "age": 30}</tool_call>', ['<tool_call>{"name": "g", "age": 30}</tool_call>']),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', [BARE]),
    ("hermes", f"<tool_call>[{OTHER}, {OTHER}]</tool_call>!", [BARE, BARE, "!"]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}}</tool_call>!', [BARE, "!"]),
    ("mistral", "[TOOL_CALLS]h[ARGS]{}", ["[TOOL_CALLS]h[ARGS]{}"]),
    ("mistral", "[TOOL_CALLS] is the mark", ["[TOOL_CALLS] is the mark"]),
    ("llama3_json", '{"name": "Alice", "age": 30}', ['{"name": "Alice", "age": 30}']),
    ("llama3_json", '{"name": "g", "age": 30}', ['{"name": "g", "age": 30}']),
    ("llama3_json", '{"name": "Alice", "parameters": {}}', ['{"name": "Alice", "parameters": {}}']),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {OTHER}]", [FULL, BARE]),
    ("mistral", f"Well. [TOOL_CALLS]f[ARGS]{FULL.arguments}[TOOL_CALLS]g[CALL_ID]abc123[ARGS]{{}}", ["Well.", FULL, BARE]),
    ("mistral", "[TOOL_CALLS] [3] no", ["[TOOL_CALLS] [3] no"]),
    ("mistral", "[TOOL_CALLS]f is", ["[TOOL_CALLS]f is"]),
    ("mistral", f"[TOOL_CALLS][{ONE}", [FULL]),
    ("mistral", f"[TOOL_CALLS][{ONE}, 3] y", [FULL, ", 3] y"]),
    ("mistral", f'[TOOL_CALLS][{ONE}, {{"name": "g"}}, {OTHER}]', [FULL, BARE, BARE]),
    ("mistral", f'[TOOL_CALLS][{{"a": 1}}, {OTHER}]', [f'[TOOL_CALLS][{{"a": 1}}, {OTHER}]']),
    ("mistral", f"[TOOL_CALLS]{OTHER} y", [BARE, " y"]),
    ("llama3_json", f"{LLAMA_ONE}", [FULL]),
    ("llama3_json", f"\n {LLAMA_ONE}; {LLAMA_OTHER};", [FULL, BARE]),
    ("llama3_json", f"<|python_tag|>{LLAMA_OTHER}", [BARE]),
    ("llama3_json", f"Well. <|python_tag|>{LLAMA_OTHER}", ["Well.", BARE]),
    ("llama3_json", '{"answer": "} is \\" here"} and', ['{"answer": "} is \\" here"} and']),
    ("llama3_json", f"Well. {LLAMA_ONE}", [f"Well. {LLAMA_ONE}"]),
    ("llama3_json", "<|python_tag|>print(3)", ["<|python_tag|>print(3)"]),
    ("llama3_json", '{"name": "f"', ['{"name": "f"']),
    ("llama3_json", f'{LLAMA_ONE}; {LLAMA_OTHER}; {{"a"', [FULL, BARE, '; {"a"']),
    ("harmony", f"{THINKS}{SAYS}", [Thought("Two."), "Four."]),
    ("harmony", f"{THINKS}{CALLS}", [Thought("Two."), FULL]),
    ("harmony", CALLS.replace(f" to=functions.f{CH}commentary", f"{CH}commentary to=functions.f").replace(" <|constrain|>", " "),
     [FULL]),
    ("harmony", f"{CALLS}<|call|>{START}{SAYS}", [FULL, "Four."]),
    ("harmony", f"{CH}commentary{MSG}Well.<|end|>{START}{CALLS}", ["Well.", FULL]),
    ("harmony", f"{THINKS}{CH}analysis{MSG}And two.<|end|>{START}{CH}commentary{MSG}Well.<|end|>{START}{SAYS}",
     [Thought("Two.\n\nAnd two."), "Well.\n\nFour."]),
    ("harmony", f"{START}{SAYS}<|return|>", ["Four."]),
    ("harmony", f"{CH}final <|constrain|>json{MSG}3", ["3"]),
    ("harmony", f"{CH}other{MSG}a", ["a"]),
    ("harmony", f"{CH}analysis to=python code{MSG}a", [Thought("a")]),
    ("harmony", f"{CH}commentary to=browser.open{MSG}a", ["a"]),
    ("deepseek_v3", f"Well.{DEEP.format(V3, V3_BARE)} so", ["Well.", FULL, BARE, " so"]),
    ("deepseek_v3", DEEP.format(V31, ""), [FULL]),
    ("deepseek_v3", DEEP.format(V31, "")[:-10], [FULL]),
    ("kimi_k2", f"Well. {KIMI.format(KIMI_ONE, KIMI_OTHER)}", ["Well.", FULL, BARE]),
    ("kimi_k2", KIMI.format(KIMI_ONE, "no"), [FULL, "no<|tool_calls_section_end|>"]),
    ("glm45", f"Well.\n{GLM}\n<tool_call>g\n</tool_call>", ["Well.", FULL, BARE]),
    ("glm45", "<tool_call>f<arg_key>text</arg_key><arg_value>3</arg_value></tool_call>!", [Call("f", '{"text": "3"}'), "!"]),
    ("gemma4", f"Well.{GEMMA}<|tool_call>call:g{{}}<tool_call|>", ["Well.", FULL, BARE]),
    ("gemma4", "<start_function_call>call:f{text:<escape>a, b: {c<escape>,count:-3}<end_function_call>",
     [Call("f", '{"text":"a, b: {c","count":-3}')]),
    # Broken or cut: nothing is lost.
    ("harmony", "hello", ["hello"]),
    ("harmony", f" top {SAYS}", [" top \n\nFour."]),
    ("harmony", f"{THINKS[:-len(START) - 7]}{SAYS}", [Thought("Two."), "Four."]),
    ("harmony", f"{CH}analysis", []),
    ("harmony", f"{CH}ana", []),
    ("harmony", f"{CH}final Hello there<|end|>", ["Hello there"]),
    ("harmony", f"{CH}Hello there", ["Hello there"]),
    ("harmony", f"{CH}analysis {'so ' * 200}", [Thought(f"{'so ' * 200}")]),
    ("harmony", f"{CH}final{MSG}a <|cha", ["a <|cha"]),
    ("harmony", f"{CH}final{MSG}a {MSG} <|constrain|>b", [f"a {MSG} <|constrain|>b"]),
    ("harmony", f"{CALLS[:-20]}", [Call("f", FULL.arguments[:-20])]),
    ("harmony", " to=functions.f", []),
]  # fmt: skip
BROKEN: list[tuple[CallForm, str]] = [  # text that stays text
    ("deepseek_v3", DEEP.format(V3, "")[:60]),
    ("deepseek_v3", DEEP.format(V3.replace('"count"', "count"), "")),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> is the mark"),
    ("kimi_k2", KIMI.format(KIMI_ONE.replace("functions.f", "functions.h"), "")),
    ("kimi_k2", KIMI.format(KIMI_ONE[:-30], "")),
    ("glm45", "<tool_call>f\n<arg_key>text</arg_key> x</tool_call>"),
    ("glm45", GLM[:-12]),
    ("glm45", "Write <tool_call> and so on."),
    ("gemma4", GEMMA.replace("call:f", "call:h")),
    ("gemma4", GEMMA[:-14]),
    ("gemma4", "<|tool_call>call:f{text:x y}<tool_call|>"),
]
READ += [(form, text, [text]) for form, text in BROKEN]


def read(form: CallForm, pieces: list[str], hidden: bool = False, most: int | None = None) -> list[Part]:
    """What comes of a text, neighbouring pieces joined."""
    made = HarmonyReader(None, True, most) if form == "harmony" else ToolCallReader(form, most, SCHEMAS, hidden)
    found: list[Any] = list(itertools.chain(*map(made.push, pieces), made.finish()))
    assert all(part if isinstance(part, str | Call) else part.text for part in found), "an empty piece"
    calls, joined = iter(whole_calls(found)), list[Part]()
    for part in found:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        elif joined and isinstance(part, Thought) and isinstance(joined[-1], Thought):
            joined[-1] = Thought(joined[-1].text + part.text)
        elif not isinstance(part, Arguments):
            joined.append(next(calls) if isinstance(part, Call) else part)
    return joined


@pytest.mark.parametrize(("form", "text", "parts"), READ)
def test_calls_are_read(form: CallForm, text: str, parts: list[Part]) -> None:
    assert read(form, [text]) == parts
    assert read(form, list(text)) == parts


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolCallReader("hermes")
    steps = ['<tool_call>{"name": "f", "argu', 'ments": ', '{"a', '": 1', "}}</tool", "_call>"]
    assert [reader.push(step) for step in steps] == [
        [], [], [Call("f", ""), Arguments('{"a')], [Arguments('": 1')], [Arguments("}")], [],
    ]  # fmt: skip


PIECES = [*(text for _, text, _ in READ), *(mark for marks in CALL_MARKS.values() for mark in marks), " ", ";", "{", "[", "x"]


@given(st.sampled_from(list(CALL_MARKS)), st.lists(st.sampled_from(PIECES), max_size=4), st.data())
def test_where_a_text_is_cut_does_not_matter(form: CallForm, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert read(form, pieces) == read(form, [text])
    if form != "harmony" and not any(isinstance(part, Call) for part in read(form, [text])):
        assert read(form, [text]) == ([text] if text else [])


def test_no_more_calls_than_asked_for() -> None:
    twice: list[tuple[CallForm, str]] = [("hermes", HERMES_FULL * 2), ("mistral", f"[TOOL_CALLS] [{ONE}, {OTHER}]")]
    for form, text in (*twice, ("harmony", f"{CALLS}{START}{CALLS}")):
        assert read(form, list(text), most=1) == [FULL]


def test_much_that_is_no_call() -> None:
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert read("hermes", [text]) == [text]


def test_a_hidden_mark_is_no_text() -> None:
    assert read("llama3_json", ["<|python_tag|>print(3)"], hidden=True) == ["print(3)"]
    assert read("mistral", ["a [TOOL_CALLS]b"], hidden=True) == ["a b"]


def test_ids_follow_from_the_place_of_a_call() -> None:
    places = list(itertools.product(("chatcmpl-7/0", "chatcmpl-7/1", "chatcmpl-8/0"), range(3)))
    ids = [call_id("hermes", *place) for place in places]
    assert ids == [call_id("hermes", *place) for place in places] and len(set(ids)) == 9 and ids[0].startswith("call_")
    short = {call_id("mistral", *place) for place in places}  # the only ids that Mistral's templates take
    assert len(short) == 9 and all(len(one) == 9 and one.isalnum() for one in short)


MARKED = [mark for marks in CALL_MARKS.values() for mark in marks]


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Of bytes, with marks as tokens of their own, special where models have them so; and without any."""
    made = build_tokenizer()
    if request.param == "tokens":
        tokens = sorted({*MARKED, "<think>", "</think>"})
        made.add_tokens([AddedToken(mark, special=mark[0] == "[" or "|" in mark, normalized=False) for mark in tokens])
    return made


# Form, whether names stand before arguments, texts of the language where a call must come, and texts that are not.
BOUND: list[tuple[CallForm, bool, list[str], list[str]]] = [
    ("hermes", False, [HERMES_FULL, f"{HERMES_FULL}\n{HERMES_FULL}"], ["x", HERMES_FULL.replace("3", '"3"'), "<tool_call>{}"]),
    ("qwen3_coder", False, [XML_FULL, XML_BARE, f"{XML_FULL}\n{XML_BARE}"],
     [XML_FULL.replace("3", "x"), XML_FULL.replace("=f>", "=h>"), XML_FULL.replace("\na\n", "\nc\n"), f"x{XML_BARE}",
      "<tool_call>\n<function=f>\n</function>\n</tool_call>"]),
    ("mistral", False, [f"[TOOL_CALLS] [{ONE}, {OTHER}]", f"[TOOL_CALLS][{ONE}]"],
     [f"[{ONE}]", f"[TOOL_CALLS]{ONE}", "[TOOL_CALLS][]"]),
    ("mistral", True, [f"[TOOL_CALLS]f[ARGS]{FULL.arguments}[TOOL_CALLS]g[ARGS]{{}}"],
     [f"[TOOL_CALLS][{ONE}]", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}"]),
    ("deepseek_v3", False, [DEEP.format(V3, V3_BARE), DEEP.format(V31, ""), DEEP.format(V31, V31.replace("｜>f<", "｜>f<"))],
     [V3, DEEP.format("", ""), DEEP.format(V3.replace("3,", '"3",'), ""), DEEP.format(V31, V3), DEEP.format(V31, "")[:-9]]),
    ("kimi_k2", False, [KIMI.format(KIMI_ONE, KIMI_OTHER), KIMI.format(KIMI_OTHER, "")],
     [KIMI_ONE, KIMI.format("", ""), KIMI.format(KIMI_ONE.replace(".f:", ".h:"), ""),
      KIMI.format(KIMI_ONE.replace(":0", ""), "")]),
    ("glm45", False, [GLM, f"{GLM}\n<tool_call>g\n</tool_call>"],
     [GLM.replace(">3<", ">x<"), GLM.replace("call>f", "call>h"), GLM.replace(">a<", ">c<"), "<tool_call>f\n</tool_call>"]),
    ("llama3_json", False, [LLAMA_ONE, f"{LLAMA_ONE}; {LLAMA_OTHER}"], [ONE, "x", f"x {LLAMA_ONE}", LLAMA_ONE.replace("3", "x")]),
]  # fmt: skip


def accepts(tokenizer: PreTrainedTokenizerFast, grammar: str, text: str) -> bool:
    """Whether a text, spelled with the tokenizer's own tokens, is of the language."""
    end = int(tokenizer.eos_token_id)
    matcher = Grammars(tokenizer, len(tokenizer), [end]).start(grammar)
    return all(matcher.push(token) for token in [*tokenizer.encode(text), end]) and matcher.fault is None


@pytest.mark.parametrize(("form", "has_names", "good", "bad"), BOUND)
def test_calls_are_bound(
    tokenizer: PreTrainedTokenizerFast, form: CallForm, has_names: bool, good: list[str], bad: list[str]
) -> None:
    marks = CallMarks(form, has_names, added_tokens(tokenizer), bracketed_tokens(tokenizer))
    offered = [Offered("f", SCHEMA), Offered("g", {"type": "object", "additionalProperties": False})]
    required = call_grammar(offered, True, False, marks)
    free = call_grammar(offered, False, False, marks)
    single = call_grammar(offered, True, True, marks)
    for text in good:
        assert accepts(tokenizer, required, text), text
        assert accepts(tokenizer, free, text), text
        calls = [part for part in read(form, [text]) if isinstance(part, Call)]
        assert calls and "".join(part for part in read(form, [text]) if isinstance(part, str)) == ""
        assert all(call in (FULL, BARE) for call in calls)
        assert accepts(tokenizer, single, text) is (len(calls) == 1), text
    for text in bad:
        assert not accepts(tokenizer, required, text), text
    for text in ("", "No call at all.", "What? <think> so"):
        assert accepts(tokenizer, free, text), text
        assert not accepts(tokenizer, required, text), text


def test_any_arguments_where_a_tool_has_no_schema(tokenizer: PreTrainedTokenizerFast) -> None:
    marks = CallMarks("qwen3_coder", False, added_tokens(tokenizer), bracketed_tokens(tokenizer))
    grammar = call_grammar([Offered("f", None)], True, True, marks)
    assert accepts(tokenizer, grammar, XML_FULL) and not accepts(tokenizer, grammar, XML_FULL.replace("=text>", ">"))


@pytest.mark.parametrize(
    ("template", "form", "has_names"),
    [
        ("{{ tools }}<tool_call>{}</tool_call>", "hermes", False),
        ("{{ tools }}<tool_call><function=a><parameter=b>", "qwen3_coder", False),
        ("{{ tools }}<tool_call>a<arg_key>b", None, False),
        ("{{ tools }}<tool_call>a<arg_key>b</arg_key><arg_value>", "glm45", False),
        ("{{ tools }}<｜tool▁calls▁begin｜>a<｜tool▁sep｜>", "deepseek_v3", False),
        ("{{ tools }}<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi_k2", False),
        ("{{ tools }}<|tool_call>call:f{}<tool_call|>", "gemma4", False),
        ("{{ tools }}<start_function_call>call:f{}", "gemma4", False),
        ("{{ tools }}[TOOL_CALLS] [", "mistral", False),
        ("{{ tools }}[TOOL_CALLS]a[ARGS]{", "mistral", True),
        ("{{ tools }}<|python_tag|>", "llama3_json", False),
        ("{{ messages }}", None, False),
        (None, None, False),
    ],
)
def test_the_form_is_found_in_the_template(template: str | None, form: CallForm | None, has_names: bool) -> None:
    made = build_tokenizer()
    made.chat_template = template
    made.add_tokens(["[TOOL_CALLS]"], special_tokens=True)
    found = ChatFormat.of(made)
    assert (found.calls, found.has_call_names) == (form, has_names)
    assert found.hidden == ({"[TOOL_CALLS]"} if form == "mistral" else set())
    made.chat_template = {"default": "{{ messages }}", "tool_use": template or ""}
    assert ChatFormat.of(made).calls == form


ARGUMENTS = '{"at": "é"}'
SPOKEN: list[tuple[CallForm, list[str | AddedToken]]] = [
    ("mistral", [AddedToken("[TOOL_CALLS]", special=True), f'[{{"name": "look", "arguments": {ARGUMENTS}}}]']),
    ("mistral", [AddedToken("[TOOL_CALLS]", special=True), "look", AddedToken("[ARGS]", special=True), ARGUMENTS]),
    ("llama3_json", [AddedToken("<|python_tag|>", special=True), f'{{"name": "look", "parameters": {ARGUMENTS}}}']),
    ("qwen3_coder", ["<tool_call>", "\n<function=look>\n<parameter=at>\né\n</parameter>\n</function>\n", "</tool_call>"]),
]
LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["é"]}}, "required": ["at"]},
}
LOOK["parameters"] |= {"additionalProperties": False}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "said"), SPOKEN)
def test_calls_of_a_served_model(circle_model: Path, tmp_path: Path, form: CallForm, said: list[str | AddedToken]) -> None:
    words = "".join(map(str, said)) + ("<parameter=" if form == "qwen3_coder" else "")
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments.at }}/{{ call.id }}{% endfor %}{% endfor %}>"
    )
    thinks = [AddedToken("[THINK]", special=True), "So. ", AddedToken("[/THINK]", special=True)]
    template += "{# " + words + "[THINK] [/THINK] #}"
    with speaking(save_saying(circle_model, tmp_path / "speaking", [*thinks, *said], template)) as speaker:
        (card,) = httpx.get(f"{speaker.url}/v1/models", timeout=60).json()["data"]
        assert (card["tool_calls"], card["reasoning"]) == (form, ["[THINK]", "[/THINK]"])
        tool: Any = {"type": "function", "function": LOOK}
        for speculation, choice in itertools.product(({}, {"max_draft_tokens": 0}), ("auto", "required")):
            options: dict[str, Any] = {"tools": [tool], "tool_choice": choice, "extra_body": {"speculation": speculation}}
            options |= {"parallel_tool_calls": False, "max_tokens": 300}
            (told,) = speaker.ask(**options).choices
            assert (told.message.reasoning, told.message.content, told.finish_reason) == ("So.", None, "tool_calls")
            (call,) = told.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "é"})
            assert speaker.streamed(**options)[0] == ("So.", "", [("look", call.function.arguments)], "tool_calls")
        plain = speaker.ask(max_tokens=300).choices[0].message
        assert (plain.reasoning, plain.tool_calls) == ("So.", None) and "look" in plain.content
        answered = {"role": "tool", "tool_call_id": call.id, "content": "blue"}
        assert speaker.ask(messages=[*MESSAGES, told.message.model_dump(), answered], tools=[tool]).usage.prompt_tokens > 0
        prompt = speaker.tokenizer.decode(speaker.engine.jobs[-1].prompt_ids)
        assert f"[assistant]é/{call.id}[tool]blue>" in prompt


VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", '"42"'),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"), ({"type": ["string", "null"]}, "None", "null"),
    ({"type": "string"}, "True", '"True"'), ({"type": "boolean"}, "True", "true"), ({"type": "integer"}, "140.0", "140"),
    ({"type": "integer"}, "1e3", "1000"), ({"type": "integer"}, "1.5", '"1.5"'),
    ({"type": "integer"}, "12345678901234567890", "12345678901234567890"), ({"type": "integer"}, "007", '"007"'),
    ({"type": "number"}, "NaN", '"NaN"'), ({}, "NaN", '"NaN"'), ({}, "1e999", '"1e999"'), ({}, "[1, NaN]", '"[1, NaN]"'),
    ({}, "null", "null"), ({}, "\ud83d", '"\\ud83d"'), ({"type": "array"}, "['a', True, None]", '["a", true, null]'),
    ({"type": "array"}, '["\\ud83d"]', '["\\ud83d"]'), ({"type": "object"}, "{'a': float}", "\"{'a': float}\""),
    ({"enum": ["1", 2]}, "1", '"1"'), ({"enum": ["1", 2]}, "2", "2"), ({"const": True}, "True", '"True"'),
    ({"$ref": "#/$defs/n"}, "5", "5"), ({"allOf": [{"$ref": "#/$defs/s"}]}, "5", '"5"'), ({"$ref": "#/$defs/loop"}, "5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "json_text"), VALUES)
def test_an_unquoted_value_has_the_type_of_its_schema(schema: dict[str, Any], text: str, json_text: str) -> None:
    root = {"$defs": {"n": {"type": "integer"}, "s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    found = value_json(text, schema, root)
    assert found == json_text
    json.loads(found, parse_constant=lambda name: pytest.fail(name))
    found.encode()


def test_harmony_calls_only_functions_that_were_sent() -> None:
    text = " to=functions.look<|channel|>commentary<|message|>{}"
    for names, found in (
        ([], [Call("look", ""), Arguments("{}")]),
        (["look"], [Call("look", ""), Arguments("{}")]),
        (["f"], ["{}"]),
    ):
        reader = HarmonyReader(None, True, names=names)
        assert [*reader.push(text), *reader.finish()] == found


def tag_of(*triggers: str, **more: Any) -> dict[str, Any]:
    """Tags of a whole number, of a word, and of text up to the end."""
    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tags = [
        {"begin": "<f=a>", "content": number, "end": "</f>"},
        {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[x/]+"}, "end": "</f>"},
        {"begin": "<tool_call>\n", "content": {"type": "any_text"}, "end": "</tool_call>"},
    ]
    return {"format": {"type": "triggered_tags", "triggers": list(triggers or ("<f=", "<tool_call>")), "tags": tags, **more}}


OLDER = {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]}
ONLY = {"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}, tag_of()["format"]]}
A_LIST = {"type": "tags_with_separator", "tags": tag_of()["format"]["tags"][:2], "separator": ", "}
TAGGED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OLDER, ["", "f <f", "a <f=a>12</f> b<f=a>3</f>"], ["<f=", "<f=a>x</f>", "<f=a>1", "<f=b>x</f>"]),
    (tag_of(), ["", "<tool <f=b>x/</f> <tool_call>\nany <f= text</tool_call>\n<f=a>1</f>"],
     ["<tool_call>x</tool_call>", "<f=b>y</f>", "<tool_call>\n", "<f=a>1</f><f="]),
    (tag_of(at_least_one=True), ["<f=a>1</f>", "<f=a>1</f> and <f=b>x</f>"], ["", "x<f=a>1</f>"]),
    (tag_of(stop_after_first=True), ["x", "x<f=a>1</f>"], ["<f=a>1</f>x"]),
    ({"format": ONLY}, ["So: ", "So: x<f=a>1</f>"], ["", "x", "So: <f="]),
    ({"format": A_LIST}, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>x</f>"], ["x", "<f=a>1</f>,", "<f=a>1</f><f=b>x</f>"]),
    ({"format": {"type": "or", "elements": [A_LIST | {"at_least_one": True}, {"type": "const_string", "value": "none"}]}},
     ["none", "<f=b>/</f>"], ["", "x"]),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "good", "bad"), TAGGED)
def test_structural_tags(tokenizer: PreTrainedTokenizerFast, tag: dict[str, Any], good: list[str], bad: list[str]) -> None:
    marks = CallMarks("hermes", False, added_tokens(tokenizer), bracketed_tokens(tokenizer))
    grammar = structural_grammar(tag, marks)
    assert structural_grammar(json.dumps(tag), marks) == grammar
    for text in good:
        assert accepts(tokenizer, grammar, text), text
    for text in bad:
        assert not accepts(tokenizer, grammar, text), text


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ("{", "JSON"), ([], "an object"), ({}, "structures"), ({"format": {"type": "music"}}, "music"), ('"\\ud83d"', "JSON"),
        (tag_of("<g="), r"triggers\[0\]"), (tag_of("<f=", "<f=a", "<tool"), r"triggers\[0\]"), (tag_of(""), r"triggers\[0\]"),
        (tag_of("<f="), "none of the triggers"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, A_LIST]}}, r"elements\[0\]: any_text"),
        ({"format": {"type": "tag", "begin": "a", "content": tag_of()["format"], "end": "b"}}, "content: triggered_tags"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "not"),
        ({"format": {"type": "json_schema", "json_schema": {"const": 9007199254740993}}}, "format: "),
        (OLDER | {"triggers": []}, "empty"),
        ({"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}}}, "format.end must be a string"),
    ],
)  # fmt: skip
def test_a_faulty_structural_tag_names_its_part(tag: Any, told: str) -> None:
    with pytest.raises(GrammarError, match=told):
        structural_grammar(tag, CallMarks())
