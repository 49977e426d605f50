"""A draft model is distilled from a tiny model, gone on with, and drafts for it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from experiments.training import distill
from tests.experiments.conftest import CORPUS
from tests.helpers.models import llama_config, run, save_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with a chat template, and a corpus."""
    folder = tmp_path_factory.mktemp("distilled")
    model = save_model(folder / "model", llama_config(num_hidden_layers=3))
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    for name in ("train-00", "valid"):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in CORPUS * 4)
    return model, folder


def settings(files: tuple[Path, Path], out: Path, steps: int, layers: list[int]) -> list[str]:
    model, corpus = files
    options = {
        "model": model,
        "corpus": corpus,
        "out": out,
        "answers": 4,
        "texts": 3,
        "held-out": 2,
        "steps": steps,
        "threads": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--layers", *map(str, layers)]


def test_it_learns_goes_on_and_drafts(files: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    distill.distil(distill.arguments(settings(files, tmp_path, 20, [0, -1])))
    answers = (tmp_path / "answers.jsonl").read_text()
    assert answers.count("\n") == 4 and not (tmp_path / "model.gguf").exists()
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert first["step"] == 20 and "of the tokens as the model's" in capfd.readouterr().err
    distill.distil(distill.arguments(settings(files, tmp_path, 22, [0, -1])))
    assert (tmp_path / "answers.jsonl").read_text() == answers
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 22
    outputs = []
    for speculation in (
        SpeculationOptions("autoregressive"),
        SpeculationOptions("speculative", draft_model=str(tmp_path / "model")),
    ):
        engine = Engine.load(ModelOptions(path=str(files[0]), threads=1), EngineOptions(max_running=1), speculation)
        outputs.append(run(engine, Request("r", np.arange(3, 40, dtype=np.int32), SamplingParams(max_tokens=24))))
    assert outputs[0] == outputs[1]


def test_what_all_layers_say_is_what_the_model_says(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = distill.load_weights(str(files[0]), torch.bfloat16, "sdpa").eval()
    pairs = [([5, 9, 11, 7, 30], [12, 40, 41]), ([8, 3, 2], [1, 2, 3, 4])]
    texts = distill.read(tmp_path / "texts", model, pairs, 0.5, 0, distill.Progress())
    for text, (prompt, output) in zip(texts, pairs, strict=True):
        assert text.tokens.tolist() == prompt + output
        assert text.positions[-len(output) :].tolist() == list(range(len(prompt) - 1, len(prompt) + len(output) - 1))
    again = distill.read(tmp_path / "texts", None, pairs, 0.5, 0, distill.Progress())  # type: ignore[arg-type]  # nothing is computed
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
