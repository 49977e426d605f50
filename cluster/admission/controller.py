"""Admission control: how many requests are held at once, what each API key may take, and how long an answer may take.

A request has a ticket from before its body is parsed until its answer has ended, however it ends. Everything here happens in one
event loop, and between two awaits: there is nothing to lock.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from cluster.admission.lengths import bounded_job
from cluster.admission.rate_limits import BUSY_S, Account, Rates, Take, rates_of, too_many
from cluster.admission.tenancy import Caller, Tenancy
from cluster.http.errors import ApiError
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.serving.generation import EnginePort, Job
from cluster.serving.watched_engine import Spending, WatchedEngine
from configs.schema import Config
from configs.server_checks import allowed_names
from configs.slices import LimitsOptions
from configs.tenancy_checks import key_is_required

REFUSALS = (
    "invalid_api_key", "request_too_large", "rate_limit_exceeded", "too_many_concurrent", "queue_full", "deadline_exceeded",
    "too_many_references", "host_not_allowed", "too_many_uploads", "uploads_full", "body_timeout",
)  # fmt: skip
_UPLOADS, _KEY_UPLOADS = 32, 8  # bodies of the largest size that are received at once, where nothing else is configured
_STAYS_KEPT = 64  # of which the mean is taken
_LONGEST_RETRY_S = 60.0
_SHORTEST_RETRY_S = 1.0
CURRENT: ContextVar[Ticket | None] = ContextVar("the ticket of the request that is being answered", default=None)


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """What admission keeps to."""

    require_key: bool = False
    capacity: int | None = None  # choices that run or wait; None: as many as come
    limits: LimitsOptions = field(default_factory=LimitsOptions)
    allowed_names: frozenset[str] | None = None  # of hosts, see configs.server_checks.allowed_names


@dataclass(frozen=True, slots=True)
class AdmissionCounts:
    """What a dashboard asks for."""

    refused: dict[str, int]  # by the code of the error; every code of ``REFUSALS`` is there
    in_flight: int  # requests with a ticket
    requests: int  # that got a ticket
    upload_bytes: int = 0  # of bodies that are held before their requests got one


def capacity(config: Config) -> int:
    """Choices that are held at once: as configured, else what all engines together run and queue."""
    if config.server.max_queued is not None:
        return config.server.max_queued
    return config.server.replicas * (config.engine.max_running + config.engine.max_waiting)


def admission_options(config: Config) -> AdmissionOptions:
    """The admission of a configuration."""
    required = key_is_required(config.server.require_key, config.server.host)
    return AdmissionOptions(required, capacity(config), config.limits, allowed_names(config.server, config.server.host))


class Visit:
    """A request that nothing is generated for."""

    def __init__(self, account: Account, rates: Rates, now_s: Callable[[], float]) -> None:
        """To be called by the controller."""
        self._account, self._rates, self._now_s = account, rates, now_s

    def headers(self) -> dict[str, str]:
        """What the answer says of the limits of its key."""
        return self._account.headers(self._rates, self._now_s())


class Upload:
    """A body while it is received: its bytes count against its key and against all. A context, which gives them back."""

    def __init__(self, admission: AdmissionController, account: Account) -> None:
        """To be called by the controller."""
        self._admission, self._account, self._size = admission, account, 0

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.receive(self._account, -self._size)

    def add(self, size: int) -> None:
        """So many more bytes have come. Raises ``ApiError``: 429, the key sends too much at once; 503, all together do."""
        self._size += size
        self._admission.receive(self._account, size)


def _accounted(jobs: Sequence[Job], caller: Caller, asked: int | None) -> list[Job]:
    """Jobs that are the caller's, with a priority that it may have."""
    least, account = caller.options.min_priority, "" if caller.tenant is None else caller.tenant
    if asked is not None and asked < least:
        message = f"priority: {asked} is asked for, and this API key may have {least} or more (its tenant's min_priority)"
        raise ApiError(400, message, param="priority", code="invalid_value")
    priority = max(0, least) if asked is None else asked
    return [dataclasses.replace(job, account=account, weight=caller.options.weight, priority=priority) for job in jobs]


class Ticket:
    """The right of one request to be answered. ``close`` is called once it has been, and does its work once."""

    def __init__(self, admission: AdmissionController, caller: Caller, account: Account, rates: Rates, arrived_s: float) -> None:
        """To be called by the controller."""
        self._admission, self._account, self._rates, self.arrived_s = admission, account, rates, arrived_s
        self.caller = caller
        self._places = 1  # before the body is read it is one choice
        self._planned = self._closed = False
        self._taken: list[tuple[Take, Spending]] = []

    def plan(self, jobs: Sequence[Job], n: int) -> Spending | None:
        """Takes what the jobs of the request need, on top of what it has; what its tokens are counted with, where they are.

        Raises:
            ApiError: 429, too many are held, by all or by the key, or too few tokens are left to it; 400, the key may never have
                so many choices at once.
        """
        spending, tokens = None, self._rates.tokens
        more = len(jobs) - (not self._planned)
        try:
            self._account.check_choices(self._rates, len(jobs), more)
        except ApiError as error:
            raise self._admission.refuse(error) from None
        self._admission.widen(self.caller, more)
        self._account.running += more
        self._places += more
        self._planned = True
        if tokens is not None:
            references = {id(text): len(text) for job in jobs for text in job.references}  # choices share them
            spending = Spending(sum(len(job.prompt_ids) for job in jobs[::n]) + sum(references.values()))
            most = spending.input_tokens + sum(job.params.max_tokens for job in jobs)
            self._taken.append((self._reserve(most, tokens), spending))
        return spending

    def headers(self) -> dict[str, str]:
        """What the answer says of the limits of its key."""
        return self._account.headers(self._rates, self._admission.now_s())

    def close(self, answered: bool) -> None:
        """Gives back the places, and the tokens that were not used.

        Args:
            answered: the answer began, so that its end says how long requests are held.
        """
        if self._closed:
            return
        self._closed = True
        self._account.running -= self._places
        for take, spending in self._taken:
            self._account.tokens.correct(take, spending.tokens)
        self._admission.leave(self.caller, self._places, self._admission.now_s() - self.arrived_s if answered else None)

    def _reserve(self, tokens: int, limit: int) -> Take:
        try:
            return self._account.reserve(tokens, limit, self._admission.now_s())
        except ApiError as error:
            raise self._admission.refuse(error) from None


class AdmissionController:
    """Gives out tickets."""

    def __init__(
        self, tenancy: Tenancy, options: AdmissionOptions | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            tenancy: knows the keys.
            options: no bounds when absent, but that of a body.
            now_s: a clock in seconds that never goes back.
        """
        options = options or AdmissionOptions()
        self.allowed_names = options.allowed_names
        self._tenancy, self._capacity, self._limits, self.now_s = tenancy, options.capacity, options.limits, now_s
        self._accounts: dict[str, Account] = {}  # by the hash of the key
        self._stays_s: deque[float] = deque(maxlen=_STAYS_KEPT)
        self._held = self._in_flight = self._requests = self._uploading = 0
        self._held_by: Counter[str | None] = Counter()  # of ``_held``, each tenant's
        self._refused = dict.fromkeys(REFUSALS, 0)

    @property
    def max_request_bytes(self) -> int:
        """Of a body."""
        return self._limits.max_request_bytes

    @property
    def body_timeout_s(self) -> float:
        """Within which a body has to come."""
        return self._limits.body_timeout_s

    def check_references(self, tokens: int, field: str) -> None:
        """Returns if the texts that an answer may repeat, ``field`` the last of them, may have so many tokens.

        Raises:
            ApiError: 400 that names the field.
        """
        most = self._limits.max_reference_tokens
        if tokens > most:
            message = f"{field}: with it there are {tokens} tokens that the answer may repeat, and this server takes {most}"
            message += " (limits.max_reference_tokens): send less"
            raise self.refuse(ApiError(400, message, param=field, code="too_many_references"))

    def counts(self) -> AdmissionCounts:
        """The counts of this moment."""
        return AdmissionCounts(dict(self._refused), self._in_flight, self._requests, self._uploading)

    def refuse(self, error: ApiError) -> ApiError:
        """The error, counted."""
        if error.code is not None:
            self._refused[error.code] = self._refused.get(error.code, 0) + 1
        return error

    def kept_back_s(self, authorization: str | None) -> float:
        """See ``Account.kept_back_s``; to be called for each such refusal."""
        return self._accounts.setdefault(self._caller(authorization).key, Account()).kept_back_s(self.now_s())

    def check(self, authorization: str | None) -> None:
        """Returns if a request would get a ticket now. Raises as ``enter``."""
        self._account(authorization)

    def visit(self, authorization: str | None) -> Visit:
        """Lets in a request that nothing is generated for: it counts as one of its key's.

        Raises:
            ApiError: 401, nobody has the key; 429, the key has taken what it may.
        """
        caller, now_s = self._caller(authorization), self.now_s()
        account, rates = self._accounts.setdefault(caller.key, Account()), rates_of(self._limits, caller.options)
        try:
            account.check_requests(rates, now_s)
        except ApiError as error:
            error.headers |= account.headers(rates, now_s)
            raise self.refuse(error) from None
        if rates.requests is not None:
            account.requests.take(1, now_s)
        return Visit(account, rates, self.now_s)

    def upload(self, authorization: str | None) -> Upload:
        """Holds a body. Raises ``ApiError`` (401)."""
        return Upload(self, self._accounts.setdefault(self._caller(authorization).key, Account()))

    def receive(self, account: Account, size: int) -> None:
        """To be called by an upload: so many bytes more, or less, are held. Raises ``ApiError`` as ``Upload.add``."""
        account.uploading += size
        self._uploading += size
        if size <= 0:
            return
        limits = self._limits
        own, most = limits.max_key_upload_bytes, limits.max_upload_bytes
        if account.uploading > (_KEY_UPLOADS * limits.max_request_bytes if own is None else own):
            message = "bodies of requests with this API key are being received that are too large together"
            raise self.refuse(too_many(f"{message} (limits.max_key_upload_bytes)", "too_many_uploads", BUSY_S))
        if self._uploading > (_UPLOADS * limits.max_request_bytes if most is None else most):
            message = "bodies of requests are being received that are too large together (limits.max_upload_bytes): try again"
            raise self.refuse(ApiError(503, message, code="uploads_full", headers={"Retry-After": str(math.ceil(BUSY_S))}))

    def enter(self, authorization: str | None, arrived_s: float) -> Ticket:
        """A ticket, to be closed.

        Raises:
            ApiError: 401, nobody has the key; 429, too many are held, or the key has taken what it may.
        """
        caller, account, rates = self._account(authorization)
        now_s = self.now_s()
        if rates.requests is not None:
            account.requests.take(1, now_s)
        account.running += 1
        self._held += 1
        self._held_by[caller.tenant] += 1
        self._in_flight += 1
        self._requests += 1
        return Ticket(self, caller, account, rates, arrived_s)

    def admit(
        self, engine: EnginePort, jobs: Sequence[Job], body: ChatCompletionRequest | CompletionRequest
    ) -> tuple[EnginePort, list[Job]]:
        """What a request's jobs are to be computed with, and the jobs within the limits.

        Args:
            engine: the replicas.
            jobs: of the request, ``n`` of each prompt side by side.
            body: the request that is being answered in this task.

        Raises:
            ApiError: 400, a prompt or an answer is too long, or the tenant may ask for no such priority; else as ``Ticket.plan``.
        """
        bounded, ticket = [bounded_job(job, body, self._limits) for job in jobs], CURRENT.get()
        if ticket is not None:
            bounded = _accounted(bounded, ticket.caller, body.priority)
        spending = None if ticket is None else ticket.plan(bounded, body.n or 1)
        allowed_s = min(body.timeout or math.inf, self._limits.request_timeout_s or math.inf)
        if spending is None and allowed_s == math.inf:
            return engine, bounded  # nothing to be watched
        arrived_s = self.now_s() if ticket is None else ticket.arrived_s
        return WatchedEngine(engine, spending, arrived_s, allowed_s, self.refuse), bounded

    def widen(self, caller: Caller, more: int) -> None:
        """Takes more places. Raises ``ApiError`` (429) when there are not so many, or the others' would not be left."""
        try:
            self._check_places(caller, more)
        except ApiError as error:
            raise self.refuse(error) from None
        self._held += more
        self._held_by[caller.tenant] += more

    def leave(self, caller: Caller, places: int, stay_s: float | None) -> None:
        """To be called by a ticket: gives its places back.

        Args:
            caller: who had them.
            places: as many as it took.
            stay_s: for which it was held; None where that says nothing of other requests.
        """
        self._held -= places
        self._held_by[caller.tenant] -= places
        self._in_flight -= 1
        if stay_s is not None:
            self._stays_s.append(stay_s)

    def _account(self, authorization: str | None) -> tuple[Caller, Account, Rates]:
        """Of the caller, when it may come in."""
        caller, now_s = self._caller(authorization), self.now_s()
        account, rates = self._accounts.setdefault(caller.key, Account()), rates_of(self._limits, caller.options)
        try:
            account.check(rates, now_s)
            self._check_places(caller, 1)
        except ApiError as error:
            error.headers |= account.headers(rates, now_s)
            raise self.refuse(error) from None
        return caller, account, rates

    def _check_places(self, caller: Caller, more: int) -> None:
        """Raises ``ApiError`` (429) where there are not so many places for a tenant.

        Where there are several tenants, one may hold so much of what the others leave that a place for its weight stays free: at
        weight 1 half of it. So a newcomer always finds places, however many the others want (dynamic thresholds, Choudhury and
        Hahne 1998).
        """
        if self._capacity is None or more <= 0:
            return
        if self._held + more > self._capacity:
            raise self._full()
        if not self._tenancy.several:
            return
        own, weight = self._held_by[caller.tenant], caller.options.weight
        most = max(1, int((self._capacity - self._held + own) * weight / (weight + 1)))
        if own + more > most:
            message = (
                f"this tenant has {own} choices that run or wait and asks for {more} more: of server.max_queued "
                f"({self._capacity}) it may hold {most} now, the rest is for other tenants"
            )
            raise too_many(message, "queue_full", self._retry_s())

    def _caller(self, authorization: str | None) -> Caller:
        try:
            return self._tenancy.caller_of(authorization)
        except ApiError as error:
            raise self.refuse(error) from None

    def _full(self) -> ApiError:
        message = (
            f"{self._held} choices run or wait, and server.max_queued is {self._capacity} (by default what the engines take: "
            "server.replicas x (engine.max_running + engine.max_waiting))"
        )
        return too_many(message, "queue_full", self._retry_s())

    def _retry_s(self) -> float:
        """As long as requests were held of late: those that are held now have ended by then, at the same pace.

        Example: the last 64 were held for 7.4 s on average: come back in 7.4 s.
        """
        mean_s = sum(self._stays_s) / len(self._stays_s) if self._stays_s else _SHORTEST_RETRY_S
        return min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, mean_s))
