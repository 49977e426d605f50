"""The demo model's data and training, on a few generated records."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from experiments.training import train as train_demo_model
from experiments.training.data import (
    END_OF_TEXT,
    Windows,
    broken_off_loop,
    copy_task,
    encode,
    passages_of,
    relaid,
    train_tokenizer,
)

ZOO = "Zoo: The zoo opens at nine.\nIt closes at six, and on every second Sunday of the month it does not open at all."
LAKE = "Lake - Depth: The lake is deep. Nobody has measured it, but the fishermen lower their nets for a long time."
QA = (
    f"### Documents\n[1] {ZOO}\n[2] {LAKE}\n\n"
    "### Question\nWhen does the zoo open?\n\n### Answer\nThe zoo opens at nine.\n\n"
    "### Question\nIs the lake deep?\n\n### Answer\nYes."
)
MATH = "### Problem\nOne and one?\n\n### Solution\nThe answer is 2."
PROSE = "A paragraph.\n\nAnother paragraph about nothing in particular."
RECORDS = [{"text": text, "kind": "any"} for text in (QA, MATH, PROSE)] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([QA, MATH, PROSE], 320)


def test_answers_have_full_weight_and_end(tokenizer: Tokenizer) -> None:
    sequence = encode(QA, tokenizer)
    ids = sequence.tokens.tolist()
    answers = tokenizer.decode(
        [token for token, weight in zip(ids, sequence.weights, strict=True) if weight == 1.0], skip_special_tokens=False
    )
    assert answers == f"The zoo opens at nine.{END_OF_TEXT}Yes.{END_OF_TEXT}"
    assert tokenizer.decode(ids) == QA
    assert encode(PROSE, tokenizer).weights.min() == 1.0
    assert encode(MATH, tokenizer).tokens[-1] == tokenizer.token_to_id(END_OF_TEXT)


def test_passages_and_layouts() -> None:
    assert passages_of(QA) == [ZOO, LAKE]
    assert passages_of(PROSE) == [] and relaid(PROSE, np.random.default_rng(0)) == PROSE
    assert relaid(MATH, np.random.default_rng(0)).startswith("### Question\nOne and one?\n\n### Answer\n")
    single = QA.partition("\n\n### Question\nIs")[0]
    for seed in range(8):
        moved = relaid(single, np.random.default_rng(seed))
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
            assert line[used] == end and not weights[row, used:].any()  # the rest is padding that counts for nothing
    assert np.array_equal(
        Windows(RECORDS, tokenizer, 300, 5).batch(2, 0.5)[0], Windows(RECORDS, tokenizer, 300, 5).batch(2, 0.5)[0]
    )


def test_in_a_broken_off_loop_every_token_should_have_been_the_end(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END_OF_TEXT)
    single = encode(QA.partition("\n\n### Question\nIs")[0], tokenizer)
    answer = int(np.flatnonzero(single.weights < 1.0)[-1]) + 1
    for seed in range(30):
        looped = broken_off_loop(single, end, np.random.default_rng(seed))
        assert looped.targets is not None
        tokens, targets, weights = looped.tokens.tolist(), looped.targets.tolist(), looped.weights.tolist()
        cut = next(i for i in range(answer, len(tokens)) if weights[i] == 0.0)  # the first repetition counts for nothing
        assert tokens[:cut] == targets[:cut] == single.tokens[:cut].tolist() and cut > answer + 5
        span, first = tokens[cut:-1], next(i for i in range(cut, len(tokens)) if weights[i] == 1.0)
        size = next(n for n in range(1, len(span) + 1) if len(span) % n == 0 and span == tokens[cut - n : cut] * (len(span) // n))
        assert len(span) // size >= 2 and cut - size >= answer and first >= cut + size
        assert not any(weights[cut:first]) and all(weight == 1.0 for weight in weights[first:])
        assert targets[first:] == [end] * (len(tokens) - first) and tokens[-1] == end
    short = encode("### Problem\nA?\n\n### Solution\n2", tokenizer)
    assert broken_off_loop(short, end, np.random.default_rng(0)) is short


def settings(out: Path, corpus: Path) -> argparse.Namespace:
    arguments = [
        "--corpus",
        str(corpus),
        "--out",
        str(out),
        "--steps",
        "4",
        "--decay-steps",
        "2",
        "--rows",
        "2",
        "--window",
        "96",
    ]
    arguments += [
        "--vocab-size",
        "320",
        "--hidden-size",
        "128",
        "--layers",
        "2",
        "--intermediate-size",
        "64",
        "--copy-steps",
        "1",
    ]
    return train_demo_model.arguments([*arguments, "--evaluate-every", "2", "--device", "cpu", "--threads", "1"])


def test_the_model_copies_before_it_is_trained() -> None:
    args = train_demo_model.arguments(["--corpus", ".", "--out", "."])
    torch.manual_seed(0)
    model = train_demo_model.build_model(args).eval()
    span = torch.randint(1, args.vocab_size, (1, 60), generator=torch.Generator().manual_seed(1))

    def copied() -> float:
        with torch.inference_mode():
            best = model(torch.cat([span, span], 1), use_cache=False).logits[0].argmax(-1)
        return float((best[60:-1] == span[0, 1:]).float().mean())

    assert copied() < 0.1
    train_demo_model.start_with_induction(model, seed=0)
    assert copied() > 0.8


def test_a_run_can_be_cut_and_resumed_and_ends_in_a_model_that_serves(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    for name in ("train-00", "valid"):
        with gzip.open(corpus / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in RECORDS)
    args = settings(out, corpus)
    args.steps = 3
    train_demo_model.train(args)
    args = settings(out, corpus)
    args.resume = True
    train_demo_model.train(args)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [2, 3, 4] and all(np.isfinite(row["loss"]) for row in metrics)

    from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
    from decoding.request import Request, SamplingParams
    from engine.engine import Engine
    from engine.text.chat import render_chat

    engine = Engine.load(ModelOptions(str(out / "model")), EngineOptions(), SpeculationOptions())
    assert engine.info.dtype == "bfloat16" and engine.info.eos_token_ids == (0,) and engine.tokenizer is not None
    prompt = render_chat(engine.tokenizer, [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}])
    assert engine.tokenizer.decode(prompt) == "Be short.\n\n### Question\nHello?\n\n### Answer\n"
    engine.add(Request("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
    while engine.has_work:
        outputs = engine.step()
    assert outputs[-1].stats is not None
