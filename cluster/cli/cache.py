"""``outrider cache``: inspect, export, import and delete what a running server's shared cache holds of its tenants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from outrider.cluster.cli.client import ADMIN_KEY, checked, connected
from outrider.cluster.cli.terminal import fail, fail_input, print_rows, progress

if TYPE_CHECKING:
    import httpx

KINDS = (".txt", ".md", ".jsonl")
PART_CHARACTERS = 1 << 18  # longer documents are split; JSON takes at most 6 bytes per character
BATCH_BYTES = 1 << 20  # size of a preload request: small enough to show progress, far below the server's limit
_ROUTES, _JSON = "/admin/cache", {"Content-Type": "application/json"}

cache = typer.Typer(
    help=f"Manage the cache that a running server's replicas share. {ADMIN_KEY} must hold an admin key (tenancy.admin_keys).",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Option(help="URL of /admin: on server.admin_port if set, else the server's URL.")]
_URL = "http://127.0.0.1:8000"
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Name of a tenant; '*' is the public corpus.")]


@cache.command()
def stats(
    url: Url = _URL, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False
) -> None:
    """Show the cache size of each tenant, the state of each replica's connection to Redis, and the reused prompt tokens."""
    with connected(url, ADMIN_KEY, below=_ROUTES) as client:
        found = _object(client.get("/stats"))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        replicas = [replica | {"failures": _kinds(replica["failures"])} for replica in found["replicas"]]
        for rows in (found["tenants"], replicas):  # the columns are those of the server's response
            print_rows(rows, list(rows[0]) if rows else (), left=("tenant", "namespace", "breaker", "failures"))
        typer.echo(f"tokens of requests that may reuse others': {found['prefix_queries']}, reused: {found['prefix_hits']}")
    if found["error"] is not None:
        fail(f"{url}: {found['error']}")


@cache.command()
def export(
    tenant: TenantName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Output file for the snapshot of the tenant's texts.")],
    url: Url = _URL,
) -> None:
    """Write all texts of a tenant to a file, which `outrider cache import` reads."""
    part = file.with_name(f"{file.name}.part")  # an interrupted download must not look like a snapshot
    try:
        with (
            connected(url, ADMIN_KEY, below=_ROUTES) as client,
            part.open("wb") as target,
            client.stream("GET", "/export", params={"tenant": tenant}) as body,
        ):
            for piece in checked(body).iter_bytes():
                target.write(piece)
        part.replace(file)
    except OSError as error:
        fail_input(f"{file} could not be written: {error.strerror}")
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"{file}: {file.stat().st_size} bytes")


@cache.command("import")
def import_(
    tenant: TenantName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Snapshot written by `outrider cache export`.")],
    url: Url = _URL,
) -> None:
    """Add exported texts to a tenant. They must come from a model with the same tokenizer."""
    try:
        data = file.read_bytes()
    except OSError as error:
        fail_input(f"{file} could not be read: {error.strerror}")
    with connected(url, ADMIN_KEY, below=_ROUTES) as client:
        texts = _object(client.post("/import", params={"tenant": tenant}, content=data))["texts"]
    typer.echo(f"{texts} texts added to {tenant}")


@cache.command()
def preload(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="A .txt or .md file is one document; a .jsonl file has one per line, in `text` or else `output`.",
        ),
    ],
    url: Url = _URL,
) -> None:
    """Add documents to the public corpus, from which all tenants draft. Adding one again changes nothing."""
    _check_kinds(files)
    done = {"documents": 0, "tokens": 0, "texts": 0}
    with connected(url, ADMIN_KEY, below=_ROUTES) as client, progress(counts_bytes=True) as bars:
        bar = bars.add_task("", total=sum(file.stat().st_size for file in files))
        try:
            for batch in batches(documents(files, lambda size: bars.advance(bar, size)), BATCH_BYTES):
                answer = _object(client.post("/preload", content=batch, headers=_JSON))
                done = {name: count + answer[name] for name, count in done.items()}
        except DocumentFileError as error:
            fail_input(f"{error}; earlier documents are loaded, and loading them again changes nothing")
    typer.echo(f"{done['documents']} documents with {done['tokens']} tokens, {done['texts']} new texts")


@cache.command()
def delete(
    tenant: Annotated[str, typer.Option(help="Tenant whose texts are deleted; '*' is the public corpus.")],
    request: Annotated[str | None, typer.Option(help="Delete only the texts of one response, by its `id`.")] = None,
    document: Annotated[
        list[Path] | None, typer.Option(help="Delete only this document, which requests sent; a file as for preload.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: Url = _URL,
) -> None:
    """Delete a tenant's texts, the texts of one request, or documents that its requests sent, on all replicas."""
    what = f"all texts of {tenant}" if request is None else f"the texts of {request}, tenant {tenant}"
    if document:
        if request is not None:
            fail_input("--request and --document exclude each other: give one of them")
        what = f"{', '.join(map(str, document))} among the documents of {tenant}"
        _check_kinds(document)
    if not yes and not typer.confirm(f"permanently delete {what} on all replicas?", err=True):
        fail("nothing was deleted")
    path = f"/tenants/{quote(tenant, safe='')}" + ("" if request is None else f"/requests/{quote(request, safe='')}")
    with connected(url, ADMIN_KEY, below=_ROUTES) as client:
        if document:
            try:
                for batch in batches(documents(document, lambda size: None), BATCH_BYTES):
                    checked(client.post(f"{path}/documents/delete", content=batch, headers=_JSON))
            except DocumentFileError as error:
                fail_input(str(error))
        else:
            checked(client.delete(path))
    typer.echo(f"{what}: deleted; replicas drop them within two seconds")


@cache.command()
def verify(url: Url = _URL) -> None:
    """Read and check everything that is stored. Exit code 1 if something is broken."""
    with connected(url, ADMIN_KEY, below=_ROUTES) as client:
        problems = _object(client.get("/verify"))["problems"]
    for problem in problems:
        typer.echo(" ".join(f"{name}={value}" for name, value in problem.items()))
    if problems:
        fail(f"{len(problems)} problems; replicas skip corrupt data, and the next snapshot removes it")
    typer.echo("all records and snapshots are valid")


def _check_kinds(files: Iterable[Path]) -> None:
    for file in files:
        if file.suffix not in KINDS or not file.is_file():
            fail_input(f"{file} must be an existing file ending in {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def _object(response: httpx.Response) -> dict[str, Any]:
    found = checked(response).json()
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _kinds(failures: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in failures.items())


class DocumentFileError(ValueError):
    """File that cannot be read as documents; the message names the file and the line."""


def documents(files: Sequence[Path], advance: Callable[[int], object]) -> Iterator[str]:
    """Yield the non-blank documents of ``.txt`` and ``.md`` files (one each) and of ``.jsonl`` files (``text``, else ``output``).

    ``advance`` is called with the number of bytes that were read. Raises DocumentFileError: a file cannot be read, is not UTF-8,
    or holds a line that is no such record.
    """
    for file in files:
        try:
            with file.open("rb") as source:
                pieces = source if file.suffix == ".jsonl" else [source.read()]
                for number, piece in enumerate(pieces, start=1):
                    text = _record(piece, f"{file}:{number}") if file.suffix == ".jsonl" else _decoded(piece, str(file))
                    if text.strip():
                        yield text
                    advance(len(piece))
        except OSError as error:
            raise DocumentFileError(f"{file} could not be read: {error.strerror}") from None


def batches(texts: Iterable[str], limit: int) -> Iterator[bytes]:
    """Yield bodies ``{"documents": [...]}`` of at most ``limit`` bytes, unless a single part of a document is longer."""
    waiting: list[bytes] = []
    size = 0
    for text in texts:
        for part in _parts(text):
            item = json.dumps(part, ensure_ascii=False).encode()
            if waiting and size + len(item) > limit:
                yield _body(waiting)
                waiting, size = [], 0
            waiting.append(item)
            size += len(item) + 2
    if waiting:
        yield _body(waiting)


def _body(items: list[bytes]) -> bytes:
    return b'{"documents": [' + b", ".join(items) + b"]}"


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PART_CHARACTERS:
        # Split after a line if possible, so that a word stays whole.
        end = text.rfind("\n", start, start + PART_CHARACTERS) + 1 or start + PART_CHARACTERS
        yield text[start:end]
        start = end
    if text[start:]:
        yield text[start:]


def _record(line: bytes, where: str) -> str:
    text = _decoded(line, where)
    if not text.strip():
        return ""
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise DocumentFileError(f"{where}: not JSON: {error}") from None
    document = (entry["text"] if "text" in entry else entry.get("output")) if isinstance(entry, dict) else None
    if not isinstance(document, str):
        raise DocumentFileError(f"{where}: a record must be an object with a string `text` or `output`")
    try:
        document.encode()
    except UnicodeEncodeError:
        raise DocumentFileError(f"{where}: the text holds half of a surrogate pair") from None
    return document


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DocumentFileError(f"{where}: not UTF-8 text") from None
