"""Comparison of drafts on and off, parameter by parameter: does speculation change an answer?

outrider bench service parity [--url URL | --model M] [--strategy S ...] [--field F ...]

Every parameter that the server honours is sent with several values, greedy and sampled, as a chat, as a completion and as a
response, where they have it: once with plain decoding (``speculation: {"max_draft_tokens": 0}``), then with each strategy, whole
and streamed. Texts, calls, token ids, finish reasons, tokens of log-probabilities and usage counts have to be equal,
log-probabilities within rounding. Drafted and accepted tokens are counted by ``/metrics``: without accepted tokens a comparison
shows nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import httpx
import yaml

from outrider.cluster.cli.launch.serve import EXAMPLE
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.configs.slices import Dtype
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import PLAIN
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.service.asks import Answer, Ask, ask
from outrider.experiments.service.served import sample_sums, server_at

Route = Literal["chat", "text", "responses"]
GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11}


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and the model's greedy answer to it."""

    prompt: str
    text: str
    ids: Sequence[int]  # of the text
    prompt_ids: Sequence[int]  # of the prompt

    def parts(self) -> dict[str, Any]:
        """Return the values of the names in the table, such as strings that occur in the answer."""
        middle, prompt_ids = len(self.text) // 2, list(self.prompt_ids)
        return {
            "$text": self.text, "$reversed": self.text[::-1], "$doubled": self.text * 2, "$continued": self.text[3:] + self.text,
            "$inside": self.text[middle : middle + 3], "$late": self.text[-2:], "$first": str(self.ids[0]),
            "$last": str(self.ids[-1]), "$first_id": self.ids[0], "$last_id": self.ids[-1],
            "$middle_id": self.ids[len(self.ids) // 2], "$ids": prompt_ids, "$half_ids": prompt_ids[: len(prompt_ids) // 2],
            "$prompt": self.prompt, "$shorter_prompt": self.prompt[:-3],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A value of a parameter."""

    field: str
    body: Mapping[str, Any]  # fields added to the request
    routes: Sequence[Route]
    settings: Sequence[Mapping[str, Any]] = (GREEDY, SAMPLED)

    @property
    def value(self) -> str:
        """The fields as JSON of bounded length."""
        asked = {name: value for name, value in self.body.items() if name != "tools" or self.field == name}
        text = json.dumps(asked, ensure_ascii=False)
        return text if len(text) <= 300 else f"{text[:297]}..."


def cases(said: Said) -> Iterator[Case]:
    """Yield all cases of one prompt."""
    parts = said.parts()
    for group in yaml.safe_load(Path(__file__).with_name("parity_cases.yaml").read_text(encoding="utf-8")):
        bodies = [(name, {name: value}) for name, values in group.get("values", {}).items() for value in values]
        bodies += [(name, body) for name, each in group.get("bodies", {}).items() for body in each]
        for name, body in bodies:
            yield Case(name, _filled(body, parts), group["routes"], group.get("settings", (GREEDY, SAMPLED)))


def _filled(value: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {parts.get(name, name): _filled(each, parts) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, parts) for each in value]
    return parts.get(value, value) if isinstance(value, str) else value


PROMPTS = (EXAMPLE, "Repeat after me, twice: the quick brown fox jumps over the lazy dog.")
# Path of each route, its field of the prompt and its field of the length.
_ROUTES: Mapping[Route, tuple[str, str, str]] = {
    "chat": ("chat/completions", "messages", "max_tokens"),
    "text": ("completions", "prompt", "max_tokens"),
    "responses": ("responses", "input", "max_output_tokens"),
}
_NEAR = 0.02  # of log-probabilities: batches of other sizes round differently if a model is not served exactly
_COUNTERS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
_TOGETHER = 6  # requests in flight
_SHOWN = 20  # mismatches kept in the record


@dataclass(slots=True)
class Row:
    """The comparisons of one parameter."""

    values: set[str] = field(default_factory=set)
    compared: int = 0  # answers with speculation
    refused: int = 0  # of these, errors of the client, the same with and without
    mismatches: int = 0
    gap: float = 0.0  # largest difference of two log-probabilities
    drafted: int | None = None  # None if /metrics is closed
    accepted: int | None = None


@dataclass(slots=True)
class Table:
    """All comparisons, by parameter."""

    rows: dict[str, Row] = field(default_factory=dict)
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def note(self, case: Case, body: Mapping[str, Any], expected: Answer, got: Answer) -> None:
        """Add a comparison."""
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

    def count(self, name: str, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        """Add the tokens drafted and accepted during the comparisons of a parameter."""
        row = self.rows[name]
        drafted, accepted = (None if old is None or new is None else new - old for old, new in zip(before, after, strict=True))
        row.drafted = None if drafted is None else (row.drafted or 0) + drafted
        row.accepted = None if accepted is None else (row.accepted or 0) + accepted


class Asker:
    """Client that compares the answers of a server."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, strategies: Sequence[str], max_tokens: int, streamed: Sequence[bool]
    ) -> None:
        """Compare ``strategies`` with plain decoding; ``streamed`` are the forms of the answers with speculation."""
        self._client, self._model, self._max_tokens = client, model, max_tokens
        self._variants = [(strategy, stream) for strategy in strategies for stream in streamed]
        self._free = asyncio.Semaphore(_TOGETHER)

    async def said(self, prompt: str) -> Said:
        """Return the model's answer to a prompt.

        Raises:
            RuntimeError: the answer has fewer than two tokens, or the server refuses.
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
        """Compare one value of a parameter on all its routes and in all its settings."""
        jobs = [self._compare(said, case, route, setting, table) for route in case.routes for setting in case.settings]
        await asyncio.gather(*jobs)

    async def _compare(self, said: Said, case: Case, route: Route, setting: Mapping[str, Any], table: Table) -> None:
        body = self._body(route, said.prompt) | dict(setting) | dict(case.body)
        expected = await self._ask(route, body | {"speculation": {"max_draft_tokens": 0}})

        async def one(strategy: str, stream: bool) -> None:
            extra: dict[str, Any] = {"speculation": {**body.get("speculation", {}), "strategy": strategy}}
            if stream:
                extra |= {"stream": True} | ({} if route == "responses" else {"stream_options": {"include_usage": True}})
            table.note(case, body | extra, expected, await self._ask(route, body | extra))

        await asyncio.gather(*(one(*variant) for variant in self._variants))

    def _body(self, route: Route, prompt: str) -> dict[str, Any]:
        _, name, length = _ROUTES[route]
        return {length: self._max_tokens, name: [{"role": "user", "content": prompt}] if route == "chat" else prompt}

    async def _ask(self, route: Route, body: dict[str, Any]) -> Answer:
        if "max_completion_tokens" in body:
            body = {name: value for name, value in body.items() if name != "max_tokens"}
        async with self._free:
            return await ask(self._client, self._model, Ask("", _ROUTES[route][0], body))

    async def _ids(self, text: str) -> list[int]:
        response = await self._client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        ids: list[int] = response.raise_for_status().json()["tokens"]
        return ids

    async def counters(self) -> list[int | None]:
        """Return the tokens drafted and accepted since the start; None if ``/metrics`` is closed."""
        await asyncio.sleep(FRESH_S)  # until /metrics is computed anew
        response = await self._client.get("/metrics")
        if response.status_code != 200:
            return [None] * len(_COUNTERS)
        sums = sample_sums(response.text)
        return [int(sums[name]) if name in sums else None for name in _COUNTERS]


async def measure(url: str, key: str, args: argparse.Namespace, progress: Progress) -> tuple[Sequence[str], Table]:
    """Compare all cases on a server, and return the strategies and the table.

    Raises:
        httpx.HTTPError: the server does not answer.
        RuntimeError: the server refuses a plain request.
    """
    table, headers = Table(), {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=_TOGETHER)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:
        card, *_ = (await client.get("/v1/models")).raise_for_status().json()["data"]  # adapters follow
        strategies = args.strategy or [name for name in card["lossless_strategies"] if name != PLAIN]
        streamed = {"whole": (False,), "streamed": (True,), "both": (False, True)}[args.answers]
        asker = Asker(client, card["id"], strategies, args.max_tokens, streamed)
        for prompt in args.prompt:
            said = await asker.said(prompt)
            chosen = [case for case in cases(said) if not args.field or case.field in args.field]
            before = await asker.counters()
            for name, group in itertools.groupby(chosen, lambda case: case.field):
                for case in group:
                    await asker.compare(said, case, table)
                after = await asker.counters()
                table.count(name, before, after)
                before = after
            progress.say(f"{sum(row.compared for row in table.rows.values())} answers, {len(table.mismatches)} differ")
    return strategies, table


def compare(args: argparse.Namespace, run: Run) -> Results:
    """Compare on the named server, or on a started one."""
    key, args.key = args.key, ""  # must not be in the record
    with server_at(args.url, args.model, own_settings(args.dtype)) as url:
        strategies, table = asyncio.run(measure(url, key, args, run.progress))
    rows = {name: asdict(row) | {"values": sorted(row.values)} for name, row in table.rows.items()}
    return {"strategies": strategies, "parameters": rows, "mismatches": table.mismatches[:_SHOWN]}


def own_settings(dtype: str) -> list[str]:
    """Return the settings of a started server: all strategies without a draft model."""
    others = ",".join(f'"{name}"' for name in STRATEGIES if name not in ("auto", PLAIN))
    return [f"model.dtype={dtype}", "tenancy.anonymous=local", f"speculation.strategies=[{others}]"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "float32", get_args(Dtype))
    parser.add_argument("--url", help="address of a running server; default: start one")
    parser.add_argument("--key", default="none", help="API key of the server")
    parser.add_argument("--strategy", nargs="*", default=[], help="default: all lossless ones of the server")
    parser.add_argument("--field", nargs="*", default=[], help="parameters to compare; default: all")
    parser.add_argument("--prompt", nargs="*", default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--answers", choices=("both", "whole", "streamed"), default="both", help="form of those with speculation")


def changed(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the parameters whose answers differ with speculation."""
    return [f"{name}: {row['mismatches']} answers differ" for name, row in results["parameters"].items() if row["mismatches"]]


BENCH = Bench(
    "parity", __doc__ or "", compare, options, {"max_tokens": 1}, wrong=changed, refuses=(httpx.HTTPError, RuntimeError)
)
