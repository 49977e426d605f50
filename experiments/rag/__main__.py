"""An assistant over your documents, on a running server: python -m experiments.rag index, ask, chat, remove."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cluster.cli.client import API_KEY, checked, connected, served_model
from outrider.cluster.cli.terminal import fail, fail_input
from outrider.engine.errors import ModelLoadError
from outrider.experiments.rag.conversation import Conversation, cited

if TYPE_CHECKING:
    from outrider.experiments.rag.conversation import Stream


class Framework(StrEnum):
    """Library whose client asks the server."""

    langchain = "langchain"
    llamaindex = "llamaindex"


_MODULES = {
    Framework.langchain: "outrider.experiments.rag.with_langchain",
    Framework.llamaindex: "outrider.experiments.rag.with_llama_index",
}
_Store = Annotated[str, typer.Option(help="A folder, or postgresql://USER:PASSWORD@HOST/DATABASE with pgvector.")]
_Tenant = Annotated[str, typer.Option(help="Owner of the documents; local owns requests without a key.")]
_Url = Annotated[str, typer.Option(help="Address of the server.")]
_Framework = Annotated[Framework, typer.Option("--framework", help="Library whose client asks the server.")]
_Passages = Annotated[int, typer.Option(min=1, help="Passages for a question.")]
_MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")]
_STORE, _TENANT, _URL = "rag-store", "local", "http://127.0.0.1:8000"

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def index(
    documents: Annotated[Path, typer.Option(help="A folder with .txt, .md, .html and .pdf files, a file, or a workload file.")],
    tenant: _Tenant = _TENANT,
    store: _Store = _STORE,
) -> None:
    """Put documents into a tenant's store. Documents of the same name are replaced, from the next question on."""
    with _one_line_errors():
        from outrider.experiments.rag.library import opened, read_documents

        found = read_documents(documents, lambda reason: typer.echo(f"left out {reason}", err=True))
        first = next(found)  # makes no store for a folder without documents
        with opened(store, tenant, make=True) as library:
            counts = Counter(library.replace(name, texts) for name, texts in (first, *found))
    typer.echo(f"documents of {tenant}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("new", "replaced", "unchanged")))


@app.command()
def remove(document: str, tenant: _Tenant = _TENANT, store: _Store = _STORE) -> None:
    """Take a document out of a tenant's store, by its name in answers."""
    with _one_line_errors():
        from outrider.experiments.rag.library import opened

        with opened(store, tenant) as library:
            if library.replace(document, []) == "unknown":
                raise ValueError(f"tenant {tenant} has no document {document}")
    typer.echo(f"removed {document}")


@app.command()
def ask(
    question: str, store: _Store = _STORE, url: _Url = _URL, framework: _Framework = Framework.langchain, passages: _Passages = 3,
    max_tokens: _MaxTokens = 256,
) -> None:  # fmt: skip
    """Answer one question from the documents of the tenant of the API key in OUTRIDER_API_KEY."""
    _converse([question], store, url, framework, passages, max_tokens)


@app.command()
def chat(
    store: _Store = _STORE, url: _Url = _URL, framework: _Framework = Framework.langchain, passages: _Passages = 3,
    max_tokens: _MaxTokens = 256,
) -> None:  # fmt: skip
    """Answer questions, one per line, as one conversation; an empty line ends it."""
    questions = iter(lambda: input("\n> ").strip(), "")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        _converse(questions, store, url, framework, passages, max_tokens)


def _converse(questions: Iterable[str], store: str, url: str, framework: Framework, passages: int, max_tokens: int) -> None:
    """Answer questions in the name of the key's tenant, whom the server identifies: no option can name another one."""
    with connected(url, API_KEY) as client:
        tenant, model = checked(client.get("/v1/cache")).json()["tenant"], served_model(client)
    if tenant is None:
        fail(f"the server knows no tenant without a key: export the key in {API_KEY}")
    with _one_line_errors():
        from outrider.experiments.rag.library import embeddings, opened

        key, base = os.environ.get(API_KEY, "").strip() or "none", url.rstrip("/").removesuffix("/v1")
        stream: Stream = importlib.import_module(_MODULES[framework]).answers(base, key, model, max_tokens)
        conversation = Conversation(partial(opened, store, tenant), lambda question: embeddings().embed_query(question), passages)
        for question in questions:
            _answer(conversation, stream, question)


def _answer(conversation: Conversation, stream: Stream, question: str) -> None:
    from openai import APIError

    if not conversation.retrieve(question):
        typer.echo("[documents have changed, or were many: the conversation begins anew]", err=True)
    try:
        for piece in cited(conversation.answer(question, stream), [passage.text for passage in conversation.given]):
            typer.echo(piece, nl=False)
    except APIError as error:
        fail(f"the server does not answer: {error.message}")
    typer.echo("\n\nfrom:")
    for number, passage in enumerate(conversation.given, 1):
        typer.echo(f"[{number}] {passage}: {shorten(passage.text, 64, placeholder=' ...')}")


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """End the command with one line about an error."""
    try:
        yield
    except ImportError as error:
        fail(f"{error.name} is not installed: pip install 'outrider[rag]'")
    except ModelLoadError as error:
        fail(str(error))
    except (ValueError, OSError) as error:
        fail_input(str(error))


if __name__ == "__main__":
    app()
