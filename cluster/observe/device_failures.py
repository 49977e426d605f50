"""Counter of device failures. A replica whose device fails reports that and ends, so the API keeps the counts."""

from __future__ import annotations

import logging
from collections import OrderedDict

from outrider.actors.description import DeviceLostError
from outrider.engine.errors import DEVICE_FAULTS

logger = logging.getLogger(__name__)

_MOST_ENGINES = 1000  # engines remembered, so that a failure reported by several requests of an engine counts once


class DeviceFailures:
    """Number of device failures that replicas reported before they ended. For one event loop."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(DEVICE_FAULTS, 0)  # all kinds from the start, because a Prometheus rate needs an initial 0
        self._engines: OrderedDict[str, None] = OrderedDict()

    def add(self, lost: DeviceLostError) -> None:
        """Count and log a failure, unless another request reported it before."""
        # Every request of a lost engine reports the same failure.
        if lost.engine in self._engines:
            return
        self._engines[lost.engine] = None
        if len(self._engines) > _MOST_ENGINES:
            self._engines.popitem(last=False)
        self._counts[lost.kind] += 1
        logger.error("device_failed: %s in engine %s: %s", lost.kind, lost.engine, lost.reason)

    def counts(self) -> dict[str, int]:
        """Return the failures since the start for each of ``DEVICE_FAULTS``."""
        return dict(self._counts)
