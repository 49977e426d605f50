"""Calls of tools in the text of a model that writes them as ``<tool_call>{JSON}</tool_call>`` (Hermes, Qwen and others)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model wrote."""

    name: str
    arguments: str  # a JSON object, spelled as text


class ToolCallReader:
    """Takes the calls out of a text that comes in pieces.

    What stands between the marks and is no call, a JSON object with ``name`` and ``arguments``, stays text as it was written. So
    does what has no end. Space before a call and at the end of a text with calls is dropped.

    Example: ``push("Let me see. <tool")`` gives ``["Let me see."]``, and then ``push('_call>{"name": "f"}</tool_call>')`` gives
    ``[Call("f", "{}")]``.
    """

    def __init__(self, most: int | None = None) -> None:
        """
        Args:
            most: calls that are told; those after them are dropped. None: all.
        """
        self._most = most
        self._held = ""
        self.calls = 0  # told so far

    def push(self, text: str) -> list[str | Call]:
        """What is known of the text so far and was not given before. Pieces of text are not empty."""
        self._held += text
        found: list[str | Call] = []
        while OPENING in self._held:
            before, _, rest = self._held.partition(OPENING)
            inside, closing, after = rest.partition(CLOSING)
            if not closing:
                if kept := before.rstrip():
                    found.append(kept)
                    self._held = self._held[len(kept) :]
                return found
            call = _parse(inside)
            if call is None:
                found.append(before + OPENING + inside + CLOSING)
            else:
                if before.strip():
                    found.append(before.rstrip())
                if self._most is None or self.calls < self._most:
                    found.append(call)
                    self.calls += 1
            self._held = after
        shown = len(self._held) - _beginning(self._held)
        if shown:
            found.append(self._held[:shown])
            self._held = self._held[shown:]
        return found

    def finish(self) -> list[str | Call]:
        """What was held back, when the text has ended."""
        left, self._held = self._held, ""
        return [left] if left and not (self.calls and left.isspace()) else []


def _beginning(text: str) -> int:
    """Length of the end of a text that may be space before a mark and the beginning of the mark."""
    for length in range(min(len(text), len(OPENING) - 1), 0, -1):
        if text.endswith(OPENING[:length]):
            break
    else:
        length = 0
    bare = text[: len(text) - length]
    return length + len(bare) - len(bare.rstrip())


def _parse(text: str) -> Call | None:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):  # some models spell the object as text
        return Call(data["name"], arguments)
    return Call(data["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
