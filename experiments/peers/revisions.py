"""This revision beside another: each in its own process that loads the model once, on the same prompts in turns.

Measured by ``outrider bench outputs --against CHECKOUT``. Each process runs the file of its own revision, so that modules may
have been renamed in between: do not change what ``serve_timings`` reads and writes.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.experiments.bench.record import ROOT, git_state
from outrider.experiments.bench.workloads import run_engine

_ids = count()
CASES = (("plain at 1", PLAIN, 1), ("auto at 1", "auto", 1), ("plain at 8", PLAIN, 8), ("auto at 8", "auto", 8))


def serve_timings() -> int:
    """Read a setting and names of cases as JSON lines on stdin, and answer each with its times."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout
    setting = json.loads(sys.stdin.readline())
    path, dtype, threads, context = (setting[key] for key in ("path", "dtype", "threads", "context"))
    model = ModelOptions(path, dtype=dtype, device="cpu", threads=threads, max_model_len=context)
    if setting.get("start"):
        print(json.dumps(first_answer(model, setting["asks"][0][0])), file=out, flush=True)
        return 0
    engines = {}
    for name, strategy, running in CASES:
        options = EngineOptions(running, max_waiting=1 << 20, prefix_caching=False)
        engines[name] = Engine.load(model, options, SpeculationOptions(strategy))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        prefill = case == "prefill"
        most = 1 if prefill else setting["max_tokens"]
        params, asks = SamplingParams(max_tokens=most), setting["asks"]
        requests = [Request(f"{next(_ids)}", prompt, params, references) for prompt, references in asks]
        started = time.perf_counter()
        run_engine(engines["plain at 1" if prefill else case], requests)
        wall_s = time.perf_counter() - started
        tokens = sum(request.num_prompt if prefill else request.num_output for request in requests)
        decode_s = sum(request.stats.decode_s for request in requests) if case.endswith("at 1") else wall_s
        print(json.dumps({"wall_s": wall_s, "decode_s": decode_s, "tokens": tokens}), file=out, flush=True)
    return 0


def first_answer(model: ModelOptions, prompt: Sequence[int]) -> dict[str, float]:
    """Generate a token as ``outrider generate`` does; return the peak memory of this process in MiB."""
    engine = Engine.load(model, EngineOptions(), SpeculationOptions())
    run_engine(engine, [Request("first", prompt, SamplingParams(max_tokens=1))])
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def timing_process(root: Path, setting: dict[str, Any]) -> AbstractContextManager[tuple[Callable[[Any], Any], Any]]:
    """Run a process that times cases with the sources of a checkout; see ``contestants.worker``."""
    from outrider.experiments.peers.contestants import worker  # here: the process itself needs less

    here = Path(__file__).resolve()
    place = Path(*here.parts[-3:])
    own = next((path for path in (root / place, *root.glob(f"*/{place}")) if path.is_file()), here)
    code = f"import runpy, sys; sys.path.insert(0, {str(root)!r}); runpy.run_path({str(own)!r}, run_name='__main__')"
    log = Path(tempfile.gettempdir()) / f"outrider-{root.name}.log"
    return worker(f"the process over {root.name}", [sys.executable, "-c", code], {}, setting, log)


def compare(
    other: Path, setting: dict[str, Any], prompts: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Return tokens per second of each round of both revisions, and how many times as long this one takes.

    Args:
        other: a checkout.
        setting: ``path``, ``dtype``, ``threads``, ``context`` and ``max_tokens``.
        prompts: token ids of each, and of its references.
        rounds: after an untimed one.
        say: called with lines of progress.

    Raises:
        MissingPeerError: a process ended.
    """
    told = {**setting, "asks": [[list(prompt), [list(each) for each in references]] for prompt, references in prompts]}
    names = [*(name for name, _, _ in CASES), "prefill"]
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {"this": [], "other": []} for name in names}
    with timing_process(ROOT, told) as (this, _), timing_process(other.resolve(), told) as (that, _):
        for turn in range(rounds + 1):
            for name in names:
                pair = (("this", this), ("other", that)) if turn % 2 else (("other", that), ("this", this))
                for who, process in pair:
                    answer = process(name)
                    if turn:
                        found[name][who].append(answer)
            say(f"timing: round {turn} of {rounds}")
    ratios = {name: _ratio(both) for name, both in found.items()}
    starts = _starts(other.resolve(), {**told, "start": True}, rounds, say)
    return {"revision": git_state(other.resolve()), "asks": len(prompts), "cases": ratios, "start": starts}


def _starts(other: Path, setting: dict[str, Any], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the seconds from a new process to its first token and its peak memory, of both revisions in turns."""
    found: dict[str, dict[str, list[float]]] = {who: {"seconds": [], "peak_mib": []} for who in ("this", "other")}
    for turn in range(rounds + 1):
        for who, root in (("this", ROOT), ("other", other))[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            with timing_process(root, setting) as (_, said):
                seconds = time.perf_counter() - started
            if turn:  # the first one may compile
                found[who]["seconds"].append(seconds)
                found[who]["peak_mib"].append(said["peak_mib"])
        say(f"starting: round {turn} of {rounds}")
    return found


def _ratio(both: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    rates = {who: [one["tokens"] / one["decode_s"] for one in rounds] for who, rounds in both.items()}
    ratios = sorted(other / this for this, other in zip(rates["this"], rates["other"], strict=True))
    medians = {who: statistics.median(values) for who, values in rates.items()}
    return {
        "tokens_per_s": rates,
        "median": medians,
        "times_as_long": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
    }


if __name__ == "__main__":
    sys.exit(serve_timings())
