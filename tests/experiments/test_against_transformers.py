"""The comparison from end to end on a tiny model, and what it makes of outputs that differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from cluster.prompt_file import PromptFileError
from experiments.against_transformers import main, unfaithful
from experiments.competition import compete, divergence, summary
from experiments.contestants import Prompt, Run
from experiments.stock_generate import StockGenerate, StockPromptLookup

STRATEGIES = ("llma", "prompt_lookup", "autoregressive")


class Liar:
    """Gives what ``generate`` gives, but for the last token."""

    name = "liar"

    def __init__(self, honest: StockGenerate) -> None:
        self._honest = honest

    def run(self, prompts: list[Prompt]) -> Run:
        """See ``Contestant``."""
        run = self._honest.run(prompts)
        return replace(run, outputs=[[*output[:-1], (output[-1] + 1) % 320] for output in run.outputs])

    def renew(self) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_strategy_equals_generate(tiny_model: Path, workloads: Path, tmp_path: Path, batch_size: int) -> None:
    arguments = [
        "--model",
        str(tiny_model),
        "--workloads",
        str(workloads / "a.jsonl"),
        str(workloads / "b.jsonl"),
        "--max-tokens",
        "24",
    ]
    results_folder = tmp_path / "results"
    arguments += [
        "--repeats",
        "2",
        "--limit",
        "2",
        "--dtype",
        "float64",
        "--batch-size",
        str(batch_size),
        "--results",
        str(results_folder),
    ]
    assert main(arguments) == 0
    (path,) = results_folder.iterdir()
    text = path.read_text()
    record = json.loads(text)
    results = record["results"]
    assert results["record_ids"] == ["a/1", "a/2"]
    assert results["records"] == 2
    assert list(results["contestants"]) == ["generate", "generate + lookup", *STRATEGIES]
    assert results["lossless"] == list(STRATEGIES)
    for name in ("generate", *STRATEGIES):
        row = results["contestants"][name]
        assert (row["identical"], row["divergences"], row["output_tokens"]) == (2, [], 48), name
        assert len(row["wall_s"]) == len(row["speedup"]) == 2
        assert row["tokens_per_step"] >= 1.0
    assert results["contestants"]["generate"]["speedup"] == [1.0, 1.0]
    assert results["contestants"]["autoregressive"]["tokens_per_step"] == 1.0
    assert record["config"]["dtype"] == "float64"
    assert str(tmp_path) not in text


def test_records_that_do_not_fit_are_counted_or_refused(tiny_model: Path, workloads: Path, tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(tiny_model),
        "--workloads",
        str(workloads / "b.jsonl"),
        "--repeats",
        "1",
        "--results",
        str(tmp_path / "r"),
    ]
    assert main([*arguments, "--max-tokens", "4", "--strategies", "llma"]) == 0
    results = json.loads(next((tmp_path / "r").iterdir()).read_text())["results"]
    assert (results["records"], results["too_long"]) == (1, 1)
    with pytest.raises(PromptFileError, match="no record fits the context of 256 tokens"):
        main([*arguments, "--max-tokens", "250"])


def test_an_output_that_differs_is_found_with_the_gap(stock: torch.nn.Module) -> None:
    prompts = [Prompt("one", [5, 6, 7, 8], []), Prompt("two", [9, 10], [])]
    honest = StockGenerate(stock, 6, ())
    with Progress(console=Console(quiet=True)) as progress:
        expected, tallies = compete([honest, Liar(honest)], prompts, 2, 1, progress)
    assert tallies["generate"].differing == {}
    assert set(tallies["liar"].differing) == {"one", "two"}
    assert tallies["generate"].tokens == 24
    assert len(tallies["liar"].wall_s) == 2
    parted = divergence(stock, prompts[0], expected["one"], tallies["liar"].differing["one"])
    with torch.inference_mode():
        logits = stock(torch.tensor([[5, 6, 7, 8, *expected["one"][:5]]])).logits[0, -1]
    best = logits.topk(2).values
    assert parted["position"] == 5
    assert parted["gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert parted["top_logit"] == pytest.approx(float(best[0]), abs=1e-4)
    row = summary(tallies["liar"], tallies["generate"], [parted], 2, 2)
    assert row["identical"] == 0
    assert row["identical_share"] == 0.0
    assert row["largest_gap"] == parted["gap"]


def test_only_lossless_strategies_in_exact_types_must_be_identical() -> None:
    contestants = {"generate + lookup": {"identical": 1}, "llma": {"identical": 2}, "prompt_lookup": {"identical": 1}}
    results = {"records": 2, "lossless": ["llma", "prompt_lookup"], "contestants": contestants}
    assert unfaithful(results, "float32") == ["prompt_lookup"]
    assert unfaithful(results, "float64") == ["prompt_lookup"]
    assert unfaithful(results, "bfloat16") == []


def test_an_end_token_ends_each_row_of_a_padded_group(stock: torch.nn.Module) -> None:
    prompts = [Prompt("one", [5, 6, 7, 8], []), Prompt("two", [9, 10], [])]
    run = StockGenerate(stock, 12, ()).run(prompts)
    first, second = run.outputs
    assert len(first) == len(second) == 12
    assert run.steps == 24
    end = next(token for token in first if token not in second)
    cut, whole = StockGenerate(stock, 12, (end,)).run(prompts).outputs
    assert cut == first[: first.index(end) + 1]
    assert whole == second


def test_prompt_lookup_counts_its_forwards(stock: torch.nn.Module) -> None:
    run = StockPromptLookup(stock, 12, ()).run([Prompt("one", [5, 6, 7, 8] * 4, [])])
    assert len(run.outputs[0]) == 12
    assert 1 <= run.steps <= 12
    assert run.accepted_by_source == {"prompt_lookup": 12 - run.steps}
    assert run.prefill_s > 0 and run.propose_s is None
