"""Tables of the records of speed: strategies, load, draft models, ranks, requests about documents, other servers.

Cells of several repeats hold the median with the lowest and the highest in brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from outrider.decoding.request import PLAIN
from outrider.experiments.report.values import Table, figure, median, repeats, table_of

Results = Mapping[str, Any]


def strategies(results: Results) -> Table:
    """``bench strategies``: a row per contestant, with speeds over greedy ``generate``; see ``gains`` for random models."""
    if "gains" in results:
        return gains(results)
    titles = ("", "speed", "decode", "tokens per step", "tokens/s", "ms a forward", "identical")
    rows = [
        [
            f"`{name}`", repeats(row["ratio"]), median(row["decode_ratio"]), figure(row["tokens_per_step"]),
            figure(row["tokens_per_s"], 1), figure(row["ms"]["forward"], 1), f"{row['identical']} of {row['records']}",
        ]
        for name, row in results["overall"].items()
    ]  # fmt: skip
    return table_of("", titles, rows)


def published_sizes(results: Results) -> Table:
    """``bench strategies --paying``: rows and tokens of a step with the rows that pay, beside all rows of the options."""
    overall, rows = results["overall"], []
    for name in overall:
        paying = overall.get(f"{name} (rows that pay)")
        if paying is not None:
            pair = (paying, overall[name])
            cells = [text for row in pair for text in (figure(row["drafted_per_step"], 1), figure(row["tokens_per_step"]))]
            rows.append([f"`{name}`", *cells])
    return table_of("", ("", "by default: drafted", "tokens", "as published: drafted", "tokens"), rows)


def gains(results: Results) -> Table:
    """``bench strategies --random-model``: a row per model; a strategy's speed is over plain decoding with the same model."""
    models, by_model = results["models"], results["gains"]
    first = next(iter(by_model))
    names, sizes = list(by_model[first]), list(models[first]["step_ms"])
    rows = []
    for model, own in by_model.items():
        row = [model, figure(models[model]["parameters"] / 1e6, 0)]
        row += [figure(models[model]["step_ms"].get(size), 1) for size in sizes]
        for name in names:
            row += [repeats(own[name]["speedup"]), median(own[name]["of_first"])]
        rows.append(row)
    steps = (f"ms of {size} row{'s' * (size != '1')}" for size in sizes)
    speeds = (title for name in names for title in (f"`{name}`", f"of {first}'s"))
    return table_of("", ("", "million parameters", *steps, *speeds), rows)


def decoding(results: Results) -> Table:
    """``bench peers``, one request at a time: tokens per second after the first, a row per prompt, named by its workload."""
    rates: dict[str, dict[str, list[float]]] = {}
    tokens: dict[str, int] = {}
    for turn in results["turns"]:
        if turn["level"] != 1 or turn["contestant"] not in ("plain", "auto"):
            continue
        for key, count, first, last in zip(turn["asks"], turn["tokens"], turn["first_s"], turn["last_s"], strict=True):
            rates.setdefault(key, {}).setdefault(turn["contestant"], []).append((count - 1) / (last - first))
            tokens[key] = count
    rows = []
    for key, found in rates.items():
        ratios = [auto / plain for auto, plain in zip(found["auto"], found["plain"], strict=True)]
        speeds = (repeats(found["plain"], 0), repeats(found["auto"], 0), repeats(ratios))
        rows.append((key.partition("/")[0], str(tokens[key]), *speeds))
    return table_of("", ("", "tokens", "plain, tokens/s", "`auto`, tokens/s", "times"), rows)


def by_workload(known: Results, served: Results) -> Table:
    """``bench replay strategies``: tokens per step by workload, with the speeds of ``decoding`` in the last columns."""
    speeds = {row[0]: row[2:] for row in decoding(served).rows}
    workloads = {name: own["workloads"] for name, own in known.items()}
    rows, leads = [], []
    for workload in next(iter(workloads.values())):
        steps = {name: own[workload]["tokens_per_step"] for name, own in workloads.items()}
        leads.append(steps["auto"] / max(value for name, value in steps.items() if name != "auto"))
        rows.append([workload, *map(figure, steps.values()), figure(leads[-1]), *speeds.get(workload, [""] * 3)])
    means = (figure(own["mean_tokens_per_step"]) for own in known.values())
    rows.append(["mean", *means, figure(statistics.fmean(leads)), "", "", ""])
    served_titles = ("SmolLM2: plain, tokens/s", "SmolLM2: `auto`, tokens/s", "SmolLM2: times")
    titles = ("tokens per step", *(f"`{name}`" for name in known), "`auto` over the best other", *served_titles)
    return table_of("", titles, rows)


def load(results: Results) -> Table:
    """``bench load``, closed loop: tokens per second over the baseline's by the number of clients."""
    closed, baseline = results["closed"], results["baseline"]
    cells = [cell["servers"] for cell in closed.values()]
    servers = dict.fromkeys(name for cell in cells for name in cell)
    rows = [
        [f"`{name}` over `{baseline}`", *(repeats(cell[name]["ratio"]) if name in cell else "" for cell in cells)]
        for name in servers
        if name != baseline
    ]
    if "auto" in servers:
        rows.append(["rows drafted in a step", *(figure(cell["auto"]["drafted_per_step"], 1) for cell in cells)])
    rows.append([f"`{baseline}`, tokens/s", *(figure(cell[baseline]["tokens_per_s"], 0) for cell in cells)])
    return table_of("", ("clients", *closed), rows)


def draft_models(results: Results, rows: Mapping[str, str] | None = None) -> Table:
    """``paper mjsd``: a row per method, beside plain decoding; ``rows`` has methods and titles, by default all but ablations."""
    methods = results["methods"]
    variants = {label for part in results.get("ablations", {}).values() for label in part.values() if ":" in label}
    cells = []
    for name, label in (rows or {name: f"`{name}`" for name in methods if name not in variants}).items():
        row, values = methods[name], [value for value in methods[name]["perplexity"] if value is not None]
        same = row["identical"]
        text = f"the seed's, {same['same']} of {same['of']}" if same else "same law" if row["lossless"] else "lossy"
        spread = f" ± {statistics.stdev(values):.2f}" if len(set(values)) > 1 else ""
        steps = figure(row["tokens_per_step"] or None)
        shown = "" if name in (results["baseline"], "greedy") else text
        cells.append((label, repeats(row["speedup"]), steps, f"{statistics.fmean(values):.2f}{spread}", shown))
    return table_of("", ("", "speed", "tokens per step", "perplexity", "the text"), cells)


def forms(results: Results) -> Table:
    """``bench scaling``: every form with every strategy, times plain decoding on one worker, after the first token."""
    overall = [row for row in results["overall"].values() if row.get("clients", 1) == 1]
    columns = list(dict.fromkeys(row["form"] for row in overall))
    cells: dict[str, dict[str, str]] = {}
    for row in overall:
        name = "plain" if row["strategy"] == PLAIN else row["strategy"]
        cells.setdefault(name, {})[row["form"]] = repeats(row["decode_ratio"]["plain"])
    rows = [[name, *(of.get(form, "") for form in columns)] for name, of in cells.items()]
    return table_of("times plain decoding on one worker, after the first token", ("", *columns), rows)


def scaling(results: Results) -> Table:
    """``bench scaling``: speed-up, steps, exchanged bytes, memory and the prediction; empty for records without predictions."""
    rows = []
    for label, row in results["overall"].items() if "prediction" in results else ():
        moved, guess = row["communication"], results["prediction"]["rows"].get(label)
        seconds = f", {1e3 * moved['seconds']:.2f} ms" if moved["seconds"] else ""
        sent = f"{moved['bytes'] / 1024:.1f} KiB{seconds}" if moved["bytes"] else ""
        speeds = (repeats(row["speed_up"]), "" if guess is None else f"{guess['predicted']:.2f}", f"{row['efficiency']:.0%}")
        steps = (figure(row["tokens_per_step"]), figure(row["drafted_per_step"]))
        rows.append((label, *speeds, *steps, sent, f"{sum(row['memory_mib'].values()):.0f}"))
    titles = ("speed-up", "predicted", "efficiency", "tokens per step", "drafted", "exchanged a step", "MiB")
    return table_of("", ("all requests together", *titles), rows)


def strong_scaling(results: Results) -> Table:
    """``bench scaling --emulate``: a row for each form, plain and with drafts; medians of the repeats.

    Time to first token is that of one request at a time: of several, the check of the dilation does not confirm it.
    """
    cells = list(results["overall"].values())
    counts, rows = sorted({row["clients"] for row in cells}), []
    for form in dict.fromkeys(row["form"] for row in cells):
        own = [row for row in cells if row["form"] == form]

        def both(name: str, count: int, digits: int, own: list[Any] = own) -> str:
            return " / ".join(median(row[name], digits) for row in own if row["clients"] == count)

        speeds = (both("tokens_per_s", count, 0) for count in counts)
        moved = " / ".join(f"{row['bytes'] / 1024:,.1f}" for row in own if row["clients"] == 1)
        used = f"{max(row['processor'] for row in own):.0%}"
        rows.append((form, *speeds, both("ttft_ms", 1, 0), both("tpot_ms", 1, 1), both("speed_up", 1, 2), moved, used))
    alone = ("TTFT, ms, 1", "TPOT, ms, 1", "speed-up, 1", "KiB a step, 1")
    titles = (*(f"tokens/s, {count} at once" for count in counts), *alone, "processor")
    return table_of("", ("plain / `auto`", *titles), rows)


def emulated_validation(results: Results) -> Table:
    """``bench scaling --emulate``: the simulation's errors by kind of form."""
    kinds: dict[str, list[float]] = {}
    for label, row in results["prediction"]["rows"].items():
        kinds.setdefault(results["overall"][label]["kind"], []).append(row["error"])
    rows = [
        (
            _KINDS[kind],
            f"{sum(abs(each) <= 0.15 for each in errors)} of {len(errors)}",
            f"{min(errors):+.0%} to {max(errors):+.0%}",
        )
        for kind, errors in {**kinds, "all": [each for errors in kinds.values() for each in errors]}.items()
    ]
    return table_of("", ("form", "within 15 %", "errors"), rows)


_KINDS = {
    "one": "one GPU", "replicas": "replicas", "lookahead": "LP", "elastic": "elastic LP", "tensor": "TP", "pipeline": "PP",
    "all": "all",
}  # fmt: skip


def emulated(results: Results) -> Table:
    """``bench scaling --emulate``: speeds in emulated seconds, the prediction, bytes, and the share of the processor."""
    rows = []
    for label, row in results.get("overall", {}).items():
        guess = results["prediction"]["rows"].get(label)
        speeds = [repeats(row[name]) for name in ("tokens_per_s", "ttft_ms", "tpot_ms")]
        told = "" if guess is None else f"{guess['predicted']:.0f}: {guess['error']:+.0%}"
        steps = (f"{row['efficiency']:.0%}", figure(row["tokens_per_step"]), f"{row['bytes']:.0f}", f"{row['processor']:.0%}")
        rows.append((label, *speeds, told, *steps))
    titles = ("tokens/s", "TTFT (ms)", "TPOT (ms)", "simulated", "efficiency", "tokens per step", "bytes a step", "processor")
    return table_of("", ("all requests together", *titles), rows)


def dilation(results: Results) -> Table:
    """``bench scaling --check-dilation``: each figure with both dilations; those that differ too much are bold."""
    rows = []
    for label, row in results.get("dilation", {}).items():
        cells = []
        for told in row.values():
            few, many = (value for name, value in told.items() if name not in ("difference", "agrees"))
            text = f"{figure(few)}, {figure(many)}: {told['difference']:+.1%}"
            cells.append(text if told["agrees"] else f"**{text}**")
        rows.append((label, *cells))
    return table_of("", ("dilation 1, then 4", "tokens/s", "TTFT (ms)", "TPOT (ms)"), rows)


def winners(results: Results) -> Table:
    """``bench scaling``: the form with most tokens per second by workers and requests at once; empty for earlier records."""
    return table_of("", ("which form wins",), [[sentence] for sentence in results.get("crossover", {}).get("sentences", ())])


def rag(results: Results) -> Table:
    """``bench rag``: a row per setting, with tokens per second of all requests together, and of a request by kind."""
    kinds = {kind: kind.replace("_", " ") for row in results["settings"].values() for kind in row["kinds"]}
    rows = []
    for name, row in results["settings"].items():
        every, first = row["all"], row["all"]["ttft_ms"]
        speeds = (repeats(row["kinds"][kind]["tokens_per_s"], 0) for kind in kinds)
        cached = f"{every['cached_tokens'] / every['prompt_tokens']:.0%}"
        equal = f"{every['requests'] - row['differing']} of {every['requests']}" if "differing" in row else ""
        rows.append((name, repeats(row["throughput"], 0), *speeds, f"{first['p50']:.0f} ({first['p95']:.0f})", cached, equal))
    last = ("first token, ms: p50 (p95)", "of prompts cached", "as plain decoding")
    return table_of("", ("tokens per second", "all at once", *kinds.values(), *last), rows)


def rag_pairs(results: Results) -> Table:
    """``bench rag``: a request after a related one, beside the same request of a tenant without history."""
    rows = []
    for kind, row in results["pairs"].items():
        first = ", ".join(f"{row[way]['ttft_ms']['p50']:.0f}" for way in ("cold", "warm"))
        speeds = (repeats(row[way]["tokens_per_s"], 0) for way in ("cold", "warm"))
        rows.append((kind.replace("_", " "), *speeds, repeats(row["ratio"]), first))
    titles = ("tokens per second of a request", "cold", "warm", "warm over cold", "first token, p50, ms: cold, warm")
    return table_of("", titles, rows)


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
    "transformers": "transformers; at 8 and 32 its continuous batching",
}


def peers(results: Results) -> Table:
    """``bench peers``: tokens per second with the first model; n/a if a contestant could not run."""
    speeds = next(iter(results["models"].values()))["speeds"]
    rows = []
    for name, title in _PEERS.items():
        several = speeds.get("transformers batching" if name == "transformers" else name, {})
        by_level = {"1": speeds.get(name, {}).get("1", {}), "8": several.get("8", {}), "32": several.get("32", {})}
        kinds = (("1", "decode"), ("8", "all"), ("32", "all"), ("1", "prefill"))
        values = [by_level[level].get(f"{kind}_tokens_per_s") for level, kind in kinds]
        if any(values):
            rows.append([title, *(repeats(value, 0) if value else "n/a" for value in values)])
    return table_of("", ("tokens per second", "1 at once, after the first", "8 at once", "32 at once", "prompts"), rows)
