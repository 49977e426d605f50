"""A revision stands for contents: the same wherever they lie, another when anything in them changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.configs.schema import REPOSITORY
from outrider.configs.slices import ModelOptions
from outrider.engine.loading.model import load_model, model_revision
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import load_tokenizer, tokenizer_revision
from tests.helpers.models import llama_config, save_model


def model_folder(tmp_path: Path, seed: int = 0) -> str:
    return str(save_model(tmp_path / f"model-{seed}", llama_config(), seed))


def test_the_revision_is_of_the_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(ModelOptions(model_folder(tmp_path)))
    again = load_model(ModelOptions(str(save_model(tmp_path / "elsewhere", llama_config()))))
    other = load_model(ModelOptions(model_folder(tmp_path, seed=1)))
    half = load_model(ModelOptions(model_folder(tmp_path), dtype="bfloat16"))
    for limit in (2**28, 0):  # hashed whole, and sampled
        monkeypatch.setattr("outrider.engine.loading.model._HASH_WHOLE_BYTES", limit)
        own = model_revision(loaded.model)
        assert own == model_revision(again.model)
        assert len({own, model_revision(other.model), model_revision(half.model)}) == 3
    monkeypatch.setattr("outrider.engine.loading.model._HASH_WHOLE_BYTES", 2**28)
    before = model_revision(loaded.model)
    with torch.no_grad():
        loaded.model.lm_head.weight[5, 7] += 0.001
    assert model_revision(loaded.model) != before
    again.model.config.rope_parameters["rope_theta"] = 5000.0
    assert model_revision(again.model) != before


def test_the_tokenizer_has_a_revision_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder(tmp_path))
    own = tokenizer_revision(tokenizer)
    assert own == tokenizer_revision(load_tokenizer(model_folder(tmp_path, seed=1)))
    tokenizer.add_tokens(["<new>"])
    assert len({own, tokenizer_revision(tokenizer), tokenizer_revision(None)}) == 3


ALONE = """
import sys
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import load_tokenizer_alone, tokenizer_revision
tokenizer = load_tokenizer_alone(sys.argv[1])
print(tokenizer_revision(tokenizer), render_chat(tokenizer, [{"role": "user", "content": "hi"}]), {"torch"} & set(sys.modules))
"""


def test_a_process_without_torch_has_the_same_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    command = [sys.executable, "-c", ALONE, folder]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    tokenizer = load_tokenizer(folder)
    expected = f"{tokenizer_revision(tokenizer)} {render_chat(tokenizer, [{'role': 'user', 'content': 'hi'}])} set()\n"
    assert (run.stdout, run.stderr) == (expected, "")
