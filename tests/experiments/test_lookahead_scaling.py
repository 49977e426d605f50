"""The measurements of groups: real ranks in processes of their own, a tiny model, known outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.lookahead_parallel import StepTimes
from decoding.latency import LatencyCurve
from experiments.competition import Tally
from experiments.contestants import Run
from experiments.lookahead_scaling import main
from experiments.rank_contention import main as contention
from experiments.scaling_bench import ratios, step_split
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


def test_one_rank_and_two_follow_the_known_outputs(known: Path, tiny_model: Path, tmp_path: Path) -> None:
    setting = ["--random-model", "tiny", "--tokenizer", str(tiny_model), "--prompts", str(known), "--dtype", "float32"]
    sizes = ["--records", "2", "--sweep-records", "1", "--repeats", "2", "--max-tokens", "24", "--budgets", "3", "6"]
    assert main([*setting, *sizes, "--wide-threads", "1", "--strategy", "trie", "--out", str(tmp_path / "out")]) == 0
    results = record(tmp_path / "out", "lookahead-scaling")
    assert set(results["sweep"]) == {"trie, 1 x 1", "trie, 2 x 1"}
    assert all(set(rates) == {"3", "6"} and min(rates.values()) > 0 for rates in results["sweep"].values())
    rows = results["overall"]
    assert [(row["ranks"], row["threads"]) for row in rows.values()] == [(1, 1), (1, 1), (2, 1)]
    assert all(row["identical"] == row["records"] == 2 for row in rows.values())
    assert rows["autoregressive, 1 x 1, 0"]["tokens_per_step"] == 1.0
    group = next(row for row in rows.values() if row["ranks"] == 2)
    assert group["tokens_per_step"] > 1.1  # the words are those of the prompt
    ms = group["ms"]
    assert ms["exchange"] > 0 and 0 < ms["shared_steps"] <= 1 and 0 < ms["balance"] <= 1, ms
    assert len(group["decode_ratio"]["one_rank"]) == 2
    assert list((tmp_path / "out").glob("*.svg"))


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


def test_a_step_is_split_by_the_slowest_rank() -> None:
    tally = Tally.empty(1)
    tally.add(0, Run([[1] * 5], 3, prefill_s=1.0, forward_s=0.08, propose_s=0.004, drafted=8), wall_s=1.1)
    curve = LatencyCurve((1, 11), (0.010, 0.020), 256, 0.0, 0.0)  # a millisecond a row
    steps = [StepTimes((0.030, 0.036), 0.002, (5, 6), (1, 3), 2), StepTimes((0.040, 0.020), 0.002, (6, 2), (1, 0), 2)]
    split = step_split(tally, 1, steps, curve)
    assert [split[name] for name in ("propose", "compute", "recompute", "exchange", "rest")] == [2.0, 36.0, 2.0, 2.0, 8.0]
    assert split["exchange_share"] == 0.04 and split["rows"] == 4.75 and split["shared_steps"] == 1.0
    alone = step_split(tally, 1, [], curve)
    assert alone["compute"] == 40.0 and "exchange_share" not in alone
    assert ratios({"a": [2.0, 3.0], "b": [4.0, 4.0]}, {"a": [1.0, 1.0], "b": [4.0, 2.0]}) == [1.5, 2.5]


def test_processes_at_once_are_timed_beside_one_alone(tmp_path: Path) -> None:
    sizes = ["--size", "tiny", "--vocab-size", "300", "--context", "16", "--rows", "1", "4", "--rounds", "1", "--repeats", "2"]
    assert contention([*sizes, "--wide-threads", "1", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    results = record(tmp_path, "rank-contention")
    assert set(results["ms"]) == {"alone", "together", "together pinned"}
    assert np.array([list(row.values()) for row in results["ms"].values()]).shape == (3, 2, 3)
    assert set(results["together_over_alone"]) == {"1", "4"}
