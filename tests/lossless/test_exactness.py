"""``engine.exact=strict``: plain decoding to the last bit, in the types and through the cuts where rounding else decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.drafters import LOSSLESS, WITH_DRAFT_MODEL
from decoding.jit import NATIVE
from decoding.request import Request, SamplingParams
from decoding.tree import DraftTree
from engine.batch import Line, LineWork, pack
from engine.engine import Engine, load_runner
from engine.errors import ModelLoadError
from engine.runner import ModelRunner
from engine.strict import check_strict
from tests.models import FAMILIES, VOCAB, llama_config, save_model

MAX_TOKENS = 32
# What a request may ask for, and how requests meet: a row's company, place and cuts all change.
SAMPLINGS = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.1, "top_k": 20, "seed": 2},
    {"temperature": 0.7, "top_p": 0.8, "min_tokens": 4, "repetition_penalty": 1.2, "seed": 3},
)
_RNG = np.random.default_rng(6)
_MOTIF = _RNG.integers(1, 40, 14).tolist()
PROMPTS = ([5], _MOTIF * 4, _RNG.integers(1, VOCAB, 61).tolist(), [*_MOTIF, 2, 3] * 2, _MOTIF * 4 + [9, 8, 7])
WAYS = ((1, 512), (5, 512), (3, 24))  # requests of a step, and its rows
DRAFTING = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {"autoregressive"})
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not NATIVE, reason="numba is not installed")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16", "float16", "float32")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = llama_config(tie_word_embeddings=True, initializer_range=0.15, hidden_size=64, num_attention_heads=4, head_dim=16)
    return str(save_model(Path(tmp_path_factory.mktemp("model")), config, seed=4))


def load(folder: str, device: str, dtype: str, strategy: str, way: tuple[int, int], exact: str = "strict") -> Engine:
    options = EngineOptions(max_running=way[0], max_step_tokens=way[1], exact=exact)  # type: ignore[arg-type]
    return Engine.load(ModelOptions(folder, dtype=dtype, device=device), options, SpeculationOptions(strategy))  # type: ignore[arg-type]


def outputs(engine: Engine, answers: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """The outputs of all prompts with all samplings; parts of the ``answers`` can be copied."""
    pairs = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    requests = [
        Request(str(at), prompt, SamplingParams(max_tokens=MAX_TOKENS, **sampling), answers[at : at + 1], tenant="a")  # type: ignore[arg-type]
        for at, (prompt, sampling) in enumerate(pairs)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    if answers:
        assert sum(request.stats.accepted for request in requests) > 0
    return [request.output_ids.tolist() for request in requests]


@pytest.mark.parametrize("device", DEVICES)
def test_every_strategy_and_company_gives_the_tokens_of_plain_decoding(folder: str, device: str) -> None:
    for dtype in DTYPES[device]:
        expected = outputs(load(folder, device, dtype, "autoregressive", (1, 512)))
        for number, strategy in enumerate(DRAFTING if dtype == "bfloat16" else ("auto", "jacobi")):
            given = outputs(load(folder, device, dtype, strategy, WAYS[number % len(WAYS)]), expected)
            assert given == expected, (dtype, strategy)
        for way in WAYS[1:]:
            assert outputs(load(folder, device, dtype, "autoregressive", way)) == expected, (dtype, way)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma3"])  # with windows, norms of heads, a head size of their own
def test_logits_have_the_same_bits_in_every_company(tmp_path: Path, family: str, device: str) -> None:
    save_model(tmp_path, FAMILIES[family], seed=1)
    for dtype in DTYPES[device]:
        model = ModelOptions(str(tmp_path), dtype=dtype, device=device)  # type: ignore[arg-type]
        _, runner = load_runner(model, EngineOptions(max_running=2, exact="strict"), SpeculationOptions(max_draft_tokens=40), 1)
        assert runner.fixed_rows is not None
        check_strict(runner)  # loading did it, too; here it may be seen to


class Sloppy(ModelRunner):
    """Rounds otherwise where a step has company."""

    def _compute(self, batch):  # type: ignore[no-untyped-def]
        logits = super()._compute(batch)
        return logits if len(batch.token_ids) == 1 else logits * (1 + 2**-8)


@pytest.mark.skipif(not NATIVE, reason="numba is not installed")
def test_a_device_whose_rows_depend_on_each_other_is_refused(folder: str) -> None:
    strict, usual = (
        load_runner(ModelOptions(folder, dtype="bfloat16", device="cpu"), EngineOptions(exact=exact), SpeculationOptions(), 1)[1]  # type: ignore[arg-type]
        for exact in ("strict", "rounding")
    )
    assert strict.fixed_rows == 16 and usual.fixed_rows is None
    with pytest.raises(
        ModelLoadError, match=r"engine.exact=strict cannot be kept on cpu: \d+ of \d+ rows .* engine.exact=rounding"
    ):
        check_strict(Sloppy(strict.model, 1, 200, fixed_rows=16))


@pytest.mark.parametrize(
    ("family", "dtype", "message"),
    [
        ("mixtral", "float32", "how many rows an expert gets"),
        ("qwen3", "float64", "attention in the order of the text"),
        ("gemma2", "float32", "scores without a bound"),
    ],
)
def test_what_cannot_be_strict_is_refused(tmp_path: Path, family: str, dtype: str, message: str) -> None:
    save_model(tmp_path, FAMILIES[family])
    with pytest.raises(ModelLoadError, match=message):
        load(str(tmp_path), "cpu", dtype, "llma", (1, 512))


def test_without_it_bits_do_differ(folder: str) -> None:
    """Else the tests above would show nothing."""
    logits: dict[str, list[torch.Tensor]] = {"rounding": [], "strict": []}
    tokens = np.array(PROMPTS[2], np.int32)
    root = DraftTree.chain(int(tokens[-1]), [])
    for exact, found in logits.items():
        model = ModelOptions(folder, dtype="float32", device="cpu")
        _, runner = load_runner(model, EngineOptions(exact=exact), SpeculationOptions(), 1)  # type: ignore[arg-type]
        for chunk in (60, 45, 31, 7, 1):
            for start in range(0, 60, chunk):
                runner.forward(pack([LineWork(Line(0, tokens), start, min(60, start + chunk), None)]))
            found.append(runner.forward(pack([LineWork(Line(0, tokens), 60, 61, root)])).clone())
    assert all(torch.equal(other, logits["strict"][0]) for other in logits["strict"])
    assert not all(torch.equal(other, logits["rounding"][0]) for other in logits["rounding"])
