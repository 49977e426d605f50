"""Replicas in processes of their own over a real Redis: what the experiments with the shared memory measure, on few texts."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from configs.schema import REPOSITORY
from configs.slices import CacheOptions
from decoding.replay import KnownText
from experiments.bench.memory import figures as cache_figures
from experiments.bench.memory import sharing as shared_trie
from experiments.bench.memory.lag import measure_lag
from experiments.bench.memory.sizes import measure_memory, measure_snapshot
from experiments.bench.run import run

WORDS = (
    "the library opens at nine",
    "seven ships left the harbour",
    "glass melts slowly in small ovens",
    "a letter came by night",
)
VOCAB = 1000


def outputs(number: int, length: int) -> list[np.ndarray]:
    """Texts that share nothing."""
    return list(np.random.default_rng(0).integers(0, VOCAB, (number, length)).astype(np.int32))


def test_replicas_that_share_are_warm_from_their_first_request(tmp_path: Path) -> None:
    workload = tmp_path / "few.jsonl"
    records = [{"id": str(at), "prompt": f"{at}?", "output": f"{text}, {text[::-1]}"} for at, text in enumerate(WORDS)]
    workload.write_text("\n".join(map(json.dumps, records)))
    assert run(shared_trie.BENCH, [str(workload), "--tokenizer", str(REPOSITORY / "demo_model"), "--out", str(tmp_path)]) == 0
    (record,) = tmp_path.glob("*-shared-trie.json")
    (rows,) = json.loads(record.read_text())["results"]["workloads"].values()
    assert all(len(rows[replica]["by_request"]) == len(WORDS) for replica in ("alone", "A", "B", "C"))
    assert rows["A"]["first_request"] == rows["alone"]["first_request"]
    for replica in ("B", "C"):
        assert rows[replica]["tokens_per_step"] > 3 * rows["alone"]["tokens_per_step"]
        assert rows[replica]["first_request"] > 3 * rows["alone"]["first_request"]
    assert len(rows["B, new requests"]["by_request"]) == len(WORDS) // 2
    ElementTree.parse(record.with_suffix(".svg"))


@pytest.mark.slow
def test_lag_and_sizes_count_every_token() -> None:
    with cache_figures.EmbeddedRedis.start() as redis:
        setting = cache_figures.setting(redis.url, VOCAB, ("measured",), CacheOptions())
        lag = measure_lag(setting, 2, 30, 3, 0.005)
    assert lag["steps"] == 10 and 0 < lag["lag_ms_p50"] <= lag["lag_ms_p99"] <= lag["lag_ms_max"]
    assert lag["stream_bytes_per_token"] > 2  # a token takes two bytes, and its record some more
    texts = outputs(50, 100)
    with cache_figures.EmbeddedRedis.start() as redis:
        sizes = measure_snapshot(cache_figures.setting(redis.url, VOCAB, ("measured",), CacheOptions()), texts)
    assert sizes["tokens"] == sizes["loaded_tokens"] == 5000 and 2 < sizes["snapshot_bytes_per_token"] < 3
    (memory,) = measure_memory(texts, (1000,))
    assert memory["tokens"] == 1000 and memory["texts"] == 10 and memory["log_bytes"] >= 41 * 1000


@pytest.mark.slow
def test_a_flood_leaves_the_other_tenant_its_drafts() -> None:
    quiet = [KnownText(str(at), output[:1], (), output) for at, output in enumerate(outputs(3, 60))]
    measured = cache_figures.flood(quiet, outputs(40, 100)[3:], 3000, VOCAB)
    assert measured["flooded_tokens"] >= 3000
    assert measured["before"] == measured["live"] == measured["after"] > 10
