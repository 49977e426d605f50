"""Speeds of the contestants from the turns of one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.experiments.peers.rounds import Turn

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
