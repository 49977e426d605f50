"""Llama-shaped models with random weights, made on the device in seconds, their runners, and the batches of timed steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from configs.slices import EngineOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from decoding.sampling.ranking import argmax_rows
from decoding.tree import DraftTree
from engine.errors import ModelLoadError
from engine.forward.attention import TREE_ATTENTION
from engine.forward.batch import Batch, Work, pack
from engine.forward.cuda.static_runner import has_graphs
from engine.forward.runner import ModelRunner
from engine.forward.runners import make_runner
from engine.loading.model import LoadedModel
from experiments.bench.engines.guided import stock_twin
from experiments.bench.engines.shared_model import SharedModel
from experiments.gpu_suite.device import Case, empty_cache
from experiments.gpu_suite.worker import Report, Setting, UnavailableError, one_line

SEED = 0  # of weights, trees and made-up texts
DRAFT_ROWS = 256  # entries of a KV slot behind the context, for the widest tree
_STD = 0.02  # of the weights


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a model, and what is measured with it."""

    shape: dict[str, Any]
    context: int = 8448  # tokens of prompt and output together
    contexts: tuple[int, int] = (512, 2048)  # entries in front of the timed steps
    rows: tuple[int, ...] = (1, 4, 16, 64)  # of those steps
    prompts: tuple[int, ...] = (2048, 8192)  # tokens of the timed prefills
    batches: tuple[int, ...] = (8, 32, 64, 256)  # requests at once


def _shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied,
    }  # fmt: skip


SIZES: dict[str, Size] = {
    "1b": Size(_shape(128_256, 2048, 8192, 16, 32, 8, tied=True)),  # Llama-3.2-1B
    "7b": Size(_shape(32_000, 4096, 11_008, 32, 32, 32)),  # Llama-2-7B: as many KV heads as heads
    "8b": Size(_shape(128_256, 4096, 14_336, 32, 32, 8)),  # Llama-3.1-8B: four heads share one
    "13b": Size(_shape(32_000, 5120, 13_824, 40, 40, 40)),  # Llama-2-13B
    # To try the suite itself.
    "tiny": Size(
        _shape(4096, 64, 96, 2, 4, 2), context=768, contexts=(32, 96), rows=(1, 4, 16), prompts=(96, 512), batches=(2, 8)
    ),
}


def llama_config(shape: dict[str, Any], context: int = 16_384) -> LlamaConfig:
    """Return the configuration of a shape, without special tokens."""
    return LlamaConfig(**shape, max_position_embeddings=context, bos_token_id=None, eos_token_id=None, pad_token_id=None)


@torch.no_grad()
def device_model(size: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose weights are drawn on the device; no copy of them is ever on the CPU."""
    with torch.device(device):
        config = llama_config(SIZES[size].shape)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=TREE_ATTENTION).eval()
    torch.manual_seed(SEED)
    assert all(buffer.device.type == torch.device(device).type for buffer in model.buffers()), size
    for weight in model.parameters():
        assert weight.device.type == torch.device(device).type and weight.dtype == dtype, (weight.device, weight.dtype)
        if weight.dim() > 1:
            weight.normal_(0.0, _STD)
        else:
            weight.fill_(1.0)
    return model


def save_model(setting: Setting, size: str, folder: Path) -> None:
    """Write the folder of a random model for ``Engine.load``. Its tokenizer has a word for each of 256 tokens."""
    device = "cpu" if setting.double else setting.device
    device_model(size, device, getattr(torch, setting.dtype)).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"<{number}>": number for number in range(256)}, "<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def build_runner(kind: str, model: PreTrainedModel, capacity: int, running: int = 1) -> ModelRunner:
    """Return a runner; call it outside of inference mode, because the slots are also written outside of it.

    Args:
        kind: ``strict``, the default: rows have the same bits beside any others (``engine.forward.exactness``), with graphs if
            possible; ``rounding``: graphs of any number of rows; ``compiled``: those of compiled layers; ``eager``: no graphs.
        capacity: entries of a KV slot.
        running: KV slots.

    Raises:
        UnavailableError: the device has no such runner.
        ModelLoadError: see ``make_runner``.
    """
    if kind == "eager":
        return ModelRunner(model, running, capacity)
    if kind in ("rounding", "compiled") and not has_graphs(model):
        raise UnavailableError("needs CUDA and Triton")
    exact: Literal["strict", "rounding"] = "strict" if kind == "strict" else "rounding"
    try:
        options = EngineOptions(max_running=running, kv_slots=running, exact=exact, compile=kind == "compiled")
        return make_runner(model, capacity, options)
    finally:
        for module in model.modules():  # the kinds share the model: graphs keep compiled layers, later calls do not use them
            module._compiled_call_impl = None


def engines(loaded: LoadedModel, runner: ModelRunner, folder: Path, guided: bool = True) -> SharedModel:
    """Return a factory of engines over a runner with one slot, which take turns.

    Args:
        folder: for the latency curve.
        guided: every row is computed, and known outputs are committed; else the model's own.
    """
    options = EngineOptions(max_running=1, prefix_caching=False)
    return SharedModel(loaded, options, SpeculationOptions().most_draft_tokens, guided, runner=runner, kept=folder)


@dataclass(slots=True)
class Bench:
    """A model, and its runners, which are made at their first use."""

    size: str
    setting: Setting
    twin: PreTrainedModel  # transformers' own model, made before any runner changes modules
    loaded: LoadedModel
    ready_s: float
    _runners: dict[str, ModelRunner | UnavailableError] = field(default_factory=dict)

    def folder(self, kind: str) -> Path:
        """Return the folder of the latency curve of a kind's runner, which all parts share."""
        return self.setting.scratch / self.size / kind

    def runner(self, kind: str, report: Report) -> ModelRunner:
        """Return the runner of a kind; raise as ``build_runner``, and ``UnavailableError`` if that failed before."""
        report.using(kind)
        if kind not in self._runners:
            report.say(f"building the {kind} runner of {self.size}")
            try:
                self._runners[kind] = build_runner(kind, self.loaded.model, SIZES[self.size].context + DRAFT_ROWS)
            except (UnavailableError, ModelLoadError) as error:
                own = isinstance(error, UnavailableError)
                self._runners[kind] = UnavailableError(str(error) if own else f"failed before: {one_line(error)}")
                raise
        found = self._runners[kind]
        if isinstance(found, UnavailableError):
            raise found
        return found

    def engines(self, kind: str, report: Report, guided: bool = True) -> SharedModel:
        """Return ``engines`` over the runner of a kind."""
        return engines(self.loaded, self.runner(kind, report), self.folder(kind), guided)


def bench(setting: Setting, report: Report, kept: dict[str, Any]) -> Bench:
    """Return the job's model: the one that the worker holds, or a new one that replaces it."""
    size = report.job.size
    assert size is not None, report.job
    found = kept.get("bench")
    if not isinstance(found, Bench) or found.size != size:
        del found
        release(setting, kept)
        began = time.perf_counter()
        model = device_model(size, setting.device, getattr(torch, setting.dtype))
        loaded = LoadedModel(model, None, f"random-{size}", SIZES[size].context, ())
        found = kept["bench"] = Bench(size, setting, stock_twin(model), loaded, time.perf_counter() - began)
        report.say(f"made {size}: {model.num_parameters() / 1e9:.2f} billion parameters in {found.ready_s:.1f} s")
    counted = {"num_parameters": found.loaded.model.num_parameters(), "made_s": round(found.ready_s, 2)}
    report.found["model"] = {"size": size, **SIZES[size].shape, **counted}
    return found


def release(setting: Setting, kept: dict[str, Any]) -> None:
    """Drop the model that the worker holds, for a part that loads its own."""
    kept.pop("bench", None)
    empty_cache(setting.device)


def step_bytes(runner: ModelRunner, entries: int) -> dict[str, int]:
    """Return the bytes that a step must read: all weights, without untied embeddings, and the KV of ``entries``."""
    model = runner.model
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters())
    if embeddings is not head:
        weights -= embeddings.nbytes
    return {"weights": weights, "kv": runner.cache.shape.bytes_per_token() * entries}


@torch.no_grad()
def fill_slot(runner: ModelRunner, entries: int) -> None:
    """Write random keys and values to the first entries of slot 0."""
    cache, shape = runner.cache, runner.cache.shape
    cache.prefixes.clear()
    torch.manual_seed(SEED)
    for layer in range(shape.first_layer, shape.first_layer + shape.layers):
        keys, values = torch.randn(2, shape.kv_heads, entries, shape.head_dim, device=shape.device).to(shape.dtype)
        cache.write(layer, 0, 0, keys, values)


def random_tree(rows: int, vocab_size: int) -> DraftTree:
    """Return a tree of random tokens. The parent of a row is one of the eight rows before it: some places are deep, some wide."""
    draw = np.random.default_rng(rows)
    parents = [-1, *(int(draw.integers(max(0, row - 8), row)) for row in range(1, rows))]
    tokens = draw.integers(0, vocab_size, rows).astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), np.zeros(rows, np.int8), rows)


def tree_batch(tree: DraftTree, context: int) -> Batch:
    """Return one forward over a tree behind ``context`` entries of slot 0."""
    request = Request("timed", np.zeros(context + 1, np.int32), SamplingParams(max_tokens=len(tree) + 1))
    request.slot = 0
    return pack([Work(request, context, context + 1, tree, frozenset())])


def step_case(runner: ModelRunner, rows: int, context: int) -> Case:
    """Return a step of one sequence: the forward of a random tree, and the argmax that waits for it."""
    batch = tree_batch(random_tree(rows, runner.model.config.vocab_size), context)
    return Case(lambda: runner.forward(batch), argmax_rows)
