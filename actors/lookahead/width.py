"""How many ranks share a step: all, or one, whichever is faster."""

from __future__ import annotations

_TRIAL_STEPS = 16  # that a width is tried for at a time
_TRIALS = 2  # of each width before any is judged
_EVERY = 16  # trials of the faster width for one of the other
_DECAY = 0.99  # of what steps before count, a step


class _Pace:
    """Tokens a second of the steps of one width, the latest most."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds


class WidthChoice:
    """Chooses the width of each step by how fast steps of each were, for one number of ranks and one load.

    A shared step checks more of a tree and takes longer: messages, tokens that are computed again, ranks that get in each other's
    way. Whether that pays depends on the device and on the text, so it is measured while serving: first both widths in turns,
    then the faster one, and now and then the other.

    Example: two ranks bring 2.8 tokens in 36 ms, one 2.7 in 29. After 64 steps in turns one rank computes alone, and in one of 17
    trials of 16 steps both.
    """

    def __init__(self) -> None:
        self._paces = {True: _Pace(), False: _Pace()}  # by whether the step is shared
        self._shared, self._steps, self._trials = True, 0, 0

    @property
    def shared(self) -> bool:
        """Whether the next step is to be shared."""
        return self._shared

    def took(self, tokens: int, seconds: float) -> None:
        """Counts a whole step of the width that was to be, and the tokens that it emitted."""
        self._paces[self._shared].add(tokens, seconds)
        self._steps += 1
        if self._steps < _TRIAL_STEPS:
            return
        self._steps, self._trials = 0, self._trials + 1
        judged = self._trials - 2 * _TRIALS
        if judged < 0:
            self._shared = not self._shared
            return
        faster = self._paces[True].tokens_per_s >= self._paces[False].tokens_per_s
        self._shared = not faster if judged % (_EVERY + 1) == _EVERY else faster


class WidthChoices:
    """A ``WidthChoice`` for each number of ranks and each load, in powers of two."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, int], WidthChoice] = {}

    def of(self, ranks: int, requests: int) -> WidthChoice:
        """For steps of so many requests that so many ranks could share."""
        return self._choices.setdefault((ranks, requests.bit_length()), WidthChoice())
