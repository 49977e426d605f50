"""Load tools of others over HTTP: ``vllm bench serve`` and aiperf at this project's server and vLLM's, one server at a time.

Every turn has the API key of a new tenant: turns ask the same prompts, and must not draft from each other's answers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cache_service.namespace import hash_key
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.models import model_folder
from outrider.experiments.bench.record import ROOT, Kept
from outrider.experiments.bench.workloads import first_that_fit
from outrider.experiments.peers.contestants import started, vllm_command, vllm_environment
from outrider.experiments.peers.environments import Environments, MissingPeerError, Say, last_words
from outrider.experiments.peers.rounds import Roof, Turn, place
from outrider.experiments.service.served import free_port, served

SERVERS = ("ours", "vLLM")
TOOLS = ("vllm bench serve", "aiperf")
CLIENTS, REQUESTS = (1, 8, 32), 44  # at once; of a turn, a quarter with one client
_NAME = "served"  # name of the model at both servers
_TOOL_S = 3600.0
_VLLM = str(ROOT / "experiments" / "peers" / "client_scripts" / "vllm_command.py")


@dataclass(frozen=True, slots=True)
class _Target:
    """Model, prompts and tools of a run."""

    name: str
    folder: Path
    prompts: dict[str, Path]  # by tool
    args: argparse.Namespace
    made: Environments
    kept: Kept
    roof: Roof
    say: Say


def measure(
    name: str, args: argparse.Namespace, made: Environments, kept: Kept, roof: Roof, say: Say
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all rounds of a model.

    Returns:
        By tool, server and clients the tool's medians ``tokens_per_s``, ``ttft_ms`` and ``tpot_ms`` of each round; and why
        something is missing.

    Raises:
        MissingPeerError: this project's server does not start.
    """
    missing: dict[str, str] = {}
    naming = argparse.Namespace(**vars(args) | {"model": name})
    with model_folder(naming) as folder, tempfile.TemporaryDirectory() as scratch:
        linked = Path(scratch) / _NAME  # both servers and tools know the model by one name
        linked.symlink_to(folder)
        target = _Target(name, linked, _prompt_files(Path(scratch), linked, args), args, made, kept, roof, say)
        for number in range(args.rounds):
            for server in SERVERS[:: -1 if number % 2 else 1]:
                contestant = f"{server} over HTTP"
                turns: list[Turn] = [
                    {"model": name, "round": number, "level": clients, "part": tool, "tool": tool, "contestant": contestant}
                    for tool in TOOLS for clients in CLIENTS if tool not in missing
                ]  # fmt: skip
                left = [turn for turn in turns if not kept.has(place(turn))]
                if not left or contestant in missing:
                    continue
                say(f"{name}, round {number + 1}: starting the server of {server}")
                try:
                    with _serving(server, target) as url:
                        for turn in left:
                            if turn["tool"] not in missing:
                                _turn(turn, url, target, missing)
                except (MissingPeerError, RuntimeError) as error:
                    if server == "ours":
                        raise MissingPeerError(str(error)) from error
                    missing[contestant] = str(error)
                    say(f"n/a: {error}")
    return _summary([turn for turn in kept.found if turn["model"] == name and "tool" in turn]), missing


def _turn(turn: Turn, url: str, target: _Target, missing: dict[str, str]) -> None:
    tool, clients = turn["tool"], turn["level"]
    target.say(f"{turn['model']}, round {turn['round'] + 1}: {tool} at {turn['contestant']}, {clients} at once")
    count = max(clients, REQUESTS if clients > 1 else REQUESTS // 4)
    run = _vllm_bench if tool == TOOLS[0] else _aiperf
    before = target.roof.read()
    try:
        found = run(target, url, _key(tool, clients), clients, count)
    except MissingPeerError as error:
        missing[tool] = str(error)
        target.say(f"n/a: {error}")
        return
    target.kept.add(turn | {"roof": [before, target.roof.read()], "found": found})


def _prompt_files(folder: Path, model: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Write the same prompts for each tool."""
    tokenizer = load_tokenizer(str(model))
    count = max(args.records, -(-REQUESTS // 22))
    texts = [record.prompt for record, _ in first_that_fit(args.workloads, tokenizer, count, args.prompt_tokens)]
    files = {}
    for tool, key in zip(TOOLS, ("prompt", "text"), strict=True):
        files[tool] = folder / f"{key}s.jsonl"
        files[tool].write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return files


@contextmanager
def _serving(server: str, target: _Target) -> Iterator[str]:
    """Run a server on a free loopback port; yield its address."""
    args, running = target.args, max(CLIENTS)
    if server == "ours":
        settings = [
            f"model.dtype={args.dtype}", "model.device=cpu", f"model.threads={args.threads}",
            f"model.max_model_len={args.context}", f"model.served_name={_NAME}", f"engine.max_running={running}",
            "engine.prefix_caching=false",
        ]  # fmt: skip
        for key in (_key(tool, clients) for tool in TOOLS for clients in CLIENTS):
            settings.append(f'tenancy.tenants.{key}.keys=["{hash_key(key)}"]')
        with served(str(target.folder), settings) as ours:
            yield ours.url
        return
    options = ("--served-model-name", _NAME, "--max-num-seqs", str(running), "--no-enable-prefix-caching")
    log = args.environments / "logs" / "vllm-server.log"
    with vllm_server(target.made, target.folder, args.dtype, args.context, options, log) as url:
        yield url


@contextmanager
def vllm_server(
    made: Environments, model: Path, dtype: str, context: int, options: Sequence[str], log: Path, way: str = ""
) -> Iterator[str]:
    """Run vLLM's server on a free loopback port; yield its address.

    ``options`` are further ones of ``vllm serve``; ``way`` is ``suffix`` for suffix decoding, which needs more than vLLM.

    Raises:
        MissingPeerError: it is not available, or does not start.
    """
    (python, _), environment = vllm_command(made, way)
    port = free_port()
    command = [
        python, _VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len",
        str(context), *options,
    ]  # fmt: skip
    with started("vLLM's server", command, environment, f"http://127.0.0.1:{port}/health", log):
        yield f"http://127.0.0.1:{port}"


def _key(tool: str, clients: int) -> str:
    """Return the API key of a turn, which also names its tenant."""
    return f"{tool.replace(' ', '-')}-{clients}"


def _vllm_bench(target: _Target, url: str, key: str, clients: int, count: int) -> dict[str, Any]:
    python, extras = target.made.vllm(), target.made.vllm_extras()
    prompts, most = target.prompts[TOOLS[0]], target.args.max_tokens
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(python), _VLLM, "bench", "serve", "--backend", "openai-chat", "--base-url", url,
            "--endpoint", "/v1/chat/completions", "--model", _NAME, "--tokenizer", str(target.folder), "--dataset-name", "custom",
            "--dataset-path", str(prompts), "--custom-output-len", str(most), "--disable-shuffle", "--skip-chat-template",
            "--num-prompts", str(count), "--max-concurrency", str(clients), "--temperature", "0", "--save-result", "--result-dir",
            folder, "--result-filename", "found.json", "--percentile-metrics", "ttft,tpot", "--disable-tqdm",
        ]  # fmt: skip
        _run("vllm bench serve", command, vllm_environment() | {"PYTHONPATH": str(extras), "OPENAI_API_KEY": key})
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    if found["completed"] < count:
        raise MissingPeerError(f"vllm bench serve: {count - found['completed']} of {count} requests failed")
    return {
        "requests": found["completed"],
        "tokens_per_s": found["output_throughput"],
        "ttft_ms": found["median_ttft_ms"],
        "tpot_ms": found["median_tpot_ms"],
    }


def _aiperf(target: _Target, url: str, key: str, clients: int, count: int) -> dict[str, Any]:
    program, prompts, most = target.made.aiperf().parent / "aiperf", target.prompts[TOOLS[1]], target.args.max_tokens
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(program), "profile", "--model", _NAME, "--url", url, "--api-key", key, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(target.folder), "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
            "--concurrency", str(clients), "--request-count", str(count), "--extra-inputs", f"max_completion_tokens:{most}",
            "--extra-inputs", "temperature:0", "--artifact-dir", folder, "--ui", "none", "--no-gpu-telemetry",
            "--no-server-metrics", "--workers-max", "1",
        ]  # fmt: skip
        _run("aiperf", command, {})
        found = json.loads(next(Path(folder).rglob("profile_export_aiperf.json")).read_text(encoding="utf-8"))
    return {
        "requests": int(found["request_count"]["avg"]),
        "tokens_per_s": found["output_token_throughput"]["avg"],
        "ttft_ms": found["time_to_first_token"]["p50"],
        "tpot_ms": found["inter_token_latency"]["p50"],
    }


def _run(name: str, command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=_TOOL_S)
    if done.returncode:
        raise MissingPeerError(f"{name} fails: {last_words(done.stdout + done.stderr)}")


def _summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return by tool, clients and server the figures of each round, and this server's tokens per second over vLLM's."""
    found: dict[str, Any] = {}
    for tool in TOOLS:
        for level in CLIENTS:
            rounds: dict[str, dict[int, dict[str, Any]]] = {}
            for turn in turns:
                if turn["tool"] == tool and turn["level"] == level:
                    rounds.setdefault(turn["contestant"].removesuffix(" over HTTP"), {})[turn["round"]] = turn["found"]
            if not rounds:
                continue
            keys = ("tokens_per_s", "ttft_ms", "tpot_ms")
            entry: dict[str, Any] = {
                server: {key: [round(one[key], 2) for one in of.values()] for key in keys} for server, of in rounds.items()
            }
            ours, theirs = (rounds.get(server, {}) for server in SERVERS)
            ratios = [ours[number]["tokens_per_s"] / theirs[number]["tokens_per_s"] for number in sorted(set(ours) & set(theirs))]
            if ratios:
                entry["times_vllm"] = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
            found.setdefault(tool, {})[str(level)] = entry
    return found
