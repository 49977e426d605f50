"""``outrider cache`` and ``outrider new-key`` with served admin routes over a real Redis; how documents are read and cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.cli.cache import BATCH_BYTES, PART_CHARACTERS, DocumentFileError, batches, documents
from outrider.cluster.cli.client import ADMIN_KEY
from outrider.cluster.http.admin.api import MAX_PRELOAD_BYTES
from outrider.configs.schema import load_config
from outrider.decoding.sources.text_keys import passage_key, request_hash
from tests.cluster import commands
from tests.cluster.circle import TOKENIZER
from tests.cluster.commands import Finished, error_line
from tests.cluster.memory import MemoryServer

Outrider = Callable[..., Finished]


@pytest.fixture
def outrider(memory_server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """``outrider cache VERB ... --url`` of the served memory, with the operator's key."""
    monkeypatch.setenv(ADMIN_KEY, memory_server.admin_key)

    def run(*arguments: object, text: str | None = None) -> Finished:
        return commands.outrider("cache", *arguments, "--url", memory_server.url, text=text)

    return run


def stats(outrider: Outrider) -> dict[str, dict[str, Any]]:
    run = outrider("stats", "--json")
    assert run.returncode == 0, run
    return {entry["tenant"]: entry for entry in json.loads(run.stdout)["tenants"]}


def test_preload_twice_is_once(outrider: Outrider, memory_server: MemoryServer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the library opens at nine", encoding="utf-8")
    records = [{"text": "é🦙"}, {"prompt": "why", "output": "because"}, {"text": "first", "output": "not this"}, {"text": " "}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    run = outrider("preload", *files)
    assert run.returncode == 0, run
    tokens = len("the library opens at nine") + len("é🦙".encode()) + len("because") + len("first")  # one token a byte
    assert f"4 documents with {tokens} tokens, 4 new texts" in run.stdout
    assert stats(outrider)["*"]["tokens"] == tokens
    assert "tokens, 0 new texts" in outrider("preload", *files).stdout
    assert stats(outrider)["*"]["tokens"] == tokens
    assert stats(outrider)["acme"]["tokens"] == 0


def test_export_import_delete(outrider: Outrider, memory_server: MemoryServer, tmp_path: Path) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    memory_server.add("acme", "chatcmpl-2", [8, 9])
    file = tmp_path / "acme.snapshot"
    run = outrider("export", "acme", str(file))
    assert run.returncode == 0, run
    assert f"{file.stat().st_size} bytes" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["acme.snapshot"]

    assert "2 texts" in outrider("import", "umbrella", str(file)).stdout
    assert stats(outrider)["umbrella"]["tokens"] == 5

    assert outrider("delete", "--tenant", "acme", "--request", "chatcmpl-1", "--yes").returncode == 0
    assert memory_server.texts("acme") == {(8, 9)}
    assert memory_server.texts("umbrella") == {(5, 6, 7), (8, 9)}

    refused = outrider("delete", "--tenant", "acme", text="n\n")
    assert "permanently delete all texts of acme" in refused.stderr
    assert (refused.returncode, "nothing was deleted" in refused.stderr) == (1, True)
    assert memory_server.texts("acme") == {(8, 9)}
    accepted = outrider("delete", "--tenant", "acme", text="y\n")
    assert "all texts of acme: deleted" in accepted.stdout
    assert memory_server.texts("acme") == set()
    assert memory_server.texts("umbrella") == {(5, 6, 7), (8, 9)}


def test_verify_and_stats(outrider: Outrider, memory_server: MemoryServer) -> None:
    memory_server.add("acme", "chatcmpl-1", [5] * 1234)
    assert outrider("verify").returncode == 0
    assert re.search(r"acme.*1,234", outrider("stats").stdout)
    memory_server.append_raw("umbrella", b"no record")
    broken = outrider("verify")
    assert "1 problem" in error_line(broken, 1) and "umbrella" in broken.stdout


def test_the_server_s_refusals_are_one_line(
    outrider: Outrider, memory_server: MemoryServer, tmp_path: Path, monkeypatch: Any
) -> None:
    assert "tenant" in error_line(outrider("export", "nobody", str(tmp_path / "x")), 1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "broken").write_bytes(b"no snapshot")
    assert "cannot be imported" in error_line(outrider("import", "acme", str(tmp_path / "broken")), 1)
    assert "could not be read" in error_line(outrider("import", "acme", str(tmp_path / "absent")), 2)
    assert "could not be written" in error_line(outrider("export", "acme", str(tmp_path / "absent" / "x")), 2)
    monkeypatch.setenv(ADMIN_KEY, "outrider-wrong")
    assert "not an admin key" in error_line(outrider("stats"), 1)
    monkeypatch.delenv(ADMIN_KEY)
    assert ADMIN_KEY in error_line(outrider("stats"), 2)


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, "outrider-any")
    for arguments in (["stats"], ["verify"], ["delete", "--tenant", "acme", "--yes"]):
        run = commands.outrider("cache", *arguments, "--url", "http://127.0.0.1:1")
        assert "no server answers at http://127.0.0.1:1" in error_line(run, 1)


def test_files_that_cannot_be_loaded(outrider: Outrider, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    assert ".txt, .md or .jsonl" in error_line(outrider("preload", str(tmp_path / "a.pdf")), 2)
    assert ".txt, .md or .jsonl" in error_line(outrider("preload", str(tmp_path / "absent.txt")), 2)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"texts": "y"}\n')
    assert f"{tmp_path / 'a.jsonl'}:2: a record must be" in error_line(outrider("preload", str(tmp_path / "a.jsonl")), 2)


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"text": 3, "output": "x"}', b'{"text": "\\ud800"}', b'{"text": "\xff"}'])
def test_records_that_are_none(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line)
    found = documents([file], lambda size: None)
    assert next(found) == "good"
    with pytest.raises(DocumentFileError) as caught:
        next(found)
    assert str(caught.value).startswith(f"{file}:2: ")


def test_progress_is_told_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ä\n\u2028b")  # separators that are no ends of lines
    (tmp_path / "b.jsonl").write_text('{"text": "c\u2028d"}\n\n{"output": "e"}')
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    sizes: list[int] = []
    assert list(documents(files, sizes.append)) == ["ä\n\u2028b", "c\u2028d", "e"]
    assert sum(sizes) == sum(file.stat().st_size for file in files)


def test_batches_hold_every_text_once_and_in_order() -> None:
    texts = ["é" * 300, 'quote " and \\', *(f"text {number} " * 20 for number in range(50)), "x" * 5000, "last"]
    bodies = list(batches(texts, 2000))
    assert [text for body in bodies for text in json.loads(body)["documents"]] == texts
    assert len(bodies) > 5
    for body in bodies:
        assert len(body) <= 2000 + len('{"documents": []}') or len(json.loads(body)["documents"]) == 1
    assert list(batches([], 2000)) == []


def test_long_documents_travel_in_parts_that_the_server_takes() -> None:
    text = "".join(f"line {number}\n" for number in range(PART_CHARACTERS // 4)) + "\x01" * (PART_CHARACTERS * 2 + 5)
    bodies = list(batches([text], BATCH_BYTES))
    parts = [part for body in bodies for part in json.loads(body)["documents"]]
    assert "".join(parts) == text
    assert all(0 < len(part) <= PART_CHARACTERS for part in parts)
    assert parts[0].endswith("\n")
    assert max(map(len, bodies)) < MAX_PRELOAD_BYTES


def test_new_key_fits_the_configuration() -> None:
    runs = [commands.outrider("new-key") for _ in range(2)]
    keys = [run.stdout.splitlines()[0] for run in runs]
    assert keys[0] != keys[1]
    assert re.fullmatch(r"outrider-[A-Za-z0-9_-]{43}", keys[0])
    lines = [line.split("#")[0].strip() for line in runs[0].stdout.splitlines() if line.startswith("  ")]
    overrides = [line.replace("NAME", "acme").replace(": ", "=", 1) for line in lines]
    config = load_config(None, overrides)
    assert config.tenancy.tenants["acme"].keys == config.tenancy.admin_keys == (hash_key(keys[0]),)


def test_a_document_is_deleted_by_its_text(outrider: Outrider, memory_server: MemoryServer, tmp_path: Path) -> None:
    document, other = ("the library opens at nine", "books are lent for four weeks")
    tokens = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in (document, other)]
    for place, passage in enumerate(tokens):
        memory_server.add("acme", "chatcmpl-1", list(passage), key=passage_key(request_hash("chatcmpl-1"), place))
    memory_server.add("acme", "chatcmpl-1", list(tokens[0]))  # an answer that says the same
    file = tmp_path / "hours.txt"
    file.write_text(document, encoding="utf-8")
    assert (
        "hours.txt among the documents of acme: deleted"
        in outrider("delete", "--tenant", "acme", "--document", file, "-y").stdout
    )
    assert memory_server.num_texts("acme") == 2 and memory_server.texts("acme") == set(tokens)
    both = outrider("delete", "--tenant", "acme", "--request", "r", "--document", file, "-y")
    assert "give one of them" in error_line(both, 2)
    missing = outrider("delete", "--tenant", "acme", "--document", tmp_path / "none.txt", "-y")
    assert "none.txt must be an existing file" in error_line(missing, 2)
