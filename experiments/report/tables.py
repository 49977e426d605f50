"""Tables of the records of faults, sharing, exactness, simulation and papers, and those of every known record."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.decoding.request import PLAIN
from outrider.experiments.report import speeds
from outrider.experiments.report.speeds import Results
from outrider.experiments.report.values import NOTHING, Table, figure, number, rounded, table_of, text_of

_FIGURES = {
    "tokens_per_s": "tokens/s",
    "e2e_ms mean": "end to end, mean (ms)",
    "ttft_ms p50": "TTFT, p50 (ms)",
    "tpot_ms p50": "TPOT, p50 (ms)",
}


def validation(results: Results) -> Table:
    """Each load and strategy, as measured, as predicted, and the error; bold if it is too large."""
    rows = []
    for load, cell in results["cells"].items():
        shown = (_beside(cell["figures"][name]) if name in cell["figures"] else "" for name in _FIGURES)
        rows.append((load, *shown, " ".join(figure(cell["tokens_per_step"][who]) for who in ("measured", "predicted"))))
    return table_of("", ("load, strategy", *_FIGURES.values(), "tokens per step"), rows)


def _beside(row: Mapping[str, Any]) -> str:
    digits = 0 if row["measured"] >= 100 else 1
    shown = f"{rounded(row['measured'], digits)}, {rounded(row['predicted'], digits)}: {100 * row['error']:+.0f} %"
    return shown if row["holds"] else f"**{shown}**"


def published(results: Results) -> Table:
    """Each figure of a paper and the prediction."""
    rows = []
    for row in results["comparisons"]:
        if "agree" in row:
            ends = row["published"] if isinstance(row["published"], list) else [row["published"]]
            predicted, agree = f"{row['predicted']:.3g}", "yes" if row["agree"] else "no"
            rows.append((row["source"], row["what"], "-".join(f"{end:g}" for end in ends), predicted, agree, row.get("why", "")))
    return table_of("", ("source", "of", "published", "predicted", "within 15 %", "why not"), rows)


def deployments(results: Results) -> Table:
    """Each deployment under each traffic."""
    rows = []
    for row in results["rows"]:
        if row["strategy"] == PLAIN and "lookahead" in row["deployment"]:
            continue  # plain decoding has no drafts to share: as with one GPU
        names = (row["traffic"], row["deployment"], row["strategy"], str(row["gpus"]))
        seconds = (row["e2e_s"]["p50"], row["e2e_s"]["p99"], row["ttft_s"]["p99"])
        speeds = (figure(row["tokens_per_s"], 0), figure(row["tokens_per_step"]), figure(row["usd_per_million"]))
        rows.append((*names, *map(figure, seconds), *speeds))
    times = ("p50 (s)", "p99 (s)", "TTFT p99 (s)")
    titles = ("traffic", "deployment", "strategy", "GPUs", *times, "tokens/s", "tokens per step", "$/M tokens")
    return table_of("", titles, rows)


def form_map(results: Results) -> Table:
    """By machine and GPUs the fastest form for each number of requests at once, and lookahead parallelism's share of it."""
    requests = list(next(iter(next(iter(results["cells"].values())).values())))
    rows = [
        (place, gpus, *(_winner(cells[count]) for count in requests))
        for place, by_gpus in results["cells"].items()
        for gpus, cells in by_gpus.items()
    ]
    return table_of("", ("", "GPUs", *(f"{count} at once" for count in requests)), rows)


def _winner(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    if not kinds:
        return "nothing fits"
    best = next(iter(kinds))
    shown = f"{best}, {'plain' if kinds[best]['strategy'] == PLAIN else kinds[best]['strategy']}"
    if "lookahead" not in kinds:
        return shown
    others = [own["tokens_per_s"] for kind, own in kinds.items() if kind != "lookahead"]
    return f"{shown} (LP {kinds['lookahead']['tokens_per_s'] / max(others):.2f})"


def answer(results: Results) -> Table:
    """Return the deployment that ``--find`` found."""
    return table_of("", ("what was found",), [[line] for line in results.get("answer") or ()])


KEYS = ("paper", "claims", "tables", "agree", "told", "verdicts", "notes")  # of the results, shown by ``beside_paper``


def title_of(results: Results) -> str:
    """Return the source and the title of the paper."""
    return f"{results['paper'].get('source', '')} {results['paper'].get('title', '')}".strip()


def beside_paper(results: Results) -> list[Table]:
    """Return the paper's tables with the rows of this run below them, and its statements; empty without a paper."""
    if not isinstance(results.get("claims"), list) or not isinstance(results.get("tables"), Mapping):
        return []
    tables = [_both(name, table) for name, table in results["tables"].items()]
    return [*tables, statements(results)] if results["claims"] else tables


def _both(name: str, table: Mapping[str, Any]) -> Table:
    """Return a table of the paper, with the rows of this run below."""
    sides = [(who, table.get(who) or {}) for who in ("paper", "here")]
    columns = list(dict.fromkeys(column for _, rows in sides for row in rows.values() for column in row))
    rows = []
    for who, of_side in sides:
        for row, values in of_side.items():
            known = (values.get(column) for column in columns)
            rows.append((who, row, *("" if value is None else text_of(value) or str(value) for value in known)))
    section = f"section {table['section']}" if table.get("section") else ""
    return table_of(", ".join(filter(None, (name, table.get("title"), section))), ("", "", *columns), rows)


def statements(results: Results) -> Table:
    """Return what a paper says, with direction, size and power of what was measured here (``experiments.papers.beside``)."""
    titles = (
        "where", "dataset", "the paper says", "metric", "here",
        "the paper's ratio", "ratio here (95 %)", "here over the paper's", "records (needed)", "verdict", "why",
    )  # fmt: skip
    return table_of("statements", titles, map(_statement, results["claims"]))


def _statement(claim: Mapping[str, Any]) -> list[str]:
    interval, power, size = claim.get("interval"), claim.get("power"), claim.get("size")
    ratio = number(claim["ratio"]) if "ratio" in claim else NOTHING if interval is None else "difference"
    if interval is not None:
        ratio += f" ({number(interval[0])} to {number(interval[1])})"
    needed = NOTHING
    if power is not None:
        needed = f"{power['records']} ({NOTHING if power['needed'] is None else power['needed']})"
    here = "not measured"
    if claim.get("here") is not None:
        here = " | ".join(f"{label} {number(value)}" for label, value in zip(claim["of"], claim["here"], strict=True))
    agrees = {True: "agrees in sign", False: "differs in sign", None: NOTHING}[claim.get("agree")]  # up to 2026-11-24
    return [
        *(str(claim.get(key, "")) for key in ("where", "dataset", "paper", "metric")),
        here,
        NOTHING if size is None else " to ".join(dict.fromkeys(number(bound) for bound in size["paper"])),
        ratio,
        NOTHING if size is None else number(size["of_paper"]),
        needed,
        str(claim.get("verdict", agrees)),
        str(claim.get("why", "")),
    ]


_NODE_FAULTS = {
    "api": "the machine of one of two APIs, another one comes after 10 s",
    "zone": "the network of an API and an engine, cut for 60 s",
    "engine": "the machine of an engine, another one comes after 10 s",
    "head": "the head's, back after 10 s",
    "redis": "Redis of the shared memory, back after 10 s",
    "upgrade": "other options of API and engines, and back",
    "model": "another model of the same name, with another tokenizer",
    "scale": "a third engine on a further machine, and back to two",
    "keys": "the tenant's key",
}
_NODE_TIMES = {
    "noticed_s": "noticed after",
    "running_after_s": "Serve runs again after",
    "meanwhile": "meanwhile `shared_cache` is",
    "whole_after_s": "whole again after",
    "upgrade_s": "there",
    "rollback_s": "back",
    "model_s": "there",
    "out_s": "there",
    "in_s": "back",
    "new_key_works_s": "the new one works after",
    "old_key_refused_s": "the old one is refused after",
}


def node_faults(*records: Results) -> Table:
    """``bench faults nodes``: a row per fault, of all records."""
    rows = []
    for name, fault in (fault for record in records for fault in record["faults"].items()):
        shown = {key: value if isinstance(value, str) else f"{value:.1f} s" for key, value in fault.items() if key in _NODE_TIMES}
        times = [f"{words} {shown[key]}" for key, words in _NODE_TIMES.items() if key in shown]
        if "new_request_s" in fault:
            times.insert(0, f"a new request takes {fault['new_request_s']['max']:.2f} s at most")
        answers = f"{fault['identical']} of {fault['answers']}" if "answers" in fault else ""
        pause = f"{fault['pause_s']['p50']:.2f} s ({fault['pause_s']['max']:.2f})" if fault.get("pause_s") else ""
        rows.append((_NODE_FAULTS[name], answers, str(fault.get("resumed") or ""), pause, ", ".join(times)))
    titles = ("lost or changed", "answers as undisturbed", "went on elsewhere", "longest pause of a stream: p50 (max)", "")
    return table_of("", titles, rows)


def rank_faults(results: Results) -> Table:
    """``bench faults ranks``: the effect of a lost rank on clients, medians and the longest."""
    rows: list[Sequence[str]] = []
    for victim in ("follower", "leader"):
        for signal, words in (("KILL", "`kill -9`"), ("STOP", "SIGSTOP")):
            row = results["summary"].get(signal, {}).get(victim)
            if row is not None:
                pause = _longest(row["pause_s"], "" if rows else "at most ")
                times = (pause, _longest(row["noticed_s"]), _longest(row["recovered_s"]))
                rows.append((f"{victim}, {words}", str(row["runs"]), *times))
    titles = ("", "runs", "longest pause that a client sees", "until `/health` says so", "until all ranks are back")
    return table_of("", titles, rows)


def _longest(summary: Mapping[str, float], before: str = "") -> str:
    """Format a median in seconds and the longest time."""
    middle, most = (rounded(value, 1 if value >= 1 else 2) for value in (summary["median"], summary["max"]))
    return f"{middle} s ({before}{most})"


def shared_trie(results: Results) -> Table:
    """``bench replay sharing``: tokens per step of replicas that share, by workload."""
    titles = (
        "workload", "shares nothing", "B, after A had the same requests", "C, started later", "first request: alone, B, C",
        "B, new requests", "alone, new requests",
    )  # fmt: skip
    rows = []
    for name, of in results["workloads"].items():
        first = ", ".join(figure(of[replica]["first_request"]) for replica in ("alone", "B", "C"))
        steps = {replica: figure(row["tokens_per_step"]) for replica, row in of.items()}
        same = (steps["alone"], steps["B"], steps["C"])
        rows.append((name, *same, first, steps["B, new requests"], steps["alone, new requests"]))
    return table_of("", titles, rows)


_EXACT = {  # title of a row -> for each of its counts a pattern of the names of cases, without the reference cases
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


def exact_outputs(*records: Results) -> Table:
    """``bench outputs``: answers equal to plain decoding at one request with the same system, by model.

    A case that several records of a model have counts as in the last of them.
    """
    by_model: dict[str, dict[str, Mapping[str, Any]]] = {}
    for found in records:
        cases = {case["case"]: case for case in (*found["cases"], *found["peers"])}
        by_model[found["model"]] = by_model.get(found["model"], {}) | cases
    rows = []
    for title, patterns in _EXACT.items():
        cells = []
        for counted in by_model.values():
            parts = [[case for name, case in counted.items() if re.fullmatch(pattern, name)] for pattern in patterns]
            cells.append("; ".join(_equal(cases) for cases in parts if cases))
        if any(cells):
            rows.append((title, *cells))
    return table_of("", ("", *by_model), rows)


def _equal(cases: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(case['equal'] for case in cases)} of {sum(case['answers'] for case in cases)}"


def exact_cost(results: Results) -> Table:
    """``bench outputs --against``: tokens per second beside those of another revision, and the ratio of the times."""
    rows = []
    for name, case in results["against"]["cases"].items():
        low, high = case["spread"]
        speeds = (f"{case['median'][who]:,.0f}" for who in ("this", "other"))
        rows.append((name, *speeds, f"{case['times_as_long']:.2f} ({low:.2f}-{high:.2f})"))
    return table_of("", ("", "tokens per second", "with near-ties left to rounding", "times as long"), rows)


def exactness(results: Results) -> Table:
    """Return ``exact_cost`` of a comparison of revisions, else ``exact_outputs``."""
    return exact_cost(results) if "against" in results else exact_outputs(results)


_KNOWN: dict[str, tuple[Callable[[Results], Table], ...]] = {
    "bench-strategies": (speeds.strategies,),
    "bench-load": (speeds.load,),
    "bench-draft-models": (speeds.draft_models,),
    "emulated": (speeds.emulated, speeds.dilation),
    "bench-scaling": (speeds.forms, speeds.scaling, speeds.winners),
    "bench-rag": (speeds.rag, speeds.rag_pairs),
    "shared-trie": (shared_trie,),
    "exact-outputs": (exactness,),
    "node-faults": (node_faults,),
    "peers": (speeds.peers,),
    "rank-faults": (rank_faults,),
    "simulate": (deployments, answer),
    "simulate-forms": (form_map, answer),
    "simulate-papers": (published,),
    "simulate-validation": (validation,),
}


def headlines(record: Mapping[str, Any]) -> list[Table]:
    """Return the main tables of a known record; none, with a warning, if it has another format than today's records."""
    try:
        kind = "emulated" if "emulated" in record["results"] else str(record.get("name"))
        tables = [build(record["results"]) for build in _KNOWN.get(kind, ())]
    except (KeyError, TypeError, AttributeError, statistics.StatisticsError) as error:
        print(f"{record['name']} of {record.get('started')} has an unknown format: {error!r}", file=sys.stderr)
        return []
    return [table for table in tables if table.rows]
