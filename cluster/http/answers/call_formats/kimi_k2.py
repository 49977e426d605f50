"""Format of Kimi-K2: ``functions.NAME:INDEX`` and JSON."""

from __future__ import annotations

import re

from outrider.cluster.http.answers.call_formats.base import WholeCalls, call_with_json
from outrider.cluster.http.answers.call_parts import Call
from outrider.engine.text.chat_format import CALL_MARKS

_MARKS = CALL_MARKS["kimi_k2"]


class Kimi(WholeCalls):
    openings, closing = _MARKS[:1], _MARKS[1]
    _beginning, _endings = _MARKS[2], _MARKS[3:4]
    _CALL = re.compile(rf"\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*{re.escape(_MARKS[4])}(.*)", re.DOTALL)

    def _call(self, text: str) -> Call | None:
        found = self._CALL.fullmatch(text)
        return None if found is None else call_with_json(found[1], found[2])
