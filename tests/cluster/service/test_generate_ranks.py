"""``outrider generate`` over several ranks, on a Ray of its own: no token changes, and nobody is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.commands import COMMAND, ENVIRONMENT, REPOSITORY, lines, outrider, outrider_apart
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks take two cores")


def told(records: list[dict[str, Any]]) -> list[list[Any]]:
    return [[record.get(name) for name in ("id", "output_token_ids", "text", "error")] for record in records]


def group_command(model: Path, prompts: Path, tmp_path: Path, *arguments: object, mode: str = "lookahead") -> list[str]:
    """Two ranks by the configuration; flags come on top."""
    config = tmp_path / "group.yaml"
    config.write_text(
        f"model: {{path: {model}, dtype: float32, device: cpu, threads: 1}}\n"
        f"parallelism: {{mode: {mode}, world_size: 2}}\nspeculation: {{strategy: jacobi, max_draft_tokens: 64}}\n"
    )
    return ["generate", "--prompts", str(prompts), "--config", str(config), "--json", *(str(argument) for argument in arguments)]


def test_two_ranks_change_no_token(model: Path, prompts: Path, tmp_path: Path) -> None:
    command = group_command(model, prompts, tmp_path, "--max-tokens", 100, "--temperature", 0.8, "--seed", 3)
    records, summary = lines(outrider_apart(*command))
    alone, summary_alone = lines(outrider(*command, "--world-size", 1))
    assert (summary["world_size"], summary_alone["world_size"]) == (2, 1)
    assert told(records) == told(alone)
    assert set(summary) == set(summary_alone) | {"group"}
    assert set(summary["group"]) == {"mean_width", "exchange_share", "losses", "divergences"}
    assert 1.0 < summary["group"]["mean_width"] <= 2.0 and summary["group"]["losses"] == 0
    assert 0.0 < summary["group"]["exchange_share"] < 1.0


@pytest.mark.proof
def test_a_pipeline_changes_no_token(model: Path, prompts: Path, tmp_path: Path) -> None:
    command = group_command(model, prompts, tmp_path, "--max-tokens", 40, "--temperature", 0.8, "--seed", 3, mode="pipeline")
    records, summary = lines(outrider_apart(*command))
    alone, _ = lines(outrider(*command, "--world-size", 1))
    assert (summary["world_size"], summary["threads"], summary["group"]["losses"]) == (2, 1, 0)
    assert told(records) == told(alone)
    assert max(record.get("tokens_per_step", 0.0) for record in records) > 1.0


@pytest.mark.proof
def test_ctrl_c_leaves_no_rank(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"record {index} of many"}) for index in range(1_000)))
    command = [*COMMAND, *group_command(model, prompts, tmp_path, "--max-tokens", 200)]
    output = tmp_path / "output"
    with output.open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=out, stderr=errors, start_new_session=True, cwd=REPOSITORY, env=ENVIRONMENT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip  # as a terminal would start it, also where the tests themselves run in the background
    try:
        eventually(lambda: process.poll() is not None or b"output_token_ids" in output.read_bytes(), 120)
        assert process.poll() is None, (tmp_path / "errors").read_text()
        started = psutil.Process(process.pid).children(recursive=True)
        assert sum("ray::" in " ".join(one.cmdline()) for one in started) >= 2
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
        _, alive = psutil.wait_procs(started, 20)
        assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
        assert "Traceback" not in (tmp_path / "errors").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
