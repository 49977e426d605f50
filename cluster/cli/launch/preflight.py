"""Checks before anything is started: cheap, without Ray or torch; each error is one line with advice."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from outrider.actors.placement.ray_folder import RayFolderError, base_folder
from outrider.cache_service.store.addresses import holds_secret, with_password
from outrider.configs.keys_file import with_keys_file
from outrider.configs.schema import MAX_WORLD_SIZE, Config, ConfigError
from outrider.configs.server_checks import admin_address
from outrider.configs.slices import SELF, EmulationOptions, EngineOptions, ParallelismOptions, ServerOptions, SpeculationOptions
from outrider.configs.tenancy_checks import key_is_required
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model_files import base_of, is_adapter

MIN_FREE_MIB = 512  # for Ray's logs and sockets


SECRET_VARIABLE = "OUTRIDER_CACHE_SECRET"
SECRET_ADVICE = (
    "but tenant names in a shared Redis are derived from it: "
    f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same wherever Outrider runs on that Redis, or set cache.enabled=false"
)

# Read in the process that connects to Redis, because Serve writes down the arguments of deployments.
PASSWORD_VARIABLE = "OUTRIDER_REDIS_PASSWORD"  # password of a redis_url without one
URL_VARIABLE = "OUTRIDER_REDIS_URL"  # replaces redis_url


class LaunchError(RuntimeError):
    """The server cannot start; the message is one line that says what to do."""


def check(config: Config) -> None:
    """Raise LaunchError if the server cannot start for a reason that is visible from here."""
    check_port(config.server.host, config.server.port)
    admin = admin_address(config.server)
    if admin is not None and config.server.ray_address is None:  # otherwise the API may run on another machine
        check_port(*admin, name="admin_")
    if config.server.ray_address is None:
        check_folder()
    check_model(config.model.path)
    check_device(config.model.device)
    check_adapters(config.model.adapters)
    check_speculation(config.speculation, config.parallelism.mode == "lookahead")
    check_secret(config)
    if config.server.ray_address is not None:
        check_address(config)
    check_keys(config)
    check_emulation(config.emulation)
    check_processors(config)
    check_parallelism(config)
    check_resource(config)


def with_threads(config: Config) -> Config:
    """Return the configuration with ``model.threads`` set to all cores if one replica has this machine to itself."""
    # Unchanged if threads, CPUs or OMP_NUM_THREADS are set. Ray would allow only `server.cpus_per_replica` threads.
    server = config.server
    alone = (
        server.ray_address is None and server.most_replicas * group_size(config.parallelism) == 1 and not config.baseline.enabled
    )
    configured = config.model.threads is not None or server.cpus_per_replica != ServerOptions().cpus_per_replica
    if not alone or configured or "OMP_NUM_THREADS" in os.environ:
        return config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(psutil.cpu_count(logical=False) or cores, cores)
    return config.model_copy(update={"model": dataclasses.replace(config.model, threads=threads)})


def check_port(host: str, port: int, name: Literal["", "admin_"] = "") -> None:
    """Raise LaunchError unless a server can listen there; ``name`` prefixes the keys in messages, ``server.{name}port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Like the server's socket: a port that was just closed counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise LaunchError(f"port {port} needs root: choose one above 1023, server.{name}port=8000") from None
        except OSError as error:
            if isinstance(error, socket.gaierror) or "assign" in str(error):
                what = f"server.{name}host {host!r}"
                raise LaunchError(f"{what} is not an address of this machine: use 127.0.0.1 or 0.0.0.0") from None
            advice = f"stop the process that listens there, or choose another with server.{name}port={port + 1}"
            raise LaunchError(f"port {port} on {host} is in use: {advice}") from None


def check_folder() -> None:
    """Raise LaunchError unless a folder for Ray's files exists and has space."""
    try:
        check_disk(base_folder())
    except RayFolderError as error:
        raise LaunchError(str(error)) from None


def check_disk(folder: Path) -> None:
    """Raise LaunchError unless Ray has space for its files."""
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < MIN_FREE_MIB:
        raise LaunchError(
            f"{free_mib} MiB free in {folder}, Ray needs {MIN_FREE_MIB}: free some space, or set RAY_TMPDIR or TMPDIR to another "
            "folder"
        )


def check_model(path: str, key: str = "model.path") -> None:
    """Raise LaunchError if a path is no model folder or GGUF file. Hub names are checked while loading."""
    names_folder = path.startswith(("/", ".", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if path.endswith(".gguf") and not folder.is_dir():
        _check_gguf(folder, key)
    elif names_folder and not folder.is_dir():
        raise LaunchError(f"{key} {path} is not a folder: give a folder with config.json, a .gguf file, or a name on the hub")
    if is_adapter(path):
        try:
            base_of(path)
        except ModelLoadError as error:
            raise LaunchError(str(error)) from error
    elif folder.is_dir() and not (folder / "config.json").is_file():
        raise LaunchError(f"{key} {path} has no config.json: give the folder of a Hugging Face model")


def check_device(device: str) -> None:
    """Raise LaunchError for a device that no replica can have."""
    if device.startswith("cuda:"):
        raise LaunchError(
            f"model.device is {device}, but Ray chooses each replica's GPU: set model.device=cuda, and hide other GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )


def check_emulation(options: EmulationOptions) -> None:
    """Raise LaunchError for a model or link that cannot be emulated, or a file of outputs that does not exist."""
    if options.device is None:
        return
    from outrider.engine.emulation.roofline import DeviceRoofline

    try:
        DeviceRoofline.of(options)
    except ModelLoadError as error:
        raise LaunchError(str(error)) from None
    if options.outputs is not None and not Path(options.outputs).is_file():
        raise LaunchError(f"emulation.outputs {options.outputs} is not a file: give JSON lines with prompt and output")


def check_adapters(adapters: Mapping[str, str]) -> None:
    """Raise LaunchError for an adapter path, by name, that is not an adapter's folder."""
    for name, path in adapters.items():
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (Path(path).expanduser() / file).is_file():
                raise LaunchError(f"model.adapters.{name} {path} has no {file}: give the folder of an adapter as PEFT saves it")


def _check_gguf(path: Path, key: str) -> None:
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as error:
        raise LaunchError(f"{key} {path} cannot be read: {error.strerror}; give an existing .gguf file") from None
    if begins != b"GGUF":
        raise LaunchError(f"{key} {path} is not a GGUF file: it does not begin with GGUF; fetch it again")


def check_speculation(options: SpeculationOptions, shared: bool = False) -> None:
    """Raise LaunchError for a strategy or option that is unknown or not allowed; ``shared``: ranks share draft trees."""
    from outrider.decoding.drafters.registry import STRATEGIES, build_drafters, check_drafters, parse_strategy

    if options.draft_model is not None and options.draft_model not in SELF:
        check_model(options.draft_model, "speculation.draft_model")
    once = len(set(options.strategies)) == len(options.strategies)
    plain = not (options.options or options.request_options)
    if plain and once and STRATEGIES.keys() >= {options.strategy, *options.strategies}:
        return  # drafters are slow to import and would take memory in this process
    try:
        drafter = build_drafters(options.strategy, options.options, options.strategies)
        _check_request_options(options)
        names = (options.strategy, *(parse_strategy(text).name for text in options.strategies))
        check_drafters(drafter, names, options.draft_model, options.exact, shared)
    except ValueError as error:
        raise LaunchError(f"speculation: {error}") from None


def _check_request_options(options: SpeculationOptions) -> None:
    """Raise ``ValueError`` if ``speculation.request_options`` names an option that does not exist."""
    from outrider.decoding.drafters.options import OPTIONS

    for text in options.request_options:
        strategy, _, name = text.partition(".")
        if name not in OPTIONS.get(strategy, {}):
            raise ValueError(f"request_options: {text} is not an option: give STRATEGY.OPTION, such as trie.capacity")


def check_secret(config: Config) -> None:
    """Raise LaunchError if outputs go to a Redis that outlives the server and no secret exists to derive names from."""
    if redis_address(config.redis_url) and config.cache.enabled and not os.environ.get(SECRET_VARIABLE):
        raise LaunchError(f"{SECRET_VARIABLE} is not set, {SECRET_ADVICE}")


def check_keys(config: Config) -> None:
    """Raise LaunchError if the key file cannot be used; skipped if the API may run on another machine."""
    if config.tenancy.keys_file is None or config.server.ray_address is not None:
        return
    try:
        with_keys_file(config.tenancy, key_is_required(config.server.require_key, config.server.host))
    except ConfigError as error:
        raise LaunchError(str(error)) from None


def check_resource(config: Config) -> None:
    """Raise LaunchError if the API needs a resource that a Ray started here does not have."""
    if config.server.api_resource is not None and config.server.ray_address is None:
        raise LaunchError(
            f"server.api_resource is {config.server.api_resource}, but the Ray cluster started here has no such resource: leave "
            "it out, or join a cluster that has it with server.ray_address"
        )


def redis_address(url: str | None) -> str | None:
    """Return this process's Redis address: the environment's, or ``redis_url`` with the environment's password."""
    whole = os.environ.get(URL_VARIABLE)
    if whole:
        return whole
    return None if url is None else with_password(url, os.environ.get(PASSWORD_VARIABLE, ""))


def check_address(config: Config) -> None:
    """Raise ConfigError if ``redis_url`` holds a password, which Serve would write down with the deployments' arguments."""
    if config.redis_url is not None and holds_secret(config.redis_url):
        raise ConfigError(
            f"redis_url holds a password, which Ray Serve would write down: put it into the environment of all nodes, as "
            f"{PASSWORD_VARIABLE}, or the whole address as {URL_VARIABLE}"
        )


def group_size(options: ParallelismOptions) -> int:
    """Return the ranks reserved for each replica, including itself; 1 if it computes alone or ``world_size`` is ``auto``."""
    return options.world_size if options.mode != "none" and options.world_size != "auto" else 1


def most_ranks(config: Config) -> int:
    """Return the size of the largest lookahead group, in which each rank has the whole model; 1 in other modes."""
    options, server = config.parallelism, config.server
    if options.mode != "lookahead":
        return 1
    return min(max(1, server.replicas), MAX_WORLD_SIZE) if options.world_size == "auto" else options.world_size


def options_of_a_rank(engine: EngineOptions, gpus: float) -> EngineOptions:
    """Return an engine's options for the GPUs reserved per rank: with 0.5, each takes 0.45 of the memory of a GPU."""
    share = gpus if 0 < gpus < 1 else 1.0
    return dataclasses.replace(engine, gpu_memory_utilization=share * engine.gpu_memory_utilization)


def baseline_parallelism(config: Config) -> ParallelismOptions:
    """Return the parallelism of the baseline of comparisons."""
    options = config.baseline
    if options.kind == "plain":
        return ParallelismOptions()
    return ParallelismOptions(options.kind, options.world_size, step_timeout_s=config.parallelism.step_timeout_s)


def check_parallelism(config: Config) -> None:
    """Raise LaunchError if a package for parallel computation is not installed."""
    kinds: dict[str, str] = {"parallelism.mode": config.parallelism.mode}
    if config.baseline.enabled:
        kinds["baseline.kind"] = config.baseline.kind
    for key, kind in kinds.items():
        if kind == "tensor" and importlib.util.find_spec("deepspeed") is None:
            raise LaunchError(f"{key} is tensor, which needs DeepSpeed: pip install -e '.[baselines]'")


def check_processors(config: Config) -> None:
    """Raise LaunchError if groups need more CPUs than a Ray started here can have."""
    widest = max(group_size(config.parallelism), group_size(baseline_parallelism(config)))
    if widest > 1 and config.server.cpus_per_replica <= 0:
        raise LaunchError("server.cpus_per_replica must be above 0: with parallelism, each rank's place is reserved by its CPUs")
    if config.server.ray_address is None:
        check_reservation(config, "CPU", config.server.cpus_per_replica, os.cpu_count() or 1)


def check_api_nodes(config: Config, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise LaunchError if fewer nodes than API replicas exist. ``nodes`` holds the resources that each node offers."""
    resource, replicas = config.server.api_resource, config.server.api_replicas
    found = sum(1 for offered in nodes if resource is None or resource in offered)
    if replicas > 1 and found < replicas:
        offering = "" if resource is None else f" that offer {resource}"
        raise LaunchError(
            f"server.api_replicas is {replicas}, each on a separate node, but there are {found} nodes{offering}: lower it, or "
            "add nodes and name the cluster with server.ray_address"
        )


def check_reservation(config: Config, kind: Literal["CPU", "GPU"], each: float, available: float) -> None:
    """Raise LaunchError if there are too few CPUs or GPUs for all ranks of all replicas and of the baseline."""
    ranks, replicas = group_size(config.parallelism), config.server.most_replicas
    baselines = config.baseline.replicas * group_size(baseline_parallelism(config)) if config.baseline.enabled else 0
    needed = (ranks * replicas + baselines) * each
    if kind == "GPU" and needed > available == 0:
        raise LaunchError("the model needs a GPU, but Ray finds none: set model.device=cpu (`outrider doctor` says more)")
    if (ranks > 1 or baselines or kind == "GPU") and needed > available:
        beside = f" and {baselines} of the baseline" if baselines else ""
        raise LaunchError(
            f"{replicas} x {ranks} ranks{beside} need {needed:g} {kind}s, {each:g} each, but there are {available:g}: "
            f"lower server.replicas, parallelism.world_size{', baseline.replicas, baseline.world_size' if baselines else ''} "
            f"or server.{kind.lower()}s_per_replica"
        )
