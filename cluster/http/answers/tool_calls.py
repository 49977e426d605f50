"""Incremental parsers of tool calls, for the formats in ``engine.text.chat_format``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.cluster.http.answers.call_formats.base import WholeCalls
from outrider.cluster.http.answers.call_formats.deepseek_v3 import DeepSeek
from outrider.cluster.http.answers.call_formats.gemma4 import Gemma
from outrider.cluster.http.answers.call_formats.glm45 import Glm
from outrider.cluster.http.answers.call_formats.kimi_k2 import Kimi
from outrider.cluster.http.answers.call_parts import Call, CallStart, Parsed, Schemas
from outrider.cluster.http.answers.reasoning import held_back
from outrider.cluster.http.answers.tool_values import as_written, dumped, items_of, loaded, members_of, value_json
from outrider.engine.text.chat_format import CALL_MARKS, CallForm

OPENING, CLOSING = CALL_MARKS["hermes"]

_BETWEEN = " \t\r\n;"  # characters between calls of Llama 3


def call_id(form: CallForm, choice: str, place: int) -> str:
    """Return the id of a tool call of ``choice``, as random as the response id, and equal if the response is generated again."""
    digits = hashlib.blake2b(f"{choice}/{place}".encode(), digest_size=16).hexdigest()
    return digits[:9] if form == "mistral" else f"call_{digits}"  # Mistral's templates accept only ids of 9 characters


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


class _Objects:
    """Base class for calls that are JSON objects, ``{"name": NAME, "arguments": {...}}``, with the name of a tool.

    If an object has its keys in this order, its arguments are streamed; otherwise it is parsed when it is complete. In both cases
    the arguments are reported as the model wrote them.
    """

    _HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\<]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
    openings: tuple[str, ...]
    _is_open = False  # whether the end of the object follows, after the arguments
    _scan: _JsonScan | None = None

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def begin(self, held: str) -> CallStart | None:
        """Return the first opening mark; None if there is none."""
        place = held.find(self.openings[0])
        return None if place < 0 else CallStart(place, place + len(self.openings[0]), True)

    def _begun(self, rest: str, start: int) -> Parsed | None:
        """Parse the beginning of a call at ``start``, up to its arguments; None if it does not match or is incomplete."""
        head = self._HEAD.match(rest, start)
        if head is None or not self._knows(head[1]):
            return None
        self._scan, self._is_open = None, True
        return Parsed([Call(head[1], "")], head.end(), is_begun=True)

    def _whole(self, rest: str, start: int) -> Parsed | None:
        """Parse the object or list at ``start``; None if it is incomplete."""
        self._scan = self._scan or _JsonScan(start)
        end = self._scan.end(rest)
        if end is None:
            return None
        self._scan, self._is_open = None, False
        return Parsed(self._calls_of(rest[start:end]), end)

    def _end_of_object(self, text: str) -> int | None:
        """Return the end of the object whose arguments were streamed; None if incomplete, 0 if the text is not its end."""
        bare = text.lstrip()
        if not self._is_open or (bare and bare[0] not in "},"):
            return 0
        start = len(text) - len(bare)
        if bare.startswith(","):
            return _JsonScan(start, depth=1).end(text)
        return start + 1 if bare else None

    def _knows(self, name: str) -> bool:
        return not self._schemas or name in self._schemas

    def _calls_of(self, source: str) -> list[Call]:
        """Return the calls of an object, or of a list of objects; empty if any of them is not a call."""
        items = items_of(source) if source.startswith("[") else [source]
        calls = [self._call(item) for item in items or ()]
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, source: str) -> Call | None:
        members = members_of(source)
        name = loaded((members or {}).get("name", ""))
        if members is None or not isinstance(name, str) or not name or not self._knows(name):
            return None
        arguments = members.get("arguments", members.get("parameters"))
        if arguments is None:
            return Call(name, "{}") if len(members) == 1 and self._needs_nothing(name) else None
        value = loaded(arguments)
        if isinstance(value, str):  # some models write the object as a string
            arguments, value = value, loaded(value or "{}")
        if value is None and arguments.strip() in ("", "null"):
            return Call(name, "{}")
        return Call(name, as_written(arguments, value)) if isinstance(value, dict) else None

    def _needs_nothing(self, name: str) -> bool:
        """Return whether an object without arguments calls a tool."""
        return not self._schemas.get(name, {}).get("required")


class _Hermes(_Objects):
    """Format of Hermes, Qwen and others: ``<tool_call>{JSON}</tool_call>``."""

    openings: tuple[str, ...] = (OPENING,)
    _BEHIND = re.compile(r"\s*\}*\s*")  # some models close one bracket too many

    def take(self, rest: str) -> Parsed | None:
        """Parse the calls at the beginning of ``rest``, which follows an opening mark; None if more text is needed."""
        start = len(rest) - len(rest.lstrip())
        if start == len(rest):
            return None
        if rest[start] not in "{[":
            return Parsed([], start)
        parsed = self._begun(rest, start) or self._whole(rest, start)
        return parsed and parsed._replace(is_continued=bool(parsed.calls))

    def behind(self, text: str) -> Parsed | None:
        """Parse the text after a call or its streamed arguments; None if more text is needed."""
        end = self._end_of_object(text)
        if end is None:
            return None
        surplus = self._BEHIND.match(text, end)
        closing = end if surplus is None else surplus.end()
        if text.startswith(CLOSING, closing):
            return Parsed([], closing + len(CLOSING))
        return None if CLOSING.startswith(text[closing:]) else Parsed([], end)


class _Qwen3Coder(_Hermes):
    """Format of Qwen3-Coder: ``<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>``.

    Each tag is on its own line. ``<tool_call>`` may be absent. A value ends at the first ``</parameter>`` that another tag
    follows, so it may contain such tags. Its type is that of the tool's schema.
    """

    openings = (OPENING, "<function=")
    _FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
    _FUNCTION_END = re.compile(rf"\s*(?:</function>|(?={re.escape(CLOSING)}))")
    _TAG = re.compile(r"<(?:function|parameter)=[^>\n]*")
    _VALUE_END = "</parameter>"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._arguments: dict[str, str] = {}  # JSON of the parsed values
        self._at = self._value_at = 0  # end of the parsed text; where to look for the end of the value that begins there

    def begin(self, held: str) -> CallStart | None:
        """Return the first ``<tool_call>`` or ``<function=``; None if there is none."""
        marked, bare = super().begin(held), held.find(self.openings[1])
        if bare < 0 or (marked is not None and marked.shown < bare):
            return marked
        return CallStart(bare, bare, True)

    def take(self, rest: str) -> Parsed | None:
        """Do the same as ``_Hermes.take``."""
        head = self._FUNCTION.match(rest)
        if head is None:
            start = len(rest) - len(rest.lstrip())
            is_tag = rest.startswith(self.openings[1], start)
            return None if self._may_be_tag(rest) else Parsed([], start + is_tag * len(self.openings[1]))
        if not self._knows(head[1]):
            return Parsed([], head.end())
        self._at = max(self._at, head.end())
        while (end := self._FUNCTION_END.match(rest, self._at)) is None:
            parameter = self._PARAMETER.match(rest, self._at)
            if parameter is None:
                if self._may_be_tag(rest[self._at :]):
                    return None
                parsed = Parsed([], self._at)
                self._reset()
                return parsed
            value_end = self._end_of_value(rest, max(self._value_at, parameter.end()))
            if value_end is None:
                return None
            value = rest[parameter.end() : value_end]
            schemas = self._schemas.get(head[1], {}).get("properties", {})
            schema = schemas.get(parameter[1], {}) if isinstance(schemas, dict) else {}
            self._arguments[parameter[1]] = value_json(value.removesuffix("\n"), schema, self._schemas.get(head[1], {}))
            self._at = value_end + len(self._VALUE_END)
        arguments = ", ".join(f"{dumped(name)}: {value}" for name, value in self._arguments.items())
        self._reset()
        return Parsed([Call(head[1], f"{{{arguments}}}")], end.end(), is_continued=True)

    def _end_of_value(self, rest: str, at: int) -> int | None:
        """Return the place of the ``</parameter>`` that ends a value, searched from ``at``; None if more text is needed."""
        while (place := rest.find(self._VALUE_END, at)) >= 0:
            behind = place + len(self._VALUE_END)
            if self._PARAMETER.match(rest, behind) or self._FUNCTION_END.match(rest, behind):
                return place
            self._value_at = place
            if self._may_be_tag(rest[behind:]):
                return None
            at = behind
        self._value_at = max(at, len(rest) - len(self._VALUE_END))
        return None

    def _may_be_tag(self, text: str) -> bool:
        """Return whether more text may make this the tag of a function or parameter, or the end of a function."""
        bare = text.lstrip()
        tags = ("<function=", "<parameter=", "</function>", CLOSING)
        return any(tag.startswith(bare) for tag in tags) or self._TAG.fullmatch(bare) is not None

    def _reset(self) -> None:
        self._arguments, self._at, self._value_at = {}, 0, 0


class _Json(_Objects):
    """Base class for JSON objects, alone or in a list, after a mark without a closing mark."""

    openings = ("",)
    _is_list = False  # whether the objects are in a list

    def take(self, rest: str) -> Parsed | None:
        """Do the same as ``_Hermes.take``."""
        start = len(rest) - len(rest.lstrip())
        if start == len(rest):
            return None
        if rest[start] == "[":
            inner = rest[start + 1 :].lstrip()
            parsed = self._take_object(rest, len(rest) - len(inner)) if inner else None
            self._is_list = bool(parsed and parsed.calls)
            return parsed._replace(is_continued=self._is_list) if parsed else None
        self._is_list = False
        return self._take_object(rest, start)

    def behind(self, text: str) -> Parsed | None:
        """Do the same as ``_Hermes.behind``; in a list, the next call may follow."""
        end = self._end_of_object(text)
        if end is None:
            return None
        if not self._is_list:
            return Parsed([], end)
        bare = text[end:].lstrip()
        if not bare:
            return None
        start = len(text) - len(bare)
        if bare[0] == "]":
            return Parsed([], start + 1)
        if bare[0] == ",":
            inner = text[start + 1 :].lstrip()
            parsed = self._take_object(text, len(text) - len(inner)) if inner else None
            if parsed is None or parsed.calls:
                return parsed and parsed._replace(is_continued=True)
        return Parsed([], end)

    def _take_object(self, rest: str, start: int) -> Parsed | None:
        if rest[start] != "{":
            return Parsed([], start)
        return self._begun(rest, start) or self._whole(rest, start)


class _Mistral(_Json):
    """Format of Mistral: ``[TOOL_CALLS][{JSON}, ...]``, in newer models ``[TOOL_CALLS]NAME[ARGS]{JSON}`` per call."""

    openings = ("[TOOL_CALLS]",)
    _NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*\s*)?\[ARGS\]\s*(?=\{)")
    _MAY_BE_NAMED = re.compile(r"\s*[\w.\-]{0,300}\s*(?:\[[A-Z_]*\]?\w*\s*)*")

    def take(self, rest: str) -> Parsed | None:
        """Do the same as ``_Hermes.take``."""
        bare = rest.lstrip()
        if not bare or bare[0] in "[{":
            return super().take(rest)
        head = self._NAMED.match(rest)
        if head is None:
            return None if self._MAY_BE_NAMED.fullmatch(rest) else Parsed([], len(rest) - len(bare))
        self._is_open = self._is_list = False
        return Parsed([Call(head[1], "")], head.end(), is_begun=True) if self._knows(head[1]) else Parsed([], head.end())


class _Llama3(_Json):
    """Format of Llama 3: ``{"name": ..., "parameters": {...}}`` at the start or after ``<|python_tag|>``; more after ``;``."""

    openings = ("<|python_tag|>",)

    def _needs_nothing(self, name: str) -> bool:
        return False  # without a mark, the object may be an ordinary answer


# Harmony is parsed in harmony.py.
_FORMS: dict[CallForm, type[_Hermes | _Json | WholeCalls]] = {
    "hermes": _Hermes, "qwen3_coder": _Qwen3Coder, "mistral": _Mistral, "llama3_json": _Llama3,
    "deepseek_v3": DeepSeek, "kimi_k2": Kimi, "glm45": Glm, "gemma4": Gemma,
}  # fmt: skip


class ToolCallReader:
    """Incremental parser of tool calls.

    A call has the form of the model's chat template, the name of one of the tools, and arguments. All other text remains text,
    also after a mark. A call with JSON arguments is reported when its arguments begin, and these are streamed. Whitespace before
    a call and at the end of a text with calls is dropped.

    Example: ``push("Let me see. <tool")`` gives ``["Let me see."]``, then ``push('_call>{"name": "f", "arguments": {"a"')`` gives
    ``[Call("f", ""), Arguments('{"a"')]``, and ``push(": 1}}</tool_call>")`` gives ``[Arguments(": 1}")]``.
    """

    def __init__(
        self, form: CallForm = "hermes", most: int | None = None, schemas: Schemas | None = None, hidden: bool = False
    ) -> None:
        """Create a parser for one choice.

        Args:
            most: maximum calls to report, later ones are dropped; None for no limit.
            schemas: of all tools; without them any name is one of a tool.
            hidden: whether the opening mark is a special token, which is dropped from the text if no call follows.
        """
        self._form, self._most, self._is_hidden = _FORMS[form](schemas or {}), most, hidden
        self._is_llama = form == "llama3_json"
        self._held = ""
        self._next = self._is_llama  # whether a call may begin without a mark
        self._scan: _JsonScan | None = None  # set within the arguments of a call
        self._is_behind = False  # whether the text follows arguments, or a call in a list
        self._is_reported = True  # whether the last call was reported
        self.calls = 0  # reported calls

    @property
    def is_within(self) -> bool:
        """Return whether the arguments of a call are incomplete."""
        return self._scan is not None

    def push(self, text: str) -> list[str | Call | Arguments]:
        """Parse more text and return the new parts; text and arguments are never empty."""
        self._held += text
        found: list[str | Call | Arguments] = []
        while True:
            # A call with JSON arguments is reported when its arguments begin, and these are streamed.
            if self._scan is not None:
                end = self._scan.end(self._held)
                if (length := self._scan.at) and self._is_reported:
                    found.append(Arguments(self._held[:length]))
                self._held, self._scan.at = self._held[length:], 0
                if end is None:
                    return found
                self._scan, self._is_behind = None, True
            if self._is_behind:
                parsed = self._form.behind(self._held)
                if parsed is None:
                    return found
                self._report(parsed, self._held, found)
                self._next = self._is_llama
            elif (start := self._begin()) is not None:
                before, rest = self._held[: start.shown], self._held[start.rest :]
                parsed = self._form.take(rest)
                marked = before if start.is_marked else ""  # without a mark, it is only the separator of two calls
                if parsed is None:
                    if kept := marked.rstrip():
                        found.append(kept)
                        self._held = self._held[len(kept) :]
                    return found
                # Text after a mark that is not a call, such as JSON without a `name`, remains text.
                if not parsed.calls:
                    if shown := (before if self._is_hidden else self._held[: start.rest]) + rest[: parsed.length]:
                        found.append(shown)
                elif marked.strip():
                    found.append(marked.rstrip())
                self._report(parsed, rest, found)
                self._next = self._is_llama and bool(parsed.calls)
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
            return [left] if bare and not (getattr(self._form, "closing", "") or CLOSING).startswith(bare) else []
        if self._is_hidden and left:
            left = left.replace(self._form.openings[0], "")
        return [left] if left and not (self.calls and not left.strip(_BETWEEN if self._next else None)) else []

    def _report(self, parsed: Parsed, text: str, found: list[str | Call | Arguments]) -> None:
        """Report the calls at the beginning of a text, and hold back the rest."""
        for call in parsed.calls:
            self._is_reported = self._most is None or self.calls < self._most
            if self._is_reported:
                found.append(call)
                self.calls += 1
        self._held = text[parsed.length :]
        self._scan, self._is_behind = _JsonScan(0) if parsed.is_begun else None, parsed.is_continued and not parsed.is_begun

    def _begin(self) -> CallStart | None:
        """Return the start of a possible call; None if there is none."""
        if self._next:
            bare = self._held.lstrip(_BETWEEN if self.calls else None)
            if bare.startswith("{"):
                return CallStart(start := len(self._held) - len(bare), start, False)
        return self._form.begin(self._held)

    def _unsure(self) -> int:
        """Return the length of the text's end that may belong to a call."""
        if self._next and self.calls and not self._held.strip(_BETWEEN):
            return len(self._held)
        return max(held_back(self._held, opening) for opening in self._form.openings)


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
