"""A replica without a model: the real scheduler and the real drafters along known outputs, in simulated time."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actors.lookahead.width import WidthChoice, WidthChoices
from configs.slices import EngineOptions
from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.replay import KnownText, known_rows
from decoding.request import PLAIN, Acceptance, Request, SamplingParams, text_key
from decoding.strategy_choice import StrategyChoice
from decoding.tree import DraftTree, Int32Array
from engine.kv.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler, Share
from experiments.simulation.ranks import Live, Tally, Work, accepted
from experiments.simulation.steps import RankLoad, StepTimes

TENANT = "simulated"


class KnownTarget:
    """What drafters may ask of a target that is a set of known outputs."""

    def __init__(self, vocab_size: int, end_token: int, max_model_len: int, curve: LatencyCurve) -> None:
        """
        Args:
            vocab_size: tokens are below it.
            end_token: ends a text.
            max_model_len: tokens of prompt and output together.
            curve: of its steps.
        """
        self.end_token_ids: tuple[int, ...] = (end_token,)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._curve = curve

    def bigram_table(self, width: int) -> Int32Array:
        """See ``Target``. Raises ``ValueError``: known outputs rank nothing."""
        raise ValueError("a strategy drafts from the model's own ranking, which known outputs do not have")

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``bigram_table``."""
        return self.bigram_table(width)

    def latency(self) -> LatencyCurve:
        """See ``Target``."""
        return self._curve


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request was given by a step."""

    key: str
    tokens: tuple[int, ...]
    offset: int  # output tokens before them
    drafted: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step: how long it takes, and what it gives once it is over."""

    seconds: float
    pieces: tuple[Piece, ...]


class SimulatedReplica:
    """Schedules, drafts and verifies as the engine does, with ``StepTimes`` for the model and known outputs for what it says.

    Time is an argument: a step is computed at once, and what it gives counts when its seconds have passed. What it leaves out:
    sampling (known outputs are accepted token by token, LLMA, arXiv 2304.04487, section 3.2), stop strings and cancellations.
    With several ranks, trees are parted as in lookahead parallelism and each rank computes again what another one accepted;
    whether a step is shared follows what it brought of late, by the same choice as in a served group.
    """

    def __init__(
        self, choice: StrategyChoice, times: StepTimes, target: KnownTarget, options: EngineOptions, budget: int, adaptive: bool
    ) -> None:
        """
        Args:
            choice: who drafts; one that known outputs can drive.
            times: of the steps.
            target: as drafters see it.
            options: of the scheduler.
            budget: most drafted rows of a request in a step, for each rank.
            adaptive: see ``configs.slices.ParallelismOptions``; else every step is shared.

        Raises:
            ValueError: the strategy drafts from the target's logits, or is unknown.
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
        self._live: dict[str, Live] = {}
        self._choices = WidthChoices() if adaptive and times.ranks > 1 else None
        self._width = self._decoding = 1
        self._propose_s: float | None = None  # of the last step
        self.told: deque[tuple[float, str, Piece]] = deque()  # of other replicas: when it is known here, tenant, piece
        self.steps, self.busy_s = 0, 0.0

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._live)

    def add(self, key: str, text: KnownText, now: float) -> None:
        """Takes a request in."""
        self._now = now
        params = SamplingParams(max_tokens=len(text.output_ids))
        request = Request(key, text.prompt_ids, params, text.references, tenant=TENANT)
        request.scope = TENANT
        self._live[key] = Live(request, text.output_ids.tolist())
        self._scheduler.add(request)

    def step(self, now: float) -> Step | None:
        """The next step; None where there is nothing to do."""
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
        if choice is not None and all(work.tree is not None and work.end - work.start == 1 for work in works):
            self._decoding = len(works)
            choice.took(sum(one.count for one in outcomes if one is not None), seconds)
        return Step(seconds, tuple(self._commit(work, one) for work, one in zip(works, outcomes, strict=True) if one is not None))

    def _choose(self) -> WidthChoice | None:
        """Whether the step is shared; the drafter hears of a new width."""
        ranks, choice = self._times.ranks, None
        if self._choices is not None:
            choice = self._choices.of(ranks, self._decoding)
        width = ranks if choice is None or choice.shared else 1
        self._drafter.ranks = self._width = width
        return choice

    def _learn(self, now: float) -> None:
        """What other replicas generated, as far as it has arrived."""
        memory = self._drafter.memory
        while self.told and self.told[0][0] <= now:
            _, tenant, piece = self.told.popleft()
            history = None if memory is None else memory.of(tenant)
            if history is not None:
                history.extend(text_key(piece.key), piece.offset, piece.tokens, piece.finished)

    def _plan(self) -> tuple[list[Work], int]:
        """As ``engine.planner``, in simulated time; also how many requests were drafted for."""
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
            works.append(Work(live, request.num_computed, share.end, own))
        return works, len(asked)

    def _compute(self, works: Sequence[Work]) -> tuple[list[RankLoad], list[Acceptance | None]]:
        """What each rank computes that the step waits for, the leader first, and what is accepted."""
        tallies = [Tally() for _ in range(self._times.ranks)]
        outcomes: list[Acceptance | None] = []
        for work in works:
            live = work.live
            if self._prefixes is not None and live.request.slot is not None:
                self._prefixes.cut(live.request.slot, live.computed[0])
                self._prefixes.keep(live.request.slot, TENANT, live.request.tokens[: work.end])
            acceptance = None if work.tree is None else accepted(work.tree, live)
            parts = [] if work.tree is None else work.tree.partition(self._width)
            for rank, tally in enumerate(tallies):
                part = parts[rank] if rank < len(parts) else None
                live.computed[rank] = tally.add(rank, work, live.computed[rank], part, acceptance)
            live.request.num_computed = work.end + (0 if acceptance is None else len(acceptance.rows))
            outcomes.append(acceptance)
        return [tally.load for rank, tally in enumerate(tallies) if not rank or tally.awaited], outcomes

    def _commit(self, work: Work, acceptance: Acceptance) -> Piece:
        """Appends what was accepted, and ends the request where its output ends."""
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
        """See ``Executor.place``."""
        if self._prefixes is None:
            return free[0], request.num_computed
        found = self._prefixes.place(request.tokens, TENANT, free)
        self._live[request.request_id].computed = []
        return found.slot, found.length


def _step_load(shares: Sequence[Share]) -> StepLoad:
    """What a step computes before anything is drafted."""
    rows = context = prefill = 0
    for share in shares:
        request = share.request
        own = share.end - request.num_computed
        rows, context = rows + own, context + request.num_computed
        prefill += own if request.num_computed < request.num_tokens - 1 else 0
    return StepLoad(len(shares), rows, context, prefill)
