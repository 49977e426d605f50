"""The service over ranks that hold parts of one model: its answers are one process's, also when a rank is killed."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from configs.schema import Config
from configs.slices import BaselineOptions, EngineOptions, ModelOptions, ParallelismOptions, ServerOptions, SpeculationOptions
from decoding.request import SamplingParams
from tests import waiting
from tests.models import llama_config, save_model
from tests.services import PROMPT, processes, serving, serving_tiny

eventually = functools.partial(waiting.eventually, timeout_s=120.0)
TOKENS = 400
FOLLOWER = "ray::ShardActor"
without_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'outrider[baselines]'"
)


def buffers() -> list[Path]:
    """What DeepSpeed's ranks have left in shared memory."""
    return list(Path("/dev/shm").glob("deepspeed_*"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("tensor", marks=without_deepspeed), "pipeline"])
def test_a_killed_rank_costs_a_pause(mode: Literal["tensor", "pipeline"], api_server: Any, tmp_path: Path) -> None:
    speculation = SpeculationOptions("recycling", max_draft_tokens=8)
    server = ServerOptions(cpus_per_replica=0.25, stop_timeout_s=1.0)
    parallelism = ParallelismOptions(mode=mode, world_size=2)
    with serving_tiny(api_server.url, f"parts-{mode}", tmp_path / "tiny", TOKENS, speculation, server, parallelism) as service:
        eventually(lambda: service.health().get("ranks", {}).get("ready") == 2)
        leaders, followers = service.engines(), processes(FOLLOWER)
        assert len(leaders) == len(followers) == 1
        with service.client() as client:
            assert service.ask(client).choices[0].text == service.expected.text

        def strike() -> None:
            for pid in followers:
                os.kill(pid, signal.SIGKILL)

        text, _, usage = service.stream_with(strike)
        assert text == service.expected.text and usage.completion_tokens == TOKENS
        assert service.engines().isdisjoint(leaders) and processes(FOLLOWER).isdisjoint(followers)
        assert not buffers()
    eventually(lambda: not processes(FOLLOWER))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("tensor", marks=without_deepspeed), "pipeline"])
def test_answers_are_compared_with_ranks_of_the_baseline(
    kind: Literal["tensor", "pipeline"], api_server: Any, tmp_path: Path
) -> None:
    config = Config(
        model=ModelOptions(path=str(save_model(tmp_path / "tiny", llama_config())), dtype="float32", threads=1),
        engine=EngineOptions(max_running=4),
        speculation=SpeculationOptions("recycling", max_draft_tokens=8),
        server=ServerOptions(cpus_per_replica=0.25, stop_timeout_s=1.0),
        baseline=BaselineOptions(True, kind),
    )
    with serving(api_server.url, f"beside-{kind}", config, SamplingParams(40, ignore_eos=True)) as service:
        eventually(lambda: httpx.get(f"{service.url}/ready", timeout=60).status_code == 200)
        assert len(processes(FOLLOWER)) == 1 and "ranks" not in service.health()
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{service.url}/v1/compare", json=body, timeout=60).raise_for_status().json()
        assert (answer["against"], answer["ran"], answer["baseline"]["kind"]) == ("baseline", "in turns", kind)
        assert answer["identical"] and answer["baseline"]["text"] == answer["accelerated"]["text"] == service.expected.text
        assert answer["baseline"]["tokens_per_step"] == 1.0
