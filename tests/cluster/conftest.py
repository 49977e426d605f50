"""A real Serve application on a model whose every token is known: the service is what is tested, to the letter."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
import torch
from openai import OpenAI
from ray import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.app import build_app
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions

# Greedy decoding walks around the circle, one byte a token; no byte occurs twice, so that the last token alone decides the next.
CIRCLE = "<abcdefgh-é_日:🦙;ijklm>"
ENDING = "stuvw."  # leads to the end token
MAX_MODEL_LEN = 16384
MAX_RUNNING = 3
MAX_WAITING = 4

CHAT_TEMPLATE = (
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
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Layers that add nothing, and a head that reads the next token off the last one: sure when greedy, likely when sampled."""
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    circle, ending = tokenizer.encode(CIRCLE), [*tokenizer.encode(ENDING), tokenizer.eos_token_id]
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


@dataclass(frozen=True)
class Server:
    """Where the application listens."""

    url: str

    def health(self) -> dict[str, object]:
        """What /health says; fails when it is not well."""
        return dict(httpx.get(f"{self.url}/health", timeout=30).raise_for_status().json())


@pytest.fixture(scope="session")
def circle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "circle"
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def api_server(circle_model: Path) -> Iterator[Server]:
    """The application on a Ray of its own, ended with the session."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = Config(
        model=ModelOptions(path=str(circle_model), dtype="float32", threads=1),
        engine=EngineOptions(max_running=MAX_RUNNING, max_waiting=MAX_WAITING),
        speculation=SpeculationOptions(strategy="llma", max_draft_tokens=8),
        server=ServerOptions(port=port, cpus_per_replica=0.5),
    )
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(config), name="outrider", route_prefix="/")
        yield Server(f"http://127.0.0.1:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.fixture
def client(api_server: Server) -> Iterator[OpenAI]:
    """OpenAI's client, which gives up at the first error."""
    with OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
        yield openai


@pytest.fixture
def http(api_server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=api_server.url, timeout=60) as plain:
        yield plain


@pytest.fixture(scope="session")
def byte_ids() -> Callable[[str], list[int]]:
    """The token ids of a text."""
    return build_tokenizer().encode
