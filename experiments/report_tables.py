"""What matters of the records that are known: one or two tables each, which a report shows first."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.report_cells import Cell, figure, median, repeats, rounded
from experiments.report_speeds import Results, draft_models, load, load_workloads, scaling, strategies
from experiments.report_values import Table, table_of
from experiments.scaling_tables import forms, memory, speeds, steps

_TRANSPORTS = {
    "tcp": "TCP, as in `actors/lookahead/link.py`",
    "unix": "Unix sockets",
    "graph": "compiled graph of Ray",
    "gloo": "gloo, broadcast and all-gather",
    "calls": "actor calls",
}


def shared_trie(results: Results) -> Table:
    """``experiments.shared_trie``: tokens per step of replicas that share, by workload."""
    titles = (
        "workload", "shares nothing", "B, after A had the same requests", "C, started later", "first request: alone, B, C",
        "B, new requests", "alone, new requests",
    )  # fmt: skip
    rows = []
    for name, of in results["workloads"].items():
        first = ", ".join(rounded(of[replica]["first_request"], 2) for replica in ("alone", "B", "C"))
        steps = {replica: figure(row["tokens_per_step"]) for replica, row in of.items()}
        rows.append(
            [
                Cell(name),
                steps["alone"],
                steps["B"],
                steps["C"],
                Cell(first),
                steps["B, new requests"],
                steps["alone, new requests"],
            ]
        )
    return table_of("", titles, rows)


def cache_figures(results: Results) -> Table:
    """``experiments.cache_figures``: how long a token takes from one replica to another, and what it takes of the stream."""
    counts = list(dict.fromkeys(run["requests"] for run in results["lag"]))
    rows = []
    for label, unit in (
        ("from commit on A to draftable on B, p50 and p99 (ms)", "lag"),
        ("bytes of the stream for a token", "bytes"),
    ):
        for kind, name in (("lag", label), ("lag_without_wait", "the same with `cache.flush_s: 0`")):
            runs = [[run for run in results[kind] if run["requests"] == count] for count in counts]
            digits = 0 if kind == "lag" else 1
            if unit == "lag":
                cells = [
                    Cell(f"{_between([r['lag_ms_p50'] for r in of], digits)}, {_between([r['lag_ms_p99'] for r in of], 0)}")
                    for of in runs
                ]
            else:
                cells = [median([run["stream_bytes_per_token"] for run in of], 1) for of in runs]
            rows.append([Cell(name), *cells])
    return table_of("", ("requests at a time", *map(str, counts)), rows)


def exchange(results: Results) -> Table:
    """``experiments.exchange``: p50 (p99) of a step's messages in milliseconds, by transport."""
    cases = {(case["transport"], case["world"], case["work"]): case for case in results["cases"]}
    rows = []
    for transport, label in _TRANSPORTS.items():
        found = [cases.get((transport, *setting)) for setting in ((2, "none"), (4, "none"), (2, "unpinned"))]
        if any(found):
            times = [case["exchange_ms"] if case else None for case in found]
            cells = [Cell("") if ms is None else Cell(f"{_short(ms['p50'])} ({_short(ms['p99'])})", ms["p50"]) for ms in times]
            rows.append([Cell(label), *cells, figure(found[0]["waiting_cores"] if found[0] else None)])
    titles = ("ms, p50 (p99)", "two ranks", "four ranks", "two ranks beside compute", "cores that a waiting rank takes")
    return table_of("", titles, rows)


def rank_faults(results: Results) -> Table:
    """``experiments.rank_faults``: what clients see of a lost rank, medians and the longest."""
    signals = {"KILL": "`kill -9`", "STOP": "SIGSTOP"}
    rows: list[list[Cell]] = []
    for victim in ("follower", "leader"):
        for signal, words in signals.items():
            row = results["summary"].get(signal, {}).get(victim)
            if row is not None:
                longest = "at most " if not rows else ""
                rows.append(
                    [
                        Cell(f"{victim}, {words}"), Cell(str(row["runs"]), row["runs"]), _longest(row["pause_s"], longest),
                        _longest(row["noticed_s"]), _longest(row["recovered_s"]),
                    ]
                )  # fmt: skip
    titles = ("", "runs", "longest pause that a client sees", "until `/health` says so", "until all ranks are back")
    return table_of("", titles, rows)


_EXACT = {  # what a line says, and a pattern for each of its counts: of the names of the cases, but for the references
    "plain, 8 and 32 requests at once": (r"plain at (8|32)",),
    "`auto`, 1, 8 and 32 requests at once": (r"auto at \d+",),
    "every other strategy, 1, 8 and 32 at once, prompts in pieces": (r"(?!auto|plain|vLLM|transformers).* at \d+",),
    "preempted; on a second turn; on two ranks (SmolLM2: every strategy, 110 M: `auto`)": (
        r".*, preempted",
        r".*, second turn over.*",
        r".*, two ranks",
    ),
    "transformers: prompt lookup; padded batches of 8": ("transformers, prompt lookup", "transformers at 8"),
    "vLLM: n-gram drafts; 8 requests at once": ("vLLM, ngram", "vLLM at 8"),
}


def exact_outputs(*results: Results) -> Table:
    """``experiments.exact_outputs``: answers that are plain decoding's of the same system at one request, model by model.

    Of a model with several records a case counts as the last one that has it found it.
    """
    by_model: dict[str, dict[str, Mapping[str, Any]]] = {}
    for found in results:
        cases = {case["case"]: case for case in (*found["cases"], *found["peers"])}
        by_model[found["model"]] = by_model.get(found["model"], {}) | cases
    rows = []
    for title, patterns in _EXACT.items():
        cells = []
        for counted in by_model.values():
            parts = [[case for name, case in counted.items() if re.fullmatch(pattern, name)] for pattern in patterns]
            cells.append(Cell("; ".join(filter(None, map(_equal, parts)))))
        if any(cell.text for cell in cells):  # of what was asked
            rows.append([Cell(title), *cells])
    return table_of("", ("", *by_model), rows)


_PEERS = {
    "plain": "Outrider, plain",
    "auto": "Outrider, `auto`",
    "vLLM": "vLLM",
    "vLLM ngram": "vLLM, n-gram drafts",
    "vLLM suffix": "vLLM, suffix decoding",
    "llama.cpp": "llama.cpp",
    "llama.cpp lookup": "llama.cpp, prompt lookup",
    "llama.cpp Q4_1": "llama.cpp, Q4_1",
}
_PEERS_STOCK = {"1": "transformers", "8": "transformers batching", "32": "transformers batching"}


def peers(results: Results) -> Table:
    """``experiments.peers``: tokens per second of the first model, nine lines at most; n/a where a contestant could not run."""
    speeds = next(iter(results["models"].values()))["speeds"]
    names = {name: dict.fromkeys(_PEERS_STOCK, name) for name in _PEERS} | {"transformers": _PEERS_STOCK}
    rows = []
    for name, of in names.items():
        found = {level: speeds.get(who, {}).get(level) for level, who in of.items()}
        kinds = (("1", "decode"), ("8", "all"), ("32", "all"), ("1", "prefill"))
        values = [(found[level] or {}).get(f"{kind}_tokens_per_s") for level, kind in kinds]
        if any(values):
            title = _PEERS.get(name, "transformers; at 8 and 32 its continuous batching")
            rows.append([Cell(title), *(repeats(value, 0) if value else Cell("n/a") for value in values)])
    titles = ("tokens per second", "1 at once, after the first", "8 at once", "32 at once", "prompts")
    return table_of("", titles, rows)


def exact_cost(results: Results) -> Table:
    """``experiments.exact_outputs --against``: tokens per second beside those of another revision, and the ratio of the times."""
    rows = []
    for name, case in results["against"]["cases"].items():
        low, high = case["spread"]
        speeds = (f"{case['median'][who]:,.0f}" for who in ("this", "other"))
        rows.append([Cell(name), *map(Cell, speeds), Cell(f"{case['times_as_long']:.2f} ({low:.2f}-{high:.2f})")])
    return table_of("", ("", "tokens per second", "with near-ties left to rounding", "times as long"), rows)


def _equal(cases: Sequence[Mapping[str, Any]]) -> str:
    if not cases:
        return ""
    return f"{sum(case['equal'] for case in cases)} of {sum(case['answers'] for case in cases)}"


def trie_ablation(results: Results, domains: Mapping[str, str] | None = None) -> Table:
    """``experiments.trie_ablation``: the paper's ratios beside those of the explicit trie, the compiled one, and in time.

    Args:
        results: of the record.
        domains: its workloads and what they are called; all when absent.
    """
    shown = domains or {name: name for name in results["workloads"]}
    rows = []
    for part, there in results["paper"]["parts"].items():
        cells = []
        for name in shown:
            explicit, compiled = (results["workloads"][name]["parts"][trie].get(part) for trie in ("explicit", "compiled"))
            key = "tokens_per_step" if part == "full" else "ratio"
            ratios = " / ".join(rounded(row[key], 2) for row in (explicit, compiled) if row is not None)
            cells.append(Cell(ratios if part == "full" else f"{ratios}, {rounded(explicit['ratio_in_time'], 2)}"))
        whole = part == "full"
        said = Cell(f"{rounded(there['tokens_per_s'], 1)} tokens/s") if whole else figure(there["ratio"])
        rows.append([Cell("full, tokens per step" if whole else part), said, *cells])
    return table_of("", ("", "paper, tokens/s on AntRAG", *shown.values()), rows)


def _longest(summary: Mapping[str, float], before: str = "") -> Cell:
    """A median in seconds and the longest."""
    middle, most = summary["median"], summary["max"]
    return Cell(f"{_short(middle)} s ({before}{_short(most)})", middle)


def _short(value: float) -> str:
    return rounded(value, 1 if value >= 1 else 2)


def _between(values: Sequence[float], digits: int) -> str:
    low, high = rounded(min(values), digits), rounded(max(values), digits)
    return low if low == high else f"{low}-{high}"


_KNOWN: dict[str, tuple[Callable[[Results], Table | None], ...]] = {
    "bench-strategies": (strategies,),
    "bench-load": (load, load_workloads),
    "bench-draft-models": (draft_models,),
    "shared-trie": (shared_trie,),
    "cache-figures": (cache_figures,),
    "lookahead-scaling": (scaling,),
    "bench-scaling": (forms, speeds, steps, memory),
    "exchange": (exchange,),
    "peers": (peers,),
    "rank-faults": (rank_faults,),
    "trie-ablation": (trie_ablation,),
}


def headlines(record: Mapping[str, Any]) -> list[Table]:
    """What matters of a record, of the kinds that are known; none of others.

    A record of a known name in another form, such as an earlier version's, has none either: it is shown as it is, and said so.
    """
    name, found = record.get("name"), []
    for build in _KNOWN.get(str(name), ()):
        try:
            table = build(record["results"])
        except (KeyError, TypeError, AttributeError, statistics.StatisticsError) as error:
            print(
                f"{name} of {record.get('started')} is not in the form of its kind ({error!r}): shown as it is", file=sys.stderr
            )
            return []
        if table is not None:
            found.append(table)
    return found
