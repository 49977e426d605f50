"""``outrider chat``: a conversation in the terminal with a running server."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.terminal import fail, server_message

if TYPE_CHECKING:
    import httpx

Message = dict[str, str]


class ChatError(RuntimeError):
    """The server refused, or broke off; the message is its own."""


def chat(
    url: Annotated[str, typer.Option(help="Where the server listens (server.port).")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Name of a served model; the first one when absent.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    strategy: Annotated[str | None, typer.Option(help="One of the server's strategies; its default when absent.")] = None,
    max_draft_tokens: Annotated[int | None, typer.Option(min=0, help="Most drafted rows in a step; 0: plain decoding.")] = None,
) -> None:
    """Chat with a running server. Ctrl-C stops an answer, /exit ends the chat."""
    import httpx

    with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=httpx.Timeout(600.0, connect=5.0)) as client:
        try:
            served = _served_model(client)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fail(f"no server answers at {url} ({error}); start one with `outrider serve`, or give its address with --url")
        except ChatError as error:
            fail(f"{url}: {error}")
        typer.echo(f"{model or served} at {url}; Ctrl-C stops an answer, /exit ends the chat")
        options: dict[str, Any] = {"model": model or served, "max_tokens": max_tokens, "temperature": temperature}
        speculation = {"strategy": strategy, "max_draft_tokens": max_draft_tokens}
        if any(value is not None for value in speculation.values()):  # else servers that do not know it can be talked to
            options["speculation"] = speculation
        _converse(client, options, [{"role": "system", "content": system}] if system else [])


def _converse(client: httpx.Client, options: dict[str, Any], messages: list[Message]) -> None:
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return
        if text in ("/exit", "/quit"):
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = _answer(client, options, messages)
        if answer:
            messages.append({"role": "assistant", "content": answer})  # a stopped answer too: it was read
        else:
            messages.pop()  # nothing was said: the next question follows the last answer


def _answer(client: httpx.Client, options: dict[str, Any], messages: list[Message]) -> str:
    """Prints an answer as it comes, and returns what came of it."""
    import httpx

    pieces: list[str] = []
    interrupted = False

    def interrupt(signum: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True  # an exception is lost where it meets a finalizer: what was asked for is remembered
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with contextlib.closing(stream_answer(client, options, messages)) as answer:
            for piece in answer:
                typer.echo(piece, nl=False)
                pieces.append(piece)
                if interrupted:
                    raise KeyboardInterrupt
        typer.echo("")
    except KeyboardInterrupt:  # closing the stream tells the server to stop
        typer.echo("\n[stopped]")
    except httpx.HTTPError as error:
        typer.echo(f"\nerror: the server does not answer any more ({error or type(error).__name__})", err=True)
    except ChatError as error:
        typer.echo(f"\nerror: {error}", err=True)
    finally:
        signal.signal(signal.SIGINT, before)
    return "".join(pieces)


def stream_answer(client: httpx.Client, options: dict[str, Any], messages: list[Message]) -> Generator[str, None, None]:
    """The pieces of one streamed answer.

    Raises:
        ChatError: the server refuses, or sends an error in the middle.
        httpx.HTTPError: the connection fails.
    """
    body = {**options, "messages": messages, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise ChatError(server_message(response))
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ChatError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece


def _served_model(client: httpx.Client) -> str:
    response = client.get("/v1/models", timeout=10.0)
    if response.status_code != 200:
        raise ChatError(server_message(response))
    try:
        name: str = response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ChatError("this is not an OpenAI-compatible server: /v1/models lists no model") from None
    return name
