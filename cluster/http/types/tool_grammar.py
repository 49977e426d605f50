"""The grammar of an answer that calls tools: what ``tool_choice`` and ``strict`` bind, in the form of ``tool_calls``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.http.answers.tool_calls import CLOSING, OPENING
from cluster.http.types.chat import NamedTool, Tool
from engine.errors import RequestError
from engine.text.grammar import WHITESPACE, GrammarError, json_grammar, lark_grammar

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACE = r"/[ \n\r\t]{0,4}/"  # bounded as that within JSON is


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the answer may call."""

    name: str
    arguments: dict[str, Any] | None  # JSON schema; None: any object


def call_grammar(tools: Sequence[Offered], required: bool, single: bool, own_tokens: Collection[str] = ()) -> str:
    """Text with calls of tools and of nothing else between the marks, for ``SamplingParams.grammar``.

    Example: for the tool ``look`` without parameters, required and single, the text ``<tool_call>{"name": "look", "arguments":
    {}}</tool_call>`` is one of the language, with space where JSON may have it. With neither, so is any text before, between and
    behind such calls, as long as it does not hold ``<tool_call>``.

    Args:
        tools: at least one, with schemas that can be enforced.
        required: the answer is one call or more, and no text; otherwise text and calls may take turns.
        single: at most one call.
        own_tokens: texts in angle brackets, ``<think>`` and the like, that are tokens of their own: the library tells them from
            the same characters in other tokens, and does not count them as text.

    Raises:
        GrammarError: all schemas together are more than can be enforced.
    """
    opening, closing = json.dumps(OPENING), json.dumps(CLOSING)
    marks = [token for token in (OPENING, CLOSING) if token in own_tokens]
    others = [token for token in own_tokens if token not in (OPENING, CLOSING)]
    if required:
        rules = ["start: mark call" if single else "start: mark call (SPACE mark call)*"]
    else:
        ahead = "head call | TEXT " + OPENING + " call" if OPENING in marks else "head call"
        rest = "TEXT other | " if others else ""
        rules = [
            f"start: free* ({ahead})? free* TEXT" if single else f"start: ({rest}{ahead})* TEXT",
            "free: TEXT other" if others else 'free: ""',
            f"head[suffix={opening}]: /(?s:.*)/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPENING}(?s:.*)/",
            *(["other: " + " | ".join(others)] if others else []),
        ]
    rules += [
        f"mark: {opening}" + (f" | {OPENING}" if OPENING in marks else ""),
        f"end: {closing}" + (f" | {CLOSING}" if CLOSING in marks else ""),
        f"SPACE: {_SPACE}",
        'call: SPACE "{" SPACE "\\"name\\"" SPACE ":" SPACE tool SPACE "}" SPACE end',
        "tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        name = json.dumps(json.dumps(tool.name))
        rules.append(f'tool_{index}: {name} SPACE "," SPACE "\\"arguments\\"" SPACE ":" SPACE arguments_{index}')
        schema = {**(tool.arguments or _ANY_OBJECT), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    return lark_grammar("\n".join(rules))


def tools_grammar(tools: Sequence[Tool], choice: str | NamedTool | None, single: bool, own_tokens: Collection[str]) -> str:
    """The grammar of the calls that a chat asks for.

    The schema of a tool is enforced where the tool is strict or the answer has to call one; else its arguments are any object.

    Args:
        tools: of the request.
        choice: ``required``, the one to call, or else the model decides.
        single: at most one call; always so of a named tool.
        own_tokens: of the tokenizer, see ``call_grammar``.

    Raises:
        RequestError: naming the tool whose schema cannot be enforced, and why.
    """
    named = choice.function.name if isinstance(choice, NamedTool) else None
    required = named is not None or choice == "required"
    offered = []
    for index, tool in enumerate(tools):
        function = tool.function
        if named in (None, function.name):
            schema = function.parameters if required or function.strict else None
            try:
                _check_schema(schema or _ANY_OBJECT)
            except GrammarError as error:
                raise RequestError(f"tools[{index}].function.parameters", str(error)) from error
            offered.append(Offered(function.name, schema))
    try:
        return call_grammar(offered, required, single or named is not None, own_tokens)
    except GrammarError as error:
        raise RequestError("tools", str(error)) from error


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Raises ``GrammarError`` where the arguments of a tool cannot be held to a schema."""
    if schema.get("type", "object") != "object":
        raise GrammarError(f"the arguments of a function are an object, but the schema's type is {schema['type']!r}")
    json_grammar(schema)
