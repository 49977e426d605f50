"""Generated tables of README.md, docs/ and experiments/results/, from records or from the code.

python -m experiments.report.readme_tables            rewrites each table between its markers
python -m experiments.report.readme_tables --check    shows differences, with exit code 1 if there are any

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; ``DOCUMENTS`` has its function and its records.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import yaml

from outrider.configs.schema import Config
from outrider.decoding.drafters.options import OPTIONS
from outrider.decoding.drafters.registry import STRATEGIES, WITH_DRAFT_MODEL
from outrider.engine.emulation.hardware import FIGURES
from outrider.engine.loading.hybrids import SERVED
from outrider.experiments.bench.record import RESULTS, ROOT
from outrider.experiments.papers.screen import screen
from outrider.experiments.report.speeds import (
    by_workload,
    decoding,
    dilation,
    draft_models,
    emulated_validation,
    forms,
    gains,
    peers,
    published_sizes,
    rag,
    rag_pairs,
    scaling,
    strong_scaling,
)
from outrider.experiments.report.tables import (
    deployments,
    exact_cost,
    exact_outputs,
    form_map,
    node_faults,
    published,
    rank_faults,
    shared_trie,
    statements,
    validation,
)
from outrider.experiments.report.values import Table, markdown, table_of

_BEGIN = re.compile(r"^<!-- table: (\S+) -->$", re.MULTILINE)
_MARKED = re.compile(r"^<!-- table: (\S+) -->\n(?:(?!<!-- table: ).*\n)*?<!-- end -->$", re.MULTILINE)


def request_bounds() -> Table:
    """List the bounds of the API's request types, from the types."""
    from outrider.cluster.http.types.bounds import bounds

    return table_of("", ("bound", "fields"), [(bound, _codes(fields)) for bound, fields in bounds().items()])


def configuration() -> Table:
    """List every key of the configuration with its default and its comment, from the classes."""
    rows = []
    for section, info in Config.model_fields.items():
        kind = info.annotation
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            rows.append((f"`{section}`", f"`{info.default}`", _comment(Config, section)))
            continue
        for field in dataclasses.fields(kind):
            maker = field.default_factory
            default = field.default if maker is dataclasses.MISSING else maker()
            shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0] if default != () else "[]"
            rows.append((f"`{section}.{field.name}`", f"`{shown}`", _comment(kind, field.name)))
    return table_of("", ("key", "default", "what it is"), rows)


def _comment(kind: type, name: str) -> str:
    """Return the comment of a field in the source of a class: behind it, or in the lines above it."""
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = line.strip().partition("  # ")
        if code.startswith("# "):
            above.append(code.removeprefix("# "))
        elif code.startswith(f"{name}: "):
            return " ".join([*above, comment]).strip()
        else:
            above = []
    raise ValueError(f"{kind.__name__} has no field {name}")


def families(served: bool) -> Table:
    """List the model families of ``families.json``, which tests try: those served, or the refused ones."""
    found = json.loads((ROOT / "tests" / "lossless" / "models" / "families.json").read_text(encoding="utf-8"))
    if not served:
        refused = [(each["family"], each["models"], each["refused"]) for each in found if "refused" in each]
        return table_of("", ("family", "models", "why it is refused"), refused)
    rows = []
    for each in found:
        if "refused" not in each:
            kind = each["config"].removesuffix("Config").removesuffix("Text")
            call = "yes" if each.get("one_call") else ""
            rows.append((each["family"], f"`{kind}`", each["models"], call, each.get("remark", "")))
    return table_of("", ("family", "class", "models", "one call", "remarks"), rows)


def hybrids() -> Table:
    """List the classes of models whose layers keep states, by the computation of these layers."""
    rules: dict[str, list[str]] = {}
    for name, rule in SERVED.items():
        rules.setdefault(rule, []).append(name.removesuffix("ForCausalLM"))
    return table_of("", ("layers with", "classes"), [(rule, _codes(names)) for rule, names in rules.items()])


def emulated_figures() -> Table:
    """List the figures of emulated GPUs with their sources."""
    rows = [(one.of, f"{one.value:g} {one.unit}", one.source) for one in FIGURES.values()]
    return table_of("", ("figure", "value", "source"), rows)


def rooms() -> Table:
    """List the packages with their docstrings."""
    rows = []
    for room in ("cluster", "actors", "engine", "decoding", "cache_service", "configs", "experiments"):
        for init in sorted((ROOT / room).rglob("__init__.py")):
            text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            text = re.sub(r"\n+", " ", text).replace("``", "`")
            rows.append((f"`{init.parent.relative_to(ROOT).as_posix()}/`", text))
    return table_of("", ("room", "what is in it, what comes in, what goes out"), rows)


def strategy_options(strategy: str) -> Table:
    """List the options of a strategy with the paper's symbols, the defaults of its constructor, and their ranges."""
    maker = {**STRATEGIES, **WITH_DRAFT_MODEL}[strategy]
    known = inspect.signature(pkgutil.resolve_name(maker) if isinstance(maker, str) else maker).parameters
    rows = []
    for name, option in OPTIONS[strategy].items():
        default = known[name].default
        shown = json.dumps(default) if isinstance(default, bool) else f"{default:,}" if isinstance(default, int) else str(default)
        allowed = option.range if option.choices or option.low is None else f"{option.low:,g} to {_end(option.high)}"
        meaning = option.meaning + (" (operator)" if option.costly else "")
        rows.append((f"`{name}`", option.symbol, shown, allowed, meaning))
    return table_of("", ("option", "in the paper", "default", "range", "meaning"), rows)


def _end(high: float | None) -> str:
    """Return the upper end of a range as text."""
    return f"{high:.0e}" if high is not None and high >= 2**31 else f"{high:,g}"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_METHODS = {
    "sampled": 'plain decoding, sampled (the paper\'s "greedy")',
    "greedy": "plain decoding, the likeliest token",
    "speculative coupled": "`speculative`, coupled",
    "speculative greedy": "`speculative`, greedy drafts",
    "speculative rejection": "`speculative`, rejection",
    "spectr": "`spectr`, 4 sequences",
    "bild": "`bild` (fallback 0.9, rollback 2)",
    "mjsd": "`mjsd`",
    "mjsd, greedy": "`mjsd`, the likeliest token",
    "mjgd": "beam search with the demo model itself (`mjgd`)",
    "auto": "`auto`, without a draft model",
    "suffix": "`suffix`",
    "trie": "`trie`",
}
_PEERS = (peers, "2026-11-27-peers.json")
_PAPERS = {name: f"2026-11-29-bench-paper-{name}.json" for name in ("llma", "trie", "ngrammys", "jacobi", "mjsd")}
# document -> name of a table -> the function that builds it of the results of these records
DOCUMENTS: dict[str, dict[str, tuple[Callable[..., Table], *tuple[str, ...]]]] = {
    "README.md": {
        "peers": _PEERS,
        "exact-outputs": (exact_outputs, *(f"2026-11-23-exact-outputs-{run}.json" for run in (2, 5, 6))),
    },
    "docs/papers.md": {"papers": (screen, *_PAPERS.values())},
    "experiments/results/papers.md": {name: (statements, record) for name, record in _PAPERS.items()},
    "docs/rag.md": {"rag-pairs": (rag_pairs, "2026-11-25-bench-rag.json")},
    "docs/lookahead-parallel.md": {
        "ranks": (scaling, "2026-11-25-bench-scaling.json"),
        "at-once": (scaling, "2026-11-25-bench-scaling-2.json"),
        "form-map": (form_map, "2026-11-25-simulate-forms.json"),
    },
    "docs/simulation.md": {
        "validation": (validation, "2026-11-22-simulate-validation.json"),
        "published": (published, "2026-11-22-simulate-papers.json"),
        "deployments": (deployments, "2026-11-22-simulate.json"),
    },
    "docs/runbook.md": {
        "node-faults": (node_faults, "2026-11-25-node-faults.json", "2026-11-26-node-faults.json"),
        "request-bounds": (request_bounds,),
    },
    "docs/exactness.md": {"exact-cost": (exact_cost, "2026-11-23-exact-outputs.json")},
    "docs/benchmarks.md": {
        "peers": _PEERS,
        "workloads": (by_workload, "2026-11-29-replay-strategies.json", _PEERS[1]),
        "shared-trie": (shared_trie, "2026-11-21-shared-trie.json"),
    },
    "experiments/results/README.md": {
        "decoding": (decoding, "2026-11-25-peers-3.json"),
        "gains": (gains, "2026-11-25-bench-strategies.json"),
        "draft-models": (partial(draft_models, rows=_METHODS), "2026-11-22-bench-draft-models.json"),
        "forms": (forms, "2026-11-22-bench-scaling-2.json"),
        "rag": (rag, "2026-11-25-bench-rag.json"),
        "rank-faults": (rank_faults, "2026-11-21-rank-faults.json"),
    },
    "docs/emulation.md": {
        "dilation": (dilation, "2026-11-29-bench-scaling-2.json"),
        "strong-scaling": (strong_scaling, "2026-11-29-bench-scaling.json"),
        "emulated-validation": (emulated_validation, "2026-11-29-bench-scaling.json"),
        "emulated-figures": (emulated_figures,),
    },
    "docs/configuration.md": {"configuration": (configuration,)},
    "docs/architecture.md": {"rooms": (rooms,)},
    "docs/strategies.md": {
        "published-sizes": (published_sizes, "2026-11-28-bench-strategies.json"),
        **{f"options-{name}": (partial(strategy_options, strategy=name),) for name, options in OPTIONS.items() if options},
    },
    "docs/models.md": {
        "families": (partial(families, served=True),),
        "hybrids": (hybrids,),
        "refused": (partial(families, served=False),),
    },
}


def filled(document: str, text: str) -> str:
    """Return the text of a document with every table between markers built anew.

    Raises:
        ValueError: a table of ``DOCUMENTS`` has no markers or several, or another one has.
        OSError: a record is missing.
    """
    tables = DOCUMENTS[document]
    found, closed = _BEGIN.findall(text), _MARKED.findall(text)
    wrong = [name for name in {*found, *tables} if not found.count(name) == closed.count(name) == (name in tables)]
    if wrong:
        names = ", ".join(sorted(wrong))
        raise ValueError(f"{names}: expected the markers `<!-- table: NAME -->` and `<!-- end -->` once, for {', '.join(tables)}")

    def built(marked: re.Match[str]) -> str:
        build, *records = tables[marked[1]]
        results = [json.loads((RESULTS / record).read_text(encoding="utf-8"))["results"] for record in records]
        return f"<!-- table: {marked[1]} -->\n{markdown(build(*results))}\n<!-- end -->"

    return _MARKED.sub(built, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check all documents; return the exit code, 2 for wrong markers or missing records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, show differences")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the documents")
    args = parser.parse_args(argv)
    differ = False
    for name in DOCUMENTS:
        path: Path = args.root / name
        try:
            text = path.read_text(encoding="utf-8")
            made = filled(name, text)
        except (OSError, ValueError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 2
        if not args.check:
            path.write_text(made, encoding="utf-8")
            continue
        differ |= made != text
        for line in difflib.unified_diff(text.splitlines(), made.splitlines(), name, "from the records", lineterm=""):
            print(line)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
