"""Applications beside that of the cluster tests: a random tiny model whose seeded answer is known, and processes to kill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from openai import OpenAI
from ray import serve

from cluster.app import application
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, ServerOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from decoding.tree import Int32Array
from engine.engine import Engine
from tests.models import SENTENCES, llama_config, save_model

PROMPT = SENTENCES[0]
BEGUN = 30  # events of a stream that show that it has begun


@dataclass(frozen=True)
class Answer:
    """What plain decoding says."""

    prompt_ids: Int32Array
    ids: list[int]
    text: str


def plain_answer(model: ModelOptions, prompt: str, params: SamplingParams) -> Answer:
    """Of an engine in this process."""
    engine = Engine.load(model, EngineOptions(max_running=1), SpeculationOptions("autoregressive"))
    assert engine.tokenizer is not None
    prompt_ids = engine.tokenizer.encode(prompt)
    engine.add(Request("plain", prompt_ids, params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ids = [token for output in outputs for token in output.token_ids]
    return Answer(np.asarray(prompt_ids, np.int32), ids, "".join(output.text for output in outputs))


def processes(title: str) -> set[int]:
    """Ray's workers below this process, by the beginning of their title."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "".join(process.cmdline()[:1]).startswith(title):
                found.add(process.pid)
    return found


@dataclass(frozen=True)
class Service:
    """An application, and what each answer to ``PROMPT`` has to be."""

    url: str
    name: str
    params: SamplingParams
    expected: Answer

    def client(self) -> OpenAI:
        """Which gives up at the first error."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def health(self) -> dict[str, Any]:
        """What /health says, well or not."""
        return dict(httpx.get(f"{self.url}/health", timeout=60).json())

    def engines(self) -> set[int]:
        """The processes of the engine replicas."""
        return processes(f"ray::ServeReplica:{self.name}:engine")

    def ask(self, client: OpenAI, **changes: Any) -> Any:
        """The answer to ``PROMPT``."""
        return client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=self.params.max_tokens, temperature=self.params.temperature,
            seed=self.params.seed, extra_body={"ignore_eos": True}, **changes,
        )  # fmt: skip

    def stream_with(self, strike: Callable[[], None]) -> tuple[str, str | None, Any]:
        """A stream's text, its finish reason and its usage, when something happens in its middle."""
        text, reason, usage = "", None, None
        with self.client() as client:
            for number, event in enumerate(self.ask(client, stream=True, stream_options={"include_usage": True})):
                usage = event.usage
                for choice in event.choices:
                    text, reason = text + choice.text, choice.finish_reason
                if number == BEGUN:
                    assert len(text) < len(self.expected.text) // 2
                    strike()
        return text, reason, usage


@contextlib.contextmanager
def serving(api_url: str, name: str, config: Config, params: SamplingParams) -> Iterator[Service]:
    """An application on the Serve that runs already.

    Args:
        api_url: of that Serve.
        name: of the application, and the route below which it is.
        config: its model is named ``tiny``.
        params: of the requests for ``PROMPT``.
    """
    expected = plain_answer(config.model, PROMPT, params)
    serve.run(application(config), name=name, route_prefix=f"/{name}")
    try:
        yield Service(f"{api_url}/{name}", name, params, expected)
    finally:
        serve.delete(name)


@contextlib.contextmanager
def serving_tiny(
    api_url: str,
    name: str,
    folder: Path,
    tokens: int,
    speculation: SpeculationOptions,
    server: ServerOptions,
    parallelism: ParallelismOptions | None = None,
) -> Iterator[Service]:
    """As ``serving``, of a random model that is saved first.

    Args:
        api_url: of a Serve that runs.
        name: of the application.
        folder: of the model, not there yet.
        tokens: of the sampled answer to ``PROMPT``.
        speculation: of the service.
        server: of the service.
        parallelism: of the service; None is one rank a replica.
    """
    save_model(folder, llama_config(max_position_embeddings=2048))
    config = Config(
        model=ModelOptions(path=str(folder), dtype="float32", threads=1),
        engine=EngineOptions(max_running=4),
        speculation=speculation,
        parallelism=parallelism or ParallelismOptions(),
        server=server,
    )
    with serving(api_url, name, config, SamplingParams(tokens, temperature=1.0, seed=77, ignore_eos=True)) as made:
        yield made
