"""Lookahead parallelism with two ranks on one device, each a process with its share of the memory."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from actors.lookahead.executor import LookaheadParallelExecutor
from actors.lookahead.link import connect
from actors.lookahead.rank import RankServer
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from decoding.request import PLAIN, Request, SamplingParams
from engine.engine import Engine, load_runner
from engine.executor import LocalExecutor
from engine.forward.runner import ModelRunner
from experiments.bench.workloads import run_engine
from experiments.gpu_suite import models
from experiments.gpu_suite.device import is_cuda, measured_on, reserved_gib
from experiments.gpu_suite.texts import nearly
from experiments.gpu_suite.worker import Report, Setting

_SHARE = 0.45  # of the GPU's memory, for each rank
_SECRET = b"of two processes on one machine"
_START_S = 120.0
_GROUP = ParallelismOptions(mode="lookahead", rank_timeout_s=30.0, step_timeout_s=60.0, check_steps=8, adaptive=False)
_SPECULATION = SpeculationOptions("llma")
_REQUESTS, _PROMPT = 4, 128  # at once, tokens of a prompt


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Compare outputs of the leader alone with those of both ranks; raise if they differ, or a rank was lost."""
    models.release(setting, kept)
    large = is_cuda(setting.device)
    size, tokens = ("1b", 128) if large else ("tiny", 24)
    folder = setting.scratch / "ranks" / size
    models.save_model(setting, size, folder)
    # On a CPU and on the double, a KV slot of the whole context takes the memory of the machine.
    length = None if large else 512
    model = ModelOptions(str(folder), dtype=setting.dtype, device=setting.device, max_model_len=length)  # type: ignore[arg-type]
    options = EngineOptions(max_running=_REQUESTS, gpu_memory_utilization=_SHARE)
    groups: list[LookaheadParallelExecutor] = []

    def lead(runner: ModelRunner) -> LookaheadParallelExecutor:
        groups.append(LookaheadParallelExecutor(LocalExecutor(runner), _GROUP, options.max_step_tokens))
        return groups[0]

    engine = Engine.load(model, options, _SPECULATION, 2, lead)
    prompts = [ids.tolist() for ids in np.random.default_rng(models.SEED).integers(0, 256, (_REQUESTS, _PROMPT))]
    params = SamplingParams(tokens, ignore_eos=True)
    outputs, _ = _run(engine, [Request(f"plain-{at}", ids, params, strategy=PLAIN) for at, ids in enumerate(prompts)])
    references = nearly(outputs, 256)

    def drafted(name: str) -> tuple[list[list[int]], float]:
        return _run(engine, [Request(f"{name}-{at}", ids, params, [references[at]]) for at, ids in enumerate(prompts)])

    alone, alone_s = drafted("alone")
    report.found["leader_reserved_gib"] = reserved_gib(setting.device)
    report.say("the leader is ready")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    follower = context.Process(target=_follow, args=(theirs, setting, model, options))
    follower.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise RuntimeError(f"the second rank was not ready after {_START_S:.0f} s")
        address, report.found["follower_reserved_gib"] = ours.recv()
        groups[0].add_rank(1, connect(address, _SECRET, _START_S))
        both, both_s = drafted("both")
        state = groups[0].state(2)
        groups[0].remove_rank(1)
    except EOFError as error:
        raise RuntimeError("the second rank ended before it was ready: see its error above") from error
    finally:
        ours.close()
        follower.join(10.0)
        if follower.is_alive():
            follower.kill()
            follower.join()
    same = sum(one == plain == other for one, plain, other in zip(both, outputs, alone, strict=True))
    speeds = {name: round(_REQUESTS * tokens / seconds, 1) for name, seconds in (("alone", alone_s), ("both", both_s))}
    report.found |= {
        "identical": same, "outputs": len(prompts), "ready": state.ready, "losses": state.losses, "last_loss": state.last_loss,
        "disagreements": state.disagreements, "divergences": state.divergences, "tokens_per_s": speeds,
    }  # fmt: skip
    what = f"two ranks of {size}, {_SHARE} of the memory each"
    report.line(what, f"{same} of {len(prompts)} identical", "", "all", same == len(prompts))
    report.line("tok/s of the leader alone, of both", f"{speeds['alone']:.1f}, {speeds['both']:.1f}")
    if same < len(prompts) or state.ready != (0, 1) or state.losses or state.disagreements:
        raise RuntimeError(f"{same} of {len(prompts)} outputs are identical, and the group is {state}")


def _follow(connection: Connection, setting: Setting, model: ModelOptions, options: EngineOptions) -> None:
    """Be the second rank until the leader closes the connection."""
    with measured_on(setting.device, setting.double):
        _, runner = load_runner(model, options, _SPECULATION, 2)
        server = RankServer(LocalExecutor(runner), _SECRET, _GROUP)
        connection.send((server.address, reserved_gib(setting.device)))
        try:
            connection.recv()
        except EOFError:
            server.close()
    os._exit(0)  # threads of the server may be in torch, and would abort the process


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """Return the outputs and the seconds of requests at once."""
    began = time.perf_counter()
    run_engine(engine, requests)
    return [request.output_ids.tolist() for request in requests], time.perf_counter() - began
