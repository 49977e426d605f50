"""Training data and training of the demo models, the evaluation of the demo model, and the distillation of a draft model."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outrider.cluster.cli.generate.prompt_file import PromptRecord
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.text.chat import render_chat
from outrider.experiments.bench.progress import Progress
from outrider.experiments.training import distill, evaluate, train
from outrider.experiments.training.data import (
    END_OF_TEXT,
    Windows,
    broken_off_loop,
    copy_task,
    encode,
    passages_of,
    relaid,
    train_tokenizer,
)
from outrider.experiments.training.evaluate import CopyCase, copied, copying_results, distinct_ratio, four_grams, loop_results
from tests.experiments.conftest import CORPUS
from tests.helpers.models import llama_config, run, save_model

ZOO = "Zoo: The zoo opens at nine.\nIt closes at six, and on every second Sunday of the month it does not open at all."
LAKE = "Lake - Depth: The lake is deep. Nobody has measured it, but the fishermen lower their nets for a long time."
QA = (
    f"### Documents\n[1] {ZOO}\n[2] {LAKE}\n\n"
    "### Question\nWhen does the zoo open?\n\n### Answer\nThe zoo opens at nine.\n\n"
    "### Question\nIs the lake deep?\n\n### Answer\nYes."
)
SINGLE = QA.partition("\n\n### Question\nIs")[0]
MATH = "### Problem\nOne and one?\n\n### Solution\nThe answer is 2."
PROSE = "A paragraph.\n\nAnother paragraph about nothing in particular."
RECORDS = [{"text": text, "kind": "any"} for text in (QA, MATH, PROSE)] * 4


def flags(**values: object) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def write_corpus(folder: Path, records: Sequence[Mapping[str, str]]) -> Path:
    for name in ("train-00", "valid"):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([QA, MATH, PROSE], 320)


def test_answers_have_full_weight_and_end(tokenizer: Tokenizer) -> None:
    sequence = encode(QA, tokenizer)
    ids = sequence.tokens.tolist()
    learned = [token for token, weight in zip(ids, sequence.weights, strict=True) if weight == 1.0]
    answers = tokenizer.decode(learned, skip_special_tokens=False)
    assert answers == f"The zoo opens at nine.{END_OF_TEXT}Yes.{END_OF_TEXT}"
    assert tokenizer.decode(ids) == QA
    assert encode(PROSE, tokenizer).weights.min() == 1.0
    assert encode(MATH, tokenizer).tokens[-1] == tokenizer.token_to_id(END_OF_TEXT)


def test_passages_and_layouts() -> None:
    assert passages_of(QA) == [ZOO, LAKE]
    assert passages_of(PROSE) == [] and relaid(PROSE, np.random.default_rng(0)) == PROSE
    assert relaid(MATH, np.random.default_rng(0)).startswith("### Question\nOne and one?\n\n### Answer\n")
    for seed in range(8):
        moved = relaid(SINGLE, np.random.default_rng(seed))
        assert moved.startswith("### Question\n") and moved.endswith("### Answer\nThe zoo opens at nine.")
        assert LAKE in moved and "When does the zoo open?" in moved
    task = copy_task(passages_of(QA), np.random.default_rng(1))
    assert task.rpartition("### Answer\n")[2] in passages_of(QA)


def test_windows_hold_whole_sequences(tokenizer: Tokenizer) -> None:
    windows = Windows(RECORDS, tokenizer, 300, seed=1)
    end = tokenizer.token_to_id(END_OF_TEXT)
    for _ in range(5):
        tokens, targets, weights = windows.batch(3, copy_share=0.0)
        assert tokens.shape == (3, 301) and targets.shape == weights.shape == (3, 300)
        assert ((targets == tokens[:, 1:]) | (targets == end)).all()
        for row, line in enumerate(tokens):
            used = int(np.flatnonzero(line != 0).max()) + 1
            assert line[used] == end and not weights[row, used:].any()  # the rest is padding without weight
    one, two = (Windows(RECORDS, tokenizer, 300, 5).batch(2, 0.5)[0] for _ in range(2))
    assert np.array_equal(one, two)


def test_targets_of_an_interrupted_loop_are_the_end(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END_OF_TEXT)
    single = encode(SINGLE, tokenizer)
    answer = int(np.flatnonzero(single.weights < 1.0)[-1]) + 1
    for seed in range(30):
        looped = broken_off_loop(single, end, np.random.default_rng(seed))
        assert looped.targets is not None
        tokens, targets, weights = looped.tokens.tolist(), looped.targets.tolist(), looped.weights.tolist()
        cut = next(i for i in range(answer, len(tokens)) if weights[i] == 0.0)  # the first repetition has no weight
        assert tokens[:cut] == targets[:cut] == single.tokens[:cut].tolist() and cut > answer + 5
        span, first = tokens[cut:-1], next(i for i in range(cut, len(tokens)) if weights[i] == 1.0)
        size = next(n for n in range(1, len(span) + 1) if len(span) % n == 0 and span == tokens[cut - n : cut] * (len(span) // n))
        assert len(span) // size >= 2 and cut - size >= answer and first >= cut + size
        assert not any(weights[cut:first]) and all(weight == 1.0 for weight in weights[first:])
        assert targets[first:] == [end] * (len(tokens) - first) and tokens[-1] == end
    short = encode("### Problem\nA?\n\n### Solution\n2", tokenizer)
    assert broken_off_loop(short, end, np.random.default_rng(0)) is short


def test_model_copies_before_it_is_trained() -> None:
    args = train.arguments(["--corpus", ".", "--out", "."])
    torch.manual_seed(0)
    model = train.build_model(args).eval()
    span = torch.randint(1, args.vocab_size, (1, 60), generator=torch.Generator().manual_seed(1))

    def copied_share() -> float:
        with torch.inference_mode():
            best = model(torch.cat([span, span], 1), use_cache=False).logits[0].argmax(-1)
        return float((best[60:-1] == span[0, 1:]).float().mean())

    assert copied_share() < 0.1
    train.start_with_induction(model, seed=0)
    assert copied_share() > 0.8


def test_training_resumes_and_ends_in_a_model_that_serves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = flags(
        corpus=write_corpus(tmp_path, RECORDS), out=out, decay_steps=2, rows=2, window=96, vocab_size=320, hidden_size=128,
        layers=2, intermediate_size=64, copy_steps=1, evaluate_every=2, device="cpu", threads=1,
    )  # fmt: skip
    train.train(train.arguments([*command, "--steps", "3"]))
    train.train(train.arguments([*command, "--steps", "4", "--resume"]))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [2, 3, 4] and all(np.isfinite(row["loss"]) for row in metrics)
    assert ElementTree.parse(out / "loss.svg").getroot().tag.endswith("svg")
    engine = Engine.load(ModelOptions(str(out / "model")), EngineOptions(), SpeculationOptions())
    assert engine.info.dtype == "bfloat16" and engine.info.eos_token_ids == (0,) and engine.tokenizer is not None
    prompt = render_chat(engine.tokenizer, [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}])
    assert engine.tokenizer.decode(prompt) == "Be short.\n\n### Question\nHello?\n\n### Answer\n"
    assert len(run(engine, Request("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))[0]) == 5


def finished(output: list[int], reason: FinishReason) -> Request:
    """Return a finished request."""
    request = Request("r", [1], SamplingParams(max_tokens=64))
    request.commit(output)
    request.finish_reason = reason
    return request


def test_four_grams() -> None:
    assert four_grams([1, 2, 3, 4, 5]) == [(1, 2, 3, 4), (2, 3, 4, 5)] and four_grams([1, 2, 3]) == []
    assert copied([1, 2, 3, 4, 5], [9, 1, 2, 3, 4]) == (1, 2)
    assert copied([1, 1, 1, 1, 1, 1], [1, 1, 1, 1]) == (3, 3)  # each occurrence counts
    assert copied([1, 2], [1, 2, 3, 4]) == (0, 0)
    ratios = [distinct_ratio(ids) for ids in ([1, 2, 1, 2, 1, 2], [7] * 40, [*range(10)])]
    assert ratios == pytest.approx([2 / 3, 1 / 37, 1.0]) and distinct_ratio([1, 2, 3]) is None


def test_copying_means_over_four_grams_and_over_records() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    cases = [
        CopyCase("quote", prompt, [1, 2, 3, 4]),
        CopyCase("quote", prompt, [1, 2, 3, 4, 9]),
        CopyCase("code_edit", prompt, [5, 6, 7]),
    ]
    requests = [
        finished([1, 2, 3, 4, 0], FinishReason.STOP),  # without the end token: 1 of 1
        finished([3, 4, 5, 6, 7, 8], FinishReason.LENGTH),  # 2 of 3
        finished([5, 0], FinishReason.STOP),  # too short
    ]
    results = copying_results(cases, requests)
    quote, overall = results["quote"], results["overall"]
    assert (quote["share_of_4grams"], quote["equal_to_reference"]) == (0.75, 1)
    assert quote["mean_share_of_records"] == pytest.approx(5 / 6, abs=1e-4)
    assert quote["reference_share"] == pytest.approx(2 / 3, abs=1e-4)
    assert (overall["records"], overall["without_4gram"], overall["share_of_4grams"]) == (3, 1, 0.75)
    assert results["code_edit"]["mean_share_of_records"] == 0.0 and "qa_extractive" not in results
    assert results["reached"] is True


def test_loop_over_prompt_text_lowers_the_mean_of_records() -> None:
    cases = [CopyCase("quote", [1, 1, 1, 1], [2]), CopyCase("quote", [1, 2], [2])]
    requests = [finished([1] * 43, FinishReason.LENGTH), finished([5, 6, 7, 8, 9], FinishReason.LENGTH)]
    overall = copying_results(cases, requests)["overall"]
    assert overall["share_of_4grams"] == pytest.approx(40 / 42, abs=1e-4)
    assert (overall["mean_share_of_records"], overall["looping"]) == (0.5, 1)


def test_empty_and_cut_outputs_do_not_count_as_free_of_loops() -> None:
    requests = [
        finished([*range(1, 20), 0], FinishReason.STOP),
        finished([3] * 30, FinishReason.LENGTH),
        finished([0], FinishReason.STOP),  # empty
        finished([4, 5, 0], FinishReason.STOP),  # short, ended by itself, with a text
        finished([4, 5], FinishReason.LENGTH),  # short, cut
    ]
    records = [PromptRecord(str(number), "w", "p", ()) for number in range(5)]
    results = loop_results(records, requests, ["long", "loop", "", "yes", "cut"])
    assert (results["share_not_looping"], results["reached"]) == (0.4, False)
    assert (results["without_4gram"], results["without_4gram_counted"], results["empty"]) == (3, 1, 1)
    assert results["mean_output_tokens"] == pytest.approx((19 + 30 + 0 + 2 + 2) / 5)
    assert [entry["distinct_ratio"] for entry in results["per_output"]] == [1.0, 0.037, None, None, None]


def test_evaluation_of_a_tiny_model(tiny_model: Path, corpus: Path, workloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOP_PROMPTS", 3), ("LOOP_TOKENS", 24), ("COPY_TOKENS", 24)):
        monkeypatch.setattr(evaluate, name, value)
    engine = Engine.load(
        ModelOptions(str(tiny_model), dtype="float32", threads=1),
        EngineOptions(max_running=2, max_waiting=16),
        SpeculationOptions("llma"),
    )
    args = argparse.Namespace(model=str(tiny_model), corpus=corpus, workloads=workloads)
    results = evaluate.evaluate(args, engine, Progress())
    copying, loops = results["copying"], results["loops"]
    assert copying["quote"]["records"] == copying["qa_extractive"]["records"] == 1
    assert (copying["overall"]["records"], copying["quote"]["equal_to_reference"]) == (2, 0)
    assert copying["quote"]["reference_share"] > 0.5
    assert [entry["id"] for entry in loops["per_output"]] == ["a/1", "b/1", "a/2"]  # b/2 does not fit
    assert loops["outputs"] == 3 and all(1 <= entry["tokens"] <= 24 for entry in loops["per_output"])
    assert results["held_out"]["records"] == 3 and 3 < results["held_out"]["loss"] < 12


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model with a chat template, and a corpus."""
    folder = tmp_path_factory.mktemp("distilled")
    model = save_model(folder / "model", llama_config(num_hidden_layers=3))
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return model, write_corpus(folder, CORPUS * 4)


def test_distillation_learns_resumes_and_drafts(
    files: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, corpus = files
    sizes = flags(model=model, corpus=corpus, out=tmp_path, vocabulary=80, answers=4, texts=3, held_out=2, threads=1)
    command = ["--layers", "0", "-1", *sizes]
    distill.distill(distill.arguments([*command, "--steps", "20"]))
    answers = (tmp_path / "answers.jsonl").read_text()
    assert answers.count("\n") == 4 and not (tmp_path / "model.gguf").exists()
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert first["step"] == 20 and "of the tokens as the model's" in capfd.readouterr().err
    distill.distill(distill.arguments([*command, "--steps", "22"]))
    assert (tmp_path / "answers.jsonl").read_text() == answers
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 22
    outputs = []
    drafting = SpeculationOptions("speculative", draft_model=str(tmp_path / "model"))
    for speculation in (SpeculationOptions("autoregressive"), drafting):
        engine = Engine.load(ModelOptions(path=str(model), threads=1), EngineOptions(max_running=1), speculation)
        outputs.append(run(engine, Request("r", np.arange(3, 40, dtype=np.int32), SamplingParams(max_tokens=24))))
    assert outputs[0] == outputs[1]


def test_draft_model_of_all_layers_equals_the_model(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = distill.load_weights(str(files[0]), distill.training_dtype(), "sdpa").eval()
    pairs = [([5, 9, 11, 7, 30], [12, 40, 41]), ([8, 3, 2], [1, 2, 3, 4])]
    texts = distill.read(tmp_path / "texts", model, pairs, 0.5, Progress())
    for text, (prompt, output) in zip(texts, pairs, strict=True):
        assert text.tokens.tolist() == prompt + output
        assert text.positions[-len(output) :].tolist() == list(range(len(prompt) - 1, len(prompt) + len(output) - 1))
    again = distill.read(tmp_path / "texts", None, pairs, 0.5, Progress())  # type: ignore[arg-type]  # nothing is computed
    assert all(
        np.array_equal(one.ids, two.ids) and np.array_equal(one.positions, two.positions)
        for one, two in zip(texts, again, strict=True)
    )
    whole = distill.agreement(distill.draft_model(model, [0, 1, 2]), texts)
    assert whole > 0.8  # float32 layers beside bfloat16 ones: random weights have near-ties
    entropy = np.concatenate([-(np.exp(text.log_probs) * text.log_probs).sum(1) for text in texts]).mean()
    assert distill.loss_of(distill.draft_model(model, [0, 1, 2]), texts).item() == pytest.approx(entropy, rel=0.02)
    assert distill.loss_of(distill.draft_model(model, [1]), texts).item() > entropy
    with pytest.raises(ValueError, match="--layers"):
        distill.draft_model(model, [3])


def test_draft_model_with_fewer_tokens_drafts_no_other(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = distill.load_weights(str(files[0]), distill.training_dtype(), "sdpa").eval()
    pairs = [([5, 9, 11, 7, 30], [12, 40, 41]), ([8, 3, 2], [1, 2, 3, 4])]
    texts = distill.read(tmp_path / "texts", model, pairs, 0.5, Progress())
    ids = distill.likeliest(texts, 35, model.config.vocab_size)
    mass = sum(np.bincount(text.ids.ravel(), np.exp(text.log_probs).ravel(), model.config.vocab_size) for text in texts)
    assert len(ids) == 35 and ids == sorted(ids) and mass[ids].min() >= np.delete(mass, ids).max()
    small, whole = distill.draft_model(model, [0, 1, 2], ids), distill.draft_model(model, [0, 1, 2])
    (_, ours), (_, all_tokens) = next(distill.log_probs(small, texts)), next(distill.log_probs(whole, texts))
    assert ours.shape[1] == 35  # the law is the whole one without the other tokens, which can be read
    torch.testing.assert_close(ours.exp(), all_tokens[:, ids].softmax(-1), atol=1e-3, rtol=0.05)
    assert torch.isfinite(distill.loss_of(small, texts))
    assert 0 < distill.agreement(small, texts) <= 1
    with pytest.raises(ValueError, match="--vocabulary 400000 must be from 1 to the model's"):
        distill.likeliest(texts, 400_000, model.config.vocab_size)
