"""The operator's routes, ``/admin/cache``: what the cluster remembers is looked at, moved and deleted here."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from actors.replica import Description
from cache_service.keeper.admin import TenantStats
from cluster.admission.tenancy import Tenancy
from cluster.http.errors import ApiError
from cluster.http.types.strict import Text
from cluster.observe.audit import Auditor
from cluster.serving.cache_port import CacheAdminPort, answered
from engine.measures.strategy_counts import sum_counts

logger = logging.getLogger(__name__)

MAX_PRELOAD_BYTES = 8 << 20  # of a body: tokenized while requests are served, so in small parts
MAX_IMPORT_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20


class _Preload(BaseModel):
    """The body of ``POST /admin/cache/preload``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    documents: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]


class AdminService:
    """What the admin routes do. Each first checks the key."""

    def __init__(
        self,
        tenancy: Tenancy,
        tokenizer: PreTrainedTokenizerFast,
        port: CacheAdminPort | None,
        replicas: Callable[[], Awaitable[Sequence[Description]]],
        auditor: Auditor | None = None,
    ) -> None:
        """
        Args:
            tenancy: knows the operator's keys.
            tokenizer: of the model.
            port: the shared memory; None where there is none.
            replicas: what the engine replicas that answer say of themselves.
            auditor: keeps answers, too; None where nothing is audited.
        """
        self._tenancy, self._tokenizer, self._port, self._replicas = tenancy, tokenizer, port, replicas
        self._auditor = auditor

    async def stats(self, request: Request) -> dict[str, Any]:
        """How much is kept of each tenant, how each replica gets on with Redis, which is told while Redis is away, too.

        Beside it how much of the prompts did not have to be computed, what became of the requests of each strategy, and what
        energy each replica used.
        """
        port = self._allowed(request)
        replicas = await self._replicas()
        mirrors = [replica.cache for replica in replicas]
        tenants: Sequence[TenantStats] = ()
        error = None
        try:
            with answered():
                tenants = await port.stats()
        except ApiError as refusal:
            error = str(refusal)
        return {
            "tenants": [dataclasses.asdict(entry) for entry in tenants],
            "replicas": [dataclasses.asdict(counts) for counts in mirrors if counts is not None],
            "prefix_queries": sum(replica.counts.prefix_queries for replica in replicas),
            "prefix_hits": sum(replica.counts.prefix_hits for replica in replicas),
            "strategies": [dataclasses.asdict(counts) for counts in sum_counts(replica.strategies for replica in replicas)],
            "energy": [None if replica.energy is None else dataclasses.asdict(replica.energy) for replica in replicas],
            "error": error,
        }

    async def export(self, request: Request) -> Response:
        """A snapshot of one tenant, as a file."""
        port, tenant = self._allowed(request), _tenant(request)
        with answered(500, "corrupt_snapshot"):
            data = await port.export(tenant)
        logger.info("exported %d bytes of tenant %s", len(data), tenant)
        name = "public" if tenant == "*" else tenant
        headers = {"Content-Disposition": f'attachment; filename="{name}.snapshot"', "Content-Length": str(len(data))}
        return StreamingResponse(_pieces(data), media_type="application/octet-stream", headers=headers)

    async def import_(self, request: Request) -> dict[str, Any]:
        """Adds an exported snapshot to a tenant."""
        port, tenant = self._allowed(request), _tenant(request)
        data = await _body(request, MAX_IMPORT_BYTES, "export less, or raise cluster.http.admin.api.MAX_IMPORT_BYTES")
        with answered(400, "invalid_snapshot", "the body cannot be imported: "):
            texts = await port.import_(tenant, data)
        logger.info("imported %d texts into tenant %s", texts, tenant)
        return {"tenant": tenant, "texts": texts}

    async def preload(self, request: Request) -> dict[str, Any]:
        """Adds documents to the public corpus."""
        port = self._allowed(request)
        body = _documents(await _body(request, MAX_PRELOAD_BYTES, "send the documents in several requests"))
        documents = await asyncio.to_thread(self._encode, body.documents)  # the event loop goes on serving
        with answered(400, "invalid_value"):
            texts = await port.preload(documents)
        tokens = sum(map(len, documents))
        logger.info("preloaded %d documents with %d tokens", len(documents), tokens)
        return {"documents": len(documents), "tokens": tokens, "texts": texts}  # documents and tokens of the body, new texts

    async def delete_tenant(self, request: Request, tenant: str) -> dict[str, Any]:
        """Forgets a tenant's texts, and what is kept of them for audits."""
        self._forget(request, tenant)
        port = self._allowed(request)
        with answered():
            await port.delete_tenant(tenant)
        logger.info("deleted all texts of tenant %s", tenant)
        return {"tenant": tenant, "deleted": True}

    async def delete_request(self, request: Request, tenant: str, request_id: str) -> dict[str, Any]:
        """Forgets the texts of one answer, and what is kept of it for audits."""
        self._forget(request, tenant, request_id)
        port = self._allowed(request)
        with answered():
            await port.delete_request(tenant, request_id)
        logger.info("deleted the texts of one answer to tenant %s", tenant)
        return {"tenant": tenant, "request": request_id, "deleted": True}

    async def verify(self, request: Request) -> dict[str, Any]:
        """What is wrong with the stored data; an empty list when nothing is."""
        port = self._allowed(request)
        with answered():
            return {"problems": [dataclasses.asdict(problem) for problem in await port.verify()]}

    def _forget(self, request: Request, tenant: str, request_id: str | None = None) -> None:
        """Lets go of what is kept for audits, also where nothing is shared."""
        self._tenancy.check_admin(request.headers.get("authorization"))
        if self._auditor is not None:
            self._auditor.forget(tenant, request_id)

    def _allowed(self, request: Request) -> CacheAdminPort:
        """The shared memory, for the operator only."""
        self._tenancy.check_admin(request.headers.get("authorization"))
        if self._port is None:
            raise ApiError(
                404,
                "this server shares nothing: cache.enabled is false in its configuration, or there is no Redis",
                code="cache_disabled",
            )
        return self._port

    def _encode(self, documents: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encoder.encode_batch(documents, add_special_tokens=False)]

    @functools.cached_property
    def _encoder(self) -> Tokenizer:
        """A tokenizer of its own: the service's may be changed while another thread uses it."""
        encoder = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        encoder.no_truncation()
        encoder.no_padding()
        return encoder


def add_admin_routes(app: FastAPI, service: AdminService) -> None:
    """Gives an application the routes. They take the request itself: the key is looked at before the body is read."""

    @app.get("/admin/cache/stats")
    async def stats(request: Request) -> dict[str, Any]:
        return await service.stats(request)

    @app.get("/admin/cache/export", response_model=None)
    async def export(request: Request) -> Response:
        return await service.export(request)

    @app.post("/admin/cache/import")
    async def import_(request: Request) -> dict[str, Any]:
        return await service.import_(request)

    @app.post("/admin/cache/preload")
    async def preload(request: Request) -> dict[str, Any]:
        return await service.preload(request)

    @app.delete("/admin/cache/tenants/{tenant}")
    async def delete_tenant(request: Request, tenant: str) -> dict[str, Any]:
        return await service.delete_tenant(request, tenant)

    @app.delete("/admin/cache/tenants/{tenant}/requests/{request_id}")
    async def delete_request(request: Request, tenant: str, request_id: str) -> dict[str, Any]:
        return await service.delete_request(request, tenant, request_id)

    @app.get("/admin/cache/verify")
    async def verify(request: Request) -> dict[str, Any]:
        return await service.verify(request)


def _tenant(request: Request) -> str:
    tenant = request.query_params.get("tenant")
    if not tenant:
        raise ApiError(400, "tenant is required: add ?tenant=NAME", param="tenant", code="missing_required_parameter")
    return tenant


async def _body(request: Request, limit: int, advice: str) -> bytes:
    """The body; 413 as soon as it is known to be longer than ``limit`` bytes."""
    too_long = ApiError(413, f"the body is longer than {limit} bytes: {advice}", code="body_too_long")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_long
    return bytes(data)


def _documents(data: bytes) -> _Preload:
    try:
        return _Preload.model_validate_json(data)
    except ValidationError as error:
        finding = error.errors(include_input=False)[0]
        field = "".join(f"[{step}]" if isinstance(step, int) else str(step) for step in finding["loc"])
        message = f"{field or 'the body'}: {finding['msg']}; send " + '{"documents": ["a text", ...]}'
        raise ApiError(400, message, param=field or None, code="invalid_value") from None


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
