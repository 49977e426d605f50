"""Admission control: the number of requests held at once, the limits of each API key, and the deadline of each answer."""

# A request holds a ticket from before its body is parsed until its answer ends. All in one event loop without await: no locks.

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.cluster.admission.rate_limits import BUSY_S, Account, LedgerEntry, Rates, rates_of, too_many
from outrider.cluster.admission.tenancy import Caller, Tenancy
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.types.openai import RequestFields
from outrider.cluster.serving.generation import Deadline, GenerationJob, Listener
from outrider.configs.schema import Config
from outrider.configs.server_checks import allowed_names
from outrider.configs.slices import LimitsOptions
from outrider.configs.tenancy_checks import key_is_required
from outrider.decoding.request import StepOutput
from outrider.engine.errors import RequestError

REFUSALS = (
    "invalid_api_key", "request_too_large", "rate_limit_exceeded", "too_many_concurrent", "queue_full", "deadline_exceeded",
    "too_many_references", "host_not_allowed", "origin_not_allowed", "too_many_uploads", "uploads_full", "body_timeout",
    "too_many_texts",
)  # fmt: skip
UPLOADS, KEY_UPLOADS = 32, 8  # total size of the bodies being received, in multiples of the largest: in all and per key
_STAYS_KEPT = 64  # latest holding times per tenant, whose mean is the retry time
_LONGEST_RETRY_S = 60.0
_SHORTEST_RETRY_S = 1.0
CURRENT: ContextVar[Ticket | None] = ContextVar("the ticket of the request that is being answered", default=None)


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Settings of admission control."""

    require_key: bool = False
    capacity: int | None = None  # choices that run or wait; None for no limit
    limits: LimitsOptions = field(default_factory=LimitsOptions)
    allowed_names: frozenset[str] | None = None  # allowed host names, see configs.server_checks.allowed_names
    api_replicas: int = 1  # rates are divided among them


@dataclass(frozen=True, slots=True)
class AdmissionCounts:
    """Counters for ``/metrics``."""

    refused: dict[str, int]  # by error code, with every code of ``REFUSALS``
    in_flight: int  # requests with a ticket
    requests: int  # requests that got a ticket so far
    upload_bytes: int = 0  # bytes of bodies held for requests without a ticket


@dataclass(slots=True)
class TokenUsage:
    """Tokens used by a request."""

    input_tokens: int  # prompts and reference texts
    output_tokens: int = 0
    begun: bool = False  # an engine took the request

    def on_output(self, job: GenerationJob) -> Callable[[StepOutput], None]:
        """Return the ``Listener`` for each of the request's jobs."""
        return self._hear

    def _hear(self, output: StepOutput) -> None:
        self.begun = True
        self.output_tokens += len(output.token_ids)

    @property
    def tokens(self) -> int:
        """Return the used tokens: 0 until an engine took the request."""
        return self.input_tokens + self.output_tokens if self.begun else 0


@dataclass(slots=True)
class Ticket:
    """Admission of one request, with what it took from the limits."""

    caller: Caller
    account: Account
    rates: Rates
    arrived_s: float
    places: int = 1  # one choice until the body is read
    is_planned: bool = False
    taken: list[tuple[LedgerEntry, TokenUsage]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """Request within the limits."""

    jobs: list[GenerationJob]
    listeners: tuple[Listener, ...]  # count the emitted tokens
    deadline: Deadline | None


def capacity(config: Config) -> int:
    """Return the number of choices held at once: ``server.max_queued``, or what all engines run and queue."""
    if config.server.max_queued is not None:
        return config.server.max_queued
    return config.server.most_replicas * (config.engine.max_running + config.engine.max_waiting)


def admission_options(config: Config) -> AdmissionOptions:
    """Return the admission settings of each API replica."""
    required = key_is_required(config.server.require_key, config.server.host)
    server = config.server
    names = allowed_names(server, server.host)
    # Not divided among the API replicas, because the engines refuse more themselves; a configured limit is divided.
    most = capacity(config)
    if server.max_queued is not None:
        most = -(-server.max_queued // server.api_replicas)
    return AdmissionOptions(required, most, config.limits, names, server.api_replicas)


class AdmissionController:
    """Admission controller that gives out tickets and takes them back."""

    def __init__(self, tenancy: Tenancy, options: AdmissionOptions) -> None:
        self.allowed_names, self.limits = options.allowed_names, options.limits
        self._tenancy, self._capacity, self._api_replicas = tenancy, options.capacity, options.api_replicas
        self._accounts: dict[str, Account] = {}  # by hash of the API key
        self._stays_s: dict[str | None, deque[float]] = {}  # by tenant: a refusal reveals nothing about others' requests
        self._held = self._in_flight = self._requests = self._uploading = 0
        self._held_by: Counter[str | None] = Counter()  # ``_held`` by tenant
        self._refused = dict.fromkeys(REFUSALS, 0)

    def counts(self) -> AdmissionCounts:
        """Return the current counters."""
        return AdmissionCounts(dict(self._refused), self._in_flight, self._requests, self._uploading)

    def refuse(self, error: ApiError) -> ApiError:
        """Count an error and return it."""
        if error.code is not None:
            self._refused[error.code] = self._refused.get(error.code, 0) + 1
        return error

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Count an ``ApiError`` that is raised in the block."""
        try:
            yield
        except ApiError as error:
            self.refuse(error)
            raise

    def kept_back_s(self, authorization: str | None) -> float:
        """Return the delay of a refusal; call it once per refusal. See ``Account.kept_back_s``."""
        return self._account(self._tenancy.caller_of(authorization)).kept_back_s(time.monotonic())

    def caller_of(self, authorization: str | None) -> Caller:
        """Return the sender of a request; see ``Tenancy.caller_of``."""
        return self._tenancy.caller_of(authorization)

    def check(self, authorization: str | None) -> tuple[Caller, Account, Rates]:
        """Return caller, account and rates if a request would get a ticket now. Raise as ``enter``."""
        caller, now_s = self._tenancy.caller_of(authorization), time.monotonic()
        account, rates = self._account(caller), rates_of(self.limits, caller.options, self._api_replicas)
        with _telling(account, rates, now_s):
            account.check(rates, now_s)
            self._check_places(caller, 1)
        return caller, account, rates

    def visit(self, authorization: str | None) -> Callable[[], dict[str, str]]:
        """Count a request that generates nothing; return a function for the response headers. Raise ``ApiError`` (401, 429)."""
        caller, now_s = self._tenancy.caller_of(authorization), time.monotonic()
        account, rates = self._account(caller), rates_of(self.limits, caller.options, self._api_replicas)
        with _telling(account, rates, now_s):
            account.check_requests(rates, now_s)
        if rates.requests is not None:
            account.requests.take(1, now_s)
        return lambda: account.headers(rates, time.monotonic())

    @contextlib.contextmanager
    def upload(self, authorization: str | None) -> Iterator[Callable[[int], None]]:
        """Count a body while it is held in the block; yield the function to call with each number of received bytes.

        Raises ApiError: 401, unknown key; 429, the key's bodies are too large together; 503, those of all keys are.
        """
        account = self._account(self._tenancy.caller_of(authorization))
        held = 0

        def receive(size: int) -> None:
            nonlocal held
            held += size
            account.uploading += size
            self._uploading += size
            self._check_uploads(account)

        try:
            yield receive
        finally:
            account.uploading -= held
            self._uploading -= held

    def enter(self, authorization: str | None, arrived_s: float) -> Ticket:
        """Return a ticket, to be given back by ``leave``. Raises ``ApiError``: 401, unknown key; 429, too many requests."""
        caller, account, rates = self.check(authorization)
        if rates.requests is not None:
            account.requests.take(1, time.monotonic())
        account.running += 1
        self._held += 1
        self._held_by[caller.tenant] += 1
        self._in_flight += 1
        self._requests += 1
        return Ticket(caller, account, rates, arrived_s)

    def headers(self, ticket: Ticket) -> dict[str, str]:
        """Return the response headers with the limits of the key."""
        return ticket.account.headers(ticket.rates, time.monotonic())

    def admit(self, jobs: Sequence[GenerationJob], body: RequestFields) -> AdmittedRequest:
        """Admit the jobs of the current task's request, ``n`` per prompt side by side.

        Raises ApiError: 429, too many choices are held, in all or by the key, or too few tokens are left; 400, the key may never
        have this many choices at once. Raises RequestError: the tenant may not have this priority.
        """
        ticket, listeners = CURRENT.get(), list[Listener]()
        if ticket is not None:
            jobs = _accounted(jobs, ticket.caller, body.priority)
            with self.refusing():
                spending = self._plan(ticket, jobs, body.n or 1)
            if spending is not None:
                listeners.append(spending.on_output)
        allowed_s = min(body.timeout or math.inf, self.limits.request_timeout_s or math.inf)
        if allowed_s == math.inf:
            return AdmittedRequest(list(jobs), tuple(listeners), None)
        arrived_s = time.monotonic() if ticket is None else ticket.arrived_s
        message = f"the answer took longer than {allowed_s:g} s (timeout, or the server's limits.request_timeout_s)"
        deadline = Deadline(arrived_s + allowed_s, lambda: self.refuse(ApiError(504, message, code="deadline_exceeded")))
        return AdmittedRequest(list(jobs), tuple(listeners), deadline)

    def leave(self, ticket: Ticket, answered: bool) -> None:
        """Take a ticket back, with its places and unused tokens. If answered, its time counts for retry times."""
        ticket.account.running -= ticket.places
        for take, spending in ticket.taken:
            # The most that the request could use was taken; the rest is given back.
            ticket.account.tokens.correct(take, spending.tokens)
        self._held -= ticket.places
        self._held_by[ticket.caller.tenant] -= ticket.places
        self._in_flight -= 1
        if answered:
            stays_s = self._stays_s.setdefault(ticket.caller.tenant, deque(maxlen=_STAYS_KEPT))
            stays_s.append(time.monotonic() - ticket.arrived_s)

    def _account(self, caller: Caller) -> Account:
        # Bounded: unknown keys are refused before, so entries exist only for keys that the configuration has, or has had.
        return self._accounts.setdefault(caller.key, Account())

    def _check_uploads(self, account: Account) -> None:
        largest = self.limits.max_request_bytes
        if account.uploading > KEY_UPLOADS * largest:
            message = "the request bodies being received with this API key are too large in total"
            raise too_many(f"{message} (above {KEY_UPLOADS} * limits.max_request_bytes)", "too_many_uploads", BUSY_S)
        if self._uploading > UPLOADS * largest:
            message = f"the request bodies being received are above {UPLOADS} * limits.max_request_bytes in total: try again"
            raise ApiError(503, message, code="uploads_full", headers={"Retry-After": str(math.ceil(BUSY_S))})

    def _plan(self, ticket: Ticket, jobs: Sequence[GenerationJob], n: int) -> TokenUsage | None:
        """Take what jobs need beyond the ticket; return the counter of their tokens if tokens are limited."""
        more = len(jobs) - (not ticket.is_planned)
        ticket.account.check_choices(ticket.rates, len(jobs), more)
        self._check_places(ticket.caller, more)
        self._held += more
        self._held_by[ticket.caller.tenant] += more
        ticket.account.running += more
        ticket.places += more
        ticket.is_planned = True
        if ticket.rates.tokens is None:
            return None
        references = {id(text): len(text) for job in jobs for text in job.references}  # choices share reference texts
        scored = sum(len(choice) for job in jobs for choice in job.choices)
        spending = TokenUsage(sum(len(job.prompt_ids) for job in jobs[::n]) + sum(references.values()) + scored)
        most = spending.input_tokens + sum(job.params.max_tokens for job in jobs if not job.choices)
        ticket.taken.append((ticket.account.reserve(most, ticket.rates.tokens, time.monotonic()), spending))
        return spending

    def _check_places(self, caller: Caller, more: int) -> None:
        """Raise ``ApiError`` (429) unless the tenant can have ``more`` places."""
        # Dynamic thresholds (Choudhury and Hahne 1998): with several tenants, each may hold at most weight / (weight + 1) of the
        # places that the others leave, half of them at weight 1. A new tenant therefore always finds places.
        if self._capacity is None or more <= 0:
            return
        if self._held + more > self._capacity:
            message = (
                f"no room for {more} more choices: server.max_queued is {self._capacity} (default: "
                "server.replicas, or max_replicas, x (engine.max_running + engine.max_waiting))"
            )
            raise too_many(message, "queue_full", self._retry_s(caller.tenant))
        if not self._tenancy.several:
            return
        own, weight = self._held_by[caller.tenant], caller.options.weight
        most = max(1, int((self._capacity - self._held + own) * weight / (weight + 1)))
        if own + more > most:
            message = (
                f"this tenant has {own} running or waiting choices and requests {more} more, which exceeds its share of "
                f"server.max_queued ({self._capacity})"
            )
            raise too_many(message, "queue_full", self._retry_s(caller.tenant))

    def _retry_s(self, tenant: str | None) -> float:
        """Return the mean time that the tenant's latest requests were held: at that pace, the current ones will have ended."""
        stays_s = self._stays_s.get(tenant)
        mean_s = sum(stays_s) / len(stays_s) if stays_s else _SHORTEST_RETRY_S
        return min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, mean_s))


@contextlib.contextmanager
def _telling(account: Account, rates: Rates, now_s: float) -> Iterator[None]:
    """Add the key's remaining limits to the headers of a refusal."""
    try:
        yield
    except ApiError as error:
        error.headers |= account.headers(rates, now_s)
        raise


def _accounted(jobs: Sequence[GenerationJob], caller: Caller, requested: int | None) -> list[GenerationJob]:
    """Return jobs with the caller's account, weight and an allowed priority."""
    least, account = caller.options.min_priority, "" if caller.tenant is None else caller.tenant
    if requested is not None and requested < least:
        message = f"must be at least {least} with this API key (its tenant's min_priority), got {requested}"
        raise RequestError("priority", message)
    priority = max(0, least) if requested is None else requested
    return [dataclasses.replace(job, account=account, weight=caller.options.weight, priority=priority) for job in jobs]
