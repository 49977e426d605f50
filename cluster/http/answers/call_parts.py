"""Parts of tool calls that the parsers of all formats return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by tool name


@dataclass(frozen=True, slots=True)
class Call:
    """Tool call, or its beginning, if ``Arguments`` follow."""

    name: str
    arguments: str  # JSON object as a string
    id: str = ""  # set by ``ChoiceReader``, not by the parsers


class Parsed(NamedTuple):
    """Parsed text after an opening mark, or after the arguments of a call."""

    calls: list[Call]  # empty if the text is not a call
    length: int  # parsed characters
    is_begun: bool = False  # whether the arguments of the last call follow
    is_continued: bool = False  # whether more of the call's form follows: its closing mark, or the next call of a list


class CallStart(NamedTuple):
    """Start of a possible call in a text."""

    shown: int  # end of the text before it
    rest: int  # end of its opening mark
    is_marked: bool
