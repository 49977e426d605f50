"""Forms of attack by long texts and slow files, on the threads that tenants share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.service.attacks.form import CHAT, Form, Shots, chat, chats, completion, completions, same, text_of
from experiments.service.attacks.shots import Shot, Target, post
from experiments.service.attacks.texts import nested_html, pdf, table_html

DOCUMENTS = "/v1/documents/text"
_LEAVES_S = 0.25


def _tokenize(*chars: int, key: int = 0, **fields: Any) -> Shots:
    def shots(target: Target) -> list[Shot]:
        texts = [text_of(target.scaled(size), at) for at, size in enumerate(chars)]
        return [post("/tokenize", {"model": target.model, "prompt": text, **fields}, target.keys[key]) for text in texts]

    return shots


def _detokenize(count: int, **how: Any) -> Shots:
    return lambda target: [
        post("/detokenize", {"model": target.model, "tokens": [17, 42] * target.scaled(count // 2)}, target.keys[0], **how)
    ]


def _leaving(shots: Shots, stay_s: float = _LEAVES_S) -> Shots:
    return lambda target: [replace(shot, stay_s=stay_s) for shot in shots(target)]


def _two_keys(chars: int) -> Shots:
    one, other = _tokenize(chars), _tokenize(chars, key=1)
    return lambda target: [*one(target), *other(target)]


def _turn(field: str, chars: int) -> Shots:
    """Return chats with a long text elsewhere than in ``content``."""

    def shots(target: Target) -> list[Shot]:
        text = text_of(target.scaled(chars))
        asked = {"role": "user", "content": "hi"}
        fields: dict[str, Any] = {"messages": [asked]}
        if field == "reasoning":
            fields["messages"] = [asked, {"role": "assistant", "content": "a", "reasoning": text}, asked]
        elif field == "arguments":
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
            fields["messages"] = [asked, {"role": "assistant", "tool_calls": [call]}, asked]
        elif field == "tools":
            fields["tools"] = [{"type": "function", "function": {"name": "f", "description": text}}]
        else:
            fields["chat_template_kwargs"] = {"documents": [{"title": text, "text": text}], "custom": text}
        return [post(CHAT, {"model": target.model, "max_tokens": 1, **fields}, target.keys[0])]

    return shots


def texts() -> list[Form]:
    """Return attacks by texts that take long to turn into tokens."""
    kind, polite, short = "texts", _tokenize(200, 210, 220), completions(max_tokens=1)
    long = same(lambda target: completion(target, prompt=text_of(target.scaled(250_000)), max_tokens=1))
    million = same(lambda target: chat(target, content=text_of(target.scaled(1_300_000)), max_tokens=1))
    return [
        Form(kind, "14 of /tokenize", _tokenize(60_000, 61_000, 62_000), polite, 14),
        Form(kind, "/tokenize of a million characters", _tokenize(1_300_000), polite),
        Form(kind, "/tokenize with the tokens' names", _tokenize(300_000, return_token_strs=True), polite),
        Form(kind, "/tokenize of two keys", _two_keys(120_000), polite, 8),
        Form(kind, "/detokenize, clients leave", _detokenize(500_000, stay_s=_LEAVES_S), _detokenize(40), 8),
        Form(kind, "completions, clients leave", _leaving(long), short),
        Form(kind, "chats, clients leave", _leaving(million), chats(max_tokens=1)),
        *(
            Form(kind, f"{field} of 250,000 characters", _turn(field, 250_000), chats(max_tokens=1))
            for field in ("reasoning", "arguments", "tools", "chat_template_kwargs")
        ),
    ]


def _files(*contents: bytes, **how: Any) -> Shots:
    def shots(target: Target) -> Sequence[Shot]:
        kind = {"Content-Type": "application/octet-stream"}
        return [post(DOCUMENTS, content, target.keys[0], kind, **how) for content in contents]

    return shots


def files() -> list[Form]:
    """Return attacks by files that take long to read."""
    kind, polite = "files", _files(b"The library opens at nine.", b"# Hours\n\nIt opens at nine.")
    html, tables = (lambda target: nested_html(300, target.scaled(6 << 20))), (lambda target: table_html(target.scaled(1 << 20)))
    pages, forms = (lambda target: pdf(target.scaled(2000), 400)), (lambda target: pdf(target.scaled(200), 20, nested=12))
    return [
        Form(kind, "deep HTML", lambda target: _files(html(target))(target), polite),
        Form(kind, "HTML of many small files", _files(nested_html(40, 15_000), nested_html(60, 15_000)), polite, 8),
        Form(kind, "tables within tables", lambda target: _files(tables(target))(target), polite),
        Form(kind, "PDF of 2,000 pages", lambda target: _files(pages(target))(target), polite),
        Form(kind, "PDF with nested forms", lambda target: _files(forms(target))(target), polite),
        Form(kind, "deep HTML, clients leave", lambda target: _files(html(target), stay_s=1.0)(target), polite),
    ]
