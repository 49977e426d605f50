"""Parser for strategies with options, ``NAME[:option=value,...]``, as used by commands and configurations."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.decoding.drafters.base import Drafter

_NEXT_OPTION = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")  # a comma before the next name: values may contain commas


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Strategy name and the options of its drafter."""

    label: str  # the unparsed text
    name: str
    options: dict[str, Any]

    def build(self) -> Drafter:
        """Build a new drafter. Raise ``ValueError`` for an unknown strategy or option, or a value outside its range."""
        from outrider.decoding.drafters import build_drafter

        return build_drafter(self.name, self.options)


def parse_strategy(text: str) -> StrategyChoice:
    """Parse a strategy such as ``llma:copy_length=9,include_prompt=false``. Raise ``ValueError`` for an option without ``=``."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in _NEXT_OPTION.split(rest) if rest.strip() else ():
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not key:
            raise ValueError(f"strategy {text!r}: {pair!r} must be option=value")
        try:
            # Values are JSON, or else strings.
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return StrategyChoice(text, name.strip(), options)
