"""Reads a configuration: a yaml file, then ``key=value`` overrides, checked as a whole."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions

REPOSITORY = Path(__file__).resolve().parent.parent

_SLICES: dict[str, type] = {
    "model": ModelOptions,
    "engine": EngineOptions,
    "speculation": SpeculationOptions,
    "server": ServerOptions,
}

_BOUNDS: dict[str, tuple[float, float]] = {  # lowest and highest value of a number, both allowed
    "model.max_model_len": (2, 2**24),
    "model.threads": (1, 4096),
    "engine.max_running": (1, 4096),
    "engine.max_step_tokens": (1, 2**20),
    "engine.max_waiting": (0, 2**20),
    "speculation.max_draft_tokens": (0, 4096),
    "server.port": (1, 65535),
    "server.replicas": (1, 1024),
    "server.cpus_per_replica": (0, 4096),
    "server.gpus_per_replica": (0, 64),
    "server.max_ongoing_requests": (1, 2**20),
    "server.start_timeout_s": (1, 86400),
    "server.stop_timeout_s": (0, 3600),
}


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key, what was given, and what is allowed."""


class Config(BaseModel):
    """Everything that can be set. Each class is given its own slice; defaults live in ``configs/slices.py``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelOptions = Field(default_factory=ModelOptions)
    engine: EngineOptions = Field(default_factory=EngineOptions)
    speculation: SpeculationOptions = Field(default_factory=SpeculationOptions)
    server: ServerOptions = Field(default_factory=ServerOptions)
    redis_url: str | None = None  # an embedded Redis is started when absent


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a yaml file with overrides on top; defaults where neither speaks.

    Args:
        path: a yaml file; None for the defaults.
        overrides: ``key=value`` with dots in the key, such as ``server.port=8001``. Values are read as yaml.

    Raises:
        ConfigError: no such file, not yaml, an unknown key, or a value that is not allowed.
    """
    data = {} if path is None else _read_yaml(path)
    for override in overrides:
        _apply(data, override)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(details) for details in error.errors())) from None
    for key, (low, high) in _BOUNDS.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{key} is {value}; allowed: {low} to {high}")
    model = dataclasses.replace(config.model, path=find_model(config.model.path))
    return config.model_copy(update={"model": model})


def find_model(path: str) -> str:
    """The absolute path of a model folder given relative to the working directory or, failing that, to the repository.

    What is in neither place comes back as it is: it may be a name on the hub.
    """
    expanded = Path(path).expanduser()
    for base in (Path.cwd(), REPOSITORY):
        if (base / expanded).is_dir():
            return str((base / expanded).resolve())
    return path


def keys() -> Iterator[str]:
    """Every key that may be set, in the form that an override takes."""
    for section, options in _SLICES.items():
        yield from (f"{section}.{field.name}" for field in dataclasses.fields(options))
    yield "redis_url"


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
    # An empty section in yaml reads as None; it means its defaults.
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
    return [field.name for field in dataclasses.fields(_SLICES[section])]


def _describe(details: ErrorDetails) -> str:
    """One sentence about one of pydantic's findings."""
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(key)
    allowed = details["msg"].removeprefix("Input should be ").split(", unable to parse")[0]
    return f"{key} is {_given(details['input'])}; allowed: {allowed}"


def _unknown(key: str) -> str:
    known = list(keys())
    # A key without its section is the commonest slip: compare the last parts as well.
    by_name = {name.rpartition(".")[2]: name for name in known}
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
