"""A replica in simulated time: the real scheduler and the real drafters along known outputs, without a model."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.actors.lookahead.width import WidthChoice, WidthChoices
from outrider.configs.slices import EngineOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.replay import KnownText, known_rows, verify_known
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.decoding.sources.text_keys import text_key
from outrider.decoding.tree import Acceptance, DraftTree, TreePart
from outrider.engine.kv.prefix_cache import PrefixCache
from outrider.engine.scheduling.scheduler import RowAllotment, Scheduler
from outrider.experiments.simulation.steps import RankLoad, StepTimes

TENANT = "simulated"
_LAZY_LAG = 16  # of ``actors.lookahead.rank_state``


class KnownTarget:
    """``Target`` of drafters along known outputs."""

    def __init__(self, vocab_size: int, end_token: int, max_model_len: int, curve: LatencyCurve) -> None:
        self.end_token_ids: tuple[int, ...] = (end_token,)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._curve = curve

    def bigram_table(self, width: int) -> Int32Array:
        """Raise ``ValueError``: known outputs have no rankings."""
        raise ValueError("a strategy drafts from the model's own ranking, which known outputs do not have")

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``bigram_table``."""
        return self.bigram_table(width)

    def latency(self) -> LatencyCurve:
        """See ``Target``."""
        return self._curve


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request from one step."""

    key: str
    tokens: tuple[int, ...]
    offset: int  # output tokens before them
    drafted: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Duration and result of one step."""

    seconds: float
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class _Live:
    """A running request."""

    request: Request
    known: list[int]
    computed: list[int] = field(default_factory=list)  # tokens that each rank has computed; empty before the first step


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of a step for one request."""

    live: _Live
    end: int  # tokens that are computed after it
    tree: DraftTree | None  # None for a chunk of a prefill
    decodes: bool  # one token and its drafts


class _Tally:
    """Work of one rank in a step, as in ``actors.lookahead.rank_state.RankState.send_step``.

    The leader computes all of a prefill and its part of each tree. Another rank first computes the tokens that it lacks; if its
    part of a tree is only the root, it computes nothing until it lacks 16 tokens, and the step does not wait for it.
    """

    __slots__ = ("_bare", "_context", "_rows", "_sequences", "awaited")

    def __init__(self) -> None:
        self._sequences = self._rows = self._context = self._bare = 0
        self.awaited = False

    @property
    def load(self) -> RankLoad:
        """Return the total."""
        return RankLoad(self._sequences, self._rows, self._context, self._bare)

    def add(self, rank: int, work: _Work, computed: int, part: TreePart | None, acceptance: Acceptance | None) -> int:
        """Add a request's work, and return how many of its tokens the rank has computed then.

        Example: root 7 with the branches 1 2 and 3 on two ranks, and the target emits 3 5. Each computes the root and its branch;
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


def _held(part: TreePart, acceptance: Acceptance) -> int:
    """Return how many of the accepted rows, from the root on, are in a part."""
    own = set(part.rows.tolist())
    count = 0
    while count < len(acceptance.rows) and acceptance.rows[count] in own:
        count += 1
    return count


class SimulatedReplica:
    """Schedules, drafts and verifies as the engine does, with ``StepTimes`` and known outputs instead of a model.

    Time is an argument: a step is computed at once, and its result counts after its seconds. Sampling (known outputs are accepted
    token by token, LLMA, arXiv 2304.04487, section 3.2), stop strings and cancellations are left out. With several ranks, trees
    are partitioned as in lookahead parallelism, and each rank computes again what another one accepted; the choice whether a step
    is shared is that of a served group.
    """

    def __init__(
        self, choice: StrategyChoice, times: StepTimes, target: KnownTarget, options: EngineOptions, budget: int, adaptive: bool
    ) -> None:
        """
        Args:
            choice: a strategy that needs no logits.
            times: of the steps.
            target: of the drafter.
            options: of the scheduler.
            budget: maximum draft tokens of a request in a step, for each rank.
            adaptive: see ``configs.slices.ParallelismOptions``; else every step is shared.

        Raises:
            ValueError: the strategy needs logits or a draft model.
        """
        self._drafter = choice.build()
        if self._drafter.needs_logits or self._drafter.draft_rows:
            raise ValueError(f"{choice.label} cannot be simulated: it needs a model that runs, and only outputs are known")
        self._drafter.prepare(target)
        self._times, self._target, self._plain = times, target, choice.name == PLAIN
        self._now = 0.0
        slots = options.most_slots(times.ranks > 1)
        self._scheduler = Scheduler(options, budget, self._place, lambda: self._now, slots)
        self._prefixes = PrefixCache(slots) if options.prefix_caching else None
        self._live: dict[str, _Live] = {}
        self._choices = WidthChoices() if adaptive and times.ranks > 1 else None
        self._width = self._decoding = 1
        self._propose_s: float | None = None  # of the last step
        self.told: deque[tuple[float, str, Piece]] = deque()  # from other replicas: time of arrival, tenant, piece
        self.steps, self.busy_s = 0, 0.0

    @property
    def load(self) -> int:
        """Return the number of running and waiting requests."""
        return len(self._live)

    def add(self, key: str, text: KnownText, now: float) -> None:
        """Add a request."""
        self._now = now
        params = SamplingParams(max_tokens=len(text.output_ids))
        request = Request(key, text.prompt_ids, params, text.references, tenant=TENANT)
        request.scope = TENANT
        self._live[key] = _Live(request, text.output_ids.tolist())
        self._scheduler.add(request)

    def step(self, now: float) -> Step | None:
        """Return the next step; None without work."""
        self._now = now
        self._learn(now)
        choice = self._choose()
        works, drafted_for = self._plan()
        if not works:
            return None
        self.steps += 1
        loads, outcomes = self._compute(works)
        seconds = self._times.seconds(loads, drafted_for)
        self.busy_s += seconds
        if choice is not None and all(work.decodes for work in works):
            self._decoding = len(works)
            choice.record_step(sum(one.count for one in outcomes if one is not None), seconds)
        return Step(seconds, tuple(self._commit(work, one) for work, one in zip(works, outcomes, strict=True) if one is not None))

    def _choose(self) -> WidthChoice | None:
        """Choose whether the step is shared, and set the drafter's width."""
        ranks, choice = self._times.ranks, None
        if self._choices is not None:
            choice = self._choices.of(ranks, self._decoding)
        width = ranks if choice is None or choice.shared else 1
        self._drafter.ranks = self._width = width
        return choice

    def _learn(self, now: float) -> None:
        """Add the tokens of other replicas that have arrived to the history."""
        memory = self._drafter.histories
        while self.told and self.told[0][0] <= now:
            _, tenant, piece = self.told.popleft()
            history = None if memory is None else memory.of(tenant)
            if history is not None:
                history.extend(text_key(piece.key), piece.offset, piece.tokens, piece.finished)

    def _plan(self) -> tuple[list[_Work], int]:
        """Plan a step as ``engine.scheduling.planner``, and return the number of requests that were drafted for too."""
        shares = self._scheduler.schedule(self._width)
        load = dataclasses.replace(_step_load(shares), propose_s=self._propose_s)
        asked = [share for share in shares if share.draft_rows > 0 and not self._plain]
        trees = self._drafter.propose([share.request for share in asked], [share.draft_rows for share in asked], load)
        self._propose_s = self._times.host.propose_s * len(asked)
        drafts = {}
        for share, tree in zip(asked, trees, strict=True):
            request = share.request
            drafts[request.request_id] = tree.clipped(
                share.draft_rows + 1, request.remaining - 1, self._target.vocab_size,
                self._target.max_model_len - request.num_tokens,
            )  # fmt: skip
        rows = sum(-(-(len(tree) - 1) // self._width) for tree in drafts.values())
        works = []
        for share in self._scheduler.top_up(shares, rows):
            request, own = share.request, None
            if share.end == request.num_tokens:
                own = drafts.get(request.request_id) or DraftTree.chain(request.root, ())
            live = self._live[request.request_id]
            if not live.computed:
                live.computed = [request.num_computed] * self._times.ranks
            decodes = own is not None and share.end - request.num_computed == 1
            works.append(_Work(live, share.end, own, decodes))
        return works, len(asked)

    def _compute(self, works: Sequence[_Work]) -> tuple[list[RankLoad], list[Acceptance | None]]:
        """Return the load of each rank that the step waits for, the leader first, and the acceptances."""
        tallies = [_Tally() for _ in range(self._times.ranks)]
        outcomes: list[Acceptance | None] = []
        for work in works:
            live = work.live
            if self._prefixes is not None and live.request.slot is not None:
                self._prefixes.cut(live.request.slot, live.computed[0])
                self._prefixes.keep(live.request.slot, TENANT, live.request.tokens[: work.end])
            acceptance = None if work.tree is None else verify_known(work.tree, live.request, live.known)
            parts = [] if work.tree is None else work.tree.partition(self._width)
            for rank, tally in enumerate(tallies):
                part = parts[rank] if rank < len(parts) else None
                live.computed[rank] = tally.add(rank, work, live.computed[rank], part, acceptance)
            live.request.num_computed = work.end + (0 if acceptance is None else len(acceptance.rows))
            outcomes.append(acceptance)
        return [tally.load for rank, tally in enumerate(tallies) if not rank or tally.awaited], outcomes

    def _commit(self, work: _Work, acceptance: Acceptance) -> Piece:
        """Append the accepted tokens, and finish the request at the end of its output."""
        request, tree = work.live.request, work.tree
        assert tree is not None
        offset = request.num_output
        tokens = [*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token]
        request.commit(tokens)
        if request.remaining:
            self._drafter.observe(request, tree, known_rows(tree, acceptance), acceptance)
        else:
            self._scheduler.remove(request)
            del self._live[request.request_id]
            self._drafter.finish(request)
        return Piece(request.request_id, tuple(tokens), offset, tree.num_candidates - 1, not request.remaining)

    def _place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """Choose a slot; see ``Executor.place``."""
        if self._prefixes is None:
            return free[0], request.num_computed
        found = self._prefixes.place(request.tokens, TENANT, free)
        self._live[request.request_id].computed = []
        return found.slot, found.length


def _step_load(shares: Sequence[RowAllotment]) -> StepLoad:
    """Return the load of a step without drafts."""
    rows = context = prefill = 0
    for share in shares:
        request = share.request
        own = share.end - request.num_computed
        rows, context = rows + own, context + request.num_computed
        prefill += own if request.num_computed < request.num_tokens - 1 else 0
    return StepLoad(len(shares), rows, context, prefill)
