"""``speculation`` in the body of a request: what may be asked for, and that no answer changes by it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from outrider.cluster.cli.launch.preflight import LaunchError, check_speculation
from outrider.cluster.serving.engine_replica import EngineReplica
from outrider.cluster.serving.generation import GenerationJob
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import SamplingParams, SpecStats, StepOutput
from tests.cluster.circle import CHAT, CHATS, COMPLETIONS, TEXT, byte_ids
from tests.cluster.commands import outrider

BODIES = {COMPLETIONS: TEXT | {"max_tokens": 30}, CHATS: CHAT | {"max_tokens": 30}}
CHOICES: list[dict[str, Any] | None] = [
    None,
    {},
    {"strategy": None, "max_draft_tokens": None},
    {"strategy": "llma"},
    {"strategy": "prompt_lookup", "max_draft_tokens": 3},
    {"strategy": "autoregressive"},
    {"max_draft_tokens": 0},
    {"max_draft_tokens": 2**31 - 1},
]


@pytest.mark.parametrize("path", BODIES)
def test_no_answer_changes(http: httpx.Client, path: str) -> None:
    def answer(**more: Any) -> Any:
        choice = http.post(path, json=BODIES[path] | more).raise_for_status().json()["choices"][0]
        return choice.get("text") or choice["message"]["content"]

    expected = answer()
    assert [answer(speculation=choice) for choice in CHOICES] == [expected] * len(CHOICES)
    with http.stream("POST", path, json=BODIES[path] | {"stream": True, "speculation": CHOICES[4]}) as stream:
        assert stream.read().endswith(b"data: [DONE]\n\n") and stream.status_code == 200


def test_models_lists_what_may_be_asked_for(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert model["strategies"] == model["lossless_strategies"] == ["llma", "prompt_lookup", "autoregressive"]
    assert model["lossless"] is True
    assert http.get("/v1/models/circle").json() == model


def test_outrider_chat_asks_for_it(api_server: Any) -> None:
    def chat(*options: str) -> str:
        done = outrider("chat", "--url", api_server.url, "--max-tokens", 8, *options, text="hi\n/exit\n")
        assert done.returncode == 0, done
        return done.stdout + done.stderr

    assert "<abcdefg" in chat("--strategy", "prompt_lookup", "--max-draft-tokens", "2")
    assert "allowed: llma, prompt_lookup, autoregressive" in chat("--strategy", "trie")


def test_a_replica_drafts_as_the_job_says_also_when_it_goes_on_for_another(circle_model: Path) -> None:
    speculation = SpeculationOptions("llma", max_draft_tokens=8, strategies=("prompt_lookup",))
    model, engine = ModelOptions(str(circle_model), dtype="float32", threads=1), EngineOptions(max_running=2)
    replica = EngineReplica(model, engine, speculation, ParallelismOptions(), None, 60.0)
    ids = np.asarray(byte_ids("<abcdefgh") * 2, np.int32)

    async def collect(job: GenerationJob) -> tuple[list[int], SpecStats]:
        outputs = [item async for batch in replica.generate([job]) for _, item in batch]
        said = [output for output in outputs if isinstance(output, StepOutput)]
        assert len(said) == len(outputs)
        assert said[-1].stats is not None
        return [token for output in said for token in output.token_ids], said[-1].stats

    def run(name: str, **choice: Any) -> SpecStats:
        """The counters of the second half of an answer, whose first half another replica gave."""
        whole = GenerationJob(name, ids, SamplingParams(40), **choice)
        tokens, _ = asyncio.run(collect(whole))
        resumed = dataclasses.replace(whole, emitted=tuple(tokens[:20]), references=(np.asarray(tokens, np.int32),))
        rest, stats = asyncio.run(collect(resumed))
        assert tokens[20:] == rest and len(rest) == 20
        return stats

    free, bounded = run("free"), run("bounded", max_draft_tokens=2)
    assert set(free.accepted_by_source) == {"llma"} and free.drafted > 2 * free.steps
    assert 0 < bounded.drafted <= 2 * bounded.steps
    assert set(run("other", strategy="prompt_lookup").accepted_by_source) == {"prompt_lookup"}
    for choice in ({"strategy": "autoregressive"}, {"max_draft_tokens": 0}):
        assert (run(str(choice), **choice).drafted, run(str(choice), **choice).steps) == (0, 20)


def test_what_cannot_be_asked_for_is_said_before_the_start() -> None:
    check_speculation(SpeculationOptions("auto", strategies=("llma:copy_length=9", "trie", "autoregressive")))
    with pytest.raises(LaunchError, match=r"speculation: llma has no option .*did you mean 'copy_length'"):
        check_speculation(SpeculationOptions("auto", strategies=("llma:copy_lenght=9",)))
