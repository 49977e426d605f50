"""Operator routes ``/admin/audit``: replay of served choices without speculation, and the results."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.admin.api import Body, parsed, read_body
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe.audit import Audit, Auditor, Difference, Result, Served

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 4096


class _Wanted(Body):
    """Body of ``POST /admin/audit``."""

    last: Annotated[int, Field(ge=1)] | None = None  # number of latest choices to replay; default: all that are kept


@dataclass(frozen=True, slots=True)
class AuditService:
    """Service behind ``/admin/audit``. Each method checks the admin key first.

    Of a tenant's text, only the two tokens at the first difference are revealed.
    """

    tenancy: Tenancy
    token_bytes: TokenBytes
    auditor: Auditor | None  # None if audits are disabled

    async def counters(self, request: Request) -> dict[str, Any]:
        """Return the results of all audits since the start, and the latest audits that found a difference."""
        auditor = self._allowed(request)
        differences = [self._told(found) for found in auditor.differences()]
        return {"kept": auditor.num_kept, "audits": auditor.counts(), "last_differences": differences}

    async def run(self, request: Request) -> Response:
        """Replay the latest choices; stream one JSON object per line as each is done, then a summary.

        Replaying stops when the client disconnects.
        """
        auditor = self._allowed(request)
        data = await read_body(request, _MAX_BODY_BYTES)
        wanted = parsed(_Wanted, data or b"{}", '{"last": NUMBER}, or an empty body for all kept choices')
        served = auditor.last(wanted.last)
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
        return {"id": token, "text": self.token_bytes(token).decode("utf-8", "backslashreplace"), "logprob": logprob}

    def _allowed(self, request: Request) -> Auditor:
        self.tenancy.check_admin(request.headers.get("authorization"))
        if self.auditor is None:
            raise ApiError(404, "this server keeps no choices to audit", code="audit_disabled")
        return self.auditor
