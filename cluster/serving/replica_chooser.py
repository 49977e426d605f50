"""Choice of a replica for jobs: the one that has computed the beginning of their prompt, unless its load is too high."""

# Nothing here depends on Ray: `cluster.serving.prefix_router` asks, and reports the outcome.

from __future__ import annotations

import dataclasses
import hashlib
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.cluster.serving.generation import GenerationJob
from outrider.decoding.arrays import Int32Array

BLOCK = 16  # tokens: granularity of known prefixes
LEAST_SHARE = 0.25  # least share of a prompt that must match: shorter matches are what all prompts of an application begin with
BEGINNING = 256  # tokens of a new prompt that are hashed
SLACK = 1.3  # a replica may have this multiple of the mean number of jobs, plus one
JOB = 64  # prompt tokens that take about as long to compute as one more running job delays a new one
MOST_BLOCKS = 2**15  # remembered blocks of prompts per replica, for all tenants: half a million tokens
MOST_PROMPT_BLOCKS = 2**12  # per prompt: tokens after the first 65,536 are ignored
MOST_SESSIONS = 2**14  # for all tenants
MOST_REQUESTS = 2**13  # requests whose last replica is remembered
_FEWEST = 256  # least number of blocks, and of sessions, per tenant

# A prefix is identified by the sum of its token ids, each times a factor of its position. Tenants have separate memories, so the
# factors need not be secret: a collision can only mislead the tenant itself.
_FACTORS = np.frombuffer(hashlib.shake_128(b"factors").digest(8 * BLOCK * MOST_PROMPT_BLOCKS), np.uint64)


@dataclass(slots=True)
class _Prompts:
    """Latest prompts of a replica: an estimate of its ``PrefixCache`` from outside."""

    held: list[list[int]] = field(default_factory=list)  # prefixes of each prompt, latest prompt last
    known: dict[int, int] = field(default_factory=dict)  # number of prompts by prefix

    def matched(self, prompt: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that are known."""
        return bisect_left(prompt, True, key=lambda prefix: prefix not in self.known)

    def add(self, prompt: list[int], most: int, most_blocks: int) -> None:
        """Add a prompt. It replaces a prompt that it continues; beyond the limits, the oldest is dropped."""
        common = [_common(one, prompt) for one in self.held]
        best = max(range(len(common)), key=common.__getitem__, default=0)
        shared = 0
        if self.held and 2 * common[best] >= len(self.held[best]):
            shared = common[best]
            self._drop(best, shared)
        self.held.append(prompt)
        for prefix in prompt[shared:]:
            self.known[prefix] = self.known.get(prefix, 0) + 1
        while len(self.held) > most or sum(map(len, self.held)) > most_blocks:
            self._drop(0)

    def _drop(self, place: int, shared: int = 0) -> None:
        """Remove a prompt, except for leading blocks that another one takes over."""
        for prefix in self.held.pop(place)[shared:]:
            others = self.known.pop(prefix) - 1
            if others:
                self.known[prefix] = others


@dataclass(slots=True)
class _Tenant:
    """Recent routing of a tenant's requests, separately for the model and each adapter."""

    prompts: dict[str, _Prompts] = field(default_factory=dict)  # by replica
    sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)  # replica by session, latest last


@dataclass(frozen=True, slots=True)
class _RunningAnswer:
    replica: str
    jobs: Sequence[GenerationJob]
    answer: str  # answer of which the jobs are choices


class ReplicaChooser:
    """Replica chooser that remembers earlier choices and ranks the replicas for new jobs."""

    # Except for the load, a tenant's requests do not affect where another tenant's go. Jobs without a tenant are not remembered:
    # the answer's id is hashed.

    def __init__(self, slots: int, tenants: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Initialize the memory for a replica's KV slots, and tenants times (1 + adapters). ``clock`` is in seconds."""
        self._clock = clock
        self._silent: dict[str, float] = {}  # end of the avoidance, by replica
        self._slots = slots
        self._most_blocks = max(_FEWEST, MOST_BLOCKS // max(1, tenants))
        self._most_sessions = max(_FEWEST, MOST_SESSIONS // max(1, tenants))
        self._tenants: dict[str, _Tenant] = {}
        self._replicas: set[str] = set()  # replicas of the previous call
        self._under_way: dict[str, _RunningAnswer] = {}  # by call
        self._jobs, self._calls = Counter[str](), Counter[str]()  # running, by replica
        self._last: OrderedDict[str, str] = OrderedDict()  # replica by request_id

    def choose(self, call: str, jobs: Sequence[GenerationJob], reported: Mapping[str, int]) -> list[str]:
        """Return the replicas, best first; the first one counts as the one that gets the call.

        Args:
            call: name of the call; choosing again for it replaces the earlier choice.
            jobs: at least one job, all of one answer.
            reported: calls in progress by replica, as reported by the replicas, whoever sent them; at least one replica.
        """
        self.release(call)
        self._forget_lost(reported.keys())
        loads = {name: self._jobs[name] + max(0, calls - self._calls[name]) for name, calls in reported.items()}
        # Consistent hashing with bounded loads (arXiv 1608.01350): no replica that would have more gets a call while another
        # would not.
        most = SLACK * (sum(loads.values()) + len(jobs)) / len(loads) + 1
        first = jobs[0]
        tenant = None if first.cache_namespace is None else self._tenants.setdefault(first.cache_namespace, _Tenant())
        prompts = [] if tenant is None else self._prefixes(jobs)
        matched = dict.fromkeys(loads, 0) if tenant is None else {name: _matched(tenant, name, prompts) for name in loads}
        common = max(matched.values())  # blocks of the longest match
        if common < LEAST_SHARE * sum(map(len, prompts)):
            matched = dict.fromkeys(loads, 0)
        else:
            common = 0
        pinned = None if tenant is None or first.session is None else tenant.sessions.get(first.session)
        tried = {self._last.get(job.request_id) for job in jobs}
        now = self._clock()
        self._silent = {name: until for name, until in self._silent.items() if until > now and name in loads}
        if avoid_s := max(job.avoid_s for job in jobs):
            self._silent |= {name: now + avoid_s for name in tried & loads.keys() if name}
        answer = _answer_of(first)
        is_spread = any(one.answer == answer for one in self._under_way.values())
        scores = _scores(first, loads, common * BLOCK)

        def rank(name: str) -> tuple[Any, ...]:
            load, is_over = loads[name], loads[name] + len(jobs) > most
            # A call goes where it will be done first: blocks sent there recently need not be computed, but each running job
            # delays it.
            waits = JOB * load - BLOCK * matched[name]  # extra tokens compared with an idle replica without a match
            return (
                # A job is sent again because its replica was lost, silent or full: it goes elsewhere if possible.
                name in tried,
                # All jobs avoid a silent replica, including its sessions and prefixes, for the time in `avoid_s`.
                name in self._silent,
                is_over,
                # The calls of one answer are meant to be spread: all but the first go to the least loaded replica.
                load if is_over or is_spread else 0,
                # A session's cached tokens are where its last call went.
                name != pinned,
                waits,
                # Rendezvous hashing: every process finds the same replica, and one that comes or goes moves only its own share.
                scores[name],
            )

        order = sorted(loads, key=rank)
        self._place(call, _RunningAnswer(order[0], jobs, answer))
        if tenant is not None:
            self._remember(tenant, order[0], prompts, first.session)
        return order

    def place(self, call: str, replica: str) -> None:
        """Record which replica took a call, if not the best one."""
        before = self._under_way.get(call)
        if before is None or before.replica == replica:
            return
        self.release(call)
        self._place(call, dataclasses.replace(before, replica=replica))
        tenant = self._tenants.get(before.jobs[0].cache_namespace or "")
        if tenant is not None:
            self._remember(tenant, replica, self._prefixes(before.jobs), before.jobs[0].session)

    def release(self, call: str, replica: str | None = None) -> None:
        """Record the end of a call; if a replica is named, only if it has the call."""
        ended = self._under_way.get(call)
        if ended is not None and replica in (None, ended.replica):
            del self._under_way[call]
            self._jobs[ended.replica] -= len(ended.jobs)
            self._calls[ended.replica] -= 1

    def _place(self, call: str, placed: _RunningAnswer) -> None:
        self._under_way[call] = placed
        self._jobs[placed.replica] += len(placed.jobs)
        self._calls[placed.replica] += 1
        _touch(self._last, {job.request_id: placed.replica for job in placed.jobs}, MOST_REQUESTS)

    def _forget_lost(self, replicas: Collection[str]) -> None:
        """Drop the prompts and zero counts of lost replicas."""
        if replicas != self._replicas:
            for tenant in self._tenants.values():
                tenant.prompts = {name: kept for name, kept in tenant.prompts.items() if name in replicas}
            for counter in (self._jobs, self._calls):
                for name in [name for name, count in counter.items() if not count]:
                    del counter[name]
            self._replicas = set(replicas)

    def _prefixes(self, jobs: Sequence[GenerationJob]) -> list[list[int]]:
        """Return the prefixes of each distinct prompt, shortest first."""
        most = min(self._most_blocks, MOST_PROMPT_BLOCKS)
        # Choices of one prompt share the array.
        return [prefixes_of(ids, most) for ids in {id(job.prompt_ids): job.prompt_ids for job in jobs}.values()]

    def _remember(self, tenant: _Tenant, replica: str, prompts: Sequence[list[int]], session: str | None) -> None:
        kept = tenant.prompts.setdefault(replica, _Prompts())
        for prompt in prompts:
            kept.add(prompt, self._slots, self._most_blocks)
        if session is not None:
            _touch(tenant.sessions, {session: replica}, self._most_sessions)


def prefixes_of(ids: Int32Array, most: int) -> list[int]:
    """Return a number for each prefix of whole blocks, at most ``most``, shortest first."""
    length = min(len(ids) // BLOCK, most) * BLOCK
    summed = np.cumsum((ids[:length].astype(np.uint64) + np.uint64(1)) * _FACTORS[:length])
    numbers: list[int] = summed[BLOCK - 1 :: BLOCK].tolist()
    return numbers


def _matched(tenant: _Tenant, replica: str, prompts: Sequence[Sequence[int]]) -> int:
    """Return the total of leading blocks of the prompts that a replica got recently."""
    kept = tenant.prompts.get(replica)
    return 0 if kept is None else sum(map(kept.matched, prompts))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading blocks that two prompts share."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])


def _scores(job: GenerationJob, replicas: Collection[str], common: int) -> dict[str, bytes]:
    """Return each replica's rendezvous hash for the job; the lowest wins. ``common`` leading tokens are left out of the hash."""
    if job.cache_namespace is None:
        key = repr((None, _answer_of(job))).encode()
    else:
        beginning = job.prompt_ids[common : common + BEGINNING].tobytes() if job.session is None else b""
        key = repr((job.cache_namespace, job.session)).encode() + beginning
    hashed = hashlib.blake2b(key).digest()
    return {name: hashlib.blake2b(name.encode(), key=hashed, digest_size=8).digest() for name in replicas}


def _answer_of(job: GenerationJob) -> str:
    return job.request_id.rpartition("/")[0]


def _touch(kept: OrderedDict[str, str], new: Mapping[str, str], most: int) -> None:
    """Move entries to the end and drop the oldest above ``most``."""
    for key, value in new.items():
        kept[key] = value
        kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
