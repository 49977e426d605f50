"""Contestants and their processes: each process loads its model once, and idles while others run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoConfig, GenerationConfig

from outrider.experiments.bench.record import ROOT
from outrider.experiments.peers.environments import Environments, MissingPeerError, last_words
from outrider.experiments.peers.worker import SINGLE
from outrider.experiments.service.served import free_port, running

Ask = Callable[[dict[str, Any]], dict[str, Any]]  # a job to its answer, as in experiments/peers/worker.py
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SUFFIX = {"method": "suffix"}
LLAMA_LOOKUP = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
_START_S = 600.0  # to load a model, and for vLLM to compile it


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system in one of its modes."""

    name: str
    system: str  # key of the process, see ``Field``
    mode: str
    levels: tuple[int, ...]  # requests at once
    share: int = 1  # it is asked one in ``share`` of the prompts


CONTESTANTS = (
    Contestant("plain", "ours", "plain", (1, 8, 32)),
    Contestant("auto", "ours", "auto", (1, 8, 32)),
    *(Contestant(name, "ours", name, (1,), share=2) for name in SINGLE),
    Contestant("plain Q4_1", "ours q4_1", "plain", (1, 8, 32)),  # of llama.cpp's file
    Contestant("auto Q4_1", "ours q4_1", "auto", (1, 8, 32)),
    Contestant("plain int8", "ours int8", "plain", (1,)),
    Contestant("vLLM", "vllm", "vllm", (1, 8, 32)),
    Contestant("vLLM ngram", "vllm ngram", "vllm", (1, 8, 32)),
    Contestant("vLLM suffix", "vllm suffix", "vllm", (1, 8, 32)),
    Contestant("llama.cpp", "llama bf16", "llama", (1, 8, 32)),
    Contestant("llama.cpp lookup", "llama lookup", "llama", (1,)),
    Contestant("llama.cpp Q4_1", "llama q4_1", "llama", (1,)),
    Contestant("transformers", "transformers", "greedy", (1,), share=4),
    Contestant("transformers lookup", "transformers", "lookup", (1,), share=4),
    Contestant("transformers batching", "transformers", "batching", (8, 32)),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Model and limits, the same for all contestants."""

    model: str  # folder
    dtype: str
    threads: int
    context: int  # tokens of prompt and output together
    longest: int  # largest number of tokens of prompt and output of any request
    running: int  # most requests at once
    ends: tuple[int, ...]  # end tokens


def end_tokens(model: str) -> tuple[int, ...]:
    """Return the end tokens of a model's folder, from its generation configuration, or else its configuration."""
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ends = AutoConfig.from_pretrained(model).eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


class Field:
    """The processes of one model. Each starts when it is first asked; all end together."""

    def __init__(self, setting: Setting, environments: Environments, gguf: Callable[[str], Path], log: Path) -> None:
        """``gguf`` returns the model's file of a type, ``bf16`` or ``q4_1``, and may raise ``MissingPeerError``."""
        self.gguf = gguf
        self._setting, self._environments, self._log = setting, environments, log
        self._stack, self._asks = ExitStack(), dict[str, Ask]()
        self.told: dict[str, dict[str, Any]] = {}  # by system: its first answer

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(self, system: str, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a system to a job.

        Raises:
            MissingPeerError: the system is not available, cannot run the model, or has ended.
        """
        self.ready(system)
        return self._asks[system](job)

    def ready(self, system: str) -> None:
        """Start a system unless it runs. Raises ``MissingPeerError``."""
        if system not in self._asks:
            self._asks[system] = self._stack.enter_context(self._opened(system))

    @contextmanager
    def _opened(self, system: str) -> Iterator[Ask]:
        name, _, way = system.partition(" ")
        log = self._log / f"{system.replace(' ', '-')}.log"
        if name == "llama":
            setting = self._setting if way == "bf16" else replace(self._setting, running=1)  # the others are asked one at a time
            programs, model = self._environments.llama(), self.gguf("q4_1" if way == "q4_1" else "bf16")
            with llama_server(programs, model, setting, LLAMA_LOOKUP if way == "lookup" else (), log) as ask:
                yield ask
            return
        keys = ("model", "dtype", "threads", "context", "running", "ends")
        told = {key: getattr(self._setting, key) for key in keys}
        if name == "vllm":
            command, environment = vllm_command(self._environments, way)
            told |= {"drafts": {"ngram": NGRAM, "suffix": SUFFIX, "": None}[way], "eager": False}
        else:
            command, environment = [sys.executable, "-m", "outrider.experiments.peers.worker", name], {"PYTHONPATH": str(ROOT)}
            if way == "q4_1":
                told["model"] = str(self.gguf(way))
            elif way:
                told["weights"] = way
        with worker(system, command, environment, told, log) as (ask, self.told[system]):
            yield ask


def vllm_command(environments: Environments, way: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of vLLM's worker and its environment. Raises ``MissingPeerError``."""
    python, environment = environments.vllm(), vllm_environment()
    if way == "suffix":
        environment["PYTHONPATH"] = str(environments.vllm_extras())
    return [str(python), str(ROOT / "experiments" / "peers" / "client_scripts" / "vllm_worker.py")], environment


def vllm_environment() -> dict[str, str]:
    """Return vLLM's variables on a CPU: its cores, 2 GiB of KV, no plugins, and functions may be sent to its worker."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_PLUGINS": "",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip


@contextmanager
def worker(
    name: str, command: Sequence[str], environment: dict[str, str], setting: dict[str, Any], log: Path
) -> Iterator[tuple[Ask, dict[str, Any]]]:
    """Run a process that answers JSON lines with JSON lines; yield it with its answer to the setting.

    Raises:
        MissingPeerError: the process ended; the message has its last words.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    pipe, variables = subprocess.PIPE, os.environ | environment
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=variables, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(what: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise MissingPeerError(f"{name} ended: {_words_of(log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask, ask(setting)
    finally:
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stdout.close()


@contextmanager
def llama_server(programs: Path, model: Path, setting: Setting, options: Sequence[str], log: Path) -> Iterator[Ask]:
    """Run llama.cpp's server without a cache of prompts; its own times of prompt and output count, without HTTP's.

    Raises:
        MissingPeerError: it does not start, or has ended.
    """
    port, per_request = free_port(), -(-setting.longest // 256) * 256
    command = [
        str(programs / "llama-server"), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--threads",
        str(setting.threads), "--threads-batch", str(setting.threads), "--parallel", str(setting.running), "--ctx-size",
        str(setting.running * per_request), *options,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with started("llama.cpp", command, {}, f"{url}/health", log), httpx.Client(base_url=url, timeout=3600) as client:

        def one(ids: Sequence[int], most: int) -> dict[str, Any]:
            body = {
                "prompt": list(ids), "n_predict": most, "temperature": 0, "cache_prompt": False, "return_tokens": True,
                "ignore_eos": not setting.ends,
            }  # fmt: skip
            reply: dict[str, Any] = client.post("/completion", json=body).raise_for_status().json()
            return reply

        def ask(job: dict[str, Any]) -> dict[str, Any]:
            with ThreadPoolExecutor(job["running"]) as pool:
                began = time.perf_counter()
                try:
                    replies = list(pool.map(lambda each: one(each[1], job["max_tokens"]), job["asks"]))
                except httpx.HTTPError as error:
                    raise MissingPeerError(f"llama.cpp does not answer ({error}): {_words_of(log)}") from error
                wall_s = time.perf_counter() - began
            first = [reply["timings"]["prompt_ms"] / 1e3 for reply in replies]
            decode = [reply["timings"]["predicted_ms"] / 1e3 for reply in replies]
            return {
                "tokens": [reply["tokens"] for reply in replies],
                "count": [reply["timings"]["predicted_n"] for reply in replies],  # with the end token, which ``tokens`` lacks
                "first_s": first,
                "last_s": [a + b for a, b in zip(first, decode, strict=True)],
                "wall_s": wall_s,
            }

        yield ask


@contextmanager
def started(name: str, command: Sequence[str], environment: dict[str, str], health: str, log: Path) -> Iterator[None]:
    """Run a server of another system. Raises ``MissingPeerError`` if it does not start."""
    with ExitStack() as stack:
        try:
            stack.enter_context(running(name, command, ROOT, os.environ | environment, health, log, _START_S))
        except RuntimeError as error:
            raise MissingPeerError(str(error)) from error
        yield


def _words_of(log: Path) -> str:
    return last_words(log.read_text(encoding="utf-8", errors="replace"))
