"""Format of GLM-4.5: the name, then pairs of ``<arg_key>`` and ``<arg_value>``, whose types are those of the schema."""

from __future__ import annotations

import re

from outrider.cluster.http.answers.call_formats.base import WholeCalls
from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.tool_values import dumped, value_json
from outrider.engine.text.chat_format import CALL_MARKS

_MARKS = CALL_MARKS["glm45"]


class Glm(WholeCalls):
    openings, _endings = _MARKS[:1], _MARKS[1:]
    _PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def _call(self, text: str) -> Call | None:
        name, mark, pairs = text.partition("<arg_key>")
        pairs, at, values, schema = mark + pairs, 0, list[str](), self._schemas.get(name.strip(), {})
        properties = schema.get("properties", {})
        while (pair := self._PAIR.match(pairs, at)) is not None:
            kind = properties.get(pair[1].strip(), {}) if isinstance(properties, dict) else {}
            values.append(f"{dumped(pair[1].strip())}: {value_json(pair[2], kind, schema)}")
            at = pair.end()
        is_call = at == len(pairs) and re.fullmatch(r"[\w.\-]+", name.strip()) is not None
        return Call(name.strip(), f"{{{', '.join(values)}}}") if is_call else None
