"""Near-ties: where rounding cannot decide anything nothing flips, and where something does it is found and put down right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.tree import DraftTree
from engine.batch import Batch, Line, LineWork, pack
from engine.runner import ModelRunner
from experiments.near_ties import Changes, Walk, continuation, main, measure, tree_around
from tests.models import VOCAB, tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROWS = (2, 5, 16)


class Perturbed:
    """A runner whose forwards of several wanted rows are not those of one row."""

    def __init__(self, runner: ModelRunner, swap: bool = False, value_noise: float = 0.0) -> None:
        """
        Args:
            runner: that computes.
            swap: the best two logits change places.
            value_noise: standard deviation of what is added to the values that are stored.
        """
        self.model, self.cache = runner.model, runner.cache
        self._runner, self._swap, self._noise = runner, swap, value_noise
        self._random = torch.Generator().manual_seed(1)

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self._runner.forward(batch)
        if len(batch.logit_rows) < 2:
            return logits
        if self._swap:
            top = logits.topk(2, dim=1)
            logits = logits.scatter(1, top.indices, top.values.flip(1))
        (segment,) = batch.segments
        stored = self.cache._values[:, segment.slot, :, segment.start : segment.end]
        stored += self._noise * torch.randn(stored.shape, generator=self._random, dtype=stored.dtype)
        return logits


def texts() -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(3)
    return [
        (rng.integers(0, VOCAB, prompt).tolist(), rng.integers(0, VOCAB, output).tolist())
        for prompt, output in ((1, 40), (30, 23))
    ]


@pytest.fixture
def runner() -> ModelRunner:
    return tiny_model("llama", "float64").runner


def stock_gaps() -> list[float]:
    """Of the best two logits behind each token of the texts, by transformers in one forward, sorted."""
    gaps = []
    for prompt, output in texts():
        with torch.inference_mode():
            logits = tiny_model("llama", "float64").stock(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, dim=1).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
    return sorted(gaps)


def test_in_float64_nothing_flips(runner: ModelRunner) -> None:
    done: list[int] = []
    results = measure(runner, texts(), ROWS, 0, done.append)
    assert done == [1, 2] and results["texts"] == 2 and results["tokens"] == 63
    assert results["gaps"]["max"] == pytest.approx(stock_gaps()[-1]) and results["gaps"]["p50"] == pytest.approx(stock_gaps()[31])
    assert [case["rows"] for case in results["cases"]] == list(ROWS)
    for case in results["cases"]:
        assert case["trees"]["flips"] == case["guard"]["flips"] == case["left"] == 0 and case["flip_gaps"] == []
        for way in ("trees", "guard"):
            assert case[way]["logit"]["max"] < 1e-10 and case[way]["gap"]["max"] < 1e-10
        assert case["noise"] == case["trees"]["gap"]["max"] and case["recomputed"] == case["share"] == 0


def test_flips_are_found_and_a_guard_over_the_same_kv_takes_them_back(runner: ModelRunner) -> None:
    results = measure(Perturbed(runner, swap=True), texts(), ROWS, 0)  # type: ignore[arg-type]
    for case in results["cases"]:
        assert case["trees"]["flips"] == case["recomputed"] == 63 and case["share"] == 1
        assert case["flip_gaps"] == pytest.approx(stock_gaps(), abs=1e-9)
        assert case["noise"] == pytest.approx(2 * stock_gaps()[-1])  # from g ahead to g behind
        assert case["guard"]["flips"] == case["left"] == 0 and case["guard"]["logit"]["max"] < 1e-10


def test_a_guard_over_other_kv_leaves_flips(runner: ModelRunner) -> None:
    results = measure(Perturbed(runner, value_noise=3.0), texts(), ROWS, 0)  # type: ignore[arg-type]
    for case in results["cases"]:
        assert case["trees"]["flips"] > 10 and 0 < case["left"] <= case["guard"]["flips"]
        assert len(case["flip_gaps"]) == case["trees"]["flips"] and case["recomputed"] >= case["trees"]["flips"]
        assert max(case["flip_gaps"]) < case["noise"] == case["trees"]["gap"]["max"]


def test_the_guard_sees_the_kv_of_the_trees_alone(runner: ModelRunner) -> None:
    """Each row of (c) beside one in another slot, which holds the trees' entries before it and nothing else."""
    text = texts()[1]
    walk = Walk(Perturbed(runner, value_noise=0.5), text, 5)  # type: ignore[arg-type]
    walk.trees(5, np.random.default_rng(0))
    length = len(text[0]) + len(text[1]) - 1
    kept = runner.cache.entries(0, length)
    guarded = walk.guarded()
    tokens = np.array([*text[0], *text[1]], np.int32)
    for row, at in enumerate(range(len(text[0]) - 1, length)):
        for mine, entries in zip((runner.cache._keys, runner.cache._values), kept, strict=True):
            mine[:, 1] = torch.nan
            mine[:, 1, :, :at] = entries[:, :, :at]
        work = LineWork(Line(1, tokens[: at + 1]), at, at + 1, DraftTree.chain(int(tokens[at]), ()))
        assert torch.equal(runner.forward(pack([work]))[0], guarded[row])
    runner.cache._keys[:, 1] = runner.cache._values[:, 1] = 0  # other tests' slot, without what is no number


def test_the_rival_is_who_wins_else_the_second() -> None:
    plain = torch.zeros(3, 12)
    plain[:, 4], plain[:, 7], plain[:, 9] = 5.0, 4.7, 4.5
    plain[2, 9] = plain[2, 7] = 5.0  # three equals: the first is the best
    other = plain.clone()
    other[0, 7] = 5.1  # the second wins: 0.3 becomes -0.1
    other[1, 9] = 5.5  # the third wins: 0.5 becomes -0.5
    other[2, 7] = 4.0  # an equal loses: 0 becomes 1
    changes = Changes()
    changes.add(plain[:1], other[:1])
    assert changes.noise == pytest.approx(0.4) and changes.flips.tolist() == [True]
    changes.add(plain[1:], other[1:])
    assert changes.flips.tolist() == [True, True, False] and changes.noise == pytest.approx(1.0)
    assert changes.near(0.05).tolist() == [False, False, True] and changes.near(0.2).tolist() == [True, False, True]
    assert changes.figures()["logit"]["max"] == pytest.approx(1.0) and changes.figures()["flips"] == 2


def test_a_tree_holds_the_chain_and_siblings_below_it() -> None:
    tree = tree_around(np.array([7, 3, 9], np.int32), 8, VOCAB, np.random.default_rng(0))
    assert tree.tokens[:3].tolist() == [7, 3, 9] and tree.parents[:3].tolist() == [-1, 0, 1]
    assert len(tree) == tree.num_candidates == 8 and set(tree.parents[3:].tolist()) <= {0, 1, 2}


def test_a_continuation_is_that_of_generate(runner: ModelRunner) -> None:
    stock, prompt = tiny_model("llama", "float64").stock, texts()[1][0]
    expected = stock.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert continuation(runner, prompt, 20, (0,)) == expected
    assert continuation(runner, prompt, 20, (expected[3],)) == expected[: expected.index(expected[3]) + 1]


@pytest.mark.parametrize(
    ("text", "rows", "message"),
    [
        (([], [1]), (2,), "a prompt and an output"),
        (([1], []), (2,), "a prompt and an output"),
        (([1] * 100, [1] * 30), (2, 16), "145 entries"),
        (([1], [2]), (2, 1), "two rows or more"),
        (([1], [2]), (), r"two rows or more, got 1 texts and \[\]"),
    ],
)
def test_refuses_what_cannot_be(
    runner: ModelRunner, text: tuple[list[int], list[int]], rows: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(runner, [text], rows, 0)


@pytest.mark.parametrize("own", [False, True])
def test_the_command_line_writes_a_record(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    lines = [
        {"id": "p/1", "prompt": "Who jumps?", "output": "The fox."},
        {"id": "p/2", "prompt": "dog"},
        {"id": "p/3", "prompt": "a"},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model", str(tiny_model), "--dtype", "float64", "--prompts", str(prompts), "--records", "2", "--rows", "2", "6"]
    assert main([*options, "--tokens", "9", "--out", str(out), *(["--own"] if own else [])]) == 0
    (path,) = out.iterdir()
    record = json.loads(path.read_text())
    assert record["results"]["record_ids"] == ["p/1", "p/2"] and record["results"]["texts"] == 2
    assert 2 <= record["results"]["tokens"] <= 18 and [case["rows"] for case in record["results"]["cases"]] == [2, 6]
    assert "2 texts" in capsys.readouterr().out and "jumps" not in path.read_text()


def test_runs_where_neither_ray_nor_pydantic_is_installed() -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(('ray', 'pydantic', 'redis', 'fastapi')))\n"
    subprocess.run([sys.executable, "-c", missing + "from experiments.near_ties import measure"], check=True, cwd=ROOT)
