"""Grammars that enforce ``tool_choice`` and ``strict`` tools in the model's own format of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.http.answers.tool_calls import CLOSING
from outrider.cluster.http.types.chat import NamedTool, Tool
from outrider.cluster.http.types.structural_tag import CallMarks, structural_grammar
from outrider.engine.errors import RequestError
from outrider.engine.text.chat_format import CALL_MARKS, CallForm
from outrider.engine.text.grammar import (
    HARMONY_TEXT,
    GrammarError,
    harmony_type,
    json_grammar,
    json_rule,
    lark_grammar,
    lenient_schema,
)

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACE = r"/[ \n\r\t]{0,4}/"  # bounded, as whitespace within JSON is


@dataclass(frozen=True, slots=True)
class Offered:
    """Tool that the response may call."""

    name: str
    arguments: dict[str, Any] | None  # JSON schema; None allows any object
    left_out: Sequence[str] = ()  # paths of the keywords of the tool's schema that are not enforced


def call_grammar(tools: Sequence[Offered], required: bool, single: bool, marks: CallMarks | None = None) -> str:
    """Return the grammar of text with tool calls, for ``SamplingParams.grammar``. Raises GrammarError for too large schemas.

    Example: for the tool ``look`` without parameters, required and single, the text ``<tool_call>{"name": "look", "arguments":
    {}}</tool_call>`` is one of the language, with space where JSON may have it. With neither, so is any text before, between and
    behind such calls, as long as it does not hold ``<tool_call>``.

    ``required``: only calls, at least one. ``single``: at most one.
    """
    marks = marks or CallMarks()
    if marks.form == "harmony":
        return lark_grammar("\n".join(_harmony_rules(tools, required, marks.tokens)))
    opening = CALL_MARKS[marks.form][0]
    if marks.form in _TAGS:
        tags = _TAGS[marks.form](tools, single)
        kind, more = ("tags_with_separator", {"separator": "\n"}) if required else ("triggered_tags", {"triggers": [opening]})
        is_last = single or marks.form in _SECTIONS
        form = {"type": kind, "tags": tags, "at_least_one": required, "stop_after_first": is_last, **more}
        return structural_grammar({"format": form}, marks)
    is_token = opening in marks.tokens
    others = [f"<[{marks.tokens[token]}]>" for token in marks.shown if token not in CALL_MARKS[marks.form]]
    if marks.form == "llama3_json":
        call = "call" if single else 'call (SPACE ";" SPACE call)*'
        text = r"/(?s:\s*[^\s{].*)?/" + f" & ~/(?s:.*){re.escape(opening)}(?s:.*)/"
        inner = "(TEXT other)* TEXT" if others else "TEXT"
        head = f"<[{marks.tokens[opening]}]>? " if is_token else ""
        rules = [f"start: calls{'' if required else ' | text'}", f"calls: {head}{call}"]
        rules += [] if required else [f"text: {inner}", f"TEXT: {text}"]
    elif required:
        rules = ["start: mark call" if single else "start: mark call (SPACE mark call)*"]
    else:
        ahead = f"head call | TEXT <[{marks.tokens[opening]}]> call" if is_token else "head call"
        rest = "TEXT other | " if others else ""
        rules = [
            f"start: free* ({ahead})? free* TEXT" if single else f"start: ({rest}{ahead})* TEXT",
            "free: TEXT other" if others else 'free: ""',
            f"head[suffix={json.dumps(opening)}]: /(?s:.*)/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(opening)}(?s:.*)/",
        ]
    if others and not required:
        rules.append("other: " + " | ".join(others))
    rules += [f"mark: {marks.rule(opening)}", f"SPACE: {_SPACE}", "tool: " + _either("tool", len(tools))]
    rules += _CALLS[marks.form](marks, single)
    has_names = marks.form == "mistral" and marks.has_names
    for index, tool in enumerate(tools):
        key = json.dumps("parameters" if marks.form == "llama3_json" else "arguments")
        name = json.dumps(tool.name if has_names else json.dumps(tool.name))
        between = "args" if has_names else f'SPACE "," SPACE {json.dumps(key)} SPACE ":"'
        rules.append(f"tool_{index}: {name} {between} SPACE arguments_{index}")
        rules.append(f"arguments_{index}: {json_rule(tool.arguments or _ANY_OBJECT)}")
    return lark_grammar("\n".join(rules))


_OBJECT = '"{" SPACE "\\"name\\"" SPACE ":" SPACE tool SPACE "}"'


def _hermes_calls(marks: CallMarks, _: bool) -> list[str]:
    return [f"end: {marks.rule(CLOSING)}", f"call: SPACE {_OBJECT} SPACE end"]


def _mistral_calls(marks: CallMarks, single: bool) -> list[str]:
    if marks.has_names:
        return [f"args: {marks.rule('[ARGS]')}", "call: tool"]
    more = "" if single else ' (SPACE "," SPACE one)*'
    return [f"one: {_OBJECT}", f'call: SPACE "[" SPACE one{more} SPACE "]"']


def _llama_calls(_: CallMarks, __: bool) -> list[str]:
    return [f"call: {_OBJECT}"]


_CALLS: dict[CallForm, Callable[[CallMarks, bool], list[str]]] = {
    "hermes": _hermes_calls, "mistral": _mistral_calls, "llama3_json": _llama_calls,
}  # fmt: skip


def _tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema or _ANY_OBJECT}


def _list(tags: Sequence[Any], separator: str, single: bool) -> dict[str, Any]:
    kind = {"type": "tags_with_separator", "at_least_one": True, "stop_after_first": single}
    return {**kind, "tags": tags, "separator": separator}


def _deepseek_tags(tools: Sequence[Offered], single: bool) -> list[dict[str, Any]]:
    first, last, begin, end, separator = CALL_MARKS["deepseek_v3"]
    blocks = [_tag(f"{begin}function{separator}{tool.name}\n```json\n", _json(tool.arguments), f"\n```{end}") for tool in tools]
    newer = [_tag(f"{begin}{tool.name}{separator}", _json(tool.arguments), end) for tool in tools]
    either = {"type": "or", "elements": [_list(blocks, "\n", single), _list(newer, "", single)]}
    return [_tag(first, either, last)]


def _kimi_tags(tools: Sequence[Offered], single: bool) -> list[dict[str, Any]]:
    first, last, begin, end, separator = CALL_MARKS["kimi_k2"]
    calls = []
    for tool in tools:
        parts = [{"type": "regex", "pattern": "[0-9]{1,4}"}, _text(separator), _json(tool.arguments)]
        calls.append(_tag(f"{begin}functions.{tool.name}:", {"type": "sequence", "elements": parts}, end))
    return [_tag(first, _list(calls, "", single), last)]


def _qwen_tags(tools: Sequence[Offered], _: bool) -> list[dict[str, Any]]:
    end = f"</function>\n{CLOSING}"
    parameter = ("<parameter=", ">\n", "\n</parameter>\n")
    return [_tag(f"<tool_call>\n<function={tool.name}>\n", _parameters(tool, *parameter), end) for tool in tools]


def _glm_tags(tools: Sequence[Offered], _: bool) -> list[dict[str, Any]]:
    parameter = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    return [_tag(f"<tool_call>{tool.name}\n", _parameters(tool, *parameter), CLOSING) for tool in tools]


def _parameters(tool: Offered, before: str, behind: str, end: str) -> dict[str, Any]:
    """Return the format of unquoted parameters in the order of the schema; ``before`` and ``behind`` enclose each name."""
    # String values are unquoted, and of their schema only `enum` is enforced; other values are JSON.
    schema = tool.arguments or _ANY_OBJECT
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts: list[dict[str, Any]] = [_text("")]
    for name, value in schema.get("properties", {}).items():
        texts = value.get("enum", ()) if isinstance(value, dict) else ()
        content = {"type": "json_schema", "json_schema": {**value, **definitions} if isinstance(value, dict) else {}}
        if texts and all(isinstance(text, str) for text in texts):
            content = {"type": "or", "elements": [_text(text) for text in texts]}
        elif isinstance(value, dict) and value.get("type") == "string":
            content = {"type": "any_text"}
        part = _tag(f"{before}{name}{behind}", content, end)
        parts.append(part if name in schema.get("required", ()) else {"type": "or", "elements": [part, _text("")]})
    if "properties" not in schema and schema.get("additionalProperties") is not False:
        named = [{"type": "regex", "pattern": r"[^<>\n]+"}, _text(behind), {"type": "any_text"}]
        some = _list([_tag(before, {"type": "sequence", "elements": named}, end)], "", False)
        parts.append(some | {"at_least_one": False})
    return {"type": "sequence", "elements": parts}


_TAGS: dict[CallForm, Callable[[Sequence[Offered], bool], list[dict[str, Any]]]] = {
    "deepseek_v3": _deepseek_tags, "kimi_k2": _kimi_tags, "qwen3_coder": _qwen_tags, "glm45": _glm_tags,
}  # fmt: skip
_SECTIONS = ("deepseek_v3", "kimi_k2")  # forms with all calls in one tag
BOUND_FORMS = (*_CALLS, *_TAGS, "harmony")  # forms whose calls can be constrained


def _either(name: str, count: int) -> str:
    return " | ".join(f"{name}_{index}" for index in range(count))


def _harmony_rules(tools: Sequence[Offered], required: bool, tokens: Mapping[str, int]) -> list[str]:
    """Return the rules for a harmony message to a function, with its header. The call ends the response."""
    # Unless a call is required, other messages may precede it, or a final message may replace it.
    start, channel, message, end = (f"<[{tokens[mark]}]>" for mark in CALL_MARKS["harmony"][:4])
    rules = ["start: tool" if required else "start: before* (tool | final)", "tool: " + _either("tool", len(tools))]
    if not required:
        rules += [
            f'before: {channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
            f'final: {channel} "final" type {message} TEXT',
            HARMONY_TEXT,
        ]
    for index, tool in enumerate(tools):
        first, second = json.dumps(f" to=functions.{tool.name}"), json.dumps(f"commentary to=functions.{tool.name}")
        header = f'({first} {channel} "commentary" | {channel} {second}) type {message}'
        rules += [f"tool_{index}: {header} arguments_{index}", f"arguments_{index}: {json_rule(tool.arguments or _ANY_OBJECT)}"]
    return [*rules, harmony_type(tokens)]


def tools_grammar(tools: Sequence[Tool], choice: str | NamedTool | None, single: bool, marks: CallMarks) -> str:
    """Return the grammar of the tool calls that a chat requests. ``choice``: ``required`` or a tool, else the model decides.

    Raises RequestError naming a tool whose schema cannot be enforced.
    """
    named, required = _binding(choice)
    bound = _bound(tools, choice)
    for place, tool in bound:
        kind = (tool.arguments or _ANY_OBJECT).get("type", "object")
        if kind != "object":
            raise RequestError(place, f"the arguments of a function are an object, but the schema's type is {kind!r}")
    offered = [tool for _, tool in bound]
    try:
        _check_schemas(offered)
        return call_grammar(offered, required, single or named is not None, marks)
    except (GrammarError, RecursionError) as error:
        for place, tool in bound:  # find the tool at fault; not done before, because each check needs a process
            try:
                json_grammar(tool.arguments or _ANY_OBJECT)
            except GrammarError as reason:
                raise RequestError(place, str(reason)) from reason
        raise RequestError("tools", str(error)) from error


def _check_schemas(offered: Sequence[Offered]) -> None:
    """Raise ``GrammarError`` if a tool's schema cannot be enforced, or all schemas together are too long."""
    rules = [f"tool_{index}: {json_rule(tool.arguments or _ANY_OBJECT)}" for index, tool in enumerate(offered)]
    lark_grammar("\n".join([f"start: {_either('tool', len(offered))}", *rules]))


def faulty_tool(tools: Sequence[Tool], choice: str | NamedTool | None, fault: Callable[[str], str]) -> str | None:
    """Return the field of the first tool whose schema has a ``fault`` (empty if valid); None if only all together have."""
    return next((field for field, tool in _bound(tools, choice) if fault(json_grammar(tool.arguments or _ANY_OBJECT))), None)


def _binding(choice: str | NamedTool | None) -> tuple[str | None, bool]:
    """Return the name of the function that must be called, if any, and whether a call is required."""
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return named, named is not None or choice == "required"


def _bound(tools: Sequence[Tool], choice: str | NamedTool | None) -> list[tuple[str, Offered]]:
    """Return the fields of the tools that may be called, and the tools with the schemas to enforce. Raises ``RequestError``."""
    # A schema is enforced if the tool is strict or a call is required; otherwise the arguments are any object.
    named, required = _binding(choice)
    found = []
    for index, tool in enumerate(tools):
        if named in (None, tool.function.name):
            field = f"tools[{index}].function.parameters"
            try:
                found.append((field, _offered(tool, required)))
            except GrammarError as error:
                raise RequestError(field, str(error)) from error
    return found


def _offered(tool: Tool, required: bool) -> Offered:
    function = tool.function
    if function.parameters is None or not (required or function.strict):
        return Offered(function.name, None)
    if function.strict or function.parameters.get("type", "object") != "object":  # refused later
        return Offered(function.name, function.parameters)
    return Offered(function.name, *lenient_schema(function.parameters))


def left_out(tools: Sequence[Tool], choice: str | NamedTool | None) -> list[str]:
    """Return the paths of the keywords that ``tools_grammar`` does not enforce, as their tools are not strict."""
    return [f"{field}.{path}" for field, tool in _bound(tools, choice) for path in tool.left_out]
