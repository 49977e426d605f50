"""Where jobs go, without Ray: prefixes, sessions, a bound on load, and nothing of another tenant."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.replica_chooser import BLOCK, SLACK, ReplicaChooser, prefixes_of
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import SamplingParams

FOUR = ("a", "b", "c", "d")
PARAMS = SamplingParams(8)


def text(seed: int, length: int = 64) -> Int32Array:
    return np.random.default_rng(seed).integers(50_000, size=length, dtype=np.int32)


class Router:
    """A chooser, the replicas that are there, and names for calls and answers."""

    def __init__(self, *replicas: str, slots: int = 8, tenants: int = 2) -> None:
        self.chooser, self.replicas, self.names = ReplicaChooser(slots, tenants), replicas, map(str, itertools.count())
        self.load = Counter[str]()

    def jobs(
        self, prompt: Int32Array, tenant: str | None = "acme", n: int = 1, session: str | None = None
    ) -> tuple[GenerationJob, ...]:
        answer = f"answer-{next(self.names)}"
        return tuple(GenerationJob(f"{answer}/{at}", prompt, PARAMS, tenant=tenant, session=session) for at in range(n))

    def send(self, jobs: Sequence[GenerationJob], told: dict[str, int] | None = None) -> tuple[str, Callable[[], None]]:
        """Where it goes, and what ends it."""
        call = next(self.names)
        best = self.chooser.choose(call, jobs, told or dict.fromkeys(self.replicas, 0))[0]
        self.load[best] += len(jobs)

        def end() -> None:
            self.chooser.release(call, best)
            self.load[best] -= len(jobs)

        return best, end

    def alone(self, prompt: Int32Array, tenant: str | None = "acme", session: str | None = None) -> str:
        """Where a prompt goes that is answered before the next one comes."""
        best, end = self.send(self.jobs(prompt, tenant, session=session))
        end()
        return best


def test_prefixes_are_known_by_what_is_in_them_and_where() -> None:
    one = text(1, 100)
    assert len(prefixes_of(one, 1000)) == 6 and prefixes_of(one, 2) == prefixes_of(one, 1000)[:2]
    other = one.copy()
    other[40] += 1
    assert [a == b for a, b in zip(prefixes_of(one, 9), prefixes_of(other, 9), strict=True)] == [True] * 2 + [False] * 4
    assert len(set(prefixes_of(np.zeros(100 * BLOCK, np.int32), 1000))) == 100
    swapped = np.concatenate([one[BLOCK : 2 * BLOCK], one[:BLOCK]])
    assert prefixes_of(swapped, 9)[1] != prefixes_of(one, 9)[1]


def test_a_prompt_goes_where_the_longest_part_of_it_went() -> None:
    router = Router(*FOUR)
    document = text(1, 400)
    home = router.alone(document)
    for number in range(50):
        question = np.concatenate([document, text(100 + number, 30)])
        assert router.alone(question) == home
    short, end = router.send(router.jobs(document), dict.fromkeys(FOUR, 0) | {home: 9})  # where others are busy
    end()
    assert short != home
    longer = np.concatenate([document, text(7, 300)])
    best, end = router.send(router.jobs(longer), dict.fromkeys(FOUR, 0) | {home: 9, short: 9})
    end()
    assert best not in (home, short)
    assert router.alone(np.concatenate([longer, text(8)])) == best


def test_a_few_tokens_in_common_do_not_bring_everything_to_one_replica() -> None:
    router = Router(*FOUR)
    for header, length in ((text(1, 30), 300), (text(2, 600), 3000)):  # of a chat template; of an application
        places = Counter(router.alone(np.concatenate([header, text(100 + number, length)])) for number in range(400))
        assert min(places[name] for name in FOUR) > 60


def zipf_prompts(count: int) -> Iterator[Int32Array]:
    """Questions about documents, few of which are asked about often."""
    chosen = random.Random(5)
    documents = [text(number, 640) for number in range(40)]
    weights = [(1 + rank) ** -0.7 for rank in range(len(documents))]
    for number in range(count):
        (document,) = chosen.choices(documents, weights)
        yield np.concatenate([document, text(1000 + number, 20)])


def hits(prompts: Sequence[Int32Array], places: Sequence[str], slots: int = 8) -> float:
    """Share of the prompts whose document one of the last ``slots`` of their replica had."""
    held: dict[str, OrderedDict[bytes, None]] = {name: OrderedDict() for name in FOUR}
    found = 0
    for prompt, place in zip(prompts, places, strict=True):
        document = prompt[:640].tobytes()
        found += document in held[place]
        held[place].pop(document, None)
        held[place][document] = None
        if len(held[place]) > slots:
            held[place].popitem(last=False)
    return found / len(prompts)


def test_no_replica_gets_more_than_the_bound_and_prefixes_are_found_far_more_often_than_by_chance() -> None:
    router, chance = Router(*FOUR), random.Random(3)
    prompts, places = list(zipf_prompts(5000)), []
    running: list[Callable[[], None]] = []
    busiest = 0
    for number, prompt in enumerate(prompts):
        place, end = router.send(router.jobs(prompt))
        places.append(place)
        running.append(end)
        total = sum(router.load.values())
        assert router.load[place] <= SLACK * total / len(FOUR) + 1
        busiest = max(busiest, total)
        while len(running) > 8 + number // 100:  # a load that grows
            running.pop(chance.randrange(len(running)))()
    assert busiest > 50 and set(places) == set(FOUR)
    for end in running:
        end()
    assert not +router.load and not any(router.chooser._jobs.values())
    share = hits(prompts, places)
    by_chance = hits(prompts, [chance.choice(FOUR) for _ in prompts])
    assert share > 0.65 and by_chance < 0.4, (share, by_chance)


def test_while_all_loads_only_grow_they_are_within_the_bound_at_all_times() -> None:
    router = Router(*FOUR)
    for prompt in zipf_prompts(1000):
        router.send(router.jobs(prompt))
        assert max(router.load.values()) <= SLACK * sum(router.load.values()) / len(FOUR) + 1


def test_a_replica_that_goes_moves_its_own_share_alone_and_gets_it_back() -> None:
    prompts = [text(number) for number in range(400)]

    def homes(*replicas: str) -> list[str]:
        """For processes that remember nothing, such as another API."""
        return [Router(*replicas).alone(prompt) for prompt in prompts]

    before, without = homes(*FOUR), homes("a", "b", "d")
    assert all(new == old or old == "c" for old, new in zip(before, without, strict=True))
    assert set(without) == {"a", "b", "d"} and 60 < before.count("c") < 140
    assert homes(*FOUR) == before == homes(*reversed(FOUR))


def test_what_a_lost_replica_had_is_forgotten() -> None:
    router = Router(*FOUR)
    document = text(1, 200)
    home = router.alone(document, session="s")
    router.replicas = tuple(name for name in FOUR if name != home)
    second = router.alone(document, session="s")
    assert second != home
    router.replicas = FOUR  # one of that name, which has nothing
    assert router.alone(document, session="s") == second


def test_a_session_stays_where_it_went() -> None:
    router = Router(*FOUR)
    home = router.alone(text(1), session="s")
    assert all(router.alone(text(2 + number), session="s") == home for number in range(50))
    assert Router(*FOUR).alone(text(99), session="s") == home  # in any process
    documents = [text(100 + number, 300) for number in range(8)]
    elsewhere, document = next((place, one) for one in documents if (place := router.alone(one)) != home)
    assert router.alone(document, session="s") == home != elsewhere
    there, end = router.send(router.jobs(document, session="s"), dict.fromkeys(FOUR, 0) | {home: 9})
    end()
    assert router.alone(text(98), session="s") == there != home  # it has moved


def test_tenants_have_nothing_to_do_with_each_other() -> None:
    prompts = [np.concatenate([text(number % 20, 100), text(500 + number, 20)]) for number in range(300)]

    def places(others: bool) -> list[str]:
        router, found = Router(*FOUR), []
        for number, prompt in enumerate(prompts):
            found.append(router.alone(prompt, session="s" if number % 3 == 0 else None))
            if others:
                for session in (None, "s"):
                    router.alone(prompt, "umbrella", session)
                    router.alone(text(number, 20_000), "umbrella", session)
                    router.alone(prompt, None, session)
        return found

    alone = places(False)
    assert places(True) == alone
    router = Router(*FOUR)
    assert [router.alone(text(number), "umbrella") for number in range(50)] != [
        Router(*FOUR).alone(text(number)) for number in range(50)
    ]


def test_of_nobody_nothing_is_remembered() -> None:
    router = Router(*FOUR)
    places = Counter(router.alone(text(1, 200), None, session="s") for _ in range(400))
    assert min(places[name] for name in FOUR) > 60 and not router.chooser._tenants


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MOST_BLOCKS", 512), ("MOST_SESSIONS", 0), ("MOST_REQUESTS", 20)):
        monkeypatch.setattr(f"outrider.cluster.serving.replica_chooser.{name}", most)
    router = Router("a", slots=12, tenants=1)
    for number in range(300):
        router.alone(text(number, 1000 if number % 2 else 100), session=f"s{number}")
        (tenant,) = router.chooser._tenants.values()
        prompts = tenant.prompts["a"]
        assert len(prompts.held) <= 12 and sum(map(len, prompts.held)) <= 512 and len(tenant.sessions) <= 256
        assert prompts.known == Counter(itertools.chain(*prompts.held)) and len(router.chooser._last) <= 20
    router.alone(text(0, 100_000))
    assert [len(one) for one in prompts.held] == [512]


def test_a_conversation_takes_one_place() -> None:
    router = Router("a", slots=2, tenants=1)
    other, conversation = text(1, 200), text(2, 200)
    router.alone(other)
    for number in range(10):
        router.alone(conversation)
        conversation = np.concatenate([conversation, text(3 + number, 100)])
    (tenant,) = router.chooser._tenants.values()
    assert [len(one) for one in tenant.prompts["a"].held] == [200 // BLOCK, 1100 // BLOCK]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 10, 16])
def test_the_calls_of_an_answer_are_spread_when_that_balances_load(n: int) -> None:
    router = Router("a", "b")
    router.alone(text(1, 200))
    jobs = router.jobs(text(1, 200), n=n)
    size = -(-n // 2)
    router.send(jobs[:size])
    router.send(jobs[size:])
    assert abs(router.load["a"] - router.load["b"]) <= 1
    busy = Router("a", "b")
    jobs = busy.jobs(text(1, 200), n=2)
    first, _ = busy.send(jobs[:1])
    other = "b" if first == "a" else "a"
    assert busy.send(jobs[1:], {first: 1, other: 4})[0] == first


def test_all_choices_of_a_call_leave_their_replica() -> None:
    router, prompt = Router("a", "b"), text(3)
    home = router.alone(prompt)
    for _ in range(5):
        best, end = router.send(router.jobs(prompt, n=4))
        end()
        assert best == home and router.alone(prompt) == home  # nothing runs anywhere


def test_a_job_that_comes_again_goes_elsewhere() -> None:
    router = Router("a", "b")
    jobs = router.jobs(text(1, 200))
    first, end = router.send(jobs)
    end()
    second, end = router.send(jobs)
    end()
    assert {first, second} == {"a", "b"}
    router.replicas = (second,)
    assert router.send(jobs)[0] == second  # there is no other one


def test_calls_of_other_routers_count() -> None:
    router = Router("a", "b")
    home = router.alone(text(1, 200))
    other = "b" if home == "a" else "a"
    assert router.send(router.jobs(text(1, 200)), {home: 5, other: 0})[0] == other
    assert router.send(router.jobs(text(1, 200)), {home: 0, other: 1})[0] == home  # its own one is the one that is told of


def test_a_call_that_another_replica_took_counts_there() -> None:
    router = Router("a", "b")
    best, other = router.chooser.choose("call", router.jobs(text(1, 200)), {"a": 0, "b": 0})
    router.chooser.place("call", other)
    router.chooser.release("call", best)  # what was refused there
    assert +router.chooser._jobs == Counter({other: 1})
    router.chooser.choose("call", router.jobs(text(2, 200)), {"a": 0, "b": 0})  # the same call, again
    assert sum(router.chooser._jobs.values()) == 1
    router.chooser.release("call")
    router.chooser.place("call", other)  # too late
    assert not any(router.chooser._jobs.values())
    assert router.alone(text(1, 200)) == best  # both got it, and it is by its hash again


def test_a_replica_that_was_silent_attracts_nothing_for_a_while() -> None:
    router, now = Router(*FOUR), [0.0]
    router.chooser = ReplicaChooser(8, 2, lambda: now[0])
    home = router.alone(text(1), session="s")
    jobs = router.jobs(text(1), session="s")
    best, end = router.send(jobs)
    end()
    elsewhere, end = router.send(tuple(dataclasses.replace(job, avoid_s=30.0) for job in jobs))
    end()
    assert best == home != elsewhere
    for seed in range(40):  # those that have their prefix there, those that are new, and those of others
        assert router.alone(text(1), tenant=("acme", "globex", None)[seed % 3]) != home != router.alone(text(2 + seed))
    router.replicas = (home,)
    assert router.alone(text(1)) == home  # there is no other one
    router.replicas, now[0] = FOUR, 30.1
    assert home in {router.alone(text(100 + seed)) for seed in range(40)}
