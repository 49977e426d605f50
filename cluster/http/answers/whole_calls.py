"""Formats whose calls are reported once they are complete: DeepSeek-V3, Kimi-K2, GLM-4.5 and Gemma."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from outrider.cluster.http.answers.call_parts import Call, CallStart, Parsed, Schemas
from outrider.cluster.http.answers.tool_values import as_written, dumped, loaded, value_json
from outrider.engine.text.chat_format import CALL_MARKS


class WholeCalls(ABC):
    """Base class: an opening mark, calls that each end with a mark, and for some formats a mark after the last call."""

    openings: tuple[str, ...]
    closing = ""  # after the last call; empty if each call has its own opening mark
    _beginning = ""  # of each call, behind the opening mark
    _endings: tuple[str, ...]  # of each call
    _looked = 0  # place up to which no end was found

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def begin(self, held: str) -> CallStart | None:
        """Return the first opening mark; None if there is none."""
        found = [(place, mark) for mark in self.openings if (place := held.find(mark)) >= 0]
        if not found:
            return None
        place, mark = min(found)
        return CallStart(place, place + len(mark), True)

    def take(self, rest: str) -> Parsed | None:
        """Parse the call at the beginning of ``rest``; None if more text is needed."""
        start = len(rest) - len(rest.lstrip())
        head = rest[start : start + len(self._beginning)]
        if head != self._beginning:
            return None if self._beginning.startswith(head) else Parsed([], start)
        start += len(head)
        ends = [(place, mark) for mark in self._endings if (place := rest.find(mark, max(start, self._looked))) >= 0]
        if not ends:
            self._looked = max(0, len(rest) - max(map(len, self._endings)))
            return None
        self._looked = 0
        place, mark = min(ends)
        call = self._call(rest[start:place])
        known = call is not None and (not self._schemas or call.name in self._schemas)
        calls = [call] if call is not None and known else []
        return Parsed(calls, place + len(mark), is_continued=bool(calls and self.closing))

    def behind(self, text: str) -> Parsed | None:
        """Parse the text after a call: the next one, or the closing mark; None if more text is needed."""
        bare = text.lstrip()
        if bare.startswith(self.closing):
            return Parsed([], len(text) - len(bare) + len(self.closing))
        if bare.startswith(self._beginning):
            parsed = self.take(text)
            return Parsed([], 0) if parsed is not None and not parsed.calls else parsed
        return None if self.closing.startswith(bare) or self._beginning.startswith(bare) else Parsed([], 0)

    @abstractmethod
    def _call(self, text: str) -> Call | None:
        """Return the call that a text between its marks describes; None if it describes none."""


def _with_json(name: str, arguments: str) -> Call | None:
    value = loaded(arguments.strip() or "{}")
    return Call(name.strip(), as_written(arguments.strip() or "{}", value)) if isinstance(value, dict) and name.strip() else None


class DeepSeek(WholeCalls):
    """Format of DeepSeek-V3: the type, the name and JSON in a code block; of V3.1 and later: the name and JSON."""

    openings, closing = CALL_MARKS["deepseek_v3"][:1], CALL_MARKS["deepseek_v3"][1]
    _beginning, _endings = CALL_MARKS["deepseek_v3"][2], CALL_MARKS["deepseek_v3"][3:4]
    _SEPARATOR = CALL_MARKS["deepseek_v3"][4]
    _BLOCK = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)

    def _call(self, text: str) -> Call | None:
        name, separator, arguments = text.partition(self._SEPARATOR)
        if not separator:
            return None
        block = self._BLOCK.fullmatch(arguments)
        return _with_json(name, arguments) if block is None else _with_json(block[1], block[2])


class Kimi(WholeCalls):
    """Format of Kimi-K2: ``functions.NAME:INDEX`` and JSON."""

    openings, closing = CALL_MARKS["kimi_k2"][:1], CALL_MARKS["kimi_k2"][1]
    _beginning, _endings = CALL_MARKS["kimi_k2"][2], CALL_MARKS["kimi_k2"][3:4]
    _CALL = re.compile(rf"\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*{re.escape(CALL_MARKS['kimi_k2'][4])}(.*)", re.DOTALL)

    def _call(self, text: str) -> Call | None:
        found = self._CALL.fullmatch(text)
        return None if found is None else _with_json(found[1], found[2])


class Glm(WholeCalls):
    """Format of GLM-4.5: the name, then pairs of ``<arg_key>`` and ``<arg_value>``, whose types are those of the schema."""

    openings, _endings = CALL_MARKS["glm45"][:1], CALL_MARKS["glm45"][1:]
    _PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def _call(self, text: str) -> Call | None:
        name, mark, pairs = text.partition("<arg_key>")
        pairs, at, values, schema = mark + pairs, 0, list[str](), self._schemas.get(name.strip(), {})
        properties = schema.get("properties", {})
        while (pair := self._PAIR.match(pairs, at)) is not None:
            kind = properties.get(pair[1].strip(), {}) if isinstance(properties, dict) else {}
            values.append(f"{dumped(pair[1].strip())}: {value_json(pair[2], kind, schema)}")
            at = pair.end()
        return (
            Call(name.strip(), f"{{{', '.join(values)}}}") if at == len(pairs) and re.fullmatch(r"\s*[\w.\-]+\s*", name) else None
        )


class Gemma(WholeCalls):
    """Format of Gemma 4 and FunctionGemma: ``call:NAME{KEY:VALUE,...}``, with texts between two marks of their own."""

    openings, _endings = CALL_MARKS["gemma4"][:2], CALL_MARKS["gemma4"][2:4]
    _CALL = re.compile(r"\s*call:([\w.\-]+)(\{.*\})\s*", re.DOTALL)
    _TEXT = re.compile("|".join(f"{re.escape(mark)}(.*?){re.escape(mark)}" for mark in CALL_MARKS["gemma4"][4:]), re.DOTALL)
    _KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w\-]*)(\s*:)")

    def _call(self, text: str) -> Call | None:
        found = self._CALL.fullmatch(text)
        if found is None:
            return None
        made, at = list[str](), 0
        for string in self._TEXT.finditer(found[2]):  # keys are quoted outside of texts only
            made += [
                self._quoted(found[2][at : string.start()]),
                dumped(next(part for part in string.groups() if part is not None)),
            ]
            at = string.end()
        return _with_json(found[1], "".join([*made, self._quoted(found[2][at:])]))

    def _quoted(self, text: str) -> str:
        return self._KEY.sub(r'\1"\2"\3', text)
