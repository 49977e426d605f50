"""The table, parameter by parameter: does speculation change an answer?

python -m experiments.service parity [--url URL | --model M] [--strategy S ...] [--field F ...]

Every parameter that the server honours is asked for with several values, greedy and sampled, as a chat, as a completion and as
a response, where these have it: once with plain decoding (``speculation: {"max_draft_tokens": 0}``), then with each strategy,
as a whole and streamed. Texts, calls, token ids, finish reasons, the tokens of log-probabilities and the counts of the usage
must be the same to the letter, the log-probabilities within what rounding explains. Drafted and accepted tokens are those that
``/metrics`` counted meanwhile: where nothing was accepted, nothing was shown.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

import httpx

from cluster.cli.launch.serve import EXAMPLE
from cluster.serving.shared_answer import FRESH_S
from configs.slices import Dtype
from decoding.drafters import STRATEGIES
from decoding.request import PLAIN
from experiments.bench.options import add_model
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results, Run
from experiments.service.asks import Answer, Ask, ask
from experiments.service.parity.cases import GREEDY, Case, Route, Said, cases
from experiments.service.served import sample_sums, server_at

PROMPTS = (EXAMPLE, "Repeat after me, twice: the quick brown fox jumps over the lazy dog.")
_ROUTES: Mapping[Route, str] = {"chat": "chat/completions", "text": "completions", "responses": "responses"}
_NEAR = 0.02  # logarithms of probabilities: where a model is not served exactly, batches of other sizes round differently
_COUNTERS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
_MAX_TOKENS, _TOGETHER = 24, 6
_SHOWN = 20  # mismatches that the record holds in full
_PLAIN_CHOICE = {"max_draft_tokens": 0}


@dataclass(slots=True)
class Row:
    """A line of the table."""

    values: set[str] = field(default_factory=set)
    compared: int = 0  # answers with speculation, each against the one without
    refused: int = 0  # of these, errors of the client, the same with and without
    mismatches: int = 0
    gap: float = 0.0  # largest between two log-probabilities
    drafted: int | None = None  # None where the server does not tell
    accepted: int | None = None


@dataclass(slots=True)
class Table:
    """What came out, by parameter."""

    rows: dict[str, Row] = field(default_factory=dict)
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def note(self, case: Case, body: Mapping[str, Any], expected: Answer, got: Answer) -> None:
        """Counts a comparison."""
        row = self.rows.setdefault(case.field, Row())
        row.values.add(case.value)
        wrong = got.differs(expected, _NEAR)
        row.compared += 1
        row.refused += got.status == expected.status == 400
        row.gap = max(row.gap, got.gap(expected))
        if expected.status not in (200, 400):
            wrong = [f"status {expected.status}", *wrong]
        if wrong:
            row.mismatches += 1
            shown = {"field": case.field, "differs": wrong, "body": dict(body), "expected": asdict(expected), "got": asdict(got)}
            self.mismatches.append(shown)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for."""

    strategies: Sequence[str] = ()  # to compare with plain decoding; none: all that the server has and calls lossless
    fields: Sequence[str] = ()  # parameters; none: all
    prompts: Sequence[str] = PROMPTS
    max_tokens: int = _MAX_TOKENS  # of an answer, where the parameter is not about that
    streamed: Sequence[bool] = (False, True)
    together: int = _TOGETHER  # requests at a time


class Asker:
    """Asks a server."""

    def __init__(self, client: httpx.AsyncClient, model: str, asked: Asked) -> None:
        """
        Args:
            client: of the server, with its address and key.
            model: its name.
            asked: with the strategies that are compared.
        """
        self._client, self._model, self._asked = client, model, asked
        self._free = asyncio.Semaphore(asked.together)

    async def said(self, prompt: str) -> Said:
        """What the model says to a prompt, at least two tokens.

        Raises:
            RuntimeError: it says less, or the server refuses.
        """
        answer = await self._ask("text", self._body("text", prompt) | {**GREEDY, "ignore_eos": True})
        if answer.error is not None:
            raise RuntimeError(f"the server refuses a plain completion: {answer.error}")
        text = answer.choices[0].text
        ids, prompt_ids = await self._ids(text), await self._ids(prompt)
        if len(ids) < 2:
            raise RuntimeError(f"the model says {text!r} to {prompt!r}: too little to compare; choose another prompt")
        return Said(prompt, text, ids, prompt_ids)

    async def compare(self, said: Said, case: Case, table: Table) -> None:
        """A value of a parameter, in all settings."""
        jobs = [self._compare(said, case, route, setting, table) for route in case.routes for setting in case.settings]
        await asyncio.gather(*jobs)

    async def _compare(self, said: Said, case: Case, route: Route, setting: Mapping[str, Any], table: Table) -> None:
        body = self._body(route, said.prompt) | dict(setting) | dict(case.body)
        expected = await self._ask(route, body | {"speculation": _PLAIN_CHOICE})

        async def one(strategy: str, streamed: bool) -> None:
            extra: dict[str, Any] = {"speculation": {**body.get("speculation", {}), "strategy": strategy}}
            if streamed:
                extra |= {"stream": True} | ({} if route == "responses" else {"stream_options": {"include_usage": True}})
            table.note(case, body | extra, expected, await self._ask(route, body | extra))

        await asyncio.gather(
            *(one(strategy, streamed) for strategy in self._asked.strategies for streamed in self._asked.streamed)
        )

    def _body(self, route: Route, prompt: str) -> dict[str, Any]:
        prompts: dict[Route, tuple[str, Any]] = {
            "chat": ("messages", [{"role": "user", "content": prompt}]), "text": ("prompt", prompt),
            "responses": ("input", prompt),
        }  # fmt: skip
        most, (name, asked) = "max_output_tokens" if route == "responses" else "max_tokens", prompts[route]
        return {most: self._asked.max_tokens, name: asked}

    async def _ask(self, route: Route, body: dict[str, Any]) -> Answer:
        if "max_completion_tokens" in body:
            body = {name: value for name, value in body.items() if name != "max_tokens"}
        async with self._free:
            return await ask(self._client, self._model, Ask("", _ROUTES[route], body))

    async def _ids(self, text: str) -> list[int]:
        response = await self._client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        ids: list[int] = response.raise_for_status().json()["tokens"]
        return ids

    async def counters(self) -> list[int | None]:
        """Tokens drafted and accepted since the start; None where the server does not tell."""
        await asyncio.sleep(FRESH_S)  # until /metrics asks the engines anew
        response = await self._client.get("/metrics")
        if response.status_code != 200:
            return [None] * len(_COUNTERS)
        sums = sample_sums(response.text)
        return [int(sums[name]) if name in sums else None for name in _COUNTERS]


async def measure(url: str, key: str, asked: Asked, progress: Progress) -> tuple[Sequence[str], Table]:
    """Asks for everything.

    Args:
        url: of the server.
        key: for it.
        asked: what.
        progress: is told how far it is.

    Returns:
        The strategies, and what came out.

    Raises:
        httpx.HTTPError: the server does not answer.
        RuntimeError: it refuses what every server of this kind takes.
    """
    table, headers = Table(), {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=asked.together)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:
        card, *_ = (await client.get("/v1/models")).raise_for_status().json()["data"]  # adapters follow
        if not asked.strategies:
            asked = replace(asked, strategies=[name for name in card["lossless_strategies"] if name != PLAIN])
        asker = Asker(client, card["id"], asked)
        for prompt in asked.prompts:
            said = await asker.said(prompt)
            for case in cases(said):
                if asked.fields and case.field not in asked.fields:
                    continue
                before = await asker.counters()
                await asker.compare(said, case, table)
                _count(table.rows[case.field], before, await asker.counters())
            progress.say(f"{sum(row.compared for row in table.rows.values())} answers, {len(table.mismatches)} differ")
    return asked.strategies, table


def _count(row: Row, before: Sequence[int | None], after: Sequence[int | None]) -> None:
    added = [None if old is None or new is None else new - old for old, new in zip(before, after, strict=True)]
    drafted, accepted = added
    row.drafted = None if drafted is None else (row.drafted or 0) + drafted
    row.accepted = None if accepted is None else (row.accepted or 0) + accepted


def compare(args: argparse.Namespace, run: Run) -> Results:
    """All cases, on the server that was named or on one of its own."""
    streamed = {"whole": (False,), "streamed": (True,), "both": (False, True)}[args.answers]
    asked = Asked(args.strategy, args.field, args.prompt, args.max_tokens, streamed, args.together)
    key, args.key = args.key, ""  # no record holds it
    with server_at(args.url, args.model, own_settings(args.dtype)) as url:
        strategies, table = asyncio.run(measure(url, key, asked, run.progress))
    rows = {name: asdict(row) | {"values": sorted(row.values)} for name, row in table.rows.items()}
    return {"strategies": strategies, "parameters": rows, "mismatches": table.mismatches[:_SHOWN]}


def own_settings(dtype: str) -> list[str]:
    """Of a server that is started: all strategies that need no draft model."""
    others = ",".join(f'"{name}"' for name in STRATEGIES if name not in ("auto", PLAIN))
    return [f"model.dtype={dtype}", "tenancy.anonymous=local", f"speculation.strategies=[{others}]"]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "float32", get_args(Dtype))
    parser.add_argument("--url", help="a running server; one of its own when absent")
    parser.add_argument("--key", default="none", help="API key for it")
    parser.add_argument("--strategy", nargs="*", default=[], help="all lossless ones of the server when absent")
    parser.add_argument("--field", nargs="*", default=[], help="parameters; all when absent")
    parser.add_argument("--prompt", nargs="*", default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS)
    parser.add_argument("--answers", choices=("both", "whole", "streamed"), default="both", help="with speculation")
    parser.add_argument("--together", type=int, default=_TOGETHER, help="requests at a time")


def changed(results: Results, args: argparse.Namespace) -> list[str]:
    """The parameters with an answer that is another one with speculation."""
    return [f"{name}: {row['mismatches']} answers differ" for name, row in results["parameters"].items() if row["mismatches"]]


BENCH = Bench(
    "parity", __doc__ or "", compare, options, {"max_tokens": 1, "together": 1}, wrong=changed,
    refuses=(httpx.HTTPError, RuntimeError),
)  # fmt: skip
