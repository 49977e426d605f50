"""Who asks, and whose texts a request drafts from: API keys to tenants, tenants to what is shared."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.namespace import hash_key
from cluster.errors import ApiError
from cluster.openai_types import CacheChoice
from configs.slices import TenancyOptions


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a request drafts from besides its own text, and whom it teaches."""

    tenant: str | None  # drafts from this tenant's texts and adds its own to them; None: neither
    public: bool  # may draft from the corpus that the operator has loaded


class Tenancy:
    """The tenants of the configuration, found by the hashes of their keys. Clear keys are nowhere kept.

    No key is compared with another, so no answer's time says how much of a key was right: that of a look-up depends on the
    hash, which who tries keys cannot steer.
    """

    def __init__(self, options: TenancyOptions) -> None:
        self._anonymous = options.anonymous
        self._tenants = {key: name for name, tenant in options.tenants.items() for key in tenant.keys}
        self._admins = frozenset(options.admin_keys)

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of a request; None for one that belongs to nobody.

        Args:
            authorization: the header ``Authorization: Bearer KEY``. Where no tenant has a key it is not looked at, since
                clients of OpenAI's API always send one.

        Raises:
            ApiError: 401, the header is malformed, or no tenant has the key.
        """
        if authorization is None or not self._tenants:
            return self._anonymous
        tenant = self._tenants.get(hash_key(_bearer(authorization)))
        if tenant is None:
            raise _unauthorized("no tenant of this server has this API key; ask its operator for one, or send none")
        return tenant

    def sharing(self, authorization: str | None, cache: CacheChoice | None) -> Sharing:
        """What a request shares. ``cache`` is its body's field, None when absent: ``tenant`` with an identity, else ``private``.

        Raises:
            ApiError: 401 as ``tenant_of``, whatever ``cache`` says; 400, ``tenant`` was asked for and there is none.
        """
        tenant = self.tenant_of(authorization)
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
        return hash_key(_bearer(authorization)) in self._admins

    def check_admin(self, authorization: str | None) -> None:
        """Returns if the operator asks.

        Raises:
            ApiError: 403, the configuration has no operator's key; 401, the header has none, or a wrong one.
        """
        if not self._admins:
            message = "the admin routes are closed: put the hash of a key (outrider new-key) into tenancy.admin_keys"
            raise ApiError(403, message, code="admin_disabled")
        if authorization is None:
            raise _unauthorized("send an admin key: Authorization: Bearer KEY")
        if not self.is_admin(authorization):
            raise _unauthorized("this is not an admin key of this server")


def _bearer(authorization: str) -> str:
    """The key in the header; 401 where there is none."""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("the Authorization header is not of the form: Bearer KEY")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
