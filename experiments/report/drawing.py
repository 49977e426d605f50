"""Small drawings within the text of a report: ranges, courses, marks and links, as pieces of HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup, escape

from experiments.report.cells import Cell

_WIDTH, _HEIGHT = 84, 10  # of a drawing in a field, in pixels
_COURSE_HEIGHT = 22
_POINTS = 120  # of a course
_LONG = 18  # characters of a word that may be broken
_WORD = re.compile(rf"[^\s`*<>]{{{_LONG},}}")
_MARKS = ((re.compile(r"`([^`]+)`"), r"<code>\1</code>"), (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"))
_SIGN = re.compile(r"([,:=/_])")
_ARXIV = re.compile(r"arXiv[ :](\d{4}\.\d{4,5})")


def marked(text: str) -> Markup:
    """A text with `code` and **bold** in it, everything else escaped; long words may break behind their signs."""
    shown = _WORD.sub(lambda word: _SIGN.sub(r"\1<wbr>", word[0]), str(escape(text)))
    for pattern, replacement in _MARKS:
        shown = pattern.sub(replacement, shown)
    return Markup(shown)


def linked(text: str) -> Markup:
    """A text whose arXiv numbers lead to the papers."""
    return Markup(_ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">\g<0></a>', str(escape(text))))


def spread(cell: Cell, scale: float, one: bool) -> Markup:
    """The range of a field as a line with a dot at its median; empty for a field without a range.

    Args:
        cell: with ``low`` and ``high``.
        scale: the value at the right end; the left one is 0.
        one: whether a dotted line marks 1.
    """
    if cell.value is None or cell.low is None or cell.high is None or scale <= 0 or cell.low < 0:
        return Markup("")
    at = [round(3 + (_WIDTH - 6) * value / scale, 1) for value in (cell.low, cell.value, cell.high, 1.0)]
    middle = _HEIGHT / 2
    line = f'<line class="one" x1="{at[3]}" x2="{at[3]}" y1="0" y2="{_HEIGHT}"/>' if one and scale >= 1 else ""
    return Markup(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" aria-hidden="true">{line}'
        f'<line class="range" x1="{at[0]}" x2="{at[2]}" y1="{middle}" y2="{middle}"/>'
        f'<circle class="middle" cx="{at[1]}" cy="{middle}" r="2.5"/></svg>'
    )


def course(series: Sequence[float]) -> Markup:
    """Values one after the other as a line, from the lowest to the highest; of very many, means of neighbours."""
    step = -(-len(series) // _POINTS)
    points = [sum(series[at : at + step]) / len(series[at : at + step]) for at in range(0, len(series), step)]
    low, high = min(points), max(points)
    tall = (_COURSE_HEIGHT - 4) / (high - low) if high > low else 0.0
    wide = _WIDTH * 1.6 / max(1, len(points) - 1)
    line = " ".join(f"{wide * at:.1f},{_COURSE_HEIGHT - 2 - tall * (value - low):.1f}" for at, value in enumerate(points))
    drawn = f'<polyline class="course" points="{line}"/>'
    return Markup(f'<svg width="{_WIDTH * 1.6:.0f}" height="{_COURSE_HEIGHT}" aria-hidden="true">{drawn}</svg>')
