"""Format of Gemma 4 and FunctionGemma: ``call:NAME{KEY:VALUE,...}``, with texts between two marks of their own."""

from __future__ import annotations

import re

from outrider.cluster.http.answers.call_formats.base import WholeCalls, call_with_json
from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.tool_values import dumped
from outrider.engine.text.chat_format import CALL_MARKS

_MARKS = CALL_MARKS["gemma4"]


class Gemma(WholeCalls):
    openings, _endings = _MARKS[:2], _MARKS[2:4]
    _CALL = re.compile(r"\s*call:([\w.\-]+)(\{.*\})\s*", re.DOTALL)
    _TEXT = re.compile("|".join(f"{re.escape(mark)}(.*?){re.escape(mark)}" for mark in _MARKS[4:]), re.DOTALL)
    _KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w\-]*)(\s*:)")

    def _call(self, text: str) -> Call | None:
        found = self._CALL.fullmatch(text)
        if found is None:
            return None
        made, at = list[str](), 0
        for string in self._TEXT.finditer(found[2]):  # keys are quoted outside of texts only
            made += [self._quoted(found[2][at : string.start()]), dumped(string[string.lastindex or 0])]
            at = string.end()
        return call_with_json(found[1], "".join([*made, self._quoted(found[2][at:])]))

    def _quoted(self, text: str) -> str:
        return self._KEY.sub(r'\1"\2"\3', text)
