"""``outrider cache``: what a running server remembers of its tenants, looked at, moved and deleted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cluster.cli.cache_files import KINDS, DocumentFileError, batches, documents
from cluster.cli.terminal import fail, fail_input, server_message

if TYPE_CHECKING:
    import httpx

ADMIN_KEY = "OUTRIDER_ADMIN_KEY"  # name of the environment variable
BATCH_BYTES = 1 << 20  # of one preload request: it is shown as progress, and stays far below what the server takes
_TIMEOUT_S = 600.0  # a snapshot of many tokens takes a while to make

cache = typer.Typer(
    help=f"The memory that a running server's replicas share. {ADMIN_KEY} holds an admin key (tenancy.admin_keys).",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Option(help="Where /admin listens: server.admin_port where there is one, else the server.")]
_URL = "http://127.0.0.1:8000"
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Name of a tenant; '*' is the public corpus.")]


@cache.command()
def stats(url: Url = _URL, as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Show how much is kept of each tenant, how each replica gets on with Redis, and how many prompt tokens were reused."""
    with _client(url) as client:
        found = _object(client.get("/stats"))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _print_rows(found["tenants"])
        _print_rows([replica | {"failures": _kinds(replica["failures"])} for replica in found["replicas"]])
        typer.echo(f"tokens of requests that may reuse others': {found['prefix_queries']}, reused: {found['prefix_hits']}")
    if found["error"] is not None:
        fail(f"{url}: {found['error']}")


@cache.command()
def export(
    tenant: TenantName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Written; the snapshot of the tenant's texts.")],
    url: Url = _URL,
) -> None:
    """Write all texts of a tenant to a file, which `outrider cache import` reads."""
    part = file.with_name(f"{file.name}.part")  # a broken download must not look like a snapshot
    try:
        with (
            _client(url) as client,
            part.open("wb") as target,
            client.stream("GET", "/export", params={"tenant": tenant}) as body,
        ):
            for piece in body.iter_bytes():
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `outrider cache export` wrote.")],
    url: Url = _URL,
) -> None:
    """Add exported texts to a tenant. They must come from a model with the same tokenizer."""
    try:
        data = file.read_bytes()
    except OSError as error:
        fail_input(f"{file} could not be read: {error.strerror}")
    with _client(url) as client:
        texts = _object(client.post("/import", params={"tenant": tenant}, content=data))["texts"]
    typer.echo(f"{texts} texts added to {tenant}")


@cache.command()
def preload(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="A .txt or .md is one document, a .jsonl one a line: `text`, or else `output`."),
    ],
    url: Url = _URL,
) -> None:
    """Add documents to the public corpus, from which all tenants draft. Adding one again changes nothing."""
    for file in files:
        if file.suffix not in KINDS or not file.is_file():
            fail_input(f"{file} is not a file whose name ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    done = {"documents": 0, "tokens": 0, "texts": 0}
    try:
        with _client(url) as client, _progress(files) as advance:
            for batch in batches(documents(files, advance), BATCH_BYTES):
                answer = _object(client.post("/preload", content=batch, headers={"Content-Type": "application/json"}))
                done = {name: count + answer[name] for name, count in done.items()}
    except DocumentFileError as error:
        fail_input(f"{error}; what came before is loaded, and loading it again changes nothing")
    typer.echo(f"{done['documents']} documents with {done['tokens']} tokens, {done['texts']} new texts")


@cache.command()
def delete(
    tenant: Annotated[str, typer.Option(help="Whose texts are forgotten; '*' is the public corpus.")],
    request: Annotated[str | None, typer.Option(help="Only the texts of one answer: the `id` of the response.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = _URL,
) -> None:
    """Forget the texts of a tenant, or of one of its requests, in all replicas."""
    what = f"all texts of {tenant}" if request is None else f"the texts of {request}, tenant {tenant}"
    if not yes and not typer.confirm(f"forget {what}, on all replicas and for good?", err=True):
        fail("nothing was deleted")
    path = f"/tenants/{quote(tenant, safe='')}" + ("" if request is None else f"/requests/{quote(request, safe='')}")
    with _client(url) as client:
        client.delete(path)
    typer.echo(f"{what}: deleted; replicas forget within two seconds")


@cache.command()
def verify(url: Url = _URL) -> None:
    """Read and check everything that is stored. Exit code 1 when something is broken."""
    with _client(url) as client:
        problems = _object(client.get("/verify"))["problems"]
    for problem in problems:
        typer.echo(" ".join(f"{name}={value}" for name, value in problem.items()))
    if problems:
        fail(f"{len(problems)} problems; broken data is skipped by all replicas, and goes with the next snapshot")
    typer.echo("all records and snapshots are sound")


class _RefusedError(Exception):
    """An answer other than 200; the message is the server's."""


@contextlib.contextmanager
def _client(url: str) -> Iterator[httpx.Client]:
    """A client of the admin routes. What goes wrong with it ends the command."""
    import httpx

    key = os.environ.get(ADMIN_KEY)
    if not key or not key.isascii():
        fail_input(f"{ADMIN_KEY} holds no key: export the one whose hash is in tenancy.admin_keys (outrider new-key makes one)")

    def refuse(response: httpx.Response) -> None:
        if response.status_code != 200:
            response.read()
            raise _RefusedError(server_message(response))

    try:
        with httpx.Client(
            base_url=f"{url.rstrip('/').removesuffix('/v1')}/admin/cache",
            headers={"Authorization": f"Bearer {key.strip()}"},
            timeout=httpx.Timeout(_TIMEOUT_S, connect=5.0),
            event_hooks={"response": [refuse]},
        ) as client:
            yield client
    except _RefusedError as error:
        fail(f"{url}: {error}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url} ({error or type(error).__name__}); give its address with --url")


def _object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer."""
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _RefusedError("this is not an Outrider server: its answer is not a JSON object")
    return found


@contextlib.contextmanager
def _progress(files: list[Path]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; what it yields is called with the number of bytes that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=sum(file.stat().st_size for file in files))
        yield lambda size: progress.advance(task, size)


def _kinds(failures: dict[str, int]) -> str:
    """Failures by kind in one cell."""
    return ", ".join(f"{kind} {count}" for kind, count in failures.items())


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """A row a tenant, or a replica; the columns are what the server tells."""
    from rich.console import Console
    from rich.table import Column, Table

    if not rows:
        return
    texts = ("tenant", "namespace", "breaker", "failures")
    table = Table(*(Column(name.replace("_", " "), justify="left" if name in texts else "right") for name in rows[0]))
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _shown(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
