"""Rate limits of an API key: requests and tokens in the last 60 seconds, and concurrent choices."""
# The exact window of the `limits` library keeps an entry per unit and cannot give units back, which does not suit tokens; this
# one keeps an entry per request.

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from outrider.cluster.http.errors import ApiError
from outrider.configs.slices import LimitsOptions, TenantOptions

MINUTE_S = 60.0
# Refusals of a key within the delay that are sent at once, and the delay of further ones in seconds.
_REFUSALS, _KEPT_BACK_S = 20, 1.0
BUSY_S = 1.0  # seconds; when a running request of a key will end is unknown


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of one API key; None for no limit."""

    requests: int | None  # per 60 seconds
    tokens: int | None  # per 60 seconds
    concurrent: int | None  # concurrent choices


def rates_of(limits: LimitsOptions, tenant: TenantOptions, api_replicas: int = 1) -> Rates:
    """Return the tenant's limits, or else the configured ones, divided among API replicas: 10 a minute are 4 at each of three."""
    wholes = (
        limits.requests_per_minute if tenant.requests_per_minute is None else tenant.requests_per_minute,
        limits.tokens_per_minute if tenant.tokens_per_minute is None else tenant.tokens_per_minute,
        limits.max_concurrent if tenant.max_concurrent is None else tenant.max_concurrent,
    )
    return Rates(*(None if whole is None else -(-whole // api_replicas) for whole in wholes))


@dataclass(slots=True)
class LedgerEntry:
    """Amount that a request took from a window."""

    time_s: float
    amount: int


class MovingWindow:
    """Amounts taken in the last minute. Times are arguments, in seconds of a monotonic clock.

    Example: the limit is 100, 60 were taken at 0 s and 30 at 20 s. At 30 s, 10 are left; 50 more fit at 60 s, when the 60 leave,
    and 100 at 80 s. If of the 60 only 5 were used, they are given back, and 65 are left at once.
    """

    def __init__(self) -> None:
        self._takes: deque[LedgerEntry] = deque()
        self._sum = 0

    def taken(self, now_s: float) -> int:
        """Return the sum of the last minute."""
        # Old entries are removed when the window is read, so no timer is needed.
        while self._takes and self._takes[0].time_s + MINUTE_S <= now_s:
            self._sum -= self._takes.popleft().amount
        return self._sum

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """Return the seconds until the amount fits, 0 if it does now. More than the limit fits into an empty window."""
        excess = self.taken(now_s) + min(amount, limit) - limit
        wait_s = 0.0
        for take in self._takes:
            if excess <= 0:
                break
            excess -= take.amount
            wait_s = take.time_s + MINUTE_S - now_s
        return wait_s

    def take(self, amount: int, now_s: float) -> LedgerEntry:
        """Take an amount, even if it does not fit."""
        self._takes.append(LedgerEntry(now_s, amount))
        self._sum += amount
        return self._takes[-1]

    def correct(self, take: LedgerEntry, amount: int) -> None:
        """Change a taken amount to what was used; no effect if it has left the window."""
        if self._takes and take.time_s >= self._takes[0].time_s:
            self._sum += amount - take.amount
            take.amount = amount

    def whole_s(self, now_s: float) -> float:
        """Return the seconds until the window is empty."""
        self.taken(now_s)
        return self._takes[-1].time_s + MINUTE_S - now_s if self._takes else 0.0


@dataclass(slots=True)
class Account:
    """Usage of one API key."""

    requests: MovingWindow = field(default_factory=MovingWindow)
    tokens: MovingWindow = field(default_factory=MovingWindow)
    running: int = 0  # choices
    uploading: int = 0  # bytes of bodies that are being received
    refused_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REFUSALS + 1))  # times of the latest refusals

    def kept_back_s(self, now_s: float) -> float:
        """Return the seconds by which to delay a refusal: 0, or 1 after more than ``_REFUSALS`` in one second."""
        # A client that retries without waiting would otherwise keep this process busy with refusals.
        self.refused_s.append(now_s)
        often = len(self.refused_s) > _REFUSALS and now_s - self.refused_s[0] < _KEPT_BACK_S
        return _KEPT_BACK_S if often else 0.0

    def check(self, rates: Rates, now_s: float) -> None:
        """Raise ``ApiError`` (429) with a retry time unless one more request may begin."""
        if rates.concurrent is not None and self.running >= rates.concurrent:
            raise self._busy(rates.concurrent)
        self.check_requests(rates, now_s)
        if rates.tokens is not None:  # how many the request needs is unknown yet: at least one
            _check(self.tokens, 1, rates.tokens, now_s, "tokens")

    def check_requests(self, rates: Rates, now_s: float) -> None:
        """Raise ``ApiError`` (429) unless one more request that generates nothing may begin."""
        if rates.requests is not None:
            _check(self.requests, 1, rates.requests, now_s, "requests")

    def check_choices(self, rates: Rates, choices: int, more: int) -> None:
        """Raise ``ApiError`` unless an admitted request may have its choices, of which ``more`` are not counted yet."""
        # 429 if other requests of the key must end first, 400 if the request exceeds the key's limit by itself.
        if rates.concurrent is None or self.running + more <= rates.concurrent:
            return
        if choices > rates.concurrent:
            message = (
                f"the request has {choices} choices, but at most {rates.concurrent} may run with this API key (max_concurrent)"
            )
            raise ApiError(400, f"{message}: ask for fewer", param="n", code="invalid_value")
        raise self._busy(rates.concurrent)

    def _busy(self, most: int) -> ApiError:
        message = f"{self.running} choices with this API key are running, the maximum is {most} (max_concurrent)"
        return too_many(message, "too_many_concurrent", BUSY_S)

    def reserve(self, tokens: int, limit: int, now_s: float) -> LedgerEntry:
        """Take the most tokens that a request may use. Raise ``ApiError`` (429) with a retry time if they are not available."""
        _check(self.tokens, tokens, limit, now_s, "tokens")
        return self.tokens.take(tokens, now_s)

    def headers(self, rates: Rates, now_s: float) -> dict[str, str]:
        """Return OpenAI's ``x-ratelimit-*`` headers for the limits that are set."""
        lines: dict[str, str] = {}
        for name, limit, window in (("requests", rates.requests, self.requests), ("tokens", rates.tokens, self.tokens)):
            if limit is not None:
                lines[f"x-ratelimit-limit-{name}"] = str(limit)
                lines[f"x-ratelimit-remaining-{name}"] = str(max(0, limit - window.taken(now_s)))
                lines[f"x-ratelimit-reset-{name}"] = span(window.whole_s(now_s))
        return lines


def too_many(message: str, code: str, wait_s: float) -> ApiError:
    """Return a 429 error with a retry time."""
    # `Retry-After` is rounded up to whole seconds; `retry-after-ms`, which OpenAI's clients prefer, is exact.
    headers = {"Retry-After": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}
    return ApiError(429, f"{message}: try again in {span(wait_s)}", code=code, headers=headers)


def span(seconds: float) -> str:
    """Format a duration as OpenAI does: ``0s``, ``250ms``, ``7.4s``, ``1m0s``."""
    millis = math.ceil(max(0.0, seconds) * 1000)
    if millis >= 60_000:
        minutes, rest = divmod(math.ceil(millis / 1000), 60)
        return f"{minutes}m{rest}s"
    return f"{millis / 1000:g}s" if millis >= 1000 or not millis else f"{millis}ms"


def _check(window: MovingWindow, amount: int, limit: int, now_s: float, what: str) -> None:
    wait_s = window.wait_s(amount, limit, now_s)
    if wait_s > 0:
        message = f"this API key may use {limit} {what} a minute: {window.taken(now_s)} are used, and this one needs {amount}"
        raise too_many(message, "rate_limit_exceeded", wait_s)
