"""What matters of the records that are known: one or two tables each, which a report shows first."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.report.cells import Cell, cell_of, figure, median, repeats, rounded
from experiments.report.simulation import deployments, form_map, published, validation
from experiments.report.speeds import Results, draft_models, forms, load, rag, rag_pairs, scaling, strategies, winners
from experiments.report.values import Table, table_of

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


def node_faults(*results: Mapping[str, Any]) -> Table:
    """A row for each fault, of all records."""
    rows = []
    for name, told in (fault for record in results for fault in record["faults"].items()):
        took = ", ".join(f"{words} {_shown(told[key])}" for key, words in _NODE_TIMES.items() if key in told)
        if "new_request_s" in told:
            took = f"a new request takes {told['new_request_s']['max']:.2f} s at most, {took}"
        answers = f"{told['identical']} of {told['answers']}" if "answers" in told else ""
        resumed = str(told.get("resumed") or "")
        pause = f"{told['pause_s']['p50']:.2f} s ({told['pause_s']['max']:.2f})" if told.get("pause_s") else ""
        rows.append([Cell(_NODE_FAULTS[name]), Cell(answers), Cell(resumed), Cell(pause), Cell(took)])
    titles = ("lost or changed", "answers as undisturbed", "went on elsewhere", "longest pause of a stream: p50 (max)", "")
    return table_of("", titles, rows)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f} s"


def shared_trie(results: Results) -> Table:
    """``experiments.bench.memory.sharing``: tokens per step of replicas that share, by workload."""
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
    """``bench/memory/figures.py``: how long a token takes from one replica to another, and what it takes of the stream."""
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


def rank_faults(results: Results) -> Table:
    """``experiments.faults.ranks``: what clients see of a lost rank, medians and the longest."""
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
    "plain Q4_1": "Outrider, plain, Q4_1",
    "auto Q4_1": "Outrider, `auto`, Q4_1",
    "plain int8": "Outrider, plain, int8",
    "vLLM": "vLLM",
    "vLLM ngram": "vLLM, n-gram drafts",
    "vLLM suffix": "vLLM, suffix decoding",
    "llama.cpp": "llama.cpp",
    "llama.cpp lookup": "llama.cpp, prompt lookup",
    "llama.cpp Q4_1": "llama.cpp, Q4_1",
}
_PEERS_STOCK = {"1": "transformers", "8": "transformers batching", "32": "transformers batching"}


def peers(results: Results) -> Table:
    """``experiments.peers``: tokens per second of the first model; n/a where a contestant could not run."""
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


def _longest(summary: Mapping[str, float], before: str = "") -> Cell:
    """A median in seconds and the longest."""
    middle, most = summary["median"], summary["max"]
    return Cell(f"{_short(middle)} s ({before}{_short(most)})", middle)


def _short(value: float) -> str:
    return rounded(value, 1 if value >= 1 else 2)


def _between(values: Sequence[float], digits: int) -> str:
    low, high = rounded(min(values), digits), rounded(max(values), digits)
    return low if low == high else f"{low}-{high}"


def goals(results: Results) -> Table:
    """``experiments.peers``: what was to be reached, and what was."""
    rows = []
    for model, found in results["models"].items():
        for goal in found["goals"]:
            known = goal["figure"] is not None
            reached = Cell(f"{goal['figure']:.3g} ({goal['lowest']:.3g}-{goal['highest']:.3g})" if known else goal["why"])
            rows.append([Cell(model), Cell(goal["goal"]), reached, Cell(("yes" if goal["met"] else "no") if known else "n/a")])
    return table_of("", ("model", "goal", "here", "reached"), rows, keys=2)


def step_profile(results: Results) -> Table:
    """``experiments.step_profile``: milliseconds of the phases of a step, and what is not the forward."""
    phases = list(results["cases"][0]["ms"])
    rows = [
        [
            Cell(case["strategy"]), Cell(str(case["batch"])), Cell("sampled" if case["sampled"] else "greedy"),
            *(figure(case["ms"][phase], 3) for phase in phases), figure(case["step_ms"], 3), Cell(f"{case['around']:.1%}"),
            figure(case["tokens_per_step"]),
        ]
        for case in results["cases"]
    ]  # fmt: skip
    return table_of("ms", ("strategy", "batch", "", *phases, "step", "around", "tokens per step"), rows, keys=3)


def attacks(results: Results) -> Table | None:
    """``outrider bench service attacks``: a calm client's inter-token times beside each form of attack, those that fail first."""
    sides = ("alone", "polite", "attack")
    rows = []
    for each in results.get("attacks", ()):
        times = [cell_of(each[name]) or Cell("") for name in (*(f"{side}_p95_ms" for side in sides), "attack_max_ms")]
        ratios = [_ratio(each[f"to_{side}"]) for side in ("polite", "alone")]
        rows.append([Cell(each["form"]), Cell("; ".join(each["fails"]) or "-"), *times, *ratios])
    titles = ("attack", "fails", *(f"p95 {side}, ms" for side in sides), "longest, ms", "to polite", "to alone")
    return table_of("inter-token times of a calm client", titles, rows)


def attacks_around(results: Results) -> Table | None:
    """``outrider bench service attacks``: rows of the calm request, memory, and statuses where each shot was fired once."""
    rows = [[Cell(row["form"]), Cell(f"a calm row in {row['attack']} steps, {row['polite']} beside polite requests")]
            for row in results.get("rows", ())]  # fmt: skip
    rows += [[Cell(kind), Cell(f"{of['before_mib']:.0f} MiB before, {of['after_mib']:.0f} after")]
             for kind, of in results.get("memory", {}).items()]  # fmt: skip
    for title, statuses in results.get("once", {}).items():
        rows.append([Cell(title), Cell(", ".join(f"{count} x {label}" for label, count in sorted(statuses.items())))])
    return table_of("", ("of the attacks", ""), rows)


def _ratio(told: Mapping[str, Any]) -> Cell:
    low, high = told["interval"]
    return Cell(f"{told['median']:.2f} ({low:.2f}-{high:.2f})", told["median"], low, high)


def answer(results: Results) -> Table | None:
    """``outrider simulate --find``: what it found; None where nothing was looked for."""
    lines = results.get("answer")
    return table_of("", ("what was found",), [[Cell(line)] for line in lines]) if lines else None


def exactness(results: Results) -> Table:
    """``experiments.exact_outputs``: answers as plain decoding's, or speeds beside another revision's."""
    return exact_cost(results) if "against" in results else exact_outputs(results)


_KNOWN: dict[str, tuple[Callable[[Results], Table | None], ...]] = {
    "bench-strategies": (strategies,),
    "bench-load": (load,),
    "bench-draft-models": (draft_models,),
    "bench-scaling": (forms, scaling, winners),
    "bench-rag": (rag, rag_pairs),
    "shared-trie": (shared_trie,),
    "cache-figures": (cache_figures,),
    "exact-outputs": (exactness,),
    "node-faults": (node_faults,),
    "peers": (peers, goals),
    "rank-faults": (rank_faults,),
    "service-attacks": (attacks, attacks_around),
    "simulate": (deployments, answer),
    "simulate-forms": (form_map, answer),
    "simulate-papers": (published,),
    "simulate-validation": (validation,),
    "step-profile": (step_profile,),
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
        if table is not None and table.rows:
            found.append(table)
    return found
