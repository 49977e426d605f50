"""``outrider serve-config``: what Serve's own tools and KubeRay are given, and what the application makes of it."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.app import build_app
from outrider.cluster.cli.launch.preflight import LaunchError, check_resource, redis_address
from outrider.cluster.serving.cache_actor import CacheSettings
from outrider.cluster.serving.secrets import node_secret, stream_key
from outrider.configs.schema import REPOSITORY, Config, ConfigError, load_config
from outrider.configs.slices import CacheOptions
from tests.cluster.commands import error_line, outrider

LOCAL = REPOSITORY / "configs" / "local.yaml"


def test_the_document_is_a_serve_configuration_with_the_file_s_own_settings() -> None:
    found = outrider("serve-config", "--config", str(LOCAL), "server.replicas=2", "redis_url=redis://there:6379")
    assert found.returncode == 0, found.stderr
    first, _, rest = found.stdout.partition("\n")
    words = shlex.split(first.removeprefix("# outrider "))
    assert outrider(*words).stdout == found.stdout  # its first line is the command that makes it
    document = yaml.safe_load(rest)
    deployed = ServeDeploySchema.model_validate(document)
    assert [each.import_path for each in deployed.applications] == ["outrider.cluster.app:build_app"]
    assert (deployed.http_options.host, deployed.http_options.port) == ("127.0.0.1", 8000)
    arguments = document["applications"][0]["args"]
    assert arguments["model"] == yaml.safe_load(LOCAL.read_text())["model"]  # nothing filled in, no path made absolute
    assert arguments["server"]["replicas"] == 2 and arguments["redis_url"] == "redis://there:6379"
    Config.model_validate(arguments)


def test_host_and_port_are_serve_s_and_the_application_s() -> None:
    overrides = ["server.host=0.0.0.0", "server.port=9001", "server.require_key=false", "tenancy.anonymous=null"]
    document = yaml.safe_load(outrider("serve-config", *overrides).stdout)
    assert document["http_options"] == {"host": "0.0.0.0", "port": 9001}
    server = document["applications"][0]["args"]["server"]
    assert (server["host"], server["port"]) == ("0.0.0.0", 9001)


def test_what_cannot_be_is_one_line() -> None:
    for overrides, says in (
        (["--config", "nothing.yaml"], "nothing.yaml"), (["server.replica=2"], "server.replicas"),
        (["server.ray_address=auto"], "server.ray_address"), (["server.api_resource=CPU"], "server.api_resource"),
        (["server.api_resource=two words"], "server.api_resource"),
    ):  # fmt: skip
        assert says in error_line(outrider("serve-config", *overrides), 2)


def test_the_application_checks_what_serve_passes_on() -> None:
    """Serve makes a ``Config`` of the arguments, which knows types and names, but no bounds."""
    with pytest.raises(ConfigError, match=r"server\.replicas is -1; allowed: 0 to 1024"):
        build_app(Config.model_validate({"server": {"replicas": -1}}))


def test_what_holds_no_model_goes_where_the_resource_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_SECRET", "s")
    settings = {"server": {"api_resource": "outrider_api"}, "redis_url": "redis://there:6379", "model": {"device": "cpu"}}
    found = _resources(build_app(Config.model_validate(settings)))
    assert found == {"api": {"outrider_api": 0.001}, "cache": {"outrider_api": 0.001}, "engine": {}}
    del settings["server"]
    assert _resources(build_app(Config.model_validate(settings))) == {"api": {}, "cache": {}, "engine": {}}


def test_a_ray_of_our_own_has_no_such_resource() -> None:
    with pytest.raises(LaunchError, match=r"server\.api_resource is outrider_api, but the Ray cluster started here has no such"):
        check_resource(load_config(LOCAL, ["server.api_resource=outrider_api"]))
    check_resource(load_config(LOCAL, ["server.api_resource=outrider_api", "server.ray_address=auto"]))
    check_resource(load_config(LOCAL))


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("rediss://outrider@redis:6379?ssl_ca_certs=/a@b", "rediss://outrider:p%40%2F%3A@redis:6379?ssl_ca_certs=/a@b"),
        ("redis://redis/0", "redis://:p%40%2F%3A@redis/0"),
        ("redis+sentinel://u@a:1,b:2/name", "redis+sentinel://u:p%40%2F%3A@a:1,b:2/name"),
        ("redis://u:own@redis:6379", "redis://u:own@redis:6379"),
        ("redis://:own@redis:6379", "redis://:own@redis:6379"),
        ("no address", "no address"),
    ],
)
def test_the_password_of_redis_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch, url: str, whole: str) -> None:
    monkeypatch.delenv("OUTRIDER_REDIS_PASSWORD", raising=False)
    assert redis_address(url) == url
    monkeypatch.setenv("OUTRIDER_REDIS_PASSWORD", "p@/:")
    assert redis_address(url) == whole
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://:all@there")
    assert redis_address(url) == redis_address(None) == "redis://:all@there"


def test_serve_is_given_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, object] = {"redis_url": "redis://outrider@there:6379", "model": {"device": "cpu"}}
    settings["baseline"] = {"enabled": True}
    settings |= {"parallelism": {"mode": "lookahead", "world_size": "auto"}, "server": {"replicas": 2}}
    for name, value in (("CACHE_SECRET", "secret-one"), ("REDIS_PASSWORD", "secret-two")):
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-four")
    given = [_given(build_app(Config.model_validate(settings)))]
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://:secret-three@there:6379")
    given.append(_given(build_app(Config.model_validate(settings | {"redis_url": None}))))
    for deployments in given:
        assert set(deployments) == {"api", "cache", "engine", "baseline", "membership"}
        for name, data in deployments.items():
            assert b"demo_model" in data or name in ("cache", "membership")
            assert b"secret-" not in data and node_secret() not in data and stream_key() not in data, name
    again = _given(build_app(Config.model_validate(settings | {"redis_url": None})))
    assert again == given[1]  # nor is anything in it made up


@pytest.mark.parametrize(
    "url", ["redis://:p@there", "rediss://u:p@there/0", "redis+sentinel://a,b/x?sentinel_password=p", "redis://there?password=p"]
)
def test_an_address_with_a_password_is_not_given_to_serve(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_SECRET", "s")
    with pytest.raises(ConfigError, match="OUTRIDER_REDIS_PASSWORD") as refusal:
        build_app(Config.model_validate({"redis_url": url}))
    assert url not in str(refusal.value)


def test_an_actor_without_the_secret_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    place = CacheSettings(CacheOptions(), "redis://outrider@there:6379", ("acme",), "version")
    monkeypatch.delenv("OUTRIDER_CACHE_SECRET", raising=False)
    with pytest.raises(ConfigError, match="OUTRIDER_CACHE_SECRET is not set where this actor runs"):
        place.access()
    monkeypatch.setenv("OUTRIDER_CACHE_SECRET", "s")
    monkeypatch.setenv("OUTRIDER_REDIS_PASSWORD", "p")
    access = place.access()
    assert (access.url, access.secret, access.tenants) == ("redis://outrider:p@there:6379", b"s", ("acme",))


def _given(application: object) -> dict[str, bytes]:
    """By deployment, what Serve writes down of its arguments and options."""
    from ray.serve._private.build_app import build_app as built

    made = built(application, name="outrider")
    return {
        each.name: pickle.dumps(
            (each._replica_config.serialized_init_args, each._replica_config.serialized_init_kwargs, each.ray_actor_options)
        )
        for each in made.deployments
    }


def _resources(application: object) -> dict[str, dict[str, float]]:
    """By deployment, the custom resources that its actors reserve."""
    from ray.serve._private.build_app import build_app as built

    made = built(application, name="outrider")
    return {each.name: (each.ray_actor_options or {}).get("resources") or {} for each in made.deployments}


def test_paths_of_a_configuration_are_those_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {path: /models/model}\ntenancy: {keys_file: /etc/keys.yaml}\n")
    arguments = yaml.safe_load(outrider("serve-config", "--config", str(file)).stdout)["applications"][0]["args"]
    assert arguments["model"] == {"path": "/models/model"} and arguments["tenancy"] == {"keys_file": "/etc/keys.yaml"}
