"""Lookahead parallelism with two ranks on one device, each a process with its share of the memory."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from outrider.actors.lookahead.executor import LookaheadParallelExecutor
from outrider.actors.lookahead.link import connect
from outrider.actors.lookahead.rank import RankServer
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.accelerator import accelerator
from outrider.engine.engine import Engine, load_runner
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.bench.workloads import run_engine
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import is_cuda, measured_on
from outrider.experiments.gpu_suite.report import Report, Setting

_SHARE = 0.45  # of the GPU's memory, for each rank
_SECRET = b"of two processes on one machine"
_START_S = 120.0
_GROUP = ParallelismOptions(mode="lookahead", rank_timeout_s=30.0, step_timeout_s=60.0, adaptive=False)
_SPECULATION = SpeculationOptions("llma")
_REQUESTS, _PROMPT, _WRONG_SHARE = 4, 128, 0.1  # tokens of a prompt; tokens of a reference that are others than the output's


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``ranks``: outputs of the leader alone, and of both.

    Raises:
        RuntimeError: outputs differ, or a rank was lost.
    """
    models.release(setting, kept)
    large = is_cuda(setting.device)
    size, tokens = ("1b", 128) if large else ("tiny", 24)
    folder = setting.scratch / "ranks" / size
    models.save_model(size, "cpu" if setting.double else setting.device, getattr(torch, setting.dtype), setting.seed, folder)
    # A KV slot of the whole context takes the memory of the machine on a CPU and on the double.
    model = ModelOptions(str(folder), dtype=setting.dtype, device=setting.device, max_model_len=None if large else 512)  # type: ignore[arg-type]
    options = EngineOptions(max_running=_REQUESTS, gpu_memory_utilization=_SHARE)
    groups: list[LookaheadParallelExecutor] = []

    def lead(runner: ModelRunner) -> LookaheadParallelExecutor:
        groups.append(LookaheadParallelExecutor(LocalExecutor(runner), _GROUP, options.max_step_tokens))
        groups[-1].check_steps = 8
        return groups[0]

    engine = Engine.load(model, options, _SPECULATION, 2, lead)
    prompts = [ids.tolist() for ids in np.random.default_rng(setting.seed).integers(0, 256, (_REQUESTS, _PROMPT))]
    params = SamplingParams(tokens, ignore_eos=True)
    outputs, _ = _run(engine, [Request(f"plain-{at}", ids, params, strategy="autoregressive") for at, ids in enumerate(prompts)])
    references = _nearly(outputs, setting.seed)
    alone, alone_s = _run(engine, [Request(f"alone-{at}", ids, params, [references[at]]) for at, ids in enumerate(prompts)])
    report.found["leader_reserved_gib"] = _reserved_gib(setting)
    report.say("the leader is ready")
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    follower = multiprocessing.get_context("spawn").Process(target=_follow, args=(theirs, setting, model, options))
    follower.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise RuntimeError(f"the second rank was not ready after {_START_S:.0f} s")
        address, reserved = ours.recv()
        report.found["follower_reserved_gib"] = reserved
        groups[0].add_rank(1, connect(address, _SECRET, _START_S))
        both, both_s = _run(engine, [Request(f"both-{at}", ids, params, [references[at]]) for at, ids in enumerate(prompts)])
        state = groups[0].state(2)
        groups[0].remove_rank(1)
    except EOFError as error:
        raise RuntimeError("the second rank ended before it was ready: its error stands above") from error
    finally:
        ours.close()
        follower.join(10.0)
        if follower.is_alive():
            follower.kill()
            follower.join()
    same = sum(one == plain == other for one, plain, other in zip(both, outputs, alone, strict=True))
    count = len(prompts) * tokens
    report.found |= {
        "identical": same, "outputs": len(prompts), "ready": state.ready, "losses": state.losses, "last_loss": state.last_loss,
        "disagreements": state.disagreements, "divergences": state.divergences,
        "tokens_per_s": {"leader alone": round(count / alone_s, 1), "two ranks": round(count / both_s, 1)},
    }  # fmt: skip
    speeds = report.found["tokens_per_s"]
    what = f"two ranks of {size}, {_SHARE} of the memory each"
    report.line(what, f"{same} of {len(prompts)} identical", "", "all", same == len(prompts))
    report.line("tok/s of the leader alone, of both", f"{speeds['leader alone']:.1f}, {speeds['two ranks']:.1f}")
    if same < len(prompts) or state.ready != (0, 1) or state.losses or state.disagreements:
        raise RuntimeError(f"{same} of {len(prompts)} outputs are identical, and the group is {state}")


def _follow(connection: Connection, setting: Setting, model: ModelOptions, options: EngineOptions) -> None:
    """Be the second rank until the leader closes the connection."""
    with measured_on(setting.device, setting.double):
        _, runner = load_runner(model, options, _SPECULATION, 2)
        server = RankServer(LocalExecutor(runner), _SECRET, _GROUP)
        connection.send((server.address, _reserved_gib(setting)))
        try:
            connection.recv()
        except EOFError:
            server.close()
    os._exit(0)  # threads of the server may be in torch, and would have the process abort


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Return the outputs and the seconds of requests at once."""
    began = time.perf_counter()
    run_engine(engine, requests)
    return [request.output_ids.tolist() for request in requests], time.perf_counter() - began


def _nearly(outputs: Sequence[list[int]], seed: int) -> list[list[int]]:
    """Return outputs with some tokens changed, so that drafts are refused in places."""
    draw = np.random.default_rng(seed)
    return [[(token + 1) % 256 if draw.random() < _WRONG_SHARE else token for token in output] for output in outputs]


def _reserved_gib(setting: Setting) -> float | None:
    device = torch.device(setting.device)
    return round(accelerator().reserved(device) / 2**30, 2) if device.type == "cuda" else None
