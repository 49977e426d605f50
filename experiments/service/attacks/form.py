"""A form of attack, and the requests of ordinary clients that it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.service.attacks.shots import Shot, Target, get, post

Shots = Callable[[Target], Sequence[Shot]]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_WORDS = ("the", "library", "opens", "at", "nine", "in", "morning", "and", "stays", "closed", "on", "Sundays", "but", "for")


@dataclass(frozen=True, slots=True)
class Form:
    """What hostile clients send in turns, and what polite ones send in their place."""

    kind: str  # the part of the server that it costs
    name: str
    attack: Shots
    polite: Shots  # as many requests at once, as long, of as many choices and tokens, and nothing unusual in them
    clients: int = 4  # each makes its next shot after its last one
    pause_s: float = 0.05  # between them
    emits: bool = False  # four or more of its choices emit tokens at once: then a server holds back events of all streams
    on_admin_port: bool = False

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.kind}: {self.name}"


def same(make: Callable[[Target], Shot]) -> Shots:
    """Return clients whose shots are all alike."""
    return lambda target: [make(target)]


def words(count: int, seed: int = 0) -> str:
    """Return so many ordinary words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def text_of(chars: int, seed: int = 0) -> str:
    """Return an ordinary text of so many characters."""
    return words(chars // 3 + 1, seed)[:chars]


def ids(target: Target, count: int, seed: int = 0) -> list[int]:
    """Return so many valid token ids, as many as the context has room for, two left for an answer."""
    rng = random.Random(seed)
    return [rng.randrange(10, min(target.vocabulary, 250)) for _ in range(min(count, target.context - 2))]


def chat(target: Target, at: int = 0, content: Any = "When does the library open?", **fields: Any) -> Shot:
    """Return a chat of the attacker's key with this number."""
    said = {"messages": [{"role": "user", "content": content}]} | {"max_tokens": 16} | fields
    return post(CHAT, {"model": target.model, **_scaled(target, said)}, target.keys[at])


def completion(target: Target, at: int = 0, **fields: Any) -> Shot:
    """Return a completion of the attacker's key with this number."""
    said = {"prompt": "The library opens", "max_tokens": 16} | fields
    return post(COMPLETIONS, {"model": target.model, **_scaled(target, said)}, target.keys[at])


def _scaled(target: Target, body: dict[str, Any]) -> dict[str, Any]:
    return body | ({"n": target.scaled(body["n"])} if "n" in body else {})


def chats(count: int = 8, **fields: Any) -> Shots:
    """Return ordinary chats with questions of their own."""
    return lambda target: [chat(target, content=f"When does library {at} open? {words(8, at)}", **fields) for at in range(count)]


def completions(count: int = 8, size: int = 8, **fields: Any) -> Shots:
    """Return ordinary completions, each with a prompt of so many words."""
    return lambda target: [completion(target, prompt=f"Library {at}: {words(size, at)}", **fields) for at in range(count)]


def gets(*paths: str, keyed: bool = False) -> Shots:
    """Return ordinary GET requests."""
    return lambda target: [get(path, target.keys[0] if keyed else None) for path in paths]
