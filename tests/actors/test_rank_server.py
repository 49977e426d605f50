"""A rank's server on a real socket: who may lead it, who is turned away, and what it does with a connection that is none."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import numpy as np
import pytest

from actors.lookahead.link import LINK_ERRORS, Link, connect, readable
from actors.lookahead.rank import RankServer, text_digest
from actors.lookahead.wire import Away, Beat, Failure, Message, OpenMessage, Reply, StepMessage, WorkMessage
from configs.slices import ParallelismOptions
from decoding.request import SamplingParams
from engine.executor import LocalExecutor
from tests.models import tiny_model

SECRET = b"shared by leader and ranks"
OPTIONS = ParallelismOptions(mode="lookahead", rank_timeout_s=2.0)
PROMPT = np.array([5, 6, 7, 8], np.int32)
NONE = np.zeros(0, np.int32)


@pytest.fixture
def server() -> Iterator[RankServer]:
    server = RankServer(LocalExecutor(tiny_model("llama", "float32").runner), SECRET, OPTIONS)
    yield server
    server.close()


def answer(link: Link) -> Message:
    """The next message that is no beat."""
    while isinstance(message := link.receive(30.0), Beat):
        pass
    assert message is not None
    return message


def step(sequence: int, joins: bool = False, digest: bytes = b"") -> StepMessage:
    """The prefill of one request, and the choice after it; later the same again from the second token on."""
    opened = (OpenMessage(0, "r", PROMPT, SamplingParams(max_tokens=8), (0,)),) if joins else ()
    root = np.array([PROMPT[-1]], np.int32)
    work = WorkMessage(0, 0, 0 if joins else 1, len(PROMPT), NONE, root, np.array([-1], np.int32), 1, digest)
    return StepMessage(sequence, opened, (), (work,), 3, joins)


def test_a_step_is_computed(server: RankServer) -> None:
    link = connect(server.address, SECRET, 2.0)
    link.send(step(4, joins=True))
    reply = answer(link)
    assert isinstance(reply, Reply)
    assert reply.sequence == 4
    assert reply.compute_s > 0
    (outcome,) = reply.outcomes
    assert outcome.rows == ()
    assert outcome.next_token == outcome.ids[0]
    assert outcome.ranked is not None
    assert outcome.ranked.shape == (1, 3)
    assert outcome.ranked[0, 0] == outcome.next_token
    link.send(step(5))
    again = answer(link)
    assert isinstance(again, Reply)
    assert again.outcomes[0].next_token == outcome.next_token
    link.close()


def test_another_secret_is_refused_and_the_server_goes_on(server: RankServer) -> None:
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(server.address, b"another", 2.0)
    silent = socket.create_connection(server.address)  # says nothing: it must not keep others out
    link = connect(server.address, SECRET, 2.0)
    link.send(step(1, joins=True))
    assert isinstance(answer(link), Reply)
    silent.close()
    link.close()


def test_the_last_leader_to_come_leads(server: RankServer) -> None:
    first, second = connect(server.address, SECRET, 2.0), connect(server.address, SECRET, 2.0)
    first.send(step(1, joins=True))
    assert isinstance(answer(first), Reply)
    second.send(step(1, joins=True))
    assert isinstance(answer(second), Reply)
    first.send(step(2))
    assert isinstance(answer(first), Away)
    second.send(step(2))
    assert isinstance(answer(second), Reply)
    for link in (first, second):
        link.close()


def test_a_busy_rank_turns_leaders_away_and_says_so(server: RankServer) -> None:
    link = connect(server.address, SECRET, 2.0)
    link.send(step(1, joins=True))
    assert isinstance(answer(link), Reply)
    server.occupy(True)
    while link.receive(30.0) != Beat(True):
        pass
    link.send(step(2))
    assert isinstance(answer(link), Away)
    link.send(step(3, joins=True))
    assert isinstance(answer(link), Away)
    server.occupy(False)
    link.send(step(4))
    assert isinstance(answer(link), Away)  # it has forgotten the request: the leader has to begin anew
    link.send(step(5, joins=True))
    assert isinstance(answer(link), Reply)
    link.close()


def test_another_text_than_the_leaders_is_an_error_with_both_hashes(server: RankServer) -> None:
    link = connect(server.address, SECRET, 2.0)
    link.send(step(1, joins=True, digest=text_digest(PROMPT)))
    assert isinstance(answer(link), Reply)
    other = text_digest(PROMPT[::-1])
    link.send(step(2, digest=other))
    failure = answer(link)
    assert isinstance(failure, Failure)
    assert failure.disagrees
    assert other.hex() in failure.reason
    assert text_digest(PROMPT).hex() in failure.reason
    link.close()


def test_what_answers_and_is_no_rank_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, listener.getsockname()[:2], SECRET, 2.0)
        with listener.accept()[0] as other:
            other.sendall(struct.pack("!i", 5) + b"hello")
            with pytest.raises(LINK_ERRORS):
                connecting.result(30.0)


def test_a_link_that_was_closed_here_has_ended(server: RankServer) -> None:
    """Who waits for several learns which one it is, and goes on with the others."""
    closed, other = connect(server.address, SECRET, 2.0), connect(server.address, SECRET, 2.0)
    closed.close()
    assert readable([other, closed], 30.0) == [closed]
    with pytest.raises(LINK_ERRORS):
        closed.take()
    with pytest.raises(LINK_ERRORS):
        closed.receive(30.0)
    other.close()


def test_a_closed_server_ends_its_connections() -> None:
    server = RankServer(LocalExecutor(tiny_model("llama", "float32").runner), SECRET, OPTIONS)
    link = connect(server.address, SECRET, 2.0)
    server.close()
    server.close()
    with pytest.raises(LINK_ERRORS):
        answer(link)
    with pytest.raises(OSError, match=r"refused|timed out"):
        connect(server.address, SECRET, 2.0)
    link.close()
