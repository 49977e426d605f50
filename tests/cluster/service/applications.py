"""Applications beside the one that the tests share: a random tiny model whose answer is known, and processes to kill."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
from openai import OpenAI
from ray import serve
from transformers import PreTrainedTokenizerFast

from outrider.cache_service.namespace import hash_key
from outrider.cache_service.server.snapshot import decode_snapshot
from outrider.cluster.app import application
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.configs.schema import Config
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.experiments.faults.redis_process import RedisProcess
from tests.cluster.circle import Server, bearer
from tests.helpers.models import SENTENCES, llama_config, save_model
from tests.helpers.network import free_port
from tests.helpers.waiting import eventually

PROMPT = SENTENCES[0]
TENANTS = (
    "modes",
    "seen",
    "unseen",
    "removed",
    "gone",
    "quiet",
    "plain",
    "source",
    "target",
    "streams",
    "many",
    "routed",
    "routed-too",
    "watched",
    "watching",
)  # of a test each
OPERATOR = "key of the operator"
NO_KEY = {"Authorization": openai.Omit()}
TWIN_RUNNING = 8  # requests at once of each of two replicas
BEGUN = 30  # events of a stream that show that it has begun


@dataclass(frozen=True)
class Answer:
    """What plain decoding says."""

    prompt_ids: Int32Array
    ids: list[int]
    text: str
    reason: str


def plain_answers(model: ModelOptions, *asked: tuple[str, SamplingParams]) -> list[Answer]:
    """Of an engine in this process, to one request after another."""
    engine = Engine.load(model, EngineOptions(max_running=1), SpeculationOptions("autoregressive"))
    assert engine.tokenizer is not None
    answers = []
    for prompt, params in asked:
        prompt_ids = engine.tokenizer.encode(prompt)
        engine.add(Request("plain", prompt_ids, params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        ids = [token for output in outputs for token in output.token_ids]
        text, reason = "".join(output.text for output in outputs), outputs[-1].finish_reason
        answers.append(Answer(np.asarray(prompt_ids, np.int32), ids, text, reason.value if reason else ""))
    return answers


def processes(title: str) -> set[int]:
    """Ray's workers below this process, by the beginning of their title."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "".join(process.cmdline()[:1]).startswith(title):
                found.add(process.pid)
    return found


def kill(pids: Iterable[int]) -> None:
    """``kill -9`` of each."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def tiny_config(folder: Path, **sections: Any) -> Config:
    """A service of a random model, which is made if it is not there.

    Args:
        folder: of the model; its name is ``tiny``.
        sections: of the configuration, over those of one small replica that stops at once.
    """
    path = folder / "tiny"
    if not path.exists():
        save_model(path, llama_config(max_position_embeddings=2048, tie_word_embeddings=True), seed=4)
    model = {"path": str(path), "dtype": "float32", "threads": 1}
    server = {"cpus_per_replica": 0.25, "stop_timeout_s": 1.0} | sections.pop("server", {})
    return Config.model_validate({"model": model, "engine": {"max_running": 4}, "server": server} | sections)


@dataclass(frozen=True)
class Application(Server):
    """An application, and what each answer to ``PROMPT`` has to be."""

    name: str
    params: SamplingParams
    expected: Answer

    def client(self) -> OpenAI:
        """Which gives up at the first error."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def health(self) -> dict[str, Any]:
        """What /health says, well or not."""
        return dict(httpx.get(f"{self.url}/health", timeout=60).json())

    def becomes(self, ranks: dict[str, Any] | None = None, **state: Any) -> None:
        """Fails unless /health says this in time, and maybe more."""

        def is_so() -> bool:
            health = self.health()
            return health.items() >= state.items() and health.get("ranks", {}).items() >= (ranks or {}).items()

        time.sleep(FRESH_S)  # until states are asked for anew: those of before may be of a replica that was just killed
        eventually(is_so, 120.0)

    def engines(self) -> set[int]:
        """The processes of the engine replicas."""
        return processes(f"ray::ServeReplica:{self.name}:engine")

    def ask(self, client: OpenAI, **changes: Any) -> Any:
        """The answer to ``PROMPT``."""
        return client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=self.params.max_tokens, temperature=self.params.temperature,
            seed=self.params.seed, extra_body={"ignore_eos": True}, **changes,
        )  # fmt: skip

    def stream_with(self, strike: Callable[[], None]) -> None:
        """A stream in whose middle something happens is the whole answer."""
        text, reason, usage = "", None, None
        with self.client() as client:
            for number, event in enumerate(self.ask(client, stream=True, stream_options={"include_usage": True})):
                usage = event.usage
                for choice in event.choices:
                    text, reason = text + choice.text, choice.finish_reason
                if number == BEGUN:
                    assert len(text) < len(self.expected.text) // 2
                    strike()
        assert (text, reason) == (self.expected.text, "length")
        assert usage is not None and usage.completion_tokens == self.params.max_tokens


@dataclass(frozen=True)
class Twins(Application):
    """Two replicas that share a real Redis, with keys for tenants and an operator's port."""

    admin_url: str
    redis: RedisProcess
    model: ModelOptions

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Of the model."""
        return PreTrainedTokenizerFast.from_pretrained(self.model.path)

    def health(self) -> dict[str, Any]:
        """Return all that /health tells the operator: the load, too."""
        return dict(httpx.get(f"{self.url}/health", headers=bearer(OPERATOR), timeout=60).json())

    def becomes_whole(self) -> None:
        """Fails unless both replicas serve, in time."""
        self.becomes(status="ok", replicas=2, shared_cache="connected")

    def client(self, tenant: str = "nobody") -> OpenAI:
        """OpenAI's client with the key of a tenant."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=f"key of {tenant}", max_retries=0, timeout=180)

    def ask(self, client: OpenAI, **changes: Any) -> Any:
        """The answer to ``PROMPT``, without a key."""
        return super().ask(client, extra_headers=NO_KEY, **changes)

    def admin(self, path: str, key: str = OPERATOR) -> httpx.Response:
        """What an admin route answers."""
        return httpx.get(f"{self.admin_url}/admin/cache/{path}", headers=bearer(key), timeout=60)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What is kept, by tenant."""
        return {entry["tenant"]: entry for entry in self.admin("stats").raise_for_status().json()["tenants"]}

    def texts(self, tenant: str) -> list[str]:
        """What is kept of a tenant, to be read."""
        snapshot = decode_snapshot(self.admin(f"export?tenant={tenant}").raise_for_status().content)
        return sorted(self.tokenizer.decode(text.tokens.tolist()) for text in snapshot.texts)


@contextlib.contextmanager
def serving_twins(api_server: Server, folder: Path) -> Iterator[Twins]:
    """See ``Twins``; requests of ``TENANTS`` are drafted for by every text and strategy, and have priorities."""
    with RedisProcess() as redis:
        port = free_port()
        config = tiny_config(
            folder,
            engine={"max_running": TWIN_RUNNING, "scheduling_policy": "priority"},
            speculation={
                "strategy": "auto", "max_draft_tokens": 16, "options": {"all_rows": True},
                "strategies": ("suffix", "recycling"),
            },
            server={"replicas": 2, "admin_port": port},
            cache={"timeout_s": 1.0},
            tenancy={
                "tenants": {name: {"keys": [hash_key(f"key of {name}")]} for name in TENANTS},
                "admin_keys": [hash_key(OPERATOR)],
            },
            redis_url=redis.url,
        )  # fmt: skip
        with serving(api_server, "twins", config, 1200) as one:
            made = Twins(one.url, one.name, one.params, one.expected, f"http://127.0.0.1:{port}", redis, config.model)
            made.becomes_whole()
            yield made


@contextlib.contextmanager
def serving(api_server: Server, name: str, config: Config, tokens: int) -> Iterator[Application]:
    """An application on the Serve that runs already.

    Args:
        api_server: on that Serve.
        name: of the application, and the route below which it is.
        config: of ``tiny_config``.
        tokens: of the sampled answer to ``PROMPT``.
    """
    params = SamplingParams(tokens, temperature=1.0, seed=77, ignore_eos=True)
    (expected,) = plain_answers(config.model, (PROMPT, params))
    serve.run(application(config), name=name, route_prefix=f"/{name}")
    try:
        yield Application(f"{api_server.url}/{name}", name, params, expected)
    finally:
        serve.delete(name)
