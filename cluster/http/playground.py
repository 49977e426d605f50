"""The page at ``/``: static files that use the public API only, and the headers that hold them to it."""

from __future__ import annotations

import hashlib
import mimetypes
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

_FOLDER = Path(__file__).parents[1] / "playground"
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}  # whatever the system's table says
# The browser runs, loads and reaches nothing but this server, and shows the page in no other's frame: a text that a model writes
# cannot make it do more.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and sent again where it changed
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_playground(app: FastAPI) -> None:
    """Gives an application the page at ``/`` and its files below ``/playground``. They need no key, and are read once."""
    for path in sorted(_FOLDER.iterdir()):
        address = "/" if path.name == "index.html" else f"/playground/{path.name}"
        _add_file(app, address, path)
        if path.name == "favicon.svg":
            _add_file(app, "/favicon.ico", path)  # where browsers look that were not told of another


def _add_file(app: FastAPI, address: str, path: Path) -> None:
    content = path.read_bytes()
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def file(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)  # of a HEAD the server sends the headers alone

    app.add_api_route(address, file, methods=["GET", "HEAD"], include_in_schema=False)
