"""Map of the fastest form of parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import MODELS
from outrider.experiments.simulation.__main__ import main
from outrider.experiments.simulation.forms import Brought, Machine, best_of
from outrider.experiments.simulation.hardware import GPUS
from outrider.experiments.simulation.steps import Software

GPU = GPUS["A100-80"]


def told(kind: str, ranks: int, strategy: str, tokens: float, drafted: float) -> dict[str, Any]:
    own = {"tokens_per_step": tokens, "drafted_per_step": drafted}
    return {"kind": kind, "ranks": ranks, "strategy": strategy, "clients": 1, **own}


def record(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"results": {"overall": {str(at): row for at, row in enumerate(rows)}}}))
    return path


def test_requests_are_dealt_as_the_form_says() -> None:
    machine = Machine(GPU, MODELS["llama-2-7b"], Software(), 256)
    plain, drafted = Brought(1.0, 0.0), Brought(2.0, 8.0)
    one = machine.tokens_per_s("one", 1, 1, plain, True)
    assert one is not None and 100 < one < 115  # 13.5 GB at 1.53 TB/s
    assert machine.tokens_per_s("replicas", 4, 1, plain, True) == one == machine.tokens_per_s("lookahead", 4, 1, plain, True)
    assert machine.tokens_per_s("replicas", 4, 4, plain, True) == pytest.approx(4 * one)
    assert machine.tokens_per_s("one", 1, 1, drafted, False) == pytest.approx(2 * one, rel=0.05)  # rows are free here
    tensor, pipeline = (machine.tokens_per_s(kind, 4, 1, plain, True) for kind in ("tensor", "pipeline"))
    assert tensor is not None and pipeline is not None and 2 * one < tensor < 4 * one and 0.95 * one < pipeline < one
    large = Machine(GPU, MODELS["llama-2-70b"], Software(), 256)
    assert large.tokens_per_s("lookahead", 4, 1, plain, True) is None  # 138 GB
    assert large.tokens_per_s("tensor", 4, 1, plain, True) is not None


def test_lookahead_wins_where_launches_take_the_time_and_its_tree_is_too_wide_for_one() -> None:
    model, plain = MODELS["llama-2-7b"], Brought(1.0, 0.0)
    launched, graphs = (Machine(GPU, model, Software(launch_s=launch_s), 256) for launch_s in (735e-6, 0.0))
    wide = {"jacobi": {1: Brought(1.5, 16.0), 4: Brought(2.4, 400.0)}, PLAIN: {1: plain, 4: plain}}
    found = best_of(launched, wide, 4, 1)
    assert next(iter(found)) == "lookahead" and found["tensor"]["tokens_per_step"] == 2.4  # it sums, and launches as much
    assert next(iter(best_of(graphs, wide, 4, 1))) == "tensor"
    assert next(iter(best_of(launched, wide, 4, 64))) != "lookahead"
    small = {"jacobi": {1: Brought(1.5, 16.0), 4: Brought(2.4, 64.0)}, PLAIN: {1: plain, 4: plain}}
    assert best_of(launched, small, 4, 1)["one"]["tokens_per_s"] > best_of(launched, small, 4, 1)["lookahead"]["tokens_per_s"]
    assert best_of(launched, small, 2, 1)["one"]["tokens_per_step"] == 1.5  # four ranks' tree was not measured on two


def test_the_map_is_a_record_with_a_sentence_for_each_place(tmp_path: Path) -> None:
    rows = [told("one", 1, "auto", 2.0, 20.0), told("lookahead", 2, "auto", 2.2, 40.0)]
    plain = [told(kind, ranks, PLAIN, 1.0, 0.0) for kind, ranks in (("one", 1), ("lookahead", 2))]
    path = record(tmp_path / "record.json", *rows, *plain, told("tensor", 2, "auto", 9.0, 9.0))
    options = ["--model", "llama-2-7b", "llama-2-70b", "--clients", "1,64", "--out", str(tmp_path / "out")]
    assert main(["forms", str(path), *options]) == 0
    (made,) = (tmp_path / "out").glob("*-simulate-forms.json")
    results = json.loads(made.read_text())["results"]
    assert results["prediction"] and len(results["answer"]) == 4
    small, large, *_ = results["answer"]
    assert small.startswith("llama-2-7b on A100-80, no launches, 2 GPUs: from 1 at once tensor with auto, ")
    assert "times lookahead, since each GPU reads a part of the weights" in small
    assert "a copy of the model a GPU does not fit" in large or "the KV does not fit" in large
    cell = results["cells"]["llama-2-7b on A100-80, no launches"]["2"]["1"]
    assert cell["tensor"]["tokens_per_step"] == 2.2 and {"one", "replicas", "lookahead", "tensor", "pipeline"} == cell.keys()
    assert made.with_suffix(".svg").is_file()
