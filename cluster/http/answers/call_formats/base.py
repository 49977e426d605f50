"""Base of formats whose calls are reported once they are complete, each in a module of this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod

from outrider.cluster.http.answers.call_parts import Call, CallStart, Parsed, Schemas
from outrider.cluster.http.answers.tool_values import as_written, loaded


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


def call_with_json(name: str, arguments: str) -> Call | None:
    """Return the call of a name and JSON arguments; None without a name, or if they are not a JSON object."""
    value = loaded(arguments.strip() or "{}")
    return Call(name.strip(), as_written(arguments.strip() or "{}", value)) if isinstance(value, dict) and name.strip() else None
