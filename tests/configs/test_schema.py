"""Files, overrides, and what is said about mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import REPOSITORY, Config, ConfigError, find_model, keys, load_config
from configs.slices import ModelOptions, ServerOptions


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


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("server.prot=1", "server.port"),
        ("model.pth=x", "model.path"),
        ("port=1", "server.port"),
        ("redis_ulr=x", "redis_url"),
        ("engine.max_runing=2", "engine.max_running"),
        ("sever.port=1", "server.port"),
        ("max_draft_token=1", "speculation.max_draft_tokens"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key .*; did you mean {nearest}\?"):
        load_config(None, [override])


def test_unknown_key_without_a_neighbour_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown key zzzz; known keys: model\.path, .*redis_url"):
        load_config(None, ["zzzz=1"])


def test_unknown_key_in_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key model\.dtyp; did you mean model\.dtype\?"):
        load_config(write(tmp_path, "model:\n  dtyp: float32\n"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.dtype=int3", ["model.dtype is 'int3'", "'float32'", "'bfloat16'"]),
        ("server.port=http", ["server.port is 'http'", "a valid integer"]),
        ("server.port=70000", ["server.port is 70000", "1 to 65535"]),
        ("server.replicas=0", ["server.replicas is 0", "1 to"]),
        ("engine.max_running=[1]", ["engine.max_running is a list", "a valid integer"]),
        ("server.port.x=1", ["server.port is a mapping", "a valid integer"]),
        ("model=x", ["model is a section", "model.path=x"]),
        ("model.path", ["'model.path' is not of the form key=value"]),
        ("=3", ["'=3' is not of the form key=value"]),
        ("model.path={", ["model.path", "not a yaml value"]),
    ],
)
def test_wrong_value_names_key_given_and_allowed(override: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"server\.port is 'a'.*; server\.replicas is 'b'"):
        load_config(None, ["server.port=a", "server.replicas=b"])


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


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_all_keys_can_be_set() -> None:
    assert len(set(keys())) == len(list(keys()))
    for key in keys():
        config = load_config(None, [f"{key}=null"] if key == "redis_url" else [])
        section, _, name = key.rpartition(".")
        assert hasattr(getattr(config, section) if section else config, name)
