"""``outrider bench replay`` on few texts, over real processes and a real Redis."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.configs.schema import REPOSITORY
from outrider.experiments.bench.__main__ import main

TEXT = "A request travels from the door to the engine and back again."


def replayed(folder: Path, *arguments: object) -> dict[str, Any]:
    assert main(["replay", *map(str, arguments), "--out", str(folder / "out")]) == 0
    results: dict[str, Any] = json.loads(next((folder / "out").glob("*.json")).read_text())["results"]
    return results


def workload(folder: Path, *records: dict[str, str]) -> Path:
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps({"id": str(at), **record}) + "\n" for at, record in enumerate(records)))
    return path


def test_strategies_without_logits_are_replayed(tiny_model: Path, tmp_path: Path) -> None:
    path = workload(tmp_path, {"prompt": TEXT, "output": TEXT})
    chosen = ("--strategy", "llma", "--strategy", "autoregressive", "--strategy", "recycling")
    results = replayed(tmp_path, "strategies", path, "--tokenizer", tiny_model, *chosen)
    plain, copied = (results[name]["workloads"]["asked"] for name in ("autoregressive", "llma"))
    assert list(results) == ["llma", "autoregressive"] and plain["tokens"] == copied["tokens"]
    assert plain["tokens_per_step"] == 1.0 and copied["tokens_per_step"] > 2.0


def test_strategies_that_remember_draft_from_a_corpus(tiny_model: Path, tmp_path: Path) -> None:
    path, shard = workload(tmp_path, {"prompt": "What travels?", "output": TEXT}), tmp_path / "train-00.jsonl.gz"
    shard.write_bytes(gzip.compress(json.dumps({"text": f"Once more: {TEXT}"}).encode() + b"\n"))
    chosen = ("--strategy", "trie", "--strategy", "suffix", "--corpus", tmp_path)
    reached = replayed(tmp_path, "strategies", path, "--tokenizer", tiny_model, *chosen)
    assert reached["trie"]["mean_tokens_per_step"] > 2 * reached["suffix"]["mean_tokens_per_step"]


@pytest.mark.proof
def test_replicas_that_share_are_warm_from_their_first_request(tmp_path: Path) -> None:
    words = (
        "the library opens at nine", "seven ships left the harbour", "glass melts slowly in small ovens",
        "a letter came by night",
    )  # fmt: skip
    path = workload(tmp_path, *({"prompt": f"{text[:3]}?", "output": f"{text}, {text[::-1]}"} for text in words))
    (rows,) = replayed(tmp_path, "sharing", path, "--tokenizer", REPOSITORY / "demo_model")["workloads"].values()
    assert all(len(rows[replica]["by_request"]) == len(words) for replica in ("alone", "A", "B", "C"))
    assert rows["A"]["first_request"] == rows["alone"]["first_request"]
    for replica in ("B", "C"):
        assert rows[replica]["tokens_per_step"] > 3 * rows["alone"]["tokens_per_step"]
        assert rows[replica]["first_request"] > 3 * rows["alone"]["first_request"]
    assert len(rows["B, new requests"]["by_request"]) == len(words) // 2
