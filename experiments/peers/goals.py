"""What the turns say: speeds of each contestant, and the goals, each with its figure and whether it is met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.peers.rounds import ONCE, Turn
from experiments.peers.worker import ROWS, SINGLE

NOISE = 0.97  # of "never below": so much of one workload's speed comes and goes with the machine
HOST_PARAMETERS = 150e6  # up to here a model counts as one of 110 M parameters
VLLM = ("vLLM", "vLLM ngram", "vLLM suffix")
_KINDS = ("decode", "all", "prefill")


class Speeds:
    """The turns of one model: tokens per second, by round, on the prompts that all who are compared were asked."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns = list(turns)
        self.rounds = sorted({turn["round"] for turn in self._turns})

    def of(self, name: str, level: int) -> list[Turn]:
        """A contestant's turns with so many requests at once."""
        return [turn for turn in self._turns if turn["contestant"] == name and turn["level"] == level]

    def asks(self, name: str, level: int, number: int) -> set[str]:
        """What it answered in a round."""
        return {key for turn in self.of(name, level) if turn["round"] == number for key in turn["asks"]}

    def rate(self, name: str, level: int, number: int, kind: str, keys: set[str] | None = None) -> float | None:
        """Tokens per second of a round.

        Args:
            name: of the contestant.
            level: requests at once.
            number: of the round.
            kind: ``decode``, tokens after the first over the time after it, and ``prefill``, both for one request at a time;
                ``all``, tokens over the time that all took, which is of whole turns.
            keys: the prompts that count; all when absent.

        Returns:
            None where it was not asked.
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

    def ratios(self, name: str, other: str, level: int, kind: str, within: set[str] | None = None) -> list[float]:
        """How many times as fast as another, round by round, on the same prompts."""
        found = []
        for number in self.rounds:
            keys = self.asks(name, level, number) & self.asks(other, level, number)
            keys = keys if within is None else keys & within
            if kind == "all" and self.asks(name, level, number) != self.asks(other, level, number):
                continue
            pair = (self.rate(name, level, number, kind, keys), self.rate(other, level, number, kind, keys))
            if pair[0] and pair[1]:
                found.append(pair[0] / pair[1])
        return found

    def roofs(self, turns: Iterable[Turn] | None = None) -> list[float]:
        """GB/s that were read beside some turns, of all when absent."""
        return [value for turn in (self._turns if turns is None else turns) for value in turn["roof"]]

    def found(self, name: str) -> list[dict[str, Any]]:
        """What was timed once a round."""
        return [turn["found"] for turn in self.of(name, ONCE)]

    def prefill_ratios(self, name: str, bench: str) -> list[float]:
        """How many times as fast as llama.cpp's own bench computes a prompt, round by round."""
        theirs = {turn["round"]: turn["found"]["prefill"] for turn in self.of(bench, ONCE)}
        ours = {number: self.rate(name, 1, number, "prefill") for number in theirs}
        return [rate / theirs[number] for number, rate in ours.items() if rate]

    def same_answers(self, name: str, other: str) -> list[float]:
        """The share of answers at one request that are another's, round by round."""
        found: dict[str, dict[tuple[int, str], str]] = {
            each: {
                (turn["round"], key): answer
                for turn in self.of(each, 1)
                for key, answer in zip(turn["asks"], turn["answers"], strict=True)
            }
            for each in (name, other)
        }
        both = found[name].keys() & found[other].keys()
        same = [(number, found[name][number, key] == found[other][number, key]) for number, key in both]
        return [statistics.fmean(equal for at, equal in same if at == number) for number in sorted({at for at, _ in same})]

    def best_ratios(self, name: str, others: Sequence[str], level: int, kind: str) -> list[float]:
        """Beside the fastest of some in each round."""
        per = [self.ratios(name, other, level, kind) for other in others]
        per = [ratios for ratios in per if ratios]
        return [min(of) for of in zip(*per, strict=False)]


def goals(
    speeds: Speeds, told: Mapping[str, Mapping[str, Any]], workloads: Mapping[str, str], missing: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A line for each goal.

    Args:
        speeds: of a model.
        told: what our engine said of the model, by system: ``weight_bytes``, ``resident_bytes`` (without KV), ``parameters``.
        workloads: by key of a prompt.
        missing: by system why it could not be had.

    Returns:
        ``goal``, ``figure`` (the median over rounds), ``lowest``, ``highest`` and ``met``; of one that cannot be judged,
        ``figure`` and ``met`` are None, and ``why`` says so.
    """
    why = "; ".join(dict.fromkeys(missing.values())) or "not run"
    rows: list[dict[str, Any]] = []
    own = told["ours"]

    def add(goal: str, values: Sequence[float], bound: float, at_most: bool = False) -> None:
        if not values:
            rows.append({"goal": goal, "figure": None, "met": None, "why": why})
            return
        figure = statistics.median(values)
        met = figure <= bound if at_most else figure >= bound
        rows.append({"goal": goal, "figure": figure, "lowest": min(values), "highest": max(values), "met": met})

    for other, bound in (("vLLM", 2.5), ("llama.cpp", 2.5), ("llama.cpp Q4_1", 1.2)):
        add(f"plain at 1, times {other}: at least {bound:g}", speeds.ratios("plain", other, 1, "decode"), bound)
    quantized = (("plain Q4_1", "llama.cpp Q4_1", 1.3), ("auto Q4_1", "llama.cpp Q4_1", 2.0), ("plain int8", "plain", 1.5))
    for ours, other, bound in quantized:
        add(f"{ours} at 1, times {other}: at least {bound:g}", speeds.ratios(ours, other, 1, "decode"), bound)
    for ours, bench in (("plain", "llama-bench"), ("plain Q4_1", "llama-bench Q4_1")):
        add(f"{ours}, prefill, times {bench}'s: at least 1", speeds.prefill_ratios(ours, bench), 1.0)
    for ours, other in (("auto", "plain"), ("auto Q4_1", "plain Q4_1")):
        add(f"{ours} at 1, share of answers that are {other}'s: 1", speeds.same_answers(ours, other), 1.0)
    add("plain at 1, share of the memory's roof: at least 0.60", _roof_shares(speeds, own), 0.6)
    steps = [found["ms"] for found in speeds.found("rows")]
    one, eight = map(str, ROWS)
    add("8 rows of a request, times the step of one: at most 1.15", [ms[eight] / ms[one] for ms in steps], 1.15, at_most=True)
    for level in (8, 32):
        add(f"plain at {level}, times vLLM: at least 1.2", speeds.ratios("plain", "vLLM", level, "all"), 1.2)
    add("prefill, times vLLM: at least 1.1", speeds.ratios("plain", "vLLM", 1, "prefill"), 1.1)
    for other, bound in (("vLLM ngram", 2.5), ("vLLM suffix", 2.5), ("llama.cpp lookup", 3.0)):
        add(f"auto at 1, times {other}: at least {bound:g}", speeds.ratios("auto", other, 1, "decode"), bound)
    for level in (8, 32):
        add(f"auto at {level}, times the best of vLLM: at least 1", speeds.best_ratios("auto", VLLM, level, "all"), 1.0)
        add(f"auto at {level}, times plain: at least 1", speeds.ratios("auto", "plain", level, "all"), 1.0)
    name, worst = _worst_workload(speeds, workloads)
    add(f"auto at 1, times our best strategy, worst workload{name}: at least 1 but for noise ({NOISE:g})", worst, NOISE)
    for system, of in told.items():
        if "resident_bytes" in of:
            add(
                f"{system}: resident without KV, times the weights: at most 1.15",
                [of["resident_bytes"] / of["weight_bytes"]],
                1.15,
                at_most=True,
            )
    if own.get("parameters", 0) <= HOST_PARAMETERS:
        add("auto at 1, share of a step that is not the forward: at most 0.07", _host_shares(speeds), 0.07, at_most=True)
    return rows


def _roof_shares(speeds: Speeds, told: Mapping[str, Any]) -> list[float]:
    shares = []
    for number in speeds.rounds:
        own = [turn for turn in speeds.of("plain", 1) if turn["round"] == number]
        rate = speeds.rate("plain", 1, number, "decode")
        if own and rate and "weight_bytes" in told:
            shares.append(rate * told["weight_bytes"] / 1e9 / statistics.median(speeds.roofs(own)))
    return shares


def _host_shares(speeds: Speeds) -> list[float]:
    by_round: list[float] = []
    for number in speeds.rounds:
        own = [turn for turn in speeds.of("auto", 1) if turn["round"] == number and "host_share" in turn]
        decode = [sum(turn["last_s"]) - sum(turn["first_s"]) for turn in own]
        if sum(decode):
            by_round.append(sum(turn["host_share"] * s for turn, s in zip(own, decode, strict=True)) / sum(decode))
    return by_round


def _worst_workload(speeds: Speeds, workloads: Mapping[str, str]) -> tuple[str, list[float]]:
    """Where ``auto`` is furthest behind one of our own strategies, by the median over rounds: the names, and the ratios."""
    worst: tuple[str, list[float]] = ("", [])
    for workload in sorted(set(workloads.values())):
        within = {key for key, of in workloads.items() if of == workload}
        for other in ("plain", *SINGLE):
            ratios = speeds.ratios("auto", other, 1, "decode", within)
            if ratios and (not worst[1] or statistics.median(ratios) < statistics.median(worst[1])):
                worst = (f" ({workload}, {other})", ratios)
    return worst


def summary(speeds: Speeds, names: Iterable[str], levels: Sequence[int]) -> dict[str, Any]:
    """By contestant and level: tokens per second of each round, of each kind, and how many answers are plain's at one."""
    plain = {key: answer for turn in speeds.of("plain", 1) for key, answer in zip(turn["asks"], turn["answers"], strict=True)}
    found: dict[str, Any] = {}
    for name in names:
        for level in levels:
            turns = speeds.of(name, level)
            if not turns:
                continue
            entry: dict[str, Any] = {}
            for kind in _KINDS if level == 1 else ("all",):
                rates = [rate for number in speeds.rounds if (rate := speeds.rate(name, level, number, kind))]
                entry[f"{kind}_tokens_per_s"] = [round(rate, 2) for rate in rates]
            pairs = [(plain.get(key), own) for turn in turns for key, own in zip(turn["asks"], turn["answers"], strict=True)]
            known = [own == expected for expected, own in pairs if expected is not None]
            entry["as_plain"], entry["answers"] = sum(known), len(known)
            found.setdefault(name, {})[str(level)] = entry
    return found
