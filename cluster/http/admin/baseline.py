"""The operator's route ``/admin/baseline``: how the engine stands beside the baseline, by what both answered."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from cluster.admission.tenancy import Tenancy
from cluster.http.errors import ApiError
from cluster.observe.shadow import Shadow


@dataclass(frozen=True, slots=True)
class BaselineService:
    """What the route does. Nothing of a request's text is told."""

    tenancy: Tenancy  # knows the operator's keys
    shadow: Shadow | None  # None where the baseline answers nothing of what is served

    async def standing(self, request: Request) -> dict[str, Any]:
        """Requests and texts since the start, figures of the latest, and one sentence that says who is ahead by how much."""
        self.tenancy.check_admin(request.headers.get("authorization"))
        if self.shadow is None:
            message = (
                "no baseline answers what is served: set baseline.enabled=true and baseline.shadow to a share of the requests"
            )
            raise ApiError(404, message, code="shadow_disabled")
        return dataclasses.asdict(await asyncio.to_thread(self.shadow.standing))
