"""Streaming text and stop strings, token by token."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.decoding.request import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams
from outrider.engine.text.outputs import Detokenizer
from outrider.engine.text.tokenizer import load_tokenizer
from tests.helpers.models import END, SENTENCES


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """Bytes stand for what the vocabulary lacks, and are decoded together, as with Llama 2 and Gemma."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "\u2581b"]
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def push_all(detokenizer: Detokenizer, tokens: Sequence[int]) -> tuple[list[str], bool]:
    """The pieces of some tokens, up to a stop string or with the rest of the text, and whether there was a stop string."""
    pieces = []
    for token in tokens:
        piece, stopped = detokenizer.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, detokenizer.flush()], False


def stream(tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    return push_all(Detokenizer(tokenizer, stop), tokenizer(text)["input_ids"])


@pytest.mark.parametrize("text", [*SENTENCES, "", "  leading and trailing  ", "日本語のテキスト", "a\n\nb\tc", "🙂🙃👩‍👩‍👧"])
def test_pieces_join_to_the_text_without_broken_characters(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    pieces, stopped = stream(tokenizer, text)
    assert "".join(pieces) == text and not stopped
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_comes_at_once_unfinished_characters_at_the_end_and_no_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces, _ = stream(tokenizer, "plain words")
    assert all(pieces[:-1]) and pieces[-1] == ""
    ids = tokenizer("ab🙂")["input_ids"][:-1]
    text = "".join(push_all(Detokenizer(tokenizer, ()), ids)[0])
    assert text == tokenizer.decode(ids) and text.startswith("ab")
    ids = [*tokenizer("a")["input_ids"], tokenizer.convert_tokens_to_ids(END), *tokenizer("b")["input_ids"]]
    assert "".join(push_all(Detokenizer(tokenizer, ()), ids)[0]) == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("e t",), "on"),
        ("one two three", ("two", "one"), ""),
        ("abcabcabd", ("abd",), "abcabc"),
        ("aaab", ("aab",), "a"),
        ("x🙂y", ("🙂",), "x"),
    ],
)
def test_stop_string_ends_the_text_before_it(
    tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...], expected: str
) -> None:
    pieces, stopped = stream(tokenizer, text, stop)
    assert stopped and "".join(pieces) == expected


LETTERS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({text: at for at, text in enumerate(["a", "b", "aa", "ab", "ba", "abab"])}, "a"))
)
LETTERS.backend_tokenizer.decoder = decoders.Fuse()


def expected(pieces: Sequence[str], stop: Sequence[str], include: bool) -> tuple[list[str], bool]:
    """What is to be shown after each piece, by looking at all of the text each time."""
    text, shown, told = "", "", []
    for piece in pieces:
        text += piece
        found = [(at, len(one)) for one in stop if (at := text.find(one)) >= 0]
        if found:
            at, size = min(found)
            return [*told, text[len(shown) : at + size if include else at]], True
        held = max((size for one in stop for size in range(len(one)) if text.endswith(one[:size])), default=0)
        told.append(text[len(shown) : len(text) - held])
        shown += told[-1]
    return [*told, text[len(shown) :]], False


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.booleans(),
)
@example([3, 3, 0, 3, 1], ["ababb", "bb"], False)
@example([5], ["baba", "ab", "abab"], True)
def test_any_stop_strings_hold_back_and_end_what_they_should(ids: list[int], stop: list[str], include: bool) -> None:
    found = push_all(Detokenizer(LETTERS, stop, include), ids)
    assert found == expected([LETTERS.decode([token]) for token in ids], stop, include)


def test_stop_strings_are_bounded_and_take_memory_of_their_length() -> None:
    longest = "a" * (MAX_STOP_CHARS - 1) + "b"
    params = SamplingParams(stop=(longest,) * MAX_STOP_STRINGS)
    tracemalloc.start()
    detokenizer = Detokenizer(LETTERS, params.stop)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 8 * MAX_STOP_CHARS * MAX_STOP_STRINGS
    assert [detokenizer.push(0) for _ in range(MAX_STOP_CHARS)] == [("", False)] * (MAX_STOP_CHARS - 1) + [("a", False)]
    assert detokenizer.push(1) == ("", True)
    with pytest.raises(ValueError, match=f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters"):
        SamplingParams(stop=("a" + longest,))
    with pytest.raises(ValueError, match=f"stop must hold at most {MAX_STOP_STRINGS} strings"):
        SamplingParams(stop=("a",) * (MAX_STOP_STRINGS + 1))


def test_text_that_a_byte_makes_invalid_stays_and_what_follows_is_decoded(byte_fallback: PreTrainedTokenizerFast) -> None:
    def pieces(*tokens: str, stop: tuple[str, ...] = ()) -> list[str]:
        return push_all(Detokenizer(byte_fallback, stop), byte_fallback.convert_tokens_to_ids(tokens))[0]

    assert pieces("<0x41>", "<0xFF>", "b") == ["A", "", "\ufffdb", ""]
    assert pieces("<0x41>", "<0xFF>", "\u2581b") == ["A", "", "\ufffd b", ""]  # the space before it stays
    assert pieces("<0x41>", "<0xFF>", "b", "\u2581b", "<0xC3>", "<0xA9>", "a") == [
        "A",
        "",
        "\ufffdb",
        " b",
        "",
        "\u00e9",
        "a",
        "",
    ]
    assert pieces("<0x41>", "<0xFF>", "<0x41>", "<0xFF>") == ["A", "", "", "", "\ufffd" * 3]  # the end of a text, too
    assert pieces("b", "<0xC3>") == ["b", "", "\ufffd"]
    assert pieces("<0x41>", "<0xFF>", "b", "a", "b", stop=("ba",)) == ["A", "", "\ufffd", ""]


@given(st.data())
def test_any_tokens_have_a_text_in_which_every_piece_stands(byte_fallback: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(range(2, len(byte_fallback))), max_size=20))
    shown = "".join(push_all(Detokenizer(byte_fallback, ()), tokens)[0])
    letters = [character for character in byte_fallback.decode(tokens) if character not in "\ufffd "]
    rest = iter(shown)
    assert all(letter in rest for letter in letters), (shown, letters)  # nothing that is a character at last is left out
