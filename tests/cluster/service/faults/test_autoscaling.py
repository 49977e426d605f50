"""Engines that come as the load does and go after it: no answer is lost or another one."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path

import httpx
import pytest

from outrider.cluster.serving import autoscaling
from tests.cluster.circle import Server
from tests.cluster.service.applications import serving, tiny_config

TOKENS, CLIENTS = 200, 6


@pytest.mark.proof
def test_a_second_engine_comes_under_load_and_goes_after_it(
    api_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "UP_S", 0.0)
    monkeypatch.setattr(autoscaling, "DOWN_S", 1.0)
    monkeypatch.setattr(autoscaling, "WINDOW_S", 11.0)
    config = tiny_config(tmp_path, server={"replicas": 1, "max_replicas": 2, "stop_timeout_s": 0.0}, engine={"max_running": 2})
    with serving(api_server, "scaled", config, TOKENS) as application:
        rests = threading.Event()

        def ask_on(number: int) -> list[tuple[str, str]]:
            """What comes of requests, one after another; all clients but the first stop when the load is to go."""
            found = []
            with application.client() as client:
                while not over.is_set() and not (rests.is_set() and number):
                    (choice,) = application.ask(client).choices
                    found.append((choice.text, choice.finish_reason))
            return found

        over = threading.Event()
        application.becomes(status="ok", replicas=1)
        first = application.engines()
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
            clients = [threads.submit(ask_on, number) for number in range(CLIENTS)]
            try:
                application.becomes(status="ok", replicas=2)
                assert len(application.engines()) == 2 and first < application.engines()
                rests.set()
                application.becomes(status="ok", replicas=1)
            finally:
                rests.set()
                over.set()
            answers = [answer for client in clients for answer in client.result()]
        assert set(answers) == {(application.expected.text, "length")} and len(answers) > CLIENTS


@pytest.mark.proof
def test_the_last_engine_goes_and_the_next_request_starts_one(
    api_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "DOWN_S", 1.0)
    monkeypatch.setattr(autoscaling, "WINDOW_S", 11.0)
    config = tiny_config(tmp_path, server={"replicas": 0, "max_replicas": 1, "stop_timeout_s": 0.0})
    with serving(api_server, "sleeping", config, TOKENS) as application, application.client() as client:
        before = application.engines()
        application.becomes(status="idle", replicas=0)
        assert httpx.get(f"{application.url}/ready").json() == {"status": "ready", "replicas": 0, "of": 0}
        (choice,) = application.ask(client).choices
        assert choice.text == application.expected.text
        assert application.engines() and application.engines().isdisjoint(before)
