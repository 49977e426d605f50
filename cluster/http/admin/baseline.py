"""Operator route ``/admin/baseline``: comparison of the engine with the baseline on requests that both answered."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe.shadow import Shadow


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
