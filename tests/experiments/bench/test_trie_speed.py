"""The benchmark of the trie from end to end on few tokens, and the texts that it is filled with."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.bench.memory.trie_speed import BENCH, KINDS, summary
from experiments.bench.memory.trie_texts import CHANGED_SHARE, MAX_TOKENS, corpus_texts
from experiments.bench.run import run


def corpus_folder(folder: Path, lines: int) -> Path:
    """Different sentences in all three kinds of files; none holds more than 512 tokens but the last."""
    texts = [
        f"Record {number}: " + " ".join(f"the {number * k % 97} foxes jump over {k} dogs" for k in range(12))
        for number in range(lines)
    ]
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::2]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text, "kind": "other"}) + "\n" for text in texts[1::2])
    (folder / "c.txt").write_text(" ".join(texts[:20]))
    (folder / "d.json").write_text("not read")
    return folder


def test_measures_what_it_says_and_writes_a_record(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["--corpus", str(corpus_folder(tmp_path / "corpus", 100)), "--tokenizer", str(tiny_model), "--tokens", "30000"]
    assert run(BENCH, [*texts, "--rounds", "1", "--budget", "15", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    results = record["results"]
    assert record["name"] == "trie-speed" and record["seed"] == 0 and record["config"]["budget"] == 15
    assert results["tokens"] == 30_000 and results["text"]["kind"] == "corpus"
    for kind in (*KINDS, "auto_step"):
        row = results[kind]
        assert 0 < row["full"] <= row["proposals"] and 0 < row["rows_mean"] <= 15
        assert 0 < row["p50_us"]["min"] <= row["p50_us"]["median"] <= row["p50_us"]["max"]
        assert row["p50_us"]["median"] <= row["p99_us"]["median"] <= row["p99_9_us"]["median"]
    assert all(rates["min"] > 0 for rates in results["insertion_tokens_per_s"].values())
    assert results["bytes_per_token"]["arrays"] > 20
    assert path.name in capsys.readouterr().err


def test_a_corpus_is_shown_again_with_changes(tiny_model: Path, tmp_path: Path) -> None:
    folder = corpus_folder(tmp_path / "corpus", 100)
    texts = corpus_texts([folder], tiny_model, 60_000, 0)
    assert sum(map(len, texts.fill)) == 60_000 and max(map(len, texts.fill)) <= MAX_TOKENS
    assert texts.about["kind"] == "corpus" and texts.about["files"] == 3 and texts.about["shown"] > 1.5
    period = next(n for n in range(1, len(texts.fill)) if sum(map(len, texts.fill[:n])) * texts.about["shown"] >= 59_900)
    first, again = np.concatenate(texts.fill[:period]), np.concatenate(texts.fill[period : 2 * period])
    shown = min(len(first), len(again))
    assert 0 < np.mean(first[:shown] != again[:shown]) < 2 * CHANGED_SHARE
    filled = {text.tobytes() for text in texts.fill}
    assert texts.held_out and not any(text.tobytes() in filled for text in texts.held_out)


def test_times_are_of_full_proposals_only() -> None:
    rounds = [[(1000, 4), (3000, 4), (900_000, 2)], [(5000, 4), (700_000, 0)]]
    row = summary(rounds, 4)
    assert row["proposals"] == 5 and row["full"] == 3 and row["rows_mean"] == 2.8
    assert row["p50_us"] == {"median": 3.5, "min": 2.0, "max": 5.0}
    assert summary(rounds, 9)["p50_us"] == {}


def test_what_cannot_be_read_is_one_line(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"txt": 1}\n')
    for corpus, said in ((broken, "broken.jsonl"), (tmp_path / "none.txt", "none.txt"), (tmp_path, "'text'")):
        assert run(BENCH, ["--corpus", str(corpus), "--tokenizer", str(tiny_model), "--out", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(BENCH, ["--corpus", str(broken)])
    assert "--tokenizer" in capsys.readouterr().err
