"""``outrider bench rag``: an enterprise's day of requests about documents, by kind, and the gain from earlier answers."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cache_service.namespace import hash_key
from outrider.configs.schema import find_model
from outrider.decoding.request import PLAIN
from outrider.engine.loading.model_files import find_files
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.record import ROOT, Kept, git_state, portable
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.peers.contestants import NGRAM, SUFFIX, vllm_server
from outrider.experiments.peers.environments import Environments, MissingPeerError, add_environments
from outrider.experiments.rag.traffic import PAIRED, SHARES, TENANTS, make_day, make_pairs, read_items
from outrider.experiments.rag.users import WARM_UP, Told, Users, api_key, pair_tenants, users_of
from outrider.experiments.service.served import served

TEXT = """An enterprise's day of requests about documents, streamed over HTTP: speed by kind of request.

A few tenants ask about passages of the workload files: new questions, the same and similar ones again, others about the same
documents, next turns of a conversation, reports, edits, and questions of another tenant. The day lasts --seconds, with most
requests before and after noon. Four clients ask at a time; follow-ups contain the server's own answers. Every setting gets the
same day from a new server: plain decoding; auto without memory; auto on each number of --replicas, with outputs shared or not,
and with requests routed by the beginning of their prompt or by load. All settings have all cores and take turns, and every
answer has to equal that of plain decoding.

Then, on one replica, the second of two related requests is sent by a tenant that sent the first one (warm), and by a new tenant
(cold), in turns, --pairs times for each kind. Ratios are tokens per second of the request, warm over cold, with the range of
90 % of resamples of the pairs. That of other_tenant is expected to be 1, because tenants are separated. Turns are kept in --kept,
from which an interrupted run continues; another setting or revision needs another file.

examples:
  outrider bench rag --workloads DIR
  outrider bench rag --workloads DIR --peers vllm --vllm PYTHON
  outrider bench rag --workloads DIR --replicas 2 --requests 20 --seconds 10 --rounds 1 --pairs 1 --out DIR    # a short run
"""
_CONTEXT = 2048  # tokens of prompt and output
_SLOTS = 24  # prompts whose KV a replica keeps: 2.3 GB, as much as vLLM keeps by default on the machine of the records
_CLIENTS, _RESAMPLES, _SEED = 4, 1000, 0
_FORGETS = ("cache.enabled=false", "engine.prefix_caching=false", "speculation.options={history_tokens: 0}")
_DRAFTS: dict[str, Any] = {"ngram": NGRAM, "suffix": SUFFIX}  # of vLLM
_PAIRS = "pairs"  # name of the setting for pairs
Day = tuple[Mapping[str, Told], float]  # answers by the key of the request, and the seconds of the day


@dataclass(frozen=True, slots=True)
class Setting:
    """A server that gets the day."""

    name: str
    replicas: int = 1
    options: tuple[str, ...] = ()
    vllm: str | None = None  # vLLM's way of drafting, empty for none; None for this project's server


PEERS = {
    "vllm": [
        Setting("vLLM", vllm=""), Setting("vLLM, n-gram drafts", vllm="ngram"), Setting("vLLM, suffix decoding", vllm="suffix"),
    ],
}  # fmt: skip


def settings(replicas: Sequence[int]) -> list[Setting]:
    """Return the settings of this project's server, plain decoding first."""
    found = [Setting("plain", options=(f"speculation.strategy={PLAIN}",)), Setting("remembers nothing", options=_FORGETS)]
    for count in replicas:
        if count == 1:
            found.append(Setting("1 replica"))
            continue
        for by in ("prefix", "load"):
            for shares in ("true", "false"):
                name = f"{count} replicas, {'shared' if shares == 'true' else 'apart'}, by {by}"
                found.append(Setting(name, count, (f"cache.enabled={shares}", f"server.routing={by}")))
    return found


@asynccontextmanager
async def started(
    setting: Setting, tenants: Sequence[str], args: argparse.Namespace, say: Callable[[str], None]
) -> AsyncIterator[Users]:
    """Yield users of a new server of a setting.

    Raises:
        ModelLoadError: the model does not exist.
        MissingPeerError: vLLM is not available, or does not start.
        RuntimeError: this project's server does not start.
    """
    model, ours = find_files(find_model(args.model)), setting.vllm is None
    say(f"{setting.name}: starting the server")
    with _own(setting, tenants, model, args.dtype) if ours else _vllm(setting, model, args, say) as url:
        async with users_of(url, Path(model).name, args.max_tokens, ours, 2 * setting.replicas) as users:
            await users.settled()
            yield users


@contextmanager
def _own(setting: Setting, tenants: Sequence[str], model: str, dtype: str) -> Iterator[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options = [
        f"model.dtype={dtype}", f"model.threads={max(1, cores // setting.replicas)}",
        f"model.max_model_len={_CONTEXT}", f"engine.kv_slots={_SLOTS}", f"server.replicas={setting.replicas}",
        f"server.cpus_per_replica={1 / setting.replicas:.2f}", *setting.options,
    ]  # fmt: skip
    keys = (f'tenancy.tenants.{name}.keys=["{hash_key(api_key(name))}"]' for name in (*tenants, WARM_UP))
    with served(model, [*options, *keys]) as server:
        yield server.url


@contextmanager
def _vllm(setting: Setting, model: str, args: argparse.Namespace, say: Callable[[str], None]) -> Iterator[str]:
    options = ["--served-model-name", Path(model).name, "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    if setting.vllm:
        options += ["--speculative-config", json.dumps(_DRAFTS[setting.vllm])]
    made = Environments(args.environments, {"vllm": args.vllm}, args.install, say)
    log = args.environments / "logs" / "vllm-rag.log"
    with vllm_server(made, Path(model), args.dtype, _CONTEXT, options, log, setting.vllm or "") as url:
        yield url


def figures_of(rounds: Sequence[Sequence[Told]]) -> dict[str, Any]:
    """Return tokens per second of the requests' times for each round, and times to the first text over all rounds."""
    every = [one for told in rounds for one in told]
    first = np.percentile([1e3 * one.first_s for one in every], (50, 95))
    return {
        "requests": len(every), "prompt_tokens": sum(one.prompt_tokens for one in every),
        "cached_tokens": sum(one.cached_tokens for one in every), "output_tokens": sum(one.tokens for one in every),
        "tokens_per_s": [round(speed(told), 2) for told in rounds],
        "ttft_ms": {"p50": round(first[0], 1), "p95": round(first[1], 1)},
    }  # fmt: skip


def speed(told: Sequence[Told]) -> float:
    """Return tokens per second of the sum of the requests' times."""
    return sum(one.tokens for one in told) / sum(one.seconds for one in told)


def summary(setting: Setting, days: Sequence[Day], expected: Mapping[str, Told]) -> dict[str, Any]:
    """Summarize the rounds of a setting; for this project's server also the number of answers other than the expected."""
    whole = [list(told.values()) for told, _ in days]
    kinds = [kind for kind in SHARES if any(one.kind == kind for one in whole[0])]
    found = {
        "servers": "vLLM" if setting.vllm is not None else f"{setting.replicas} replica{'s' * (setting.replicas > 1)}",
        "throughput": [round(sum(one.tokens for one in told.values()) / seconds, 2) for told, seconds in days],
        "failed": sum(one.error is not None for told in whole for one in told),
        "all": figures_of(whole),
        "kinds": {kind: figures_of([[one for one in told if one.kind == kind] for told in whole]) for kind in kinds},
    }
    if setting.vllm is None:
        found["differing"] = sum(one.text != expected[key].text for told, _ in days for key, one in told.items())
    return found


def compared(pairs: Sequence[tuple[Told, Told]]) -> dict[str, Any]:
    """Compare cold and warm requests: the ratio of their speeds, between the bounds of 90 % of resamples."""
    rng = random.Random(_SEED)

    def ratio(some: Sequence[tuple[Told, Told]]) -> float:
        return speed([warm for _, warm in some]) / speed([cold for cold, _ in some])

    drawn = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    bounds = drawn[_RESAMPLES // 20], ratio(pairs), drawn[-_RESAMPLES // 20]
    return {
        "cold": figures_of([[cold for cold, _ in pairs]]), "warm": figures_of([[warm for _, warm in pairs]]),
        "ratio": [round(value, 3) for value in bounds], "differing": sum(cold.text != warm.text for cold, warm in pairs),
    }  # fmt: skip


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Run the pairs, and all rounds of all settings.

    Raises:
        PromptFileError: the workload files hold too few documents.
        ModelLoadError: the model does not exist.
        RuntimeError: this project's server does not start, or does not answer a request of a pair.
    """
    progress, items = run.progress, read_items(args.workloads)
    day, pairs = make_day(items, args.requests, _SEED), make_pairs(items, args.pairs, _SEED)
    shaping = ("model", "dtype", "requests", "seconds", "max_tokens", "pairs")
    of = {key: getattr(args, key) for key in shaping} | {"workloads": args.workloads.name, "git": git_state(ROOT)}
    kept = Kept(args.kept, portable(of), lambda turn: (turn["setting"], turn["round"]))
    missing = dict[str, str]()

    async def play(setting: Setting, at: str) -> Day:
        async with started(setting, [*TENANTS], args, progress.say) as users:
            return await users.play(day, _CLIENTS, args.seconds, lambda text: progress.note(f"{at}: {text}"))

    async def cold_and_warm(setting: Setting) -> Day:
        async with started(setting, pair_tenants(len(pairs)), args, progress.say) as users:
            return await users.play_pairs(pairs, progress.note), 0.0

    everyone = [*settings(args.replicas), *(setting for peer in args.peers for setting in PEERS[peer])]
    turns = [(number, setting) for number in range(args.rounds) for setting in everyone[:: -1 if number % 2 else 1]]
    for number, setting in [*([(0, Setting(_PAIRS))] if pairs else ()), *turns]:
        if kept.has((setting.name, number)) or setting.name in missing:
            continue
        try:
            at = f"round {number + 1}, {setting.name}"
            told, seconds = asyncio.run(cold_and_warm(setting) if setting.name == _PAIRS else play(setting, at))
        except MissingPeerError as error:
            missing[setting.name] = str(error)
            progress.say(f"n/a: {error}")
        else:
            found = {key: dataclasses.asdict(one) for key, one in told.items()}
            kept.add({"setting": setting.name, "round": number, "seconds": seconds, "told": found})
    return results_of(kept.found, everyone, len(pairs), args.rounds) | {"missing": missing}


def results_of(turns: Sequence[Mapping[str, Any]], asked: Sequence[Setting], pairs: int, rounds: int) -> Results:
    """Summarize the turns of a run, as far as they belong to these settings and rounds."""
    days: dict[str, list[Day]] = {}
    for turn in turns:
        if turn["round"] < rounds or turn["setting"] == _PAIRS:
            told = {key: Told(**one) for key, one in turn["told"].items()}
            days.setdefault(turn["setting"], []).append((told, turn["seconds"]))
    ratios = {}
    if pairs:
        answers, _ = days[_PAIRS][0]
        both = [(answers[f"cold-{number}"], answers[f"warm-{number}"]) for number in range(pairs)]
        ratios = {kind: compared([pair for pair in both if pair[0].kind == kind]) for kind in PAIRED}
    rows = {each.name: summary(each, days[each.name], days["plain"][0][0]) for each in asked if each.name in days}
    return {"settings": rows, "pairs": ratios, "figures": figures(rows, ratios)}


def figures(rows: Mapping[str, Any], pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Return panels of speeds and times to the first text by kind for each group of settings, of throughput and of pairs."""
    panels: dict[str, Any] = {}
    for group in dict.fromkeys(row["servers"] for row in rows.values()):
        kinds = {name: row["kinds"] for name, row in rows.items() if row["servers"] == group}
        rates = {name: {kind: row["tokens_per_s"] for kind, row in of.items()} for name, of in kinds.items()}
        first = {name: {kind: row["ttft_ms"]["p50"] for kind, row in of.items()} for name, of in kinds.items()}
        panels[group] = panel("bars", "a request's speed", "", "tokens per second", rates)
        panels[f"{group}, first token"] = panel("bars", "p50", "", "ms", first)
    every = {"": {name: row["throughput"] for name, row in rows.items()}} if rows else {}
    panels["all requests"] = panel("bars", "", "", "tokens per second", every)
    ratios = {"": {kind: row["ratio"] for kind, row in pairs.items()}} if pairs else {}
    return panels | {"warm over cold": panel("bars", "a request's speed", "", "times", ratios)}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16", ("bfloat16", "float32"), "smollm2-135m-instruct")
    parser.add_argument("--workloads", type=Path, required=True, help="folder of JSON-lines files with documents in prompts")
    parser.add_argument("--requests", type=int, default=120, help="requests of the day; default: 120")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the day, 0: all is due at once; default: 90")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer; reports and edits a third more; default: 96")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4], help="numbers of replicas; default: 1 2 4")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all settings, 0: only the pairs; default: 2")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of each kind, 0: none; default: 20")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="further servers: vLLM's with prefix caching")
    add_environments(parser)
    parser.add_argument("--kept", type=Path, default=Path("rag.kept.jsonl"), help="file of the turns so far, to continue a run")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if nothing is measured."""
    if not args.rounds and not args.pairs:
        parser.error("--rounds 0 and --pairs 0 leave nothing to measure")


def wrong(results: Results, args: argparse.Namespace) -> list[str]:
    """Return counts of failed requests, and of answers that differ from plain decoding or between cold and warm."""
    rows = {**results["settings"], **{f"pairs, {kind}": row for kind, row in results["pairs"].items()}}
    counts = ((name, what, row.get(what)) for name, row in rows.items() for what in ("failed", "differing"))
    return [f"{name}: {count} {what}" for name, what, count in counts if count]


BENCH = Bench(
    "bench-rag", TEXT, measure, options,
    {"requests": 1, "seconds": 0, "max_tokens": 2, "replicas": 1, "rounds": 0, "pairs": 0},
    check=check, wrong=wrong, refuses=(RuntimeError,),
)  # fmt: skip
