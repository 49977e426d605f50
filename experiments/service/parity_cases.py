"""Cases of the parity comparison: every parameter that the server honours, with several values each.

Values that depend on the output, such as stop strings, are taken from the model's answer to the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Route = Literal["chat", "text", "responses"]
CHAT: tuple[Route, ...] = ("chat",)
TEXT: tuple[Route, ...] = ("text",)
BOTH: tuple[Route, ...] = ("chat", "text")
RESPONSES: tuple[Route, ...] = ("responses",)
ALL: tuple[Route, ...] = (*BOTH, "responses")
GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11}

_SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["library", "museum"]}, "hour": {"type": "integer", "minimum": 0, "maximum": 24}},
    "required": ["place", "hour"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": _SCHEMA}
_TOOL: dict[str, Any] = {"type": "function", "function": _FUNCTION}
_ITEM: dict[str, Any] = {"type": "function", **_FUNCTION, "strict": False}  # the form of /v1/responses
_GRAMMAR = 'start: "The " WORD\nWORD: /[a-z]{2,12}/'
_BOUND = {"json": _SCHEMA, "regex": "[a-z]{2,9}[0-9]", "choice": ["The library", "nine", "The museum"], "grammar": _GRAMMAR}


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and the model's greedy answer to it."""

    prompt: str
    text: str
    ids: Sequence[int]  # of the text
    prompt_ids: Sequence[int]  # of the prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A value of a parameter."""

    field: str
    body: Mapping[str, Any]  # fields added to the request
    routes: tuple[Route, ...] = BOTH
    settings: tuple[Mapping[str, Any], ...] = (GREEDY, SAMPLED)

    @property
    def value(self) -> str:
        """The fields as JSON of bounded length."""
        asked = {name: value for name, value in self.body.items() if name != "tools" or self.field == name}
        text = json.dumps(asked, ensure_ascii=False)
        return text if len(text) <= 300 else f"{text[:297]}..."


def cases(said: Said) -> Iterator[Case]:
    """Yield all cases of one prompt."""
    yield Case("(none)", {}, ALL)
    for temperature in (0, 0.3, 1.5):
        yield Case("temperature", {"temperature": temperature}, ALL, settings=({"seed": 5},))
    for seed in (0, 7, 2**62):
        yield Case("seed", {"seed": seed}, ALL, settings=({"temperature": 1},))
    tables = (
        (ALL, _everywhere(said)), (BOTH, _chats_and_texts()), (CHAT, _chats(said)), (TEXT, _texts(said)), (RESPONSES, _items()),
    )  # fmt: skip
    for routes, values in tables:
        for name, each in values.items():
            yield from (Case(name, {name: value}, routes) for value in each)
    yield from _combined(said)


def _everywhere(said: Said) -> dict[str, tuple[Any, ...]]:
    first, last = said.ids[0], said.ids[-1]
    inside, late = _stops(said)
    return {
        "top_p": (0.1, 0.9),
        "top_k": (1, 5, -1),
        "min_p": (0.02, 0.5),
        "repetition_penalty": (1.3, 0.8),
        "presence_penalty": (1.5, -0.5),
        "frequency_penalty": (1.0, -0.3),
        "logit_bias": ({str(first): -100}, {str(first): -100, str(last): 4.5}),
        "min_tokens": (1, 12),
        "stop": (inside, [late, inside], "never to be said"),
        "stop_token_ids": ([said.ids[len(said.ids) // 2]], [last, first]),
        "reference_documents": ([said.text], [said.text[::-1], said.text * 2]),
        "priority": (0,),
    }


def _stops(said: Said) -> tuple[str, str]:
    middle = len(said.text) // 2
    return said.text[middle : middle + 3], said.text[-2:]


def _chats_and_texts() -> dict[str, tuple[Any, ...]]:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    return {
        "n": (2, 3),
        "max_tokens": (1, 2, 9),
        "ignore_eos": (True,),
        "skip_special_tokens": (False,),
        "prompt_logprobs": (0, 2),
        "return_token_ids": (True,),
        "user": ("someone",),
        "safety_identifier": ("someone",),
        "prompt_cache_key": ("someone",),
        "response_format": ({"type": "text"}, {"type": "json_object"}, named),
        "structured_outputs": tuple({kind: value} for kind, value in _BOUND.items()),
        **{f"guided_{kind}": (value,) for kind, value in _BOUND.items()},
        "reference_embedding": ([0.5, -0.25, 1.0, 0.125],),
        "cache": ("tenant", "private", "off"),
        "timeout": (600.0,),
        "speculation": ({"max_draft_tokens": 1}, {"max_draft_tokens": 5}),
    }


def _chats(said: Said) -> dict[str, tuple[Any, ...]]:
    return {
        "max_completion_tokens": (1, 9),
        "logprobs": (True,),
        "include_reasoning": (True, False),
        "reasoning_effort": ("none", "low"),
        "chat_template_kwargs": ({}, {"enable_thinking": False}),
        "tools": ([_TOOL], [{"type": "function", "function": {**_FUNCTION, "strict": True}}]),
        "prediction": tuple({"type": "content", "content": text} for text in (said.text, said.text[3:] + said.text)),
    }


def _texts(said: Said) -> dict[str, tuple[Any, ...]]:
    ids = list(said.prompt_ids)
    return {
        "logprobs": (0, 3),
        "echo": (True,),
        "prompt": (ids, [ids, ids[: len(ids) // 2]], [said.prompt, said.prompt[:-3]]),
    }


def _items() -> dict[str, tuple[Any, ...]]:
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And you?"}]
    named = {"type": "json_schema", "name": "a", "schema": _SCHEMA}
    return {
        "max_output_tokens": (1, 9),
        "instructions": ("Be brief.",),
        "input": (turns,),
        "text": tuple({"format": form} for form in ({"type": "text"}, {"type": "json_object"}, named)),
        "tools": ([{**_ITEM, "strict": True}],),
        "reasoning": ({}, {"effort": "none"}),
        "metadata": ({"of": "me"},),
        "store": (False,),
    }


def _combined(said: Said) -> Iterator[Case]:
    """Yield cases whose parameter needs another one beside it."""
    inside, late = _stops(said)
    for stop in (inside, [late, inside]):
        yield Case("include_stop_str_in_output", {"include_stop_str_in_output": True, "stop": stop})
    for alternatives in (1, 4):
        yield Case("top_logprobs", {"logprobs": True, "top_logprobs": alternatives}, CHAT)
    yield Case("echo", {"echo": True, "logprobs": 2}, TEXT)
    yield Case("echo", {"echo": True, "logprobs": 1, "max_tokens": 0}, TEXT)
    yield Case("prompt", {"prompt": [said.prompt, said.prompt[:-3]], "n": 2}, TEXT)
    for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "look_up"}}):
        yield Case("tool_choice", {"tools": [_TOOL], "tool_choice": choice, "max_tokens": 48}, CHAT)
    for item_choice in ("auto", "none", "required", {"type": "function", "name": "look_up"}):
        yield Case("tool_choice", {"tools": [_ITEM], "tool_choice": item_choice, "max_output_tokens": 48}, RESPONSES)
    yield Case("parallel_tool_calls", {"tools": [_TOOL], "parallel_tool_calls": False}, CHAT)
    yield Case("parallel_tool_calls", {"tools": [_ITEM], "parallel_tool_calls": False}, RESPONSES)
