"""Executor of a step: computes the draft trees with the target model, verifies them, and keeps the KV of accepted tokens."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.request import Request, SamplingParams, TokenLogprob
from outrider.decoding.sampling.nucleus import compile_nucleus
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.sampling.ranking import argmax_rows, blocks_of, compile_ranking
from outrider.decoding.sampling.row_draw import compile_draws
from outrider.decoding.sampling.sampler import choose, token_logprobs
from outrider.decoding.tree import Acceptance, ChoiceTree, DraftTree, Rule
from outrider.decoding.tree_rows import compile_rows
from outrider.decoding.verify.exact import verify_exact
from outrider.decoding.verify.target_probabilities import HostRows, LogitRows, TargetDistributions
from outrider.engine.accelerator import accelerator, device_error, is_out_of_memory
from outrider.engine.errors import RequestError, fault_of
from outrider.engine.forward.batch import Batch, ScheduledRequest, pack
from outrider.engine.forward.rope import LengthRope
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.text.grammar import Grammars

logger = logging.getLogger(__name__)

_SCORED_TOGETHER = 64  # rows whose log-softmax is in memory at once
_COMPILING = ThreadPoolExecutor(2, thread_name_prefix="grammars")


@dataclass(slots=True)  # not frozen: frozen is slower to create, and each step creates one per request
class VerifyResult:
    """Verification result of one request's draft tree."""

    tree: DraftTree  # the work's tree, or fewer of its rows if a rank was lost
    acceptance: Acceptance  # rows of ``tree``
    target: TargetRows  # model output at each row of ``tree``
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per emitted token, if requested
    scores: tuple[tuple[float, ...], ...] | None = None  # of the request's choices: the log-probability of each token


class Executor(Protocol):
    """Port that computes and verifies draft trees: one replica, or a lookahead-parallel or tensor-parallel group of ranks."""

    def begin_step(self) -> int:
        """Begin a step, before it is planned. Return the number of ranks that share its trees; 1 for a single replica."""
        ...

    @property
    def rope(self) -> LengthRope | None:
        """Return how the rotary frequencies depend on the length of the text; None if they are constant."""
        ...

    @property
    def slots(self) -> int:
        """Return the number of KV slots, at least the number of requests in a step."""
        ...

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """Choose a slot of ``free`` for a request that starts or resumes; return it and the number of tokens with their KV in it.

        These first tokens, never the last one, count as computed. ``free`` is in order of release and not empty.
        """
        ...

    def end(self, request: Request) -> None:
        """Forget a request that has ended, whether it ran or not. Its id may be reused afterwards."""
        ...

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Assert, between steps, that the state of the slots is consistent; ``running`` are all requests with a slot."""
        ...

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """Compute the rows of at least one work; return the verification result of each tree, and None for works without one.

        Afterwards ``work.end + accepted rows`` tokens of a request with a tree count as computed, and ``work.end`` of one
        without. ``top_k`` is the number of likeliest tokens per row that the outcomes must provide, without effect if the logits
        are available.
        """
        ...


def _reads_logits(work: ScheduledRequest) -> bool:
    """Return whether verification needs more than the likeliest token below each row."""
    return not work.request.argmax or work.rule is not None or work.request.params.logprobs is not None


class Verifier:
    """Verifier of computed trees, with the penalty counts and grammar states of the requests, both of committed tokens only."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._rules: dict[str, LogitRules] = {}  # by the id of a live request

    def verify(self, work: ScheduledRequest, target: TargetRows, root: torch.Tensor | None = None) -> VerifyResult:
        """Verify a tree; ``root`` has the root's [vocab] logits on the host if they are needed there."""
        request, tree, ids = work.request, work.tree, target.ids
        assert tree is not None
        if request.choices is not None:
            scores = _choice_scores(request.choices, target.logits)
            return VerifyResult(tree, Acceptance((), int(ids[0])), target, scores=scores)
        logits: LogitRows | None = None
        if _reads_logits(work):
            logits = target.logits if root is None else HostRows(target.logits, root)
        if logits is None or (request.argmax and work.rule is None):
            if len(ids) == 1:
                acceptance = Acceptance((), int(ids[0]))
            else:
                acceptance = verify_exact(tree, ids.tolist().__getitem__, request.remaining, work.end_tokens)
        elif work.rule is not None:
            acceptance = self._by_rule(work.rule, work, tree, logits)
        else:
            acceptance = self._walk(work, tree, logits)
        logprobs = None
        if logits is not None and request.params.logprobs is not None:
            visited = torch.stack([logits[row] for row in (0, *acceptance.rows)])
            emitted = [*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token]
            logprobs = token_logprobs(visited, emitted, request.params.logprobs, request.params.logprob_token_ids)
        return VerifyResult(tree, acceptance, target, logprobs)

    def _by_rule(self, rule: Rule, work: ScheduledRequest, tree: DraftTree, logits: LogitRows) -> Acceptance:
        request = work.request
        rules = self._rules_of(request) if request.params.alters_logits else None
        distributions = TargetDistributions(request, tree, logits, work.end_tokens, rules)
        acceptance = rule.accept(tree, distributions)
        distributions.settle()
        assert 1 <= acceptance.count <= request.remaining, (request.request_id, acceptance, request.remaining)
        return acceptance

    def _walk(self, work: ScheduledRequest, tree: DraftTree, logits: LogitRows) -> Acceptance:
        """Choose a token at each visited row, with penalties and grammar of the prefix that leads to the row."""
        request, params = work.request, work.request.params
        rules = self._rules_of(request) if params.alters_logits else None
        position = work.end  # of the token to choose; each call descends one level

        def token_at(row: int) -> int:
            nonlocal position
            if rules is not None and row > 0:
                rules.push(int(tree.tokens[row]))
            barred = work.end_tokens if position - request.num_prompt < params.min_tokens else ()
            token = choose(logits[row], params, position, rules, barred)
            position += 1
            return token

        acceptance = verify_exact(tree, token_at, request.remaining, work.end_tokens)
        if rules is not None:
            rules.truncate(request.num_output)  # visited tokens need not be committed ones
        if request.report and params.penalized and params.grammar is None:
            row, stats = (0, *acceptance.rows)[-1], request.stats
            barred = work.end_tokens if position - 1 - request.num_prompt < params.min_tokens else ()
            refused = _refused_by_penalty(tree, row, acceptance.next_token, logits, params, position - 1, barred)
            stats.refused_by_penalty = (stats.refused_by_penalty or 0) + refused
        return acceptance

    def _rules_of(self, request: Request) -> LogitRules:
        rules = self._rules.get(request.request_id)
        if rules is None:
            if request.params.grammar is not None and request.grammar is None:  # request of another rank's engine
                assert self._grammars is not None, request.request_id
                request.grammar = self._grammars.start(request.params.grammar, request.account)
            rules = self._rules[request.request_id] = LogitRules(request.params, request.prompt_ids, request.grammar)
        rules.catch_up(request.output_ids)  # advance by the committed tokens
        return rules

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._rules.pop(request.request_id, None)


def _refused_by_penalty(
    tree: DraftTree, row: int, token: int, logits: LogitRows, params: SamplingParams, position: int, barred: Collection[int]
) -> bool:
    """Return whether the walk would have descended below ``row``, where it chose ``token``, without the penalties."""
    below = tree.tokens[: tree.num_candidates][tree.parents[: tree.num_candidates] == row]
    if not len(below) or token in below:
        return False
    free = dataclasses.replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    return choose(logits[row], free, position, LogitRules(free, ()), barred) in below


class LocalExecutor:
    """Executor of one replica, with one model in this process."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)  # of the times of steps

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self._cache, self._device = runner, runner.cache, runner.model.device
        self._verifier = Verifier(runner.grammars)
        compile_rows()
        compile_nucleus()
        compile_ranking(runner.model.dtype)
        compile_draws(runner.model.dtype)

    def begin_step(self) -> int:
        """See ``Executor``."""
        return 1

    @property
    def rope(self) -> LengthRope | None:
        """See ``Executor``."""
        return self.runner.rope

    @property
    def slots(self) -> int:
        """See ``Executor``."""
        return self._cache.slots

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """See ``Executor``."""
        with accelerator().current(self._device):
            return self._cache.place(request.tokens, request.scope, free)

    def end(self, request: Request) -> None:
        """See ``Executor``."""
        self._verifier.end(request)

    def expect(self, request: Request) -> None:
        """Compile the grammar of another rank's request in a thread while its prompt is computed. ``execute`` reports errors."""
        grammar, grammars = request.params.grammar, self.runner.grammars
        if grammar is not None and grammars is not None:
            _COMPILING.submit(grammars.start, grammar, request.account)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """See ``Executor``."""
        self._cache.prefixes.check_integrity(self._cache.capacity)
        for request in running:
            assert request.slot is not None, request.request_id
            kept = self._cache.prefixes.tokens(request.slot)
            assert len(kept) <= request.num_computed, (request.request_id, len(kept), request.num_computed)
            assert (kept == request.tokens[: len(kept)]).all(), (request.request_id, request.slot)
            states = self._cache.states
            at = -1 if states is None or not request.num_computed else states.anchor(request.slot)
            assert at <= request.num_computed, (request.request_id, at, request.num_computed)

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """See ``Executor``."""
        with accelerator().current(self._device):
            return self._execute(works)

    def _execute(self, works: Sequence[ScheduledRequest]) -> list[VerifyResult | None]:
        batch = pack(works)
        prefixes, states = self._cache.prefixes, self._cache.states
        for work, segment in zip(works, batch.segments, strict=True):
            prefixes.cut(segment.slot, segment.start)
            if states is not None:
                request, anchor = work.request, work.end - (work.tree is not None)
                states.request_snapshot(segment.slot, request.scope, request.tokens, work.start, anchor, request.num_prompt)
        if any(work.request.prompt_logprobs is not None for work in works):
            wanted = len(batch.logit_rows)
            both = self._forward(_with_prompt_rows(works, batch))
            _score_prompts(works, both[wanted:])
            logits = both[:wanted]
        else:
            logits = self._forward(batch)
        highest = blocks_of(logits)
        greedy, roots = argmax_rows(logits, highest), _roots(works, batch.logit_starts, logits)
        outcomes: list[VerifyResult | None] = []
        for work, segment, first in zip(works, batch.segments, batch.logit_starts, strict=True):
            # Not beyond ``end``: a group of ranks may commit other tokens than those accepted here.
            prefixes.keep(segment.slot, work.request.scope, work.request.tokens[: work.end])
            if first is None:
                outcomes.append(None)
                continue
            assert work.tree is not None, work.request.request_id
            target = TargetRows(greedy[first : first + len(work.tree.tokens)], logits, None, first, highest, self.runner.hidden)
            outcome = self._verify(work, target, roots.get(first))
            if outcome.acceptance.rows:  # entries from ``end - 1`` on: the root, then the tree's rows in order
                self._cache.compact(segment.slot, work.end - 1, (0, *outcome.acceptance.rows))
            outcomes.append(outcome)
        return outcomes

    def _forward(self, batch: Batch) -> torch.Tensor:
        return self.runner.forward(batch)

    def _verify(self, work: ScheduledRequest, target: TargetRows, root: torch.Tensor | None) -> VerifyResult:
        """Verify a tree; on an error, set the request's fault, which ends it."""
        assert work.tree is not None
        try:
            return self._verifier.verify(work, target, root)
        except Exception as error:
            if is_out_of_memory(error) or device_error(error, self.runner.model.device) is not None:
                raise  # not caused by the request
            if not isinstance(error, RequestError):
                logger.exception("%s: verifying its tree failed", work.request.label)
            work.request.fault, work.request.fault_field = fault_of(error)
            return VerifyResult(work.tree, Acceptance((), int(target.ids[0])), target)


def _roots(works: Sequence[ScheduledRequest], starts: Sequence[int | None], logits: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the logits of the roots to read, [vocab] by row of ``starts``, copied at once; empty if they are on the CPU."""
    if logits.is_cpu:
        return {}
    rows = [first for work, first in zip(works, starts, strict=True) if first is not None and _reads_logits(work)]
    return dict(zip(rows, logits[torch.tensor(rows).to(logits.device)].cpu(), strict=True)) if rows else {}


def _with_prompt_rows(works: Sequence[ScheduledRequest], batch: Batch) -> Batch:
    """Return the batch with the prompt rows to score appended to ``logit_rows``.

    Example: tokens 4 to 6 of a prompt of 10 are computed by rows 20 to 22, which score tokens 5 to 7.
    """
    pairs = zip(works, batch.segments, strict=True)
    rows = [np.arange(segment.offset, segment.offset + _prompt_rows(work)) for work, segment in pairs]
    return dataclasses.replace(batch, logit_rows=np.concatenate([batch.logit_rows, *rows]))


def _score_prompts(works: Sequence[ScheduledRequest], logits: torch.Tensor) -> None:
    """Store prompt scores in ``Request.prompt_scores``; ``logits``, [n, vocab], are of the rows of ``_with_prompt_rows``."""
    first = 0
    for work in works:
        request, count = work.request, _prompt_rows(work)
        if not count:
            continue
        assert request.prompt_logprobs is not None and work.start <= len(request.prompt_scores), request.request_id
        del request.prompt_scores[work.start :]  # recomputed after a preemption
        tokens = request.tokens[work.start + 1 : work.start + 1 + count].tolist()
        for begin in range(0, count, _SCORED_TOGETHER):
            part = slice(begin, min(begin + _SCORED_TOGETHER, count))
            request.prompt_scores += _scores(logits[first:][part], tokens[part], request.prompt_logprobs)
        first += count
    assert first == len(logits), (first, len(logits))


def _prompt_rows(work: ScheduledRequest) -> int:
    if work.request.prompt_logprobs is None:
        return 0
    # The row of token i scores token i + 1. The last token's row is the root of the tree.
    return max(0, min(work.end, work.request.num_prompt - 1) - work.start)


def _choice_scores(choices: ChoiceTree, logits: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Return the log-probability of each token of each choice; ``logits``, [n, vocab], are of the rows of the tree."""
    pairs = list(dict.fromkeys(pair for choice in choices.scored for pair in choice))
    found: dict[tuple[int, int], float] = {}
    for begin in range(0, len(pairs), _SCORED_TOGETHER):
        part = pairs[begin : begin + _SCORED_TOGETHER]
        entries = token_logprobs(logits[[row for row, _ in part]], [token for _, token in part], 0)
        found |= zip(part, (entry.logprob for entry in entries), strict=True)
    return tuple(tuple(found[pair] for pair in choice) for choice in choices.scored)


def _scores(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    chosen = logits.gather(-1, torch.tensor(tokens).to(logits.device)[:, None])
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    entries = token_logprobs(logits, tokens, count)
    return [dataclasses.replace(entry, rank=rank) for entry, rank in zip(entries, ranks, strict=True)]
