"""Keys of what is remembered of a request: the texts that it wrote, and notes beside them.

A note is no output: it is written at once when the request has ended, and never grows. A *sketch* says what the prompt resembles
(``decoding.sources.similar``), a *passage* is a document that the request brought along, or what its prompt has in common with
that of another one (``decoding.sources.passages``).
"""

from __future__ import annotations

import hashlib

from decoding.tree import Int32Array

_CHOICE_BITS = 16  # of a text key
MAX_CHOICES = 0xFF00  # numbers that outputs may have; those above stand for notes
_SKETCH = 0xFFFF
MAX_RECURRING = 16  # passages found in the prompt of a request
MAX_PASSAGES = _SKETCH - MAX_RECURRING - MAX_CHOICES  # of documents of a request
_PASSAGE_TOKENS = 4096  # longer documents are several passages


def request_hash(name: str) -> int:
    """What stands for a request in text keys: 64 bits of the BLAKE2b hash of its name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def document_hash(tokens: Int32Array) -> int:
    """What stands for a passage where it is to be forgotten, whoever brought it: 64 bits of the BLAKE2b hash of its tokens."""
    return int.from_bytes(hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).digest())


def passages_of(document: Int32Array) -> list[Int32Array]:
    """A document as passages, in which it is remembered."""
    return [document[at : at + _PASSAGE_TOKENS] for at in range(0, len(document), _PASSAGE_TOKENS)]


def text_key(request_id: str) -> int:
    """The key, below 2**80, of the text that a request writes: the hash of its name, then 16 bits for the choice.

    The id ``NAME/INDEX`` of a choice of a larger request hashes NAME; INDEX is up to five digits, below 65,280. Any other id is a
    name, of choice 0.

    Example: ``text_key("chatcmpl-7/2") == request_hash("chatcmpl-7") << 16 | 2``.
    """
    name, _, index = request_id.rpartition("/")
    if name and index.isascii() and index.isdigit() and len(index) <= 5 and int(index) < MAX_CHOICES:
        return request_hash(name) << _CHOICE_BITS | int(index)
    return request_hash(request_id) << _CHOICE_BITS


def request_of(text: int) -> int:
    """The request hash in a text key."""
    return text >> _CHOICE_BITS


def is_note(text: int) -> bool:
    """Whether a key is that of a sketch or a passage."""
    return text & _SKETCH >= MAX_CHOICES


def is_passage(text: int) -> bool:
    """Whether a key is that of a passage."""
    return MAX_CHOICES <= text & _SKETCH < _SKETCH


def output_key(request: int, choice: int) -> int:
    """The key of what a request wrote as one of its choices, by its hash."""
    return request << _CHOICE_BITS | choice


def sketch_key(request: int) -> int:
    """The key of the sketch of a request's prompt, by its hash."""
    return request << _CHOICE_BITS | _SKETCH


def passage_key(request: int, place: int) -> int:
    """The key of a passage that a request brought along, one of up to ``MAX_PASSAGES``, by the request's hash."""
    return request << _CHOICE_BITS | (MAX_CHOICES + place)


def recurring_key(request: int, number: int) -> int:
    """The key of a passage found in the prompt of a request, one of up to ``MAX_RECURRING``, by the request's hash."""
    return request << _CHOICE_BITS | (_SKETCH - MAX_RECURRING + number)


def is_recurring(text: int) -> bool:
    """Whether a key is that of a passage found in a prompt."""
    return _SKETCH - MAX_RECURRING <= text & _SKETCH < _SKETCH
