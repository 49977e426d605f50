"""Routes ``/tokenize``, ``/detokenize``, ``/tokenizer_info`` and ``/v1/documents/text``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json

from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.checked_bodies import check_encoding
from outrider.cluster.http.documents import Authorization
from outrider.cluster.http.text_threads import TextThreads
from outrider.cluster.http.types.openai import DetokenizeRequest, TokenizeRequest
from outrider.cluster.http.types.strict import MAX_TEXT, MAX_TOKEN_IDS
from outrider.engine.errors import RequestError
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.text.chat import render_chat
from outrider.engine.text.file_text import FileReader, UnreadableFileError, needs_process
from outrider.engine.text.tokenizer import token_ids

_PIECE = 1 << 14  # tokens that are converted to JSON at once
_MAX_TEXT_BYTES = 4 * MAX_TEXT  # bytes of detokenized text as the vocabulary spells it; any text for /tokenize fits


class Tokens(BaseModel):
    """Response to ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]  # at most MAX_TOKEN_IDS token ids
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Response to ``/detokenize``. The text includes special tokens."""

    prompt: str


class FileText(BaseModel):
    """Response to ``/v1/documents/text``."""

    text: str


@dataclass(frozen=True, slots=True)
class TextService:
    """Service behind the text routes."""

    threads: TextThreads
    tenancy: Tenancy
    model: Callable[[str | None], Awaitable[ModelInfo]]  # describes the served model; raises ApiError (404) for another name

    async def tokenize(self, body: TokenizeRequest, authorization: Authorization = None) -> Response:
        """Return the prompt tokens of a completion or a chat with this input, as ``Tokens``.

        Raises ApiError (401, 404), or RequestError if the messages cannot be rendered or have too many tokens.
        """
        self.tenancy.tenant_of(authorization)
        info = await self.model(body.model)
        return _json(await self.threads.run(self._tokenized, body, info.max_model_len))

    async def detokenize(self, body: DetokenizeRequest, authorization: Authorization = None) -> Response:
        """Return the text of some tokens, special ones included, as ``Detokenized``."""
        self.tenancy.tenant_of(authorization)
        info = await self.model(body.model)
        return _json(await self.threads.run(self._detokenized, body.tokens, info.vocab_size))

    async def tokenizer_info(self, authorization: Authorization = None) -> dict[str, Any]:
        """Return the special tokens and the chat template by the names of ``tokenizer_config.json``. Raises ApiError (401)."""
        self.tenancy.tenant_of(authorization)
        tokenizer = self.threads.tokenizer
        special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {"tokenizer_class": type(tokenizer).__name__, **special, "chat_template": tokenizer.chat_template}

    async def text_of_file(self, request: Request, authorization: Authorization = None) -> Response:
        """Extract the text of a file (plain text, Markdown, HTML or PDF) for ``reference_documents``, as ``FileText``.

        Raises ApiError (401; 415 for a compressed file; 429 if too many files of the key are waiting), or RequestError if the
        file has no readable text.
        """
        self.tenancy.tenant_of(authorization)
        check_encoding(request)
        content, reader = await request.body(), FileReader()
        run = self.threads.readers.run if needs_process(content) else self.threads.run
        try:
            return _json(await run(lambda: FileText(text=reader.read(content)).model_dump_json().encode()))
        except UnreadableFileError as error:
            raise RequestError("body", str(error)) from None
        finally:
            reader.stop()  # ends the reading process if the client disconnected

    def _tokenized(self, body: TokenizeRequest, max_model_len: int) -> bytes:
        tokenizer = self.threads.tokenizer
        if body.messages is not None:
            tools = [tool.shown() for tool in body.tools or ()]
            turns = [message.turn() for message in body.messages]
            opens = body.add_generation_prompt and not body.continue_final_message
            kwargs = body.chat_template_kwargs
            ids = render_chat(tokenizer, turns, tools, opens, kwargs, bool(body.continue_final_message))
        else:
            ids = token_ids(tokenizer, body.prompt or "", body.add_special_tokens is not False)
        if len(ids) > MAX_TOKEN_IDS:
            field = "prompt" if body.messages is None else "messages"
            raise RequestError(field, f"it has {len(ids)} tokens, the maximum is {MAX_TOKEN_IDS}: send it in parts")
        names = b"null"
        if body.return_token_strs:
            names = _json_list(ids, lambda piece: [str(name) for name in tokenizer.convert_ids_to_tokens(piece)])
        lists = b'"tokens":%b,"token_strs":%b' % (_json_list(ids, list), names)
        return b'{"count":%d,"max_model_len":%d,%b}' % (len(ids), max_model_len, lists)

    def _detokenized(self, ids: list[int], vocab_size: int) -> bytes:
        if ids and max(ids) >= vocab_size:
            raise RequestError("tokens", f"token ids must be between 0 and {vocab_size - 1}, got {max(ids)}")
        lengths = self.threads.token_lengths
        if sum(lengths.get(token, 0) for token in ids) > _MAX_TEXT_BYTES:
            raise RequestError("tokens", f"their text has more than {_MAX_TEXT_BYTES:,} bytes: send them in parts")
        # decode_batch releases the GIL.
        (text,) = self.threads.tokenizer.backend_tokenizer.decode_batch([ids], skip_special_tokens=False)
        return Detokenized(prompt=text).model_dump_json().encode()


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _json_list(ids: list[int], shown: Callable[[list[int]], list[Any]]) -> bytes:
    # Built in pieces, because Python objects take many times the memory of their JSON.
    pieces = (to_json(shown(ids[start : start + _PIECE]))[1:-1] for start in range(0, len(ids), _PIECE))
    return b"[%b]" % b",".join(pieces)
