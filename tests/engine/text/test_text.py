"""Conversations as prompts, and the text of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outrider.engine.errors import RequestError
from outrider.engine.text import file_text
from outrider.engine.text.chat import render_chat
from outrider.engine.text.file_text import MAX_FILE_BYTES, FileReader, UnreadableFileError, text_of_file
from outrider.engine.text.tokenizer import token_ids
from tests.helpers.waiting import eventually

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est-il ?"},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "🙂"},
]


def build(template: str | None, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0} | {character: index for index, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_chat_is_rendered_by_the_tokenizer_s_template_or_a_plain_one(adds_bos: bool) -> None:
    tokenizer = build(TEMPLATE, adds_bos)
    ids = render_chat(tokenizer, CHAT)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == "<s><system>Be brief.<user>Où est-il ?<assistant>Là.<user>🙂<assistant>"
    developer, system = ([{"role": role, "content": "x"}] for role in ("developer", "system"))
    assert render_chat(tokenizer, developer) == render_chat(tokenizer, system)
    tokenizer = build(None, adds_bos)
    ids = render_chat(tokenizer, CHAT)
    assert ids.count(tokenizer.bos_token_id) == int(adds_bos)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "System: Be brief.\n\nUser: Où est-il ?\n\nAssistant: Là.\n\nUser: 🙂\n\nAssistant:"


@pytest.mark.parametrize(
    ("messages", "field", "said"),
    [
        ([CHAT[1], {"role": "robot", "content": "beep"}], "messages[1].role", "'robot' is not a role"),
        ([CHAT[1], CHAT[0]], "messages", "the system message must come first"),  # says the template
        ([], "messages", "at least one message"),
    ],
)
def test_chats_that_are_refused(messages: list[dict[str, str]], field: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        render_chat(build(TEMPLATE, False), messages)
    assert caught.value.field == field


def test_a_long_text_has_the_tokens_of_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer's file asks for truncation and padding, which no prompt has."""
    tokenizer, text = build(TEMPLATE, True), "Là.<s> " * 5000
    whole = list(tokenizer.encode(text))
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=50_000)
    offsets = tokenizer.backend_tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "_tokenizer", NoOffsets(tokenizer.backend_tokenizer))
    assert token_ids(tokenizer, text) == whole and whole[0] == 0
    assert token_ids(tokenizer, text, special_tokens=False) == whole[1:]
    assert render_chat(tokenizer, [{"role": "user", "content": text}])[-len("<assistant>") - 6 :][:6] == whole[-6:]
    assert [len(each) for each in offsets([text])] == [len(whole)]


class NoOffsets:
    """A tokenizer that computes the offsets of short texts only: they take more memory than the tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        assert sum(map(len, texts)) < 1000
        return self._backend.encode_batch(texts, **options)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no text in it"),
        (b" \n\t", "no text in it"),
        (b"\x89PNG\r\n\x1a\n\0\0", "not PDF, HTML or UTF-8 text"),
        ("Füchse".encode("latin-1"), "or UTF-8 text"),
        (b"%PDF-1.4\nbroken", "cannot be read"),
        (pdf(""), "run it through OCR"),
        (b"a" * (MAX_FILE_BYTES + 1), "the maximum is 8,388,608"),
        (b"a" * (MAX_FILE_BYTES - 1), "more than 4,194,304 characters"),
        (b"<html>" + b"<b>" * 100_000, "cannot be read"),
    ],
    ids=["empty", "blank", "picture", "latin-1", "broken-pdf", "scan", "large", "long", "deep"],
)
def test_what_cannot_be_read_is_one_line(content: bytes, says: str) -> None:
    with pytest.raises(UnreadableFileError, match=says) as raised:
        text_of_file(content)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_a_file_that_takes_too_long_or_has_too_much_text_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_text, "_TIMEOUT_S", 0.01)
    with pytest.raises(UnreadableFileError, match=r"more than 0\.01 s"):
        text_of_file(PAGE.encode())
    monkeypatch.setattr(file_text, "_TIMEOUT_S", 3600)
    instead(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; cat > /dev/null; exec yes")  # which does not end
    with pytest.raises(UnreadableFileError, match="more than 4,194,304 characters"):
        text_of_file(PAGE.encode())
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_reading_is_bounded_in_memory() -> None:
    """What a file makes its reader allocate takes nothing from the server."""
    code = "from outrider.engine.text import file_text; file_text._text_of_pdf = lambda _: 'a' * (2 << 30); file_text.main()"
    done = subprocess.run([sys.executable, "-c", code], input=pdf("a"), capture_output=True, timeout=60, check=False)
    assert done.returncode == 1 and b"MemoryError" in done.stderr


def test_nothing_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [f"{folder}{part}/__init__.py" for folder in ("engine", "outrider/engine") for part in ("", "/text")]
    for name in (*packages, "outrider/__init__.py", "outrider/engine/text/file_text.py", "bs4.py", "markdownify.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import os; print('other code'); os._exit(0)")
    monkeypatch.chdir(tmp_path)
    for path in ("", f".{os.pathsep}outrider/engine/text"):
        monkeypatch.setenv("PYTHONPATH", path)
        assert text_of_file(PAGE.encode()).startswith("# Loans")


def instead(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Has another command run in place of Python for each document."""
    command = folder / "python"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))


def test_a_reading_process_gets_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "OUTRIDER_CACHE_SECRET", "REDIS_URL", "HF_TOKEN", "PYTHONSTARTUP", "LD_PRELOAD_X")
    for name in secret:
        monkeypatch.setenv(name, "secret")
    python = sys.executable
    instead(tmp_path, monkeypatch, f'env > {tmp_path}/variables; echo "$1" > {tmp_path}/flag; exec {python} "$@"')
    assert text_of_file(PAGE.encode()).startswith("# Loans")
    names = {line.partition("=")[0] for line in (tmp_path / "variables").read_text().splitlines()}
    assert names <= {"PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "PYTHONPATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert (tmp_path / "flag").read_text() == "-P\n"


def test_a_reader_that_was_stopped_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid")
    reader = FileReader()
    reader.stop()
    with pytest.raises(UnreadableFileError):
        reader.read(PAGE.encode())
    assert not (tmp_path / "pid").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no signal at the end of a parent")
def test_a_reading_process_ends_with_its_server(tmp_path: Path) -> None:
    child = (
        "import os, time; from pathlib import Path; from outrider.engine.text import file_text\n"
        f"file_text._text_of_html = lambda _: Path('{tmp_path}/pid').write_text(str(os.getpid())) and time.sleep(3600)\n"
        "file_text.main()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], input=b'<html>')"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=Path(file_text.__file__).parents[2]) as server:
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", timeout_s=60)
        server.send_signal(signal.SIGKILL)
    reading = int((tmp_path / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(reading) or psutil.Process(reading).status() == psutil.STATUS_ZOMBIE)
