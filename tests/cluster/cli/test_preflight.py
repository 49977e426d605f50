"""What is checked before anything starts, ports, disk, models, Redis and processors: what is wrong is one line with a remedy."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cluster.app import application
from outrider.cluster.cli.launch.preflight import (
    LaunchError,
    check_api_nodes,
    check_device,
    check_disk,
    check_emulation,
    check_model,
    check_port,
    check_processors,
    check_reservation,
    most_ranks,
)
from outrider.cluster.cli.launch.serve import _state_of_redis, base_url, serve_until_stopped
from outrider.configs.schema import Config, ConfigError, load_config
from outrider.configs.slices import BaselineOptions, EmulationOptions, EngineOptions, ServerOptions
from tests.helpers.network import free_port


@pytest.mark.parametrize(("url", "shown"), [
    ("redis://:pass@127.0.0.1:1/0", "redis://***@127.0.0.1:1/0 does not answer"),
    ("redis+sentinel://:pass@127.0.0.1:1/main?sentinel_password=pass", "redis+sentinel://***@127.0.0.1:1/main does not answer"),
    ("redis+cluster://:pass@127.0.0.1:1", "redis+cluster://***@127.0.0.1:1 does not answer"),
])  # fmt: skip
def test_what_is_said_of_a_redis_that_is_away(url: str, shown: str) -> None:
    said = _state_of_redis(url)
    assert said.startswith(f"redis_url {shown}") and "pass" not in said


def test_a_redis_that_lets_nobody_in_ends_the_launch() -> None:
    with EmbeddedRedis.start() as server:
        for user in ("", ":wrong@"):
            address = f"unix://{user}{server.url.partition('@')[2]}"
            with pytest.raises(LaunchError, match=r"redis_url unix://.*(Authentication required|invalid).*rights") as refused:
                _state_of_redis(address)
            assert "wrong" not in str(refused.value)
        assert _state_of_redis(server.url) == "Redis answers at redis_url"


def test_check_port() -> None:
    check_port("127.0.0.1", free_port())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match=r"is in use: stop the process that listens there, or choose another"):
            check_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(LaunchError, match="is not an address of this machine"):
        check_port("203.0.113.7", 18999)


def test_check_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk(tmp_path)
    monkeypatch.setattr("outrider.cluster.cli.launch.preflight.MIN_FREE_MIB", 2**40)
    with pytest.raises(LaunchError, match="free some space, or set RAY_TMPDIR"):
        check_disk(tmp_path)


def test_check_model(tmp_path: Path) -> None:
    for name in ("organisation/name", "name", "smollm2-135m-instruct"):
        check_model(name)
    for path in ("/absent/model", "./absent", "a/b/c", "~/absent-model"):
        with pytest.raises(LaunchError, match="is not a folder"):
            check_model(path)
    with pytest.raises(LaunchError, match=r"no config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    file = tmp_path / "model.gguf"
    with pytest.raises(LaunchError, match="cannot be read"):
        check_model(str(file))
    file.write_bytes(b"PK")
    with pytest.raises(LaunchError, match="is not a GGUF file"):
        check_model(str(file), "speculation.draft_model")
    file.write_bytes(b"GGUF")
    check_model(str(file))


@pytest.mark.slow
def test_a_model_that_cannot_be_fetched_ends_the_launch_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("outrider.engine.loading.model_files._check_space", lambda *_: None)
    # This process may have a Ray already; with one of its own: tests/cluster/service/test_launch.py.
    monkeypatch.setattr("outrider.cluster.cli.launch.serve._ray", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("outrider.cluster.cli.launch.serve._check_ray", lambda *_: None)
    config = load_config(None, ["model.path=smollm2-135m-instruct"])
    with pytest.raises(LaunchError, match=r"'smollm2-135m-instruct' could not be fetched .*give --model DIR"):
        serve_until_stopped(config)


def test_base_url_is_one_that_a_client_can_use() -> None:
    for host, more in (("0.0.0.0", ["server.require_key=false"]), ("127.0.0.1", [])):
        assert base_url(load_config(None, [f"server.host={host}", "server.port=81", *more])) == "http://127.0.0.1:81"


def configured(replicas: int, world_size: int | str, cpus: float = 1.0, address: str | None = None) -> Config:
    parallelism = {"mode": "lookahead", "world_size": world_size}
    server = {"replicas": replicas, "cpus_per_replica": cpus, "ray_address": address}
    return Config.model_validate({"parallelism": parallelism, "server": server})


def test_reservations() -> None:
    """Ray would wait for ever for what is not there."""
    cores = os.cpu_count() or 1
    for config in (
        configured(1, cores), configured(1, 2 * cores, 0.5), configured(100, "auto"), configured(100, 8, address="10.0.0.1:6379"),
    ):  # fmt: skip
        check_processors(config)
    for config, named in ((configured(1, cores + 1), f"need {cores + 1} CPUs"), (configured(1, 2, 0.0), "cpus_per_replica")):
        with pytest.raises(LaunchError, match=named):
            check_processors(config)
    two = Config(server=ServerOptions(replicas=2))
    compared = Config(server=ServerOptions(replicas=2), baseline=BaselineOptions(enabled=True))
    for config, resource, each, available in (
        (configured(2, 4), "GPU", 1.0, 8.0), (two, "GPU", 0.5, 1.0), (Config(), "GPU", 0.0, 0.0), (compared, "CPU", 1.0, 3.0),
        (two, "CPU", 1.0, 1.0),  # Serve waits for more
    ):  # fmt: skip
        check_reservation(config, resource, each, available)
    for config, resource, available, needs in (
        (configured(2, 4), "GPU", 7.0, "need 8 GPUs"), (two, "GPU", 0.0, "needs a GPU"), (two, "GPU", 1.0, "need 2 GPUs"),
        (compared, "CPU", 2.0, "need 3 CPUs"),
    ):  # fmt: skip
        with pytest.raises(LaunchError, match=needs):
            check_reservation(config, resource, 1.0, available)


def test_replicas_of_a_gpu_take_their_parts_of_its_memory() -> None:
    def share(gpus: float | None, utilization: float = 0.9) -> float:
        config = Config.model_validate(
            {
                "model": {"path": "demo_model", "device": "cuda"},
                "engine": {"gpu_memory_utilization": utilization},
                "server": {"replicas": 2, "gpus_per_replica": gpus},
            }
        )
        engine = application(config)._bound_deployment.init_args[0]._bound_deployment
        options: EngineOptions = engine.init_args[1]
        return options.gpu_memory_utilization

    assert share(0.5) == 0.45 and share(0.25, 1.0) == 0.25
    assert share(None) == share(1) == share(0) == share(2) == 0.9


def test_the_ranks_that_slots_have_room_for() -> None:
    assert [most_ranks(configured(4, size)) for size in (2, "auto")] == [2, 4]
    assert most_ranks(configured(0, "auto")) == most_ranks(Config()) == 1


@pytest.mark.parametrize("value", ["0", "1.5", "-0.1"])
def test_a_share_of_memory_is_between_none_and_all(value: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.gpu_memory_utilization is .*allowed: 0\.001 to 1"):
        load_config(None, [f"engine.gpu_memory_utilization={value}"])


def test_each_replica_of_the_api_needs_a_node() -> None:
    config = Config(server=ServerOptions(api_replicas=2, api_resource="outrider_api"))
    nodes = [{"CPU": 4.0}, {"CPU": 2.0, "outrider_api": 1.0}]
    with pytest.raises(LaunchError, match=r"server\.api_replicas is 2.*there are 1 nodes that offer outrider_api"):
        check_api_nodes(config, nodes)
    check_api_nodes(config, [*nodes, {"outrider_api": 1.0}])
    check_api_nodes(Config(server=ServerOptions(api_replicas=2)), nodes)
    check_api_nodes(Config(), [])


def test_a_gpu_that_cannot_be_emulated_is_refused(tmp_path: Path) -> None:
    known = tmp_path / "known.jsonl"
    known.touch()
    check_emulation(EmulationOptions())
    check_emulation(EmulationOptions("A100-80", "llama-3.1-8b", outputs=str(known)))
    for options, named in (
        (EmulationOptions("A100-80", "llama-9"), r"emulation\.model 'llama-9' is not known.*llama-3\.1-8b"),
        (EmulationOptions("L4", "llama-3.1-8b", link="nvlink"), r"emulation\.link is nvlink.*set pcie or ethernet"),
        (EmulationOptions("L4", "llama-3.1-8b", outputs=str(tmp_path / "x")), r"emulation\.outputs .*is not a file"),
    ):
        with pytest.raises(LaunchError, match=named):
            check_emulation(options)


def test_a_replica_cannot_choose_its_gpu() -> None:
    check_device("cuda")
    with pytest.raises(LaunchError, match=r"cuda:7.*model\.device=cuda"):
        check_device("cuda:7")
