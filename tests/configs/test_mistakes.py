"""Mistakes in a configuration are refused in one line that names the key, and the nearest known one for an unknown key."""

from __future__ import annotations

import pytest

from outrider.configs.schema import ConfigError, load_config

KEYED = f"tenancy.tenants.acme.keys=[sha256:{'0a' * 32}]"
TENSOR = ["parallelism.mode=tensor", "parallelism.world_size=2"]
LOOKAHEAD = "parallelism.mode=lookahead"
PIPELINE_BASELINE = ["baseline.enabled=true", "baseline.kind=pipeline"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("server.prot=1", "server.port"),
        ("model.pth=x", "model.path"),
        ("port=1", "server.port"),
        ("redis_ulr=x", "redis_url"),
        ("sever.port=1", "server.port"),
        ("max_draft_token=1", "speculation.max_draft_tokens"),
        ("tenancy.tenants.acme.keyz=[]", "tenancy.tenants.acme.keys"),
        ("tenancy.tenants.acme.cache_mb=1", "tenancy.tenants.acme.cache_mib"),
        ("tenancy.anonimous=x", "tenancy.anonymous"),
        ("cache.ttl=1", "cache.ttl_s"),
        ("cache.retry_s=1", "cache.ttl_s"),  # a constant
        ("zzzz=1", "model.path"),  # the first of all
    ],
)
def test_an_unknown_key(override: str, nearest: str) -> None:
    message = refusal(override)
    assert message.startswith("unknown key ") and nearest in message


@pytest.mark.parametrize(
    "override",
    [
        "model.dtype=int3", "model=x", "model.path={", "server.port=http", "server.port=70000", "server.replicas=0",
        "server.max_replicas=0", "server.max_queued=0", "server.require_key=true", "server.allowed_hosts=['http://x']",
        "server.allowed_hosts=['x:80']", "server.host=0.0.0.0", "engine.max_running=[1]", "speculation.strategies=llma",
        "speculation.strategies=[llma, 3]", "parallelism.mode=lade", "parallelism.mode=tensor", "parallelism.world_size=0",
        "parallelism.world_size=65", "parallelism.world_size=two", "parallelism.world_size=1.5",
        "parallelism.rank_timeout_s=0.1", "parallelism.rank_timeout_s=61",
        "parallelism.placement=pack", "tenancy.tenants.acme.cache_mib=0", "tenancy.tenants.acme.max_concurrent=0",
        "tenancy.anonymous='*'", "tenancy.anonymous=..", "tenancy.anonymous=''", "cache.ttl_s=.nan",
        "cache.tenant_mib=.inf", "cache.timeout_s=-1", "cache.services=0", "cache.prefix='{x}'", "cache.prefix=''",
        "limits.requests_per_minute=0", "limits.request_timeout_s=0", "limits.max_request_bytes=1",
        "server.target_tokens_per_s=100", "model.adapters.sql=3", "emulation.device=X100", "emulation.time_dilation=17",
        "emulation.time_dilation=0.5", "emulation.bits=5", "emulation.link=token-ring", "emulation.form=lazy",
        "emulation.drafter_ms=-1",
        "server.sampling_defaults.temperature=3",
        "server.sampling_defaults.temprature=1", "server.sampling_defaults.top_k=1.5", "model.revision=main",
        "model.served_name=[3]",
    ],
)  # fmt: skip
def test_a_refused_value_is_named_with_its_key(override: str) -> None:
    message = refusal(override)
    assert override.partition("=")[0] in message and "unknown key" not in message


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.path"], ["'model.path'", "key=value"]),
        (["emulation.device=A100-80"], ["emulation.device is A100-80", "set emulation.model (--as)"]),
        (["emulation.model=llama-3.1-8b"], ["emulation.model is llama-3.1-8b", "set emulation.device (--emulate)"]),
        (["emulation.time_dilation=4"], ["emulation.time_dilation is 4", "set emulation.device (--emulate)"]),
        (["emulation.device=L4", "emulation.model=llama-3.1-8b"], ["model.device is auto", "set model.device=cpu"]),
        (
            [
                "emulation.device=L4",
                "emulation.model=llama-3.1-8b",
                "model.device=cpu",
                "speculation.draft_model=demo_draft_model",
            ],
            ["emulation.device is L4", "speculation.draft_model"],
        ),
        (["=3"], ["'=3'", "key=value"]),
        (["server.port.x=1"], ["server.port is a mapping"]),
        (["server.port=a", "server.replicas=b"], ["server.port is 'a'", "server.replicas is 'b'"]),  # all at once
        (["tenancy.tenants.a/b.cache_mib=1"], ["tenancy.tenants", "'a/b'"]),
        (["tenancy.tenants.*.cache_mib=1"], ["tenancy.tenants", "'*'"]),
        ([f"tenancy.tenants.{'n' * 65}.cache_mib=1"], ["tenancy.tenants"]),
        (["server.host=0.0.0.0", "tenancy.tenants.acme.cache_mib=1"], ["server.require_key"]),
        (["server.require_key=true", KEYED, "tenancy.anonymous=local"], ["tenancy.anonymous"]),
        (["parallelism.mode=pipeline", "parallelism.world_size=1"], ["parallelism.mode", "parallelism.world_size"]),
        ([*TENSOR, "parallelism.placement=SPREAD"], ["parallelism.placement is SPREAD"]),
        ([*TENSOR, "parallelism.pin_threads=true"], ["parallelism.pin_threads is true"]),
        ([*TENSOR, "speculation.draft_model=demo_draft_model"], ["speculation.draft_model"]),
        ([*TENSOR, "model.adapters.sql=x"], ["parallelism.mode is tensor"]),
        ([*PIPELINE_BASELINE, "model.adapters.sql=x"], ["baseline.kind is pipeline"]),
        (["model.adapters={a/b: x}"], ["model.adapters", "'a/b'"]),
        (["model.adapters.demo_model=x"], ["'demo_model' is the model's own name"]),
        (
            [LOOKAHEAD, "parallelism.world_size=2", "parallelism.pin_threads=true", "server.replicas=2"],
            ["parallelism.pin_threads is true", "server.replicas is 2"],
        ),
        ([LOOKAHEAD, "parallelism.placement=SPREAD"], ["parallelism.placement is SPREAD", "parallelism.world_size is auto"]),
        ([LOOKAHEAD, "server.max_replicas=2"], ["parallelism.world_size is auto", "server.max_replicas is 2"]),
        (["server.replicas=3", "server.max_replicas=2"], ["server.max_replicas is 2", "server.replicas"]),
        (["server.max_replicas=2", "server.target_tokens_per_s=0"], ["server.target_tokens_per_s is 0.0"]),
    ],
)
def test_settings_that_do_not_go_together(overrides: list[str], named: list[str]) -> None:
    message = refusal(*overrides)
    assert all(part in message for part in named), message
