"""Tenants: the tenant of an API key, and whose texts a request drafts from and adds to."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.types.openai import CacheChoice
from outrider.configs.keys_file import with_keys_file
from outrider.configs.schema import ConfigError
from outrider.configs.slices import TenancyOptions, TenantOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Texts that a request may draft from besides its own, and the tenant whose history it extends."""

    tenant: str | None  # drafts from this tenant's texts and adds its own; None for neither
    public: bool  # may draft from the operator's public corpus


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request."""

    tenant: str | None  # None if the request belongs to no tenant
    key: str  # hash of the API key; empty without a key, or if keys are ignored
    options: TenantOptions  # options of the tenant


class Tenancy:
    """Tenants of the configuration by the hashes of their API keys. Keys are never stored in clear."""

    # A key file is checked on each request (about a microsecond) and read again when it has changed. If the new file cannot be
    # used, that is logged and the previous keys stay valid.

    def __init__(self, options: TenancyOptions, require_key: bool = False) -> None:
        """Read the key file; tenants that exist only there do not share texts. Raises ``ConfigError`` if it cannot be used."""
        self._section, self._anonymous, self._required = options, options.anonymous, require_key
        self._seen = self._stamp()
        self._read()

    def caller_of(self, authorization: str | None) -> Caller:
        """Return the sender by ``Authorization: Bearer KEY``. Raises ``ApiError``: 401, malformed, unknown or missing key."""
        # Ignored if no tenant has a key, because clients of OpenAI's API always send one.
        self._refresh()
        if self._required and authorization is None:
            raise _unauthorized("this server requires an API key: Authorization: Bearer KEY; ask its operator for one")
        if authorization is None or not (self._tenants or self._required):
            return self._nobody
        # Keys are looked up by hash and never compared, so that response times do not reveal how much of a guess is right.
        key = hash_key(_bearer(authorization))
        tenant = self._tenants.get(key)
        if tenant is None:
            advice = "ask its operator for one" if self._required else "ask its operator for one, or send none"
            raise _unauthorized(f"this server does not know this API key; {advice}")
        return Caller(tenant, key, self._options[tenant])

    @property
    def several(self) -> bool:
        """Return whether requests of more than one tenant are possible."""
        return len(self._options) + (not self._required and self._anonymous not in self._options) > 1

    def tenant_of(self, authorization: str | None) -> str | None:
        """Return the tenant of a request; None if it belongs to no tenant. Raise as ``caller_of``."""
        return self.caller_of(authorization).tenant

    def sharing(self, authorization: str | None, cache: CacheChoice | None) -> Sharing:
        """Return what a request shares. ``cache`` is the request's field; None means ``tenant`` if it has one, else ``private``.

        Raises ApiError: 401 as ``tenant_of``, whatever ``cache`` is; 400, ``tenant`` was requested and there is none.
        """
        tenant = self.tenant_of(authorization)
        if tenant is not None and tenant != self._anonymous and tenant not in self._section.tenants:
            if cache == "tenant":
                message = (
                    f"cache: {tenant!r} is a new tenant and shares texts only after a restart of the server: leave cache out"
                )
                raise ApiError(400, message, param="cache", code="invalid_value")
            tenant = None  # the engines do not know the tenant
        if cache == "tenant" and tenant is None:
            advice = "send an API key (Authorization: Bearer KEY), or leave cache out"
            if not self._tenants:
                advice = "no API key is configured on this server (tenancy.tenants), leave cache out"
            raise ApiError(400, f"cache: 'tenant' needs an identity: {advice}", param="cache", code="invalid_value")
        if cache is None:
            cache = "private" if tenant is None else "tenant"
        return Sharing(tenant if cache == "tenant" else None, cache != "off")

    def is_admin(self, authorization: str) -> bool:
        """Return whether the header holds an admin key. Raise ``ApiError`` (401) if it is malformed."""
        self._refresh()
        return hash_key(_bearer(authorization)) in self._admins

    def reports_load(self, authorization: str | None) -> bool:
        """Return whether the sender may see the total load: the operator, or anyone if only one tenant is served."""
        if not self.several:
            return True
        with contextlib.suppress(ApiError):  # a malformed header holds no admin key
            return authorization is not None and self.is_admin(authorization)
        return False

    def check_admin(self, authorization: str | None) -> None:
        """Raise ``ApiError`` unless the header holds an admin key: 401, or 403 if no admin key is configured."""
        self._refresh()
        if not self._admins:
            message = "the admin routes are disabled: put the hash of a key (outrider new-key) into tenancy.admin_keys"
            raise ApiError(403, message, code="admin_disabled")
        if authorization is None:
            raise _unauthorized("send an admin key: Authorization: Bearer KEY")
        if not self.is_admin(authorization):
            raise _unauthorized("this is not an admin key of this server")

    def _refresh(self) -> None:
        if self._section.keys_file is None or (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp  # log the error of a wrong file only once
        try:
            self._read()
        except ConfigError as error:
            logger.error("API keys were not reloaded: %s", error)
        else:
            logger.info("reloaded tenancy.keys_file: %d API keys, %d admin keys", len(self._tenants), len(self._admins))

    def _read(self) -> None:
        whole = with_keys_file(self._section, self._required)
        self._options = whole.tenants
        self._tenants = {key: name for name, tenant in whole.tenants.items() for key in tenant.keys}
        self._admins = frozenset(whole.admin_keys)
        self._nobody = Caller(self._anonymous, "", whole.tenants.get(self._anonymous or "", TenantOptions()))
        unknown = sorted(set(whole.tenants) - set(self._section.tenants))
        if unknown:
            logger.warning("new tenants share no texts until the server is restarted: %s", ", ".join(unknown))

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return a value that changes with the key file, also when it is replaced; None if it is missing."""
        try:
            status = os.stat(self._section.keys_file or "")
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _bearer(authorization: str) -> str:
    """Return the key in the header. Raise ``ApiError`` (401) if it has none."""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("the Authorization header is not of the form: Bearer KEY")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
