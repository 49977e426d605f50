"""A device fails for good while a real service of two replicas answers: every answer is whole, and nothing is quarantined."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import outrider.cluster.app as app_module
from outrider.cluster.serving.engine_replica import EngineReplica
from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.handle_engine import Item
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.decoding.request import SamplingParams
from outrider.engine.executor import VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from tests.cluster.circle import Server
from tests.cluster.service.applications import PROMPT, Application, plain_answers, serving, tiny_config
from tests.helpers.waiting import eventually

TOKENS = 400  # of an answer: seconds, so that the device fails in its middle
FATAL = 100  # output tokens of a request with which a replica's device fails
MESSAGES = {
    "illegal_memory_access": "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later",
    "uncorrectable_ecc": "CUDA error: uncorrectable ECC error encountered",
    "device_lost": "CUDA error: GPU is lost",
    "launch_failure": "CUDA error: unspecified launch failure",
}
EVERY_TIME, *FURTHER = MESSAGES


class Fragile(EngineReplica):
    """A replica whose device fails in the middle of an answer, unless another replica's did."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._folder = Path(arguments[0].path).parent
        executor, self._failed = self._replica._engine._executor, False
        execute = executor.execute

        def guarded(works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
            outcomes = execute(works, top_k)
            if any(work.request.num_output >= FATAL for work in works):
                with contextlib.suppress(FileExistsError):
                    (self._folder / "failed").touch(exist_ok=False)
                    self._failed = True
            if self._failed:
                raise torch.AcceleratorError(MESSAGES[(self._folder / "fault").read_text()])
            return outcomes

        executor.execute = guarded  # type: ignore[method-assign]

    async def generate(self, jobs: Sequence[GenerationJob]) -> AsyncIterator[list[tuple[int, Item]]]:
        """As the service's own; writes down what it is asked for."""
        with (self._folder / "jobs").open("a") as told:
            told.writelines(f"quarantined={job.quarantined} emitted={bool(job.emitted)}\n" for job in jobs)
        async for batch in super().generate(jobs):
            yield batch


@pytest.fixture
def fragile(api_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[Application]:
    """A service of two replicas of that kind."""
    (tmp_path / "fault").write_text(kind)
    monkeypatch.setattr(app_module, "EngineReplica", Fragile)
    with serving(api_server, "fragile", tiny_config(tmp_path, server={"replicas": 2}), TOKENS) as made:
        made.becomes(status="ok", replicas=2)
        yield made


def failures(of: Application) -> dict[str, float]:
    """What /metrics tells of failed devices, by kind."""
    time.sleep(FRESH_S)  # until states are asked for anew
    text = httpx.get(f"{of.url}/metrics", timeout=60).text
    return {kind: float(count) for kind, count in re.findall(r'device_failures_total\{error="(\w+)"\} (\S+)', text)}


@pytest.mark.parametrize("kind", [EVERY_TIME, *(pytest.param(kind, marks=pytest.mark.proof) for kind in FURTHER)])
def test_answers_go_on_elsewhere_when_a_device_fails(
    fragile: Application, tmp_path: Path, kind: str, proof: dict[str, Any]
) -> None:
    before = fragile.engines()
    assert len(before) == 2 and kind in failures(fragile) and not any(failures(fragile).values())
    came_s: list[list[float]] = []

    def stream_of(each: Application) -> list[Any]:
        events, times = [], [time.monotonic()]
        for event in each.ask(client, stream=True):
            events.append(event)
            times.append(time.monotonic())
        came_s.append(times)
        return events

    (greedy,) = plain_answers(tiny_config(tmp_path).model, (PROMPT, dataclasses.replace(fragile.params, temperature=0.0)))
    both = (fragile, dataclasses.replace(fragile, expected=greedy, params=SamplingParams(TOKENS, ignore_eos=True)))
    with fragile.client() as client, concurrent.futures.ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(both[number % 2].ask, client) for number in range(8)]
        streams = [threads.submit(stream_of, each) for each in both * 2]
        for number, answer in enumerate(answers):
            choice = answer.result(180).choices[0]
            assert (choice.text, choice.finish_reason) == (both[number % 2].expected.text, "length")
        for number, stream in enumerate(streams):
            events = [choice for event in stream.result(180) for choice in event.choices]
            assert "".join(choice.text for choice in events) == both[number % 2].expected.text
            assert events[-1].finish_reason == "length"
    pauses = [later - earlier for times in came_s for earlier, later in itertools.pairwise(times)]
    proof |= {
        "answers": len(answers) + len(streams), "longest pause of a stream, s": round(max(pauses), 2),
        "longest stream, s": round(max(times[-1] - times[0] for times in came_s), 2),
    }  # fmt: skip
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert not any("quarantined=True" in job for job in jobs), jobs
    assert any("emitted=True" in job for job in jobs) and (tmp_path / "failed").exists()
    assert {kind: count for kind, count in failures(fragile).items() if count} == {kind: 1.0}
    fragile.becomes(status="ok", replicas=2)
    eventually(lambda: len(fragile.engines()) == 2)
    assert len(fragile.engines() & before) == 1  # the process of the other one has ended
