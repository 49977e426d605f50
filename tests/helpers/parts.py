"""A leader of ranks that hold parts of a tiny model, in a process of its own: it ends when one of them does.

``python -m tests.helpers.parts tensor llama`` prints a line of JSON, an ``Answers``, then goes on with one request after another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.actors.ranks import GroupError
from outrider.actors.sharded.processes import RankProcesses, process_group
from outrider.actors.sharded.shard import ShardMode
from outrider.configs.slices import EngineOptions, ModelOptions
from outrider.decoding.drafters.registry import STRATEGIES, build_drafter, build_drafters
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import CONTEXT, FAMILIES, MAX_DRAFT, ROPES, SLOTS, VOCAB, engine_over, prepared, run, tiny_model

PROMPTS = ([7], [1, 2, 3, 4] * 6 + [1, 2], [5] * 40, [3, 1, 4, 1, 5, 9, 2, 6] * 3)
SYSTEM = np.random.default_rng(12).integers(1, VOCAB, 40).tolist()


def shared_buffers(pids: Iterable[int]) -> set[Path]:
    """The buffers through which these ranks of DeepSpeed's sum, whether they still have a name in shared memory or not."""
    maps = (psutil.Process(pid).memory_maps() for pid in pids)
    return {Path(part.path) for parts in maps for part in parts if part.path.startswith("/dev/shm/deepspeed_")}


@dataclass(frozen=True, slots=True)
class Answers:
    """Outputs of the same requests by the ranks and by one process, and what was on the way."""

    given: list[list[int]]
    expected: list[list[int]]
    accepted: int  # drafted tokens, by the ranks
    reused: int  # tokens whose KV was copied
    layers: list[int]  # of the leader, and of the whole model
    kv_heads: list[int]  # likewise
    pids: list[int]  # of the followers


def whole(family: str) -> PreTrainedModel:
    """A tiny model of which nobody has taken a part yet, with the weights of ``tiny_model``."""
    model = AutoModelForCausalLM.from_config(
        deepcopy((FAMILIES | ROPES)[family]), dtype=torch.float32, attn_implementation=TREE_ATTENTION
    ).eval()
    model.load_state_dict(tiny_model(family, "float32").stock.state_dict())
    return cast(PreTrainedModel, model)


def requests(known: Sequence[Sequence[int]] = ()) -> list[Request]:
    """Every strategy, greedy or sampled, with requests that begin alike.

    Args:
        known: the answers, as documents, so that there is something right to draft.
    """
    made = []
    for at, strategy in enumerate((None, *sorted(STRATEGIES))):
        prompt = [*SYSTEM, at + 1] if at % 3 == 0 else PROMPTS[at % len(PROMPTS)]
        params = SamplingParams(24, temperature=0.9 if at % 2 else 0.0, seed=at, ignore_eos=True)
        documents = [[*prompt, *known[at]]] if known else []
        made.append(Request(f"parts{at}", prompt, params, documents, tenant="t", strategy=strategy))
    return made


def answers(runner: ModelRunner, family: str, pids: tuple[int, ...]) -> Answers:
    """All requests at once, by every strategy with parts and by plain decoding with the whole model."""
    model = tiny_model(family, "float32")
    plain = [Request(one.request_id, one.prompt_ids, one.params) for one in requests()]
    expected = run(engine_over(model.runner, build_drafter(PLAIN, {}), 1), *plain)
    asked = requests(expected)
    drafter = prepared(build_drafters("auto", {"all_rows": True}, sorted(STRATEGIES)), model)
    given = run(engine_over(runner, drafter, 3, 48, "auto", LocalExecutor(runner)), *asked)
    here, all_of_it = runner.cache.shape, model.runner.cache.shape
    return Answers(
        given, expected,
        accepted=sum(one.stats.accepted for one in asked), reused=sum(one.stats.cached_tokens for one in asked),
        layers=[here.layers, all_of_it.layers], kv_heads=[here.kv_heads, all_of_it.kv_heads], pids=list(pids),
    )  # fmt: skip


def main(mode: ShardMode, family: str) -> None:
    """See above."""
    torch.set_num_threads(1)
    group = process_group(mode, 2, ModelOptions(threads=1, device="cpu"), load=functools.partial(whole, family))
    try:
        runner = group.runner(whole(family), CONTEXT + MAX_DRAFT, EngineOptions(max_running=SLOTS), 1 + MAX_DRAFT)
    except GroupError:
        group.close()
        raise
    housing = group.housing
    assert isinstance(housing, RankProcesses)
    print(json.dumps(dataclasses.asdict(answers(runner, family, housing.pids))), flush=True)
    engine = engine_over(runner, build_drafter(PLAIN, {}), 1)
    for number in count():
        run(engine, Request(str(number), PROMPTS[1], SamplingParams(64, ignore_eos=True)))


if __name__ == "__main__":
    main(cast(ShardMode, sys.argv[1]), sys.argv[2])
