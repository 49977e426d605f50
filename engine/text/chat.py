"""A conversation as the token ids of a prompt, by the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from engine.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a client may write, and what templates call it; "developer" is OpenAI's newer word for "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_BRACKETED = re.compile(r"<[^<>\s]+>")

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> list[int]:
    """The prompt after which the model writes the assistant's next message.

    Args:
        tokenizer: its chat template is used; a plain one (``User: ...``) when it has none.
        messages: each with ``role`` and ``content``, at least one; of what else they hold, as ``tool_calls``, templates know.
        tools: what the model may call, as ``transformers`` has it: ``{"type": "function", "function": {...}}``.
        add_generation_prompt: false ends the prompt after the last message.

    Returns:
        [n] token ids with one beginning-of-sequence token at most: the template's own, or the tokenizer's for the plain template.

    Raises:
        RequestError: no messages, an unknown role, an order of roles that the template refuses, or tools that it does not show.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    turns = [{**message, "role": _role(index, message["role"])} for index, message in enumerate(messages)]
    template = None if tokenizer.chat_template else DEFAULT_TEMPLATE
    if tools and "tools" not in _template(tokenizer, tools):
        raise RequestError("tools", "the model's chat template does not show tools; leave them out, or send tool_choice: none")
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    options |= {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(turns, chat_template=template, **options)
    except (TemplateError, TypeError, RecursionError) as error:  # a template that meets what it does not expect fails like this
        raise RequestError("messages", f"the model's chat template refuses these messages: {error}") from error
    # A template writes the special tokens itself: encoding must not add them a second time.
    ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
    return _begin(tokenizer) + ids if template else ids


def marks_tool_calls(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], mark: str) -> bool:
    """Whether the chat template tells the model to write calls of tools with a mark, such as ``<tool_call>``."""
    return bool(tools) and mark in _template(tokenizer, tools)


def bracketed_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts like ``<think>`` that are tokens of their own beside the vocabulary, and show as text."""
    return [
        text for token in tokenizer.added_tokens_decoder.values()
        if not token.special and _BRACKETED.fullmatch(text := token.content)
    ]  # fmt: skip


def _template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> str:
    """The template that is used with these tools: some tokenizers have one of its own for them."""
    if not tokenizer.chat_template:
        return DEFAULT_TEMPLATE
    return str(tokenizer.get_chat_template(None, tools=list(tools) or None))


def _role(index: int, role: str) -> str:
    if role not in ROLES:
        raise RequestError(f"messages[{index}].role", f"{role!r} is not a role; allowed: {', '.join(ROLES)}")
    return ROLES[role]


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-sequence token, if this tokenizer puts one before plain text."""
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []
