"""A conversation as the token ids of a prompt, by the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from engine.errors import RequestError

# What a client may write, and what templates call it; "developer" is OpenAI's newer word for "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The prompt after which the model writes the assistant's next message.

    Args:
        tokenizer: its chat template is used; a plain one (``User: ...``) when it has none.
        messages: each with ``role`` and ``content``, at least one.

    Returns:
        [n] token ids with one beginning-of-sequence token at most: the template's own, or the tokenizer's for the plain template.

    Raises:
        RequestError: no messages, an unknown role, or an order of roles that the template refuses.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    turns = [{"role": _role(index, message["role"]), "content": message["content"]} for index, message in enumerate(messages)]
    template = None if tokenizer.chat_template else DEFAULT_TEMPLATE
    try:
        text = tokenizer.apply_chat_template(turns, chat_template=template, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise RequestError("messages", f"the model's chat template refuses these messages: {error}") from error
    # A template writes the special tokens itself: encoding must not add them a second time.
    ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
    return _begin(tokenizer) + ids if template else ids


def _role(index: int, role: str) -> str:
    if role not in ROLES:
        raise RequestError(f"messages[{index}].role", f"{role!r} is not a role; allowed: {', '.join(ROLES)}")
    return ROLES[role]


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-sequence token, if this tokenizer puts one before plain text."""
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []
