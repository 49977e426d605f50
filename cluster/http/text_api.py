"""Texts as tokens, tokens as text and files as text: ``/tokenize``, ``/detokenize`` and ``/v1/documents/text``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from cluster.admission.tenancy import Tenancy
from cluster.http.documents import Authorization
from cluster.http.text_threads import TextThreads
from cluster.http.types.openai import DetokenizeRequest, TokenizeRequest
from cluster.http.types.strict import MAX_TOKEN_IDS
from engine.errors import RequestError
from engine.loading.model_info import ModelInfo
from engine.text.chat import render_chat
from engine.text.file_text import UnreadableFileError, text_of_file

_FILES = 2  # that are read at once


class Tokens(BaseModel):
    """The answer to ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]  # at most MAX_TOKEN_IDS
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The answer to ``/detokenize``. Special tokens are spelled, as all others are."""

    prompt: str


class FileText(BaseModel):
    """The answer to ``/v1/documents/text``."""

    text: str


@dataclass(frozen=True, slots=True)
class TextService:
    """What the routes do."""

    threads: TextThreads  # with the tokenizer of the model
    tenancy: Tenancy  # knows the keys
    model: Callable[[str | None], Awaitable[ModelInfo]]  # what is served; raises ApiError (404) for another name than its own
    _files: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_FILES))

    async def tokenize(self, body: TokenizeRequest, authorization: Authorization = None) -> Response:
        """The tokens that a completion or a chat with this input begins with, as ``Tokens``.

        Raises:
            ApiError: 401, 404; RequestError: 400, the messages cannot be rendered, or the tokens are too many.
        """
        self.tenancy.tenant_of(authorization)
        info = await self.model(body.model)
        text = await self.threads.run(self._tokenized, body, info.max_model_len)
        return Response(text, media_type="application/json")

    async def detokenize(self, body: DetokenizeRequest, authorization: Authorization = None) -> Detokenized:
        """The text of some tokens, special ones included."""
        self.tenancy.tenant_of(authorization)
        info = await self.model(body.model)
        if body.tokens and max(body.tokens) >= info.vocab_size:
            raise RequestError("tokens", f"token ids must be between 0 and {info.vocab_size - 1}, got {max(body.tokens)}")
        decode = self.threads.tokenizer.backend_tokenizer.decode_batch  # which lets go of the interpreter
        (text,) = await self.threads.run(decode, [body.tokens], skip_special_tokens=False)
        return Detokenized(prompt=text)

    async def text_of_file(self, request: Request, authorization: Authorization = None) -> FileText:
        """The text of a document for ``reference_documents``: the body is a file of text, Markdown, HTML or PDF.

        Raises:
            ApiError: 401; RequestError: 400, the file has no text that can be had.
        """
        self.tenancy.tenant_of(authorization)
        content = await request.body()
        async with self._files:
            try:
                return FileText(text=await asyncio.to_thread(text_of_file, content))
            except UnreadableFileError as error:
                raise RequestError("body", str(error)) from None

    def _tokenized(self, body: TokenizeRequest, max_model_len: int) -> str:
        tokenizer = self.threads.tokenizer
        if body.messages is not None:
            tools = [tool.shown() for tool in body.tools or ()]
            turns = [message.turn() for message in body.messages]
            ids = render_chat(tokenizer, turns, tools, body.add_generation_prompt, body.chat_template_kwargs)
        else:
            ids = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        if len(ids) > MAX_TOKEN_IDS:
            field = "prompt" if body.messages is None else "messages"
            raise RequestError(field, f"{len(ids)} tokens, and at most {MAX_TOKEN_IDS} can be told: send it in parts")
        names = [str(name) for name in tokenizer.convert_ids_to_tokens(ids)] if body.return_token_strs else None
        return Tokens(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=names).model_dump_json()
