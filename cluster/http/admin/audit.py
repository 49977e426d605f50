"""The operator's routes ``/admin/audit``: served choices are computed again without drafts, and what came of it is told."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.admission.tenancy import Tenancy
from cluster.http.answers.logprobs import TokenBytes
from cluster.http.errors import ApiError
from cluster.observe.audit import Auditor
from cluster.observe.audit_results import Audit, Difference, Result, Served

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 4096


class _Wanted(BaseModel):
    """The body of ``POST /admin/audit``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    last: Annotated[int, Field(ge=1)] | None = None  # None: all that are kept


class AuditService:
    """What the routes do. Each first checks the key.

    Nothing of a tenant's text is told but the two tokens at which an answer differs.
    """

    def __init__(self, tenancy: Tenancy, token_bytes: TokenBytes, auditor: Auditor | None) -> None:
        """
        Args:
            tenancy: knows the operator's keys.
            token_bytes: of the model's tokenizer.
            auditor: of the engine; None where nothing is kept.
        """
        self._tenancy, self._bytes, self._auditor = tenancy, token_bytes, auditor

    async def counters(self, request: Request) -> dict[str, Any]:
        """What came of all audits since the start, and the last ones that found a difference."""
        auditor = self._allowed(request)
        differences = [self._told(found) for found in auditor.differences()]
        return {"kept": auditor.num_kept, "audits": auditor.counts(), "last_differences": differences}

    async def run(self, request: Request) -> Response:
        """Replays choices that were served last: a JSON object a line as each is done, then a summary. A client that goes away
        ends it."""
        auditor = self._allowed(request)
        served = auditor.last(await _wanted(request))
        logger.info("auditing %d choices", len(served))
        return StreamingResponse(self._lines(auditor, served), media_type="application/x-ndjson")

    async def _lines(self, auditor: Auditor, served: Sequence[Served]) -> AsyncIterator[str]:
        results: Counter[str] = Counter()
        for one in served:
            found = await auditor.audit(one)
            results[found.result] += 1
            yield json.dumps(self._told(found)) + "\n"
        yield json.dumps({"summary": {result.value: results[result] for result in Result if result is not Result.DROPPED}}) + "\n"

    def _told(self, found: Audit) -> dict[str, Any]:
        """One audit, as JSON."""
        told: dict[str, Any] = {
            "request": found.request_id, "strategy": found.strategy, "result": found.result.value, "tokens": found.tokens,
        }  # fmt: skip
        if found.detail is not None:
            told["detail"] = found.detail
        if found.difference is not None:
            told["difference"] = self._difference(found.difference)
        return told

    def _difference(self, found: Difference) -> dict[str, Any]:
        return {
            "position": found.position,
            "served": self._token(found.served, found.served_logprob),
            "plain": self._token(found.plain, found.plain_logprob),
            "gap": found.gap,
        }

    def _token(self, token: int | None, logprob: float | None) -> dict[str, Any] | None:
        if token is None:
            return None
        return {"id": token, "text": self._bytes(token).decode("utf-8", "backslashreplace"), "logprob": logprob}

    def _allowed(self, request: Request) -> Auditor:
        self._tenancy.check_admin(request.headers.get("authorization"))
        if self._auditor is None:
            raise ApiError(404, "this server keeps nothing to audit", code="audit_disabled")
        return self._auditor


def add_audit_routes(app: FastAPI, service: AuditService) -> None:
    """Gives an application the routes. They take the request itself: the key is looked at before the body is read."""

    @app.get("/admin/audit")
    async def counters(request: Request) -> dict[str, Any]:
        return await service.counters(request)

    @app.post("/admin/audit", response_model=None)
    async def run(request: Request) -> Response:
        return await service.run(request)


async def _wanted(request: Request) -> int | None:
    """The body's ``last``. An empty body asks for all."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {_MAX_BODY_BYTES} bytes", code="body_too_long")
    try:
        return _Wanted.model_validate_json(bytes(data) or b"{}").last
    except ValidationError as error:
        finding = error.errors(include_input=False)[0]
        field = ".".join(map(str, finding["loc"])) or None
        message = f"{field or 'the body'}: {finding['msg']}; send " + '{"last": NUMBER}, or nothing for all that is kept'
        raise ApiError(400, message, param=field, code="invalid_value") from None
