"""Playground page at ``/``: static files that use only the public API, with restrictive security headers."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

_FOLDER = Path(__file__).parents[1] / "playground"
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}  # override the system's table of MIME types
# The browser may load from and connect to this server only, and other sites cannot frame the page. So text written by a model
# cannot run scripts or reach other servers.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser revalidates each time
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_playground(app: FastAPI) -> None:
    """Add the page at ``/`` and its files below ``/playground``. They need no key and are read once."""
    for path in sorted(_FOLDER.iterdir()):
        address = "/" if path.name == "index.html" else f"/playground/{path.name}"
        _add_file(app, address, path)
        if path.name == "favicon.svg":
            _add_file(app, "/favicon.ico", path)  # the browsers' default location


def _add_file(app: FastAPI, address: str, path: Path) -> None:
    content = path.read_bytes()
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def file(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)  # the server drops the body for HEAD

    app.add_api_route(address, file, methods=["GET", "HEAD"], include_in_schema=False)
