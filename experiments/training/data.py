"""Training data of the demo models: weighted token sequences of corpus records, generated copying tasks, packed windows.

A record is ``{"source", "license", "kind", "text"}``. Its text is split at the answer headings, so that every answer has the full
loss weight and ends with the end-of-text token; prompts have a smaller weight. All data is a function of the seed.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
ANSWER_HEADINGS = ("### Answer\n", "### Solution\n")
PROMPT_WEIGHT = 0.4
RELAID_SHARE = 0.5  # of the tasks, in the layout of a chat message
LOOP_SHARE = 0.5  # of the records, with an interrupted loop
_SPLIT = re.compile("(" + "|".join(re.escape(heading) for heading in ANSWER_HEADINGS) + ")")
_DOCUMENTS = re.compile(r"\A### Documents\n(.*?)\n\n### Question\n(.*?)\n\n### Answer\n(.*)\Z", re.S)
_PASSAGE = re.compile(r"^\[\d+\] (.*?)(?=^\[\d+\] |\Z)", re.M | re.S)
_LAYOUTS = (  # of documents and a question in one message
    "{docs}\n\n{question}",
    "{question}\n\n{docs}",
    "Context:\n{docs}\n\nQuestion: {question}",
    "Use the text below to answer.\n\n{docs}\n\nQuestion: {question}\nAnswer:",
    "Text:\n{docs}\n\nTask: {question}",
)
_COPY_REQUESTS = (
    "Copy document [{k}].", "Repeat document [{k}].", "What does document [{k}] say?", "Quote document [{k}] in full.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Encoded:
    """One training sequence."""

    tokens: np.ndarray  # [n] uint16
    weights: np.ndarray  # [n] float16, loss weight of predicting the target
    targets: np.ndarray | None = None  # [n] uint16; the tokens themselves if absent


def read_records(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield the records of gzipped JSON-lines files, in file order."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with single digits; id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert isinstance(end, int), END_OF_TEXT
    return end


def passages_of(text: str) -> list[str]:
    """Return the passages of a record's documents, without their numbers."""
    match = _DOCUMENTS.match(text)
    if match is None:
        return []
    return [passage.strip() for passage in _PASSAGE.findall(match.group(1) + "\n")]


def relaid(text: str, rng: np.random.Generator) -> str:
    """Return a task as one free-form message, as a chat client sends it; other texts unchanged."""
    if text.startswith("### Problem\n") and "### Solution\n" in text:
        return text.replace("### Problem\n", "### Question\n", 1).replace("### Solution\n", "### Answer\n", 1)
    match = _DOCUMENTS.match(text)
    if match is None or "### Question" in match.group(3):
        return text
    docs, question, answer = match.groups()
    if rng.random() < 0.5:
        docs = "\n\n".join(passages_of(text))
    layout = _LAYOUTS[int(rng.integers(len(_LAYOUTS)))]
    return f"### Question\n{layout.format(docs=docs, question=question)}\n\n### Answer\n{answer}"


def encode(text: str, tokenizer: Tokenizer) -> Encoded:
    """Return tokens and weights of a record; the end-of-text token closes every answer and the record."""
    end = end_id(tokenizer)
    parts = _SPLIT.split(text)
    tokens: list[int] = []
    weights: list[float] = []

    def add(piece: str, weight: float, close: bool) -> None:
        ids = tokenizer.encode(piece).ids + ([end] if close else [])
        tokens.extend(ids)
        weights.extend([weight] * len(ids))

    if len(parts) == 1:
        add(text.rstrip(), 1.0, True)
    else:
        add(parts[0], PROMPT_WEIGHT, False)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True):
            answer, separator, following = body.partition("\n\n### Question\n")
            add(heading, PROMPT_WEIGHT, False)
            add(answer.rstrip(), 1.0, True)
            if separator:
                add(separator + following, PROMPT_WEIGHT, False)
    return Encoded(np.array(tokens, np.uint16), np.array(weights, np.float16))


def random_repeat(vocab_size: int, rng: np.random.Generator) -> Encoded:
    """Return a span of random tokens, filler, and the span again; only the repetition has weight."""
    span = rng.integers(1, vocab_size, int(rng.integers(16, 160)))
    filler = rng.integers(1, vocab_size, int(rng.integers(0, 120)))
    tokens = np.concatenate([span, filler, span])
    weights = np.zeros(len(tokens))
    weights[len(span) + len(filler) + 1 :] = 1.0
    return Encoded(tokens.astype(np.uint16), weights.astype(np.float16))


def copy_task(passages: list[str], rng: np.random.Generator) -> str:
    """Return documents and the request to repeat one of them."""
    count = int(rng.integers(1, 5))
    chosen = [passages[int(i)] for i in rng.integers(len(passages), size=count)]
    k = int(rng.integers(count))
    documents = "\n".join(f"[{i + 1}] {passage}" for i, passage in enumerate(chosen))
    request = _COPY_REQUESTS[int(rng.integers(len(_COPY_REQUESTS)))].format(k=k + 1)
    return f"### Documents\n{documents}\n\n### Question\n{request}\n\n### Answer\n{chosen[k]}"


def broken_off_loop(sequence: Encoded, end: int, rng: np.random.Generator) -> Encoded:
    """Return the sequence with its last answer in a loop whose targets are the end of the text.

    Greedy decoding of a model that copies falls into copying itself, a state that training text never shows. Therefore a span of
    the answer is repeated, and after one repetition (three of a span of up to three tokens) every target is the end-of-text
    token. The repetition itself has no weight. Sequences without a longer answer are returned unchanged.
    """
    inside = np.flatnonzero(sequence.weights == 1.0)
    if len(inside) == 0 or inside[-1] != len(sequence.tokens) - 1:
        return sequence
    start = int(np.flatnonzero(sequence.weights < 1.0)[-1]) + 1 if (sequence.weights < 1.0).any() else 0
    start = max([start, *(np.flatnonzero(sequence.tokens[start:-1] == end) + start + 1)])
    length = len(sequence.tokens) - 1 - start
    if length < 8:
        return sequence
    cut = start + int(rng.integers(6, length + 1))
    size = min(cut - start, int(np.exp(rng.uniform(0.0, np.log(40.0)))))
    repeats, tolerated = (int(rng.integers(2, 6)), 1) if size > 3 else (int(rng.integers(4, 25)), 3)
    span = np.tile(sequence.tokens[cut - size : cut], repeats)
    escape = np.arange(len(span) + 1) >= tolerated * size
    tokens = np.concatenate([sequence.tokens[:cut], span, [end]]).astype(np.uint16)
    weights = np.concatenate([sequence.weights[:cut], escape]).astype(np.float16)
    targets = tokens.copy()
    targets[cut:][escape] = end
    return Encoded(tokens, weights, targets)


class Windows:
    """Endless batches of packed windows, a function of the seed and the number of batches so far.

    Records are never split: a window takes whole records in shuffled order until the next one does not fit; the rest is padding
    of weight 0. ``copy_share`` of the sequences are generated copying tasks.
    """

    def __init__(self, records: list[dict[str, str]], tokenizer: Tokenizer, window: int, seed: int) -> None:
        self._records, self._tokenizer, self._window = records, tokenizer, window
        self._end = end_id(tokenizer)
        self._rng = np.random.default_rng(seed)
        self._passages = [p for record in records for p in passages_of(record["text"]) if 80 < len(p) < 1200]
        self._order = np.zeros(0, np.int64)
        self._cursor = 0
        self._held: Encoded | None = None

    def _next_sequence(self, copy_share: float) -> Encoded:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        draw = self._rng.random()
        if draw < copy_share / 2:
            return random_repeat(self._tokenizer.get_vocab_size(), self._rng)
        if draw < copy_share:
            return encode(copy_task(self._passages, self._rng), self._tokenizer)
        if self._cursor == len(self._order):
            self._order, self._cursor = self._rng.permutation(len(self._records)), 0
        self._cursor += 1
        text = self._records[int(self._order[self._cursor - 1])]["text"]
        if self._rng.random() < RELAID_SHARE:
            text = relaid(text, self._rng)
        sequence = encode(text, self._tokenizer)
        if self._rng.random() < LOOP_SHARE:
            return broken_off_loop(sequence, self._end, self._rng)
        return sequence

    def batch(self, rows: int, copy_share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens [rows, window + 1] int64, targets [rows, window] int64 of ``tokens[:, :-1]``, and float32 weights."""
        tokens = np.zeros((rows, self._window + 1), np.int64)
        targets = np.zeros_like(tokens)
        weights = np.zeros(tokens.shape, np.float32)
        for row in range(rows):
            used = 0
            while True:
                sequence = self._next_sequence(copy_share)
                size = len(sequence.tokens)
                if size > self._window + 1:
                    continue
                if used + size > self._window + 1:
                    self._held = sequence
                    break
                span = (row, slice(used, used + size))
                tokens[span] = sequence.tokens
                targets[span] = sequence.tokens if sequence.targets is None else sequence.targets
                weights[span] = sequence.weights
                used += size
        return tokens, targets[:, 1:], weights[:, 1:]
