"""The model of these tests, whose every token is known, and applications over it in this process, without Ray."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.actors.description import Description, ReplicaError
from outrider.actors.replica import Replica
from outrider.cluster.http.api import Service, create_api
from outrider.cluster.serving.generation import GenerationJob
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import StepOutput
from tests.helpers.waiting import eventually

# Greedy decoding walks around the circle, one byte a token; no byte occurs twice, so that the last token alone decides the next.
CIRCLE = "<abcdefgh-é_日:🦙;ijklm>"
LAP = len(CIRCLE.encode())  # tokens of one walk around
ENDING = "stuvw."  # leads to the end token
CONTEXT = 16384
MAX_RUNNING, MAX_WAITING = 3, 4  # of the service that the tests share

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TEXT: dict[str, Any] = {"model": "circle", "prompt": "<", "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {"model": "circle", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
ENDLESS = {"model": "circle", "prompt": "<", "max_tokens": 16000, "ignore_eos": True}  # minutes, unless it is ended

_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, an end token, and one that makes the number of tokens even."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0, "<pad>": 1} | {character: index for index, character in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = _TEMPLATE
    return fast


TOKENIZER = build_tokenizer()


def byte_ids(text: str) -> list[int]:
    """The token ids of a text."""
    return list(TOKENIZER.encode(text))


def build_model() -> LlamaForCausalLM:
    """Layers that add nothing, and a head that reads the next token off the last one: sure when greedy, likely when sampled."""
    size, end = len(TOKENIZER), TOKENIZER.eos_token_id
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        eos_token_id=end, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    circle, ending = byte_ids(CIRCLE), [*byte_ids(ENDING), end]
    successor = dict.fromkeys(range(size), circle[0])
    successor |= dict(zip(circle, [*circle[1:], circle[0]], strict=True)) | dict(itertools.pairwise(ending))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for token, following in successor.items():
            model.lm_head.weight[following, token] = 0.5
    return model


def save_saying(
    circle_model: Path,
    path: Path,
    said: Sequence[str | AddedToken],
    template: str,
    after: str = ">",
    more: Sequence[str | AddedToken] = (),
) -> Path:
    """The circle, whose model says some texts behind a character, each a token of its own, and then ends.

    Args:
        circle_model: the folder of the circle.
        path: the folder to make.
        said: texts, each once.
        template: of chats.
        after: what the prompt ends with.
        more: texts that are tokens of their own as well, and are not said.
    """
    shutil.copytree(circle_model, path)
    content, texts = json.loads((path / "tokenizer.json").read_text()), [str(text) for text in (*said, *more)]
    vocab: dict[str, int] = content["model"]["vocab"]
    ids = [vocab[chr(256 + byte)] for byte in range(len(texts))]  # of the first bytes, which no text here holds
    others = {piece: index for piece, index in vocab.items() if index not in ids}
    content["model"]["vocab"] = others | dict(zip(texts, ids, strict=True))
    (path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens([*said, *more])
    assert tokenizer.convert_tokens_to_ids(texts) == ids
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(path)
    (last,) = tokenizer.encode(after)
    with torch.no_grad():
        for before, following in itertools.pairwise([last, *ids[: len(said)], tokenizer.eos_token_id]):
            model.lm_head.weight[:, before] = 0.0
            model.lm_head.weight[following, before] = 0.5
    model.save_pretrained(path)
    return path


class LocalEngine:
    """The ``EnginePort`` over replicas in this process, of which the first gets the requests. It remembers its jobs."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas, self.jobs = list(replicas), list[GenerationJob]()

    def generate(self, *jobs: GenerationJob) -> list[AsyncGenerator[StepOutput, None]]:
        return [self._generate(job) for job in jobs]

    async def _generate(self, job: GenerationJob) -> AsyncGenerator[StepOutput, None]:
        self.jobs.append(job)
        stream = self.replicas[0].generate(job.request(job.references), resumed=job.resumed)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def describe(self) -> list[Description]:
        found = []
        for replica in self.replicas:
            with contextlib.suppress(ReplicaError):  # it was stopped
                found.append(replica.describe())
        return found


def start_replica(
    folder: Path,
    speculation: SpeculationOptions | None = None,
    engine: EngineOptions | None = None,
    meter: Callable[..., Any] | None = None,
    **model: Any,
) -> Replica:
    """An engine in this process.

    Args:
        folder: of the model.
        speculation: LLMA unless given.
        engine: ``MAX_RUNNING`` at once unless given.
        meter: as that of ``Replica``.
        model: further ``ModelOptions``.
    """
    options = ModelOptions(str(folder), dtype="float32", threads=1, **model)
    speculation = speculation or SpeculationOptions("llma", max_draft_tokens=8)
    return Replica(options, engine or EngineOptions(max_running=MAX_RUNNING), speculation, meter=meter)


@contextlib.contextmanager
def local_engine(folder: Path, *arguments: Any, **options: Any) -> Iterator[LocalEngine]:
    """An engine over one replica; the arguments are those of ``start_replica``."""
    engine = LocalEngine(start_replica(folder, *arguments, **options))
    try:
        yield engine
    finally:
        for replica in engine.replicas:
            replica.stop()


@contextlib.contextmanager
def served(app: FastAPI | Service, **settings: Any) -> Iterator[str]:
    """The address of an application that runs in this process, on a free loopback port; further settings are uvicorn's."""
    app = create_api(app) if isinstance(app, Service) else app
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def client_of(app: FastAPI | Service, headers: dict[str, str] | None = None) -> Iterator[httpx.Client]:
    """A client of an application that runs in this process."""
    with served(app) as url, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        yield client


@dataclass(frozen=True)
class Server:
    """Where a service listens."""

    url: str

    def health(self) -> dict[str, Any]:
        """What /health says; fails when it is not well."""
        return dict(httpx.get(f"{self.url}/health", timeout=30).raise_for_status().json())

    def load(self) -> tuple[int, int, int]:
        """Running, waiting, free slots."""
        health = self.health()
        return health["running"], health["waiting"], health["free_slots"]

    def becomes_idle(self) -> None:
        """Fails unless nothing runs and all slots are free in time."""
        eventually(lambda: self.load() == (0, 0, MAX_RUNNING))


Said = tuple[str, str, list[tuple[str, str]], str | None]  # reasoning, text, calls, and why an answer ended


@dataclass(frozen=True)
class Speaker:
    """A model that is served in this process, and OpenAI's client of its server."""

    url: str
    client: OpenAI
    engine: LocalEngine
    tokenizer: PreTrainedTokenizerFast

    def ask(self, **changes: Any) -> Any:
        """Return the answer to a chat, or its stream."""
        model = Path(self.tokenizer.name_or_path).name
        fields: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
        return self.client.chat.completions.create(**(fields | changes))

    def streamed(self, **changes: Any) -> tuple[Said, Any]:
        """Return the answer to a streamed chat, and its usage."""
        chunks = list(self.ask(stream=True, stream_options={"include_usage": True}, **changes))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        thoughts = list[str]()
        for delta in (choice.delta for choice in choices):
            extra = delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            assert not (extra.get("reasoning") and delta.content)
            thoughts.append(extra.get("reasoning") or "")
        assert not any(choice.finish_reason for choice in choices[:-1])
        text, calls = "".join(choice.delta.content or "" for choice in choices), streamed_calls(one.delta for one in choices)
        return ("".join(thoughts), text, calls, choices[-1].finish_reason), chunks[-1].usage

    def prompt(self, **body: Any) -> tuple[str, int]:
        """Return the prompt that the template makes of a chat, and the number of its tokens."""
        tokens = httpx.post(f"{self.url}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]
        answer = httpx.post(f"{self.url}/detokenize", json={"tokens": tokens}, timeout=60)
        return answer.raise_for_status().json()["prompt"], len(tokens)


def whole(answer: Any) -> Said:
    """Return the only choice of a chat's answer."""
    (choice,) = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return getattr(choice.message, "reasoning", ""), choice.message.content or "", calls, choice.finish_reason


@contextlib.contextmanager
def speaking(path: Path) -> Iterator[Speaker]:
    """Serve the model of a folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    with (
        local_engine(path, max_model_len=2048) as engine,
        served(Service(engine, tokenizer)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield Speaker(url, client, engine, tokenizer)


def bearer(key: str | None) -> dict[str, str]:
    """The header that sends an API key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def read_stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream that ends well."""
    answer = http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.splitlines() if line]
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def streamed_calls(deltas: Iterable[Any]) -> list[tuple[str, str]]:
    """Names and arguments of the calls in the deltas of a choice, which have OpenAI's shape."""
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls or []):
        if call.id is not None:
            assert (call.index, call.type) == (len(calls), "function")
            calls.append((call.function.name, call.function.arguments))
        else:
            assert call.index == len(calls) - 1 and call.function.name is None and call.function.arguments
            calls[-1] = calls[-1][0], calls[-1][1] + call.function.arguments
    return calls


def check_error(response: httpx.Response, status: int, *words: str, param: str | None = None, code: str | None = None) -> None:
    """The error has OpenAI's shape, names the field, and says these words."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param and code in (None, error["code"]), error
    for word in words:
        assert word in error["message"], error
