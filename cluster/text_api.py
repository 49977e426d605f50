"""Texts as tokens and tokens as text: ``/tokenize`` and ``/detokenize``, as the model of this server has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import FastAPI, Header
from transformers import PreTrainedTokenizerFast

from cluster.documents import ERRORS
from cluster.tenancy import Tenancy
from cluster.text_types import Detokenized, DetokenizeRequest, TokenizeRequest, Tokens
from engine.chat import render_chat
from engine.errors import RequestError
from engine.loading import ModelInfo


class TextService:
    """What the routes do."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        tenancy: Tenancy,
        model: Callable[[str | None], Awaitable[ModelInfo]],
    ) -> None:
        """
        Args:
            tokenizer: of the model.
            tenancy: knows the keys.
            model: what is served; raises ``ApiError`` (404) for another name than its own.
        """
        self._tokenizer, self._tenancy, self._model = tokenizer, tenancy, model

    async def tokenize(self, body: TokenizeRequest, authorization: str | None) -> Tokens:
        """The tokens that a completion or a chat with this input begins with."""
        self._tenancy.tenant_of(authorization)
        info = await self._model(body.model)
        if body.messages is not None:
            tools = [tool.shown() for tool in body.tools or ()]
            ids = render_chat(self._tokenizer, [message.turn() for message in body.messages], tools, body.add_generation_prompt)
        else:
            ids = self._tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        names = [str(name) for name in self._tokenizer.convert_ids_to_tokens(ids)] if body.return_token_strs else None
        return Tokens(count=len(ids), max_model_len=info.max_model_len, tokens=ids, token_strs=names)

    async def detokenize(self, body: DetokenizeRequest, authorization: str | None) -> Detokenized:
        """The text of some tokens, special ones included."""
        self._tenancy.tenant_of(authorization)
        info = await self._model(body.model)
        if body.tokens and max(body.tokens) >= info.vocab_size:
            raise RequestError("tokens", f"token ids must be between 0 and {info.vocab_size - 1}, got {max(body.tokens)}")
        text = self._tokenizer.decode(body.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Detokenized(prompt=str(text))


def add_text_routes(app: FastAPI, service: TextService) -> None:
    """Gives an application the routes."""

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(
        body: TokenizeRequest, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
    ) -> Tokens:
        return await service.tokenize(body, authorization)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(
        body: DetokenizeRequest, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
    ) -> Detokenized:
        return await service.detokenize(body, authorization)
