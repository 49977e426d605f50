"""What ``experiments.service.parity.run`` asks for: every parameter that the server honours, with several values each.

Values that must meet the text to do anything, such as stop strings, are taken from what the model says to the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Route = Literal["chat", "text", "responses"]
BOTH: tuple[Route, ...] = ("chat", "text")
ALL: tuple[Route, ...] = (*BOTH, "responses")
GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11}

_SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["library", "museum"]}, "hour": {"type": "integer", "minimum": 0, "maximum": 24}},
    "required": ["place", "hour"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": _SCHEMA}}
_STRICT_TOOL = {"type": "function", "function": {**_TOOL["function"], "strict": True}}  # type: ignore[dict-item]


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and what the model says to it, greedily."""

    prompt: str
    text: str
    ids: Sequence[int]  # of the text
    prompt_ids: Sequence[int]  # of the prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A value of a parameter."""

    field: str
    body: Mapping[str, Any]  # fields that are added to the request
    routes: tuple[Route, ...] = BOTH
    settings: tuple[Mapping[str, Any], ...] = (GREEDY, SAMPLED)

    @property
    def value(self) -> str:
        """What was asked for, as JSON of bounded length."""
        asked = {name: value for name, value in self.body.items() if name != "tools" or self.field == name}
        text = json.dumps(asked, ensure_ascii=False)
        return text if len(text) <= 300 else f"{text[:297]}..."


def cases(said: Said) -> Iterator[Case]:
    """All that is asked about one prompt."""
    yield Case("(none)", {}, ALL)
    yield from _sampling(said)
    yield from _length_and_end(said)
    yield from _told(said)
    yield from _bound()
    yield from _drafts(said)
    yield from _items()


def _values(field: str, values: Sequence[Any], routes: tuple[Route, ...] = BOTH) -> Iterator[Case]:
    for value in values:
        yield Case(field, {field: value}, routes)


def _sampling(said: Said) -> Iterator[Case]:
    for temperature in (0, 0.3, 1.5):
        yield Case("temperature", {"temperature": temperature}, ALL, settings=({"seed": 5},))
    for seed in (0, 7, 2**62):
        yield Case("seed", {"seed": seed}, ALL, settings=({"temperature": 1},))
    yield from _values("top_p", (0.1, 0.9), ALL)
    yield from _values("top_k", (1, 5, -1), ALL)
    yield from _values("min_p", (0.02, 0.5), ALL)
    yield from _values("repetition_penalty", (1.3, 0.8), ALL)
    yield from _values("presence_penalty", (1.5, -0.5), ALL)
    yield from _values("frequency_penalty", (1.0, -0.3), ALL)
    yield from _values("logit_bias", ({str(said.ids[0]): -100}, {str(said.ids[0]): -100, str(said.ids[-1]): 4.5}), ALL)
    yield from _values("n", (2, 3))


def _length_and_end(said: Said) -> Iterator[Case]:
    middle = len(said.text) // 2
    inside, late = said.text[middle : middle + 3], said.text[-2:]
    yield from _values("max_tokens", (1, 2, 9))
    yield from _values("max_completion_tokens", (1, 9), ("chat",))
    yield from _values("min_tokens", (1, 12), ALL)
    yield from _values("stop", (inside, [late, inside], "never to be said"), ALL)
    yield from _values("stop_token_ids", ([said.ids[len(said.ids) // 2]], [said.ids[-1], said.ids[0]]), ALL)
    yield from _values("ignore_eos", (True,))
    yield Case("include_stop_str_in_output", {"include_stop_str_in_output": True, "stop": inside})
    yield Case("include_stop_str_in_output", {"include_stop_str_in_output": True, "stop": [late, inside]})
    yield from _values("skip_special_tokens", (False,))


def _told(said: Said) -> Iterator[Case]:
    yield from _values("logprobs", (0, 3), ("text",))
    yield from _values("logprobs", (True,), ("chat",))
    for alternatives in (1, 4):
        yield Case("top_logprobs", {"logprobs": True, "top_logprobs": alternatives}, ("chat",))
    yield from _values("prompt_logprobs", (0, 2))
    yield from _values("echo", (True,), ("text",))
    yield Case("echo", {"echo": True, "logprobs": 2}, ("text",))
    yield Case("echo", {"echo": True, "logprobs": 1, "max_tokens": 0}, ("text",))
    yield from _values("return_token_ids", (True,))
    yield from _values("include_reasoning", (True, False), ("chat",))
    ids = list(said.prompt_ids)
    yield from _values("prompt", (ids, [ids, ids[: len(ids) // 2]], [said.prompt, said.prompt[:-3]]), ("text",))
    yield Case("prompt", {"prompt": [said.prompt, said.prompt[:-3]], "n": 2}, ("text",))
    yield from _values("reasoning_effort", ("none", "low"), ("chat",))
    yield from _values("chat_template_kwargs", ({}, {"enable_thinking": False}), ("chat",))
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        yield Case(label, {label: "someone"})


def _bound() -> Iterator[Case]:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    yield from _values("response_format", ({"type": "text"}, {"type": "json_object"}, named))
    kinds = {"json": _SCHEMA, "regex": "[a-z]{2,9}[0-9]", "choice": ["The library", "nine", "The museum"]}
    for kind, value in kinds.items():
        yield Case("structured_outputs", {"structured_outputs": {kind: value}})
        yield Case(f"guided_{kind}", {f"guided_{kind}": value})
    lark = 'start: "The " WORD\nWORD: /[a-z]{2,12}/'
    yield Case("structured_outputs", {"structured_outputs": {"grammar": lark}})
    yield Case("guided_grammar", {"guided_grammar": lark})
    function = {"type": "function", "function": {"name": "look_up"}}
    for choice in ("auto", "none", "required", function):
        yield Case("tool_choice", {"tools": [_TOOL], "tool_choice": choice, "max_tokens": 48}, ("chat",))
    yield Case("tools", {"tools": [_TOOL]}, ("chat",))
    yield Case("tools", {"tools": [_STRICT_TOOL]}, ("chat",))
    yield Case("parallel_tool_calls", {"tools": [_TOOL], "parallel_tool_calls": False}, ("chat",))


def _items() -> Iterator[Case]:
    """What responses have in a form of their own."""
    route: tuple[Route, ...] = ("responses",)
    yield from _values("max_output_tokens", (1, 9), route)
    yield from _values("instructions", ("Be brief.",), route)
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And you?"}]
    yield from _values("input", (turns,), route)
    named = {"type": "json_schema", "name": "a", "schema": _SCHEMA}
    yield from _values("text", tuple({"format": form} for form in ({"type": "text"}, {"type": "json_object"}, named)), route)
    tool = {"type": "function", **_TOOL["function"], "strict": False}  # type: ignore[dict-item]
    for choice in ("auto", "none", "required", {"type": "function", "name": "look_up"}):
        yield Case("tool_choice", {"tools": [tool], "tool_choice": choice, "max_output_tokens": 48}, route)
    yield Case("tools", {"tools": [{**tool, "strict": True}]}, route)
    yield Case("parallel_tool_calls", {"tools": [tool], "parallel_tool_calls": False}, route)
    yield from _values("reasoning", ({}, {"effort": "none"}), route)
    yield from _values("metadata", ({"of": "me"},), route)
    yield from _values("store", (False,), route)


def _drafts(said: Said) -> Iterator[Case]:
    """What only decides who drafts, and from what."""
    yield from _values("reference_documents", ([said.text], [said.text[::-1], said.text * 2]), ALL)
    predictions = ({"type": "content", "content": text} for text in (said.text, said.text[3:] + said.text))
    yield from _values("prediction", tuple(predictions), ("chat",))
    yield from _values("reference_embedding", ([0.5, -0.25, 1.0, 0.125],))
    yield from _values("cache", ("tenant", "private", "off"))
    yield from _values("priority", (0,), ALL)
    yield from _values("timeout", (600.0,))
    yield from _values("speculation", ({"max_draft_tokens": 1}, {"max_draft_tokens": 5}))
