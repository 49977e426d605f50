"""Documents, their passages, and a tenant's vector store: Qdrant in a folder, or PostgreSQL with pgvector for many machines."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from outrider.cluster.cli.generate.prompt_file import read_prompts
from outrider.configs.tenancy_checks import TENANT_NAME
from outrider.engine.errors import first_line
from outrider.engine.loading.cache_files import alone
from outrider.engine.text.file_text import UnreadableFileError, text_of_file
from outrider.experiments.rag.embeddings import SIZE, MiniLM

if TYPE_CHECKING:
    from langchain_postgres import PGEngine

SUFFIXES = (".txt", ".md", ".html", ".pdf")
_PASSAGE_CHARS = 900  # about as much as the embedding model reads of a text
_SPLITTER = RecursiveCharacterTextSplitter(chunk_size=_PASSAGE_CHARS, chunk_overlap=0)  # overlaps would repeat text in prompts
_COLLECTION = "passages"
_MOST_POSTGRESQL = 59  # characters of a tenant's name, because PostgreSQL limits the names of tables


def read_documents(path: Path, left_out: Callable[[str], None]) -> Iterator[tuple[str, list[str]]]:
    """Yield names of documents and their passages, in a fixed order.

    The path is a folder, which is searched recursively, a file, or a workload file (``.jsonl``), whose ``references`` are the
    documents. ``left_out`` is called with a line about each file that cannot be read.

    Raises:
        ValueError: no document can be read.
        OSError: a file cannot be opened.
    """
    found = 0
    for name, text in _texts(path, left_out):
        found += 1
        yield name, _SPLITTER.split_text(text)
    if not found:
        raise ValueError(
            f"no document in {path}: give a folder with {', '.join(SUFFIXES)} files, or a .jsonl file of records with references"
        )


def _texts(path: Path, left_out: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    if path.suffix == ".jsonl":
        references = dict.fromkeys(text for record in read_prompts(path) for text in record.references)
        yield from ((f"{path.stem}/{number}", text) for number, text in enumerate(references, 1))
        return
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES)
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        try:
            yield name, text_of_file(file.read_bytes())
        except UnreadableFileError as error:
            left_out(f"{name}: {error}")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document."""

    document: str  # its name
    number: int  # in the document, from 0
    passages: int  # of the document
    text: str

    def __str__(self) -> str:
        return f"{self.document}, passage {self.number + 1} of {self.passages}"


class Library:
    """The passages of one tenant, in any of LangChain's vector stores that has ids."""

    def __init__(self, store: VectorStore) -> None:
        self._store = store

    def replace(self, document: str, texts: Sequence[str]) -> str:
        """Replace the passages of a document; no texts remove it.

        A changed document keeps no old passage, even if this is interrupted: passages without a successor are deleted first.

        Returns:
            ``new``, ``replaced``, ``unchanged``, ``removed`` or ``unknown``.
        """
        ids = [_id(document, number) for number in range(len(texts))]
        held = self._store.get_by_ids([_id(document, 0)])
        before = held[0].metadata["passages"] if held else 0
        digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
        if held and held[0].metadata["digest"] == digest:
            return "unchanged"
        if stale := [_id(document, number) for number in range(len(texts), before)]:
            self._store.delete(stale)
        if not texts:
            return "removed" if held else "unknown"
        made = [
            Document(text, metadata={"document": document, "number": number, "passages": len(texts), "digest": digest})
            for number, text in enumerate(texts)
        ]
        self._store.add_documents(made, ids=ids)
        return "replaced" if held else "new"

    def search(self, question: str, most: int) -> list[Passage]:
        """Return the passages nearest in meaning, in the order of the documents."""
        found = map(_passage, self._store.similarity_search(question, k=most))
        return sorted(found, key=lambda passage: (passage.document, passage.number))

    def holds(self, passages: Sequence[Passage]) -> bool:
        """Return whether all passages still exist unchanged."""
        ids = [_id(passage.document, passage.number) for passage in passages]
        return set(map(_passage, self._store.get_by_ids(ids) if ids else [])) == set(passages)


def _id(document: str, number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{document}#{number}"))


def _passage(found: Document) -> Passage:
    return Passage(found.metadata["document"], found.metadata["number"], found.metadata["passages"], found.page_content)


@contextmanager
def opened(store: str, tenant: str, make: bool = False) -> Iterator[Library]:
    """Open the library of a tenant, which has a separate folder or table.

    The store is a folder, or ``postgresql://USER:PASSWORD@HOST/DATABASE``. A folder is open to one process at a time, so it
    should be opened for each question; other processes wait.

    Raises:
        ValueError: the tenant has no documents, or its name is invalid.
        OSError: the database does not answer.
        ModelLoadError: the embedding model cannot be downloaded.
    """
    if not TENANT_NAME.fullmatch(tenant):
        raise ValueError(f"{tenant!r} cannot name a tenant; allowed: 1 to 64 characters out of A-Z a-z 0-9 _ . -")
    with _postgresql(store, tenant, make) if store.startswith("postgresql://") else _qdrant(Path(store) / tenant, make) as found:
        if found is None:
            raise ValueError(
                f"tenant {tenant} has no documents in {store.rpartition('@')[2]}: "
                f"python -m outrider.experiments.rag index --documents DIR --tenant {tenant}"
            )
        yield Library(found)


@cache
def embeddings() -> MiniLM:
    """Return the embedding model, loaded at the first call; ``ModelLoadError`` if it cannot be downloaded."""
    return MiniLM()


@contextmanager
def _qdrant(folder: Path, make: bool) -> Iterator[VectorStore | None]:
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, VectorParams

    if not make and not folder.is_dir():
        yield None
        return
    with alone(folder / ".outrider.lock"):
        client = QdrantClient(path=str(folder))
        try:
            if not client.collection_exists(_COLLECTION):
                client.create_collection(_COLLECTION, VectorParams(size=SIZE, distance=Distance.COSINE))
            yield QdrantVectorStore(client, _COLLECTION, embeddings())
        finally:
            client.close()


@cache
def _engine(url: str) -> PGEngine:
    """Return connections to a database, which are kept for the next question."""
    from langchain_postgres import PGEngine

    return PGEngine.from_connection_string(url)


@contextmanager
def _postgresql(address: str, tenant: str, make: bool) -> Iterator[VectorStore | None]:
    from langchain_postgres import PGVectorStore
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.exc import OperationalError

    if len(tenant) > _MOST_POSTGRESQL:
        raise ValueError(f"{tenant!r} is too long for the name of a table: at most {_MOST_POSTGRESQL} characters")
    url, table = address.replace("postgresql://", "postgresql+psycopg://", 1), f"rag_{tenant}"
    plain = create_engine(url)
    try:
        exists = inspect(plain).has_table(table)
    except OperationalError as error:
        raise OSError(f"PostgreSQL does not answer at {address.rpartition('@')[2]}: {first_line(error)}") from error
    finally:
        plain.dispose()
    if not exists and not make:
        yield None
        return
    engine = _engine(url)
    if not exists:
        engine.init_vectorstore_table(table, SIZE)
    yield PGVectorStore.create_sync(engine, embeddings(), table)
