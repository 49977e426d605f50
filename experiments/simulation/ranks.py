"""What each rank of a simulated group computes in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from decoding.request import Acceptance, Request
from decoding.tree import DraftTree, Part
from decoding.verify.exact import verify_exact
from experiments.simulation.steps import RankLoad

_LAZY_LAG = 16  # as of ``actors.lookahead.rank_state``


@dataclass(slots=True)
class Live:
    """A request under way, and how much of it each rank has computed."""

    request: Request
    known: list[int]
    computed: list[int] = field(default_factory=list)  # tokens, by rank; empty before the first step


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes for a request."""

    live: Live
    start: int  # tokens that are computed, on some rank
    end: int
    tree: DraftTree | None  # None: a chunk of a prefill


def accepted(tree: DraftTree, live: Live) -> Acceptance:
    """What the known output keeps of a tree."""
    said: Iterator[int] = iter(live.known[live.request.num_output :])
    return verify_exact(tree, lambda row: next(said), live.request.remaining, frozenset())


class Tally:
    """What one rank computes in a step, and whether the step waits for it (see
    ``actors.lookahead.rank_state.RankState.partition``).

    The leader computes all of a prefill and its part of each tree. So does another rank, which first computes what it lacks of
    the text; of a request of whose tree it has the root alone it computes nothing until it lacks 16 tokens, and nobody waits.
    """

    __slots__ = ("_bare", "_context", "_rows", "_sequences", "awaited")

    def __init__(self) -> None:
        self._sequences = self._rows = self._context = self._bare = 0
        self.awaited = False

    @property
    def load(self) -> RankLoad:
        """All of it."""
        return RankLoad(self._sequences, self._rows, self._context, self._bare)

    def add(self, rank: int, work: Work, computed: int, part: Part | None, acceptance: Acceptance | None) -> int:
        """Takes in a request's work; how many of its tokens the rank has computed then.

        Example: root 7 with the branches 1 2 and 3 on two ranks, and the target says 3 5. Each computes the root and its branch;
        the next step begins with 3 5 on the first rank and with 5 on the second, which has computed the 3.
        """
        drafted = 0 if part is None else len(part.tree) - 1
        self.awaited |= drafted > 0
        end, logits = work.end, int(work.tree is not None)
        if rank and work.tree is not None and not drafted:
            end, logits = end - 1, 0
            if end - computed < _LAZY_LAG:
                return computed
        self._sequences += 1
        self._rows += end - computed + drafted
        self._bare += end - computed - logits
        self._context += computed
        return end + (0 if part is None or acceptance is None else _held(part, acceptance))


def _held(part: Part, acceptance: Acceptance) -> int:
    """How many of the accepted rows a rank has computed: those that lie in its part, from the root on."""
    own = set(part.rows.tolist())
    count = 0
    while count < len(acceptance.rows) and acceptance.rows[count] in own:
        count += 1
    return count
