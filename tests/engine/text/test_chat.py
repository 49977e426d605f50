"""Conversations as prompts."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.errors import RequestError
from engine.text.chat import render_chat

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est-il ?"},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "🙂"},
]


def build(template: str | None, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0} | {character: index for index, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_template_of_the_tokenizer_with_one_beginning(adds_bos: bool) -> None:
    tokenizer = build(TEMPLATE, adds_bos)
    ids = render_chat(tokenizer, CHAT)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == "<s><system>Be brief.<user>Où est-il ?<assistant>Là.<user>🙂<assistant>"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_tokenizer_without_a_template_gets_a_plain_one(adds_bos: bool) -> None:
    tokenizer = build(None, adds_bos)
    ids = render_chat(tokenizer, CHAT)
    assert ids.count(tokenizer.bos_token_id) == int(adds_bos)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "System: Be brief.\n\nUser: Où est-il ?\n\nAssistant: Là.\n\nUser: 🙂\n\nAssistant:"


def test_developer_is_system() -> None:
    tokenizer = build(TEMPLATE, False)
    developer, system = ([{"role": role, "content": "x"}] for role in ("developer", "system"))
    assert render_chat(tokenizer, developer) == render_chat(tokenizer, system)


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(RequestError, match="'robot' is not a role; allowed: system, developer, user, assistant") as caught:
        render_chat(build(TEMPLATE, False), [CHAT[1], {"role": "robot", "content": "beep"}])
    assert caught.value.field == "messages[1].role"


def test_what_the_template_refuses() -> None:
    with pytest.raises(RequestError, match="the system message must come first") as caught:
        render_chat(build(TEMPLATE, False), [CHAT[1], CHAT[0]])
    assert caught.value.field == "messages"


def test_no_messages() -> None:
    with pytest.raises(RequestError, match="at least one message"):
        render_chat(build(TEMPLATE, False), [])
