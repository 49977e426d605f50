"""What a group tells of the time that it spends on messages, for dashboards."""

from __future__ import annotations

import pytest

from decoding.drafters import build_drafter
from decoding.request import Request, SamplingParams
from tests.models import prepared, tiny_model
from tests.ranks import TinyGroup


def test_exchange_is_that_of_all_steps() -> None:
    drafter = prepared(build_drafter("recycling", {}), tiny_model("llama", "float32"))
    with TinyGroup("llama", drafter, world=2) as group:
        assert group.state.exchange_s == 0.0
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first = group.run([Request("a", [5, 6, 7, 5, 6], params)])
        between = group.state.exchange_s
        assert first == group.run([Request("b", [5, 6, 7, 5, 6], params)])
        assert 0.0 < between < group.state.exchange_s == pytest.approx(sum(step.exchange_s for step in group.times))
        assert group.engine.metrics().forward_s > group.state.exchange_s
