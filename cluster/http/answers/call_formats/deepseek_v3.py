"""Format of DeepSeek-V3: the type, the name and JSON in a code block; of V3.1 and later: the name and JSON."""

from __future__ import annotations

import re

from outrider.cluster.http.answers.call_formats.base import WholeCalls, call_with_json
from outrider.cluster.http.answers.call_parts import Call
from outrider.engine.text.chat_format import CALL_MARKS

_MARKS = CALL_MARKS["deepseek_v3"]


class DeepSeek(WholeCalls):
    openings, closing = _MARKS[:1], _MARKS[1]
    _beginning, _endings = _MARKS[2], _MARKS[3:4]
    _BLOCK = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)

    def _call(self, text: str) -> Call | None:
        name, separator, arguments = text.partition(_MARKS[4])
        if not separator:
            return None
        block = self._BLOCK.fullmatch(arguments)
        return call_with_json(name, arguments) if block is None else call_with_json(block[1], block[2])
