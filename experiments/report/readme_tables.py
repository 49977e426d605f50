"""The tables in the README, in docs/ and in experiments/results/, made from the records, or the code, that they are of.

python -m experiments.report.readme_tables            writes them anew, each between its markers
python -m experiments.report.readme_tables --check    exit code 1 where one is not what its record says

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; ``DOCUMENTS`` says which record it is made from, and how.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from configs.schema import Config
from engine.loading.hybrids import SERVED
from experiments.report.cells import Cell
from experiments.report.paper import directions, statements
from experiments.report.simulation import deployments, form_map, published, validation
from experiments.report.speeds import by_workload, decoding, draft_models, forms, gains, rag, rag_pairs, scaling
from experiments.report.tables import cache_figures, exact_cost, exact_outputs, node_faults, peers, rank_faults, shared_trie
from experiments.report.values import Table, table_of

_ROOT = Path(__file__).resolve().parents[2]
_BEGIN = re.compile(r"<!-- table: (\S+) -->")
_END = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Source:
    """Records of a table and the function that builds it."""

    records: tuple[str, ...]  # names of the files
    build: Callable[..., Table]  # of the results of each


def request_bounds() -> Table:
    """The bounds of the API's request types, which no record tells of but the types themselves."""
    from cluster.http.types.bounds import bounds

    rows = [[Cell(bound), Cell(", ".join(f"`{field}`" for field in fields))] for bound, fields in bounds().items()]
    return table_of("", ("bound", "fields"), rows)


def configuration() -> Table:
    """Every key of the configuration, with its default and the comment behind or above it."""
    rows = []
    for section, info in Config.model_fields.items():
        kind = info.annotation
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            rows.append([Cell(f"`{section}`"), Cell(f"`{info.default}`"), Cell(_comment(Config, section))])
            continue
        for field in dataclasses.fields(kind):
            maker = field.default_factory
            default = field.default if maker is dataclasses.MISSING else maker()
            shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0] if default != () else "[]"
            rows.append([Cell(f"`{section}.{field.name}`"), Cell(f"`{shown}`"), Cell(_comment(kind, field.name))])
    return table_of("", ("key", "default", "what it is"), rows)


def families(served: bool) -> Table:
    """The model families of ``tests/lossless/models/families.json``, all of which a test tries: those served, or the others."""
    found = json.loads((_ROOT / "tests" / "lossless" / "models" / "families.json").read_text(encoding="utf-8"))
    rows = []
    for each in found:
        if served and "refused" not in each:
            kind = each["config"].removesuffix("Config").removesuffix("Text")
            call = "yes" if each.get("one_call") else ""
            rows.append([Cell(text) for text in (each["family"], f"`{kind}`", each["models"], call, each.get("remark", ""))])
        elif not served and "refused" in each:
            rows.append([Cell(text) for text in (each["family"], each["models"], each["refused"])])
    header = ("family", "class", "models", "one call", "remarks") if served else ("family", "models", "why it is refused")
    return table_of("", header, rows)


def hybrids() -> Table:
    """The classes of models whose layers keep states, by what these layers compute."""
    rules: dict[str, list[str]] = {}
    for name, rule in SERVED.items():
        rules.setdefault(rule, []).append(f"`{name.removesuffix('ForCausalLM')}`")
    return table_of("", ("layers with", "classes"), [[Cell(rule), Cell(", ".join(names))] for rule, names in rules.items()])


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


def rooms() -> Table:
    """The packages and what their docstrings say."""
    rows = []
    for room in ("cluster", "actors", "engine", "decoding", "cache_service", "configs", "experiments"):
        for init in sorted((_ROOT / room).rglob("__init__.py")):
            what = (
                (ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "")
                .replace("\n\n", " ")
                .replace("\n", " ")
                .replace("``", "`")
            )
            rows.append([Cell(f"`{init.parent.relative_to(_ROOT).as_posix()}/`"), Cell(what)])
    return table_of("", ("room", "what is in it, what comes in, what goes out"), rows)


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
_PEERS = Source(("2026-11-27-peers.json",), peers)
BENCHMARKS: dict[str, Source] = {
    "peers": _PEERS,
    "workloads": Source(("2026-11-26-replay-strategies.json", *_PEERS.records), by_workload),
    "shared-trie": Source(("2026-11-21-shared-trie.json",), shared_trie),
}
RESULTS: dict[str, Source] = {
    "decoding": Source(("2026-11-25-peers-3.json",), decoding),
    "gains": Source(("2026-11-25-bench-strategies.json",), gains),
    "draft-models": Source(("2026-11-22-bench-draft-models.json",), partial(draft_models, rows=_METHODS)),
    "forms": Source(("2026-11-22-bench-scaling-2.json",), forms),
    "cache-figures": Source(("2026-11-21-cache-figures.json",), cache_figures),
    "rag": Source(("2026-11-25-bench-rag.json",), rag),
    "rank-faults": Source(("2026-11-21-rank-faults.json",), rank_faults),
}
_PAPERS = {
    "llma": "2026-11-26-bench-paper-llma.json",
    "trie": "2026-11-26-bench-paper-trie.json",
    "ngrammys": "2026-11-26-bench-paper-ngrammys.json",
    "jacobi": "2026-11-26-bench-paper-jacobi.json",
    "mjsd": "2026-11-26-bench-paper-mjsd.json",
}
PAPERS: dict[str, Source] = {
    "papers": Source(tuple(_PAPERS.values()), directions),
    **{name: Source((record,), statements) for name, record in _PAPERS.items()},
}
SIMULATION: dict[str, Source] = {
    "validation": Source(("2026-11-22-simulate-validation.json",), validation),
    "published": Source(("2026-11-22-simulate-papers.json",), published),
    "deployments": Source(("2026-11-22-simulate.json",), deployments),
}
README = {
    "peers": _PEERS,
    "exact-outputs": Source(
        ("2026-11-23-exact-outputs-2.json", "2026-11-23-exact-outputs-5.json", "2026-11-23-exact-outputs-6.json"), exact_outputs
    ),
}
LOOKAHEAD = {
    "ranks": Source(("2026-11-25-bench-scaling.json",), scaling),
    "at-once": Source(("2026-11-25-bench-scaling-2.json",), scaling),
    "form-map": Source(("2026-11-25-simulate-forms.json",), form_map),
}
RAG = {"rag-pairs": Source(("2026-11-25-bench-rag.json",), rag_pairs)}
EXACTNESS = {
    "exact-cost": Source(("2026-11-23-exact-outputs.json",), exact_cost),
}
CONFIGURATION = {"configuration": Source((), configuration)}
MODELS = {
    "families": Source((), partial(families, served=True)), "hybrids": Source((), hybrids),
    "refused": Source((), partial(families, served=False)),
}  # fmt: skip
ARCHITECTURE = {"rooms": Source((), rooms)}
RUNBOOK = {
    "node-faults": Source(("2026-11-25-node-faults.json", "2026-11-26-node-faults.json"), node_faults),
    "request-bounds": Source((), request_bounds),
}
DOCUMENTS = {
    "README.md": README,
    "docs/papers.md": PAPERS,
    "docs/rag.md": RAG,
    "docs/lookahead-parallel.md": LOOKAHEAD,
    "docs/simulation.md": SIMULATION,
    "docs/runbook.md": RUNBOOK,
    "docs/exactness.md": EXACTNESS,
    "docs/benchmarks.md": BENCHMARKS,
    "experiments/results/README.md": RESULTS,
    "docs/configuration.md": CONFIGURATION,
    "docs/architecture.md": ARCHITECTURE,
    "docs/models.md": MODELS,
}


def markdown(table: Table) -> str:
    """A table in GitHub's markdown.

    >>> print(markdown(Table("", (("", ""), ("", "speed")), ((Cell("`auto`"), Cell("2.02")),))))
    | | speed |
    |---|---|
    | `auto` | 2.02 |
    """
    rows = [[title for _, title in table.header], *([cell.text.replace("|", r"\|") for cell in row] for row in table.rows)]
    lines = ["|" + "".join(f" {text} |" if text else " |" for text in row) for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(table.header), *lines[1:]])


def filled(text: str, results: Path, tables: Mapping[str, Source]) -> str:
    """A text with every table between markers made anew.

    Args:
        text: of a document.
        results: the folder of the records.
        tables: what the names stand for.

    Raises:
        ValueError: a name that is not known, that has no markers or has them twice, or markers that do not close.
        OSError: a record that is not there.
    """
    made, seen, lines = [], [], iter(text.split("\n"))
    for line in lines:
        made.append(line)
        begin = _BEGIN.fullmatch(line)
        if begin is None:
            continue
        name = begin[1]
        if name not in tables:
            raise ValueError(f"no table is called {name!r}: known are {', '.join(tables)}")
        for within in lines:
            if _BEGIN.fullmatch(within):
                raise ValueError(f"table {name!r} has no {_END} before {within}")
            if within == _END:
                break
        else:
            raise ValueError(f"table {name!r} has no {_END} behind it")
        seen.append(name)
        records = [json.loads((results / file).read_text(encoding="utf-8")) for file in tables[name].records]
        made += [markdown(tables[name].build(*(record["results"] for record in records))), _END]
    if sorted(seen) != sorted(tables):
        wrong = [name for name in tables if seen.count(name) != 1]
        raise ValueError(f"{', '.join(wrong)}: markers must stand in the text once, `<!-- table: NAME -->` and `{_END}`")
    return "\n".join(made)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; the exit code, 2 for markers or records that are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, show what differs")
    parser.add_argument("--root", type=Path, default=_ROOT, help="folder of the documents")
    args = parser.parse_args(argv)
    differ = False
    for name, tables in DOCUMENTS.items():
        path: Path = args.root / name
        try:
            text = path.read_text(encoding="utf-8")
            made = filled(text, _ROOT / "experiments" / "results", tables)
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
