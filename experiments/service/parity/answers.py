"""Answers of the server in one shape, whole or put together from a stream, and how two of them differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

NEAR = 0.02  # logarithms of probabilities: where a model is not served exactly, batches of other sizes round differently


@dataclass(slots=True)
class Choice:
    """One choice."""

    text: str = ""
    finish_reason: str | None = None
    calls: list[list[str]] = field(default_factory=list)  # name and arguments
    tokens: list[str] = field(default_factory=list)  # those that have log-probabilities
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of completions
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        """Takes in a whole choice, or a chunk of one."""
        message = part.get("message") or part.get("delta") or {}
        self.text += part.get("text") or message.get("content") or ""
        self.finish_reason = part.get("finish_reason") or self.finish_reason
        self.calls += [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
        self.token_ids += part.get("token_ids") or ()
        self.prompt_token_ids = part.get("prompt_token_ids") or self.prompt_token_ids
        self.prompt_logprobs = part.get("prompt_logprobs") or self.prompt_logprobs
        told = part.get("logprobs") or {}
        if "tokens" in told:
            self.tokens += told["tokens"]
            self.logprobs += told["token_logprobs"]
            self.offsets += told["text_offset"]
        for entry in told.get("content") or ():
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])

    def numbers(self) -> Iterator[float]:
        """All log-probabilities of emitted and of prompt tokens."""
        yield from (value for value in self.logprobs if value is not None)
        for entry in self.prompt_logprobs or ():
            yield from (told["logprob"] for told in (entry or {}).values())

    def names(self) -> dict[str, Any]:
        """All that must be equal to the letter."""
        prompt = [list(entry or ()) for entry in self.prompt_logprobs or ()]
        return {
            "text": self.text, "finish_reason": self.finish_reason, "calls": self.calls, "tokens": self.tokens,
            "offsets": self.offsets, "token_ids": self.token_ids, "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": prompt,
        }  # fmt: skip


@dataclass(slots=True)
class Answer:
    """What came of a request."""

    status: int
    error: str | None = None  # its message
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, part: Mapping[str, Any]) -> None:
        """Takes in a whole answer, or a chunk of one."""
        if "error" in part:
            self.error = part["error"]["message"]
        for choice in part.get("choices") or ():
            # Those of an answer as a whole are told beside the choices in a chat.
            beside = {name: part[name] for name in ("prompt_logprobs", "prompt_token_ids") if part.get(name)}
            self.choices.setdefault(choice["index"], Choice()).add(beside | choice)
        self.usage |= part.get("usage") or {}


def read(status: int, content: str) -> Answer:
    """The body of a response, server-sent events or one object.

    Raises:
        ValueError: it is neither.
    """
    answer = Answer(status)
    if not content.startswith("data: "):
        answer.add(json.loads(content))
        return answer
    events = content.removesuffix("\n\n").split("\n\n")
    for event in events:
        if event != "data: [DONE]":
            answer.add(json.loads(event.removeprefix("data: ")))
    if events[-1] != "data: [DONE]" and answer.error is None:
        answer.error = "the stream has no [DONE]"
    return answer


def differences(expected: Answer, got: Answer) -> tuple[list[str], float]:
    """What is not the same, by name, and the largest gap between two log-probabilities of the same token.

    Args:
        expected: without speculation.
        got: with it.
    """
    found = [name for name in ("status", "error") if getattr(expected, name) != getattr(got, name)]
    if expected.choices.keys() != got.choices.keys():
        return [*found, "choices"], 0.0
    gap = 0.0
    for index, choice in expected.choices.items():
        other = got.choices[index]
        theirs = other.names()
        wrong = [f"choices[{index}].{name}" for name, value in choice.names().items() if value != theirs[name]]
        found += wrong
        if not wrong:
            gap = max((gap, *(abs(one - two) for one, two in zip(choice.numbers(), other.numbers(), strict=True))))
    if gap > NEAR:
        found.append("logprobs")
    # Which tokens of a prompt another request had computed depends on who came before, and is no part of the answer.
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
    found += [f"usage.{name}" for name in counts if expected.usage.get(name) != got.usage.get(name)]
    return found, gap
