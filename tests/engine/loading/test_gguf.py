"""GGUF files: the same model as its folder, and every file that is not a whole model refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.configs.slices import ModelOptions
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model import load_model, load_weights, model_revision
from outrider.engine.text.tokenizer import load_tokenizer, tokenizer_revision
from tests.helpers.models import SENTENCES

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.helpers.gguf_files import round_weights, save_gguf  # noqa: E402

F32, Q8_0, Q5_1 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "Q8_0", "Q5_1"))


def stock(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def file(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(Path(tmp_path_factory.mktemp("file")) / "tiny-llama.F32.gguf", stock(folder), folder)


@pytest.mark.parametrize("kind", [F32, Q8_0, Q5_1], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_folder(folder: str, tmp_path: Path, kind: Any) -> None:
    expected = stock(folder)
    path = save_gguf(tmp_path / "model.gguf", expected, folder, kind)
    if kind != F32:
        round_weights(expected, kind)
    found = load_weights(str(path), torch.float32, "sdpa")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)


def test_name_type_end_context_and_chat_template_come_out_of_the_file(file: Path, folder: str) -> None:
    (file.parent / "tokenizer.json").write_text("{}")  # what lies beside the file is not the model's
    loaded = load_model(ModelOptions(str(file), device="cpu"))
    assert (loaded.served_name, loaded.model.dtype, loaded.eos_token_ids) == ("tiny-llama.F32", torch.bfloat16, (0,))
    assert loaded.max_model_len == 256
    own = AutoTokenizer.from_pretrained(folder)
    for text in SENTENCES:
        assert loaded.tokenizer(text).input_ids == own(text).input_ids
    chat = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<user>hi>"
    assert load_model(ModelOptions(str(file), device="cpu", served_name="other")).served_name == "other"


def test_the_end_of_a_turn_ends_a_text(folder: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "turns.gguf", stock(folder), folder, extra={"tokenizer.ggml.eot_token_id": 7})
    assert load_model(ModelOptions(str(path), device="cpu")).eos_token_ids == (0, 7)


def test_texts_are_cut_as_the_file_says(folder: str, tmp_path: Path) -> None:
    model, text = stock(folder), "see:\n\n2. in 1999   42 '7x"
    plain, digits, unknown = (
        save_gguf(tmp_path / f"{name}.gguf", model, folder, extra={"tokenizer.ggml.pre": name})
        for name in ("gpt-2", "smollm", "deepseek-coder")
    )
    own = AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(str(plain))(text).input_ids == own(text).input_ids
    apart = pre_tokenizers.Digits(individual_digits=True)
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, own.backend_tokenizer.pre_tokenizer])
    found = load_tokenizer(str(digits))
    assert found(text).input_ids == own(text).input_ids and found.decode(found(text).input_ids) == text
    pieces = [piece for piece, _ in found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["see", ":", "ĊĊ", "2", ".", "Ġin", "Ġ", "1", "9", "9", "9", "ĠĠĠ", "4", "2", "Ġ'", "7", "x"]
    refused(unknown, "uses an unknown pre-tokenizer .deepseek-coder.: give the model's folder with tokenizer.json")


def test_file_and_folder_made_of_it_have_one_revision(file: Path, tmp_path: Path) -> None:
    from outrider.engine.loading.weights.gguf import convert_gguf

    convert_gguf(file, tmp_path)
    two = [load_model(ModelOptions(str(path), device="cpu")) for path in (file, tmp_path)]
    assert len({model_revision(one.model) for one in two}) == len({tokenizer_revision(one.tokenizer) for one in two}) == 1
    assert [one.model.dtype for one in two] == [torch.bfloat16] * 2


def refused(path: Path, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as error:
        load_model(ModelOptions(str(path), device="cpu"))
    assert "\n" not in str(error.value) and path.name in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 20, 400, 20_000, -1])
def test_a_file_that_is_cut_off(file: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:keep])
    refused(cut, "is truncated" if keep < 0 or keep == 20_000 else "could not be read: it is corrupt")
    with pytest.raises(ModelLoadError):
        load_tokenizer(str(cut))


def test_files_that_are_no_model(folder: str, tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "does not exist: give an existing .gguf file")
    other = tmp_path / "other.gguf"
    other.write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(other, "it does not begin with GGUF")
    other.write_bytes(b"GGUF" + bytes([9, 0, 0, 0]) + bytes(16))
    refused(other, "its version is 9; supported: 2 and 3")


def test_models_that_would_come_out_wrong(folder: str, tmp_path: Path) -> None:
    model = stock(folder)
    refused(save_gguf(tmp_path / "a.gguf", model, folder, architecture="novel"), "architecture novel is not supported")
    refused(save_gguf(tmp_path / "b.gguf", model, folder, without="blk.1.ffn_up"), "lacks 1 of its weights, model.layers.1.mlp")
    refused(save_gguf(tmp_path / "c.gguf", model, folder, extra={"split.count": 3}), "is one of 3 parts")
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    refused(save_gguf(tmp_path / "d.gguf", model, folder, tensors=factors), "uses rope scaling")
    refused(save_gguf(tmp_path / "g.gguf", model, folder, with_tokenizer=False), "has no tokenizer: give a file with one")
    rule = {"llama.rope.scaling.type": "yarn"}
    refused(save_gguf(tmp_path / "e.gguf", model, folder, extra=rule), "uses rope scaling")
    bias = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    refused(save_gguf(tmp_path / "f.gguf", model, folder, tensors=bias), "some are ignored")
