"""Strong scaling: real ranks in processes of their own, a tiny model, known outputs; the sums and figures of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.lookahead.executor import StepTimes
from cluster.cli.generate.strategy_option import parse_strategy
from decoding.budget.latency import LatencyCurve
from experiments.bench import main
from experiments.competition import Tally
from experiments.contestants import Run
from experiments.guided_ranks import RankModel
from experiments.rank_contention import main as contention
from experiments.report import read_record, render
from experiments.scaling_clocks import CallClock, Spent, shared_steps
from experiments.scaling_figures import bars_of
from experiments.scaling_options import PLAIN, Form, forms_of
from experiments.scaling_paper import beside_figures
from experiments.scaling_process import Entry, FormError, FormProcess, Setting
from experiments.scaling_sums import Lap, overall, ratios, references, step_split
from experiments.share_timing import exchange_line
from experiments.share_timing import main as predict

WORDS = (" a", " fox", " dog", " jumps")


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """Four prompts and their outputs: words in any order, so that several continuations of each are known."""
    path, generator = tmp_path / "known.jsonl", np.random.default_rng(0)
    texts = ["".join(generator.choice(WORDS, 40)) for _ in range(8)]
    records = [{"id": f"k/{n}", "workload": "known", "prompt": texts[n], "output": texts[n + 4]} for n in range(4)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(folder: Path, name: str) -> Any:
    (path,) = folder.glob(f"*-{name}.json")
    return json.loads(path.read_text())["results"]


def entry(kind: str, strategy: str, workers: int = 2, budget: int = 8) -> Entry:
    return Entry(Form(kind, 1 if kind == "one" else workers, 1), parse_strategy(strategy), 0 if strategy == PLAIN else budget)


def test_forms_compete_on_known_outputs_and_a_page_shows_them(
    known: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = ["--random-model", "tiny", "--tokenizer", str(tiny_model), "--prompts", str(known), "--threads", "1"]
    sizes = ["--records", "2", "--repeats", "2", "--max-tokens", "24", "--budgets", "3,6", "--sweep-records", "1"]
    forms = ["--form", "lookahead", "--strategy", "trie"]
    assert main(["scaling", *setting, *sizes, *forms, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "LP\N{NO-BREAK SPACE}2\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}1" in shown and "2 of 2" in shown
    results = record(tmp_path / "out", "bench-scaling")
    assert set(results["sweep"]) == {"1 x 1, trie", "LP 2 x 1, trie"}
    assert all(set(rates) == {"3", "6"} and min(rates.values()) > 0 for rates in results["sweep"].values())
    rows = results["overall"]
    assert [(row["form"], row["strategy"]) for row in rows.values()] == [
        ("1 x 1", PLAIN), ("1 x 1", "trie"), ("LP 2 x 1", PLAIN), ("LP 2 x 1", "trie"),
    ]  # fmt: skip
    assert results["parted"] == [] and all(row["identical"] == row["records"] == 2 for row in rows.values())
    assert rows["1 x 1, plain"]["tokens_per_step"] == 1.0
    group = next(row for row in rows.values() if (row["form"], row["strategy"]) == ("LP 2 x 1", "trie"))
    assert group["tokens_per_step"] > 1.1  # the words are those of the prompt
    ms = group["ms"]
    assert ms["exchange"] > 0 and 0 < ms["shared_steps"] <= 1 and 0 < ms["balance"] <= 1, ms
    assert len(group["decode_ratio"]["one"]) == 2 and "plain_threads" not in group["decode_ratio"]
    assert 2 * group["tokens_per_s_per_device"][0] == pytest.approx(group["tokens_per_s"][0], abs=0.02)
    memory = results["forms"]["LP 2 x 1"]
    assert len(memory["rss_mib"]) == 2 and min(memory["rss_mib"]) > memory["weights_mib"] > 0
    (path,) = (tmp_path / "out").glob("*.json")
    page = render([(path, read_record(path))], "scaling")
    assert page.count("<img") == 2 and "a step in milliseconds" in page and "figures 6, 7" in page


def test_parts_of_a_model_say_what_the_whole_says(known: Path, tiny_model: Path, tmp_path: Path) -> None:
    setting = ["--random-model", "tiny", "--tokenizer", str(tiny_model), "--prompts", str(known), "--strategy", "trie"]
    sizes = ["--records", "1", "--repeats", "1", "--max-tokens", "16", "--form", "pipeline"]
    assert main(["scaling", *setting, *sizes, "--out", str(tmp_path / "out")]) == 0
    results = record(tmp_path / "out", "bench-scaling")
    whole, part = results["forms"]["1 x 1"], results["forms"]["PP 2 x 1"]
    row = results["overall"]["PP 2 x 1, trie, 8"]
    assert row["identical"] == 1 and row["ms"]["exchange"] > 0 and row["ms"]["recompute"] == 0.0
    assert part["kv_mib"] == pytest.approx(whole["kv_mib"] / 2, rel=0.01) and part["weights_mib"] < whole["weights_mib"]


def test_a_form_that_is_missing_is_left_out_by_name() -> None:
    forms, skipped = forms_of(("one", "threads", "lookahead"), (2, 4), 1, 3)
    assert [form.label for form in forms] == ["1 x 1", "LP 2 x 1"]
    threads = "a GPU has no threads of ours"
    assert skipped == {"1 x 2": threads, "1 x 4": threads, "LP 4 x 1": "this machine has 3 GPUs"}
    forms, _ = forms_of(("threads",), (3,), 2, None)
    assert [(form.label, form.ranks, form.rank_threads) for form in forms] == [("1 x 2", 1, 2), ("1 x 6", 1, 6)]


def test_a_form_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = RankModel(str(tmp_path), 320, 64, 8, "float32", 0)
    with FormProcess(Form("one", 1, 1), Setting(model, None, "cpu", False, 8)) as process, pytest.raises(FormError) as caught:
        process.wait()
    assert str(tmp_path) in str(caught.value)


def test_a_step_is_split_by_what_its_form_told() -> None:
    tally = Tally.empty(1)
    tally.add(0, Run([[1] * 5], 3, prefill_s=1.0, forward_s=0.08, propose_s=0.004, drafted=8), wall_s=1.1)
    curve = LatencyCurve((1, 11), (0.010, 0.020), 256, 0.0, 0.0)  # a millisecond a row
    steps = [StepTimes((0.030, 0.036), 0.002, (5, 6), (1, 3), 2), StepTimes((0.040, 0.020), 0.002, (6, 2), (1, 0), 2)]
    split = step_split(Lap(tally, 1, shared_steps(steps, curve), 2, 5))
    assert [split[name] for name in ("propose", "compute", "recompute", "exchange", "rest")] == [2.0, 36.0, 2.0, 2.0, 8.0]
    assert split["exchange_share"] == 0.04 and split["rows"] == 4.75 and split["shared_steps"] == 1.0
    alone = step_split(Lap(tally, 1, Spent(), 2, 5))
    assert alone["compute"] == 40.0 and "exchange_share" not in alone
    untold = step_split(Lap(tally, 1, Spent() + Spent(exchange_s=None), 2, 5))
    assert untold["exchange"] is None and untold["compute"] == 40.0
    assert ratios({"a": [2.0, 3.0], "b": [4.0, 4.0]}, {"a": [1.0, 1.0], "b": [4.0, 2.0]}) == [1.5, 2.5]


def test_calls_are_timed_where_others_make_them() -> None:
    clock, owner = CallClock(), type("Owner", (), {})()
    owner.double = lambda value: 2 * value
    clock.around(owner, "double")
    assert owner.double(21) == 42 and clock.seconds > 0


def test_an_entry_stands_beside_plain_decoding_and_its_own_strategy() -> None:
    entries = [entry(kind, name) for kind in ("one", "threads", "tensor") for name in (PLAIN, "trie")]
    entries.append(entry("threads", PLAIN, 4))
    found = references(entries[5], entries)
    assert {name: of.label for name, of in found.items()} == {
        "plain": "1 x 1, plain", "plain_threads": "1 x 2, plain", "one": "1 x 1, trie, 8", "one_threads": "1 x 2, trie, 8",
    }  # fmt: skip
    assert references(entries[0], entries)["plain_threads"].label == "1 x 4, plain"


def lap(seconds: float) -> Lap:
    """Eleven tokens in ten steps, the prefill half a second."""
    tally = Tally.empty(2)
    for repeat in (0, 1):
        tally.add(repeat, Run([[1] * 11], 11, prefill_s=0.5, forward_s=seconds, propose_s=0.0, drafted=0), wall_s=0.5 + seconds)
    return Lap(tally, 1, Spent(), 20, 11)


def test_a_paper_s_statements_are_judged_by_speeds_after_the_first_token() -> None:
    seconds = {"one": 1.0, "lookahead": 1.0, "tensor": 0.5, "pipeline": 2.0}
    entries = [entry(kind, name) for kind in seconds for name in (PLAIN, "jacobi", "auto")]
    faster = {PLAIN: 1.0, "jacobi": 0.4, "auto": 0.2}
    laps = {each.label: {"chat": lap(seconds[each.form.kind] * faster[each.strategy.label])} for each in entries}
    rows = {each.label: overall(each, entries, laps) for each in entries}
    assert rows["TP 2 x 1, plain"]["decode_ratio"]["plain"] == [2.0, 2.0]
    assert rows["TP 2 x 1, plain"]["tokens_per_s"] == [11.0, 11.0] and rows["TP 2 x 1, plain"]["j_per_token"] == 0.0
    workloads = {"chat": {"entries": {label: {"decode_tokens_per_s": of["chat"].decode_rates()} for label, of in laps.items()}}}
    told = beside_figures({"overall": rows, "workloads": workloads}, "float32", "cpu")
    assert [claim["agree"] for claim in told["claims"]] == [False, True, True, False, True, True]
    assert told["claims"][0]["why"] and (told["agree"], told["told"]) == (4, 6)
    assert bars_of("TP 2 x 1", rows) == {
        "plain": "TP 2 x 1, plain", "jacobi": "TP 2 x 1, jacobi, 8", "best": "TP 2 x 1, auto, 8",
    }  # fmt: skip


def test_shares_are_timed_in_turn(known: Path, tiny_model: Path, tmp_path: Path) -> None:
    exchange = tmp_path / "exchange.json"
    cases = [{"transport": "group", "world": world, "exchange_ms": {"p50": ms}} for world, ms in ((2, 0.3), (4, 0.5))]
    exchange.write_text(json.dumps({"results": {"cases": cases}}))
    setting = ["--random-model", "tiny", "--tokenizer", str(tiny_model), "--prompts", str(known), "--dtype", "float32"]
    sizes = ["--records", "2", "--repeats", "1", "--max-tokens", "16", "--budgets", "4", "--ranks", "2", "3"]
    arguments = [*setting, *sizes, "--strategy", "trie", "--exchange", str(exchange)]
    assert predict([*arguments, "--out", str(tmp_path / "out")]) == 0
    results = record(tmp_path / "out", "share-timing")
    assert results["prediction"] is True
    assert results["exchange_ms"] == pytest.approx({"1": 0.0, "2": 0.3, "3": 0.4})
    rows = results["strategies"]["trie"]
    assert list(rows) == ["1", "2", "3"] and rows["1"]["ratio"] == [1.0]
    assert all(0 < row["mean_share_ms"] <= row["compute_ms"] * 1.001 for row in rows.values())
    assert rows["1"]["exchange_ms"] == 0.0 < rows["3"]["exchange_ms"] <= 0.4


def test_a_prediction_needs_a_measured_exchange(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"results": {"cases": [{"transport": "tcp", "world": 2, "exchange_ms": {"p50": 1.0}}]}}')
    with pytest.raises(ValueError, match="measured with 0 sizes, but a line needs two"):
        exchange_line(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"no record of experiments\.exchange"):
        exchange_line(path)


def test_processes_at_once_are_timed_beside_one_alone(tmp_path: Path) -> None:
    sizes = ["--size", "tiny", "--vocab-size", "300", "--context", "16", "--rows", "1", "4", "--rounds", "1", "--repeats", "2"]
    assert contention([*sizes, "--wide-threads", "1", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    results = record(tmp_path, "rank-contention")
    assert set(results["ms"]) == {"alone", "together", "together pinned"}
    assert np.array([list(row.values()) for row in results["ms"].values()]).shape == (3, 2, 3)
    assert set(results["together_over_alone"]) == {"1", "4"}
