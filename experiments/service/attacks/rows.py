"""Steps in which a calm request has a row, by the real scheduler, beside hostile requests and beside polite ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.configs.slices import EngineOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.errors import QueueFullError
from outrider.engine.scheduling.scheduler import Scheduler

STEPS = 400
_SLOTS, _WAITING, _STEP_TOKENS, _DRAFTS, _STEP_S = 8, 132, 256, 8, 0.01


@dataclass(frozen=True, slots=True)
class RowForm:
    """Requests of other accounts, so many of which run or wait at every moment."""

    name: str
    count: int
    prompt: int  # tokens
    max_tokens: int
    quarantined: bool = False
    accounts: int = 1
    lives: int | None = None  # steps after which its client leaves; None: it stays

    def polite(self) -> RowForm:
        """Return as many ordinary requests of as many accounts, whose clients stay."""
        return RowForm(self.name, self.count, self.prompt, self.max_tokens, accounts=self.accounts)


FORMS = (
    RowForm("128 choices", 128, 12, 200),
    RowForm("long prompts that end at their first token", 4, 2000, 1),
    RowForm("quarantined long prompts", 4, 2000, 1, quarantined=True),
    RowForm("quarantined long prompts of three accounts", 6, 2000, 1, quarantined=True, accounts=3),
    RowForm("quarantined short prompts", 64, 8, 1, quarantined=True),
    RowForm("requests that fail at their first mask", 128, 8, 1),
    RowForm("clients that leave after a step", 128, 500, 200, lives=1),
    RowForm("clients that leave after three steps", 32, 2000, 200, lives=3),
    RowForm("clients of three accounts that leave after two steps", 48, 1000, 200, accounts=3, lives=2),
)


def measure() -> list[dict[str, Any]]:
    """Return the steps with a calm row beside each form and beside its polite requests, and their ratio."""
    rows = []
    for form in FORMS:
        attack, polite = count(form), count(form.polite())
        rows.append({"form": form.name, "steps": STEPS, "attack": attack, "polite": polite, "ratio": round(attack / polite, 3)})
    return rows


def count(form: RowForm) -> int:
    """Return in how many steps the request of a calm account had a row; it asks again as soon as it has its answer."""
    now_s = 0.0
    options = EngineOptions(_SLOTS, _STEP_TOKENS, _WAITING)
    scheduler = Scheduler(options, _DRAFTS, lambda request, free: (free[0] if free else 0, request.num_computed), lambda: now_s)
    others, calm, number, found, born = list[Request](), None, 0, 0, dict[str, int]()
    for step in range(STEPS):
        for gone in [one for one in others if form.lives is not None and step - born[one.request_id] >= form.lives]:
            scheduler.remove(gone)
            others.remove(gone)
        while len(others) < form.count:
            number += 1
            one = _hostile(form, number)
            if not _added(scheduler, one):
                break
            others.append(one)
            born[one.request_id] = step
        if calm is None:
            calm = Request(f"calm-{step}", [1] * 12, SamplingParams(max_tokens=32), account="calm")
            calm = calm if _added(scheduler, calm) else None
        shares = scheduler.schedule()
        found += any(share.request is calm for share in shares)
        for share in shares:
            _compute(scheduler, share.request, share.end)
        others = [one for one in others if one.remaining]
        calm = calm if calm is not None and calm.remaining else None
        scheduler.check_integrity()
        now_s += _STEP_S
    return found


def _hostile(form: RowForm, number: int) -> Request:
    account = f"hostile-{number % form.accounts}"
    params = SamplingParams(max_tokens=form.max_tokens)
    return Request(f"hostile-{number}", [1] * form.prompt, params, account=account, quarantined=form.quarantined)


def _added(scheduler: Scheduler, request: Request) -> bool:
    try:
        scheduler.add(request)
    except QueueFullError:
        return False
    return True


def _compute(scheduler: Scheduler, request: Request, end: int) -> None:
    request.num_computed = end
    if end == request.num_tokens:
        request.commit([1])
    if not request.remaining:
        scheduler.remove(request)
