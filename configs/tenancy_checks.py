"""Checks of tenants and their API keys, beyond the types of the values."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from outrider.configs.slices import TenancyOptions, TenantOptions

KEY_ADVICE = "sha256: and the 64 hex digits of an API key's hash; outrider new-key makes a key and its hash"
TENANT_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]{1,64}")  # . and .. have another meaning in URLs
_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
LIMIT_BOUNDS = (1, 2**40)  # bounds of a number of requests or tokens
WEIGHT_BOUNDS = (0.01, 100.0)  # bounds of a tenant's weight
_OWN_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")


def tenancy_faults(tenancy: TenancyOptions, host: str, require_key: bool | None = None) -> list[str]:
    """Return one sentence for each fault. An invalid hash is not shown: it may be the key itself."""
    needed = list(_needed(tenancy, host, require_key))
    return [*entry_faults(tenancy), *(list(_anonymous(tenancy, host)) or needed)]


def entry_faults(tenancy: TenancyOptions) -> list[str]:
    """Return the faults of the tenants and keys, independent of the server's address."""
    limits = (fault for name, tenant in tenancy.tenants.items() for fault in _limits(name, tenant))
    return [*_names(tenancy), *_hashes(tenancy), *limits]


def key_is_required(require_key: bool | None, host: str) -> bool:
    """Return whether requests need a key: as configured, else if other machines can reach the server."""
    return not is_loopback(host) if require_key is None else require_key


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens at ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name: its address is not known here
        return False


def _names(tenancy: TenancyOptions) -> Iterator[str]:
    names = [("tenancy.tenants", name) for name in tenancy.tenants]
    if tenancy.anonymous is not None:
        names.append(("tenancy.anonymous", tenancy.anonymous))
    for where, name in names:
        if not TENANT_NAME.fullmatch(name):
            yield f"{where}: {name!r} cannot name a tenant; allowed: 1 to 64 characters out of A-Z a-z 0-9 _ . -"


def _hashes(tenancy: TenancyOptions) -> Iterator[str]:
    for index, text in enumerate(tenancy.admin_keys):
        if not _KEY_HASH.fullmatch(text):
            yield f"tenancy.admin_keys.{index} is not a hash of a key; allowed: {KEY_ADVICE}"
    owners: dict[str, str] = {}
    for name, options in tenancy.tenants.items():
        for index, text in enumerate(options.keys):
            if not _KEY_HASH.fullmatch(text):
                yield f"tenancy.tenants.{name}.keys.{index} is not a hash of a key; allowed: {KEY_ADVICE}"
            elif (owner := owners.setdefault(text, name)) != name:
                yield f"tenancy.tenants: {owner} and {name} have the same key {text[:15]}...; a key belongs to one tenant"


def _limits(name: str, tenant: TenantOptions) -> Iterator[str]:
    low, high = LIMIT_BOUNDS
    for limit in _OWN_LIMITS:
        value = getattr(tenant, limit)
        if value is not None and not low <= value <= high:
            yield f"tenancy.tenants.{name}.{limit} is {value}; allowed: {low} to {high}"
    lightest, heaviest = WEIGHT_BOUNDS
    if not lightest <= tenant.weight <= heaviest:
        yield f"tenancy.tenants.{name}.weight is {tenant.weight}; allowed: {lightest:g} to {heaviest:g}"
    if not -(2**31) <= tenant.min_priority < 2**31:
        yield f"tenancy.tenants.{name}.min_priority is {tenant.min_priority}; allowed: -2**31 to 2**31 - 1"


def _needed(tenancy: TenancyOptions, host: str, require_key: bool | None) -> Iterator[str]:
    """Yield faults if keys are required: none exists, or requests without a key have a tenant."""
    if not key_is_required(require_key, host):
        return
    if tenancy.anonymous is not None:
        yield (
            f"server.require_key is {require_key} and tenancy.anonymous is {tenancy.anonymous!r}, the tenant of requests without "
            "a key; set tenancy.anonymous=null, or server.require_key=false"
        )
    if tenancy.keys_file is None and not any(tenant.keys for tenant in tenancy.tenants.values()):
        why = "server.require_key is true" if require_key else f"other machines reach server.host {host!r}"
        yield (
            f"{why}, and no tenant has an API key: give one to tenancy.tenants.NAME.keys or tenancy.keys_file (outrider new-key "
            "makes a key and its hash), or set server.require_key=false to serve requests without a key"
        )


def _anonymous(tenancy: TenancyOptions, host: str) -> Iterator[str]:
    if tenancy.anonymous is not None and not is_loopback(host):
        yield (
            f"tenancy.anonymous is {tenancy.anonymous!r}, but other machines reach server.host {host!r}: all clients without "
            "a key would share drafts; set tenancy.anonymous=null and give tenants keys (outrider new-key), or "
            "server.host=127.0.0.1"
        )
