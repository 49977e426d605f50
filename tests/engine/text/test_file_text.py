"""The text of files: what is read, and what is refused in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.text import file_text
from engine.text.file_text import MAX_FILE_BYTES, UnreadableFileError, text_of_file

PAGE = """<!doctype html><html><head><title>Unseen</title><style>p {}</style></head><body><script>alert("unseen")</script>
<h1>Loans</h1><p>Members borrow <b>twelve</b> <a href="https://example.org">books</a>.</p><ul><li>one</li><li>two</li></ul></body></html>"""


def pdf(*pages: str) -> bytes:
    """A small PDF with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * place} 0 R" for place in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for place, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        resources = "<< /Font << /F1 3 0 R >> >>"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources {resources} /Contents {5 + 2 * place} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    file, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        places.append(len(file))
        file += f"{number} 0 obj\n{text}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(file)}\n%%EOF\n"
    return file + end.encode()


def test_each_kind_is_read() -> None:
    assert text_of_file(b"\xef\xbb\xbf# Ein Titel\n\nF\xc3\xbcchse\n") == "# Ein Titel\n\nFüchse"
    assert text_of_file(PAGE.encode()) == "# Loans\n\nMembers borrow **twelve** books.\n\n* one\n* two"
    assert text_of_file(pdf("The library opens at nine.", "On Sundays it stays closed.")) == (
        "The library opens at nine.\n\nOn Sundays it stays closed."
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no text in it"),
        (b" \n\t", "no text in it"),
        (b"\x89PNG\r\n\x1a\n\0\0", "no PDF, no HTML and no text in UTF-8"),
        ("Füchse".encode("latin-1"), "no text in UTF-8"),
        (b"%PDF-1.4\nbroken", "cannot be read"),
        (pdf(""), "run it through OCR"),
        (b"a" * (MAX_FILE_BYTES + 1), "at most 8,388,608"),
        (b"a" * (MAX_FILE_BYTES - 1), "more than 4,194,304 characters"),
        (b"<html>" + b"<b>" * 100_000, "cannot be read"),
    ],
    ids=["empty", "blank", "picture", "latin-1", "broken-pdf", "scan", "large", "long", "deep"],
)
def test_what_cannot_be_read_is_one_line(content: bytes, says: str) -> None:
    with pytest.raises(UnreadableFileError, match=says) as raised:
        text_of_file(content)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_a_file_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_text, "_TIMEOUT_S", 0.01)
    with pytest.raises(UnreadableFileError, match=r"more than 0\.01 s"):
        text_of_file(PAGE.encode())


def test_reading_is_bounded_in_memory() -> None:
    """What a file makes its reader allocate takes nothing from the server."""
    code = "from engine.text import file_text; file_text._text_of_pdf = lambda _: 'a' * (2 << 30); file_text.main()"
    done = subprocess.run([sys.executable, "-c", code], input=pdf("a"), capture_output=True, timeout=60, check=False)
    assert done.returncode == 1 and b"MemoryError" in done.stderr
