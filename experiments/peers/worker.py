"""Our engine, or transformers, in a process that stays up: a JSON line with a job on stdin, one with what came on stdout.

    python -m experiments.peers.worker ours|transformers

The first line is the setting: ``model`` (a folder), ``dtype``, ``threads``, ``context`` (tokens of prompt and output),
``running`` (most requests at once) and ``ends`` (the end tokens). It is answered with ``{"ready": true, ...}`` once the model is
there. A job is ``{"mode", "running", "max_tokens", "asks": [[id, prompt, references], ...], "fresh"}``: all are asked greedily,
``running`` at a time, each the next one as soon as one has ended. Its answer has, in the order of the asks, ``tokens`` (ids),
``first_s`` and ``last_s`` (seconds from when a request was sent to its first and its last token), and ``wall_s`` of all.
``fresh`` names a tenant: what requests of another one taught is not drafted from.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.drafters import LOSSLESS, WITH_DRAFT_MODEL
from decoding.request import PLAIN, Request, SamplingParams
from decoding.sampling.ranking import argmax_rows
from decoding.tree import DraftTree
from engine.engine import Engine, load_runner
from engine.executor import LocalExecutor
from engine.forward.batch import Work, pack
from engine.forward.runner import ModelRunner
from engine.loading.memory import give_heap_back
from engine.loading.model import load_weights
from engine.text.grammar import Grammars
from engine.text.tokenizer import load_tokenizer
from experiments.bench.engines.contestants import Prompt
from experiments.bench.engines.models import calm
from experiments.bench.engines.stock_batching import StockBatching
from experiments.bench.engines.stock_generate import StockGenerate, StockPromptLookup
from experiments.bench.engines.traffic import ClosedLoop, EngineServer, Server, drive
from experiments.bench.record import ROOT

SINGLE = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {PLAIN, "auto"})  # our strategies besides auto
ROWS = (1, 8)  # of one request, whose steps are compared
KINDS = {  # of what a forward does: the operations of ``engine.forward.cpu.native_step``
    "linears": ("LINEAR", "PICKED_LINEAR"),
    "attention": ("ATTEND",),
    "norms, rotation, embedding": ("NORM", "PICKED_NORM", "ROTATE", "EMBED"),
}
Job = dict[str, Any]
Reply = dict[str, Any]


class Peer(Protocol):
    """What a worker runs jobs on."""

    def ready(self) -> Reply:
        """What the answer to the setting says besides ``ready``."""
        ...

    def run(self, job: Job) -> Reply:
        """The answer to a job."""
        ...


def prompts_of(job: Job) -> list[Prompt]:
    """What a job asks."""
    return [Prompt(key, ids, references) for key, ids, references in job["asks"]]


def driven(server: Server, job: Job) -> tuple[Reply, list[tuple[float, float]]]:
    """What a server made of a job; and when each request decoded, from its first token to its last, in seconds since it began."""
    began = time.perf_counter()
    journeys, _ = drive(server, prompts_of(job), ClosedLoop(job["running"]))
    wall_s = max(journey.last_s for journey in journeys)
    reply = {
        "tokens": [journey.output for journey in journeys],
        "first_s": [journey.first_s - journey.sent_s for journey in journeys],
        "last_s": [journey.last_s - journey.sent_s for journey in journeys],
        "wall_s": wall_s,
    }
    return reply, [(began + journey.first_s, began + journey.last_s) for journey in journeys]


class StepTimer:
    """Forwards of a model over so many rows of one request, a root and branches below it, behind a context."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        """
        Args:
            runner: of the model, without requests; its first slot is taken.
            context: tokens before the rows.
        """
        self._runner = runner
        self._request = Request("timed", np.zeros(context, np.int32), SamplingParams(1))
        self._request.slot = 0
        self._runner.forward(pack([Work(self._request, 0, context, DraftTree.chain(0, ()), frozenset())]))

    def seconds(self, rows: int, repeats: int, argmax: bool) -> list[float]:
        """Each of ``repeats`` forwards over ``rows`` rows; with ``argmax`` the likeliest token of each, too."""
        parents = np.minimum(np.arange(-1, rows - 1, dtype=np.int32), 0)
        tree = DraftTree(np.zeros(rows, np.int32), parents, np.zeros(rows, np.int8), rows)
        end = self._request.num_tokens
        batch = pack([Work(self._request, end - 1, end, tree, frozenset())])
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            logits = self._runner.forward(batch)
            if argmax:
                argmax_rows(logits)
            times.append(time.perf_counter() - started)
        return times


def _resident(tensor: torch.Tensor) -> int:
    """Bytes of the pages of a tensor that are in memory. Raises ``OSError`` where the system does not tell."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = tensor.data_ptr() // page * page
    pages = (ctypes.c_ubyte * -(-(tensor.data_ptr() + tensor.nbytes - first) // page))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(pages) * page), pages):
        raise OSError("mincore failed")
    return page * sum(flags & 1 for flags in pages)


class OurEngine:
    """Our engine by the default options, but for room for all requests and no KV that is there from an earlier round.

    Modes: ``plain``, ``auto``, a name of ``SINGLE``, and ``rows``, which times forwards of ``ROWS`` rows of one request.
    """

    def __init__(self, setting: dict[str, Any]) -> None:
        """
        Raises:
            ModelLoadError: the model cannot be used.
        """
        self._model = ModelOptions(
            setting["model"], dtype=setting["dtype"], device="cpu", threads=setting["threads"], max_model_len=setting["context"],
            weights=setting.get("weights", "auto"),
        )  # fmt: skip
        self._options = EngineOptions(setting["running"], max_waiting=1 << 20, prefix_caching=False)
        self._engines: dict[str, tuple[Engine, ModelRunner]] = {}
        self._rows: ModelRunner | None = None
        small = dataclasses.replace(self._model, path=str(ROOT / "demo_model"), weights="auto", max_model_len=None)
        Engine.load(small, EngineOptions(1), SpeculationOptions(PLAIN))  # what code takes is no model's
        gc.collect()
        before = psutil.Process().memory_info().rss
        tokenizer = load_tokenizer(setting["model"])
        vocabulary = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        vocabulary.prepare()
        give_heap_back()
        self._vocabulary_bytes = psutil.Process().memory_info().rss - before
        del tokenizer, vocabulary
        gc.collect()
        give_heap_back()
        before = psutil.Process().memory_info().rss
        runner = self._engine("plain")[1]
        gc.collect()
        self._resident_bytes = psutil.Process().memory_info().rss - before
        self._kv_bytes = sum(_resident(part) for at in range(runner.cache.shape.layers) for part in runner.cache.layer(at))

    def _engine(self, mode: str) -> tuple[Engine, ModelRunner]:
        """Plain decoding and ``auto`` have engines as a user has them; the single strategies are one engine's, by request."""
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
        """Bytes of the weights that a step reads, a table of embeddings that is no output layer as well being only looked up; and
        of what is resident with an engine, with its tokenizer and the table of its grammars, which are told apart, and without
        what the checks of its start wrote into KV slots."""
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
        """See ``Peer``. With one request at a time ``host_share`` is told: what of the decoding is not in the model's forward."""
        mode = job["mode"]
        if mode == "rows":
            return self._time_rows(job["repeats"], job["prompt_tokens"])
        engine, runner = self._engine(mode)
        forwards: list[tuple[float, float]] = []
        forward = runner.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = forward(*args, **kwargs)
            forwards.append((started, time.perf_counter()))
            return result

        strategy = {"plain": PLAIN, "auto": None}.get(mode, mode)  # of the engine that is there already

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

    def _time_rows(self, repeats: int, context: int) -> Reply:
        """Medians of forwards over some rows of one request, in ms, in turns: whole ones, and each of ``KINDS`` alone."""
        if self._rows is None:
            _, self._rows = load_runner(self._model, EngineOptions(1), SpeculationOptions(PLAIN), 1)
        timer = StepTimer(self._rows, context)
        found: dict[tuple[str, int], list[float]] = {(kind, rows): [] for kind in ("", *KINDS) for rows in ROWS}
        for _ in range(repeats):
            for (kind, rows), seconds in found.items():
                with _only(self._rows, kind) as known:
                    seconds += timer.seconds(rows, 2, argmax=not kind)[1:] if known else ()
        taken = {key: 1e3 * statistics.median(seconds) for key, seconds in found.items() if seconds}
        kinds = {kind: {str(rows): taken[kind, rows] for rows in ROWS} for kind in KINDS if (kind, 1) in taken}
        return {"ms": {str(rows): taken["", rows] for rows in ROWS}, "kinds_ms": kinds}


@contextlib.contextmanager
def _only(runner: ModelRunner, kind: str) -> Iterator[bool]:
    """Has forwards compute one of ``KINDS`` and nothing else; all for an empty name. False where they are not compiled whole."""
    whole = runner._whole
    if not kind or whole is None:
        yield not kind
        return
    native, layers = whole._native, len(runner.model.model.layers)
    kinds = {getattr(native, name) for name in KINDS[kind]}
    operations = [each for each in whole._operations_of(layers) if each.kind in kinds]
    chosen = (native.Operation * len(operations))(*operations)
    setattr(whole, "_operations_of", lambda layers, adapted=False: chosen)  # noqa: B010 - mypy: a method
    try:
        yield True
    finally:
        del whole._operations_of  # the wrapper


class Transformers:
    """transformers itself. Modes: ``greedy`` (several at once as a padded group), ``lookup`` and ``batching``."""

    def __init__(self, setting: dict[str, Any]) -> None:
        """
        Raises:
            ModelLoadError: the model cannot be used.
        """
        calm(setting["threads"])
        self._model = load_weights(setting["model"], getattr(torch, setting["dtype"]), "sdpa").eval()
        self._context, self._ends = setting["context"], tuple(setting["ends"])
        self._model.generation_config.eos_token_id = list(self._ends) or None

    def ready(self) -> Reply:
        """See ``Peer``."""
        return {}

    def run(self, job: Job) -> Reply:
        """See ``Peer``."""
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
    """Answers until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    lines = (json.loads(line) for line in sys.stdin)
    peer = _PEERS[argv[0]](next(lines))
    for reply in itertools.chain([peer.ready() | {"ready": True}], map(peer.run, lines)):
        print(json.dumps(reply), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
