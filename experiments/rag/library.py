"""A tenant's passages in a vector store: Qdrant in a folder, or PostgreSQL with pgvector for many machines."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from configs.tenancy_checks import TENANT_NAME
from engine.errors import first_line
from engine.loading.kept_files import alone
from experiments.rag.embeddings import SIZE, MiniLM

if TYPE_CHECKING:
    from langchain_postgres import PGEngine

_COLLECTION = "passages"
_MOST_POSTGRESQL = 59  # characters of a tenant's name, so that its table's name is no longer than PostgreSQL's names are


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document."""

    document: str  # its name
    number: int  # in the document, from 0
    passages: int  # of the document
    text: str

    @property
    def id(self) -> str:
        """In the store."""
        return _id(self.document, self.number)

    def __str__(self) -> str:
        return f"{self.document}, passage {self.number + 1} of {self.passages}"


class Library:
    """The passages of one tenant, in any of LangChain's vector stores that knows ids."""

    def __init__(self, store: VectorStore) -> None:
        self._store = store

    def replace(self, document: str, texts: Sequence[str]) -> str:
        """Has a document hold these passages, and no others any more; none: it is gone.

        A document that changed keeps no old passage, even where this is cut off: what has no successor goes first.

        Returns:
            ``new``, ``replaced``, ``unchanged``, ``removed`` or ``unknown``.
        """
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
        self._store.add_documents(made, ids=[_id(document, number) for number in range(len(texts))])
        return "replaced" if held else "new"

    def search(self, question: str, most: int) -> list[Passage]:
        """The passages nearest in meaning, in the order of the documents: the same ones are always told in the same order."""
        found = map(_passage, self._store.similarity_search(question, k=most))
        return sorted(found, key=lambda passage: (passage.document, passage.number))

    def holds(self, passages: Sequence[Passage]) -> bool:
        """Whether all of them are still there, and as they are."""
        held = self._store.get_by_ids([passage.id for passage in passages]) if passages else []
        return set(map(_passage, held)) == set(passages)


@contextmanager
def opened(store: str, tenant: str, make: bool = False) -> Iterator[Library]:
    """The library of a tenant, which has a folder or a table of its own.

    A folder is open to one process at a time, so it is opened for each question; others wait for a moment.

    Args:
        store: a folder, or ``postgresql://USER:PASSWORD@HOST/DATABASE``.
        tenant: whose.
        make: where there is none.

    Raises:
        ValueError: the tenant has no documents, or its name cannot be one.
        OSError: the database does not answer.
        ModelLoadError: the embedding model cannot be fetched.
    """
    if not TENANT_NAME.fullmatch(tenant):
        raise ValueError(f"{tenant!r} cannot name a tenant; allowed: 1 to 64 characters out of A-Z a-z 0-9 _ . -")
    with _postgresql(store, tenant, make) if store.startswith("postgresql://") else _qdrant(Path(store) / tenant, make) as found:
        if found is None:
            raise ValueError(
                f"tenant {tenant} has no documents in {store.rpartition('@')[2]}: "
                f"python -m experiments.rag index --documents DIR --tenant {tenant}"
            )
        yield Library(found)


@cache
def embeddings() -> MiniLM:
    """The embedding model, loaded at the first call. Raises ``ModelLoadError`` where it cannot be fetched."""
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
    """Connections to a database, kept for the next question."""
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
        there = inspect(plain).has_table(table)
    except OperationalError as error:
        raise OSError(f"PostgreSQL does not answer at {address.rpartition('@')[2]}: {first_line(error)}") from error
    finally:
        plain.dispose()
    if not there and not make:
        yield None
        return
    engine = _engine(url)
    if not there:
        engine.init_vectorstore_table(table, SIZE)
    yield PGVectorStore.create_sync(engine, embeddings(), table)


def _id(document: str, number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{document}#{number}"))


def _passage(found: Document) -> Passage:
    return Passage(found.metadata["document"], found.metadata["number"], found.metadata["passages"], found.page_content)
