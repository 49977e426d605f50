"""Calls of tools in the text of a model, in the form that its chat template has it write (``engine.text.chat_format``)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cluster.http.answers.reasoning import held_back
from engine.text.chat_format import CALL_MARKS, CallForm

OPENING, CLOSING = CALL_MARKS["hermes"]

_BETWEEN = " \t\r\n;"  # calls of Llama 3

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of tools, by name


def call_id(form: CallForm, choice: str, place: int) -> str:
    """The id of a call in an answer: random as the answer's own is, and the same when it is computed again.

    Args:
        form: of the call.
        choice: in which it is, ``ANSWER_ID/INDEX``.
        place: of the call among those of the choice.
    """
    digits = hashlib.blake2b(f"{choice}/{place}".encode(), digest_size=16).hexdigest()
    return digits[:9] if form == "mistral" else f"call_{digits}"  # the only ids that Mistral's templates take


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model wrote, or its beginning: more of its arguments may follow."""

    name: str
    arguments: str  # a JSON object, spelled as text
    id: str = ""  # by which the client answers it; readers leave it out


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call before, as the model wrote them."""

    text: str


def whole_calls(parts: Sequence[Any]) -> list[Call]:
    """The calls among the parts of an answer, each with all its arguments."""
    found: list[tuple[Call, list[str]]] = []
    for part in parts:
        if isinstance(part, Call):
            found.append((part, [part.arguments]))
        elif isinstance(part, Arguments):
            found[-1][1].append(part.text)
    return [replace(call, arguments="".join(texts)) for call, texts in found]


class _Taken(NamedTuple):
    """What stands behind an opening mark, or behind the arguments of a call."""

    calls: list[Call]  # none where it is no call
    length: int  # characters of it
    is_begun: bool = False  # the arguments of the last call follow
    goes_on: bool = False  # something of the call, or of the list that it is in, follows


class _Objects:
    """Calls that are JSON objects, ``{"name": NAME, "arguments": {...}}``.

    Where an object begins like that, its arguments are told while they come; else it is read when it is complete.
    """

    _HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\<]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
    opening: str
    _is_open = False  # of the object, what is behind the arguments follows

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def _begun(self, rest: str, start: int) -> _Taken | None:
        """The call that begins at ``start``, up to its arguments; None where none does as far as it is known."""
        head = self._HEAD.match(rest, start)
        if head is None:
            return None
        self._is_open = True
        return _Taken([Call(head[1], "")], head.end(), is_begun=True)

    def _end_of_object(self, text: str) -> int | None:
        """Behind the object whose arguments were told; None while it is not complete, 0 where the text is not its end."""
        bare = text.lstrip()
        if not self._is_open or (bare and bare[0] not in "},"):
            return 0
        start = len(text) - len(bare)
        if bare.startswith(","):
            return _JsonScan(start, depth=1).end(text)
        return start + 1 if bare else None


class _Hermes(_Objects):
    """``<tool_call>{JSON}</tool_call>``: Hermes, Qwen and others."""

    opening = OPENING

    def take(self, rest: str) -> _Taken | None:
        """The calls at the beginning of ``rest``, which follows an opening mark; None while that is not known."""
        begun = self._begun(rest, len(rest) - len(rest.lstrip()))
        if begun is not None:
            return begun
        inside, closing, _ = rest.partition(CLOSING)
        if not closing:
            return None
        call = self._parse(inside)
        return _Taken([] if call is None else [call], len(inside) + len(CLOSING))

    def behind(self, text: str) -> _Taken | None:
        """What follows the arguments that were told; None while that is not known."""
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
    """``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``, a line for each: Qwen3-Coder.

    A value is text where the tool's schema says so, else JSON where it is that.
    """

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
    """JSON objects, alone or in a list, behind a mark that has no closing one."""

    opening = ""
    _is_list = False  # they are in one
    _scan: _JsonScan | None = None

    def take(self, rest: str) -> _Taken | None:
        """As ``_Hermes.take``."""
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
        """As ``_Hermes.behind``: in a list, the next call may be there."""
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
        """The call that is the object at ``start``."""
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
    """``[TOOL_CALLS][{JSON}, ...]``, or in newer models ``[TOOL_CALLS]NAME[ARGS]{JSON}`` for each call."""

    opening = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*\s*)?\[ARGS\]\s*(?=\{)")

    def take(self, rest: str) -> _Taken | None:
        """As ``_Hermes.take``."""
        bare = rest.lstrip()
        if not bare or bare[0] in "[{":
            return super().take(rest)
        head = self._NAMED.match(rest)
        if head is None:
            return None
        self._is_open = self._is_list = False
        return _Taken([Call(head[1], "")], head.end(), is_begun=True)


class _Llama3(_Json):
    """``{"name": ..., "parameters": {...}}`` at the beginning of the text, or behind ``<|python_tag|>``; more after ``;``."""

    opening = "<|python_tag|>"


# Of all forms but harmony, for which see harmony.py.
_FORMS: dict[CallForm, type[_Hermes | _Json]] = {
    "hermes": _Hermes, "qwen3_coder": _Qwen3Coder, "mistral": _Mistral, "llama3_json": _Llama3,
}  # fmt: skip


class ToolCallReader:
    """Takes the calls out of a text that comes in pieces.

    A call whose arguments are JSON is told as soon as its name is there and its arguments begin, and these as they come. What
    stands behind a mark and begins no call, such as JSON without a ``name``, stays text as it was written. Space before a call
    and at the end of a text with calls is dropped.

    Example: ``push("Let me see. <tool")`` gives ``["Let me see."]``, then ``push('_call>{"name": "f", "arguments": {"a"')`` gives
    ``[Call("f", ""), Arguments('{"a"')]``, and ``push(": 1}}</tool_call>")`` gives ``[Arguments(": 1}")]``.
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
        self._scan: _JsonScan | None = None  # within the arguments of a call
        self._is_behind = False  # behind arguments, or a call in a list
        self._is_told = True  # the last call
        self.calls = 0  # told so far

    def push(self, text: str) -> list[str | Call | Arguments]:
        """What is known of the text so far and was not given before. Pieces of text and of arguments are not empty."""
        self._held += text
        found: list[str | Call | Arguments] = []
        while True:
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
        """What was held back, when the text has ended."""
        left, self._held = self._held, ""
        if self._is_behind:  # what ends a call is no text, be it whole or not
            bare = left.lstrip(" \t\r\n},]")
            return [left] if bare and not CLOSING.startswith(bare) else []
        if self._mark == "" and left:
            left = left.replace(self._form.opening, "")
        return [left] if left and not (self.calls and not left.strip(_BETWEEN if self._next else None)) else []

    def _tell(self, taken: _Taken, text: str, found: list[str | Call | Arguments]) -> None:
        """Tells the calls at the beginning of a text, of which the rest is held."""
        for call in taken.calls:
            self._is_told = self._most is None or self.calls < self._most
            if self._is_told:
                found.append(call)
                self.calls += 1
        self._held = text[taken.length :]
        self._scan, self._is_behind = _JsonScan(0) if taken.is_begun else None, taken.goes_on and not taken.is_begun

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
    """Finds the end of a JSON object in a text that grows at its end.

    A text that is no JSON may have ``<`` outside of its strings: it ends there.
    """

    def __init__(self, start: int, depth: int = 0) -> None:
        """Of the object that begins at ``start``; with a depth, of one that has begun before."""
        self.at, self._depth, self._is_text, self._is_escaped = start, depth, False, False

    def end(self, text: str) -> int | None:
        """Behind the object; None while it is not complete. ``at`` is behind what was looked at."""
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
