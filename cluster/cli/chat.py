"""``outrider chat``: a conversation in the terminal with a running server or with a model in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from outrider.cluster.cli.client import RefusedError, checked, lines_of, served_model
from outrider.cluster.cli.generate.strategy_option import AS_PUBLISHED_HELP, OPTION_HELP, parse_options
from outrider.cluster.cli.terminal import MarkdownStream, fail, fail_input

if TYPE_CHECKING:
    import httpx

    from outrider.actors.offline import OfflineEngine

Message = dict[str, str]
_URL = "http://127.0.0.1:8000"
_HELP = "Ctrl-C stops an answer, /docs FILE adds a document to the next question, /exit ends the chat"


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of an answer."""

    text: str
    drafted: bool = False  # drafted and accepted; known only if `report` was requested
    tokens: int = 0  # tokens of the answer so far, 0 if unknown
    thought: bool = False  # reasoning, which is not part of the message


class ChatBackend(Protocol):
    """Source of answers: a server or a model in this process."""

    def answer(self, messages: list[Message]) -> Generator[Piece, None, None]:
        """Yield the pieces of one answer; closing stops it. Raises ``RefusedError``, or ``httpx.HTTPError`` without a server."""
        ...


def chat(
    url: Annotated[str | None, typer.Option(help=f"URL of a running server. Default: {_URL}.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model (default: the first one); without a server, the model to load.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    strategy: Annotated[str | None, typer.Option(help="Drafting strategy. Default: the server's.")] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION_HELP)] = None,
    as_published: Annotated[bool, typer.Option("--as-published", help=AS_PUBLISHED_HELP)] = False,
    max_draft_tokens: Annotated[
        int | None, typer.Option(min=0, help="Maximum draft tokens per step; 0 is plain decoding.")
    ] = None,
    show_drafts: Annotated[bool, typer.Option(help="Show drafted and accepted tokens in colour.")] = False,
) -> None:
    """Chat with a running server, or with a model in this process if no server runs and no --url is given.

    Ctrl-C stops an answer, /docs FILE adds a document to the next question, /exit ends the chat.
    """
    import httpx

    try:
        chosen = parse_options(option or ())
    except ValueError as error:
        fail_input(str(error))
    speculation = {
        "strategy": strategy, "options": chosen or None, "as_published": as_published or None,
        "max_draft_tokens": max_draft_tokens, "report": show_drafts or None,
    }  # fmt: skip
    given = {name: value for name, value in speculation.items() if value is not None}
    messages = [{"role": "system", "content": system}] if system else []
    address = url or _URL
    with httpx.Client(base_url=address.rstrip("/").removesuffix("/v1"), timeout=httpx.Timeout(600.0, connect=5.0)) as client:
        try:
            served = served_model(client)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if url is not None or not isinstance(error, httpx.ConnectError):
                fail(f"no server answers at {address} ({error}); start one with `outrider serve`, or give its address with --url")
        except RefusedError as error:
            fail(f"{address}: {error}")
        else:
            typer.echo(f"{model or served} at {address}; {_HELP}")
            options: dict[str, Any] = {"model": model or served, "max_tokens": max_tokens, "temperature": temperature}
            if given:  # otherwise left out: other servers do not know the field
                options["speculation"] = given
            _converse(ServerBackend(client, options), messages, show_drafts)
            return
    with contextlib.closing(_load(model, strategy, chosen, as_published)) as engine:
        typer.echo(f"{engine.info.served_name} in this process; {_HELP}")
        _converse(LocalBackend(engine, max_tokens, temperature), messages, show_drafts)


def _converse(partner: ChatBackend, messages: list[Message], show_drafts: bool) -> None:
    with contextlib.suppress(ImportError):  # line editing and history by the arrow keys
        importlib.import_module("readline")
    documents: list[str] = []
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/docs" or text.startswith("/docs "):
            documents += _document(text.removeprefix("/docs").strip())
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": "\n\n".join((*documents, text))})
        answer = _answer(partner, messages, MarkdownStream(show_drafts))
        if answer:
            documents.clear()
            messages.append({"role": "assistant", "content": answer})  # a stopped answer too, because the user has read it
        else:
            messages.pop()  # no answer: drop the question, so that roles alternate


def _document(name: str) -> list[str]:
    """Return the text of a file for the next question; print a line and return nothing if it cannot be read."""
    from outrider.engine.text.file_text import UnreadableFileError, text_of_file

    try:
        text = text_of_file(Path(name).expanduser().read_bytes())
    except (OSError, UnreadableFileError) as error:
        reason = f"{error.strerror}; give a file of text" if isinstance(error, OSError) else str(error)
        typer.echo(f"error: /docs {name}: {reason}", err=True)
        return []
    typer.echo(f"{Path(name).name}, {len(text):,} characters, goes before the next question")
    return [text]


def _answer(partner: ChatBackend, messages: list[Message], shown: MarkdownStream) -> str:
    """Print an answer and its speed as it arrives, and return its text."""
    import httpx

    pieces: list[str] = []
    interrupted = False

    def interrupt(signum: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True  # remembered, because an exception is lost if it is raised in a finalizer
        raise KeyboardInterrupt

    # Ctrl-C stops the answer, not the command.
    before = signal.signal(signal.SIGINT, interrupt)
    began, tokens = time.perf_counter(), 0
    try:
        with contextlib.closing(partner.answer(messages)) as answer, shown:
            for piece in answer:
                if piece.text:
                    shown.write(piece.text, piece.drafted, piece.thought)
                if not piece.thought:
                    pieces.append(piece.text)
                tokens = piece.tokens or tokens
                if interrupted:
                    raise KeyboardInterrupt
        if tokens:
            typer.secho(f"[{tokens} tokens, {tokens / (time.perf_counter() - began):.0f} a second]", dim=True, err=True)
    except KeyboardInterrupt:  # closing the stream stops the generation
        typer.echo("[stopped]")
    except httpx.HTTPError as error:
        typer.echo(f"error: the server stopped answering ({error or type(error).__name__})", err=True)
    except RefusedError as error:
        typer.echo(f"error: {error}", err=True)
    finally:
        signal.signal(signal.SIGINT, before)
    return "".join(pieces)


@dataclass(frozen=True, slots=True)
class ServerBackend:
    """Server that speaks OpenAI's HTTP API."""

    client: httpx.Client
    options: dict[str, Any]  # fields of each request

    def answer(self, messages: list[Message]) -> Generator[Piece, None, None]:
        """See ``ChatBackend``."""
        body = {**self.options, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in lines_of(checked(response)):
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RefusedError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    yield from _pieces(choice)
                if chunk.get("usage"):
                    yield Piece("", tokens=chunk["usage"]["completion_tokens"])


def _pieces(choice: dict[str, Any]) -> list[Piece]:
    """Split a chunk into pieces, token by token if it reports the tokens' sources."""
    steps = (choice.get("speculation") or {}).get("steps")
    if steps:
        return [Piece(token["text"], token["source"] != "model") for step in steps for token in step["tokens"]]
    fields = (("reasoning", True), ("content", False))
    return [Piece(text, thought=thought) for name, thought in fields if (text := choice["delta"].get(name))]


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """Model in this process."""

    engine: OfflineEngine
    max_tokens: int
    temperature: float

    def answer(self, messages: list[Message]) -> Generator[Piece, None, None]:
        """See ``ChatBackend``."""
        from outrider.actors.offline import OfflinePrompt
        from outrider.decoding.request import SamplingParams

        params = SamplingParams(self.max_tokens, temperature=self.temperature)
        (taken,) = self.engine.submit([OfflinePrompt("chat", "", messages=tuple(messages))], params, chat=True)
        if isinstance(taken, str):
            raise RefusedError(taken)
        tokens = 0
        try:
            for outputs in self.engine.outputs():
                for output in outputs:
                    tokens += len(output.token_ids)
                    yield Piece(output.text, tokens=tokens)
        finally:
            self.engine.abort("chat")


def _load(model: str | None, strategy: str | None, options: dict[str, Any], as_published: bool) -> OfflineEngine:
    """Load the given model, or that of ``configs/local.yaml``; end the command if it cannot be loaded."""
    from outrider.configs.schema import REPOSITORY, ConfigError, load_config

    settings = [*([f"model.path={model}"] if model else []), *([f"speculation.strategy={strategy}"] if strategy else [])]
    try:
        config = load_config(REPOSITORY / "configs" / "local.yaml", [*settings, "speculation.strategies=[]"])
    except ConfigError as error:
        fail_input(str(error))
    typer.echo(f"no server at {_URL}: loading {config.model.path} into this process", err=True)
    from transformers.utils.logging import disable_progress_bar

    from outrider.actors.offline import OfflineEngine
    from outrider.engine.errors import ModelLoadError

    disable_progress_bar()
    try:
        speculation = dataclasses.replace(
            config.speculation,
            options={**config.speculation.options, **options},
            as_published=as_published or config.speculation.as_published,
        )
        return OfflineEngine(config.model, config.engine, speculation)
    except (ModelLoadError, ValueError) as error:
        fail(str(error))
