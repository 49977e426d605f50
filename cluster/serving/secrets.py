"""Secrets that a service's processes derive on their own, because Ray Serve writes down the arguments of deployments."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled, and not in its stub

from outrider.cluster.cli.launch.preflight import SECRET_VARIABLE


def node_secret() -> bytes:
    """Return the 32-byte secret by which the replicas of a node authenticate each other, derived from Ray's token."""
    # All processes of Ray have the token. If Ray requires none, anyone who reaches it can run code in them anyway.
    return _derived(_ray_token(), b"outrider: replicas of a node")


def stream_key() -> bytes:
    """Return the 32-byte key that signs event ids of streams; empty if the API processes share no secret."""
    # It is derived from OUTRIDER_CACHE_SECRET, which outlives a restart, else from Ray's token.
    secret = os.environ.get(SECRET_VARIABLE, "").encode() or _ray_token()
    return _derived(secret, b"outrider: ids of events") if secret else b""


def cached_secret(folder: Path) -> str:
    """Return this user's secret kept in a folder, 64 hexadecimal digits, so that streams can be resumed after a restart."""
    # A file that is missing, damaged, of another user or open to others is replaced. If it cannot be written, the secret is lost
    # when the server ends.
    path = folder / "secret"
    with contextlib.suppress(OSError, ValueError):
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="ascii") as file:
            state, text = os.fstat(file.fileno()), file.read(65)
        is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
        if is_own and len(text) == 64 and bytes.fromhex(text):
            return text
    made = secrets.token_hex(32)
    draft = folder / f"secret.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(made)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return made


def _ray_token() -> bytes:
    return AuthenticationTokenLoader.instance().get_raw_token().encode()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, purpose, "sha256")
