"""A real Serve application on the circle model, on a Ray that all tests of this folder share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from outrider.cluster.app import build_app
from outrider.cluster.cli.launch.serve import SERVE_SETTINGS
from outrider.configs.schema import Config
from outrider.configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions
from tests.cluster.circle import MAX_RUNNING, MAX_WAITING, Server
from tests.cluster.service.applications import Twins, serving_twins
from tests.helpers.network import free_port


@pytest.fixture(scope="session")
def api_server(circle_model: Path) -> Iterator[Server]:
    """The application, and with it its Ray, ended with the session."""
    port = free_port()
    config = Config(
        model=ModelOptions(path=str(circle_model), dtype="float32", threads=1),
        engine=EngineOptions(max_running=MAX_RUNNING, max_waiting=MAX_WAITING),
        speculation=SpeculationOptions(strategy="llma", max_draft_tokens=8, strategies=("prompt_lookup",)),
        server=ServerOptions(port=port, cpus_per_replica=0.5),
    )
    with pytest.MonkeyPatch.context() as environment:  # of the actors
        for name, value in (SERVE_SETTINGS | {"OUTRIDER_CACHE_SECRET": secrets.token_hex(32)}).items():
            environment.setenv(name, value)
        ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(config), name="outrider", route_prefix="/")
        yield Server(f"http://127.0.0.1:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def twins(api_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """A second application beside it."""
    with serving_twins(api_server, tmp_path_factory.mktemp("models")) as made:
        yield made
