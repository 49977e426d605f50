"""The rounds: all contestants in turns on the same prompts, the memory's roof read beside each, and every turn kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import psutil

from experiments.bench.record import Kept
from experiments.peers.contestants import Contestant, Field
from experiments.peers.environments import MissingPeerError

Say = Callable[[str], None]
Turn = dict[str, Any]
_ROOF_BYTES = 256 << 20  # that each thread reads
_ROOF_PASSES = 4
_SETTLES_S, _MOMENT_S, _IDLE = 10.0, 0.25, 0.05  # at most; how long is looked; cores in use that are none
ROW_REPEATS, ROW_CONTEXT = 40, 256  # of the timing of single steps
ONCE = 0  # the level of what is not asked prompts
ASKED_ONCE = {"rows": "ours", "llama-bench": "llama bf16", "llama-bench Q4_1": "llama q4_1"}  # by name, whose process or file


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked."""

    key: str
    workload: str
    ids: list[int]
    references: list[list[int]]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def _total(values: npt.NDArray[np.int64]) -> int:
    total = 0
    for place in range(values.size):
        total += values[place]
    return total


class Roof:
    """How fast some threads read memory."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._parts = [np.ones(_ROOF_BYTES // 8, np.int64) for _ in range(threads)]
        self.read()

    def read(self) -> float:
        """GB/s (1e9 bytes), the best of a few passes."""
        best = 0.0
        for _ in range(_ROOF_PASSES):
            started = time.perf_counter()
            list(self._pool.map(_total, self._parts))
            best = max(best, sum(part.nbytes for part in self._parts) / (time.perf_counter() - started) / 1e9)
        return round(best, 2)


def place(turn: Turn) -> tuple[Any, ...]:
    """Of a turn in its run."""
    return tuple(turn[key] for key in ("model", "round", "level", "part", "contestant"))


def asked(contestant: Contestant, prompts: Sequence[Prompt], every: Sequence[Prompt]) -> list[Prompt]:
    """Those of some prompts that a contestant is asked: one in ``share`` of all."""
    own = {prompt.key for prompt in every[: -(-len(every) // contestant.share)]}
    return [prompt for prompt in prompts if prompt.key in own]


def turns_of(
    model: str, number: int, contestants: Sequence[Contestant], prompts: Sequence[Prompt], levels: Sequence[int], together: int
) -> Iterator[tuple[Turn, Contestant | None, list[Prompt]]]:
    """The turns of a round in their order, which every other round reverses; those of a level and part stand side by side.

    Args:
        model: its name.
        number: of the round.
        contestants: of the run.
        prompts: of the model.
        levels: requests at once.
        together: prompts of a turn with one request at a time; with more, a turn has all.
    """
    for name in ASKED_ONCE:
        yield {"model": model, "round": number, "level": ONCE, "part": 0, "contestant": name}, None, []
    for level in levels:
        size = together if level == 1 else len(prompts)
        for part, first in enumerate(range(0, len(prompts), size)):
            for contestant in contestants[:: -1 if number % 2 else 1]:
                own = asked(contestant, prompts[first : first + size], prompts) if level in contestant.levels else []
                if own:
                    turn = {"model": model, "round": number, "level": level, "part": part, "contestant": contestant.name}
                    yield turn, contestant, own


def settle() -> bool:
    """Waits until no process that this one started computes: vLLM's go on for about a second behind their last answer.

    Returns:
        Whether that came to be, within some seconds.
    """
    deadline, before = time.monotonic() + _SETTLES_S, _computed_s()
    while time.monotonic() < deadline:
        time.sleep(_MOMENT_S)
        now = _computed_s()
        if sum(now.values()) - sum(before.get(each, 0.0) for each in now) < _IDLE * _MOMENT_S:
            return True
        before = now
    return False


def _computed_s() -> dict[int, float]:
    """The seconds that each process below this one has computed, by its id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


class Rounds:
    """Runs turns of one model, and keeps them."""

    def __init__(
        self, field: Field, kept: Kept, roof: Roof, max_tokens: int, bench: Callable[[str], dict[str, Any]], say: Say
    ) -> None:
        """
        Args:
            field: the processes.
            kept: of the run.
            roof: of this machine.
            max_tokens: of each output.
            bench: llama.cpp's own of a system, see ``llama_bench``.
            say: gets a line of progress.
        """
        self._field, self._kept, self._roof = field, kept, roof
        self._max_tokens, self._bench, self._say = max_tokens, bench, say
        self.missing: dict[str, str] = {}  # by system: why it cannot be had

    def run(self, turns: Sequence[tuple[Turn, Contestant | None, list[Prompt]]]) -> None:
        """Those that are missing."""
        left = [turn for turn in turns if not self._kept.has(place(turn[0]))]
        began = time.perf_counter()
        for done, (turn, contestant, prompts) in enumerate(left):
            system = contestant.system if contestant else ASKED_ONCE[turn["contestant"]]
            if system in self.missing:
                continue
            at = "" if contestant is None else f" at {turn['level']}, part {turn['part'] + 1}"
            spent = time.perf_counter() - began
            rest = f", {spent / done * (len(left) - done) / 60:.0f} min left" if done else ""
            self._say(f"{turn['model']}, round {turn['round'] + 1}: {turn['contestant']}{at} ({done + 1} of {len(left)}{rest})")
            try:
                self._kept.add(turn | self._measured(turn, contestant, prompts))
            except MissingPeerError as error:
                if system == "ours":
                    raise
                self.missing[system] = str(error)
                self._say(f"n/a: {error}")

    def _measured(self, turn: Turn, contestant: Contestant | None, prompts: Sequence[Prompt]) -> Turn:
        """What a turn adds: numbers by prompt, the roof before and after, and hashes of the answers, to be compared by."""
        if contestant is None:
            self._settle()
            before = self._roof.read()
            job = {"mode": "rows", "repeats": ROW_REPEATS, "prompt_tokens": ROW_CONTEXT}
            system = ASKED_ONCE[turn["contestant"]]
            found = self._field.ask(system, job) if system == "ours" else self._bench(system)
            return {"roof": [before, self._roof.read()], "found": found}
        asks = [[prompt.key, prompt.ids, prompt.references] for prompt in prompts]
        if turn["part"] == 0:  # loads the model where it is the first time, compiles, reads tables: no part of what is measured
            few = {"mode": contestant.mode, "running": turn["level"], "max_tokens": 4, "asks": asks[:2], "fresh": "warm"}
            self._field.ask(contestant.system, few)
        job = {"mode": contestant.mode, "running": turn["level"], "max_tokens": self._max_tokens, "asks": asks}
        job["fresh"] = f"{turn['round']}/{turn['level']}/{contestant.name}"
        self._settle()
        before = self._roof.read()
        reply = self._field.ask(contestant.system, job)
        after = self._roof.read()
        return {
            "roof": [before, after],
            "asks": [prompt.key for prompt in prompts],
            "prompt_tokens": [len(prompt.ids) for prompt in prompts],
            "tokens": reply.get("count") or list(map(len, reply["tokens"])),
            "first_s": [round(value, 6) for value in reply["first_s"]],
            "last_s": [round(value, 6) for value in reply["last_s"]],
            "wall_s": reply["wall_s"],
            "answers": [hashlib.blake2b(json.dumps(ids).encode(), digest_size=6).hexdigest() for ids in reply["tokens"]],
            **({"host_share": reply["host_share"]} if "host_share" in reply else {}),
        }

    def _settle(self) -> None:
        if not settle():
            self._say("the processes of other contestants do not come to rest: what is measured is disturbed by them")


def llama_bench(program: Path, model: Path, threads: int) -> dict[str, Any]:
    """Tokens per second of a prompt of 512 tokens and of an output of 128, as llama.cpp's own bench has them.

    Raises:
        MissingPeerError: it fails.
    """
    command = [str(program), "--model", str(model), "--threads", str(threads), "-p", "512", "-n", "128", "-r", "2", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MissingPeerError(f"llama-bench fails: {done.stderr.strip()[-200:]}")
    rows = json.loads(done.stdout)
    return {
        "prefill": next(row["avg_ts"] for row in rows if row["n_prompt"]),
        "decode": next(r["avg_ts"] for r in rows if r["n_gen"]),
    }
