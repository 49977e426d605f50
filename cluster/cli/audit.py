"""``outrider audit``: does a running server give with drafts what it gives without them?"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.cache import ADMIN_KEY
from cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from cluster.cli.terminal import fail, fail_input, server_message

if TYPE_CHECKING:
    import httpx

API_KEY = "OUTRIDER_API_KEY"  # name of the environment variable
_TIMEOUT_S = 600.0  # plain decoding of a long answer takes a while
_COLUMNS = ("request", "strategy", "result", "tokens", "position", "served", "plain", "gap")


class _RefusedError(Exception):
    """The server refuses; the message is its own."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What is sent with every prompt of a file."""

    strategy: str | None
    max_tokens: int
    temperature: float
    seed: int


def audit(
    url: Annotated[str, typer.Option(help="Where the server listens; with --prompts its public API, else its admin routes.")] = (
        "http://127.0.0.1:8000"
    ),
    last: Annotated[int | None, typer.Option(min=1, help="Replay so many choices served last; all that are kept.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Send these prompts instead, each with drafts and without.")] = None,
    strategy: Annotated[str | None, typer.Option(help="With --prompts: who drafts; the server's default when absent.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --prompts: most tokens of each answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="With --prompts: 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="With --prompts: of the sampling.")] = 0,
    key: Annotated[
        str | None, typer.Option(help=f"An admin key, or with --prompts an API key; {ADMIN_KEY} and {API_KEY} hold them unseen.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each audit on stdout, and no table.")] = False,
) -> None:
    """Compare what a server gives with drafts and without, token by token. Exit code 1: some differ, or were not compared."""
    rows: list[dict[str, Any]] = []
    with _client(url, key, ADMIN_KEY if prompts is None else API_KEY) as client:
        if prompts is None:
            found, total = _replays(client, last), None
        else:
            records = _records(prompts)
            found, total = _comparisons(client, records, Asking(strategy, max_tokens, temperature, seed)), len(records)
        with _progress(total) as advance:
            for row in found:
                rows.append(row)
                if as_json:
                    typer.echo(json.dumps(row))
                advance()
    if not as_json:
        _print_rows(rows)
    results = Counter(row["result"] for row in rows)
    wrong = [row for row in rows if row["result"] in ("different", "failed")]
    summary = ", ".join(f"{count} {result}" for result, count in results.items()) or "nothing to audit"
    if wrong:
        fail(f"{summary}; the first: {wrong[0]['request']}" + (f": {wrong[0]['detail']}" if wrong[0].get("detail") else ""))
    typer.echo(summary, err=as_json)


def _replays(client: httpx.Client, last: int | None) -> Iterator[dict[str, Any]]:
    """The server's audits of what it served, as they come."""
    with client.stream("POST", "/admin/audit", json={} if last is None else {"last": last}) as response:
        _check(response)
        ended = False
        for line in response.iter_lines():
            entry = json.loads(line)
            ended = "summary" in entry
            if not ended:
                yield entry
        if not ended:
            raise _RefusedError("the audit broke off; the server's log has the reason")


def _comparisons(client: httpx.Client, records: Sequence[PromptRecord], asking: Asking) -> Iterator[dict[str, Any]]:
    """Every prompt with drafts and without, through the public API."""
    card = _check(client.get("/v1/models")).json()["data"][0]
    name = asking.strategy or card["strategies"][0]
    if name in card["strategies"] and name not in card["lossless_strategies"]:
        raise _RefusedError(f"{name} is lossy: its text need not be plain decoding's; name another --strategy")
    for record in records:
        drafted, plain = (_answer(client, card["id"], record, asking, drafts) for drafts in (True, False))
        yield {"request": record.id, "strategy": name, **compare(drafted, plain)}


def _answer(client: httpx.Client, model: str, record: PromptRecord, asking: Asking, drafts: bool) -> dict[str, Any]:
    """One answer's choice."""
    body: dict[str, Any] = {
        "model": model, "prompt": record.prompt, "max_tokens": asking.max_tokens, "temperature": asking.temperature,
        "seed": asking.seed, "logprobs": 1, "speculation": {} if drafts else {"max_draft_tokens": 0},
    }  # fmt: skip
    if drafts and asking.strategy is not None:
        body["speculation"] = {"strategy": asking.strategy}
    if record.references:
        body["reference_documents"] = list(record.references)
    choice: dict[str, Any] = _check(client.post("/v1/completions", json=body)).json()["choices"][0]
    return choice


def compare(drafted: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What became of two choices of a completion with ``logprobs``: ``result`` and ``tokens``, and the first ``difference``.

    Example: the tokens ``a b c`` with log-probabilities -0.1, -0.2, -1.5 beside ``a b d`` with -0.1, -0.2, -1.4 differ at
    position 2, with a gap of 0.1.
    """
    one, other = drafted["logprobs"], plain["logprobs"]
    sides = zip_longest(
        zip(one["tokens"], one["token_logprobs"], strict=True), zip(other["tokens"], other["token_logprobs"], strict=True)
    )
    found: dict[str, Any] = {"result": "identical", "tokens": len(one["tokens"])}
    for position, (served, expected) in enumerate(sides):
        if served is None or expected is None or served[0] != expected[0]:
            gap = None if served is None or expected is None else expected[1] - served[1]
            sides_told = {name: side and {"text": side[0], "logprob": side[1]} for name, side in _pair(served, expected)}
            return found | {"result": "different", "difference": {"position": position, **sides_told, "gap": gap}}
    for field in ("text", "finish_reason"):
        if drafted[field] != plain[field]:
            detail = f"{field}: {drafted[field]!r} with drafts, {plain[field]!r} without"
            return found | {"result": "different", "detail": detail}
    return found


def _pair(served: Any, plain: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("served", served), ("plain", plain)


def _records(path: Path) -> list[PromptRecord]:
    try:
        return read_prompts(path)
    except PromptFileError as error:
        fail_input(str(error))


@contextlib.contextmanager
def _client(url: str, key: str | None, variable: str) -> Iterator[httpx.Client]:
    """An HTTP client with the key, if there is one. What goes wrong ends the command in one line."""
    import httpx

    held = (key or os.environ.get(variable, "")).strip()
    if variable == ADMIN_KEY and not held:
        fail_input(f"{variable} holds no key: export the one whose hash is in tenancy.admin_keys (outrider new-key makes one)")
    if not held.isascii():
        fail_input("the key holds characters that no key has")
    headers = {"Authorization": f"Bearer {held}"} if held else {}
    timeout = httpx.Timeout(_TIMEOUT_S, connect=5.0)
    try:
        with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout) as client:
            yield client
    except _RefusedError as error:
        fail(f"{url}: {error}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url} ({error or type(error).__name__}); give its address with --url")
    except (ValueError, LookupError, TypeError):
        fail(f"{url}: this is not an Outrider server: its answer is of another form")


def _check(response: httpx.Response) -> httpx.Response:
    """The answer, or the server's own words about why there is none."""
    if response.status_code != 200:
        response.read()
        raise _RefusedError(server_message(response))
    return response


@contextlib.contextmanager
def _progress(total: int | None) -> Iterator[Any]:
    """A bar on stderr; what it yields is called after each audit."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    if not rows:
        return
    table = Table(*(Column(name, justify="right" if name in ("tokens", "position", "gap") else "left") for name in _COLUMNS))
    for row in rows:
        difference = row.get("difference") or {}
        told = {**row, **difference, "served": _token(difference.get("served")), "plain": _token(difference.get("plain"))}
        table.add_row(*(_shown(told.get(name)) for name in _COLUMNS))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _token(token: dict[str, Any] | None) -> str | None:
    return None if token is None else repr(token["text"])


def _shown(value: object) -> str:
    from rich.markup import escape

    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else escape(str(value))
