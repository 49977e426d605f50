"""What a drafter may ask of the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine import target as target_module
from outrider.engine.engine import Engine
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel, load_model
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.loading.model_tables import bigram_table
from outrider.engine.target import LocalTarget
from tests.helpers.models import END, VOCAB, llama_config, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(Path(tmp_path_factory.mktemp("model")), llama_config(tie_word_embeddings=True), seed=4))


@pytest.fixture(scope="module")
def loaded(folder: str) -> LoadedModel:
    return load_model(ModelOptions(folder, dtype="float64"))


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded.model, slots=2, capacity=100)


def info(max_model_len: int = 90) -> ModelInfo:
    return ModelInfo("m", max_model_len, VOCAB, "float64", "cpu", 1, (0, 5), "ngrammys", True, "tiny", "none")


def cut_by(loaded: LoadedModel, end: str, begin: int | None, adds: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer with another name of the token that ends a text, and one that begins it, which it adds or not."""
    from tokenizers import processors

    backend = type(loaded.tokenizer.backend_tokenizer).from_str(loaded.tokenizer.backend_tokenizer.to_str().replace(END, end))
    name = None if begin is None else backend.id_to_token(begin)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=name)
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, begin)]
        )
    return tokenizer


def test_what_it_says_of_the_model(runner: ModelRunner, tmp_path: Path) -> None:
    target = LocalTarget(runner, info(), None, tmp_path)
    assert (target.vocab_size, target.end_token_ids, target.max_model_len) == (VOCAB, (0, 5), 90)


def test_tables_are_kept_and_narrower_ones_are_cut_from_them(
    runner: ModelRunner, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bigram_table(runner, VOCAB, 32, loaded.tokenizer.eos_token_id)
    first = LocalTarget(runner, info(), loaded.tokenizer, tmp_path)
    assert (first.bigram_table(10) == expected[:, :10]).all() and first.bigram_table(10).flags.c_contiguous
    ranking = first.unigram_ranking(VOCAB)
    assert len(list(tmp_path.iterdir())) == 2

    def built(*_: object) -> None:
        raise AssertionError("built twice")

    monkeypatch.setattr(target_module, "bigram_table", built)
    monkeypatch.setattr(target_module, "unigram_ranking", built)
    second = LocalTarget(runner, info(), loaded.tokenizer, tmp_path)
    for width in (1, 8, 32):
        assert (second.bigram_table(width) == expected[:, :width]).all()
    assert (second.unigram_ranking(7) == ranking[:7]).all()
    with pytest.raises(AssertionError, match="built twice"):
        second.bigram_table(33)


def test_before_each_token_stands_what_begins_or_ends_a_text(
    runner: ModelRunner, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tokenizer adds, what stands between texts, the tokenizer's or the configuration's beginning, the end, nothing."""
    config, between = loaded.model.config, loaded.tokenizer.convert_tokens_to_ids(END)
    cases: list[tuple[PreTrainedTokenizerFast | None, int | None, tuple[int, ...], int | None]] = [
        (cut_by(loaded, END, 7, adds=True), 9, (5,), 7),
        (cut_by(loaded, END, 7), 9, (5,), between),
        (cut_by(loaded, "<e>", 7), 9, (5,), 7),
        (cut_by(loaded, "<e>", None), 9, (5,), 9),
        (cut_by(loaded, "<e>", None), VOCAB, (5,), 5),  # no token of this model
        (None, None, (5, 6), 5),
        (None, None, (), None),
    ]
    for tokenizer, bos, ends, before in cases:
        monkeypatch.setattr(config, "bos_token_id", bos)
        target = LocalTarget(runner, replace(info(), eos_token_ids=ends), tokenizer, tmp_path)
        assert (target.bigram_table(4) == bigram_table(runner, VOCAB, 4, before)).all(), (bos, ends)
    alone, behind = (bigram_table(runner, VOCAB, 4, before) for before in (None, 5))
    assert (alone != behind).any()
    kept = {path.name.split("-")[-2] for path in tmp_path.iterdir()}
    assert kept == {f"bos{between}", "bos7", "bos9", "bos5", "alone"}  # a file each


def test_widths_outside_the_vocabulary(runner: ModelRunner, tmp_path: Path) -> None:
    target = LocalTarget(runner, info(), None, tmp_path)
    for width in (0, VOCAB + 1):
        with pytest.raises(ValueError, match="width"):
            target.bigram_table(width)
        with pytest.raises(ValueError, match="width"):
            target.unigram_ranking(width)
    assert target.bigram_table(VOCAB).shape == (VOCAB, VOCAB)


@pytest.mark.slow
def test_latency_is_measured_once_and_kept(runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = LocalTarget(runner, info(), None, tmp_path)
    curve = target.latency()
    assert curve.rows == (1, 2, 4, 8, 12, 13, 16, 17, 24, 25, 32, 33, 48, 51)  # what fits slots of 100 entries
    assert curve.context == 49
    monkeypatch.setattr(runner, "forward", None)  # asked again, it computes nothing
    assert target.latency() is curve


def test_what_takes_long_is_put_off_and_done_piece_by_piece(
    runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.measures.calibration._DISTURBED", float("inf"))  # also a busy machine's times are kept
    warmup: list[Iterator[None]] = []
    target = LocalTarget(runner, info(), None, tmp_path, warmup)
    table, rough = target.bigram_table(10), target.latency()
    assert not table.any() and rough.rows == (1, 8) and target.latency() is rough
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rough-latency-")
    monkeypatch.setattr(ModelRunner, "forward", None)  # a rough curve on disk is not measured again
    assert LocalTarget(runner, info(), None, tmp_path, []).latency() == rough
    monkeypatch.undo()
    monkeypatch.setattr("outrider.engine.measures.calibration._DISTURBED", float("inf"))
    pieces = 0
    for task in warmup:
        runner.cache.prefixes.keep(0, "somebody", np.arange(5, dtype=np.int32))
        for _ in task:
            pieces += 1
            assert len(runner.cache.prefixes.tokens(0)) == 0  # what it wrote over is nobody's any more, from the first piece on
            runner.cache.prefixes.keep(0, "somebody", np.arange(5, dtype=np.int32))
    assert pieces > 10
    assert (table == bigram_table(runner, VOCAB, 32, 0)[:, :10]).all() and len(target.latency().rows) > 2

    left: list[Iterator[None]] = []
    later = LocalTarget(runner, info(), None, tmp_path, left)
    assert (later.bigram_table(10) == table).all() and later.latency() == target.latency() and left == []


def test_slots_serve_as_before(folder: str, loaded: LoadedModel) -> None:
    """Whatever was asked before the first request leaves nothing behind."""
    outputs = []
    for strategy, asked in (("autoregressive", False), ("ngrammys", True)):
        options = EngineOptions(max_running=1)
        engine = Engine.load(ModelOptions(folder, dtype="float64"), options, SpeculationOptions(strategy))
        if asked:
            target = LocalTarget(engine._executor.runner, engine.info, engine.tokenizer)  # type: ignore[attr-defined]
            target.latency()
            target.bigram_table(2)
        request = Request("a", [10, 20, 30, 10, 20], SamplingParams(max_tokens=30, ignore_eos=True))
        engine.add(request)
        while engine.has_work:
            engine.step()
        outputs.append(request.output_ids.tolist())
    assert outputs[0] == outputs[1] and len(outputs[0]) == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ngrammys", {}),
        ("ngrammys", {"layout": "batched", "k": 40}),
        ("recycling", {}),
        ("recycling", {"start": "bigram", "shape": "published"}),
    ],
)
def test_an_engine_prepares_its_drafter(folder: str, strategy: str, options: dict[str, object]) -> None:
    engine = Engine.load(
        ModelOptions(folder, dtype="float64"), EngineOptions(max_running=2), SpeculationOptions(strategy, 64, options)
    )
    request = Request("a", [10, 20, 30], SamplingParams(max_tokens=60, ignore_eos=True))
    engine.add(request)
    while engine.has_work:
        engine.step()
    sources = {"recycling": {"recycling"}, "ngrammys": {"context_ngram", "bigram", "unigram"}}[strategy]
    assert request.stats.accepted > 0 and set(request.stats.accepted_by_source) <= sources
