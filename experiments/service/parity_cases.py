"""Cases of the parity comparison: every parameter that the server honours, with the values of ``parity_cases.yaml``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Route = Literal["chat", "text", "responses"]
GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11}


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and the model's greedy answer to it."""

    prompt: str
    text: str
    ids: Sequence[int]  # of the text
    prompt_ids: Sequence[int]  # of the prompt

    def parts(self) -> dict[str, Any]:
        """Return the values of the names in the table, such as strings that occur in the answer."""
        middle, prompt_ids = len(self.text) // 2, list(self.prompt_ids)
        return {
            "$text": self.text, "$reversed": self.text[::-1], "$doubled": self.text * 2, "$continued": self.text[3:] + self.text,
            "$inside": self.text[middle : middle + 3], "$late": self.text[-2:], "$first": str(self.ids[0]),
            "$last": str(self.ids[-1]), "$first_id": self.ids[0], "$last_id": self.ids[-1],
            "$middle_id": self.ids[len(self.ids) // 2], "$ids": prompt_ids, "$half_ids": prompt_ids[: len(prompt_ids) // 2],
            "$prompt": self.prompt, "$shorter_prompt": self.prompt[:-3],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A value of a parameter."""

    field: str
    body: Mapping[str, Any]  # fields added to the request
    routes: Sequence[Route]
    settings: Sequence[Mapping[str, Any]] = (GREEDY, SAMPLED)

    @property
    def value(self) -> str:
        """The fields as JSON of bounded length."""
        asked = {name: value for name, value in self.body.items() if name != "tools" or self.field == name}
        text = json.dumps(asked, ensure_ascii=False)
        return text if len(text) <= 300 else f"{text[:297]}..."


def cases(said: Said) -> Iterator[Case]:
    """Yield all cases of one prompt."""
    parts = said.parts()
    for group in yaml.safe_load(Path(__file__).with_name("parity_cases.yaml").read_text(encoding="utf-8")):
        bodies = [(name, {name: value}) for name, values in group.get("values", {}).items() for value in values]
        bodies += [(name, body) for name, each in group.get("bodies", {}).items() for body in each]
        for name, body in bodies:
            yield Case(name, _filled(body, parts), group["routes"], group.get("settings", (GREEDY, SAMPLED)))


def _filled(value: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {parts.get(name, name): _filled(each, parts) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, parts) for each in value]
    return parts.get(value, value) if isinstance(value, str) else value
