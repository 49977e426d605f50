"""The replay with a record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from experiments.bench.memory.replay_strategies import BENCH
from experiments.bench.run import run
from tests.helpers.models import llama_config, save_model


def test_writes_what_each_strategy_reached(tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path / "model", llama_config())
    workload = tmp_path / "copies.jsonl"
    text = "A request travels from the door to the engine and back again."
    workload.write_text(json.dumps({"id": "1", "prompt": text, "output": text}) + "\n")
    options = ["--tokenizer", str(tokenizer), "--strategy", "llma", "--strategy", "autoregressive", "--strategy", "recycling"]
    assert run(BENCH, [str(workload), *options, "--out", str(tmp_path / "out")]) == 0
    record = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert record["results"].keys() == {"llma", "autoregressive"}  # recycling needs logits
    plain, copied = (record["results"][name]["workloads"]["copies"] for name in ("autoregressive", "llma"))
    assert plain["tokens_per_step"] == 1.0 and copied["tokens_per_step"] > 2.0 and plain["tokens"] == copied["tokens"]


def test_ranks_draft_that_much_wider(tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path / "model", llama_config())
    workload = tmp_path / "copies.jsonl"
    text = "A request travels from the door to the engine and back again."
    workload.write_text(json.dumps({"id": "1", "prompt": text * 3, "output": text}) + "\n")
    options = ["--tokenizer", str(tokenizer), "--strategy", "auto:all_rows=true", "--budget", "8", "--world-size", "1", "3"]
    assert run(BENCH, [str(workload), *options, "--out", str(tmp_path / "out")]) == 0
    record = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    one, three = (figures["workloads"]["copies"]["drafted_per_step"] for figures in record["results"].values())
    assert three > 2 * one


def test_a_corpus_is_there_for_all_that_remember(tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path / "model", llama_config())
    text = "A request travels from the door to the engine and back again."
    workload, corpus = tmp_path / "asked.jsonl", tmp_path / "corpus"
    workload.write_text(json.dumps({"id": "1", "prompt": "What travels?", "output": text}) + "\n")
    corpus.mkdir()
    (corpus / "train-00.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": f"Once more: {text}"}).encode() + b"\n"))
    options = ["--tokenizer", str(tokenizer), "--strategy", "trie", "--strategy", "suffix", "--corpus", str(corpus)]
    assert run(BENCH, [str(workload), *options, "--out", str(tmp_path / "out")]) == 0
    reached = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["results"]
    assert reached["trie"]["mean_tokens_per_step"] > 2 * reached["suffix"]["mean_tokens_per_step"]
