"""Conversations as prompts."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outrider.engine.errors import RequestError
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import token_ids

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


def test_a_long_text_has_the_tokens_of_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer's file asks for truncation and padding, which no prompt has."""
    tokenizer, text = build(TEMPLATE, True), "Là.<s> " * 5000
    whole = list(tokenizer.encode(text))
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=50_000)
    offsets = tokenizer.backend_tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "_tokenizer", NoOffsets(tokenizer.backend_tokenizer))
    assert token_ids(tokenizer, text) == whole and whole[0] == 0
    assert token_ids(tokenizer, text, special_tokens=False) == whole[1:]
    assert render_chat(tokenizer, [{"role": "user", "content": text}])[-len("<assistant>") - 6 :][:6] == whole[-6:]
    assert [len(each) for each in offsets([text])] == [len(whole)]


class NoOffsets:
    """A tokenizer that computes the offsets of short texts only: they take more memory than the tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        assert sum(map(len, texts)) < 1000
        return self._backend.encode_batch(texts, **options)
