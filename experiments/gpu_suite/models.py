"""Llama-shaped models of random weights, made on the device in seconds, with their runners and engines."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.cuda.static_runner import has_graphs
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.batch import Batch, ScheduledRequest, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from outrider.engine.loading.model import LoadedModel
from outrider.experiments.bench.engines.contestants import EngineContestant, SharedModel
from outrider.experiments.bench.engines.guided import stock_twin
from outrider.experiments.gpu_suite.device import empty_cache
from outrider.experiments.gpu_suite.report import Report, Setting, UnavailableError, one_line

STRATEGIES = (PLAIN, "llma", "trie", "auto")


def engines(loaded: LoadedModel, runner: ModelRunner, folder: Path, guided: bool = True) -> SharedModel:
    """Return a maker of engines over one runner, which runs one of them at a time.

    ``guided`` engines follow known outputs: every row is computed, and the known token is committed. The latency curve is kept in
    ``folder``, which must be new in this run.
    """
    options = EngineOptions(max_running=1, prefix_caching=False)
    return SharedModel(loaded, options, SpeculationOptions().most_draft_tokens, guided, runner=runner, kept=folder)


def contestants(model: SharedModel, max_tokens: int) -> dict[str, EngineContestant]:
    """Return a contestant for each of ``STRATEGIES``."""
    return {name: model.contestant(parse_strategy(name), max_tokens) for name in STRATEGIES}


DRAFT_ROWS = 256  # entries of a KV slot behind the context: of the widest tree
_STD = 0.02  # of the weights


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape, and how it is measured."""

    shape: dict[str, Any]
    context: int = 8448  # tokens of prompt and output together
    contexts: tuple[int, int] = (512, 2048)  # entries in front of the steps that are timed
    rows: tuple[int, ...] = (1, 4, 16, 64)  # of those steps
    prompts: tuple[int, ...] = (2048, 8192)  # tokens of the prefills that are timed
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


@torch.no_grad()
def device_model(size: str, device: str, dtype: torch.dtype, seed: int, attention: str = TREE_ATTENTION) -> PreTrainedModel:
    """Make a Llama of a size of ``SIZES`` on a device, without a copy on the CPU; the seed and the device fix its weights."""
    config = LlamaConfig(
        **SIZES[size].shape, max_position_embeddings=16_384, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    torch.manual_seed(seed)
    assert all(buffer.device.type == torch.device(device).type for buffer in model.buffers()), size
    for weight in model.parameters():
        assert weight.device.type == torch.device(device).type and weight.dtype == dtype, (weight.device, weight.dtype)
        if weight.dim() > 1:
            weight.normal_(0.0, _STD)
        else:
            weight.fill_(1.0)
    return model


def save_model(size: str, device: str, dtype: torch.dtype, seed: int, folder: Path) -> None:
    """Write the folder of a random model for ``Engine.load``. Its tokenizer has a word for each of 256 tokens."""
    device_model(size, device, dtype, seed).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"<{number}>": number for number in range(256)}, "<0>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def build_runner(kind: str, model: PreTrainedModel, capacity: int, running: int = 1) -> ModelRunner:
    """Return a runner. Not to be called in inference mode: its slots are written to outside of it, too.

    Args:
        kind: ``strict``, the default form: rows that have the same bits in any company (``engine.forward.exactness``), as graphs
            where there can be any; ``rounding``, graphs of any number of rows; ``compiled``, those of compiled layers; ``eager``,
            kernel by kernel (``ModelRunner``).
        model: to run.
        capacity: entries of a KV slot.
        running: KV slots.

    Raises:
        UnavailableError: there is none of this kind on such a device.
        ModelLoadError: it cannot be built, or does not keep what it promises.
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
        for module in model.modules():  # other kinds share the model: what is captured stays, what is called anew is as it was
            module._compiled_call_impl = None


@dataclass(slots=True)
class Bench:
    """One model and its runners, made when they are first asked for."""

    size: str
    setting: Setting
    twin: PreTrainedModel  # made first: whatever a runner does to the model, these are the weights as they were
    loaded: LoadedModel
    ready_s: float
    _runners: dict[str, ModelRunner] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        """Entries of the KV slot."""
        return SIZES[self.size].context + DRAFT_ROWS

    def folder(self, kind: str) -> Path:
        """Return the folder of the latency curve of a kind's runner, which every part of the run uses."""
        return self.setting.scratch / self.size / kind

    def runner(self, kind: str, report: Report) -> ModelRunner:
        """Return the runner of a kind; raises as ``build_runner``, and ``UnavailableError`` if that failed before."""
        report.using(kind)
        if kind in self._failed:
            raise UnavailableError(self._failed[kind])
        if kind not in self._runners:
            report.say(f"building the {kind} runner of {self.size}")
            try:
                self._runners[kind] = build_runner(kind, self.loaded.model, self.capacity)
            except UnavailableError as error:
                self._failed[kind] = str(error)
                raise
            except ModelLoadError as error:
                self._failed[kind] = f"failed before: {one_line(error)}"
                raise
        return self._runners[kind]


def bench(setting: Setting, report: Report, kept: dict[str, Any]) -> Bench:
    """Return the job's model: the one that the worker holds, or a new one that replaces it."""
    size = report.job.size
    assert size is not None, report.job
    found = kept.get("bench")
    if not isinstance(found, Bench) or found.size != size:
        del found
        release(setting, kept)
        began = time.perf_counter()
        model = device_model(size, setting.device, getattr(torch, setting.dtype), setting.seed)
        loaded = LoadedModel(model, None, f"random-{size}", SIZES[size].context, ())
        found = Bench(size, setting, stock_twin(model), loaded, time.perf_counter() - began)
        kept["bench"] = found
        report.say(f"made {size}: {model.num_parameters() / 1e9:.2f} billion parameters in {found.ready_s:.1f} s")
    report.found["model"] = {
        "size": size, **SIZES[size].shape, "num_parameters": found.loaded.model.num_parameters(),
        "made_s": round(found.ready_s, 2),
    }  # fmt: skip
    return found


def release(setting: Setting, kept: dict[str, Any]) -> None:
    """Drop the model that the worker holds, for a part that loads its own."""
    kept.pop("bench", None)
    gc.collect()
    empty_cache(setting.device)


def step_bytes(runner: ModelRunner, entries: int) -> dict[str, int]:
    """Return the bytes that a step must read: every weight once, without separate embeddings, and the KV of ``entries``."""
    model = runner.model
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters())
    if embeddings is not head:
        weights -= embeddings.nbytes
    return {"weights": weights, "kv": runner.cache.shape.bytes_per_token() * entries}


@torch.no_grad()
def fill_slot(runner: ModelRunner, entries: int, seed: int) -> None:
    """Write random keys and values to the first entries of slot 0."""
    cache, shape = runner.cache, runner.cache.shape
    cache.prefixes.clear()
    torch.manual_seed(seed)
    for layer in range(shape.first_layer, shape.first_layer + shape.layers):
        keys, values = torch.randn(2, shape.kv_heads, entries, shape.head_dim, device=shape.device).to(shape.dtype)
        cache.write(layer, 0, 0, keys, values)


def random_tree(rows: int, vocab_size: int, seed: int) -> DraftTree:
    """Return a tree of random tokens; the parent of a row is one of the eight rows before it, so it is both deep and wide."""
    draw = np.random.default_rng(seed)
    parents = [-1, *(int(draw.integers(max(0, row - 8), row)) for row in range(1, rows))]
    tokens = draw.integers(0, vocab_size, rows).astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), np.zeros(rows, np.int8), rows)


def tree_work(tree: DraftTree, context: int) -> ScheduledRequest:
    """Return the scheduled request of a tree after ``context`` entries of slot 0."""
    request = Request("timed", np.zeros(context + 1, np.int32), SamplingParams(max_tokens=len(tree) + 1))
    request.slot = 0
    return ScheduledRequest(request, context, context + 1, tree, frozenset())


def tree_batch(tree: DraftTree, context: int) -> Batch:
    """Return the batch of a tree after ``context`` entries of slot 0."""
    return pack([tree_work(tree, context)])
