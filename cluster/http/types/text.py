"""Bodies of ``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, model_validator

from cluster.http.types.chat import Messages, Tools
from cluster.http.types.strict import Name, Strict, Text, TokenIds, unsupported


class TokenizeRequest(Strict):
    """``POST /tokenize``: a prompt as completions take it, or messages as chats do."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"continue_final_message": (False,)}

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # beside messages
    add_generation_prompt: bool = True  # beside messages: what begins the assistant's message comes last
    add_special_tokens: bool | None = None  # of a prompt: true when absent. Messages have those of their template
    return_token_strs: bool | None = None  # the tokens as the vocabulary spells them, too

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise unsupported("prompt", "send either prompt or messages")
        if self.messages is None and (self.tools or not self.add_generation_prompt):
            name = "tools" if self.tools else "add_generation_prompt"
            raise unsupported(name, f"{name} belongs to messages, not to a prompt")
        if self.messages is not None and self.add_special_tokens:
            raise unsupported("add_special_tokens", "a chat has the special tokens of its template; leave add_special_tokens out")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: Name | None = None
    tokens: TokenIds


class Tokens(BaseModel):
    """The answer to ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]  # at most MAX_TOKEN_IDS
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The answer to ``/detokenize``. Special tokens are spelled, as all others are."""

    prompt: str


TEXT_BODIES: dict[str, type[Strict]] = {"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
