"""Turns: whose work comes next, and how long a place is taken. Work waits for events; no clock is read."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.turns import LEAST_BYTES, PLACES, SENDER, Sender, Turns
from outrider.configs.slices import TenancyOptions, TenantOptions
from tests.cluster.circle import MESSAGES, TOKENIZER, LocalEngine, bearer, client_of
from tests.helpers.waiting import eventually


class Work:
    """Pieces of work that go on until they are let go."""

    def __init__(self) -> None:
        self.turns, self.begun, self.refused = Turns("test", refuse=self._refuse), list[str](), list[ApiError]()
        self._gates: dict[str, threading.Event] = {}

    def ask(self, name: str, tenant: str | None = None, key: str = "", size: int = 0) -> asyncio.Task[str]:
        self._gates[name] = threading.Event()

        async def sender() -> str:
            SENDER.set(Sender(tenant, key, size))
            return await self.turns.run(self._piece, name)

        return asyncio.create_task(sender())

    def end(self, *names: str) -> None:
        for name in names or tuple(self._gates):
            self._gates[name].set()

    async def until(self, *names: str) -> None:
        """Until these have begun, in this order, and no other has."""
        await asyncio.to_thread(eventually, lambda: len(self.begun) >= len(names))
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.begun == list(names)

    def _refuse(self, error: ApiError) -> ApiError:
        self.refused.append(error)
        return error

    def _piece(self, name: str) -> str:
        self.begun.append(name)
        self._gates[name].wait()
        return name


def run(story: Callable[[Work], Awaitable[None]]) -> None:
    async def whole() -> None:
        work = Work()
        try:
            await story(work)
        finally:
            work.end()

    asyncio.run(whole())


def test_a_key_has_one_place_and_another_key_of_its_tenant_begins_at_once() -> None:
    async def story(work: Work) -> None:
        flood = [work.ask(f"a{place}", "acme", "a") for place in range(14)]
        await work.until("a0")
        other = work.ask("b", "acme", "b")
        await work.until("a0", "b")
        stranger = work.ask("c", "umbrella", "c")
        await work.until("a0", "b", "c")
        work.end()
        assert await asyncio.gather(*flood, other, stranger) == [*(f"a{place}" for place in range(14)), "b", "c"]

    run(story)


def test_a_tenant_with_many_keys_leaves_a_place_to_another_tenant() -> None:
    async def story(work: Work) -> None:
        tasks = [work.ask(f"a{key}", "acme", f"a{key}") for key in range(20)]
        await work.until("a0", "a1")
        tasks.append(work.ask("b", "umbrella", "b"))
        await work.until("a0", "a1", "b")
        work.end()
        await asyncio.gather(*tasks)

    assert PLACES == 3
    run(story)


def test_threads_give_way_to_others_by_as_much_as_is_said() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def story() -> tuple[int, int]:
        return await Turns("nice", 1, nice=3).run(priority), await Turns("usual", 1).run(priority)

    own = priority()
    assert asyncio.run(story()) == (min(19, own + 3), own)
    assert priority() == own


def test_keys_take_turns_where_all_places_are_taken() -> None:
    async def story(work: Work) -> None:
        tasks = [work.ask(key, key, key) for key in "xyz"]
        await work.until("x", "y", "z")
        tasks += [work.ask(f"a{place}", "a", "a") for place in range(3)]
        tasks += [work.ask(f"b{place}", "b", f"b{place}") for place in range(2)]
        tasks += [work.ask("c", "c", "c")]
        await asyncio.sleep(0)
        begun = ["x", "y", "z"]
        for ended, begins in (("x", "a0"), ("a0", "b0"), ("b0", "c"), ("c", "a1"), ("a1", "b1"), ("b1", "a2")):
            work.end(ended)
            begun.append(begins)
            await work.until(*begun)
        work.end()
        await asyncio.gather(*tasks)

    run(story)


def test_a_client_that_leaves_keeps_its_place_until_its_thread_is_done() -> None:
    async def story(work: Work) -> None:
        left, waiting = work.ask("a0", "acme", "a"), work.ask("a1", "acme", "a")
        gone = work.ask("a2", "acme", "a")
        await work.until("a0")
        for task in (left, gone):
            task.cancel()
        await asyncio.gather(left, gone, return_exceptions=True)
        await work.until("a0")  # its thread works on
        work.end("a0", "a1")
        assert await waiting == "a1"
        last = work.ask("a3", "acme", "a")
        await work.until("a0", "a1", "a3")
        work.end()
        await last

    run(story)


def test_what_waits_is_bounded_by_key() -> None:
    async def story(work: Work) -> None:
        tasks = [work.ask("a0", "acme", "a")]
        await work.until("a0")
        tasks += [work.ask(f"a{place}", "acme", "a", 8 << 20) for place in range(1, 9)]
        await asyncio.sleep(0)
        for size in (0, LEAST_BYTES, 8 << 20):
            with pytest.raises(ApiError, match="wait for responses") as refused:
                await work.ask("more", "acme", "a", size)
            assert (refused.value.status, refused.value.code) == (429, "too_many_texts")
        assert len(work.refused) == 3
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        tasks[1] = work.ask("a1", "acme", "a")
        tasks.append(work.ask("b", "acme", "b", 8 << 20))
        await work.until("a0", "b")
        work.end()
        await asyncio.gather(*tasks)
        alone = work.ask("larger than all that may wait", "acme", "a", 1 << 30)
        await asyncio.to_thread(eventually, lambda: work.begun[-1].startswith("larger"))
        work.end()
        await alone

    run(story)


@pytest.mark.parametrize("has_turn", [False, True])
def test_a_turn_that_comes_while_its_client_leaves_goes_to_the_next(has_turn: bool) -> None:
    async def story(work: Work) -> None:
        loop, told = asyncio.get_running_loop(), threading.Event()
        first, second, third = (work.ask(f"a{place}", "acme", "a") for place in range(3))
        await work.until("a0")
        tell: Any = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (tell(*args), told.set())[0]  # type: ignore[method-assign]
        work.end("a0")
        assert told.wait(60)  # the loop is held meanwhile: the end of the thread comes next
        if has_turn:
            loop.call_soon(second.cancel)
        else:
            second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert second.cancelled()
        await work.until("a0", "a2")
        work.end()
        await asyncio.gather(first, third)

    run(story)


ROUTES: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/documents/text": {"a plain text": 1},
    "/v1/completions": {"model": "circle", "prompt": "<", "max_tokens": 1, "reference_documents": ["a"]},
    "/v1/chat/completions": {"model": "circle", "messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"model": "circle", "input": "hi", "max_output_tokens": 1, "store": False},
}


def test_every_route_takes_the_turns_of_its_key(circle_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Sender]()
    turn = Turns._turn

    async def noted(turns: Turns, *arguments: Any) -> None:
        asked.append(SENDER.get())
        await turn(turns, *arguments)

    monkeypatch.setattr(Turns, "_turn", noted)
    tenancy = TenancyOptions(tenants={"acme": TenantOptions(keys=(hash_key("one"), hash_key("two")))})
    senders = (("one", "acme", hash_key("one")), ("two", "acme", hash_key("two")), (None, None, ""))
    with client_of(Service(circle_engine, TOKENIZER, tenancy)) as http:
        for (path, body), (key, tenant, shown) in itertools.product(ROUTES.items(), senders):
            asked.clear()
            sent = http.post(path, json=body, headers=bearer(key))
            assert sent.status_code == 200, sent.text
            assert set(asked) == {Sender(tenant, shown, len(sent.request.content))}, path
