"""A rank's server on a real socket: who may lead it, who is turned away, and what it does with a connection that is none."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import numpy as np
import pytest

from outrider.actors.lookahead.link import LINK_ERRORS, Link, accept, connect, readable
from outrider.actors.lookahead.messages import Detached, Failure, Heartbeat, OpenMessage, Reply, StepMessage, WorkMessage
from outrider.actors.lookahead.rank import RankServer, text_digest
from outrider.actors.wire import Message
from outrider.configs.slices import ParallelismOptions
from outrider.decoding.budget.features import TOKEN_MASK
from outrider.decoding.request import SamplingParams
from outrider.engine.executor import LocalExecutor
from tests.helpers.models import tiny_model
from tests.helpers.waiting import eventually
from tests.k8s.made_secrets import make_certificate, make_secrets, tls_environment

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
    while isinstance(message := link.receive(30.0), Heartbeat):
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
    assert outcome.acceptance.rows == ()
    assert outcome.acceptance.next_token == outcome.ids[0]
    assert outcome.ranked is not None
    assert outcome.ranked.shape == (1, 3)
    assert outcome.ranked[0, 0] & TOKEN_MASK == outcome.acceptance.next_token
    link.send(step(5))
    again = answer(link)
    assert isinstance(again, Reply)
    assert again.outcomes[0].acceptance.next_token == outcome.acceptance.next_token
    link.close()


def follow(server: RankServer) -> None:
    """A leader comes, has a step computed, and goes."""
    with contextlib.closing(connect(server.address, SECRET, 10.0)) as link:
        link.send(step(1, joins=True))
        assert isinstance(answer(link), Reply)


@pytest.mark.parametrize("secret", [b"another", b""])
def test_another_secret_is_refused_and_the_server_goes_on(server: RankServer, secret: bytes) -> None:
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(server.address, secret, 2.0)
    follow(server)


def hear_out(known: Connection) -> None:
    """Returns when the other side has ended the connection; until then there are its signs of life."""
    with contextlib.suppress(EOFError, ConnectionError):
        while known.poll(30.0):
            known.recv_bytes()
        pytest.fail("the connection goes on")


class Bomb:
    """What would touch a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self._path,)


def test_bytes_that_are_no_message_end_their_connection_only(server: RankServer, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    bomb = pickle.dumps(Bomb(touched))
    pickle.loads(bomb)
    assert touched.exists()  # it works where something unpickles it
    touched.unlink()
    for data in (bomb, b"", b"\xc1", b"\x94" + b"\x00" * 4, os.urandom(1000), b"\x91\xcf" + b"\xff" * 8):
        with Client(server.address, authkey=SECRET) as known:
            known.send_bytes(data)
            hear_out(known)
    assert not touched.exists()
    follow(server)


def test_strangers_and_huge_messages_harm_nobody(server: RankServer) -> None:
    """Floods, silence, and lengths of gigabytes, from who knows the secret and who does not; a leader is served meanwhile."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(server.address)) for _ in range(20)]
        silent[0].sendall(os.urandom(10_000))
        silent[1].sendall(struct.pack("!i", 2**31 - 1))
        silent[2].sendall(struct.pack("!iQ", -1, 2**62) + b"x" * 1000)
        known = stack.enter_context(Client(server.address, authkey=SECRET))
        os.write(known.fileno(), struct.pack("!iQ", -1, 2**40) + b"x" * 1000)
        hear_out(known)
        follow(server)


def test_the_last_leader_to_come_leads(server: RankServer) -> None:
    first, second = connect(server.address, SECRET, 2.0), connect(server.address, SECRET, 2.0)
    first.send(step(1, joins=True))
    assert isinstance(answer(first), Reply)
    second.send(step(1, joins=True))
    assert isinstance(answer(second), Reply)
    first.send(step(2))
    assert isinstance(answer(first), Detached)
    second.send(step(2))
    assert isinstance(answer(second), Reply)
    for link in (first, second):
        link.close()


def test_a_busy_rank_turns_leaders_away_and_says_so(server: RankServer) -> None:
    link = connect(server.address, SECRET, 2.0)
    link.send(step(1, joins=True))
    assert isinstance(answer(link), Reply)
    server.attach(True)
    while link.receive(30.0) != Heartbeat(True):
        pass
    link.send(step(2))
    assert isinstance(answer(link), Detached)
    link.send(step(3, joins=True))
    assert isinstance(answer(link), Detached)
    server.attach(False)
    link.send(step(4))
    assert isinstance(answer(link), Detached)  # it has forgotten the request: the leader has to begin anew
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


ADDRESS = "127.0.0.2"  # what goes there comes from 127.0.0.1, and counts as leaving the pod
PodFolder = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> PodFolder:
    """The certificate of a pod's address, by an authority: a folder of files."""
    made = tmp_path_factory.mktemp("pods")

    @functools.cache
    def make(address: str, authority: str) -> Path:
        if not (made / authority).exists():
            make_secrets().write("outrider-ray-tls", made / authority)
        return make_certificate(made / authority, made / f"{authority}-{address}", address)

    return make


@pytest.fixture
def secured(pod: PodFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankServer]:
    """A rank in a pod where Ray is told to encrypt."""
    for name, value in tls_environment(pod(ADDRESS, "ours")).items():
        monkeypatch.setenv(name, value)
    server = RankServer(LocalExecutor(tiny_model("llama", "float32").runner), SECRET, OPTIONS, ADDRESS)
    yield server
    server.close()


def context(folder: Path, kind: int) -> ssl.SSLContext:
    """Python's own TLS with a pod's certificate, for one side or the other."""
    made = ssl.SSLContext(kind)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return made


def test_a_step_is_computed_for_another_pod(secured: RankServer) -> None:
    with contextlib.closing(connect(secured.address, SECRET, 2.0)) as link:
        link.send(step(4, joins=True))
        assert isinstance(answer(link), Reply)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(secured.address, b"another", 2.0)


def test_who_shows_a_certificate_is_asked_for_the_secret_and_nobody_else(
    secured: RankServer, pod: PodFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(secured.address, 5.0) as plain:
        plain.sendall(struct.pack("!i", 20) + b"x")
        assert plain.recv(100) == b""
    eventually(lambda: "the peer does not use TLS" in caplog.text)
    for authority, challenged in (("ours", True), ("theirs", False)):
        client = context(pod("127.0.0.1", authority), ssl.PROTOCOL_TLS_CLIENT)
        with socket.create_connection(secured.address, 5.0) as raw, client.wrap_socket(raw) as encrypted:
            if challenged:
                assert b"#CHALLENGE#" in encrypted.recv(100)
            else:
                with pytest.raises(ssl.SSLError, match="alert unknown ca"):
                    encrypted.recv(100)
    eventually(lambda: "AuthenticationError: the certificate of the peer is refused" in caplog.text)
    with contextlib.closing(connect(secured.address, SECRET, 2.0)) as link:
        assert isinstance(link.receive(30.0), Heartbeat)


@pytest.mark.parametrize(
    ("address", "authority", "why"),
    [
        (ADDRESS, "theirs", "signature failure|unable to get local issuer"),
        ("127.0.0.3", "ours", "IP address mismatch"),
    ],
)
@pytest.mark.usefixtures("secured")
def test_another_authority_or_address_than_was_dialled_is_refused(address: str, authority: str, why: str, pod: PodFolder) -> None:
    server = context(pod(address, authority), ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server((ADDRESS, 0)) as listener, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, listener.getsockname()[:2], SECRET, 5.0)
        with listener.accept()[0] as raw, pytest.raises(ssl.SSLError, match="alert"):
            server.wrap_socket(raw, server_side=True)
        with pytest.raises(AuthenticationError, match=f"the certificate of the peer is refused, by .*ca.crt: .*({why})"):
            connecting.result(30.0)


@pytest.mark.usefixtures("secured")
def test_what_stays_in_a_pod_is_not_encrypted() -> None:
    server = RankServer(LocalExecutor(tiny_model("llama", "float32").runner), SECRET, OPTIONS)
    with contextlib.closing(server), socket.create_connection(server.address, 5.0) as plain:
        assert b"#CHALLENGE#" in plain.recv(100)


@pytest.mark.usefixtures("secured")
def test_both_sides_send_at_once() -> None:
    """Messages of all lengths, of several records, too; the socket is readable when one begins and silent when none does."""
    messages = [Failure(chr(97 + number % 26) * (1 + number**3 % 70_000), False) for number in range(200)]
    with socket.create_server((ADDRESS, 0)) as listener, ThreadPoolExecutor(5) as pool, contextlib.ExitStack() as links:
        connecting = pool.submit(connect, listener.getsockname()[:2], SECRET, 30.0)
        accepting = pool.submit(accept, listener.accept()[0], SECRET, 30.0)
        ends = [links.enter_context(contextlib.closing(one.result(30.0))) for one in (connecting, accepting)]
        sending = [pool.submit(lambda end=end: [end.send(message) for message in messages]) for end in ends]

        def receive(end: Link) -> list[Message]:
            found: list[Message] = []
            while len(found) < len(messages):
                assert readable([end], 30.0)
                found.append(end.take())
            return found

        for receiving in [pool.submit(receive, end) for end in ends]:
            assert receiving.result(60.0) == messages
        for one in sending:
            one.result(30.0)
        assert readable(ends, 0.0) == []
