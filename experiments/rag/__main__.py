"""An assistant over your documents, on a running server: python -m experiments.rag index, ask, chat, remove."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.client import API_KEY, checked, connected, served_model
from cluster.cli.terminal import fail, fail_input
from engine.errors import ModelLoadError

if TYPE_CHECKING:
    from experiments.rag.conversation import Conversation, Stream


class Framework(StrEnum):
    """Through which the server is asked."""

    langchain = "langchain"
    llamaindex = "llamaindex"


_MODULES = {Framework.langchain: "experiments.rag.with_langchain", Framework.llamaindex: "experiments.rag.with_llama_index"}
_Store = Annotated[str, typer.Option(help="A folder, or postgresql://USER:PASSWORD@HOST/DATABASE with pgvector.")]
_Tenant = Annotated[str, typer.Option(help="Whose documents; local is who asks without a key.")]
_Url = Annotated[str, typer.Option(help="Where the server listens.")]
_Framework = Annotated[Framework, typer.Option("--framework", help="Through which the server is asked.")]
_Passages = Annotated[int, typer.Option(min=1, help="Passages for a question.")]
_MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
_STORE, _TENANT, _URL = "rag-store", "local", "http://127.0.0.1:8000"

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def index(
    documents: Annotated[Path, typer.Option(help="A folder with .txt, .md, .html and .pdf files, a file, or a workload file.")],
    tenant: _Tenant = _TENANT,
    store: _Store = _STORE,
) -> None:
    """Put documents into a tenant's store. One that is there already is replaced, from the next question on."""
    with _told():
        from experiments.rag.documents import documents as read
        from experiments.rag.library import opened

        found = read(documents, lambda reason: typer.echo(f"left out {reason}", err=True))
        first = next(found)  # nothing is made for a folder without documents
        with opened(store, tenant, make=True) as library:
            counts = Counter(library.replace(name, texts) for name, texts in (first, *found))
    typer.echo(f"documents of {tenant}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("new", "replaced", "unchanged")))


@app.command()
def remove(document: str, tenant: _Tenant = _TENANT, store: _Store = _STORE) -> None:
    """Take a document out of a tenant's store, by its name as answers tell it."""
    with _told():
        from experiments.rag.library import opened

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
    conversation, stream = _begin(store, url, framework, passages, max_tokens)
    with _told():
        _answer(conversation, stream, question)


@app.command()
def chat(
    store: _Store = _STORE, url: _Url = _URL, framework: _Framework = Framework.langchain, passages: _Passages = 3,
    max_tokens: _MaxTokens = 256,
) -> None:  # fmt: skip
    """Answer questions, each a line, as one conversation; an empty line ends it."""
    conversation, stream = _begin(store, url, framework, passages, max_tokens)
    with _told(), contextlib.suppress(EOFError, KeyboardInterrupt):
        while question := input("\n> ").strip():
            _answer(conversation, stream, question)


def _begin(store: str, url: str, framework: Framework, passages: int, max_tokens: int) -> tuple[Conversation, Stream]:
    """A conversation with the tenant of the key, as the server knows it: there is no way to name another one."""
    with connected(url, API_KEY) as client:
        tenant, model = checked(client.get("/v1/cache")).json()["tenant"], served_model(client)
    if tenant is None:
        fail(f"the server knows no tenant without a key: export the key in {API_KEY}")
    with _told():
        from experiments.rag.conversation import Conversation
        from experiments.rag.library import embeddings, opened

        key = os.environ.get(API_KEY, "").strip() or "none"
        stream: Stream = importlib.import_module(_MODULES[framework]).answers(
            url.rstrip("/").removesuffix("/v1"), key, model, max_tokens
        )
    return Conversation(partial(opened, store, tenant), lambda question: embeddings().embed_query(question), passages), stream


def _answer(conversation: Conversation, stream: Stream, question: str) -> None:
    from openai import APIError

    from experiments.rag.citations import cited

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
def _told() -> Iterator[None]:
    """What goes wrong ends the command in one line."""
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
