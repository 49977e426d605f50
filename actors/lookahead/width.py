"""Choice of how many ranks share a step: all or one, whichever is faster."""

from __future__ import annotations

_TRIAL_STEPS = 16  # steps of one trial of a width
_TRIALS = 2  # trials of each width before the first comparison
_EVERY = 16  # trials of the faster width per trial of the other
_DECAY = 0.99  # weight of earlier steps, per step


class _Pace:
    """Decaying average of tokens per second for one width."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds


class WidthChoice:
    """Chooser of the faster width, from measured step speeds, for one number of ranks and one load.

    Example: two ranks give 2.8 tokens in 36 ms, one 2.7 in 29: after 64 steps in turns one computes, and in 1 of 17 trials both.
    """

    # A shared step verifies more of a tree but takes longer. Which one pays depends on device and text, so it is measured.

    def __init__(self) -> None:
        self._paces = {True: _Pace(), False: _Pace()}  # by whether the step is shared
        self._shared, self._steps, self._trials = True, 0, 0

    @property
    def shared(self) -> bool:
        """Return whether to share the next step."""
        return self._shared

    def record_step(self, tokens: int, seconds: float) -> None:
        """Record a step of the chosen width: its emitted tokens and its duration."""
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
        # The slower width is tried again now and then, because which one pays depends on the text.
        self._shared = not faster if judged % (_EVERY + 1) == _EVERY else faster


class WidthChoices:
    """``WidthChoice`` for each number of ranks and each load, in powers of two."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, int], WidthChoice] = {}

    def of(self, ranks: int, requests: int) -> WidthChoice:
        """Return the choice for steps of ``requests`` requests that ``ranks`` ranks could share."""
        return self._choices.setdefault((ranks, requests.bit_length()), WidthChoice())
