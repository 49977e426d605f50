"""A conversation as the token ids of a prompt, by the tokenizer's own chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from engine.errors import RequestError
from engine.text.chat_format import template_text
from engine.text.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a client may write, and what templates call it; "developer" is OpenAI's newer word for "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_BRACKETED = re.compile(r"<[^<>\s]+>")

_THINKING = re.compile(r"""\.thinking\b|\[?["']thinking["']""")  # how a template reads the reasoning of GPT-OSS's turns

# What the server says itself of a prompt, or of what is made of it.
_OWN_VARIABLES = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt after which the model writes the assistant's next message.

    Args:
        tokenizer: its chat template is used; a plain one (``User: ...``) when it has none.
        messages: each with ``role`` and ``content``, at least one; of what else they hold, as ``tool_calls``, templates know.
        tools: what the model may call, as ``transformers`` has it: ``{"type": "function", "function": {...}}``.
        add_generation_prompt: false ends the prompt after the last message.
        variables: of the template, such as ``enable_thinking``.

    Returns:
        [n] token ids with one beginning-of-sequence token at most: the template's own, or the tokenizer's for the plain template.

    Raises:
        RequestError: no messages, an unknown role, an order of roles that the template refuses, tools that it does not show, or
            variables that it does not know.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    turns = [{**message, "role": _role(index, message["role"])} for index, message in enumerate(messages)]
    template = None if tokenizer.chat_template else DEFAULT_TEMPLATE
    if _THINKING.search(template_text(tokenizer)):
        turns = [_with_thinking(turn) for turn in turns]
    if tools and "tools" not in _template(tokenizer, tools):
        raise RequestError("tools", "the model's chat template does not show tools; leave them out, or send tool_choice: none")
    for name in variables or ():
        if name in _OWN_VARIABLES or not knows_variable(tokenizer, name):
            raise RequestError(f"chat_template_kwargs.{name}", "the model's chat template does not know it; leave it out")
    options: dict[str, Any] = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
    options |= {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(turns, chat_template=template, **options)
    except (TemplateError, TypeError, RecursionError) as error:  # a template that meets what it does not expect fails like this
        raise RequestError("messages", f"the model's chat template refuses these messages: {error}") from error
    # A template writes the special tokens itself: encoding must not add them a second time.
    ids = token_ids(tokenizer, str(text), special_tokens=False)
    return _begin(tokenizer) + ids if template else ids


def knows_variable(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether a prompt may change with a variable of the chat template."""
    return name in _variables(template_text(tokenizer))


@functools.lru_cache(8)
def _variables(template: str) -> frozenset[str]:
    """Names that a template reads and does not make. Where it has tags of which only ``transformers`` knows: all its words."""
    try:
        syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)  # it is not run
    except TemplateError:
        return frozenset(re.findall(r"\w+", template))
    return frozenset(meta.find_undeclared_variables(syntax))


def bracketed_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts like ``<think>`` that are tokens of their own beside the vocabulary, and show as text."""
    return [
        text for token in tokenizer.added_tokens_decoder.values()
        if not token.special and _BRACKETED.fullmatch(text := token.content)
    ]  # fmt: skip


def _with_thinking(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn for a template that has reasoning as ``thinking``, beside calls in place of the content: both are one text there."""
    thought = turn.get("reasoning_content") or turn.get("reasoning")
    if not thought:
        return turn
    if not turn.get("tool_calls") or not turn["content"]:
        return turn | {"thinking": thought}
    return turn | {"thinking": f"{thought}\n\n{turn['content']}", "content": ""}


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
