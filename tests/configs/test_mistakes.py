"""What is said about mistakes in a configuration: the key, what was given, what is allowed, in one line."""

from __future__ import annotations

import pytest

from configs.schema import ConfigError, load_config

HASH = f"sha256:{'0a' * 32}"
KEYED = f"tenancy.tenants.acme.keys=[{HASH}]"
TENSOR = ["parallelism.mode=tensor", "parallelism.world_size=2"]
GROUP = ["parallelism.mode=lookahead", "parallelism.world_size=2"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # Unknown keys
        (["server.prot=1"], "; did you mean server.port?"),
        (["model.pth=x"], "; did you mean model.path?"),
        (["port=1"], "; did you mean server.port?"),
        (["redis_ulr=x"], "; did you mean redis_url?"),
        (["engine.max_runing=2"], "; did you mean engine.max_running?"),
        (["sever.port=1"], "; did you mean server.port?"),
        (["max_draft_token=1"], "; did you mean speculation.max_draft_tokens?"),
        (["zzzz=1"], "unknown key zzzz; known keys: model.path, "),
        # Values
        (["model.dtype=int3"], ["model.dtype is 'int3'", "'float32'", "'bfloat16'"]),
        (["server.port=http"], ["server.port is 'http'", "a valid integer"]),
        (["server.port=70000"], ["server.port is 70000", "1 to 65535"]),
        (["server.replicas=0"], ["server.replicas is 0", "server.max_replicas"]),
        (["engine.max_running=[1]"], ["engine.max_running is a list", "a valid integer"]),
        (["server.port.x=1"], ["server.port is a mapping", "a valid integer"]),
        (["model=x"], ["model is a section", "model.path=x"]),
        (["model.path"], ["'model.path' is not of the form key=value"]),
        (["=3"], ["'=3' is not of the form key=value"]),
        (["model.path={"], ["model.path", "not a yaml value"]),
        (["parallelism.mode=lade"], ["parallelism.mode is 'lade'", "'none'", "'lookahead'"]),
        (["parallelism.world_size=0"], ["parallelism.world_size is 0; allowed: 1 to 64, or auto"]),
        (["parallelism.world_size=65"], ["parallelism.world_size is 65; allowed: 1 to 64, or auto"]),
        (["parallelism.world_size=two"], ["parallelism.world_size is 'two'; allowed: 1 to 64, or auto"]),
        (["parallelism.world_size=1.5"], ["parallelism.world_size is 1.5; allowed: 1 to 64, or auto"]),
        (["parallelism.rank_timeout_s=0.1"], ["parallelism.rank_timeout_s is 0.1", "0.2 to 100"]),
        (["parallelism.rank_timeout_s=61"], ["parallelism.step_timeout_s is 60.0", "at least parallelism.rank_timeout_s", "61"]),
        (["parallelism.check_steps=0"], ["parallelism.check_steps is 0", "1 to"]),
        (["speculation.strategies=llma"], ["speculation.strategies is 'llma'", "allowed: a list"]),
        (["speculation.strategies=[llma, 3]"], ["speculation.strategies.1 is 3", "allowed: a valid string"]),
        (["parallelism.placement=pack"], ["parallelism.placement is 'pack'", "'STRICT_PACK'"]),
        # The shared memory, tenants and keys
        (["tenancy.tenants.acme.keyz=[]"], "unknown key tenancy.tenants.acme.keyz; did you mean tenancy.tenants.acme.keys?"),
        (["tenancy.tenants.acme.cache_mb=1"], "did you mean tenancy.tenants.acme.cache_mib?"),
        (["tenancy.anonimous=x"], "did you mean tenancy.anonymous?"),
        (["cache.ttl=1"], "did you mean cache.ttl_s?"),
        (["tenancy.tenants.acme.cache_mib=0"], "tenancy.tenants.acme.cache_mib is 0.0; allowed: 0.001 to"),
        (["tenancy.tenants.a/b.cache_mib=1"], "tenancy.tenants: 'a/b' cannot name a tenant"),
        (["tenancy.tenants.*.cache_mib=1"], "tenancy.tenants: '*' cannot name a tenant"),
        ([f"tenancy.tenants.{'n' * 65}.cache_mib=1"], "cannot name a tenant"),
        (["tenancy.anonymous='*'"], "tenancy.anonymous: '*' cannot name a tenant"),
        (["tenancy.anonymous=.."], "tenancy.anonymous: '..' cannot name a tenant"),
        (["tenancy.anonymous=''"], "tenancy.anonymous: '' cannot name a tenant"),
        (["cache.ttl_s=0"], "cache.ttl_s is 0.0; allowed: 1 to"),
        (["cache.half_life_s=.nan"], "cache.half_life_s is nan"),
        (["cache.outbox_mib=.inf"], "cache.outbox_mib is inf"),
        (["cache.flush_s=-1"], "cache.flush_s is -1.0"),
        (["cache.services=0"], "cache.services is 0; allowed: 1 to"),
        (["cache.prefix='{x}'"], "cache.prefix is '{x}'; allowed: 1 to 64 characters"),
        (["cache.prefix=''"], "cache.prefix is ''"),
        (["server.host=0.0.0.0"], "other machines reach server.host '0.0.0.0', and no tenant has an API key"),
        (["server.host=0.0.0.0", "tenancy.tenants.acme.cache_mib=1"], "server.require_key=false"),
        (["server.require_key=true"], "server.require_key is true, and no tenant has an API key"),
        (["server.require_key=true", KEYED, "tenancy.anonymous=local"], "tenancy.anonymous=null"),
        (["server.require_ky=true"], "did you mean server.require_key?"),
        (["server.max_queued=0"], "server.max_queued is 0; allowed: 1 to"),
        (["limits.requests_per_minute=0"], "limits.requests_per_minute is 0; allowed: 1 to"),
        (["limits.request_timeout_s=0"], "limits.request_timeout_s is 0.0; allowed: 0.01 to"),
        (["limits.max_request_bytes=1"], "limits.max_request_bytes is 1; allowed: 1024 to"),
        (["limits.token_per_minute=5"], "did you mean limits.tokens_per_minute?"),
        (["tenancy.tenants.acme.max_concurrent=0"], "tenancy.tenants.acme.max_concurrent is 0; allowed: 1 to"),
        (["tenancy.tenants.acme.max_concurent=1"], "did you mean tenancy.tenants.acme.max_concurrent?"),
        # What is received
        (["server.allowed_hosts=['http://x']"], "without scheme"),
        (["server.allowed_hosts=['x:80']"], "without scheme and port"),
        (["limits.max_upload_bytes=5000"], "limits.max_request_bytes, which is 8388608"),
        (["limits.max_key_upload_bytes=5000"], "limits.max_request_bytes, which is 8388608"),
        (["limits.body_timeout_s=0"], "0.01"),
        # Ranks
        (["parallelism.mode=tensor"], "parallelism.mode is tensor and parallelism.world_size is auto; allowed: 2 to 64"),
        (["parallelism.mode=pipeline", "parallelism.world_size=1"], "mode is pipeline and parallelism.world_size is 1; allowed"),
        ([*TENSOR, "parallelism.placement=SPREAD"], "parallelism.placement is SPREAD; allowed: STRICT_PACK"),
        ([*TENSOR, "parallelism.pin_threads=true"], "parallelism.pin_threads is true"),
        ([*TENSOR, "speculation.draft_model=demo_draft_model"], "speculation.draft_model is not supported"),
        (
            [*GROUP, "parallelism.pin_threads=true", "server.replicas=2"],
            "parallelism.pin_threads is true and server.replicas is 2",
        ),
        (
            ["parallelism.mode=lookahead", "parallelism.placement=SPREAD"],
            "parallelism.placement is SPREAD and parallelism.world_size is auto",
        ),
        # More engines under load
        (
            ["server.replicas=3", "server.max_replicas=2"],
            "server.max_replicas is 2; allowed: at least server.replicas, which is 3",
        ),
        (["server.max_replicas=0"], "server.max_replicas is 0; allowed: 1 to"),
        (
            ["server.target_tokens_per_s=100"],
            "server.target_tokens_per_s is 100, but autoscaling is off: set",
        ),
        (["server.max_replicas=2", "server.target_tokens_per_s=0"], "server.target_tokens_per_s is 0.0; allowed: 0.001 to"),
        (
            ["parallelism.mode=lookahead", "server.max_replicas=2"],
            "parallelism.world_size is auto and server.max_replicas is 2",
        ),
        # Every mistake is named at once
        (["server.port=a", "server.replicas=b"], ["server.port is 'a'", "; server.replicas is 'b'"]),
    ],
)
def test_mistakes(overrides: list[str], said: str | list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in [said] if isinstance(said, str) else said:
        assert part in message
