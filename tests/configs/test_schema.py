"""Files, overrides, tenants, and who reaches a server without a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.configs.schema import REPOSITORY, Config, ConfigError, find_model, keys, load_config, tenant_names
from outrider.configs.server_checks import admin_names, allowed_names
from outrider.configs.slices import CacheOptions, ModelOptions, ParallelismOptions, ServerOptions, TenancyOptions, TenantOptions
from outrider.configs.tenancy_checks import is_loopback

HASH, OTHER_HASH = (f"sha256:{digits * 32}" for digits in ("0a", "0b"))
OPEN = ["server.host=0.0.0.0", "server.require_key=false"]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_slices() -> None:
    config = load_config()
    assert (config.server, config.cache, config.parallelism) == (ServerOptions(), CacheOptions(), ParallelismOptions())
    assert config.model.dtype == ModelOptions().dtype
    assert config.redis_url is None and config.speculation.strategies == ()


def test_overrides_replace_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\n  dtype: float32\nserver:\n  port: 9000\n  replicas: 2\nengine:\n")
    overrides = ["server.port=9001", "server.port=9002", "redis_url=redis://h:1/0", "speculation.options.match_length=3"]
    config = load_config(path, [*overrides, "model.threads=null"])
    assert (config.server.port, config.server.replicas) == (9002, 2)
    assert (config.model.dtype, config.model.threads) == ("float32", None)
    assert config.redis_url == "redis://h:1/0"
    assert config.speculation.options == {"match_length": 3}


def test_lists_of_strategies(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "speculation: {strategies: [llma, 'trie:capacity=100,branch_length=3']}\n"))
    assert config.speculation.strategies == ("llma", "trie:capacity=100,branch_length=3")
    assert load_config(None, ["speculation.strategies=[llma, trie]"]).speculation.strategies == ("llma", "trie")


def test_parallelism(tmp_path: Path) -> None:
    found = load_config(write(tmp_path, "parallelism: {mode: lookahead, world_size: 4, placement: SPREAD}\n")).parallelism
    assert (found.mode, found.world_size, found.placement) == ("lookahead", 4, "SPREAD")
    assert load_config(None, ["parallelism.mode=lookahead"]).parallelism.world_size == "auto"
    alone = load_config(None, ["parallelism.world_size=2"]).parallelism  # kept for when the mode is set
    assert (alone.mode, alone.world_size) == ("none", 2)
    assert load_config(None, ["parallelism.placement=SPREAD"]).parallelism.placement == "SPREAD"
    one_group = ["parallelism.mode=lookahead", "parallelism.world_size=2", "parallelism.pin_threads=true"]
    assert load_config(None, one_group).parallelism.pin_threads


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n", "must hold sections"),
        ("model: [", "is not yaml"),
        ("model: 3\n", "model is 3"),
        ("model:\n  dtyp: float32\n", "unknown key model.dtyp; did you mean model.dtype"),
        ("\udcff", "cannot read"),
        (None, "no config file"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_where_a_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["model.path=configs"]).model.path == str(REPOSITORY / "configs")
    (tmp_path / "configs").mkdir()  # the working directory comes before the repository
    assert find_model("configs") == str((tmp_path / "configs").resolve())
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
    given = {"redis_url": "null", "tenancy.admin_keys": f"[{HASH}]", "tenancy.tenants.NAME.keys": f"[{HASH}]"}
    for key in keys():
        node = load_config(None, [f"{key}={given[key]}"] if key in given else [])
        for part in key.split("."):
            assert part == "NAME" or hasattr(node, part), key
            node = node.get(part, TenantOptions()) if part == "NAME" else getattr(node, part)
        if key in given:
            assert node == (None if key == "redis_url" else (HASH,))


def test_tenants(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        f"tenancy:\n  admin_keys: ['sha256:{'0c' * 32}']\n  tenants:\n"
        f"    acme: {{keys: ['{HASH}', '{OTHER_HASH}'], cache_mib: 10}}\n    Acme.eu-2_x: {{}}\n",
    )
    config = load_config(file, ["tenancy.tenants.acme.cache_mib=12", "cache.enabled=false"])
    assert config.tenancy.tenants["acme"] == TenantOptions(keys=(HASH, OTHER_HASH), cache_mib=12)
    assert config.tenancy.anonymous is None and not config.cache.enabled
    assert tenant_names(config) == ("Acme.eu-2_x", "acme") == tenant_names(load_config(file, ["tenancy.anonymous=acme"]))
    assert tenant_names(load_config(None, ["tenancy.anonymous=local"])) == ("local",)  # need not be listed
    assert tenant_names(load_config()) == ()


LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1", "localhost"]


@pytest.mark.parametrize("host", [*LOOPBACK, "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.example.org", ""])
def test_anonymous_is_for_loopback(host: str) -> None:
    loopback = host in LOOPBACK
    assert is_loopback(host) is loopback
    overrides = ["tenancy.anonymous=local", f"server.host='{host}'"]
    if loopback:
        assert load_config(None, overrides).tenancy.anonymous == "local"
    else:
        with pytest.raises(ConfigError, match=r"tenancy\.anonymous is 'local'.*server\.host"):
            load_config(None, overrides)
    assert load_config(None, [overrides[1], "server.require_key=false"]).server.host == host  # without it any host will do
    if not loopback:
        with pytest.raises(ValueError, match=r"tenancy\.anonymous"):  # without a file, too
            Config(server=ServerOptions(host=host, require_key=False), tenancy=TenancyOptions(anonymous="local"))


@pytest.mark.parametrize(
    "value", ["outrider-abc", "[outrider-abc]", f"[{HASH}, {HASH.upper()}-outrider-abc]", "[[outrider-abc]]"]
)
@pytest.mark.parametrize("key", ["tenancy.tenants.acme.keys", "tenancy.admin_keys"])
def test_what_is_no_hash_is_not_shown(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"sha256:.*outrider new-key") as caught:
        load_config(None, [f"{key}={value}"])
    assert str(caught.value).startswith(key) and "outrider-abc" not in str(caught.value)


def test_a_key_belongs_to_one_tenant() -> None:
    overrides = [f"tenancy.tenants.acme.keys=[{HASH}]", f"tenancy.tenants.umbrella.keys=[{OTHER_HASH}, {HASH}]"]
    with pytest.raises(ConfigError, match=r"acme and umbrella have the same key sha256:0a0a0a0a\.\.\."):
        load_config(None, overrides)
    assert tenant_names(load_config(None, [f"tenancy.tenants.acme.keys=[{HASH}, {HASH}]"])) == ("acme",)


def test_the_local_file_is_for_one_user() -> None:
    path = REPOSITORY / "configs" / "local.yaml"
    assert tenant_names(load_config(path)) == ("local",)
    with pytest.raises(ConfigError, match=r"tenancy\.anonymous=null"):
        load_config(path, ["server.host=0.0.0.0"])
    assert tenant_names(load_config(path, [*OPEN, "tenancy.anonymous=null"])) == ()


@pytest.mark.parametrize(
    ("settings", "public", "operators"),
    [
        ([], set(), set()),
        (["server.allowed_hosts=[Me.example, you]"], {"me.example", "you"}, {"me.example", "you"}),
        (["server.allowed_hosts=['*']"], None, None),
        (OPEN, None, set()),
        ([*OPEN, "server.admin_host=0.0.0.0"], None, None),
        ([*OPEN, "server.allowed_hosts=[api.example]"], {"api.example"}, {"api.example"}),
        ([*OPEN, "server.admin_host=0.0.0.0", "server.allowed_hosts=[api.example]"], {"api.example"}, None),
    ],
)
def test_names_of_the_server(settings: list[str], public: set[str] | None, operators: set[str] | None) -> None:
    server = load_config(None, settings).server
    assert (allowed_names(server, server.host), admin_names(server)) == (public, operators)


def test_anonymous_is_checked_without_a_file() -> None:
    with pytest.raises(ValueError, match=r"tenancy\.anonymous"):
        Config(server=ServerOptions(host="0.0.0.0", require_key=False), tenancy=TenancyOptions(anonymous="local"))
