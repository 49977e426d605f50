"""Incremental parsers of tool calls, for the formats in ``engine.text.chat_format``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.cluster.http.answers.reasoning import held_back
from outrider.engine.text.chat_format import CALL_MARKS, CallForm

OPENING, CLOSING = CALL_MARKS["hermes"]

_BETWEEN = " \t\r\n;"  # characters between calls of Llama 3

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by tool name


def call_id(form: CallForm, choice: str, place: int) -> str:
    """Return the id of a tool call of ``choice``, as random as the response id, and equal if the response is generated again."""
    digits = hashlib.blake2b(f"{choice}/{place}".encode(), digest_size=16).hexdigest()
    return digits[:9] if form == "mistral" else f"call_{digits}"  # Mistral's templates accept only ids of 9 characters


@dataclass(frozen=True, slots=True)
class Call:
    """Tool call, or its beginning, if ``Arguments`` follow."""

    name: str
    arguments: str  # JSON object as a string
    id: str = ""  # set by ``ChoiceReader``, not by the parsers


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the previous call's arguments, as the model wrote them."""

    text: str


def whole_calls(parts: Sequence[Any]) -> list[Call]:
    """Return the calls among the parts of a choice, with their complete arguments."""
    found: list[tuple[Call, list[str]]] = []
    for part in parts:
        if isinstance(part, Call):
            found.append((part, [part.arguments]))
        elif isinstance(part, Arguments):
            found[-1][1].append(part.text)
    return [replace(call, arguments="".join(texts)) for call, texts in found]


class _Taken(NamedTuple):
    """Parsed text after an opening mark, or after the arguments of a call."""

    calls: list[Call]  # empty if the text is not a call
    length: int  # parsed characters
    is_begun: bool = False  # whether the arguments of the last call follow
    goes_on: bool = False  # whether more of the list that contains the call follows


class _Objects:
    """Base class for calls ``{"name": NAME, "arguments": {...}}``. In this order of keys, arguments are streamed."""

    _HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\<]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
    opening: str
    _is_open = False  # whether the end of the object follows, after the arguments

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def _begun(self, rest: str, start: int) -> _Taken | None:
        """Parse the beginning of a call at ``start``, up to its arguments; None if it does not match or is incomplete."""
        head = self._HEAD.match(rest, start)
        if head is None:
            return None
        self._is_open = True
        return _Taken([Call(head[1], "")], head.end(), is_begun=True)

    def _end_of_object(self, text: str) -> int | None:
        """Return the end of the object whose arguments were streamed; None if incomplete, 0 if the text is not its end."""
        bare = text.lstrip()
        if not self._is_open or (bare and bare[0] not in "},"):
            return 0
        start = len(text) - len(bare)
        if bare.startswith(","):
            return _JsonScan(start, depth=1).end(text)
        return start + 1 if bare else None


class _Hermes(_Objects):
    """Format of Hermes, Qwen and others: ``<tool_call>{JSON}</tool_call>``."""

    opening = OPENING

    def take(self, rest: str) -> _Taken | None:
        """Parse the calls at the beginning of ``rest``, which follows an opening mark; None if more text is needed."""
        begun = self._begun(rest, len(rest) - len(rest.lstrip()))
        if begun is not None:
            return begun
        inside, closing, _ = rest.partition(CLOSING)
        if not closing:
            return None
        call = self._parse(inside)
        return _Taken([] if call is None else [call], len(inside) + len(CLOSING))

    def behind(self, text: str) -> _Taken | None:
        """Parse the text after streamed arguments; None if more text is needed."""
        end = self._end_of_object(text)
        if end is None:
            return None
        bare = text[end:].lstrip()
        if bare.startswith(CLOSING):
            return _Taken([], len(text) - len(bare) + len(CLOSING))
        return None if CLOSING.startswith(bare) else _Taken([], end)

    def _parse(self, inside: str) -> Call | None:
        return _call(_loaded(inside))


class _Qwen3Coder(_Hermes):
    """Format of Qwen3-Coder: ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``."""

    # Each tag is on its own line. A value is a string if the tool's schema says so, or if it is not valid JSON.

    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def _begun(self, rest: str, start: int) -> _Taken | None:
        return None

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


class _Json(_Objects):
    """Base class for JSON objects, alone or in a list, after a mark without a closing mark."""

    opening = ""
    _is_list = False  # whether the objects are in a list
    _scan: _JsonScan | None = None

    def take(self, rest: str) -> _Taken | None:
        """Do the same as ``_Hermes.take``."""
        start = len(rest) - len(rest.lstrip())
        if start == len(rest):
            return None
        if rest[start] == "[":
            inner = rest[start + 1 :].lstrip()
            taken = self._take_object(rest, len(rest) - len(inner)) if inner else None
            self._is_list = bool(taken and taken.calls)
            return taken._replace(goes_on=self._is_list) if taken else None
        self._is_list = False
        return self._take_object(rest, start)

    def behind(self, text: str) -> _Taken | None:
        """Do the same as ``_Hermes.behind``; in a list, the next call may follow."""
        end = self._end_of_object(text)
        if end is None:
            return None
        if not self._is_list:
            return _Taken([], end)
        bare = text[end:].lstrip()
        if not bare:
            return None
        start = len(text) - len(bare)
        if bare[0] == "]":
            return _Taken([], start + 1)
        if bare[0] == ",":
            inner = text[start + 1 :].lstrip()
            taken = self._take_object(text, len(text) - len(inner)) if inner else None
            if taken is None or taken.calls:
                return taken and taken._replace(goes_on=True)
        return _Taken([], end)

    def _take_object(self, rest: str, start: int) -> _Taken | None:
        if rest[start] != "{":
            return _Taken([], start)
        begun = self._begun(rest, start)
        if begun is not None:
            self._scan = None
            return begun
        self._scan = self._scan or _JsonScan(start)
        end = self._scan.end(rest)
        if end is None:
            return None
        self._scan, self._is_open = None, False
        call = _call(_loaded(rest[start:end]))
        return _Taken([] if call is None else [call], end)


class _Mistral(_Json):
    """Format of Mistral: ``[TOOL_CALLS][{JSON}, ...]``, in newer models ``[TOOL_CALLS]NAME[ARGS]{JSON}`` per call."""

    opening = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*\s*)?\[ARGS\]\s*(?=\{)")

    def take(self, rest: str) -> _Taken | None:
        """Do the same as ``_Hermes.take``."""
        bare = rest.lstrip()
        if not bare or bare[0] in "[{":
            return super().take(rest)
        head = self._NAMED.match(rest)
        if head is None:
            return None
        self._is_open = self._is_list = False
        return _Taken([Call(head[1], "")], head.end(), is_begun=True)


class _Llama3(_Json):
    """Format of Llama 3: ``{"name": ..., "parameters": {...}}`` at the start or after ``<|python_tag|>``; more after ``;``."""

    opening = "<|python_tag|>"


# Harmony is parsed in harmony.py.
_FORMS: dict[CallForm, type[_Hermes | _Json]] = {
    "hermes": _Hermes, "qwen3_coder": _Qwen3Coder, "mistral": _Mistral, "llama3_json": _Llama3,
}  # fmt: skip


class ToolCallReader:
    """Incremental parser of tool calls.

    Example: ``push("Let me see. <tool")`` gives ``["Let me see."]``, then ``push('_call>{"name": "f", "arguments": {"a"')`` gives
    ``[Call("f", ""), Arguments('{"a"')]``, and ``push(": 1}}</tool_call>")`` gives ``[Arguments(": 1}")]``.
    """

    def __init__(
        self, form: CallForm = "hermes", most: int | None = None, schemas: Schemas | None = None, hidden: bool = False
    ) -> None:
        """Create a parser for one choice and at most ``most`` calls. ``hidden``: the opening mark is a special token."""
        self._form, self._most, self._mark = _FORMS[form](schemas or {}), most, "" if hidden else _FORMS[form].opening
        self._is_llama = form == "llama3_json"
        self._held = ""
        self._next = self._is_llama  # whether a call may begin without a mark
        self._scan: _JsonScan | None = None  # set within the arguments of a call
        self._is_behind = False  # whether the text follows arguments, or a call in a list
        self._is_told = True  # whether the last call was reported
        self.calls = 0  # reported calls

    def push(self, text: str) -> list[str | Call | Arguments]:
        """Parse more text and return the new parts; text and arguments are never empty."""
        self._held += text
        found: list[str | Call | Arguments] = []
        while True:
            # A call with JSON arguments is reported when its arguments begin, and these are streamed.
            if self._scan is not None:
                end = self._scan.end(self._held)
                if (length := self._scan.at) and self._is_told:
                    found.append(Arguments(self._held[:length]))
                self._held, self._scan.at = self._held[length:], 0
                if end is None:
                    return found
                self._scan, self._is_behind = None, True
            if self._is_behind:
                taken = self._form.behind(self._held)
                if taken is None:
                    return found
                self._tell(taken, self._held, found)
                self._next = self._is_llama
            elif (place := self._begin()) is not None:
                before, rest = self._held[: place[0]], self._held[place[1] :]
                taken = self._form.take(rest)
                marked = before if place[0] < place[1] else ""  # without a mark, it is only the separator of two calls
                if taken is None:
                    if kept := marked.rstrip():
                        found.append(kept)
                        self._held = self._held[len(kept) :]
                    return found
                # Text after a mark that is not a call, such as JSON without a `name`, remains text.
                if not taken.calls:
                    mark = self._mark if place[0] < place[1] else ""
                    if shown := before + mark + rest[: taken.length]:
                        found.append(shown)
                elif marked.strip():
                    found.append(marked.rstrip())
                self._tell(taken, rest, found)
                self._next = self._is_llama and bool(taken.calls)
            else:
                break
        shown = self._held[: len(self._held) - self._unsure()]
        if shown:
            found.append(shown)
            self._held, self._next = self._held[len(shown) :], False
        return found

    def finish(self) -> list[str | Call | Arguments]:
        """Return the parts that were held back. Call it when the text has ended."""
        left, self._held = self._held, ""
        if self._is_behind:  # the end of a call is not text, even if it is incomplete
            bare = left.lstrip(" \t\r\n},]")
            return [left] if bare and not CLOSING.startswith(bare) else []
        if self._mark == "" and left:
            left = left.replace(self._form.opening, "")
        return [left] if left and not (self.calls and not left.strip(_BETWEEN if self._next else None)) else []

    def _tell(self, taken: _Taken, text: str, found: list[str | Call | Arguments]) -> None:
        """Report the calls at the beginning of a text, and hold back the rest."""
        for call in taken.calls:
            self._is_told = self._most is None or self.calls < self._most
            if self._is_told:
                found.append(call)
                self.calls += 1
        self._held = text[taken.length :]
        self._scan, self._is_behind = _JsonScan(0) if taken.is_begun else None, taken.goes_on and not taken.is_begun

    def _begin(self) -> tuple[int, int] | None:
        """Return the start of a possible call and the end of its mark; None if there is no call."""
        place = self._held.find(self._form.opening)
        if self._next:
            bare = self._held.lstrip(_BETWEEN if self.calls else None)
            if bare.startswith("{"):
                return (start := len(self._held) - len(bare)), start
        return None if place < 0 else (place, place + len(self._form.opening))

    def _unsure(self) -> int:
        """Return the length of the text's end that may belong to a call."""
        if self._next and self.calls and not self._held.strip(_BETWEEN):
            return len(self._held)
        return held_back(self._held, self._form.opening)


class _JsonScan:
    """Incremental search for the end of a JSON object from ``start``, with ``depth`` open brackets; a bare ``<`` ends it."""

    def __init__(self, start: int, depth: int = 0) -> None:
        self.at, self._depth, self._is_text, self._is_escaped = start, depth, False, False

    def end(self, text: str) -> int | None:
        """Return the end of the object in the text so far; None if it is incomplete. ``at`` is the end of the scanned text."""
        while self.at < len(text):
            character = text[self.at]
            if self._is_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_text = False
            elif character == "<":
                return self.at
            elif character == '"':
                self._is_text = True
            elif character in "[{":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
            self.at += 1
            if self._depth == 0:
                return self.at
        return None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    # Deeply nested JSON of a model raises RecursionError.
    except (ValueError, RecursionError):
        return None


def _call(data: Any) -> Call | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        return Call(data["name"], arguments)
    return Call(data["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    choices = schema.get("enum")
    if schema.get("type") == "string" or (isinstance(choices, list) and text in choices):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
