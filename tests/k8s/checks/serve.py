"""``serveConfigV2``: what Serve is to start, whether our configuration allows it, and whether the pods have what it needs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import shlex
import typing
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from itertools import zip_longest
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.app import gpus_of_a_rank
from cluster.cli.launch.preflight import PASSWORD_VARIABLE, SECRET_VARIABLE, baseline_parallelism, group_size
from cluster.cli.launch.serve import SERVE_SETTINGS
from cluster.cli.launch.serve_config import serve_config_text
from configs.schema import Config, ConfigError, check_values
from configs.server_checks import admin_address
from configs.tenancy_checks import is_loopback
from tests.k8s.checks.devices import GPU
from tests.k8s.checks.kuberay import start_resources
from tests.k8s.manifests import (
    REPOSITORY,
    SECRETS,
    Document,
    Pods,
    behind,
    environment,
    named,
    of_kind,
    ports_of,
    quantity,
    ray_pods,
    resource,
    serve_document,
)


def check(documents: list[Document]) -> list[str]:
    """All of it, for each RayService."""
    found = []
    for service in of_kind(documents, "RayService"):
        text = service["spec"].get("serveConfigV2", "")
        faults = [*_origin(text), *_version(service), *_of_text(documents, text)]
        found += [f"RayService {service['metadata']['name']}, serveConfigV2: {fault}" for fault in faults]
    return found


def _origin(text: str) -> Iterator[str]:
    """The document is what the command in its first line makes of ``configs``."""
    first = text.partition("\n")[0]
    words = shlex.split(first.removeprefix("# "))
    if words[:2] != ["outrider", "serve-config"] or not first.startswith("# "):
        yield "the first line is not the command that makes it, # outrider serve-config ..."
        return
    config, overrides = None, words[2:]
    if overrides[:1] == ["--config"]:
        config, overrides = Path(overrides[1]), overrides[2:]
    try:
        with contextlib.chdir(REPOSITORY):
            made = serve_config_text(config, overrides)
    except ConfigError as error:
        yield f"the command in its first line fails: {error}"
        return
    if made != text:
        lines = enumerate(zip_longest(text.splitlines(), made.splitlines()), start=1)
        number, line = next(((number, ours) for number, (ours, theirs) in lines if ours != theirs), (0, "how it ends"))
        yield f"line {number} is not what the command in its first line makes, run it again: {line}"


def _version(service: Document) -> Iterator[str]:
    pin = re.search(r"^ray==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    version = service["spec"]["rayClusterConfig"].get("rayVersion")
    if pin is None or version != pin[1]:
        yield f"rayClusterConfig.rayVersion is {version}, and constraints.txt has ray=={pin and pin[1]}"


def _of_text(documents: list[Document], text: str) -> list[str]:
    try:
        document = yaml.safe_load(text)
        ServeDeploySchema.model_validate(document)
    except yaml.YAMLError as error:
        return [f"not yaml: {' '.join(str(error).split())}"]
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    faults = [*_unknown(document, ServeDeploySchema, "")]
    for application in document["applications"]:
        faults += _target(application["import_path"])
        try:
            config = Config.model_validate(application.get("args", {}))
            check_values(config)
        except ValidationError as error:
            faults += [f"args.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        except ConfigError as error:
            faults.append(f"args: {error}")
        else:
            faults += _of_config(documents, config)
    return faults


def _unknown(value: object, annotation: object, where: str) -> Iterator[str]:
    """Keys that Serve would not read; it refuses none."""
    if isinstance(value, list):
        inner = next((one for one in (annotation, *typing.get_args(annotation)) if typing.get_origin(one) is list), None)
        for at, entry in enumerate(value):
            yield from _unknown(entry, (typing.get_args(inner) or (None,))[0], f"{where}{at}.")
    if not isinstance(value, dict):
        return
    models = [one for one in (annotation, *typing.get_args(annotation)) if inspect.isclass(one) and issubclass(one, BaseModel)]
    for model in models[:1]:
        known = {name: field.annotation for name, field in model.model_fields.items()}
        for key, inner in value.items():
            if key not in known:
                yield f"unknown key {where}{key}; {model.__name__} has {', '.join(known)}"
            else:
                yield from _unknown(inner, known[key], f"{where}{key}.")


def _target(import_path: str) -> Iterator[str]:
    module, _, name = import_path.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        yield f"import_path {import_path}: {error}"
        return
    annotations = (
        [parameter.annotation for parameter in inspect.signature(target).parameters.values()] if callable(target) else []
    )
    if annotations != [Config]:
        yield f"import_path {import_path} is no function of one Config"


def _of_config(documents: list[Document], config: Config) -> Iterator[str]:
    pods = ray_pods(documents)
    name = config.server.api_resource
    apis = [one for one in pods if name is None or name in _offered(one)]
    if name is not None and (len(apis) != 1 or apis[0].is_head):
        groups = ", ".join(one.where for one in apis) or "none"
        yield f"server.api_resource is {name}: one worker group's rayStartParams.resources must offer it, and {groups} does"
    elif name is not None and apis[0].count != config.server.api_replicas:
        yield f"{apis[0].where}: {apis[0].count} pods, and server.api_replicas is {config.server.api_replicas}"
    engines = [one for one in pods if not one.is_head and (name is None or one not in apis)]
    yield from _ports(documents, config, pods, apis)
    yield from _room(config, engines)
    for one in pods:
        faults = [*_environment(documents, config, one), *_files(config, one, one in apis or one in engines)]
        yield from (f"{one.where}: {fault}" for fault in faults)
    if config.redis_url is not None:
        yield from _redis(documents, config.redis_url)


def _offered(pods: Pods) -> dict[str, float]:
    try:
        return start_resources(pods.group or {})
    except (ValueError, TypeError):
        return {}


def _ports(documents: list[Document], config: Config, pods: list[Pods], apis: list[Pods]) -> Iterator[str]:
    server, http = config.server, serve_document(documents).get("http_options", {})
    if (http.get("host"), http.get("port")) != (server.host, server.port):
        yield f"http_options are {http}, and server.host and server.port {server.host} and {server.port}"
    if is_loopback(server.host):
        yield f"server.host is {server.host}: nobody reaches it from outside the pod; set 0.0.0.0"
    for one in pods:
        if ports_of(one).get("serve") != server.port:
            yield f"{one.where}: server.port is {server.port}, and the container's port serve {ports_of(one).get('serve')}"
    host, port = admin_address(server) or ("", None)
    for one in apis:
        if ports_of(one).get("admin") != port:
            yield f"{one.where}: server.admin_port is {port}, and the container's port admin {ports_of(one).get('admin')}"
    if port is not None and is_loopback(host):
        yield f"server.admin_host is {host}: Prometheus does not reach it; set 0.0.0.0"
    for one in pods:
        if one.spec.get("terminationGracePeriodSeconds", 30) <= server.stop_timeout_s:
            yield f"{one.where}: terminationGracePeriodSeconds is not above server.stop_timeout_s, {server.stop_timeout_s}"


def _room(config: Config, engines: list[Pods]) -> Iterator[str]:
    """Every group of ranks has its place: first those of the engine, then those of the baseline."""
    if config.model.device == "auto":
        yield "model.device is auto: say cpu or cuda, for what is reserved depends on it"
        return
    each = {"CPU": Decimal(str(config.server.cpus_per_replica)), "GPU": Decimal(str(gpus_of_a_rank(config)))}
    pods = [_processors(one) for one in engines for _ in range(one.count)]
    wanted = [(group_size(config.parallelism), config.parallelism.placement)] * config.server.replicas
    if config.baseline.enabled:
        other = baseline_parallelism(config)
        wanted += [(group_size(other), other.placement)] * config.baseline.replicas
    for number, (ranks, placement) in enumerate(wanted):
        if not _place(pods, each, ranks, placement):
            need = " and ".join(f"{float(amount * ranks):g} {kind}" for kind, amount in each.items() if amount)
            where = "in one pod" if placement == "STRICT_PACK" and ranks > 1 else "in the pods"
            yield f"group {number + 1} of {len(wanted)}, {ranks} ranks, finds no {need} {where} of the engines"
            return
    count = sum(one.count for one in engines)
    if count > len(wanted):
        yield f"{count} engine pods for {len(wanted)} replicas: a pod without a replica is never ready"


def _processors(pods: Pods) -> dict[str, Decimal]:
    """What KubeRay tells Ray of one pod: its parameters, else the container's limits; CPUs are rounded up."""
    params = (pods.group or {}).get("rayStartParams", {})
    cpus, gpus = quantity(params.get("num-cpus")), quantity(params.get("num-gpus"))
    return {
        "CPU": resource(pods.ray, "cpu").to_integral_value(ROUND_CEILING) if cpus is None else cpus,
        "GPU": resource(pods.ray, GPU) if gpus is None else gpus,
    }


def _place(pods: list[dict[str, Decimal]], each: dict[str, Decimal], ranks: int, placement: str) -> bool:
    """Takes the places of a group of ranks from the pods; False if there are too few."""
    if placement == "STRICT_PACK":
        each, ranks = {kind: amount * ranks for kind, amount in each.items()}, 1
    free = [pod for pod in pods if _fits(pod, each)]
    if placement == "STRICT_SPREAD":
        free = free[:ranks]
    taken = 0
    for pod in free:
        while taken < ranks and _fits(pod, each):
            for kind, amount in each.items():
                pod[kind] -= amount
            taken += 1
            if placement == "STRICT_SPREAD":
                break
    return taken == ranks


def _fits(pod: dict[str, Decimal], each: dict[str, Decimal]) -> bool:
    return all(pod[kind] >= amount for kind, amount in each.items())


def _environment(documents: list[Document], config: Config, pods: Pods) -> Iterator[str]:
    """Serve builds the application on any node, so that each has what it reads then."""
    found = environment(documents, pods.ray)
    for name, value in SERVE_SETTINGS.items():
        if found.get(name) != value:
            yield f"environment: {name} is {found.get(name)}, and cluster.cli.launch.serve sets {value}"
    if config.redis_url is not None and config.cache.enabled and SECRET_VARIABLE not in found:
        yield f"environment: no {SECRET_VARIABLE}, which redis_url needs"
    if config.redis_url is not None and urlsplit(config.redis_url).username and PASSWORD_VARIABLE not in found:
        yield f"environment: no {PASSWORD_VARIABLE}, and redis_url names a user without a password"


def _files(config: Config, pods: Pods, has_model: bool) -> Iterator[str]:
    """What the configuration names by path is mounted there."""
    paths = {"tenancy.keys_file": config.tenancy.keys_file}
    if config.redis_url is not None:
        paths["redis_url's ssl_ca_certs"] = next(iter(parse_qs(urlsplit(config.redis_url).query).get("ssl_ca_certs", ())), None)
        if paths["redis_url's ssl_ca_certs"] is None and config.redis_url.startswith("rediss://"):
            yield "redis_url has no ssl_ca_certs: our Redis' certificate is signed by nobody that the image knows"
    for what, path in paths.items():
        if path is not None and not _is_mounted(pods, path):
            yield f"{what} is {path}, and no volume has that file"
    models = [path for path in (config.model.path, config.speculation.draft_model) if path is not None]
    for path in models if has_model else ():
        if _mount(pods, path) is None:
            yield f"{path}, the model, is under no mounted volume"


def _mount(pods: Pods, path: str) -> Document | None:
    """The mount of Ray's container that a path is under; of several the innermost."""
    mounts = [mount for mount in pods.ray.get("volumeMounts", ()) if Path(path).is_relative_to(mount["mountPath"])]
    return max(mounts, key=lambda mount: len(mount["mountPath"]), default=None)


def _is_mounted(pods: Pods, path: str) -> bool:
    """Whether a path is a file of a mounted secret."""
    mount = _mount(pods, path)
    if mount is None:
        return False
    volume = next((one for one in pods.spec.get("volumes", ()) if one["name"] == mount["name"]), {})
    secret = volume.get("secret", {})
    items = {item["path"] for item in secret["items"]} if "items" in secret else SECRETS.get(secret.get("secretName"), set())
    return mount.get("subPath", str(Path(path).relative_to(mount["mountPath"]))) in items


def _redis(documents: list[Document], url: str) -> Iterator[str]:
    parts = urlsplit(url)
    address = f"{parts.hostname}:{parts.port or 6379}"
    if named(documents, "Service", (parts.hostname or "").split(".")[0]) is None:
        yield f"redis_url is at {parts.hostname}, and no Service has that name"
    elif not behind(documents, address):
        yield f"redis_url is at {address}, and no pod listens there"
    if parts.scheme != "rediss":
        yield f"redis_url begins with {parts.scheme}, not rediss: what tenants generate would travel in the clear"
    if parts.password:
        yield "redis_url has a password, which everybody can read there: leave it to the environment"
