"""The figures of the demo model on hand-computed examples, and the whole evaluation of a tiny model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cluster.cli.generate.prompt_file import PromptRecord
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import FinishReason, Request, SamplingParams
from engine.engine import Engine
from experiments.bench.progress import Progress
from experiments.training.evaluate import (
    CopyCase,
    copied,
    copying_results,
    distinct_ratio,
    evaluate,
    four_grams,
    loop_results,
)


def finished(output: list[int], reason: FinishReason) -> Request:
    """A request as the engine leaves it."""
    request = Request("r", [1], SamplingParams(max_tokens=64))
    request.commit(output)
    request.finish_reason = reason
    return request


def test_four_grams() -> None:
    assert four_grams([1, 2, 3, 4, 5]) == [(1, 2, 3, 4), (2, 3, 4, 5)]
    assert four_grams([1, 2, 3]) == []


def test_copied_counts_each_occurrence() -> None:
    assert copied([1, 2, 3, 4, 5], [9, 1, 2, 3, 4]) == (1, 2)
    assert copied([1, 1, 1, 1, 1, 1], [1, 1, 1, 1]) == (3, 3)
    assert copied([1, 2], [1, 2, 3, 4]) == (0, 0)


def test_distinct_ratio() -> None:
    assert distinct_ratio([1, 2, 1, 2, 1, 2]) == pytest.approx(2 / 3)
    assert distinct_ratio([7] * 40) == pytest.approx(1 / 37)
    assert distinct_ratio(list(range(10))) == 1.0
    assert distinct_ratio([1, 2, 3]) is None


def test_copying_means_over_four_grams_and_over_records() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    cases = [
        CopyCase("quote", prompt, [1, 2, 3, 4]),
        CopyCase("quote", prompt, [1, 2, 3, 4, 9]),
        CopyCase("code_edit", prompt, [5, 6, 7]),
    ]
    requests = [
        finished([1, 2, 3, 4, 0], FinishReason.STOP),  # the end token is no part of the answer: 1 of 1
        finished([3, 4, 5, 6, 7, 8], FinishReason.LENGTH),  # 2 of 3
        finished([5, 0], FinishReason.STOP),  # too short
    ]
    results = copying_results(cases, requests)
    quote, overall = results["quote"], results["overall"]
    assert quote["share_of_4grams"] == 0.75
    assert quote["mean_share_of_records"] == pytest.approx(5 / 6, abs=1e-4)
    assert quote["equal_to_reference"] == 1
    assert quote["ended_by_itself"] == 1
    assert quote["reference_share"] == pytest.approx(2 / 3, abs=1e-4)
    assert overall["records"] == 3
    assert overall["without_4gram"] == 1
    assert overall["share_of_4grams"] == 0.75
    assert results["code_edit"]["mean_share_of_records"] == 0.0
    assert "qa_extractive" not in results
    assert results["reached"] is True


def test_a_loop_over_prompt_text_shows_in_both_figures() -> None:
    cases = [CopyCase("quote", [1, 1, 1, 1], [2]), CopyCase("quote", [1, 2], [2])]
    requests = [finished([1] * 43, FinishReason.LENGTH), finished([5, 6, 7, 8, 9], FinishReason.LENGTH)]
    overall = copying_results(cases, requests)["overall"]
    assert overall["share_of_4grams"] == pytest.approx(40 / 42, abs=1e-4)
    assert overall["mean_share_of_records"] == 0.5
    assert overall["looping"] == 1


def test_silence_does_not_count_as_free_of_loops() -> None:
    requests = [
        finished([*range(1, 20), 0], FinishReason.STOP),
        finished([3] * 30, FinishReason.LENGTH),
        finished([0], FinishReason.STOP),  # empty
        finished([4, 5, 0], FinishReason.STOP),  # short, ended by itself, with a text
        finished([4, 5], FinishReason.LENGTH),  # short, cut
    ]
    records = [PromptRecord(str(number), "w", "p", ()) for number in range(5)]
    results = loop_results(records, requests, ["long", "loop", "", "yes", "cut"])
    assert results["share_not_looping"] == 0.4
    assert results["reached"] is False
    assert (results["above_ratio"], results["without_4gram"], results["without_4gram_counted"], results["empty"]) == (1, 3, 1, 1)
    assert results["mean_output_tokens"] == pytest.approx((19 + 30 + 0 + 2 + 2) / 5)
    assert [entry["distinct_ratio"] for entry in results["per_output"]] == [1.0, 0.037, None, None, None]


def test_the_whole_evaluation_of_a_tiny_model(tiny_model: Path, corpus: Path, workloads: Path) -> None:
    options = EngineOptions(max_running=2, max_waiting=16)
    engine = Engine.load(ModelOptions(str(tiny_model), dtype="float32", threads=1), options, SpeculationOptions("llma"))
    args = argparse.Namespace(
        model=str(tiny_model),
        corpus=corpus,
        workloads=workloads,
        prompts=3,
        loop_tokens=24,
        copy_tokens=24,
    )
    results = evaluate(args, engine, Progress())
    copying, loops = results["copying"], results["loops"]
    assert copying["quote"]["records"] == copying["qa_extractive"]["records"] == 1
    assert copying["overall"]["records"] == 2
    assert copying["quote"]["equal_to_reference"] == 0
    assert copying["quote"]["reference_share"] > 0.5
    assert [entry["id"] for entry in loops["per_output"]] == ["a/1", "b/1", "a/2"]  # b/2 does not fit
    assert loops["outputs"] == 3
    assert all(1 <= entry["tokens"] <= 24 for entry in loops["per_output"])
    assert results["held_out"]["records"] == 3
    assert 3 < results["held_out"]["loss"] < 12
