"""Process with this project's engine or transformers: reads jobs as JSON lines on stdin, and answers with JSON lines.

    python -m experiments.peers.worker ours|transformers

The first line is the setting: ``model`` (a folder), ``dtype``, ``threads``, ``context`` (tokens of prompt and output),
``running`` (most requests at once) and ``ends`` (the end tokens). Its answer is ``{"ready": true, ...}`` once the model is
loaded. A job is ``{"mode", "running", "max_tokens", "asks": [[id, prompt, references], ...], "fresh"}``: all are asked greedily,
``running`` at a time. Its answer has, in the order of the asks, ``tokens`` (ids), ``first_s`` and ``last_s`` (seconds from
sending a request to its first and its last token), and ``wall_s`` of all. ``fresh`` names a tenant, who shares no history.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import LOSSLESS, WITH_DRAFT_MODEL
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.tree import DraftTree
from outrider.engine.engine import Engine, load_runner
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.batch import ScheduledRequest, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.memory import release_heap
from outrider.engine.loading.model import load_weights
from outrider.engine.text.grammar import Grammars
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.models import calm
from outrider.experiments.bench.engines.stock_batching import StockBatching
from outrider.experiments.bench.engines.stock_generate import StockGenerate, StockPromptLookup
from outrider.experiments.bench.engines.traffic import ClosedLoop, EngineServer, Server, drive
from outrider.experiments.bench.record import ROOT

SINGLE = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {PLAIN, "auto"})  # the strategies besides auto
ROWS = (1, 8)  # rows of one request whose steps are timed
Job = dict[str, Any]
Reply = dict[str, Any]


class Peer(Protocol):
    """System that runs jobs."""

    def ready(self) -> Reply:
        """Return what the answer to the setting has besides ``ready``."""
        ...

    def run(self, job: Job) -> Reply:
        """Return the answer to a job."""
        ...


def prompts_of(job: Job) -> list[Prompt]:
    """Return the prompts of a job."""
    return [Prompt(key, ids, references) for key, ids, references in job["asks"]]


def driven(server: Server, job: Job) -> tuple[Reply, list[tuple[float, float]]]:
    """Run a job; return its answer, and the times of the first and the last token of each request on this process's clock."""
    began = time.perf_counter()
    journeys, _ = drive(server, prompts_of(job), ClosedLoop(job["running"]))
    reply = {
        "tokens": [journey.output for journey in journeys],
        "first_s": [journey.first_s - journey.sent_s for journey in journeys],
        "last_s": [journey.last_s - journey.sent_s for journey in journeys],
        "wall_s": max(journey.last_s for journey in journeys),
    }
    return reply, [(began + journey.first_s, began + journey.last_s) for journey in journeys]


def step_seconds(runner: ModelRunner, context: int, repeats: int) -> dict[int, float]:
    """Return the median seconds of a forward with argmax by rows (``ROWS``) of one request: a root and branches below it.

    The runner must have no requests: its first slot is used, with ``context`` tokens before the rows.
    """
    request = Request("timed", np.zeros(context, np.int32), SamplingParams(1))
    request.slot = 0
    runner.forward(pack([ScheduledRequest(request, 0, context, DraftTree.chain(0, ()), frozenset())]))
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for rows, seconds in times.items():
            parents = np.minimum(np.arange(-1, rows - 1, dtype=np.int32), 0)
            tree = DraftTree(np.zeros(rows, np.int32), parents, np.zeros(rows, np.int8), rows)
            batch = pack([ScheduledRequest(request, request.num_tokens - 1, request.num_tokens, tree, frozenset())])
            for timed in (False, True):  # the first one after other rows is slower
                started = time.perf_counter()
                argmax_rows(runner.forward(batch))
                if timed:
                    seconds.append(time.perf_counter() - started)
    return {rows: statistics.median(seconds) for rows, seconds in times.items()}


def _resident(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's pages that are in memory. Raises ``OSError`` if the system cannot tell."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = tensor.data_ptr() // page * page
    pages = (ctypes.c_ubyte * -(-(tensor.data_ptr() + tensor.nbytes - first) // page))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(pages) * page), pages):
        raise OSError("mincore failed")
    return page * sum(flags & 1 for flags in pages)


class OurEngine:
    """This project's engine with default options, but room for all requests and no reuse of KV.

    Modes: ``plain``, ``auto``, a name of ``SINGLE``, and ``rows``, see ``step_seconds``.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        """Load the model, and measure its memory. Raises ``ModelLoadError``."""
        self._model = ModelOptions(
            setting["model"], dtype=setting["dtype"], device="cpu", threads=setting["threads"], max_model_len=setting["context"],
            weights=setting.get("weights", "auto"),
        )  # fmt: skip
        self._options = EngineOptions(setting["running"], max_waiting=1 << 20, prefix_caching=False)
        self._engines: dict[str, tuple[Engine, ModelRunner]] = {}
        self._rows: ModelRunner | None = None
        self._measure_memory(setting["model"])

    def _measure_memory(self, model: str) -> None:
        """Load the plain engine, and measure what it adds to this process beside code, and KV slots that its checks wrote."""
        small = dataclasses.replace(self._model, path=str(ROOT / "demo_model"), weights="auto", max_model_len=None)
        Engine.load(small, EngineOptions(1), SpeculationOptions(PLAIN))  # loads the code
        gc.collect()
        before = psutil.Process().memory_info().rss
        tokenizer = load_tokenizer(model)
        vocabulary = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        vocabulary.prepare()
        release_heap()
        self._vocabulary_bytes = psutil.Process().memory_info().rss - before
        del tokenizer, vocabulary
        gc.collect()
        release_heap()
        before = psutil.Process().memory_info().rss
        runner = self._engine("plain")[1]
        gc.collect()
        self._resident_bytes = psutil.Process().memory_info().rss - before
        self._kv_bytes = sum(_resident(part) for at in range(runner.cache.shape.layers) for part in runner.cache.layer(at))

    def _engine(self, mode: str) -> tuple[Engine, ModelRunner]:
        """Return an engine: plain decoding and ``auto`` have their own, the other strategies share one."""
        first = {"plain": PLAIN, "auto": "auto"}.get(mode, SINGLE[0])
        if first not in self._engines:
            runners: list[ModelRunner] = []

            def executor(runner: ModelRunner) -> LocalExecutor:
                runners.append(runner)
                return LocalExecutor(runner)

            speculation = SpeculationOptions(first, strategies=tuple(SINGLE[1:]) if first == SINGLE[0] else ())
            self._engines[first] = Engine.load(self._model, self._options, speculation, executor=executor), runners[0]
        return self._engines[first]

    def ready(self) -> Reply:
        """Return the bytes of the weights that a step reads (not an embedding table without output layer), and of memory."""
        engine, runner = self._engine("plain")
        model = runner.model
        read = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if table.data_ptr() != head.data_ptr():
            read.pop(table.data_ptr(), None)
        return {
            "weight_bytes": sum(read.values()), "resident_bytes": self._resident_bytes - self._kv_bytes,
            "vocabulary_bytes": self._vocabulary_bytes, "kv_bytes": self._kv_bytes,
            "parameters": engine.info.num_parameters, "exact": engine.info.exact,
        }  # fmt: skip

    def run(self, job: Job) -> Reply:
        """Run a job; with one request at a time, ``host_share`` is the share of decoding outside the model's forward."""
        mode = job["mode"]
        if mode == "rows":
            if self._rows is None:
                _, self._rows = load_runner(self._model, EngineOptions(1), SpeculationOptions(PLAIN), 1)
            seconds = step_seconds(self._rows, job["prompt_tokens"], job["repeats"])
            return {"ms": {str(rows): 1e3 * each for rows, each in seconds.items()}}
        engine, runner = self._engine(mode)
        forwards: list[tuple[float, float]] = []
        forward = runner.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = forward(*args, **kwargs)
            forwards.append((started, time.perf_counter()))
            return result

        strategy = {"plain": PLAIN, "auto": None}.get(mode, mode)  # None: the engine's own

        def request(prompt: Prompt) -> Request:
            params = SamplingParams(job["max_tokens"])
            return Request(prompt.id, prompt.ids, params, prompt.references, tenant=job["fresh"], strategy=strategy)

        setattr(runner, "forward", timed)  # noqa: B010 - mypy: a method
        try:
            reply, spans = driven(EngineServer(mode, lambda: engine, request), job)
        finally:
            del runner.forward  # the wrapper
        if job["running"] == 1 and (whole := sum(last - first for first, last in spans)):
            starts = np.array([first for first, _ in spans])
            ends = np.array([last for _, last in spans])
            of = [np.searchsorted(starts, start, side="right") - 1 for start, _ in forwards]
            within = sum(end - start for (start, end), at in zip(forwards, of, strict=True) if at >= 0 and end <= ends[at])
            reply["host_share"] = 1 - within / whole
        return reply


class Transformers:
    """transformers. Modes: ``greedy`` (several at once as a padded group), ``lookup`` and ``batching``."""

    def __init__(self, setting: dict[str, Any]) -> None:
        """Load the model. Raises ``ModelLoadError``."""
        calm(setting["threads"])
        self._model = load_weights(setting["model"], getattr(torch, setting["dtype"]), "sdpa").eval()
        self._context, self._ends = setting["context"], tuple(setting["ends"])
        self._model.generation_config.eos_token_id = list(self._ends) or None

    def ready(self) -> Reply:
        """Return nothing."""
        return {}

    def run(self, job: Job) -> Reply:
        """Run a job."""
        most, running = job["max_tokens"], job["running"]
        if job["mode"] == "batching":
            return driven(StockBatching(self._model, most, self._ends, running, self._context), job)[0]
        kind = StockPromptLookup if job["mode"] == "lookup" else StockGenerate
        stock = kind(self._model, most, self._ends)
        began = time.perf_counter()
        reply: Reply = {"tokens": [], "first_s": [], "last_s": []}
        prompts = prompts_of(job)
        for start in range(0, len(prompts), running):
            group, started = prompts[start : start + running], time.perf_counter()
            run = stock.run(group)
            reply["tokens"] += run.outputs
            reply["first_s"] += [run.prefill_s] * len(group)
            reply["last_s"] += [time.perf_counter() - started] * len(group)
        return reply | {"wall_s": time.perf_counter() - began}


_PEERS: dict[str, Callable[[dict[str, Any]], Peer]] = {"ours": OurEngine, "transformers": Transformers}


def main(argv: Sequence[str]) -> int:
    """Answer until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout
    lines = (json.loads(line) for line in sys.stdin)
    peer = _PEERS[argv[0]](next(lines))
    for reply in itertools.chain([peer.ready() | {"ready": True}], map(peer.run, lines)):
        print(json.dumps(reply), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
