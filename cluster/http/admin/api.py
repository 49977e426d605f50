"""Operator routes ``/admin/cache``, ``/admin/audit`` and ``/admin/baseline``: shared cache, audits, comparisons."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from outrider.actors.description import Description
from outrider.cache_service.server.admin import TenantStats
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.turns import Turns
from outrider.cluster.http.types.strict import Text
from outrider.cluster.observe.audit import Audit, Auditor, Forget, Result, Served, keeps_nothing
from outrider.cluster.observe.shadow import Shadow
from outrider.cluster.serving.cache_port import CacheAdminPort, answered
from outrider.engine.measures.metrics import sum_counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

MAX_PRELOAD_BYTES = 8 << 20  # body size; small, because it is tokenized while requests are served
MAX_PRELOAD = 1 << 16  # documents per request
MAX_IMPORT_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20


class Body(BaseModel):
    """Base class of the bodies of operator routes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


M = TypeVar("M", bound=Body)


class _Documents(Body):
    documents: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PRELOAD, fail_fast=True)]


@dataclass(frozen=True)
class AdminService:
    """Service behind ``/admin/cache``. Each method checks the admin key first."""

    tenancy: Tenancy
    tokenizer: PreTrainedTokenizerFast
    port: CacheAdminPort | None  # shared cache; None if the server has none
    replicas: Callable[[], Awaitable[Sequence[Description]]]  # returns descriptions of the replicas that answer
    forget: Forget = keeps_nothing  # deletes audit records
    _turns: Turns = dataclasses.field(default_factory=lambda: Turns("operator-texts"))

    async def stats(self, request: Request) -> dict[str, Any]:
        """Return the cache size of each tenant and the replicas' counters; ``error`` is set if Redis does not answer."""
        port = self._allowed(request)
        replicas = await self.replicas()
        cache_clients = [replica.cache for replica in replicas]
        tenants: Sequence[TenantStats] = ()
        error = None
        try:
            with answered():
                tenants = await port.stats()
        except ApiError as refusal:
            error = str(refusal)
        return {
            "tenants": [dataclasses.asdict(entry) for entry in tenants],
            "replicas": [dataclasses.asdict(counts) for counts in cache_clients if counts is not None],
            "prefix_queries": sum(replica.counts.prefix_queries for replica in replicas),
            "prefix_hits": sum(replica.counts.prefix_hits for replica in replicas),
            "strategies": [dataclasses.asdict(counts) for counts in sum_counts(replica.strategies for replica in replicas)],
            "energy": [None if replica.energy is None else dataclasses.asdict(replica.energy) for replica in replicas],
            "error": error,
        }

    async def export(self, request: Request) -> Response:
        """Return a snapshot of one tenant as a file."""
        port, tenant = self._allowed(request), _tenant(request)
        with answered(500, "corrupt_snapshot"):
            data = await port.export(tenant)
        logger.info("exported %d bytes of tenant %s", len(data), tenant)
        name = "public" if tenant == "*" else tenant
        headers = {"Content-Disposition": f'attachment; filename="{name}.snapshot"', "Content-Length": str(len(data))}
        return StreamingResponse(_pieces(data), media_type="application/octet-stream", headers=headers)

    async def import_(self, request: Request) -> dict[str, Any]:
        """Add an exported snapshot to a tenant."""
        port, tenant = self._allowed(request), _tenant(request)
        data = await read_body(
            request, MAX_IMPORT_BYTES, ": export less, or raise outrider.cluster.http.admin.api.MAX_IMPORT_BYTES"
        )
        with answered(400, "invalid_snapshot", "the body cannot be imported: "):
            texts = await port.import_(tenant, data)
        logger.info("imported %d texts into tenant %s", texts, tenant)
        return {"tenant": tenant, "texts": texts}

    async def preload(self, request: Request) -> dict[str, Any]:
        """Add documents to the public corpus."""
        port = self._allowed(request)
        documents = await self._documents(request)
        with answered(400, "invalid_value"):
            texts = await port.preload(documents)
        tokens = sum(map(len, documents))
        logger.info("preloaded %d documents with %d tokens", len(documents), tokens)
        return {"documents": len(documents), "tokens": tokens, "texts": texts}  # texts: number of new texts

    async def delete_tenant(self, request: Request, tenant: str) -> dict[str, Any]:
        """Delete a tenant's texts and audit records."""
        # Checks the admin key, and works without a shared cache, which `_allowed` requires.
        await self._forget(request, tenant)
        port = self._allowed(request)
        with answered():
            await port.delete_tenant(tenant)
        logger.info("deleted all texts of tenant %s", tenant)
        return {"tenant": tenant, "deleted": True}

    async def delete_request(self, request: Request, tenant: str, request_id: str) -> dict[str, Any]:
        """Delete the texts and the audit record of one response."""
        await self._forget(request, tenant, request_id)
        port = self._allowed(request)
        with answered():
            await port.delete_request(tenant, request_id)
        logger.info("deleted the texts of one answer to tenant %s", tenant)
        return {"tenant": tenant, "request": request_id, "deleted": True}

    async def delete_documents(self, request: Request, tenant: str) -> dict[str, Any]:
        """Delete reference documents of a tenant, whichever requests sent them."""
        port = self._allowed(request)
        documents = await self._documents(request)
        with answered():
            await port.delete_documents(tenant, documents)
        logger.info("deleted %d documents of tenant %s", len(documents), tenant)
        return {"tenant": tenant, "documents": len(documents), "deleted": True}

    async def verify(self, request: Request) -> dict[str, Any]:
        """Check the stored data and return a list of problems, empty if there are none."""
        port = self._allowed(request)
        with answered():
            return {"problems": [dataclasses.asdict(problem) for problem in await port.verify()]}

    async def _forget(self, request: Request, tenant: str, request_id: str | None = None) -> None:
        """Delete audit records, which may exist without a shared cache."""
        self.tenancy.check_admin(request.headers.get("authorization"))
        await self.forget(tenant, request_id)

    def _allowed(self, request: Request) -> CacheAdminPort:
        """Check the admin key and return the shared cache. Raises ``ApiError`` (401, 403, 404)."""
        self.tenancy.check_admin(request.headers.get("authorization"))
        if self.port is None:
            raise ApiError(
                404,
                "this server has no shared cache: cache.enabled is false in its configuration, or there is no Redis",
                code="cache_disabled",
            )
        return self.port

    async def _documents(self, request: Request) -> list[list[int]]:
        """Return the tokens of the documents in a body. Raises ``ApiError`` if it holds none."""
        data = await read_body(request, MAX_PRELOAD_BYTES, ": send the documents in several requests")
        body = await self._turns.run(parsed, _Documents, data, '{"documents": ["a text", ...]}')
        return await self._turns.run(self._encode, body.documents)  # in a thread, not in the event loop

    def _encode(self, documents: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encoder.encode_batch(documents, add_special_tokens=False)]

    @functools.cached_property
    def _encoder(self) -> Tokenizer:
        # A copy, because changing the service's tokenizer is not safe while other threads use it.
        encoder = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        encoder.no_truncation()
        encoder.no_padding()
        return encoder


def add_admin_routes(app: FastAPI, service: AdminService) -> None:
    """Add the routes to an application."""
    # The handlers take the raw request, so that the key is checked before the body is read.
    app.get("/admin/cache/stats")(service.stats)
    app.get("/admin/cache/export", response_model=None)(service.export)
    app.post("/admin/cache/import")(service.import_)
    app.post("/admin/cache/preload")(service.preload)
    app.delete("/admin/cache/tenants/{tenant}")(service.delete_tenant)
    app.delete("/admin/cache/tenants/{tenant}/requests/{request_id}")(service.delete_request)
    app.post("/admin/cache/tenants/{tenant}/documents/delete")(service.delete_documents)
    app.get("/admin/cache/verify")(service.verify)


def _tenant(request: Request) -> str:
    tenant = request.query_params.get("tenant")
    if not tenant:
        raise ApiError(400, "tenant is required: add ?tenant=NAME", param="tenant", code="missing_required_parameter")
    return tenant


_MAX_BODY_BYTES = 4096


class _Wanted(Body):
    last: Annotated[int, Field(ge=1)] | None = None  # number of latest choices to replay; default: all that are kept


@dataclass(frozen=True, slots=True)
class AuditService:
    """Service behind ``/admin/audit``: needs the admin key, reveals only the two tokens at a tenant's first difference."""

    tenancy: Tenancy
    token_bytes: TokenBytes
    auditor: Auditor | None  # None if audits are disabled

    async def counters(self, request: Request) -> dict[str, Any]:
        """Return the results of all audits since the start, and the latest audits that found a difference."""
        auditor = self._allowed(request)
        differences = [self._as_json(found) for found in auditor.differences()]
        return {"kept": auditor.num_kept, "audits": auditor.counts(), "last_differences": differences}

    async def run(self, request: Request) -> Response:
        """Replay the latest choices until the client leaves; stream one JSON object per line, then a summary."""
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
            yield json.dumps(self._as_json(found)) + "\n"
        yield json.dumps({"summary": {result.value: results[result] for result in Result if result is not Result.DROPPED}}) + "\n"

    def _as_json(self, found: Audit) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request": found.request_id, "strategy": found.strategy, "result": found.result.value, "tokens": found.tokens,
        }  # fmt: skip
        if found.detail is not None:
            fields["detail"] = found.detail
        if found.difference is not None:
            fields["difference"] = found.difference.as_dict(self._token)
        return fields

    def _token(self, token: int) -> dict[str, Any]:
        return {"id": token, "text": self.token_bytes(token).decode("utf-8", "backslashreplace")}

    def _allowed(self, request: Request) -> Auditor:
        self.tenancy.check_admin(request.headers.get("authorization"))
        if self.auditor is None:
            raise ApiError(404, "this server keeps no choices to audit", code="audit_disabled")
        return self.auditor


@dataclass(frozen=True, slots=True)
class BaselineService:
    """Service behind ``/admin/baseline``. It reveals no text of any request."""

    tenancy: Tenancy
    shadow: Shadow | None  # None if the baseline does not answer served requests

    async def summary(self, request: Request) -> dict[str, Any]:
        """Return counts since the start, metrics of the latest requests, and a one-sentence summary."""
        self.tenancy.check_admin(request.headers.get("authorization"))
        if self.shadow is None:
            message = (
                "no baseline compares served requests: set baseline.enabled=true and baseline.shadow to a share of the requests"
            )
            raise ApiError(404, message, code="shadow_disabled")
        return dataclasses.asdict(await asyncio.to_thread(self.shadow.summary))


async def read_body(request: Request, limit: int, advice: str = "") -> bytes:
    """Return the body. Raises ``ApiError`` (413) as soon as it is known to exceed ``limit`` bytes."""
    too_long = ApiError(413, f"the body is longer than {limit} bytes{advice}", code="body_too_long")
    # A client may declare less than it sends, or nothing: the received bytes are counted as well.
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_long
    return bytes(data)


def parsed(kind: type[M], data: bytes, advice: str) -> M:
    """Parse a body of type ``kind``. Raises ``ApiError`` (400) with ``advice`` on what to send."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        finding = error.errors(include_input=False)[0]
        field = "".join(f"[{step}]" if isinstance(step, int) else str(step) for step in finding["loc"])
        message = f"{field or 'the body'}: {finding['msg']}; send {advice}"
        raise ApiError(400, message, param=field or None, code="invalid_value") from None


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
