"""Tables of a model: their contents, and the files that keep them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, OPTConfig, PreTrainedConfig

from outrider.configs.slices import ModelOptions
from outrider.decoding.arrays import Int32Array
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import load_model
from outrider.engine.loading.model_tables import (
    TableProgress,
    bigram_table,
    cached_table,
    unigram_distances,
    unigram_ranking,
)
from tests.helpers.models import VOCAB, llama_config, save_model

WIDTH = 6


def model_folder(tmp_path: Path, config: PreTrainedConfig | None = None, seed: int = 0) -> str:
    return str(save_model(tmp_path / f"model-{seed}", config or llama_config(), seed))


def positions(vocab: int) -> dict[str, PreTrainedConfig]:
    """Rotary, learned and windowed positions: a row must be computed at its own position, and not at its place in the forward."""
    common = {"vocab_size": vocab, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 0}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **common}
    return {
        "llama": llama_config(),
        "gpt2": GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, **common),
        "opt": OPTConfig(
            max_position_embeddings=64, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
            num_attention_heads=4, vocab_size=vocab, init_std=0.3, bos_token_id=None, eos_token_id=0, pad_token_id=1,
        ),
        "mistral": MistralConfig(num_key_value_heads=2, sliding_window=8, max_position_embeddings=64, **small),
    }  # fmt: skip


@pytest.mark.parametrize("bos", [None, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mistral"])
def test_bigrams_are_what_the_stock_model_says_of_each_token(tmp_path: Path, name: str, bos: int | None) -> None:
    folder = model_folder(tmp_path, positions(VOCAB)[name])
    runner = ModelRunner(load_model(ModelOptions(folder, dtype="float64")).model, slots=1, capacity=48)  # several forwards
    table = bigram_table(runner, VOCAB, WIDTH, bos)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    context = torch.arange(VOCAB)[:, None]
    if bos is not None:
        context = torch.cat([torch.full_like(context, bos), context], dim=1)
    with torch.inference_mode():
        logits = stock(context).logits[:, -1]
    best = torch.topk(logits, WIDTH)
    assert table.shape == (VOCAB, WIDTH) and table.dtype == np.int32
    found = logits.gather(1, torch.from_numpy(table).long())
    torch.testing.assert_close(found, best.values, rtol=1e-9, atol=1e-9)  # by value: equal logits may stand in any order
    assert (table == best.indices.numpy()).mean() > 0.99


def test_unigram_distances_are_the_sum_over_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, outputs = torch.eye(2), torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]])
    assert unigram_distances(inputs, outputs).tolist() == [2.0, 2.0, 4.0]
    inputs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # the first dimension counts twice
    assert unigram_distances(inputs, outputs).tolist() == [3.0, 3.0, 4.0]
    monkeypatch.setattr("outrider.engine.loading.model_tables._EMBEDDING_ROWS", 7)  # several parts
    generator = torch.Generator().manual_seed(3)
    inputs, outputs = (torch.randn(30, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = torch.stack([sum((u @ v) ** 2 for v in inputs) for u in outputs - outputs.mean(0)])
    torch.testing.assert_close(unigram_distances(inputs, outputs), expected)


def test_unigram_ranking_of_a_model(folder: str) -> None:
    model = load_model(ModelOptions(folder, dtype="bfloat16")).model
    ranking = unigram_ranking(model, VOCAB)
    distances = unigram_distances(model.get_input_embeddings().weight.float(), model.get_output_embeddings().weight.float())
    assert ranking.dtype == np.int32 and sorted(ranking.tolist()) == list(range(VOCAB))
    assert bool((distances[torch.from_numpy(ranking).long()].diff() >= 0).all())
    model.lm_head = torch.nn.Linear(32, VOCAB)  # of another width
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no unigram ranking"):
        unigram_ranking(model, VOCAB)


class Builder:
    def __init__(self, table: list[list[int]]) -> None:
        self.table, self.calls = np.array(table, np.int32), 0

    def __call__(self) -> Int32Array:
        self.calls += 1
        return self.table


TABLE = [[3, 1], [0, 2]]


def test_a_table_is_built_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, build = tmp_path / "a" / "b", Builder(TABLE)
    for _ in range(2):
        table = cached_table(folder, "t", (2, 2), 4, build)
        assert table.tolist() == TABLE and table.dtype == np.int32
    assert build.calls == 1
    table += 1  # a caller's changes stay with the caller
    assert cached_table(folder, "t", (2, 2), 4, build).tolist() == TABLE
    cached_table(folder, "other", (2, 2), 4, build)
    assert build.calls == 2
    assert not [path.name for path in folder.iterdir() if path.suffix != ".npy"]  # nothing half written is left
    assert not caplog.records
    (tmp_path / "file").write_text("in the way")
    assert cached_table(tmp_path / "file" / "below", "t", (2, 2), 4, build).tolist() == TABLE
    assert caplog.records and build.calls == 3


def damaged(content: bytes) -> list[bytes]:
    """Ways in which a file can be wrong, each header character among them."""
    flipped = [content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :] for at in range(120)]
    return [b"", b"PK\x03\x04", b"no table", content[:-3], content[:40], *(wrong for wrong in flipped if wrong != content)]


def test_damaged_files_and_other_tables_are_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached_table(tmp_path, "t", (2, 2), 4, Builder(TABLE))
    (path,) = tmp_path.iterdir()
    content, rebuilt = path.read_bytes(), 0
    for wrong in damaged(content):
        path.write_bytes(wrong)
        caplog.clear()
        build = Builder(TABLE)
        assert cached_table(tmp_path, "t", (2, 2), 4, build).tolist() == TABLE
        assert build.calls == len(caplog.records)
        rebuilt += build.calls
    assert rebuilt > 100  # some characters of a header do not count
    for other in (
        np.zeros((2, 3), np.int32),
        np.zeros((2, 2), np.int64),
        np.array([[0, 4], [0, 0]], np.int32),
        np.array([[0, -1], [0, 0]], np.int32),
        np.array([[{}, 1], [2, 3]], dtype=object),
    ):
        np.save(path, other, allow_pickle=True)
        build = Builder(TABLE)
        assert cached_table(tmp_path, "t", (2, 2), 4, build).tolist() == TABLE and build.calls == 1
        assert np.load(path).tolist() == TABLE


def test_progress_is_shown_for_what_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 9.0])
    progress = TableProgress("building", 200, clock=lambda: next(times))
    with caplog.at_level(logging.WARNING):
        for done in (20, 50, 60, 150):
            progress.update(done)
    assert caplog.messages == ["building: 25 % done, about 9 s left", "building: 75 % done, about 3 s left"]
