"""Strong scaling: which forms there are, what entries come to, what is predicted, and real groups beside one worker."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from outrider.cluster.cli.generate.strategy_option import chosen_strategies
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import ModelShape
from outrider.experiments.bench.run import run
from outrider.experiments.bench.scaling import command
from outrider.experiments.bench.scaling.command import BENCH, parted, results_of
from outrider.experiments.bench.scaling.prediction import Prediction, Totals, beside, fitted_host
from outrider.experiments.bench.scaling.results import COUNTERS, Entry, Form, Round, communication, forms_of
from outrider.experiments.papers.beside import NOT_TESTABLE
from outrider.experiments.report.tables import headlines
from outrider.experiments.simulation.steps import Host

SHAPE = ModelShape("tiny", 4, 64, 4, 4, 16, 1e5, 100)


def test_a_form_that_is_missing_is_left_out_by_name() -> None:
    forms, skipped = forms_of(("one", "threads", "lookahead"), (1, 2, 4), 1, 3)
    assert [form.label for form in forms] == ["1 x 1", "LP 2 x 1"]
    threads = "more threads do not apply to a GPU"
    assert skipped == {"1 x 2": threads, "1 x 4": threads, "LP 4 x 1": "this machine has 3 GPUs"}
    forms, _ = forms_of(("threads",), (3,), 2, None)
    assert [(form.label, form.ranks, form.rank_threads) for form in forms] == [("1 x 2", 1, 2), ("1 x 6", 1, 6)]
    assert "parallelism.world_size=2" in Form("pipeline", 2, 1).settings() and len(Form("one", 1, 1).settings()) == 2
    assert {"server.replicas=4", "parallelism.world_size=auto"} <= {*Form("elastic", 4, 1).settings()}
    assert not [each for each in Form("replicas", 4, 1).settings() if each.startswith("parallelism")]


def entry(kind: str, strategy: str, seconds: float, clients: int = 1, **counts: float) -> Entry:
    """Two repeats of eleven tokens, ten of them in so many seconds."""
    counted = dict.fromkeys(COUNTERS, 10.0) | {"decode_s": seconds, "tokens": 20.0} | counts
    repeats = [Round(1, 11, 0.5 + seconds, counted) for _ in range(2)]
    name = "chat" if clients == 1 else "all"
    return Entry(Form(kind, 1 if kind == "one" else 2, 1), strategy, clients, {name: repeats})


def test_a_paper_s_statements_are_judged_by_speeds_after_the_first_token() -> None:
    seconds = {"one": 1.0, "lookahead": 1.0, "tensor": 0.5, "pipeline": 2.0}
    faster = {PLAIN: 1.0, "jacobi": 0.4, "auto": 0.2}
    entries = [entry(kind, name, seconds[kind] * faster[name]) for kind in seconds for name in faster]
    entries[-1].differing = 1
    results = results_of(entries, {}, "float32", None, SHAPE, {})
    row = results["overall"]["TP 2 x 1, plain"]
    assert row["decode_ratio"]["plain"] == [2.0, 2.0] and row["tokens_per_s"] == 11.0 and row["tokens_per_step"] == 2.0
    assert row["speed_up"] == [1.5, 1.5] and row["efficiency"] == 0.75
    assert [claim["direction"] for claim in results["claims"]] == [False, True, True, None, True, True]
    assert results["claims"][0]["why"] and results["verdicts"][NOT_TESTABLE] == 6
    assert parted(results, Namespace(dtype="float32", emulate=None)) == ["PP 2 x 1, auto: 1 of 2 as plain"]
    assert parted(results, Namespace(dtype="bfloat16", emulate=None)) == []


def test_what_ranks_exchange_is_measured_or_computed() -> None:
    step = {"steps": 4.0, "rows": 8.0, "exchange_bytes": 400.0, "exchange_s": 0.002}
    assert communication(entry("lookahead", PLAIN, 1.0, **step), SHAPE) == {"how": "measured", "bytes": 100.0, "seconds": 0.0005}
    sums = communication(entry("tensor", PLAIN, 1.0, **step), SHAPE)  # two rows a step, 8 sums of 128 bytes, sent by both ranks
    assert sums == {"how": "computed", "bytes": 2 * 8 * 128 * 2, "seconds": None}
    assert communication(entry("pipeline", PLAIN, 1.0, **step), SHAPE)["bytes"] == 2 * 2 * 128
    assert communication(entry("pipeline", PLAIN, 1.0, **step), None)["bytes"] is None
    assert communication(entry("replicas", PLAIN, 1.0, **step), SHAPE)["bytes"] == 0


def test_a_prediction_follows_the_calibration(tiny_model: Path) -> None:
    curve = LatencyCurve((1, 100), (0.01, 0.02), 0, 0.0, 0.0)
    texts = {f"the quick brown fox {at}": " the lazy dog and the lazy dog" * 3 for at in range(4)}
    plain, copied, window = chosen_strategies([PLAIN, "llma", "jacobi"])
    hosts = dict.fromkeys((plain.label, copied.label, window.label), Host())
    prediction = Prediction(curve, SHAPE, texts, str(tiny_model), 8, hosts, 0.0)
    one = prediction.tokens_per_s(Form("one", 1, 1), plain, 1)
    assert 85 < one < 100  # a token takes 10 ms and what the host adds
    assert prediction.tokens_per_s(Form("one", 1, 1), copied, 1) > 1.5 * one
    assert 1.8 < prediction.tokens_per_s(Form("tensor", 2, 1), plain, 1) / one < 2.0  # half the time, and sums
    assert prediction.tokens_per_s(Form("replicas", 2, 1), plain, 1) == pytest.approx(one, rel=0.02)
    assert prediction.tokens_per_s(Form("replicas", 4, 1), plain, 2) / prediction.tokens_per_s(Form("one", 1, 1), plain, 1) > 1.8
    entries = [entry(kind, name, 1.0) for kind in ("one", "threads", "lookahead") for name in (PLAIN, "jacobi")]
    rows = results_of(entries, {}, "float32", None, SHAPE, {})["overall"]
    forms = {each.form.label: each.form for each in entries}
    told = beside(rows, forms, {choice.label: choice for choice in (plain, window)}, plain, prediction)
    assert told["rows"]["1 x 1, plain"] == {"measured": 1.0, "predicted": 1.0, "error": 0.0}
    assert "LP 2 x 1, plain" in told["rows"] and "needs a model that runs" in told["left_out"]["LP 2 x 1, jacobi"]
    assert "one worker's threads" in told["left_out"]["1 x 2, plain"]


def test_the_host_s_times_are_fitted_to_one_worker() -> None:
    # A prompt takes 20 ms, and a request is outside the engine for 5.
    plain = Totals(1, 96 * 0.0105 + 4 * 0.025, 4, 100, 100, 4 * 0.020, 96 * 0.0105, 0.0104, 0.010)
    many = Totals(2, 2 * (25 * 0.0124 + 0.005), 8, 50, 200, 1.0, 2.0, 0.0104, 0.010)
    drafting = Totals(1, 0.5, 4, 44, 44, 4 * 0.020, 40 * 0.0108, 0.0104, 0.010)
    host, gap_s = fitted_host(plain, many, drafting)
    assert (host.step_s, host.request_s, host.propose_s) == pytest.approx((0.0, 0.0005, 0.0003))
    assert gap_s == pytest.approx(0.005)
    host, _ = fitted_host(plain, plain, plain)  # nothing else is known: all of it is each request's
    assert (host.step_s, host.request_s, host.propose_s) == pytest.approx((0.0, 0.0005, 0.0))


LABELS = {"lookahead": "LP 2 x 1", "elastic": "LP elastic 2 x 1", "replicas": "replicas 2 x 1"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", [["lookahead"], pytest.param([*LABELS], marks=pytest.mark.proof)], ids=["one form", "all"])
def test_groups_and_replicas_say_what_one_worker_says(
    kinds: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = len(kinds) == 1  # one prompt at a time, and no calibration
    if short:
        monkeypatch.setattr(command, "calibrated", lambda *given: LatencyCurve((1, 100), (0.01, 0.02), 0, 0.0, 0.0))
    prompts = tmp_path / "words.jsonl"
    words = "the quick brown fox jumps over the lazy dog"
    prompts.write_text("".join(json.dumps({"prompt": f"{words} {at}"}) + "\n" for at in ("again", "twice")))
    sizes = ["--repeats", "1", "--strategy", "llma", "--records", "1" if short else "2", "--clients", "1" if short else "1,2"]
    sizes += ["--max-tokens", "12" if short else "24", *(part for kind in kinds for part in ("--form", kind))]
    assert run(BENCH, ["--model", str(tiny_model), "--prompts", str(prompts), *sizes, "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*-bench-scaling.json")
    record = json.loads(path.read_text())
    results, overall = record["results"], record["results"]["overall"]
    assert {row["form"] for row in overall.values()} == {"1 x 1", *(LABELS[kind] for kind in kinds)}
    assert all(row["identical"] == row["records"] > 0 < row["tokens_per_s"] for row in overall.values())
    assert overall["LP 2 x 1, llma"]["communication"]["bytes"] > 0 and sum(overall["1 x 1, plain"]["memory_mib"].values()) > 100
    assert results["prediction"]["rows"].keys() == overall.keys() and results["crossover"]["sentences"]
    assert len(headlines(record)) == 3 and len(list((tmp_path / "out").glob("*.svg"))) == 1
