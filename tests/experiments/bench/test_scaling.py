"""Strong scaling: which forms there are, what their figures say of the paper, and a real group of ranks beside one worker."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from decoding.request import PLAIN
from experiments.bench.run import arguments, run
from experiments.bench.scaling import BENCH, Entry, Form, Timed, _results, forms_of, parted
from experiments.papers.beside import NOT_TESTABLE
from experiments.report.page import read_record, render


def test_a_form_that_is_missing_is_left_out_by_name() -> None:
    forms, skipped = forms_of(("one", "threads", "lookahead"), (2, 4), 1, 3)
    assert [form.label for form in forms] == ["1 x 1", "LP 2 x 1"]
    threads = "a GPU has no threads of ours"
    assert skipped == {"1 x 2": threads, "1 x 4": threads, "LP 4 x 1": "this machine has 3 GPUs"}
    forms, _ = forms_of(("threads",), (3,), 2, None)
    assert [(form.label, form.ranks, form.rank_threads) for form in forms] == [("1 x 2", 1, 2), ("1 x 6", 1, 6)]
    assert "parallelism.world_size=2" in Form("pipeline", 2, 1).settings() and len(Form("one", 1, 1).settings()) == 2


def entry(kind: str, strategy: str, seconds: float) -> Entry:
    """Two repeats of eleven tokens, ten of them in so many seconds."""
    repeats = [[Timed(11, 0.5 + seconds, seconds, "said")] for _ in range(2)]
    return Entry(Form(kind, 1 if kind == "one" else 2, 1), strategy, {"chat": repeats})


def test_a_paper_s_statements_are_judged_by_speeds_after_the_first_token() -> None:
    seconds = {"one": 1.0, "lookahead": 1.0, "tensor": 0.5, "pipeline": 2.0}
    faster = {PLAIN: 1.0, "jacobi": 0.4, "auto": 0.2}
    entries = [entry(kind, name, seconds[kind] * faster[name]) for kind in seconds for name in faster]
    entries[-1].differing = 1
    results = _results(entries, {}, Namespace(dtype="float32"), None)
    row = results["overall"]["TP 2 x 1, plain"]
    assert row["decode_ratio"]["plain"] == [2.0, 2.0] and row["tokens_per_s"] == 11.0
    assert [claim["direction"] for claim in results["claims"]] == [False, True, True, None, True, True]
    assert results["claims"][0]["why"] and results["verdicts"][NOT_TESTABLE] == 6
    assert results["figures"]["speed after the first token"]["series"]["LP 2 x 1"]["jacobi"] == [2.5, 2.5]
    assert parted(results, Namespace(dtype="float32")) == ["PP 2 x 1, auto: 1 of 2 as plain"]
    assert parted(results, Namespace(dtype="bfloat16")) == []


def test_options_that_cannot_be() -> None:
    for options in (["--workers", "1"], ["--workers", "2,2"], ["--max-tokens", "1"], ["--form", "other"]):
        with pytest.raises(SystemExit, match="2"):
            arguments(BENCH, ["--prompts", "p.jsonl", *options])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_of_ranks_says_what_one_worker_says(tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "words.jsonl"
    prompts.write_text(json.dumps({"prompt": "the quick brown fox jumps over the lazy dog"}) + "\n")
    sizes = ["--records", "1", "--repeats", "1", "--max-tokens", "24", "--form", "lookahead", "--strategy", "trie"]
    assert run(BENCH, ["--model", str(tiny_model), "--prompts", str(prompts), *sizes, "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*-bench-scaling.json")
    results = json.loads(path.read_text())["results"]
    assert list(results["overall"]) == ["1 x 1, plain", "1 x 1, trie", "LP 2 x 1, plain", "LP 2 x 1, trie"]
    assert all(row["identical"] == row["records"] == 1 and row["tokens_per_s"] > 0 for row in results["overall"].values())
    page = render([(path, read_record(path))], "scaling")
    assert page.count("<img") == 1 and "figures 6, 7" in page
