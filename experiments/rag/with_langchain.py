"""Answers through LangChain's class for OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_openai import ChatOpenAI

from outrider.experiments.rag.conversation import Message, Stream


def answers(url: str, key: str, model: str, max_tokens: int) -> Stream:
    """Return a stream of greedy answers of a server."""
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_tokens=max_tokens, temperature=0)

    def stream(messages: list[Message], extra: dict[str, Any]) -> Iterator[str]:
        for chunk in chat.stream(messages, extra_body=extra):
            yield chunk.text

    return stream
