"""The configuration of an overlay, ``serveConfigV2``, is what its command makes, and the pods have what it needs."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from functools import cache
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, urlsplit

from outrider.cluster.app import gpus_of_a_rank
from outrider.cluster.cli.launch.preflight import PASSWORD_VARIABLE, SECRET_VARIABLE, baseline_parallelism, group_size
from outrider.cluster.cli.launch.serve import SERVE_SETTINGS
from outrider.cluster.cli.launch.serve_config import serve_config_text
from outrider.configs.schema import Config, ConfigError, load_config
from outrider.configs.server_checks import admin_address
from outrider.configs.tenancy_checks import is_loopback
from tests.k8s.manifests import (
    GPU,
    REPOSITORY,
    Document,
    Pods,
    behind,
    environment,
    files_of,
    mount_of,
    of_kind,
    quantity,
    ray_pods,
    resource,
)


def command(text: str) -> tuple[Path | None, list[str]]:
    """Return the file and the overrides of the command ``outrider serve-config`` in the first line."""
    words = shlex.split(text.partition("\n")[0].removeprefix("# outrider serve-config"))
    return (Path(words[1]), words[2:]) if words[:1] == ["--config"] else (None, words)


@cache
def _made(text: str) -> tuple[Config, str]:
    with contextlib.chdir(REPOSITORY):
        return load_config(*command(text)), serve_config_text(*command(text))


def served_text(documents: list[Document]) -> str:
    """Return ``serveConfigV2`` of the one RayService."""
    (service,) = of_kind(documents, "RayService")
    return str(service["spec"]["serveConfigV2"])


def configuration(documents: list[Document]) -> Config:
    """Return the configuration that is served.

    Raises:
        ConfigError: the command refuses it.
    """
    return _made(served_text(documents))[0]


def check(documents: list[Document]) -> Iterator[str]:
    """Compare the configuration with the command that makes it, then with ports, resources, environment and files of the pods."""
    text = served_text(documents)
    try:
        config, made = _made(text)
    except ConfigError as error:
        yield f"serveConfigV2: the command in its first line fails: {error}"
        return
    if made != text:
        line = next((one for one in text.splitlines() if one not in made.splitlines()), "the order of lines")
        yield f"serveConfigV2 is not what the command in its first line makes: {line}"
    (service,) = of_kind(documents, "RayService")
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    if f"\nray=={version}\n" not in (REPOSITORY / "constraints.txt").read_text():
        yield f"rayVersion is {version}, and constraints.txt has another"
    pods = ray_pods(documents)
    apis = [one for one in pods if re.search(rf"\b{config.server.api_resource}\b", _offered(one)) and not one.is_head]
    if [one.count for one in apis] != [config.server.api_replicas]:
        name, count = config.server.api_resource, config.server.api_replicas
        yield f"server.api_replicas is {count}: as many pods of one group must offer {name}"
    engines = [one for one in pods if not one.is_head and one not in apis]
    yield from _port_faults(config, pods, apis)
    yield from _place_faults(config, engines)
    for one in pods:
        faults = [*_environment_faults(documents, config, one), *_file_faults(documents, config, one)]
        yield from (f"{one.where}: {fault}" for fault in faults)
    yield from _redis_faults(documents, config.redis_url)


def _offered(pods: Pods) -> str:
    return str((pods.group or {}).get("rayStartParams", {}).get("resources", ""))


def _port_faults(config: Config, pods: list[Pods], apis: list[Pods]) -> Iterator[str]:
    server = config.server
    host, port = admin_address(server) or ("", None)
    for one in pods:
        if one.ports.get("serve") != server.port:
            yield f"{one.where}: server.port is {server.port}, and the container's port serve {one.ports.get('serve')}"
        if one.spec.get("terminationGracePeriodSeconds", 30) <= server.stop_timeout_s:
            yield f"{one.where}: terminationGracePeriodSeconds is not above server.stop_timeout_s, {server.stop_timeout_s}"
        if one in apis and one.ports.get("admin") != port:
            yield f"{one.where}: server.admin_port is {port}, and the container's port admin {one.ports.get('admin')}"
    for key, address in (("server.host", server.host), ("server.admin_host", host)):
        if is_loopback(address):
            yield f"{key} is {address}: no other pod reaches it; set 0.0.0.0"


def _place_faults(config: Config, engines: list[Pods]) -> Iterator[str]:
    """Place every group of ranks, first those of the engine, then those of the baseline."""
    if config.model.device == "auto":
        yield "model.device is auto: set cpu or cuda, on which the reserved resources depend"
        return
    each = {"CPU": Decimal(str(config.server.cpus_per_replica)), "GPU": Decimal(str(gpus_of_a_rank(config)))}
    free = [_processors(one) for one in engines for _ in range(one.count)]
    groups = [config.parallelism] * config.server.replicas
    if config.baseline.enabled:
        groups += [baseline_parallelism(config)] * config.baseline.replicas
    for number, group in enumerate(groups, start=1):
        if not _place(free, each, group_size(group), group.placement):
            need = " and ".join(f"{float(amount):g} {kind}" for kind, amount in each.items())
            yield f"group {number} of {len(groups)}: {group_size(group)} ranks of {need} find no place ({group.placement})"
            return
    if len(free) > len(groups):
        yield f"{len(free)} engine pods for {len(groups)} replicas: a pod without a replica is never ready"


def _processors(pods: Pods) -> dict[str, Decimal]:
    """Return what KubeRay tells Ray of one pod: its parameters, else the container's limits; CPUs are rounded up."""
    params = (pods.group or {}).get("rayStartParams", {})
    cpus = params.get("num-cpus", resource(pods.ray, "cpu").to_integral_value(ROUND_CEILING))
    return {"CPU": quantity(cpus), "GPU": quantity(params.get("num-gpus", resource(pods.ray, GPU)))}


def _place(free: list[dict[str, Decimal]], each: dict[str, Decimal], ranks: int, placement: str) -> bool:
    """Take the places of a group of ranks from the pods; return whether all ranks found one."""
    if placement == "STRICT_PACK":
        each, ranks = {kind: amount * ranks for kind, amount in each.items()}, 1
    for pod in free:
        while ranks and all(pod[kind] >= amount for kind, amount in each.items()):
            for kind, amount in each.items():
                pod[kind] -= amount
            ranks -= 1
            if placement == "STRICT_SPREAD":
                break
    return ranks == 0


def _environment_faults(documents: list[Document], config: Config, pods: Pods) -> Iterator[str]:
    """Serve builds the application on any node: each needs the environment."""
    found = environment(documents, pods.ray)
    for name, value in SERVE_SETTINGS.items():
        if found.get(name) != value:
            yield f"environment: {name} is {found.get(name)}, and outrider.cluster.cli.launch.serve sets {value}"
    if config.redis_url is not None:
        needed = [SECRET_VARIABLE] if config.cache.enabled else []
        needed += [PASSWORD_VARIABLE] if urlsplit(config.redis_url).username else []
        yield from (f"environment: no {name}, which redis_url needs" for name in needed if name not in found)


def _file_faults(documents: list[Document], config: Config, pods: Pods) -> Iterator[str]:
    """The files of secrets are mounted in every pod, the models in all but the head."""
    authority = parse_qs(urlsplit(config.redis_url or "").query).get("ssl_ca_certs", [None])[0]
    for path in filter(None, (config.tenancy.keys_file, authority)):
        mount = mount_of(pods.ray, path)
        files = files_of(documents, pods.volumes.get(mount["name"], {})) if mount else set()
        if mount is None or str(PurePosixPath(path).relative_to(mount["mountPath"])) not in files:
            yield f"no volume has the file {path}"
    for path in filter(None, (config.model.path, config.speculation.draft_model)):
        if not pods.is_head and mount_of(pods.ray, path) is None:
            yield f"{path}, the model, is under no mounted volume"


def _redis_faults(documents: list[Document], url: str | None) -> Iterator[str]:
    if url is not None:
        parts = urlsplit(url)
        if not behind(documents, f"{parts.hostname}:{parts.port or 6379}"):
            yield f"redis_url is at {parts.hostname}:{parts.port}, and no pod listens there"
        if parts.scheme != "rediss" or "ssl_ca_certs=" not in parts.query:
            yield "redis_url is not rediss with ssl_ca_certs: tenants' texts would travel in the clear"
