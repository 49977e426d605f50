"""Streaming text and stop strings, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer
from engine.loading import load_tokenizer
from tests.models import END, SENTENCES, llama_config, save_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(save_model(Path(tmp_path_factory.mktemp("model")), llama_config())))


def stream(tokenizer: PreTrainedTokenizerFast, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in tokenizer(text)["input_ids"]:
        piece, stopped = detokenizer.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, detokenizer.flush()], False


@pytest.mark.parametrize("text", [*SENTENCES, "", "  leading and trailing  ", "日本語のテキスト", "a\n\nb\tc", "🙂🙃👩‍👩‍👧"])
def test_pieces_join_to_the_text_without_broken_characters(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    pieces, stopped = stream(tokenizer, text)
    assert "".join(pieces) == text and not stopped
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces, _ = stream(tokenizer, "plain words")
    assert all(pieces[:-1]) and pieces[-1] == ""


def test_an_unfinished_character_at_the_end_is_shown_as_the_tokenizer_decodes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("ab🙂")["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer, ())
    text = "".join(detokenizer.push(token)[0] for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids) and text.startswith("ab")


def test_special_tokens_are_not_text(tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    ids = [*tokenizer("a")["input_ids"], tokenizer.convert_tokens_to_ids(END), *tokenizer("b")["input_ids"]]
    assert "".join(detokenizer.push(token)[0] for token in ids) + detokenizer.flush() == "ab"


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


def test_the_beginning_of_a_stop_string_is_held_back_and_released(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces, stopped = stream(tokenizer, "go STO way", ("STOP",))
    assert not stopped and "".join(pieces) == "go STO way"
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert not shown.endswith(("S", "ST", "STO"))


def test_a_stop_string_that_never_completes_is_flushed(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces, stopped = stream(tokenizer, "the end ST", ("STOP",))
    assert not stopped and "".join(pieces) == "the end ST" and pieces[-1] == "ST"
