"""Answers through LlamaIndex's class for servers with OpenAI's API, and the embedding model as a class of LlamaIndex."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from outrider.experiments.rag.conversation import Message, Stream
from outrider.experiments.rag.embeddings import MiniLM


class MiniLMEmbedding(BaseEmbedding):
    """``MiniLM`` for the argument ``embed_model``."""

    @cached_property
    def _model(self) -> MiniLM:
        return MiniLM()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._model.embed_query(text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.embed_documents(texts)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._model.embed_query(query)


def answers(url: str, key: str, model: str, max_tokens: int) -> Stream:
    """Return a stream of greedy answers of a server."""
    llm = OpenAILike(api_base=f"{url}/v1", api_key=key, model=model, max_tokens=max_tokens, temperature=0, is_chat_model=True)

    def stream(messages: list[Message], extra: dict[str, Any]) -> Iterator[str]:
        told = [ChatMessage(**message) for message in messages]
        for chunk in llm.stream_chat(told, extra_body=extra):
            yield chunk.delta or ""

    return stream
