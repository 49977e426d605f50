"""How many engines a load asks for."""

from __future__ import annotations

import math

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from outrider.cluster.app import application
from outrider.cluster.serving.autoscaling import REQUESTS, TOKENS, LoadPolicy, Pace
from outrider.configs.schema import Config


def context(said: dict[str, list[float]] | None) -> AutoscalingContext:
    """Of an application whose replicas have said this."""
    deployment = DeploymentID("engine", "outrider")
    by_replica = {
        name: {ReplicaID(str(at), deployment): value for at, value in enumerate(values)} for name, values in (said or {}).items()
    }
    told = None if said is None else by_replica
    return AutoscalingContext(
        deployment, "engine", "outrider", 1, 1, [], 0.0, 0.0, told, None, 1, 8, {}, None, None, 0.0, None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "tokens_per_s", "engines"),
    [
        (None, None, 1),  # that loads
        ({REQUESTS: [0.0]}, None, 0),  # Serve has at least server.replicas
        ({REQUESTS: [8.0]}, None, 1),
        ({REQUESTS: [8.5]}, None, 2),
        ({REQUESTS: [15.0, 3.0]}, None, 3),
        ({REQUESTS: [2.0, 2.0], TOKENS: [900.0, 900.0]}, None, 1),
        ({REQUESTS: [2.0, 2.0], TOKENS: [900.0, 900.0]}, 600.0, 3),
        ({REQUESTS: [40.0], TOKENS: [100.0]}, 600.0, 5),
    ],
)
def test_so_many_engines_are_needed(said: dict[str, list[float]] | None, tokens_per_s: float | None, engines: int) -> None:
    assert LoadPolicy(8, tokens_per_s)(context(said)) == (engines, {})


def test_tokens_per_second_are_those_since_the_last_time() -> None:
    pace = Pace()
    assert pace.since(1000) == 0.0
    second = pace.since(1500)
    assert second > 0.0 and math.isfinite(second) and pace.since(1500) == 0.0


def test_serve_is_told_the_least_and_the_most() -> None:
    server = {"replicas": 2, "max_replicas": 5, "target_tokens_per_s": 700.0}
    config = Config.model_validate({"model": {"path": "demo_model"}, "engine": {"max_running": 6}, "server": server})
    engine = application(config)._bound_deployment.init_args[0]._bound_deployment
    told = engine._deployment_config.autoscaling_config
    assert (told.min_replicas, told.max_replicas) == (2, 5)
    assert told.policy.policy_kwargs == {"requests": 6, "tokens_per_s": 700.0}
    none = application(config.model_copy(update={"server": type(config.server)(replicas=0, max_replicas=2)}))
    told = none._bound_deployment.init_args[0]._bound_deployment._deployment_config.autoscaling_config
    assert (told.min_replicas, told.initial_replicas, told.max_replicas) == (0, 1, 2)
    fixed = application(config.model_copy(update={"server": type(config.server)(replicas=2)}))
    engine = fixed._bound_deployment.init_args[0]._bound_deployment
    assert engine._deployment_config.autoscaling_config is None and engine.num_replicas == 2
