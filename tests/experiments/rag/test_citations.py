"""Sentences of an answer get the number of the passage that contains their words."""

from __future__ import annotations

import pytest

from outrider.experiments.rag.conversation import cited

HOURS = "The library opens at nine in the morning. On Sundays it stays closed."
LOANS = "Books are lent for four weeks."
MUSEUM = "The museum opens at nine in the morning."


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("The library opens at nine in the morning.", "The library opens at nine in the morning. [1]"),
        ("Books are lent for four weeks. It opens at ten.", "Books are lent for four weeks. [2] It opens at ten."),
        ("It opens at nine in the morning!\nMore.", "It opens at nine in the morning! [1] [3]\nMore."),
        ("- the library opens at nine\n- lent for four weeks", "- the library opens at nine [1]\n- lent for four weeks [2]"),
        ("I do not know that.", "I do not know that."),
        ("At nine.", "At nine."),
        ("", ""),
    ],
)
def test_sentence_has_the_number_of_the_passage_with_its_words(answer: str, told: str) -> None:
    for size in (1, 3, 100):
        pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
        assert "".join(cited(pieces, [HOURS, LOANS, MUSEUM])) == told


def test_pieces_are_not_held_until_the_end_of_a_sentence() -> None:
    assert list(cited(["Books ", "are lent"], [LOANS]))[:2] == ["Books ", "are lent"]
