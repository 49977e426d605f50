"""Files, overrides, and what is said about mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import REPOSITORY, Config, ConfigError, find_model, keys, load_config, tenant_names
from configs.server_checks import admin_names, allowed_names
from configs.slices import CacheOptions, ModelOptions, ParallelismOptions, ServerOptions, TenancyOptions, TenantOptions
from configs.tenancy_checks import is_loopback

HASH = "sha256:" + "0a" * 32
OTHER_HASH = "sha256:" + "0b" * 32


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_slices() -> None:
    config = load_config()
    assert config.server == ServerOptions()
    assert config.model.dtype == ModelOptions().dtype
    assert config.redis_url is None


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  dtype: float32\nserver:\n  port: 9000\n  replicas: 2\nengine:\n")
    overrides = ["server.port=9001", "redis_url=redis://h:1/0", "speculation.options.match_length=3", "model.threads=null"]
    config = load_config(path, overrides)
    assert (config.server.port, config.server.replicas) == (9001, 2)
    assert config.model.dtype == "float32"
    assert config.model.threads is None
    assert config.redis_url == "redis://h:1/0"
    assert config.speculation.options == {"match_length": 3}


def test_later_override_wins() -> None:
    assert load_config(None, ["server.port=9001", "server.port=9002"]).server.port == 9002


def test_unknown_key_in_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key model\.dtyp; did you mean model\.dtype\?"):
        load_config(write(tmp_path, "model:\n  dtyp: float32\n"))


def test_further_strategies(tmp_path: Path) -> None:
    assert load_config().speculation.strategies == ()
    config = load_config(write(tmp_path, "speculation: {strategies: [llma, 'trie:capacity=100,branch_length=3']}\n"))
    assert config.speculation.strategies == ("llma", "trie:capacity=100,branch_length=3")
    assert load_config(None, ["speculation.strategies=[llma, trie]"]).speculation.strategies == ("llma", "trie")


def test_parallelism(tmp_path: Path) -> None:
    assert load_config().parallelism == ParallelismOptions() == load_config(write(tmp_path, "parallelism:\n")).parallelism
    config = load_config(write(tmp_path, "parallelism: {mode: lookahead, world_size: 4, placement: SPREAD}\n"))
    assert (config.parallelism.mode, config.parallelism.world_size, config.parallelism.placement) == ("lookahead", 4, "SPREAD")
    assert load_config(None, ["parallelism.mode=lookahead"]).parallelism.world_size == "auto"
    alone = load_config(None, ["parallelism.world_size=2"]).parallelism  # kept for when the mode is set
    assert (alone.mode, alone.world_size) == ("none", 2)


def test_groups_that_pin_threads_would_share_cores() -> None:
    overrides = ["parallelism.mode=lookahead", "parallelism.world_size=2", "parallelism.pin_threads=true"]
    assert load_config(None, overrides).parallelism.pin_threads
    with pytest.raises(ConfigError, match=r"parallelism\.pin_threads is true and server\.replicas is 2"):
        load_config(None, [*overrides, "server.replicas=2"])


def test_groups_of_a_nodes_replicas_are_not_placed() -> None:
    overrides = ["parallelism.placement=SPREAD", "parallelism.world_size=auto"]
    assert load_config(None, overrides).parallelism.placement == "SPREAD"  # without a mode nothing is placed
    with pytest.raises(ConfigError, match=r"parallelism\.placement is SPREAD and parallelism\.world_size is auto"):
        load_config(None, [*overrides, "parallelism.mode=lookahead"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("- 1\n", "must hold sections"), ("model: [", "is not yaml"), ("model: 3\n", "model is 3"), ("\udcff", "cannot read")],
)
def test_broken_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file .*nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_model_is_found_from_the_working_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()  # a folder that the repository has as well
    monkeypatch.chdir(tmp_path)
    assert find_model("configs") == str((tmp_path / "configs").resolve())


def test_model_is_found_beside_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["model.path=configs"]).model.path == str(REPOSITORY / "configs")
    assert find_model("organisation/name-on-the-hub") == "organisation/name-on-the-hub"
    assert find_model(str(tmp_path / "absent")) == str(tmp_path / "absent")
    for name in ("model.gguf", "other.bin"):
        (tmp_path / name).touch()
    assert find_model("model.gguf") == str((tmp_path / "model.gguf").resolve())
    assert find_model("other.bin") == "other.bin" and find_model("absent.gguf") == "absent.gguf"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_all_keys_can_be_set() -> None:
    assert len(set(keys())) == len(list(keys()))
    values = {"redis_url": None, "tenancy.admin_keys": (HASH,), "tenancy.tenants.NAME.keys": (HASH,)}
    for key in keys():
        given = {None: "null", (HASH,): f"[{HASH}]"}[values[key]] if key in values else None
        config = load_config(None, [] if given is None else [f"{key}={given}"])
        node = config
        for part in key.split("."):
            if part == "NAME":
                node = node.get(part, TenantOptions())
            else:
                assert hasattr(node, part), key
                node = getattr(node, part)
        if key in values:
            assert node == values[key]


TENANTS = f"""
tenancy:
  admin_keys: ["sha256:{"0c" * 32}"]
  tenants:
    acme: {{keys: ["{HASH}", "{OTHER_HASH}"], cache_mib: 10}}
    Acme.eu-2_x: {{}}
"""


def test_tenants(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, TENANTS), ["tenancy.tenants.acme.cache_mib=12", "cache.enabled=false"])
    assert config.tenancy.tenants["acme"] == TenantOptions(keys=(HASH, OTHER_HASH), cache_mib=12)
    assert config.tenancy.anonymous is None
    assert tenant_names(config) == ("Acme.eu-2_x", "acme")
    assert not config.cache.enabled


def test_anonymous_need_not_be_listed(tmp_path: Path) -> None:
    assert tenant_names(load_config(None, ["tenancy.anonymous=local"])) == ("local",)
    listed = load_config(write(tmp_path, TENANTS), ["tenancy.anonymous=acme"])
    assert tenant_names(listed) == ("Acme.eu-2_x", "acme")
    assert tenant_names(load_config()) == ()
    assert load_config().cache == CacheOptions()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_anonymous_is_for_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    overrides = ["tenancy.anonymous=local", f"server.host='{host}'"]
    if loopback:
        assert load_config(None, overrides).tenancy.anonymous == "local"
    else:
        with pytest.raises(ConfigError, match=r"tenancy\.anonymous is 'local'.*server\.host.*outrider new-key"):
            load_config(None, overrides)
    assert load_config(None, [overrides[1], "server.require_key=false"]).server.host == host  # without it any host will do


def test_anonymous_is_checked_without_a_file() -> None:
    with pytest.raises(ValueError, match=r"tenancy\.anonymous"):
        Config(server=ServerOptions(host="0.0.0.0", require_key=False), tenancy=TenancyOptions(anonymous="local"))


@pytest.mark.parametrize(
    "value", ["outrider-abc", "[outrider-abc]", f"[{HASH}, {HASH.upper()}-outrider-abc]", "[[outrider-abc]]"]
)
@pytest.mark.parametrize("key", ["tenancy.tenants.acme.keys", "tenancy.admin_keys"])
def test_what_is_no_hash_is_not_shown(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"sha256: and the 64 hex digits.*outrider new-key") as caught:
        load_config(None, [f"{key}={value}"])
    assert str(caught.value).startswith(key)
    assert "outrider-abc" not in str(caught.value)


def test_a_key_belongs_to_one_tenant() -> None:
    overrides = [f"tenancy.tenants.acme.keys=[{HASH}]", f"tenancy.tenants.umbrella.keys=[{OTHER_HASH}, {HASH}]"]
    with pytest.raises(ConfigError, match=r"acme and umbrella have the same key sha256:0a0a0a0a\.\.\."):
        load_config(None, overrides)
    twice = load_config(None, [f"tenancy.tenants.acme.keys=[{HASH}, {HASH}]"])
    assert tenant_names(twice) == ("acme",)


def test_the_local_file_is_for_one_user() -> None:
    path = REPOSITORY / "configs" / "local.yaml"
    assert tenant_names(load_config(path)) == ("local",)
    with pytest.raises(ConfigError, match=r"tenancy\.anonymous=null"):
        load_config(path, ["server.host=0.0.0.0"])
    open_to_all = ["server.host=0.0.0.0", "tenancy.anonymous=null", "server.require_key=false"]
    assert tenant_names(load_config(path, open_to_all)) == ()


OPEN = ["server.host=0.0.0.0", "server.require_key=false"]


@pytest.mark.parametrize(
    ("settings", "public", "operators"),
    [
        ([], set(), set()),
        (["server.allowed_hosts=[Me.example, you]"], {"me.example", "you"}, {"me.example", "you"}),
        (["server.allowed_hosts=['*']"], None, None),
        (["server.host=0.0.0.0", "server.require_key=false"], None, set()),
        (["server.host=0.0.0.0", "server.require_key=false", "server.admin_host=0.0.0.0"], None, None),
        (
            ["server.host=0.0.0.0", "server.require_key=false", "server.allowed_hosts=[api.example]"],
            {"api.example"},
            {"api.example"},
        ),
        (
            [
                "server.host=0.0.0.0",
                "server.require_key=false",
                "server.admin_host=0.0.0.0",
                "server.allowed_hosts=[api.example]",
            ],
            {"api.example"},
            None,
        ),
    ],
)
def test_names_of_the_server(settings: list[str], public: set[str] | None, operators: set[str] | None) -> None:
    server = load_config(None, settings).server
    assert (allowed_names(server, server.host), admin_names(server)) == (public, operators)
