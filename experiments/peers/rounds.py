"""Rounds of turns: all contestants on the same prompts, with the memory's speed beside each turn, and their speeds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import psutil

from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.record import Kept
from outrider.experiments.peers.contestants import Contestant, Field
from outrider.experiments.peers.environments import MissingPeerError, Say

_KINDS = ("decode", "all", "prefill")


class Speeds:
    """Tokens per second by contestant, requests at once and round."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns = list(turns)
        self._rounds = sorted({turn["round"] for turn in self._turns})

    def of(self, name: str, level: int) -> list[Turn]:
        """Return the turns of a contestant with ``level`` requests at once."""
        return [turn for turn in self._turns if turn["contestant"] == name and turn["level"] == level]

    def summary(self, names: Iterable[str], levels: Sequence[int]) -> dict[str, Any]:
        """Return by contestant and level the speeds of each round, and how many answers equal plain decoding's.

        ``times_plain`` is the speed over plain decoding's at the same level, by round, on the prompts that both were asked.
        """
        plain = {key: answer for turn in self.of("plain", 1) for key, answer in zip(turn["asks"], turn["answers"], strict=True)}
        found: dict[str, Any] = {}
        for name in names:
            for level in levels:
                turns = self.of(name, level)
                if not turns:
                    continue
                entry: dict[str, Any] = {}
                for kind in _KINDS if level == 1 else ("all",):
                    rates = (self.rate(name, level, number, kind) for number in self._rounds)
                    entry[f"{kind}_tokens_per_s"] = [round(rate, 2) for rate in rates if rate]
                ratios = self.ratios(name, "plain", level, "decode" if level == 1 else "all")
                entry["times_plain"] = [round(ratio, 4) for ratio in ratios]
                pairs = [(plain.get(key), own) for turn in turns for key, own in zip(turn["asks"], turn["answers"], strict=True)]
                known = [own == expected for expected, own in pairs if expected is not None]
                entry["as_plain"], entry["answers"] = sum(known), len(known)
                found.setdefault(name, {})[str(level)] = entry
        return found

    def rate(self, name: str, level: int, number: int, kind: str, keys: set[str] | None = None) -> float | None:
        """Return the tokens per second of a round; None if the contestant was not asked.

        Args:
            name: of the contestant.
            level: requests at once.
            number: of the round.
            kind: ``decode``, tokens after the first over the time after it, and ``prefill``, both for one request at a time;
                ``all``, tokens over the wall time of whole turns.
            keys: the prompts that count, by default all; not for ``all``.
        """
        tokens, seconds = 0, 0.0
        for turn in self.of(name, level):
            if turn["round"] != number:
                continue
            chosen = [at for at, key in enumerate(turn["asks"]) if keys is None or key in keys]
            if kind == "all":
                tokens, seconds = tokens + sum(turn["tokens"]), seconds + turn["wall_s"]
            elif kind == "decode":
                tokens += sum(turn["tokens"][at] - 1 for at in chosen)
                seconds += sum(turn["last_s"][at] - turn["first_s"][at] for at in chosen)
            else:
                tokens += sum(turn["prompt_tokens"][at] for at in chosen)
                seconds += sum(turn["first_s"][at] for at in chosen)
        return tokens / seconds if tokens and seconds else None

    def ratios(self, name: str, other: str, level: int, kind: str) -> list[float]:
        """Return the speed over another contestant's, by round, on the prompts that both were asked."""
        found = []
        for number in self._rounds:
            own, theirs = self._asks(name, level, number), self._asks(other, level, number)
            if kind == "all" and own != theirs:
                continue
            pair = [self.rate(each, level, number, kind, own & theirs) for each in (name, other)]
            if pair[0] and pair[1]:
                found.append(pair[0] / pair[1])
        return found

    def _asks(self, name: str, level: int, number: int) -> set[str]:
        return {key for turn in self.of(name, level) if turn["round"] == number for key in turn["asks"]}


Turn = dict[str, Any]
_ROOF_BYTES = 256 << 20  # read by each thread
_ROOF_PASSES = 4
_SETTLES_S, _MOMENT_S, _IDLE = 10.0, 0.25, 0.05  # longest wait; interval; cores in use that count as idle
ROW_REPEATS, ROW_CONTEXT = 40, 256  # of the timing of single steps
ONCE = 0  # level of measurements without prompts
ASKED_ONCE = {"rows": "ours", "llama-bench": "llama bf16", "llama-bench Q4_1": "llama q4_1"}  # name -> process or file


@numba.njit(nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def _total(values: npt.NDArray[np.int64]) -> int:
    total = 0
    for place in range(values.size):
        total += values[place]
    return total


class Roof:
    """Speed at which some threads read memory."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._parts = [np.ones(_ROOF_BYTES // 8, np.int64) for _ in range(threads)]
        self.read()

    def read(self) -> float:
        """Measure GB/s (1e9 bytes), the best of a few passes."""
        best = 0.0
        for _ in range(_ROOF_PASSES):
            started = time.perf_counter()
            list(self._pool.map(_total, self._parts))
            best = max(best, sum(part.nbytes for part in self._parts) / (time.perf_counter() - started) / 1e9)
        return round(best, 2)


def place(turn: Turn) -> tuple[Any, ...]:
    """Return the key of a turn in its run."""
    return tuple(turn[key] for key in ("model", "round", "level", "part", "contestant"))


def asked(contestant: Contestant, prompts: Sequence[Prompt], every: Sequence[Prompt]) -> list[Prompt]:
    """Select the prompts that a contestant is asked: those among the first 1/``share`` of every prompt."""
    own = {prompt.id for prompt in every[: -(-len(every) // contestant.share)]}
    return [prompt for prompt in prompts if prompt.id in own]


def turns_of(
    model: str, number: int, contestants: Sequence[Contestant], prompts: Sequence[Prompt], levels: Sequence[int], together: int
) -> Iterator[tuple[Turn, Contestant | None, list[Prompt]]]:
    """Yield the turns of round ``number``; those of a level and part are adjacent, in an order that every other round reverses.

    A turn has ``together`` prompts with one request at a time, and all prompts with more.
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
    """Wait until no child process computes: vLLM's go on for about a second after their last answer.

    Returns:
        Whether they came to rest in time.
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
    """Return the CPU seconds of each child process by id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


class Rounds:
    """Runs and keeps the turns of one model."""

    def __init__(self, field: Field, kept: Kept, roof: Roof, max_tokens: int, bench: Callable[[str], Turn], say: Say) -> None:
        """``bench`` runs llama.cpp's own bench for a system, see ``llama_bench``."""
        self._field, self._kept, self._roof = field, kept, roof
        self._max_tokens, self._bench, self._say = max_tokens, bench, say
        self.missing: dict[str, str] = {}  # by system: why it is not available

    def run(self, turns: Sequence[tuple[Turn, Contestant | None, list[Prompt]]]) -> None:
        """Run the turns that are not kept yet."""
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
                measured = self._timed_once(system) if contestant is None else self._measured(turn, contestant, prompts)
                self._kept.add(turn | measured)
            except MissingPeerError as error:
                if system == "ours":
                    raise
                self.missing[system] = str(error)
                self._say(f"n/a: {error}")

    def _timed_once(self, system: str) -> Turn:
        """Return the steps of this engine by rows, or llama.cpp's own bench."""
        self._settle()
        before = self._roof.read()
        job = {"mode": "rows", "repeats": ROW_REPEATS, "prompt_tokens": ROW_CONTEXT}
        found = self._field.ask(system, job) if system == "ours" else self._bench(system)
        return {"roof": [before, self._roof.read()], "found": found}

    def _measured(self, turn: Turn, contestant: Contestant, prompts: Sequence[Prompt]) -> Turn:
        """Return numbers by prompt, the memory's speed before and after, and hashes of the answers."""
        asks = [[prompt.id, prompt.ids, prompt.references] for prompt in prompts]
        job = {"mode": contestant.mode, "running": turn["level"], "max_tokens": self._max_tokens, "asks": asks}
        if turn["part"] == 0:  # untimed: loads the model, compiles, reads tables
            self._field.ask(contestant.system, job | {"max_tokens": 4, "asks": asks[:2], "fresh": "warm"})
        self._settle()
        before = self._roof.read()
        reply = self._field.ask(contestant.system, job | {"fresh": f"{turn['round']}/{turn['level']}/{contestant.name}"})
        after = self._roof.read()
        return {
            "roof": [before, after],
            "asks": [prompt.id for prompt in prompts],
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
            self._say("the processes of other contestants do not come to rest and disturb what is measured")


def llama_bench(program: Path, model: Path, threads: int) -> dict[str, Any]:
    """Return tokens per second of a prompt of 512 tokens and of an output of 128 in llama.cpp's own bench.

    Raises:
        MissingPeerError: it fails.
    """
    command = [str(program), "--model", str(model), "--threads", str(threads), "-p", "512", "-n", "128", "-r", "2", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MissingPeerError(f"llama-bench fails: {done.stderr.strip()[-200:]}")
    speeds = {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in json.loads(done.stdout)}
    return {kind: speeds[kind] for kind in ("prefill", "decode")}
