"""Conversion of a conversation to prompt token ids with the tokenizer's chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from outrider.engine.errors import RequestError
from outrider.engine.text.chat_format import template_text
from outrider.engine.text.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Roles of the API, and their names in templates; "developer" is OpenAI's newer word for "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_BRACKETED = re.compile(r"<[^<>\s]+>")

_THINKING = re.compile(r"""\.thinking\b|\[?["']thinking["']""")  # how templates read the reasoning of a message of GPT-OSS

# Template variables and arguments that the server sets itself.
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
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] = (),
    ending: str = "",
) -> list[int]:
    """Return the prompt token ids after which the model writes the assistant's next message.

    Args:
        tokenizer: its chat template is used; a plain one (``User: ...``) if it has none.
        messages: at least one, each with ``role`` and ``content``; templates may read further fields, such as ``tool_calls``.
        tools: in the form of ``transformers``: ``{"type": "function", "function": {...}}``.
        add_generation_prompt: if false, the prompt ends after the last message.
        variables: template variables, such as ``enable_thinking``.
        continue_final_message: the prompt ends within the last message, which the model continues.
        documents: documents of templates for retrieval, such as ``{"title": ..., "text": ...}``.
        ending: text behind the prompt.

    Raises:
        RequestError: there are no messages, the template refuses them, or it does not use the tools, documents or variables.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    turns = [{**message, "role": _role(index, message["role"])} for index, message in enumerate(messages)]
    template = None if tokenizer.chat_template else DEFAULT_TEMPLATE
    if _THINKING.search(template_text(tokenizer)):
        turns = [_with_thinking(turn) for turn in turns]
    if tools and "tools" not in _template(tokenizer, tools):
        raise RequestError("tools", "the model's chat template does not show tools; leave them out, or send tool_choice: none")
    if documents and not knows_variable(tokenizer, "documents"):
        raise RequestError("documents", "the model's chat template does not show documents; put them into a message")
    for name in variables or ():
        if name in _OWN_VARIABLES or not knows_variable(tokenizer, name):
            raise RequestError(f"chat_template_kwargs.{name}", "the model's chat template does not know it; leave it out")
    options: dict[str, Any] = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
    options |= {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    if continue_final_message:
        options["continue_final_message"] = True
    if documents:
        options["documents"] = list(documents)
    try:
        text = tokenizer.apply_chat_template(turns, chat_template=template, **options)
    except (TemplateError, TypeError, RecursionError, ValueError) as error:  # errors of templates on unexpected input
        raise RequestError("messages", f"the model's chat template refuses these messages: {error}") from error
    # The template writes the special tokens itself, so encoding must not add them again.
    ids = token_ids(tokenizer, f"{text}{ending}", special_tokens=False)
    return _begin(tokenizer) + ids if template else ids  # at most one beginning of sequence


def knows_variable(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return whether the chat template reads a variable."""
    return name in _variables(template_text(tokenizer))


@functools.lru_cache(8)
def _variables(template: str) -> frozenset[str]:
    """Return the names that a template reads and does not set; all its words if it has tags that only ``transformers`` knows."""
    try:
        syntax = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)  # parsed, not run
    except TemplateError:
        return frozenset(re.findall(r"\w+", template))
    return frozenset(meta.find_undeclared_variables(syntax))


def bracketed_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return texts like ``<think>`` of added tokens that are not special, so that they show in decoded text."""
    return [
        text for token in tokenizer.added_tokens_decoder.values()
        if not token.special and _BRACKETED.fullmatch(text := token.content)
    ]  # fmt: skip


def _with_thinking(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning as ``thinking``; with tool calls, the content is moved there, too."""
    thought = turn.get("reasoning_content") or turn.get("reasoning")
    if not thought:
        return turn
    if not turn.get("tool_calls") or not turn["content"]:
        return turn | {"thinking": thought}
    return turn | {"thinking": f"{thought}\n\n{turn['content']}", "content": ""}


def _template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> str:
    if not tokenizer.chat_template:
        return DEFAULT_TEMPLATE
    return str(tokenizer.get_chat_template(None, tools=list(tools) or None))  # some have a separate one for tools


def _role(index: int, role: str) -> str:
    if role not in ROLES:
        raise RequestError(f"messages[{index}].role", f"{role!r} is not a role; allowed: {', '.join(ROLES)}")
    return ROLES[role]


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []  # only if the tokenizer adds it to plain text
