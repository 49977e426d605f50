"""``from outrider import LLM, SamplingParams``: answers in one process, in the shape of vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import LLM, SamplingParams
from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.engine.errors import ModelLoadError, RequestError
from tests.helpers.models import llama_config, save_model

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TEXTS = ["To be or", "not to be", "that is", "the question"]


def llm_of(folder: Path, strategy: str = "prompt_lookup") -> LLM:
    speculation = SpeculationOptions(strategy, max_draft_tokens=4)
    return LLM(str(folder), engine=EngineOptions(max_running=2), speculation=speculation, device="cpu", threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config())


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with llm_of(folder) as llm:
        yield llm


def test_texts_and_token_ids_are_answered_in_order(llm: LLM, folder: Path) -> None:
    found = llm.generate(TEXTS, PARAMS)  # more than run at once
    assert [one.prompt for one in found] == TEXTS and len({one.request_id for one in found}) == len(TEXTS)
    assert [(len(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in found] == [(12, "length")] * 4
    again = llm.generate([one.prompt_token_ids for one in found], PARAMS)
    assert [one.outputs for one in again] == [one.outputs for one in found] and again[0].prompt is None
    assert [one.outputs for one in llm.generate(TEXTS[1], PARAMS)] == [found[1].outputs]
    assert [one.outputs for one in llm.generate(found[2].prompt_token_ids, PARAMS)] == [found[2].outputs]
    with llm_of(folder, "autoregressive") as plain:  # drafts change nothing
        assert [one.outputs for one in plain.generate(TEXTS, PARAMS)] == [one.outputs for one in found]
    assert all(one.stats is not None and one.stats.steps for one in found)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short, scored = dataclasses.replace(PARAMS, max_tokens=3), dataclasses.replace(PARAMS, logprobs=1)
    first, second = (one.outputs[0] for one in llm.generate(TEXTS[:2], [short, scored]))
    assert (len(first.token_ids), first.logprobs) == (3, None)
    assert second.logprobs is not None and [one.token_id for one in second.logprobs] == second.token_ids


def test_chats(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in TEXTS[:2]]
    both = llm.chat(chats, PARAMS)
    assert [one.outputs for one in llm.chat(chats[1], PARAMS)] == [both[1].outputs]
    assert "To be or" in str(both[0].prompt)


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        ([], [PARAMS], "1 were given for 0"),
        (["", "a"], None, "no token"),
        (["a"], [PARAMS, PARAMS], "2 were given for 1"),
        ([[1] * 1000], PARAMS, "context"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(llm: LLM, prompts: Any, params: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate(prompts, params)
    assert len(llm.generate(TEXTS[0], PARAMS)) == 1  # and the others go on


def test_defaults_and_names(llm: LLM, folder: Path) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=1.0)
    assert llm.generate([]) == []
    with pytest.raises(TypeError, match="dtpye"):
        LLM(str(folder), dtpye="float32")
    with pytest.raises(ModelLoadError):
        LLM("./no/such/folder")
    with pytest.raises(AttributeError, match="LMM"):
        _ = outrider.LMM
