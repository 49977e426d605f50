"""Choices scored in one tree have the log-probabilities of scored prompts, bit for bit, alone and beside other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedConfig

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from outrider.decoding.tree import ChoiceTree
from outrider.engine.engine import Engine
from outrider.engine.errors import ContextLengthError, RequestError
from tests.helpers.models import BORDER, HYBRIDS, ROPES, VOCAB, llama_config, outputs_of, save_model
from tests.helpers.ranks import loaded_group
from tests.lossless.test_exactness import ON_CPU, compiled_only

_RNG = np.random.default_rng(8)
_LONG = _RNG.integers(1, VOCAB, 61).tolist()
# Prompts and their choices: one token each, several tokens with common beginnings, one that begins another, many, one alone.
CASES: tuple[tuple[list[int], list[list[int]]], ...] = (
    (_LONG, [[5], [6], [7], [VOCAB - 1]]),
    (_LONG[:20], [[1, 2, 3, 4], [1, 2, 9], [8, 2, 3], [1, 2]]),
    ([3], [[1], [1, 2], [1, 2, 3]]),
    (_LONG[5:50], [[at % 3, *_RNG.integers(1, VOCAB, at % 5).tolist()] for at in range(24)]),
    (_LONG[:33], [_LONG[33:61]]),
)
MOST_ROWS = SpeculationOptions().most_draft_tokens


def scored(name: str, prompt: Sequence[int], choices: Sequence[Sequence[int]], tenant: str | None = None) -> Request:
    return Request(name, prompt, SamplingParams(max(map(len, choices))), choices=choices, tenant=tenant)


def generating() -> list[Request]:
    params = (SamplingParams(40, ignore_eos=True), SamplingParams(30, 0.8, seed=1, ignore_eos=True))
    return [Request(f"beside {at}", _LONG[at:], one, [_LONG]) for at, one in enumerate(params)]


def load(folder: Path, dtype: str = "bfloat16", strategy: str = "auto", **options: int) -> Engine:
    return Engine.load(ModelOptions(str(folder), dtype=dtype), EngineOptions(**options), SpeculationOptions(strategy))  # type: ignore[arg-type]


def echoed(engine: Engine, prompt: Sequence[int], choice: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of a choice as those of a scored prompt."""
    found = outputs_of(engine, Request("echo", [*prompt, *choice], SamplingParams(1), prompt_logprobs=0))["echo"]
    scores = found[0].prompt_logprobs
    assert scores is not None
    return tuple(entry.logprob for entry in scores[len(prompt) - 1 :])


Models = Callable[[PreTrainedConfig], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return lambda config: save_model(tmp_path_factory.mktemp("model"), config, seed=4)


@pytest.fixture(scope="module")
def folder(saved: Models) -> Path:
    return saved(llama_config(tie_word_embeddings=True, head_dim=16))


def check_scores(folder: Path, dtype: str, *ways: dict[str, int]) -> None:
    plain = load(folder, dtype, "autoregressive", max_running=1)
    assert plain.info.exact
    expected = [tuple(echoed(plain, prompt, choice) for choice in choices) for prompt, choices in CASES]
    alone = [request.output_ids.tolist() for request in generating() if outputs_of(plain, request)]
    for way in ways:
        engine, others = load(folder, dtype, **way), generating()
        wanted = [scored(str(at), *case, tenant="a" if at % 2 else None) for at, case in enumerate(CASES)]
        found = outputs_of(engine, *others, *wanted)
        for request, scores in zip(wanted, expected, strict=True):
            (output,) = found[request.request_id]
            assert output.scores == scores
            assert (output.token_ids, output.text, output.finish_reason) == ((), "", FinishReason.STOP)
            assert (request.stats.steps, request.stats.drafted, request.num_output) == (1, 0, 0)
        assert [request.output_ids.tolist() for request in others] == alone
        drafts = engine.metrics().drafted_by_source
        assert "root" not in drafts and sum(drafts.values()) == sum(request.stats.drafted for request in others)


@pytest.mark.parametrize(("device", "dtype"), ON_CPU)
def test_choices_have_the_bits_of_scored_prompts(folder: Path, device: str, dtype: str) -> None:
    # All in one step; two at once; a step that has room for one tree, with prompts in chunks.
    check_scores(folder, dtype, {"max_running": 8}, {"max_running": 2}, {"max_running": 8, "max_step_tokens": 72})


@compiled_only
def test_choices_behind_recurrent_layers(saved: Models) -> None:
    check_scores(saved(HYBRIDS["lfm2"]), "bfloat16", {"max_running": 8})


@pytest.mark.parametrize("cached", [False, True])
def test_choices_take_one_forward_behind_the_prompt(folder: Path, cached: bool) -> None:
    engine = load(folder, max_running=2)
    prompt, choices = CASES[1]
    if cached:
        outputs_of(engine, scored("before", [*prompt, 5], [[6]], "a"))
    before = engine.metrics()
    (output,) = outputs_of(engine, scored("b", prompt, choices, "a"))["b"]
    after = engine.metrics()
    assert output.scores is not None and output.stats is not None
    reused = output.stats.cached_tokens
    assert reused == (len(prompt) - 1 if cached else 0)
    # The rows 1, 1 2, 1 2 3, 8 and 8 2: nothing is computed behind a last token.
    assert after.steps - before.steps == (1 if cached else 2) and after.rows - before.rows == len(prompt) - reused + 5


def test_the_tree_of_choices() -> None:
    tree = ChoiceTree.of(7, [[1, 2], [1, 3], [1], [4, 1, 5]])
    assert tree.tree.tokens.tolist() == [7, 1, 4, 1] and tree.tree.parents.tolist() == [-1, 0, 0, 2]
    assert tree.scored == (((0, 1), (1, 2)), ((0, 1), (1, 3)), ((0, 1),), ((0, 4), (2, 1), (3, 5)))
    assert tree.rows == 3 and tree.tree.num_candidates == 1
    with pytest.raises(ValueError, match="choices"):
        scored("empty", [1], [[2], []])


@compiled_only
def test_a_preempted_request_is_scored_once(folder: Path) -> None:
    engine = load(folder, max_running=1, max_step_tokens=16)
    request = scored("a", *CASES[0])
    engine.add(request)
    engine.step()
    engine._scheduler.preempt(request)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert request.stats.preemptions == 1
    assert [output.scores for output in outputs] == [outputs_of(engine, scored("b", *CASES[0]))["b"][0].scores]


def test_ranks_do_not_share_a_tree_of_choices(folder: Path) -> None:
    model, options = ModelOptions(str(folder), dtype="float32"), EngineOptions(max_running=4)
    prompt, choices = CASES[3]
    expected = outputs_of(load(folder, "float32", max_running=4), scored("a", prompt, choices))["a"][0].scores
    with loaded_group(model, options, SpeculationOptions("auto"), 2) as (leader, group):
        others = generating()
        found = outputs_of(leader, *others, scored("a", prompt, choices))
        assert found["a"][0].scores == expected and group.state(2).divergences == 0
        assert [request.num_output for request in others] == [40, 30]


def test_what_is_refused(folder: Path, saved: Models) -> None:
    engine = load(folder, max_running=1)
    most = [[1, *range(2, MOST_ROWS + 2)]]  # a row for each token but the last
    (output,) = outputs_of(engine, scored("most", _LONG, most))["most"]
    assert output.scores is not None
    cases = (
        (_LONG, [[*most[0], 5]], RequestError, "choices", f"{MOST_ROWS + 1} tokens, the maximum is {MOST_ROWS}"),
        (_LONG, [[VOCAB]], RequestError, "choices", "token ids"),
        (_LONG * 4, [[1] * 20], ContextLengthError, "max_tokens", "context"),
    )
    for prompt, choices, error, field, words in cases:
        with pytest.raises(error, match=words) as caught:
            engine.add(scored("a", prompt, choices))
        assert caught.value.field == field
    assert not engine.has_work


@pytest.mark.parametrize(("family", "again"), [("phi3_long", True), ("llama_dynamic", False)])
def test_choices_and_rope_frequencies_that_depend_on_the_length(saved: Models, family: str, again: bool) -> None:
    engine = load(saved(ROPES[family]), "float32", "autoregressive", max_running=1)
    # (tokens of the prompt, of the choice): up to the border, across it, beyond it.
    for prompt, choice, served in ((BORDER - 9, 9, True), (BORDER - 9, 10, False), (BORDER + 1, 5, again)):
        request = scored("a", _LONG[:prompt], [_LONG[prompt : prompt + choice], [5]])
        if not served:
            with pytest.raises(RequestError, match=f"{BORDER} tokens"):
                engine.add(request)
            continue
        (output,) = outputs_of(engine, request)["a"]
        assert output.scores is not None
        assert output.scores[0] == echoed(engine, _LONG[:prompt], _LONG[prompt : prompt + choice])
