"""``outrider audit``: check that a running server gives the same output with drafting as without."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cluster.cli.client import ADMIN_KEY, API_KEY, RefusedError, checked, connected, lines_of
from outrider.cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from outrider.cluster.cli.terminal import fail, fail_input, print_rows, progress

if TYPE_CHECKING:
    import httpx

_COLUMNS = ("request", "strategy", "result", "tokens", "position", "served", "plain", "gap")


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Parameters sent with every prompt of a file."""

    strategy: str | None
    max_tokens: int
    temperature: float
    seed: int


def audit(
    url: Annotated[str, typer.Option(help="URL of the server: its public API with --prompts, else its admin routes.")] = (
        "http://127.0.0.1:8000"
    ),
    last: Annotated[
        int | None, typer.Option(min=1, help="Number of recently served choices to replay. Default: all that are kept.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines file; each prompt is sent with and without drafting.")] = None,
    strategy: Annotated[str | None, typer.Option(help="With --prompts: strategy. Default: the server's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --prompts: maximum tokens per answer.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="With --prompts: sampling temperature; 0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="With --prompts: sampling seed.")] = 0,
    key: Annotated[
        str | None,
        typer.Option(
            help=f"Admin key, or API key with --prompts; better set {ADMIN_KEY} or {API_KEY}, which other users cannot see."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per audit on stdout instead of a table.")
    ] = False,
) -> None:
    """Check that a server gives the same output with drafting as without, token by token.

    By default the server replays the choices that it served last. With --prompts, each prompt is sent with and without drafting.
    Exit code 1 if outputs differ or an audit failed.
    """
    rows: list[dict[str, Any]] = []
    with connected(url, ADMIN_KEY if prompts is None else API_KEY, key) as client:
        if prompts is None:
            found, total = _replays(client, last), None
        else:
            records = _records(prompts)
            found, total = _comparisons(client, records, ReplaySettings(strategy, max_tokens, temperature, seed)), len(records)
        with progress() as bars:
            bar = bars.add_task("", total=total)
            for row in found:
                rows.append(row)
                if as_json:
                    typer.echo(json.dumps(row))
                bars.advance(bar)
    if not as_json:
        print_rows([_row(row) for row in rows], _COLUMNS, left=("request", "strategy", "result", "served", "plain"), digits=4)
    results = Counter(row["result"] for row in rows)
    wrong = [row for row in rows if row["result"] in ("different", "failed")]
    summary = ", ".join(f"{count} {result}" for result, count in results.items()) or "nothing to audit"
    if wrong:
        fail(f"{summary}; the first: {wrong[0]['request']}" + (f": {wrong[0]['detail']}" if wrong[0].get("detail") else ""))
    typer.echo(summary, err=as_json)


def _replays(client: httpx.Client, last: int | None) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/admin/audit", json={} if last is None else {"last": last}) as response:
        checked(response)
        ended = False
        for line in lines_of(response):
            entry = json.loads(line)
            ended = "summary" in entry
            if not ended:
                yield entry
        if not ended:
            raise RefusedError("the audit was interrupted; the server's log has the reason")


def _comparisons(client: httpx.Client, records: Sequence[PromptRecord], asking: ReplaySettings) -> Iterator[dict[str, Any]]:
    """Send every prompt with and without drafting through the public API and yield the comparisons."""
    card = checked(client.get("/v1/models")).json()["data"][0]
    name = asking.strategy or card["strategies"][0]
    if name in card["strategies"] and name not in card["lossless_strategies"]:
        raise RefusedError(f"{name} is lossy: its text may differ from plain decoding; choose another --strategy")
    for record in records:
        drafted, plain = (_answer(client, card["id"], record, asking, drafts) for drafts in (True, False))
        yield {"request": record.id, "strategy": name, **compare(drafted, plain)}


def _answer(client: httpx.Client, model: str, record: PromptRecord, asking: ReplaySettings, drafts: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model, "prompt": record.prompt, "max_tokens": asking.max_tokens, "temperature": asking.temperature,
        "seed": asking.seed, "logprobs": 1, "speculation": {} if drafts else {"max_draft_tokens": 0},
    }  # fmt: skip
    if drafts and asking.strategy is not None:
        body["speculation"] = {"strategy": asking.strategy}
    if record.references:
        body["reference_documents"] = list(record.references)
    choice: dict[str, Any] = checked(client.post("/v1/completions", json=body)).json()["choices"][0]
    return choice


def compare(drafted: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Compare two choices of a completion with ``logprobs``: ``result``, ``tokens`` and the first ``difference``.

    Example: the tokens ``a b c`` with log-probabilities -0.1, -0.2, -1.5 beside ``a b d`` with -0.1, -0.2, -1.4 differ at
    position 2, with a gap of 0.1.
    """
    from outrider.cluster.observe.replay_check import difference

    one, other = drafted["logprobs"], plain["logprobs"]
    found: dict[str, Any] = {"result": "identical", "tokens": len(one["tokens"])}
    first = difference(one["tokens"], other["tokens"])
    if first is not None:
        served, expected = (next(iter(side["token_logprobs"][first.position :]), None) for side in (one, other))
        first = dataclasses.replace(first, served_logprob=served, plain_logprob=expected)
        return found | {"result": "different", "difference": first.as_dict(lambda text: {"text": text})}
    for field in ("text", "finish_reason"):
        if drafted[field] != plain[field]:
            detail = f"{field}: {drafted[field]!r} with drafts, {plain[field]!r} without"
            return found | {"result": "different", "detail": detail}
    return found


def _records(path: Path) -> list[PromptRecord]:
    try:
        return read_prompts(path)
    except PromptFileError as error:
        fail_input(str(error))


def _row(found: dict[str, Any]) -> dict[str, Any]:
    difference = found.get("difference") or {}
    sides = {side: difference[side] and repr(difference[side]["text"]) for side in ("served", "plain") if side in difference}
    return {**found, **difference, **sides}
