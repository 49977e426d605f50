"""Tenancy: API keys to tenants, and whose texts a request drafts from and adds to."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass

from cache_service.namespace import hash_key
from cluster.http.errors import ApiError
from cluster.http.types.openai import CacheChoice
from configs.keys_file import with_keys_file
from configs.schema import ConfigError
from configs.slices import TenancyOptions, TenantOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a request drafts from besides its own text, and whom it teaches."""

    tenant: str | None  # drafts from this tenant's texts and adds its own to them; None: neither
    public: bool  # may draft from the corpus that the operator has loaded


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    tenant: str | None  # None: nobody's
    key: str  # the hash of the API key; empty for those without one, and where keys are not looked at
    options: TenantOptions  # of the tenant


class Tenancy:
    """The tenants of the configuration, found by the hashes of their keys. Clear keys are nowhere kept.

    Where some of them are in a file, it is looked at with each request, for about a microsecond, and read again when it has
    changed. A file that cannot be used is logged, and the keys of the former one stay.

    No key is compared with another, so no answer's time says how much of a key was right: that of a look-up depends on the
    hash, which who tries keys cannot steer.
    """

    def __init__(self, options: TenancyOptions, require_key: bool = False) -> None:
        """
        Args:
            options: the section; texts are shared for its tenants, those that only the file has come without.
            require_key: requests without a key are refused.

        Raises:
            ConfigError: the file of keys cannot be used, or holds none where they are required.
        """
        self._section, self._anonymous, self._required = options, options.anonymous, require_key
        self._seen = self._stamp()
        self._read()

    def caller_of(self, authorization: str | None) -> Caller:
        """Who sends a request.

        Args:
            authorization: the header ``Authorization: Bearer KEY``. Where no tenant has a key it is not looked at, since
                clients of OpenAI's API always send one.

        Raises:
            ApiError: 401, the header is malformed, no tenant has the key, or there is none and the server wants one.
        """
        self._refresh()
        if self._required and authorization is None:
            raise _unauthorized("this server wants an API key: Authorization: Bearer KEY; ask its operator for one")
        if authorization is None or not (self._tenants or self._required):
            return self._nobody
        key = hash_key(_bearer(authorization))
        tenant = self._tenants.get(key)
        if tenant is None:
            advice = "ask its operator for one" if self._required else "ask its operator for one, or send none"
            raise _unauthorized(f"no tenant of this server has this API key; {advice}")
        return Caller(tenant, key, self._options[tenant])

    @property
    def several(self) -> bool:
        """Whether requests of more than one tenant may come."""
        return len(self._options) + (not self._required and self._anonymous not in self._options) > 1

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of a request; None for one that belongs to nobody. Raises as ``caller_of``."""
        return self.caller_of(authorization).tenant

    def sharing(self, authorization: str | None, cache: CacheChoice | None) -> Sharing:
        """What a request shares. ``cache`` is its body's field, None when absent: ``tenant`` with an identity, else ``private``.

        Raises:
            ApiError: 401 as ``tenant_of``, whatever ``cache`` says; 400, ``tenant`` was asked for and there is none.
        """
        tenant = self.tenant_of(authorization)
        if tenant is not None and tenant != self._anonymous and tenant not in self._section.tenants:
            if cache == "tenant":
                message = f"cache: {tenant!r} is a new tenant, and shares texts when the server was restarted: leave cache out"
                raise ApiError(400, message, param="cache", code="invalid_value")
            tenant = None  # the engines were not told of it
        if cache == "tenant" and tenant is None:
            advice = "send an API key (Authorization: Bearer KEY), or leave cache out"
            if not self._tenants:
                advice = "no API key is configured on this server (tenancy.tenants), leave cache out"
            raise ApiError(400, f"cache: 'tenant' needs an identity: {advice}", param="cache", code="invalid_value")
        if cache is None:
            cache = "private" if tenant is None else "tenant"
        return Sharing(tenant if cache == "tenant" else None, cache != "off")

    def is_admin(self, authorization: str) -> bool:
        """Whether the header holds an operator's key. Raises ``ApiError`` (401) for a malformed header."""
        self._refresh()
        return hash_key(_bearer(authorization)) in self._admins

    def tells_load(self, authorization: str | None) -> bool:
        """Return whether who sends the header may be told the load of all: the operator, and all where one tenant is served."""
        if not self.several:
            return True
        with contextlib.suppress(ApiError):  # a malformed header is no operator's
            return authorization is not None and self.is_admin(authorization)
        return False

    def check_admin(self, authorization: str | None) -> None:
        """Returns if the operator asks.

        Raises:
            ApiError: 403, the configuration has no operator's key; 401, the header has none, or a wrong one.
        """
        self._refresh()
        if not self._admins:
            message = "the admin routes are closed: put the hash of a key (outrider new-key) into tenancy.admin_keys"
            raise ApiError(403, message, code="admin_disabled")
        if authorization is None:
            raise _unauthorized("send an admin key: Authorization: Bearer KEY")
        if not self.is_admin(authorization):
            raise _unauthorized("this is not an admin key of this server")

    def _refresh(self) -> None:
        """Reads the file again when it is not the one that was read last."""
        if self._section.keys_file is None or (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp  # a file that is wrong is complained of once
        try:
            self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("tenancy.keys_file was read again: %d keys, %d of operators", len(self._tenants), len(self._admins))

    def _read(self) -> None:
        whole = with_keys_file(self._section, self._required)
        self._options = whole.tenants
        self._tenants = {key: name for name, tenant in whole.tenants.items() for key in tenant.keys}
        self._admins = frozenset(whole.admin_keys)
        self._nobody = Caller(self._anonymous, "", whole.tenants.get(self._anonymous or "", TenantOptions()))
        unknown = sorted(set(whole.tenants) - set(self._section.tenants))
        if unknown:
            logger.warning("tenants that are new share no texts before the server is restarted: %s", ", ".join(unknown))

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes with the file, also when another one takes its place; None where there is none to be seen."""
        try:
            status = os.stat(self._section.keys_file or "")
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _bearer(authorization: str) -> str:
    """The key in the header; 401 where there is none."""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("the Authorization header is not of the form: Bearer KEY")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
