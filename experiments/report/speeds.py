"""What matters of the records of speed, as tables: strategies, load, draft models, ranks, requests about documents.

A report shows all rows; the README chooses rows and columns. A field of several repeats is their median, with the lowest and the
highest behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from decoding.request import PLAIN
from experiments.report.cells import Cell, figure, median, repeats
from experiments.report.values import Table, table_of

Results = Mapping[str, Any]
_EARLY_EXIT = "generate + early exit "


def contestant(name: str) -> str:
    """A contestant of ``bench strategies`` in words."""
    if name.startswith(_EARLY_EXIT):
        return f"`generate`, assisted by its own first {name.removeprefix(_EARLY_EXIT)} layers"
    return "`generate` with its prompt lookup" if name == "generate + lookup" else f"`{name}`"


def strategies(results: Results) -> Table:
    """``bench strategies``: a row a contestant; speeds are ratios to greedy ``generate``. See ``gains`` for random models."""
    if "gains" in results:
        return gains(results)
    rows = [
        [
            Cell(contestant(name)), repeats(row["ratio"]), median(row["decode_ratio"]), figure(row["tokens_per_step"]),
            figure(row["tokens_per_s"], 1), figure(row["ms"]["forward"], 1), Cell(f"{row['identical']} of {row['records']}"),
        ]
        for name, row in results["overall"].items()
    ]  # fmt: skip
    return table_of("", ("", "speed", "decode", "tokens per step", "tokens/s", "ms a forward", "identical"), rows)


def gains(results: Results) -> Table:
    """``bench strategies --random-model``: a row a model; a strategy's speed is over plain decoding with the same model."""
    models, by_model = results["models"], results["gains"]
    first = next(iter(by_model))
    names, sizes = list(by_model[first]), list(models[first]["step_ms"])
    rows = []
    for model, own in by_model.items():
        row = [Cell(model), figure(models[model]["parameters"] / 1e6, 0)]
        row += [figure(models[model]["step_ms"].get(size), 1) for size in sizes]
        for name in names:
            row += [repeats(own[name]["speedup"]), median(own[name]["of_first"])]
        rows.append(row)
    steps = (f"ms of {size} row{'s' * (size != '1')}" for size in sizes)
    speeds = (title for name in names for title in (f"`{name}`", f"of {first}'s"))
    return table_of("", ("", "million parameters", *steps, *speeds), rows)


def replayed(results: Results) -> Table:
    """``bench.memory replay``: tokens per step, a row a workload; beside them ``auto`` over the best of the others."""
    names = list(results)
    others = [name for name in names if name != "auto"]
    workloads = {name: own["workloads"] for name, own in results.items()}
    rows = []
    for workload in workloads[names[0]]:
        reached = {name: workloads[name][workload]["tokens_per_step"] for name in names}
        best = max(reached[name] for name in others)
        rows.append([Cell(workload), *(figure(reached[name]) for name in names), figure(reached["auto"] / best)])
    means = [figure(results[name]["mean_tokens_per_step"]) for name in names]
    rows.append([Cell("mean"), *means, figure(statistics.fmean(row[-1].value or 0.0 for row in rows))])
    return table_of("", ("tokens per step", *(f"`{name}`" for name in names), "`auto` over the best other"), rows)


def decoding(results: Results) -> Table:
    """``experiments.peers``, one request at a time: tokens a second after the first, a row a prompt, named by its workload."""
    turns = [turn for turn in results["turns"] if turn["level"] == 1 and turn["contestant"] in ("plain", "auto")]
    rates: dict[str, dict[str, list[float]]] = {}
    tokens: dict[str, int] = {}
    for turn in turns:
        for key, count, first, last in zip(turn["asks"], turn["tokens"], turn["first_s"], turn["last_s"], strict=True):
            rates.setdefault(key, {}).setdefault(turn["contestant"], []).append((count - 1) / (last - first))
            tokens[key] = count
    rows = []
    for key, found in rates.items():
        ratios = [auto / plain for auto, plain in zip(found["auto"], found["plain"], strict=True)]
        row = [Cell(key.partition("/")[0]), figure(tokens[key], 0), repeats(found["plain"], 0), repeats(found["auto"], 0)]
        rows.append([*row, repeats(ratios)])
    return table_of("", ("", "tokens", "plain, tokens/s", "`auto`, tokens/s", "times"), rows)


def by_workload(known: Results, served: Results) -> Table:
    """Return the table of ``replayed`` with the speeds of ``decoding`` beside it: a row a workload, none for the mean."""
    steps, speeds = replayed(known), {row[0].text: row[2:] for row in decoding(served).rows}
    titles = ("SmolLM2: plain, tokens/s", "SmolLM2: `auto`, tokens/s", "SmolLM2: times")
    rows = [[*row, *speeds.get(row[0].text, [Cell("")] * len(titles))] for row in steps.rows]
    return table_of("", (*(title for _, title in steps.header), *titles), rows)


def load(results: Results) -> Table:
    """``bench load``, closed loop: tokens a second over the baseline's by the number of clients."""
    closed, baseline = results["closed"], results["baseline"]
    servers = list(dict.fromkeys(name for cell in closed.values() for name in cell["servers"]))
    rows = []
    for name in servers:
        if name != baseline:
            cells = [cell["servers"].get(name) for cell in closed.values()]
            rows.append([Cell(f"`{name}` over `{baseline}`"), *(repeats(cell["ratio"]) if cell else Cell("") for cell in cells)])
    if "auto" in servers:
        drafted = [cell["servers"]["auto"]["drafted_per_step"] for cell in closed.values()]
        rows.append([Cell("rows drafted in a step"), *(figure(value, 1) for value in drafted)])
    plain = [cell["servers"][baseline]["tokens_per_s"] for cell in closed.values()]
    rows.append([Cell(f"`{baseline}`, tokens/s"), *(figure(value, 0) for value in plain)])
    return table_of("", ("clients", *closed), rows)


def draft_models(results: Results, rows: Mapping[str, str] | None = None) -> Table:
    """``bench draft-models``: a row a method, beside plain decoding.

    Args:
        results: of the record.
        rows: methods and what they are called; all but those of ablations when absent.
    """
    methods = results["methods"]
    plain = {results["baseline"], "greedy"}
    variants = {label for part in results.get("ablations", {}).values() for label in part.values() if ":" in label}
    shown = rows or {name: f"`{name}`" for name in methods if name not in variants}
    cells = []
    for name, label in shown.items():
        row = methods[name]
        same = row["identical"]
        text = f"the seed's, {same['same']} of {same['of']}" if same else "same law" if row["lossless"] else "lossy"
        values = [value for value in row["perplexity"] if value is not None]
        spread = statistics.stdev(values) if len(set(values)) > 1 else 0.0
        mean = statistics.fmean(values)
        perplexity = Cell(f"{mean:.2f}" + (f" ± {spread:.2f}" if spread else ""), mean)
        cells.append(
            [
                Cell(label),
                repeats(row["speedup"]),
                figure(row["tokens_per_step"]) if row["tokens_per_step"] else Cell(""),
                perplexity,
                Cell("" if name in plain else text),
            ]
        )
    return table_of("", ("", "speed", "tokens per step", "perplexity", "the text"), cells)


def forms(results: Results) -> Table:
    """``bench scaling``: every form with every strategy, times plain decoding on one worker, after the first token."""
    overall = [row for row in results["overall"].values() if row.get("clients", 1) == 1]
    columns = list(dict.fromkeys(row["form"] for row in overall))
    cells: dict[str, dict[str, Cell]] = {}
    for row in overall:
        name = "plain" if row["strategy"] == PLAIN else row["strategy"]
        cells.setdefault(name, {})[row["form"]] = repeats(row["decode_ratio"]["plain"])
    rows = [[Cell(name), *(of.get(form, Cell("")) for form in columns)] for name, of in cells.items()]
    return table_of("times plain decoding on one worker, after the first token", ("", *columns), rows)


def scaling(results: Results) -> Table:
    """``bench scaling``: all requests together, what a step brings and exchanges, memory, and the prediction; empty of an
    earlier record."""
    told, cells = results.get("prediction", {}), []
    for label, row in results["overall"].items() if told else ():
        moved, guess = row["communication"], told["rows"].get(label)
        seconds = f", {1e3 * moved['seconds']:.2f} ms" if moved["seconds"] else ""
        sent = f"{moved['bytes'] / 1024:.1f} KiB{seconds}" if moved["bytes"] else ""
        predicted = Cell("") if guess is None else Cell(f"{guess['predicted']:.2f}", guess["predicted"])
        memory = sum(row["memory_mib"].values())
        efficiency = Cell(f"{row['efficiency']:.0%}", row["efficiency"])
        steps = (figure(row["tokens_per_step"]), figure(row["drafted_per_step"]))
        cells.append(
            [Cell(label), repeats(row["speed_up"]), predicted, efficiency, *steps, Cell(sent), Cell(f"{memory:.0f}", memory)]
        )
    titles = (
        "all requests together",
        "speed-up",
        "predicted",
        "efficiency",
        "tokens per step",
        "drafted",
        "exchanged a step",
        "MiB",
    )
    return table_of("", titles, cells)


def winners(results: Results) -> Table:
    """``bench scaling``: which form has most tokens a second, by workers and requests at once; empty of an earlier record."""
    sentences = results.get("crossover", {}).get("sentences", ())
    return table_of("", ("which form wins",), [[Cell(sentence)] for sentence in sentences])


def rag(results: Results) -> Table:
    """``bench rag``: a row a setting; tokens per second of all requests together, and of a request by kind."""
    kinds = {kind: kind.replace("_", " ") for row in results["settings"].values() for kind in row["kinds"]}
    rows = []
    for name, row in results["settings"].items():
        every, first = row["all"], row["all"]["ttft_ms"]
        requests = every["requests"]
        speeds = (repeats(row["kinds"][kind]["tokens_per_s"], 0) for kind in kinds)
        waited = Cell(f"{first['p50']:.0f} ({first['p95']:.0f})", first["p50"])
        cached = Cell(f"{every['cached_tokens'] / every['prompt_tokens']:.0%}")
        equal = f"{requests - row['differing']} of {requests}" if "differing" in row else ""
        rows.append([Cell(name), repeats(row["throughput"], 0), *speeds, waited, cached, Cell(equal)])
    last = ("first token, ms: p50 (p95)", "of prompts cached", "as plain decoding")
    return table_of("", ("tokens per second", "all at once", *kinds.values(), *last), rows)


def rag_pairs(results: Results) -> Table:
    """``bench rag``: a request after one that is akin to it, beside the same request of a tenant that has asked nothing."""
    rows = []
    for kind, row in results["pairs"].items():
        first = ", ".join(f"{row[way]['ttft_ms']['p50']:.0f}" for way in ("cold", "warm"))
        speeds = (repeats(row[way]["tokens_per_s"], 0) for way in ("cold", "warm"))
        rows.append([Cell(kind.replace("_", " ")), *speeds, repeats(row["ratio"]), Cell(first)])
    titles = ("tokens per second of a request", "cold", "warm", "warm over cold", "first token, p50, ms: cold, warm")
    return table_of("", titles, rows)
