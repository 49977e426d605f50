"""Calls of tools in the text of a model, in the form that its chat template has it write (``engine.text.chat_format``)."""

from __future__ import annotations

import json
import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.http.answers.reasoning import held_back
from engine.text.chat_format import CALL_MARKS, CallForm

OPENING, CLOSING = CALL_MARKS["hermes"]

_BETWEEN = " \t\r\n;"  # calls of Llama 3

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of tools, by name


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model wrote."""

    name: str
    arguments: str  # a JSON object, spelled as text
    id: str = field(default_factory=_new_id, compare=False)  # by which the client answers it


class _Taken(NamedTuple):
    """What stands behind an opening mark."""

    calls: list[Call]  # none where it is no call
    length: int  # characters of it


class _Hermes:
    """``<tool_call>{JSON}</tool_call>``: Hermes, Qwen and others."""

    opening = OPENING

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def take(self, rest: str) -> _Taken | None:
        """The call at the beginning of ``rest``, which follows an opening mark; None while its end is not there."""
        inside, closing, _ = rest.partition(CLOSING)
        if not closing:
            return None
        call = self._parse(inside)
        return _Taken([] if call is None else [call], len(inside) + len(CLOSING))

    def _parse(self, inside: str) -> Call | None:
        return _call(_loaded(inside))


class _Qwen3Coder(_Hermes):
    """``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``, a line for each: Qwen3-Coder.

    A value is text where the tool's schema says so, else JSON where it is that.
    """

    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def _parse(self, inside: str) -> Call | None:
        function = self._FUNCTION.fullmatch(inside)
        if function is None:
            return None
        name, body, at = function[1], function[2], 0
        properties = self._schemas.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        while body[at:].strip():
            parameter = self._PARAMETER.match(body, at)
            if parameter is None:
                return None
            schema = properties.get(parameter[1], {}) if isinstance(properties, dict) else {}
            arguments[parameter[1]] = _value(parameter[2], schema if isinstance(schema, dict) else {})
            at = parameter.end()
        return Call(name, json.dumps(arguments, ensure_ascii=False))


class _Json:
    """JSON objects or lists behind a mark that has no closing one."""

    opening = ""

    def __init__(self, schemas: Schemas) -> None:
        self._scan: _JsonScan | None = None

    def take(self, rest: str) -> _Taken | None:
        """As ``_Hermes.take``."""
        start = len(rest) - len(rest.lstrip())
        if start == len(rest):
            return None
        if rest[start] not in "[{":
            return _Taken([], start)
        return self._take_value(rest, start, None)

    def _take_value(self, rest: str, start: int, name: str | None) -> _Taken | None:
        """The JSON value at ``start``: calls, or the arguments of the call with this name."""
        self._scan = self._scan or _JsonScan(start)
        end = self._scan.end(rest)
        if end is None:
            return None
        self._scan = None
        value = _loaded(rest[start:end])
        entries = [{"name": name, "arguments": value}] if name is not None else value if isinstance(value, list) else [value]
        calls = [self._called(call) for entry in entries if (call := _call(entry)) is not None]
        return _Taken(calls if len(calls) == len(entries) else [], end)

    def _called(self, call: Call) -> Call:
        return call


class _Mistral(_Json):
    """``[TOOL_CALLS][{JSON}, ...]``, or in newer models ``[TOOL_CALLS]NAME[ARGS]{JSON}`` for each call."""

    opening = "[TOOL_CALLS]"
    _HEAD = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*\s*)?\[ARGS\]\s*(?=\{)")

    def take(self, rest: str) -> _Taken | None:
        """As ``_Hermes.take``."""
        bare = rest.lstrip()
        if not bare or bare[0] in "[{":
            return super().take(rest)
        head = self._HEAD.match(rest)
        return None if head is None else self._take_value(rest, head.end(), head[1])

    def _called(self, call: Call) -> Call:
        return Call(call.name, call.arguments, secrets.token_hex(5)[:9])  # the only ids that Mistral's templates take


class _Llama3(_Json):
    """``{"name": ..., "parameters": {...}}`` at the beginning of the text, or behind ``<|python_tag|>``; more after ``;``."""

    opening = "<|python_tag|>"


_FORMS: dict[CallForm, type[_Hermes | _Json]] = {
    "hermes": _Hermes, "qwen3_coder": _Qwen3Coder, "mistral": _Mistral, "llama3_json": _Llama3,
}  # fmt: skip


class ToolCallReader:
    """Takes the calls out of a text that comes in pieces.

    What stands behind a mark and is no call, such as JSON without a ``name``, stays text as it was written. So does what has no
    end. Space before a call and at the end of a text with calls is dropped.

    Example: ``push("Let me see. <tool")`` gives ``["Let me see."]``, and then ``push('_call>{"name": "f"}</tool_call>')`` gives
    ``[Call("f", "{}")]``.
    """

    def __init__(
        self, form: CallForm = "hermes", most: int | None = None, schemas: Schemas | None = None, hidden: bool = False
    ) -> None:
        """
        Args:
            form: of the calls.
            most: calls that are told; those after them are dropped. None: all.
            schemas: of the arguments of the tools that may be called.
            hidden: the opening mark is a special token, which is no text where no call follows.
        """
        self._form, self._most, self._mark = _FORMS[form](schemas or {}), most, "" if hidden else _FORMS[form].opening
        self._is_llama = form == "llama3_json"
        self._held = ""
        self._next = self._is_llama  # a call may begin without a mark
        self.calls = 0  # told so far

    def push(self, text: str) -> list[str | Call]:
        """What is known of the text so far and was not given before. Pieces of text are not empty."""
        self._held += text
        found: list[str | Call] = []
        while (place := self._begin()) is not None:
            before, rest = self._held[: place[0]], self._held[place[1] :]
            taken = self._form.take(rest)
            marked = before if place[0] < place[1] else ""  # without a mark it is what stands between two calls
            if taken is None:
                if kept := marked.rstrip():
                    found.append(kept)
                    self._held = self._held[len(kept) :]
                return found
            if not taken.calls:
                mark = self._mark if place[0] < place[1] else ""
                if shown := before + mark + rest[: taken.length]:
                    found.append(shown)
            elif marked.strip():
                found.append(marked.rstrip())
            for call in taken.calls:
                if self._most is None or self.calls < self._most:
                    found.append(call)
                    self.calls += 1
            self._held, self._next = rest[taken.length :], self._is_llama and bool(taken.calls)
        shown = self._held[: len(self._held) - self._unsure()]
        if shown:
            found.append(shown)
            self._held, self._next = self._held[len(shown) :], False
        return found

    def finish(self) -> list[str | Call]:
        """What was held back, when the text has ended."""
        left, self._held = self._held, ""
        if self._mark == "" and left:
            left = left.replace(self._form.opening, "")
        return [left] if left and not (self.calls and not left.strip(_BETWEEN if self._next else None)) else []

    def _begin(self) -> tuple[int, int] | None:
        """Where what may be a call begins, and where its mark ends; None where the text holds none."""
        place = self._held.find(self._form.opening)
        if self._next:
            bare = self._held.lstrip(_BETWEEN if self.calls else None)
            if bare.startswith("{"):
                return (start := len(self._held) - len(bare)), start
        return None if place < 0 else (place, place + len(self._form.opening))

    def _unsure(self) -> int:
        """Length of the end of the text that may belong to a call."""
        if self._next and self.calls and not self._held.strip(_BETWEEN):
            return len(self._held)
        return held_back(self._held, self._form.opening)


class _JsonScan:
    """Finds the end of a JSON object or list in a text that grows at its end."""

    def __init__(self, start: int) -> None:
        self._at, self._depth, self._is_text, self._is_escaped = start, 0, False, False

    def end(self, text: str) -> int | None:
        """Behind the value; None while it is not complete."""
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._is_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_text = False
            elif character == '"':
                self._is_text = True
            elif character in "[{":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None


def _loaded(text: str) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(data: Any) -> Call | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):  # some models spell the object as text
        return Call(data["name"], arguments)
    return Call(data["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that stands in a text without quotes, by its schema."""
    choices = schema.get("enum")
    if schema.get("type") == "string" or (isinstance(choices, list) and text in choices):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
