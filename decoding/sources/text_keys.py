"""Keys of stored texts: the outputs of a request and the notes stored with them when it has ended."""

from __future__ import annotations

import hashlib

from outrider.decoding.arrays import Int32Array

_CHOICE_BITS = 16  # choice bits of a text key
# Notes: a *sketch* summarises the prompt for similarity search (``decoding.sources.similar``). A *passage* is a document that the
# request brought along, or a part of its prompt that recurs in another prompt (``decoding.sources.passages``).
MAX_CHOICES = 0xFF00  # choice numbers of outputs are below it; higher numbers mark notes
_SKETCH = 0xFFFF
MAX_RECURRING = 16  # recurring passages per prompt
MAX_PASSAGES = _SKETCH - MAX_RECURRING - MAX_CHOICES  # document passages per request
_PASSAGE_TOKENS = 4096  # longer documents are split


def request_hash(name: str) -> int:
    """Return the hash of a request's name in text keys: 64 bits of BLAKE2b, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def document_hash(tokens: Int32Array) -> int:
    """Return the hash by which a passage is deleted, whichever request brought it: 64 bits of BLAKE2b of its tokens."""
    return int.from_bytes(hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).digest())


def passages_of(document: Int32Array) -> list[Int32Array]:
    """Split a document into passages."""
    return [document[at : at + _PASSAGE_TOKENS] for at in range(0, len(document), _PASSAGE_TOKENS)]


def text_key(request_id: str) -> int:
    """Return the key, below 2**80, of the output of a request: the hash of its name, then 16 bits for the choice.

    The id ``NAME/INDEX`` of a choice hashes NAME; INDEX has up to five digits and is below 65,280. Any other id is a name, choice
    0. Example: ``text_key("chatcmpl-7/2") == request_hash("chatcmpl-7") << 16 | 2``.
    """
    name, _, index = request_id.rpartition("/")
    if name and index.isascii() and index.isdigit() and len(index) <= 5 and int(index) < MAX_CHOICES:
        return request_hash(name) << _CHOICE_BITS | int(index)
    return request_hash(request_id) << _CHOICE_BITS


def request_of(text: int) -> int:
    """Return the request hash in a text key."""
    return text >> _CHOICE_BITS


def is_note(text: int) -> bool:
    """Return whether a key is that of a sketch or a passage."""
    return text & _SKETCH >= MAX_CHOICES


def is_passage(text: int) -> bool:
    """Return whether a key is that of a passage."""
    return MAX_CHOICES <= text & _SKETCH < _SKETCH


def output_key(request: int, choice: int) -> int:
    """Return the key of one choice of a request, given the request's hash."""
    return request << _CHOICE_BITS | choice


def sketch_key(request: int) -> int:
    """Return the key of the sketch of a request's prompt, given the request's hash."""
    return request << _CHOICE_BITS | _SKETCH


def passage_key(request: int, place: int) -> int:
    """Return the key of document passage ``place``, below ``MAX_PASSAGES``, given the request's hash."""
    return request << _CHOICE_BITS | (MAX_CHOICES + place)


def recurring_key(request: int, number: int) -> int:
    """Return the key of recurring prompt passage ``number``, below ``MAX_RECURRING``, given the request's hash."""
    return request << _CHOICE_BITS | (_SKETCH - MAX_RECURRING + number)


def is_recurring(text: int) -> bool:
    """Return whether a key is that of a passage found in a prompt."""
    return _SKETCH - MAX_RECURRING <= text & _SKETCH < _SKETCH
