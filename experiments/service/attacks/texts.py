"""Texts that cost a server much more than their size: grammars, schemas and files."""

from __future__ import annotations

import zlib
from typing import Any


def many_rules(count: int, first: str = "") -> str:
    """Return a grammar with so many alternatives, each a rule, behind a text.

    With 2,500 of them the first mask cannot be computed; with a text before them, a later one.
    """
    rules = "\n".join(f'r{at}: "x{at}" /[a-z]{{3}}/' for at in range(count))
    begin = f'"{first}" ' if first else ""
    return f"start: {begin}({' | '.join(f'r{at}' for at in range(count))})\n{rules}"


def many_patterns(count: int) -> dict[str, Any]:
    """Return a schema with so many patterns that hold at once, whose product has very many states."""
    return {"type": "string", "allOf": [{"pattern": f"^(a|b)*a(a|b){{{at + 5}}}$"} for at in range(count)]}


def deep_schema(depth: int) -> dict[str, Any]:
    """Return a schema of nested objects, each with a choice."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": {"anyOf": [schema, {"type": "null"}]}}, "required": ["a"]}
    return schema


def nested_html(depth: int, size: int) -> bytes:
    """Return a page of so many bytes whose elements are nested so deep."""
    block = b"<blockquote>" * depth + b"text<br>" * 20 + b"</blockquote>" * depth
    return b"<!doctype html><html><body>" + block * max(1, size // len(block)) + b"</body></html>"


def table_html(size: int) -> bytes:
    """Return a page of nested tables with unclosed cells."""
    row = b"<table><tr><td>a<td><ul><li>b<li>c" * 30
    return b"<!doctype html><html><body>" + row * max(1, size // len(row))


def pdf(pages: int, repeats: int, nested: int = 0) -> bytes:
    """Return a PDF whose pages share one compressed stream with ``repeats`` lines of text.

    Each of the ``nested`` forms calls the next one twice, so that the last one is drawn ``2 ** nested`` times.
    """
    text = b"BT /F1 9 Tf 9 9 Td (word word word word) Tj ET\n" * repeats
    first_page = 4 + nested + 1
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Count %d /Kids [%b] >>"
        % (pages, b" ".join(b"%d 0 R" % (first_page + page) for page in range(pages))),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    for level in range(nested + 1):  # the page's own content is the last
        content = text if level == 0 else b"/X Do /X Do\n"
        packed = zlib.compress(content)
        inner = b"/XObject << /X %d 0 R >>" % (3 + level) if level else b""
        form = b"/Type /XObject /Subtype /Form /BBox [0 0 99 99] /Resources << /Font << /F1 3 0 R >> %b >>" % inner
        objects[4 + level] = b"<< %b /Filter /FlateDecode /Length %d >>\nstream\n%b\nendstream" % (form, len(packed), packed)
    shown = b"/XObject << /X %d 0 R >>" % (3 + nested) if nested else b""
    for page in range(pages):
        objects[first_page + page] = (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] /Contents %d 0 R /Resources << /Font << /F1 3 0 R >> %b >> >>"
            % (4 + nested, shown)
        )
    return _pdf_of(objects)


def _pdf_of(objects: dict[int, bytes]) -> bytes:
    made, places = bytearray(b"%PDF-1.7\n"), []
    for number, content in sorted(objects.items()):
        places.append(len(made))
        made += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    begins = len(made)
    entries = b"".join(b"%010d 00000 n \n" % place for place in places)
    made += b"xref\n0 %d\n0000000000 65535 f \n%btrailer\n" % (len(objects) + 1, entries)
    return bytes(made + b"<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, begins))
