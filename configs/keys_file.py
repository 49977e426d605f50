"""Reader of ``tenancy.keys_file``: tenants and their API keys, separate from the configuration, such as a mounted secret."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from outrider.configs.schema import ConfigError
from outrider.configs.slices import TenancyOptions, TenantOptions
from outrider.configs.tenancy_checks import KEY_ADVICE, entry_faults


@dataclass(frozen=True, config={"extra": "forbid"})
class _Keys:
    tenants: dict[str, TenantOptions] = dataclasses.field(default_factory=dict)
    admin_keys: tuple[str, ...] = ()


def with_keys_file(section: TenancyOptions, required: bool = False) -> TenancyOptions:
    """Return the section merged with its file; the section itself if it names none. ``required``: some tenant must have a key.

    A tenant in both has the keys of both; any other option has the file's value, if the file sets it.

    Raises ConfigError if the file is unreadable, the result is invalid, or a required key is missing. The message names file and
    field, and no value: it may be a key.
    """
    whole = section if section.keys_file is None else _with_keys(section, Path(section.keys_file))
    if required and not any(tenant.keys for tenant in whole.tenants.values()):
        raise ConfigError(
            "requests need an API key, and no tenant has one: outrider new-key makes a key and its hash for "
            f"tenancy.tenants.NAME.keys or tenancy.keys_file (now {section.keys_file}); or set server.require_key=false"
        )
    return whole


def with_tenants_of_file(section: TenancyOptions) -> TenancyOptions:
    """Return the section with the file's tenants and quotas, needed at start. Raises the errors of ``with_keys_file``."""
    tenants = {
        # The file's keys and limits may change later.
        name: dataclasses.replace(section.tenants.get(name, TenantOptions()), cache_mib=tenant.cache_mib)
        for name, tenant in with_keys_file(section).tenants.items()
    }
    return dataclasses.replace(section, tenants=tenants)


def _with_keys(section: TenancyOptions, path: Path) -> TenancyOptions:
    keys = _read(path)
    tenants = dict(section.tenants)
    for name, tenant in keys.tenants.items():
        tenants[name] = _joined(tenants.get(name, TenantOptions()), tenant)
    whole = dataclasses.replace(section, tenants=tenants, admin_keys=_once([*section.admin_keys, *keys.admin_keys]))
    faults = entry_faults(whole)
    if faults:
        raise ConfigError(f"tenancy.keys_file {section.keys_file}: {'; '.join(faults)}")
    return whole


def _read(path: Path) -> _Keys:
    where = f"tenancy.keys_file {path}"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{where} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own message would show the line
        line = "" if mark is None else f", see line {mark.line + 1}"
        raise ConfigError(f"{where} is not yaml{line}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold tenants, admin_keys, or both")
    filled = {key: {} if value is None and key == "tenants" else value for key, value in data.items()}
    try:
        return TypeAdapter(_Keys).validate_python(filled)
    except ValidationError as error:
        faults = dict.fromkeys(_fault(details["loc"], details["type"]) for details in error.errors())
        raise ConfigError(f"{where}: {'; '.join(faults)}") from None


def _fault(loc: tuple[int | str, ...], kind: str) -> str:
    key = ".".join(str(part) for part in loc)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {key}"
    if "keys" in loc or "admin_keys" in loc:
        return f"{key} is not a hash of a key; allowed: a list of {KEY_ADVICE}"
    return f"{key} has a value that is not allowed"


def _joined(own: TenantOptions, added: TenantOptions) -> TenantOptions:
    options = {
        field.name: value
        for field in dataclasses.fields(added)
        if field.name != "keys" and (value := getattr(added, field.name)) is not None
    }
    return dataclasses.replace(own, keys=_once([*own.keys, *added.keys]), **options)


def _once(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(keys))
