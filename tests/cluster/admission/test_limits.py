"""The window that moves, and what a key is told of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cluster.admission.controller import AdmissionController, admission_options, capacity
from outrider.cluster.admission.rate_limits import MINUTE_S, Account, MovingWindow, Rates, rates_of, span
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.errors import ApiError
from outrider.configs.schema import Config
from outrider.configs.slices import LimitsOptions, ServerOptions, TenancyOptions, TenantOptions


def test_the_example() -> None:
    window = MovingWindow()
    first = window.take(60, 0.0)
    window.take(30, 20.0)
    assert window.taken(30.0) == 90
    assert window.wait_s(10, 100, 30.0) == 0
    assert window.wait_s(50, 100, 30.0) == 30
    assert window.wait_s(100, 100, 30.0) == 50
    window.correct(first, 5)
    assert (window.taken(30.0), window.wait_s(65, 100, 30.0)) == (35, 0)
    assert window.taken(60.0) == 30
    window.correct(first, 0)  # it has left: nothing is given back twice
    assert window.taken(60.0) == 30
    assert (window.taken(80.0), window.whole_s(80.0)) == (0, 0.0)


@given(
    takes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.none() | st.integers(0, 60)), max_size=12),
    amount=st.integers(1, 150),
    limit=st.integers(1, 100),
)
def test_the_wait_is_exact(takes: list[tuple[int, int, int | None]], amount: int, limit: int) -> None:
    window, now_s, known = MovingWindow(), 0.0, []
    for pause, taken, used in takes:
        now_s += pause
        take = window.take(taken, now_s)
        if used is not None:
            window.correct(take, min(used, taken))
        known.append((now_s, taken if used is None else min(used, taken)))

    def fits(at_s: float) -> bool:
        return sum(size for time_s, size in known if time_s + MINUTE_S > at_s) + min(amount, limit) <= limit

    assert window.taken(now_s) == sum(size for time_s, size in known if time_s + MINUTE_S > now_s)
    wait_s = window.wait_s(amount, limit, now_s)
    assert fits(now_s + wait_s)
    assert wait_s == 0 or not fits(now_s + wait_s - 0.5)


def test_an_account_says_when_to_come_back() -> None:
    account, rates = Account(), Rates(requests=2, tokens=100, concurrent=3)
    for now_s in (0.0, 10.0):
        account.check(rates, now_s)
        account.requests.take(1, now_s)
    with pytest.raises(ApiError, match=r"2 requests a minute: 2 are used, and this one needs 1: try again in 39\.5s") as caught:
        account.check(rates, 20.5)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.headers == {"Retry-After": "40", "retry-after-ms": "39500"}
    account.check(rates, 60.0)

    account.reserve(70, 100, 60.0)
    with pytest.raises(ApiError, match=r"100 tokens a minute: 70 are used, and this one needs 31"):
        account.reserve(31, 100, 61.0)
    account.reserve(500, 100, 120.0)  # more than ever fits: it has a minute for itself
    with pytest.raises(ApiError, match="tokens a minute"):
        account.check(rates, 121.0)
    assert account.headers(rates, 121.0) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "0s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "59s",
    }
    account.running = 3
    with pytest.raises(ApiError, match="3 choices with this API key are running") as busy:
        account.check(rates, 300.0)
    assert busy.value.code == "too_many_concurrent"
    assert account.headers(Rates(None, None, 3), 0.0) == {}


def test_a_tenant_has_limits_of_its_own() -> None:
    limits = LimitsOptions(requests_per_minute=10, max_concurrent=2)
    assert rates_of(limits, TenantOptions()) == Rates(10, None, 2)
    assert rates_of(limits, TenantOptions(requests_per_minute=99, tokens_per_minute=7)) == Rates(99, 7, 2)


def test_each_replica_of_the_api_has_its_share() -> None:
    limits = LimitsOptions(requests_per_minute=10, max_concurrent=1)
    assert rates_of(limits, TenantOptions(tokens_per_minute=100), api_replicas=3) == Rates(4, 34, 1)
    config = Config(server=ServerOptions(api_replicas=2, max_queued=25), limits=limits)
    told = admission_options(config)
    assert (told.api_replicas, told.capacity) == (2, 13)
    engines = admission_options(Config(server=ServerOptions(api_replicas=2)))
    assert engines.capacity == capacity(Config())  # engines refuse what is too much for them, whoever sends it
    admission = AdmissionController(Tenancy(TenancyOptions()), told)
    for _ in range(5):
        admission.visit(None)
    with pytest.raises(ApiError, match="5 requests a minute"):
        admission.visit(None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0201, "21ms"), (1, "1s"), (7.4, "7.4s"), (60, "1m0s"), (119.5, "2m0s"), (360, "6m0s")]
)
def test_spans_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_who_does_not_wait_is_refused_later() -> None:
    account = Account()
    assert [account.kept_back_s(0.01 * number) for number in range(20)] == [0.0] * 20
    assert account.kept_back_s(0.2) == account.kept_back_s(0.9) == 1.0  # 21 refusals in less than a second
    assert account.kept_back_s(1.3) == 0.0
    assert [account.kept_back_s(2.0 + number) for number in range(60)] == [0.0] * 60  # who comes once a second waits
