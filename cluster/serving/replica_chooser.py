"""Which replica gets which jobs: the one that has the beginning of their prompt, while it has not too much else to do.

Nothing here knows of Ray: ``cluster.serving.prefix_router`` asks, and tells what became of it.
"""

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

from cluster.serving.generation import Job
from decoding.tree import Int32Array

BLOCK = 16  # tokens: prefixes are known to that grain
LEAST_SHARE = 0.25  # of a prompt, that a prefix must be to count: less is what all prompts of an application begin with
BEGINNING = 256  # tokens that say where a new prompt goes
SLACK = 1.3  # times the mean: the most jobs of a replica, and one more
JOB = 64  # tokens of a prompt: computing so many takes about as long as one more job under way delays a new one
MOST_BLOCKS = 2**15  # of prompts that are remembered of a replica, for all tenants: half a million tokens
MOST_PROMPT_BLOCKS = 2**12  # of one prompt: what follows its first 65,536 tokens is not looked at
MOST_SESSIONS = 2**14  # for all tenants
MOST_REQUESTS = 2**13  # whose last replica is known, should they come again
_FEWEST = 256  # blocks, and sessions, of a tenant, however many there are

# A prefix is known by the sum of its tokens, each times a number of its place. Tenants have memories of their own, so that the
# numbers need not be secret: who finds two prefixes of one sum misleads nobody else.
_FACTORS = np.frombuffer(hashlib.shake_128(b"factors").digest(8 * BLOCK * MOST_PROMPT_BLOCKS), np.uint64)


@dataclass(slots=True)
class _Prompts:
    """The prompts that a replica got last, as far as it may have them still: what ``PrefixCache`` keeps, seen from outside."""

    held: list[list[int]] = field(default_factory=list)  # the prefixes of each, the one that came last at the end
    known: dict[int, int] = field(default_factory=dict)  # by prefix, how many of them begin with it

    def matched(self, prompt: Sequence[int]) -> int:
        """Blocks of a prompt, from its beginning on, that are known."""
        return bisect_left(prompt, True, key=lambda prefix: prefix not in self.known)

    def add(self, prompt: list[int], most: int, most_blocks: int) -> None:
        """Takes in one more. It takes the place of one that it goes on with, else of the oldest."""
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
        """Lets go of a prompt, but for the first blocks that another one takes over."""
        for prefix in self.held.pop(place)[shared:]:
            others = self.known.pop(prefix) - 1
            if others:
                self.known[prefix] = others


@dataclass(slots=True)
class _Tenant:
    """Where the requests of a tenant, for the model or for one of its adapters, went of late."""

    prompts: dict[str, _Prompts] = field(default_factory=dict)  # by replica
    sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)  # the one that was asked for last at the end


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A call that has not ended."""

    replica: str
    jobs: Sequence[Job]
    answer: str  # that the jobs are choices of


class ReplicaChooser:
    """Remembers which replica got what, and puts replicas in the order in which they should get some jobs.

    A call goes where its session went last. Without one it goes where it is done first: what went there lately of its prompts
    need not be computed, and each job under way is waited for. Of equals rendezvous hashing of the tenant with the session, or
    with the beginning of the prompt, takes one: every process that asks finds the same replica, and one that goes or comes moves
    its own share alone.

    Before all of that comes load, counted in jobs under way: nobody who would have more than ``SLACK`` times the mean, and one,
    gets a call while another one would not (consistent hashing with bounded loads, arXiv 1608.01350). The calls of one answer are
    made to be apart, so all but the first go where the least is to be done. A job that comes again, because its replica was lost,
    silent or full, goes elsewhere where it can. Where the replica was silent, so do all others, its sessions and prefixes too,
    for as long as the job says: then it is tried again.

    What a tenant sent tells nothing about where another's requests go, but for the load. Of jobs of no tenant nothing is
    remembered: their answer's name is hashed.
    """

    def __init__(self, slots: int, tenants: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            slots: of a replica: so many prompts are remembered of a tenant there, as more of them have left no KV.
            tenants: among whom the memory is divided, each with a part of its own; one counts once for each adapter as well.
            clock: seconds, by which silence is forgotten.
        """
        self._clock = clock
        self._silent: dict[str, float] = {}  # replicas that are avoided, and until when
        self._slots = slots
        self._most_blocks = max(_FEWEST, MOST_BLOCKS // max(1, tenants))
        self._most_sessions = max(_FEWEST, MOST_SESSIONS // max(1, tenants))
        self._tenants: dict[str, _Tenant] = {}
        self._replicas: set[str] = set()  # that were there when it was asked last
        self._under_way: dict[str, _UnderWay] = {}  # by call
        self._jobs, self._calls = Counter[str](), Counter[str]()  # under way, by replica
        self._last: OrderedDict[str, str] = OrderedDict()  # by request_id

    def choose(self, call: str, jobs: Sequence[Job], told: Mapping[str, int]) -> list[str]:
        """The replicas, the best first, which counts as the one that gets the call.

        Args:
            call: a name for it; asking again for the same one takes back what was chosen before.
            jobs: of one answer, at least one.
            told: the replicas, at least one, with the calls under way there as they say themselves, whoever sent them.
        """
        self.release(call)
        self._forget_lost(told.keys())
        loads = {name: self._jobs[name] + max(0, calls - self._calls[name]) for name, calls in told.items()}
        most = SLACK * (sum(loads.values()) + len(jobs)) / len(loads) + 1
        first = jobs[0]
        tenant = None if first.memory is None else self._tenants.setdefault(first.memory, _Tenant())
        prompts = [] if tenant is None else self._prefixes(jobs)
        matched = dict.fromkeys(loads, 0) if tenant is None else {name: _matched(tenant, name, prompts) for name in loads}
        common = max(matched.values())  # blocks with which the prompts begin as others did
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
            waits = JOB * load - BLOCK * matched[name]  # tokens more than at an idle one that has nothing of the prompts
            return (
                name in tried,
                name in self._silent,
                is_over,
                load if is_over or is_spread else 0,
                name != pinned,
                waits,
                scores[name],
            )

        order = sorted(loads, key=rank)
        self._place(call, _UnderWay(order[0], jobs, answer))
        if tenant is not None:
            self._remember(tenant, order[0], prompts, first.session)
        return order

    def placed(self, call: str, replica: str) -> None:
        """Says which replica took a call: maybe not the best one."""
        before = self._under_way.get(call)
        if before is None or before.replica == replica:
            return
        self.release(call)
        self._place(call, dataclasses.replace(before, replica=replica))
        tenant = self._tenants.get(before.jobs[0].memory or "")
        if tenant is not None:
            self._remember(tenant, replica, self._prefixes(before.jobs), before.jobs[0].session)

    def release(self, call: str, replica: str | None = None) -> None:
        """Says that a call has ended, however; where a replica is named, only if it is there."""
        ended = self._under_way.get(call)
        if ended is not None and replica in (None, ended.replica):
            del self._under_way[call]
            self._jobs[ended.replica] -= len(ended.jobs)
            self._calls[ended.replica] -= 1

    def _place(self, call: str, placed: _UnderWay) -> None:
        self._under_way[call] = placed
        self._jobs[placed.replica] += len(placed.jobs)
        self._calls[placed.replica] += 1
        _touch(self._last, {job.request_id: placed.replica for job in placed.jobs}, MOST_REQUESTS)

    def _forget_lost(self, replicas: Collection[str]) -> None:
        """Drops the prompts of replicas that are not there any more; what else names them means nothing."""
        if replicas != self._replicas:
            for tenant in self._tenants.values():
                tenant.prompts = {name: kept for name, kept in tenant.prompts.items() if name in replicas}
            for counter in (self._jobs, self._calls):
                for name in [name for name, count in counter.items() if not count]:
                    del counter[name]
            self._replicas = set(replicas)

    def _prefixes(self, jobs: Sequence[Job]) -> list[list[int]]:
        """The prefixes of each prompt, the shortest first; choices of one prompt have the same array."""
        most = min(self._most_blocks, MOST_PROMPT_BLOCKS)
        return [prefixes_of(ids, most) for ids in {id(job.prompt_ids): job.prompt_ids for job in jobs}.values()]

    def _remember(self, tenant: _Tenant, replica: str, prompts: Sequence[list[int]], session: str | None) -> None:
        kept = tenant.prompts.setdefault(replica, _Prompts())
        for prompt in prompts:
            kept.add(prompt, self._slots, self._most_blocks)
        if session is not None:
            _touch(tenant.sessions, {session: replica}, self._most_sessions)


def prefixes_of(ids: Int32Array, most: int) -> list[int]:
    """A number for each prefix of whole blocks, at most so many, the shortest first."""
    length = min(len(ids) // BLOCK, most) * BLOCK
    summed = np.cumsum((ids[:length].astype(np.uint64) + np.uint64(1)) * _FACTORS[:length])
    numbers: list[int] = summed[BLOCK - 1 :: BLOCK].tolist()
    return numbers


def _matched(tenant: _Tenant, replica: str, prompts: Sequence[Sequence[int]]) -> int:
    """Blocks of prompts that a replica got lately, of each prompt from its beginning on."""
    kept = tenant.prompts.get(replica)
    return 0 if kept is None else sum(map(kept.matched, prompts))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Blocks that two prompts have in common at their beginning."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])


def _scores(job: Job, replicas: Collection[str], common: int) -> dict[str, bytes]:
    """Of each replica for what is new (rendezvous hashing): the lowest one is the job's. ``common``: first tokens that do not
    tell it from others."""
    if job.memory is None:
        key = repr((None, _answer_of(job))).encode()
    else:
        beginning = job.prompt_ids[common : common + BEGINNING].tobytes() if job.session is None else b""
        key = repr((job.memory, job.session)).encode() + beginning
    hashed = hashlib.blake2b(key).digest()
    return {name: hashlib.blake2b(name.encode(), key=hashed, digest_size=8).digest() for name in replicas}


def _answer_of(job: Job) -> str:
    return job.request_id.rpartition("/")[0]


def _touch(kept: OrderedDict[str, str], new: Mapping[str, str], most: int) -> None:
    """Puts entries at the end, and drops from the beginning what is too much."""
    for key, value in new.items():
        kept[key] = value
        kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
