"""A day of an enterprise's requests about documents: tenants, times, and relations to earlier requests.

A few tenants of unequal size ask about passages of workload files. Earlier topics are asked about more often, by Zipf's law. The
kinds of requests are:

* ``new``: documents and a question that are new to the tenant;
* ``identical``: an earlier request again; ``near_duplicate``: an earlier one with another spelling or wording;
* ``same_documents``: another question about earlier documents;
* ``conversation``: the next turn after an earlier request and its answer;
* ``report``: the same report about new documents;
* ``edit``: a version of a document with another sentence or another wording, to be corrected;
* ``other_tenant``: an earlier request of another tenant.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.experiments.bench.workloads import interleaved

T = TypeVar("T")
SHARES = {
    "new": 0.2, "identical": 0.17, "near_duplicate": 0.17, "same_documents": 0.15, "conversation": 0.14, "report": 0.06,
    "edit": 0.06, "other_tenant": 0.05,
}  # fmt: skip
PAIRED = ("identical", "near_duplicate", "same_documents", "conversation", "other_tenant")
TENANTS = {"bank": 0.5, "hospital": 0.27, "council": 0.15, "school": 0.08}  # and their shares of the requests
_SYSTEM = "You are the assistant of a {tenant}. Answer from the context, in a few sentences."
_LEAST, _MOST = 1400, 5000  # characters of a request's documents: about 350 and 1250 tokens
_HEAD = 200  # characters of a prompt in which it says what is asked for
_EDITED = 450  # characters of a document that is to be corrected: as many as an answer holds
_TURNS = 4  # of a conversation
_VERSIONS = 0.7  # share of the edits of a document that was edited before
_QUESTION = re.compile(r"(?:(?:Question|query): *(\S[^\n]*)\n[Aa]nswer:|\n([^\n]*\S) ASSISTANT:)\s*$")
_SUMMARY = re.compile(r"summarize", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NAME = re.compile(r"(?<=\s)[A-Z][a-z]{2,}\b")
_NAMES = ("Meridian", "Halvorsen", "Quito", "Larkspur", "Thompson", "Avalon", "Wexford", "Ingrid")
_TEMPLATES = (
    "Summarize the context in two sentences.",
    "List the most important facts of the context.",
    "Which names and numbers does the context mention?",
    "What is the context about?",
)
_FOLLOW_UPS = ("Which part of the context says so?", "Say that again in one sentence.", "What else is said about it?")
_REPORT = "Write a status report with the sections Summary, Details, Risks and Next steps."
_EDIT = "Correct the spelling in this document. Answer with the whole document."
_POLITE = ("Could you please tell me: {}", "Hello, I have a question. {}", "{} Thank you very much.")


@dataclass(frozen=True, slots=True)
class Item:
    """Documents and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[str, ...]  # those of a conversation in their order; none if only templates fit
    wordings: tuple[str, ...]  # texts of the same meaning, at least one


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the day."""

    key: str
    at: float  # time, as a share of the day
    kind: str
    tenant: str
    item: int  # number of the item of the documents
    documents: tuple[str, ...]
    questions: tuple[str, ...]  # the user's turns so far
    earlier: tuple[str, ...] = ()  # keys of the requests whose answers stand between the turns

    def messages(self, answers: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the chat, documents first; ``answers`` holds at least those of ``earlier``."""
        told = [{"role": "system", "content": _SYSTEM.format(tenant=self.tenant)}]
        context = "Context:\n{}\n\nQuestion: {}".format("\n\n".join(self.documents), self.questions[0])
        for question, key in zip((context, *self.questions[1:]), (*self.earlier, None), strict=True):
            told.append({"role": "user", "content": question})
            if key is not None:
                told.append({"role": "assistant", "content": answers[key]})
        return told


def read_items(folder: Path) -> list[Item]:
    """Return the items of all workload files whose prompts ask about documents or for their summary, one of each file in turn.

    Raises:
        PromptFileError: the folder holds none.
    """
    found = list(interleaved([_items_of(path) for path in sorted(folder.glob("*.jsonl"))]))
    if not found:
        raise PromptFileError(f"{folder} holds no questions about documents: give the folder of the workload files")
    return found


def _items_of(path: Path) -> list[Item]:
    """Return an item for each conversation or record; short documents are followed by the next ones, as in search results."""
    together: dict[str, list[dict[str, Any]]] = {}
    for line in filter(None, path.read_text(encoding="utf-8").split("\n")):  # a text may hold other line separators
        record = json.loads(line)
        if record.get("ref_kind") == "doc" and (_SUMMARY.search(record["prompt"][:_HEAD]) or any(_questions([record]))):
            together.setdefault(record.get("session") or record["id"], []).append(record)
    passages = [list(dict.fromkeys(text for record in of for text in record["references"])) for of in together.values()]
    items = []
    for at, of in enumerate(together.values()):
        documents = _fitting([text for near in (*passages[at:], *passages[:at]) for text in near], len(passages[at]))
        alternatives = (of[0].get("alt_outputs") or {}).values()
        wordings = [text[:_EDITED] for text in (of[0]["output"], *alternatives)] if alternatives else [documents[0][:_EDITED]]
        items.append(Item(documents, tuple(dict.fromkeys(_questions(of))), tuple(wordings)))
    return items


def _fitting(texts: Sequence[str], own: int) -> tuple[str, ...]:
    """Return the first texts, up to ``_MOST`` characters; those behind the first ``own`` only up to ``_LEAST``."""
    found, size = list[str](), 0
    for number, text in enumerate(dict.fromkeys(texts)):
        if size >= (_MOST if number < own else _LEAST):
            break
        found.append(text[: _MOST - size])
        size += len(found[-1])
    return tuple(found)


def _questions(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        for turn in record.get("turns") or ():
            if turn["role"] == "user":
                yield turn["content"].strip()
        match = _QUESTION.search(record["prompt"])
        question = (match[1] or match[2]).strip() if match else ""
        if question and not any(question in text for text in record["references"]):
            yield question


def reworded(question: str, rng: random.Random) -> str:
    """Change a question a little: its spelling, order, a name or its case, or with a polite phrase."""
    words = question.split()
    names = [match[0] for match in _NAME.finditer(question)]
    ways = ["polite", "case", *(["spelling", "order"] if _long(words) and len(words) > 3 else ()), *(["name"] if names else ())]
    way = rng.choice(ways)
    if way == "polite":
        return rng.choice(_POLITE).format(question)
    if way == "name":
        name = rng.choice(names)
        return question.replace(name, rng.choice([other for other in _NAMES if other != name]))
    if way == "case":
        other = question.lower().rstrip("?.! ")
        return other if other != question else f"{question}?"
    if way == "spelling":
        _misspell(words, rng)
    else:
        at = rng.randrange(len(words) - 1)
        words[at : at + 2] = words[at + 1], words[at]
    other = " ".join(words)
    return other if other != question else f"{question} Please."


def edited(text: str, rng: random.Random) -> str:
    """Remove or double a sentence of a document, and misspell a word of every sentence."""
    sentences = _SENTENCE.split(text)
    at = rng.randrange(len(sentences))
    sentences[at : at + 1] = rng.choice(([], [sentences[at]] * 2)) if len(sentences) > 1 else [f"{sentences[at]} To be checked."]
    made = []
    for sentence in sentences:
        words = sentence.split()
        if _long(words):
            _misspell(words, rng)
        made.append(" ".join(words))
    return " ".join(made)


def _long(words: Sequence[str]) -> list[int]:
    """Return the places of words that can be misspelt."""
    return [at for at, word in enumerate(words) if len(word) > 4 and word.isalpha()]


def _misspell(words: list[str], rng: random.Random) -> None:
    """Swap two letters within a long word."""
    place = rng.choice(_long(words))
    word = words[place]
    at = rng.choice([at for at in range(1, len(word) - 2) if word[at] != word[at + 1]] or [1])
    words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def open_questions(item: Item, asked: Collection[str]) -> list[str]:
    """Return the questions about an item that were not asked yet."""
    return [question for question in (*item.questions, *_TEMPLATES) if question not in asked]


def akin(kind: str, to: Asked, item: Item, asked: Collection[str], rng: random.Random) -> Asked:
    """Return a request of a kind of ``PAIRED`` that is related to an earlier one, with the same key, time and tenant.

    ``asked`` are the earlier questions about the item; for ``same_documents`` another one must exist.
    """
    *before, last = to.questions
    if kind == "near_duplicate":
        return replace(to, kind=kind, questions=(*before, reworded(last, rng)))
    if kind == "same_documents":
        return replace(to, kind=kind, questions=(rng.choice(open_questions(item, asked)),), earlier=())
    if kind == "conversation":
        others = [question for question in (*item.questions, *_FOLLOW_UPS) if question not in to.questions]
        return replace(to, kind=kind, questions=(*to.questions, others[0]), earlier=(*to.earlier, to.key))
    return replace(to, kind=kind)


def first_question(item: Item, rng: random.Random) -> str:
    """Return the item's first question, or a template."""
    return item.questions[0] if item.questions else rng.choice(_TEMPLATES)


@dataclass(slots=True)
class _Tenant:
    """Requests of a tenant so far."""

    fresh: list[int]  # items that are new to it, in reverse order
    had: set[int] = field(default_factory=set)
    asked: list[Asked] = field(default_factory=list)  # about documents, each once
    edits: list[int] = field(default_factory=list)  # items with edited texts

    def questions(self, item: int) -> set[str]:
        """Return its questions about an item."""
        return {question for one in self.asked if one.item == item for question in one.questions}

    def take(self) -> int:
        """Return a new item; ``PromptFileError`` if there is none."""
        while self.fresh:
            item = self.fresh.pop()
            if item not in self.had:
                self.had.add(item)
                return item
        raise PromptFileError("the workload files hold too few documents for so many requests: lower --requests")


def popular(of: Sequence[T], rng: random.Random) -> T:
    """Draw by Zipf's law with Mandelbrot's offset: the first is drawn twice as often as the fourth."""
    return rng.choices(of, [1 / (rank + 3) for rank in range(len(of))])[0]


def working_hours(count: int, rng: random.Random) -> list[float]:
    """Return times of requests as shares of a day, ascending: few at night, most before and after noon."""
    minutes = [minute / 1440 for minute in range(1440)]
    rates = [0.15 + sum(math.exp(-(((24 * at - hour) / 2) ** 2)) for hour in (10, 15)) for at in minutes]
    return sorted(at + rng.random() / 1440 for at in rng.choices(minutes, rates, k=count))


def make_day(items: Sequence[Item], count: int, seed: int) -> list[Asked]:
    """Return ``count`` requests of a day in the order of their times, as a function of the seed.

    Raises:
        PromptFileError: there are too few items.
    """
    rng = random.Random(seed)
    tenants = {name: _Tenant(rng.sample(range(len(items)), len(items))) for name in TENANTS}
    day: list[Asked] = []
    for number, at in enumerate(working_hours(count, rng)):
        name, kind = rng.choices([*TENANTS], [*TENANTS.values()])[0], rng.choices([*SHARES], [*SHARES.values()])[0]
        made = replace(_next(kind, name, tenants, items, rng), key=f"{number}", at=at, tenant=name)
        if made.kind in ("new", "same_documents", "other_tenant", "conversation"):
            tenants[name].asked.append(made)
        day.append(made)
    return day


def _next(kind: str, name: str, tenants: Mapping[str, _Tenant], items: Sequence[Item], rng: random.Random) -> Asked:
    """Return a tenant's next request of a kind; a new one if no earlier request fits the kind."""
    own = tenants[name]
    if kind == "report":
        item = own.take()
        return Asked("", 0, kind, name, item, items[item].documents, (_REPORT,))
    if kind == "edit":
        if not own.edits or rng.random() > _VERSIONS:
            own.edits.append(own.take())
        item = popular(own.edits, rng)
        return Asked("", 0, kind, name, item, (edited(rng.choice(items[item].wordings), rng),), (_EDIT,))
    earlier = own.asked
    if kind == "conversation":
        earlier = [one for one in earlier if len(one.questions) < _TURNS]
    elif kind == "same_documents":
        earlier = [one for one in earlier if open_questions(items[one.item], own.questions(one.item))]
    elif kind == "other_tenant":
        strangers = (one for other in tenants.values() if other is not own for one in other.asked)
        earlier = [one for one in strangers if one.item not in own.had and not one.earlier]
    if kind == "new" or not earlier:
        item = own.take()
        return Asked("", 0, "new", name, item, items[item].documents, (first_question(items[item], rng),))
    to = popular(earlier, rng)
    own.had.add(to.item)
    return akin(kind, to, items[to.item], own.questions(to.item), rng)


def make_pairs(items: Sequence[Item], count: int, seed: int) -> list[tuple[Asked, Asked]]:
    """Return new requests, each with a related one, ``count`` of each kind of ``PAIRED`` in turns.

    Raises:
        PromptFileError: there are too few items.
    """
    rng = random.Random(seed)
    if count * len(PAIRED) > len(items):
        raise PromptFileError(f"{len(items)} documents are too few for {count} pairs of each kind: lower --pairs")
    pairs = []
    for number, item in enumerate(rng.sample(range(len(items)), count * len(PAIRED))):
        question = first_question(items[item], rng)
        first = Asked(f"pair-{number}", 0, "new", next(iter(TENANTS)), item, items[item].documents, (question,))
        second = akin(PAIRED[number % len(PAIRED)], first, items[item], (question,), rng)
        pairs.append((first, replace(second, key=f"{first.key}-again")))
    return pairs
