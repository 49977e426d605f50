"""Forms of attack, read from ``forms.yaml``: makers of connections, and generators of the texts and lists in them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from outrider.experiments.service.attacks import texts
from outrider.experiments.service.attacks.shots import (
    CHAT,
    COMPLETIONS,
    DOCUMENTS,
    RESPONSES,
    Shot,
    Target,
    event_ids,
    get,
    head,
    post,
)

_CATALOG = Path(__file__).with_name("forms.yaml")
_PIECE = 1 << 16  # bytes sent at once
_FIRST_TOKENS = 60  # of the answer to the first request of a pipeline
_PIPELINE = 540_000  # bytes
_WORDS = ("the", "library", "opens", "at", "nine", "in", "morning", "and", "stays", "closed", "on", "Sundays", "but", "for")
_QUESTION = "When does the library open?"
_NO_ID = f"chatcmpl-{'0' * 32}.1764000000.{'0' * 16}.00000000.0.2f-5ab1c3d4-0-0-1"


@dataclass(frozen=True, slots=True)
class Form:
    """A form of attack, and the requests of polite clients in its place."""

    kind: str  # the part of the server that it costs
    name: str
    attack: Callable[[Target], Sequence[Shot]]  # sent in turns
    polite: Callable[[Target], Sequence[Shot]]
    clients: int = 4  # each makes its next shot after its last one
    pause_s: float = 0.05  # between them
    emits: bool = False  # four or more choices emit tokens at once, for which the server groups the events of streams
    on_admin_port: bool = False

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.kind}: {self.name}"


def all_forms() -> list[Form]:
    """Return all forms, kind by kind."""
    found = []
    for kind, group in yaml.safe_load(_CATALOG.read_text(encoding="utf-8")).items():
        for name, own in group.get("forms", {}).items():
            fields = {field: value for field, value in group.items() if field != "forms"} | own
            attack, polite = (partial(make_shots, fields.pop(side)) for side in ("attack", "polite"))
            found.append(Form(kind, name, attack, polite, **fields))
    return found


def chosen(names: Sequence[str]) -> list[Form]:
    """Return the forms whose titles contain one of some texts; all if there is none.

    Raises:
        ValueError: a text is in no title.
    """
    forms = all_forms()
    for name in names:
        if not any(name in form.title for form in forms):
            raise ValueError(f"--only {name!r} is in no title: {', '.join(form.title for form in forms)}")
    return [form for form in forms if not names or any(name in form.title for name in names)]


def make_shots(described: Mapping[str, Mapping[str, Any]], target: Target) -> list[Shot]:
    """Return the connections of a description ``{maker: arguments}``."""
    ((maker, arguments),) = described.items()
    shots: list[Shot] = MAKERS[maker](target, **generated(arguments, target))
    return shots


# ---- generators: a mapping {$NAME: first argument, further arguments} is replaced by the result


def generated(value: Any, target: Target) -> Any:
    """Return a value with the results of all generators in it."""
    if isinstance(value, Mapping):
        name, *_ = (*value, "")
        if name in GENERATORS:
            first, *more = (generated(each, target) for each in value.values())
            return GENERATORS[name](target, first, **dict(zip([*value][1:], more, strict=True)))
        return {name: generated(each, target) for name, each in value.items()}
    return [generated(each, target) for each in value] if isinstance(value, list) else value


def _count(target: Target, times: int, scaled: int) -> int:
    return target.scaled(scaled) if scaled else times


def _numbered(target: Target, item: Any, times: int = 0, scaled: int = 0, first: int = 0) -> list[Any]:
    """Return copies of an item, each ``#`` in it replaced by the number of the copy."""
    text = json.dumps(item)
    return [json.loads(text.replace("#", str(at))) for at in range(first, first + _count(target, times, scaled))]


def _fields(target: Target, count: int, name: str = "field#", value: Any = None) -> dict[str, Any]:
    return {name.replace("#", str(at)): at if value is None else value for at in range(count)}


def _text(target: Target, chars: int, seed: int = 0) -> str:
    return words(target.scaled(chars) // 3 + 1, seed)[: target.scaled(chars)]


def words(count: int, seed: int = 0) -> str:
    """Return so many ordinary words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


GENERATORS: Mapping[str, Callable[..., Any]] = {
    "$repeat": lambda target, items, times=0, scaled=0: items * _count(target, times, scaled),
    "$numbered": _numbered,
    "$joined": lambda target, lists: [item for each in lists for item in each],
    "$range": lambda target, bounds: list(range(*bounds)),
    "$fields": _fields,
    "$numbers": lambda target, numbers, name: [{"type": "integer", name: number} for number in numbers],
    "$json": lambda target, value: json.dumps(value),
    "$text": _text,
    "$words": lambda target, count, seed=0, chars=None: words(count, seed)[:chars],
    "$rules": lambda target, rules, grammars, behind="": [texts.many_rules(rules + at, behind) for at in range(grammars)],
    "$patterns": lambda target, count: texts.many_patterns(count),
    "$deep": lambda target, depth: texts.deep_schema(depth),
    "$html": lambda target, depth, size=0, scaled=0: texts.nested_html(depth, _count(target, size, scaled)),
    "$tables": lambda target, size: texts.table_html(target.scaled(size)),
    "$pdf": lambda target, pages, repeats, nested=0: texts.pdf(target.scaled(pages), repeats, nested),
}

# ---- makers of connections


def _key(target: Target, key: int | str | None) -> str | None:
    return target.keys[key] if isinstance(key, int) else key


def _request(
    target: Target, to: str, body: Mapping[str, Any] | None = None, each: Sequence[Mapping[str, Any]] = ({},),
    keys: Sequence[int | str] = (0,), **how: Any,
) -> list[Shot]:  # fmt: skip
    """Return requests of a route: with each key, the body with each of some further fields."""
    path, defaults = ROUTES[to]
    asked = {"model": target.model, **defaults, **(body or {})}
    if "n" in asked:
        asked["n"] = target.scaled(asked["n"])
    return [post(path, {**asked, **fields}, _key(target, key), **how) for key in keys for fields in each]


def _chats(target: Target, count: int = 8, **fields: Any) -> list[Shot]:
    """Return ordinary chats, each with its own question."""
    questions = (f"When does library {at} open? {words(8, at)}" for at in range(count))
    return _request(target, "chat", fields, [{"messages": _asked(question)} for question in questions])


def _completions(target: Target, count: int = 8, how: Mapping[str, Any] | None = None, **fields: Any) -> list[Shot]:
    """Return ordinary completions, each with its own prompt."""
    prompts = [{"prompt": f"Library {at}: {words(8, at)}"} for at in range(count)]
    return _request(target, "completion", fields, prompts, **(how or {}))


def _asked(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _scored(target: Target, prompts: int, tokens: int, **fields: Any) -> list[Shot]:
    """Return completions of several prompts of token ids, each as long as the context allows."""
    size, highest = min(tokens, target.context - 2), min(target.vocabulary, 250)

    def prompt(seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(10, highest) for _ in range(size)]

    lists = [{"prompt": [prompt(1000 * turn + at) for at in range(target.scaled(prompts))]} for turn in range(3)]
    return _request(target, "completion", {"max_tokens": 1, **fields}, lists)


def _bound(target: Target, field: str, values: Sequence[Any], content: str = "go on", **fields: Any) -> list[Shot]:
    """Return chats whose answer is bound, in turns by each of some values."""
    body = {"messages": _asked(content), "max_tokens": 100, **fields}
    return _request(target, "chat", body, [{"structured_outputs": {field: value}} for value in values])


def _files(target: Target, contents: Sequence[bytes | str], **how: Any) -> list[Shot]:
    data = (content.encode() if isinstance(content, str) else content for content in contents)
    return [post(DOCUMENTS, each, target.keys[0], {"Content-Type": "application/octet-stream"}, **how) for each in data]


def _gets(
    target: Target, paths: Sequence[str], key: int | str | None = None, method: str = "GET", count: int = 1, **how: Any
) -> list[Shot]:
    """Return requests without a body; a ``#`` in the key is replaced by a number."""
    name = _key(target, key)
    return [get(path, name and name.replace("#", str(at)), method, **how) for at in range(count) for path in paths]


def _resumed(target: Target, change: str, count: int) -> list[Shot]:
    """Return clients that resume a stream, each with a changed id of one of its events."""
    body = {"model": target.model, "messages": _asked(_QUESTION), "max_tokens": 64, "stream": True, "temperature": 0}
    body["ignore_eos"] = True
    ids = event_ids(target, body) or [_NO_ID]
    headers = ({"Accept": "text/event-stream", "Last-Event-ID": _changed(ids, at, change)} for at in range(count))
    return [post(CHAT, body, target.keys[0], each) for each in headers]


def _changed(ids: Sequence[str], at: int, change: str) -> str:
    own = ids[at % len(ids)]
    if change == "forged":  # no server made it
        counts = ("ffffffff-ffffffff-ffffffff-ffffffff-ffffffff", "0-0-0-0-0", ".".join(["1-0-0-0-0"] * 129))[at % 3]
        return ".".join([f"chatcmpl-{at:032x}", "999999999999", *ids[0].split(".")[2:5], counts, "0" * 32])
    if change == "flipped":
        place = at * 7 % len(own)
        return own[:place] + ("0" if own[place] != "0" else "1") + own[place + 1 :]
    return ids[0] if change == "same" else own


def _endless(target: Target, begin: str, line: str, scaled: int, then: str = "", on_admin_port: bool = False) -> list[Shot]:
    """Return a request that repeats a line for so many bytes and never ends."""
    chunked = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    begins = {
        "head": head("GET", "/version", None),
        "header": head("GET", "/version", None) + b"X-Long: ",
        "url": b"GET /",
        "chunks": head("POST", CHAT, target.keys[0], chunked) + b"\r\n",
    }
    lines = {
        "headers": b"".join(b"x%d: y\r\n" % at for at in range(1000)),
        "extension": b"1;" + b"e" * 500 + b"\r\n{\r\n",
    }
    one = lines.get(line, line.encode())
    block = one * (_PIECE // len(one))
    pieces = (begins[begin] + then.encode(), *[block] * (target.scaled(scaled) // len(block) + 1))
    return [Shot(pieces, stay_s=4.0, on_admin_port=on_admin_port)]


def _pipeline(target: Target, path: str, key: int | None = None) -> list[Shot]:
    """Return one slow request with very many quick ones behind it on the same connection."""
    kept = {"Connection": "keep-alive"}
    slow = post(CHAT, {"model": target.model, "messages": _asked("hi"), "max_tokens": _FIRST_TOKENS}, target.keys[0], kept)
    quick = head("GET", path, _key(target, key), kept) + b"\r\n"
    return [Shot((slow.pieces[0], quick * (target.scaled(_PIPELINE) // len(quick) + 1)), stay_s=4.0)]


def _raw(target: Target, text: str = "", noise: int = 0, bytewise: bool = False, **how: Any) -> list[Shot]:
    """Return bytes: a text, then so many random ones and the end of a head."""
    data = text.encode() + (random.Random(0).randbytes(noise) + b"\r\n\r\n" if noise else b"")
    return [Shot(tuple(data[at : at + 1] for at in range(len(data))) if bytewise else (data,), **how)]


def _stalled(
    target: Target, path: str, piece: str, length: int, pieces: int = 1, key: int | None = 0, pause_s: float = 0.0
) -> list[Shot]:
    """Return an upload that is announced with a length and never sent to its end."""
    begin = head("POST", path, _key(target, key), {"Content-Type": "application/json", "Content-Length": str(length)}) + b"\r\n"
    return [Shot((begin, *[piece.encode()] * pieces), pause_s, stay_s=4.0)]


ROUTES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # with the fields that a body has unless it says otherwise
    "chat": (CHAT, {"messages": _asked(_QUESTION), "max_tokens": 16}),
    "completion": (COMPLETIONS, {"prompt": "The library opens", "max_tokens": 16}),
    "response": (RESPONSES, {}),
    "compare": ("/v1/compare", {}),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
}
MAKERS: Mapping[str, Callable[..., list[Shot]]] = {
    "request": _request, "chats": _chats, "completions": _completions, "scored": _scored, "bound": _bound, "files": _files,
    "gets": _gets, "resumed": _resumed, "endless": _endless, "pipeline": _pipeline, "raw": _raw, "stalled": _stalled,
}  # fmt: skip
