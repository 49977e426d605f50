"""HTTP client of a running server for the commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outrider.cluster.cli.terminal import fail, fail_input

if TYPE_CHECKING:
    import httpx

ADMIN_KEY, API_KEY = "OUTRIDER_ADMIN_KEY", "OUTRIDER_API_KEY"  # names of environment variables
_TIMEOUT_S = 600.0  # a large snapshot takes a while to make, and so does plain decoding of a long answer


class RefusedError(Exception):
    """Refusal by the server, with the server's own message."""


def checked(response: httpx.Response) -> httpx.Response:
    """Return the response. Raise ``RefusedError`` with the server's message unless its status is 200."""
    if response.status_code != 200:
        response.read()
        raise RefusedError(server_message(response))
    return response


def lines_of(response: httpx.Response) -> Iterator[str]:
    """Yield the lines of a streamed response. They end at line feeds alone, as in server-sent events and JSON Lines."""
    held = ""
    for text in response.iter_text():
        *lines, held = (held + text).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if held:
        yield held


def served_model(client: httpx.Client) -> str:
    """Return the name of a server's first model. Raise ``RefusedError`` if it lists none."""
    response = checked(client.get("/v1/models", timeout=10.0))
    try:
        name: str = response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise RefusedError("this is not an OpenAI-compatible server: /v1/models lists no model") from None
    return name


def server_message(response: httpx.Response) -> str:
    """Return the message of an error response, or its status if it has none in OpenAI's format."""
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status_code} {response.reason_phrase}"
    return message


@contextlib.contextmanager
def connected(url: str, variable: str, key: str | None = None, below: str = "") -> Iterator[httpx.Client]:
    """Yield a client that sends the API key, if one is given; errors end the command with one line.

    ``variable``: environment variable with the key, unless ``key`` is given; ADMIN_KEY requires one. ``below`` prefixes paths.
    """
    import httpx

    held = (key or os.environ.get(variable, "")).strip()
    if variable == ADMIN_KEY and not held:
        fail_input(
            f"{variable} is empty or not set: export the key whose hash is in tenancy.admin_keys (outrider new-key makes one)"
        )
    # An HTTP header cannot carry other characters.
    if not held.isascii():
        fail_input("the key holds invalid characters")
    try:
        with httpx.Client(
            base_url=f"{url.rstrip('/').removesuffix('/v1')}{below}",
            headers={"Authorization": f"Bearer {held}"} if held else {},
            timeout=httpx.Timeout(_TIMEOUT_S, connect=5.0),
        ) as client:
            yield client
    except RefusedError as error:
        fail(f"{url}: {error}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url} ({error or type(error).__name__}); give its address with --url")
    except (ValueError, LookupError, TypeError):
        fail(f"{url}: this is not an Outrider server: unexpected response")
