"""What the tests of exactness share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.engine.target import LocalTarget
from tests.helpers.models import LIKE_A_GPU


@pytest.fixture(scope="module", autouse=True)
def curve() -> Iterator[None]:
    """Drafts pay off on every machine: the latency curve is given, so that a busy one does not draft less and show less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTarget, "latency", lambda target: LIKE_A_GPU)
        yield
