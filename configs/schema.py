"""Loading and validation of a configuration: a yaml file, then ``key=value`` overrides."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from outrider.configs.server_checks import server_faults
from outrider.configs.slices import (
    AuditOptions,
    BaselineOptions,
    CacheOptions,
    EmulationOptions,
    EngineOptions,
    LimitsOptions,
    ModelOptions,
    ParallelismOptions,
    ServerOptions,
    SpeculationOptions,
    TenancyOptions,
    TenantOptions,
)
from outrider.configs.tenancy_checks import KEY_ADVICE, LIMIT_BOUNDS, TENANT_NAME, tenancy_faults

REPOSITORY = Path(__file__).resolve().parent.parent

MAX_WORLD_SIZE = 64
_WORLD_SIZES = f"1 to {MAX_WORLD_SIZE}, or auto"
_CENTURY_S = 100 * 366 * 86400
_MIB = (0.001, 2**20)
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # braces would break the hash tag that keeps all keys in one slot of a Cluster

_BOUNDS: dict[str, tuple[float, float]] = {  # lowest and highest allowed value
    "model.max_model_len": (2, 2**24),
    "model.threads": (1, 4096),
    "engine.max_running": (1, 4096),
    "engine.kv_slots": (1, 2**16),
    "engine.max_step_tokens": (1, 2**20),
    "engine.gpu_memory_utilization": (0.001, 1),
    "engine.max_waiting": (0, 2**20),
    "engine.max_wait_s": (0, 86400),
    "speculation.max_draft_tokens": (0, 4096),
    "speculation.largest_tree": (1, 512),
    "speculation.max_settings": (0, 64),
    # Below the two minutes after which a waiting leader itself counts as hanging.
    "parallelism.rank_timeout_s": (0.2, 100),
    "parallelism.step_timeout_s": (0.2, 100),
    "emulation.time_dilation": (1, 16),
    "emulation.drafter_ms": (0, 1000),
    "server.port": (1, 65535),
    "server.admin_port": (1, 65535),
    "server.max_queued": (1, 2**20),
    "server.replicas": (0, 1024),
    "server.max_replicas": (1, 1024),
    "server.api_replicas": (1, 64),
    "server.target_tokens_per_s": (0.001, 2**30),
    "server.cpus_per_replica": (0, 4096),
    "server.gpus_per_replica": (0, 64),
    "server.start_timeout_s": (1, 86400),
    "server.stop_timeout_s": (0, 3600),
    "server.resume_timeout_s": (0, 86400),
    "cache.tenant_mib": _MIB,
    "cache.public_mib": _MIB,
    "cache.ttl_s": (1, _CENTURY_S),
    "cache.services": (1, 64),
    "cache.timeout_s": (0.01, 60),
    "cache.start_timeout_s": (0, 86400),
    "limits.requests_per_minute": LIMIT_BOUNDS,
    "limits.tokens_per_minute": LIMIT_BOUNDS,
    "limits.max_concurrent": LIMIT_BOUNDS,
    "limits.max_request_bytes": (1024, 2**31),
    "limits.max_prompt_tokens": (1, 2**24),
    "limits.max_reference_tokens": (0, 2**24),
    "limits.max_output_tokens": (1, 2**24),
    "limits.request_timeout_s": (0.01, 86400),
    "audit.keep": (0, 65536),
    "audit.sample": (0, 1),
    "baseline.replicas": (1, 1024),
    "baseline.world_size": (2, MAX_WORLD_SIZE),
    "baseline.shadow": (0, 1),
}


class ConfigError(ValueError):
    """Error of an invalid configuration. The message names the key, the given value, and the allowed values."""


class Config(BaseModel):
    """All settings. Each class gets its own section; defaults are in ``configs/slices.py``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelOptions = Field(default_factory=ModelOptions)
    engine: EngineOptions = Field(default_factory=EngineOptions)
    speculation: SpeculationOptions = Field(default_factory=SpeculationOptions)
    parallelism: ParallelismOptions = Field(default_factory=ParallelismOptions)
    emulation: EmulationOptions = Field(default_factory=EmulationOptions)
    server: ServerOptions = Field(default_factory=ServerOptions)
    cache: CacheOptions = Field(default_factory=CacheOptions)
    tenancy: TenancyOptions = Field(default_factory=TenancyOptions)
    limits: LimitsOptions = Field(default_factory=LimitsOptions)
    audit: AuditOptions = Field(default_factory=AuditOptions)
    baseline: BaselineOptions = Field(default_factory=BaselineOptions)
    redis_url: str | None = None  # an embedded Redis is started when absent

    @model_validator(mode="after")
    def _check_tenancy(self) -> Config:
        # Here instead of in ``load_config``: tenant isolation is checked however a configuration is created.
        faults = tenancy_faults(self.tenancy, self.server.host, self.server.require_key)
        if faults:
            raise PydanticCustomError("tenancy", "{faults}", {"faults": "; ".join(faults)})
        return self


_SLICES: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items() if name != "redis_url"}


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a yaml file (None: defaults) with ``key=value`` overrides. Raises ConfigError."""
    data = read_settings(path, overrides)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        # Each type of a union has a separate error; report them once.
        raise ConfigError("; ".join(dict.fromkeys(_describe(details) for details in error.errors()))) from None
    check_values(config)
    adapters = {name: str(Path(path).expanduser().absolute()) for name, path in config.model.adapters.items()}
    emulation = config.emulation
    if emulation.outputs is not None:  # actors have other working directories
        emulation = dataclasses.replace(emulation, outputs=str(Path(emulation.outputs).expanduser().absolute()))
    if emulation.model is not None:
        emulation = dataclasses.replace(emulation, model=find_model(emulation.model))
    model = dataclasses.replace(config.model, path=_found(config.model), adapters=adapters)
    speculation = config.speculation
    if speculation.draft_model is not None:
        speculation = dataclasses.replace(speculation, draft_model=find_model(speculation.draft_model))
    tenancy = config.tenancy
    if tenancy.keys_file is not None:  # actors have other working directories
        tenancy = dataclasses.replace(tenancy, keys_file=str(Path(tenancy.keys_file).expanduser().absolute()))
    changes = {"model": model, "emulation": emulation, "speculation": speculation, "tenancy": tenancy}
    return config.model_copy(update=changes)


def _found(model: ModelOptions) -> str:
    """Return the model's path from ``find_model``, with its revision as ``NAME@REVISION``. Raises ConfigError."""
    path = find_model(model.path)
    if model.revision is None:
        return path
    if path.count("/") != 1 or path.endswith(".gguf") or Path(path).exists():
        raise ConfigError(
            f"model.revision is {model.revision!r}, but model.path is {model.path!r}; allowed: with a name on the hub, OWNER/NAME"
        )
    return f"{path}@{model.revision}"


def read_settings(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the unchecked settings of a yaml file and overrides by section. Raises ConfigError if one cannot be parsed."""
    data = {} if path is None else _read_yaml(path)
    for override in overrides:
        _apply(data, override)
    return data


def find_model(path: str) -> str:
    """Return the absolute path of a folder or GGUF file, relative to the working directory or else to the repository."""
    expanded = Path(path).expanduser()
    for base in (Path.cwd(), REPOSITORY):
        found = base / expanded
        if found.is_dir() or (found.suffix == ".gguf" and found.is_file()):
            return str(found.resolve())
    # Found in neither: it may be a name for ``engine.loading.model_files.find_files``.
    return path


def keys() -> Iterator[str]:
    """Yield every key that may be set, in the form of an override."""
    for section in _SLICES:
        yield from (f"{section}.{name}" for name in _fields(section))
    yield "redis_url"


def tenant_names(config: Config) -> tuple[str, ...]:
    """Return all tenants in alphabetical order, including the one of requests without a key, listed or not."""
    anonymous = config.tenancy.anonymous
    return tuple(sorted({*config.tenancy.tenants, *([] if anonymous is None else [anonymous])}))


def check_values(config: Config) -> None:
    """Raise ConfigError for a number out of bounds, contradicting values, or an invalid prefix of Redis keys."""
    for key, (low, high) in _BOUNDS.items():
        section, name = key.split(".")
        _check_bounds(key, getattr(getattr(config, section), name), low, high)
    for tenant, options in config.tenancy.tenants.items():
        _check_bounds(f"tenancy.tenants.{tenant}.cache_mib", options.cache_mib, *_MIB)
    if not _PREFIX.fullmatch(config.cache.prefix):
        raise ConfigError(f"cache.prefix is {config.cache.prefix!r}; allowed: 1 to 64 characters out of A-Z a-z 0-9 _ . : -")
    _check_adapters(config)
    _check_parallelism(config)
    _check_emulation(config)
    for key, mode in (("parallelism.mode", config.parallelism.mode), ("baseline.kind", config.baseline.kind)):
        if mode in ("tensor", "pipeline") and config.model.weights in ("int8", "int4"):
            raise ConfigError(
                f"{key} is {mode}, where model.weights={config.model.weights} is not supported; leave one of them out"
            )
    if config.baseline.shadow and not config.baseline.enabled:
        raise ConfigError(
            f"baseline.shadow is {config.baseline.shadow:g}, but there is no baseline: set baseline.enabled=true, or leave it out"
        )
    for fault in server_faults(config.server):
        raise ConfigError(fault)


def _check_adapters(config: Config) -> None:
    """Raise ConfigError for an invalid adapter name, or options that adapters do not support."""
    for name in config.model.adapters:
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(f"model.adapters: {name!r} cannot name one; allowed: 1 to 64 characters out of A-Z a-z 0-9 _ . -")
        if name in config.model.names:
            raise ConfigError(f"model.adapters: {name!r} is the model's own name; choose another, or set model.served_name")
    for key, mode in (("parallelism.mode", config.parallelism.mode), ("baseline.kind", config.baseline.kind)):
        if config.model.adapters and mode in ("tensor", "pipeline") and (key != "baseline.kind" or config.baseline.enabled):
            raise ConfigError(f"model.adapters cannot be split: {key} is {mode}; leave one of them out")


def _check_emulation(config: Config) -> None:
    """Raise ConfigError for options of emulated GPUs without one, and for those that an emulated GPU does not support."""
    options = config.emulation
    if options.device is None:
        defaults = EmulationOptions()
        for field in dataclasses.fields(options):
            if getattr(options, field.name) != getattr(defaults, field.name):
                given = f"emulation.{field.name} is {getattr(options, field.name)}"
                raise ConfigError(f"{given}, but no GPU is emulated: set emulation.device (--emulate), or leave it out")
        return
    where = f"emulation.device is {options.device}"
    if options.model is None:
        raise ConfigError(f"{where} without a model to time: set emulation.model (--as), such as llama-3.1-8b")
    if config.model.device != "cpu":
        raise ConfigError(
            f"{where} and model.device is {config.model.device}: emulated GPUs wait on the CPU; set model.device=cpu, or leave "
            "emulation.device out to use a GPU of this machine"
        )
    if config.speculation.draft_model is not None:
        raise ConfigError(
            f"{where}, where speculation.draft_model is not supported, since its time is not emulated; leave it out"
        )


def _check_parallelism(config: Config) -> None:
    options = config.parallelism
    if options.world_size != "auto" and not 1 <= options.world_size <= MAX_WORLD_SIZE:
        raise ConfigError(f"parallelism.world_size is {options.world_size}; allowed: {_WORLD_SIZES}")
    if options.step_timeout_s < options.rank_timeout_s:
        raise ConfigError(
            f"parallelism.step_timeout_s is {options.step_timeout_s}; allowed: at least parallelism.rank_timeout_s, "
            f"which is {options.rank_timeout_s}"
        )
    if options.mode in ("tensor", "pipeline"):
        _check_parts(config)
    if options.mode != "none" and options.world_size == "auto" and options.placement != "STRICT_PACK":
        raise ConfigError(
            f"parallelism.placement is {options.placement} and parallelism.world_size is auto: such groups are formed by the "
            "replicas of one node; set world_size to a number, or leave placement out"
        )
    server = config.server
    if options.mode == "lookahead" and options.world_size == "auto" and server.most_replicas != server.replicas:
        raise ConfigError(
            f"parallelism.world_size is auto and server.max_replicas is {server.max_replicas}: the size of such groups "
            "is fixed at the start; set world_size to a number, or leave max_replicas out"
        )
    if options.pin_threads and options.mode != "none" and options.world_size != "auto" and server.most_replicas > 1:
        raise ConfigError(
            f"parallelism.pin_threads is true and server.replicas is {server.most_replicas}: groups on one node would be put on "
            "the same cores; set one of them to its default"
        )


def _check_parts(config: Config) -> None:
    """Raise ConfigError for options that tensor and pipeline parallelism do not support."""
    options = config.parallelism
    where = f"parallelism.mode is {options.mode}"
    if options.world_size == "auto" or options.world_size < 2:
        raise ConfigError(f"{where} and parallelism.world_size is {options.world_size}; allowed: 2 to {MAX_WORLD_SIZE}")
    if options.placement != "STRICT_PACK":
        raise ConfigError(f"{where} and parallelism.placement is {options.placement}; allowed: STRICT_PACK, ranks on one node")
    if options.pin_threads:
        raise ConfigError(f"{where} and parallelism.pin_threads is true, which requires mode lookahead; leave it out")
    if config.speculation.draft_model is not None:
        raise ConfigError(f"{where}, where speculation.draft_model is not supported; leave one of them out")
    if config.engine.compile:
        raise ConfigError(f"{where}, where engine.compile=true is not supported; leave it out, or set another mode")


def _check_bounds(key: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{key} is {value}; allowed: {low} to {high}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; the ones that come with it are in {REPOSITORY / 'configs'}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not yaml: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold sections ({', '.join(_SLICES)}), not {_given(data)}")
    # An empty section in yaml parses as None; it means the defaults.
    return {key: {} if value is None and key in _SLICES else value for key, value in data.items()}


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        raise ConfigError(f"{override!r} is not of the form key=value, such as server.port=8001")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{'.'.join(parts)}: {text!r} is not a yaml value; quote it") from None
    if len(parts) == 1 and parts[0] in _SLICES:
        raise ConfigError(f"{parts[0]} is a section; set one of its keys, such as {parts[0]}.{_fields(parts[0])[0]}={text}")
    node = data
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(_unknown(".".join(parts)))
        node = child
    node[parts[-1]] = value


def _fields(section: str) -> list[str]:
    names = [field.name for field in dataclasses.fields(_SLICES[section])]
    if section != "tenancy":
        return names
    tenant = [f"tenants.NAME.{field.name}" for field in dataclasses.fields(TenantOptions)]
    return [*(name for name in names if name != "tenants"), *tenant]


def _describe(details: ErrorDetails) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(key)
    if details["type"] == "tenancy":
        return details["msg"]
    where = details["loc"]
    if where[:2] == ("parallelism", "world_size"):
        return f"parallelism.world_size is {_given(details['input'])}; allowed: {_WORLD_SIZES}"
    if where[:2] == ("tenancy", "admin_keys") or (where[:2] == ("tenancy", "tenants") and where[3:4] == ("keys",)):
        expected = "a hash of a key" if isinstance(where[-1], int) else "a list of hashes of keys"
        return f"{key} is not {expected}; allowed: {KEY_ADVICE}"  # the value may be a key: do not show it
    allowed = details["msg"].removeprefix("Input should be ").split(", unable to parse")[0].replace("a valid tuple", "a list")
    return f"{key} is {_given(details['input'])}; allowed: {allowed}"


def _unknown(key: str) -> str:
    tenant, _, last = key.removeprefix("tenancy.tenants.").rpartition(".")
    inside = bool(tenant and last) and key.startswith("tenancy.tenants.")
    known = [name.replace(".NAME.", f".{tenant}.") if inside else name for name in keys()]
    # A key without its section is the most common mistake: compare the last parts too.
    by_name = {name.rpartition(".")[2]: name for name in reversed(known)}  # of equal names the first
    near = difflib.get_close_matches(key, known, n=1) or [
        by_name[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1)
    ]
    advice = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key}; {advice}"


def _given(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)
