"""Settings of ranks that hold parts of one model, and of adapters, as commands check them before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from outrider.cluster.cli.generate.command import read_settings
from outrider.cluster.cli.launch.preflight import (
    LaunchError,
    baseline_parallelism,
    check_adapters,
    check_parallelism,
    check_processors,
    check_reservation,
    group_size,
)
from outrider.configs.schema import REPOSITORY, load_config

TENSOR = ["parallelism.mode=tensor", "parallelism.world_size=2"]


def test_the_shipped_file_is_of_two_ranks() -> None:
    file = REPOSITORY / "configs" / "tensor_parallel_deepspeed.yaml"
    config = load_config(file)
    assert (config.parallelism.mode, group_size(config.parallelism)) == ("tensor", 2)
    assert read_settings(file, {}, 1).parallelism == config.parallelism


@pytest.mark.parametrize(
    ("flags", "mode", "world_size"), [({}, "pipeline", 3), ({"world_size": "2"}, "pipeline", 2), ({"world_size": "1"}, "none", 1)]
)
def test_generate_has_the_kind_of_the_file(flags: dict[str, str], mode: str, world_size: int, tmp_path: Path) -> None:
    file = tmp_path / "parts.yaml"
    file.write_text("parallelism: {mode: pipeline, world_size: 3}\n")
    options = read_settings(file, flags, 1).parallelism
    assert (options.mode, options.world_size) == (mode, world_size)
    for refused in ({"world_size": "auto"}, {"draft_model": "demo_draft_model"}):
        with pytest.raises(ValueError, match=r"is not for parallelism\.mode pipeline"):
            read_settings(file, refused, 1)


BASELINE = ["baseline.enabled=true", "baseline.kind=tensor"]


@pytest.mark.parametrize(("overrides", "key"), [(TENSOR, "parallelism.mode"), (BASELINE, "baseline.kind")])
def test_a_missing_deepspeed_is_named_before_anything_starts(overrides: list[str], key: str) -> None:
    check_parallelism(load_config(None, [override.replace("tensor", "pipeline") for override in overrides]))
    config = load_config(None, overrides)
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(LaunchError, match=rf"{key} is tensor.* pip install -e '.\[baselines\]'"):
            check_parallelism(config)
    else:
        check_parallelism(config)


def test_the_ranks_of_the_baseline_are_reserved() -> None:
    config = load_config(None, [*BASELINE, "baseline.world_size=3", "baseline.replicas=2", "server.cpus_per_replica=0.5"])
    assert group_size(baseline_parallelism(config)) == 3
    check_reservation(config, "CPU", 0.5, 3.5)
    with pytest.raises(LaunchError, match=r"1 x 1 ranks and 6 of the baseline need 3\.5 CPUs, .* baseline\.world_size"):
        check_reservation(config, "CPU", 0.5, 3.0)
    with pytest.raises(LaunchError, match=r"server\.cpus_per_replica must be above 0"):
        check_processors(load_config(None, [*BASELINE, "server.cpus_per_replica=0"]))


def test_paths_of_adapters_hold_in_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["model.adapters.sql=loras/sql", "model.adapters.poems=/srv/poems"])
    assert config.model.adapters == {"sql": str(tmp_path / "loras/sql"), "poems": "/srv/poems"}
    with pytest.raises(LaunchError, match=r"model.adapters.sql .*/loras/sql has no adapter_config.json"):
        check_adapters(config.model.adapters)
