"""Over HTTP: other people's load tools, ``vllm bench serve`` and aiperf, drive our server and vLLM's, one server at a time.

Every turn comes with an API key of a tenant of its own: all turns ask the same prompts, and none may draft from what another was
answered.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_service.namespace import hash_key
from experiments.bench.engines.models import model_folder
from experiments.bench.record import ROOT, Kept
from experiments.bench.workloads import first_that_fit
from experiments.peers.contestants import started, vllm_command, vllm_environment
from experiments.peers.environments import Environments, MissingPeerError
from experiments.peers.rounds import Roof, Say, Turn, place
from experiments.service.served import free_port, served

SERVERS = ("ours", "vLLM")
TOOLS = ("vllm bench serve", "aiperf")
_NAME = "served"  # of the model, at both servers
_TOOL_S = 3600.0
_VLLM = str(ROOT / "experiments" / "peers" / "client_scripts" / "vllm_command.py")


def measure(
    name: str, args: argparse.Namespace, made: Environments, kept: Kept, roof: Roof, say: Say
) -> tuple[dict[str, Any], dict[str, str]]:
    """All rounds of a model.

    Returns:
        By tool, server and clients: ``tokens_per_s``, ``ttft_ms`` and ``tpot_ms`` (the tool's medians), a number a round; and why
        what is missing is missing.

    Raises:
        MissingPeerError: our own server does not start.
    """
    missing: dict[str, str] = {}
    naming = argparse.Namespace(**vars(args) | {"model": name})
    with model_folder(naming) as folder, tempfile.TemporaryDirectory() as scratch:
        linked = Path(scratch) / _NAME  # both servers and tools know the model by one name
        linked.symlink_to(folder)
        files = _prompt_files(Path(scratch), linked, args)
        for number in range(args.rounds):
            for server in SERVERS[:: -1 if number % 2 else 1]:
                cells = [(tool, clients) for tool in TOOLS for clients in args.clients if tool not in missing]
                turns: list[Turn] = [
                    {
                        "model": name, "round": number, "level": clients, "part": tool, "tool": tool,
                        "contestant": f"{server} over HTTP",
                    }
                    for tool, clients in cells
                ]  # fmt: skip
                left = [turn for turn in turns if not kept.has(place(turn))]
                if not left or f"{server} over HTTP" in missing:
                    continue
                say(f"{name}, round {number + 1}: starting the server of {server}")
                try:
                    with _serving(server, linked, args, made) as url:
                        for turn in left:
                            if turn["tool"] not in missing:
                                _turn(turn, url, linked, files, args, made, kept, roof, say, missing)
                except (MissingPeerError, RuntimeError) as error:
                    if server == "ours":
                        raise MissingPeerError(str(error)) from error
                    missing[f"{server} over HTTP"] = str(error)
                    say(f"n/a: {error}")
    return _summary([turn for turn in kept.found if turn["model"] == name and "tool" in turn], args.clients), missing


def _turn(
    turn: Turn, url: str, model: Path, files: dict[str, Path], args: argparse.Namespace, made: Environments, kept: Kept,
    roof: Roof, say: Say, missing: dict[str, str],
) -> None:  # fmt: skip
    tool, clients = turn["tool"], turn["level"]
    say(f"{turn['model']}, round {turn['round'] + 1}: {tool} at {turn['contestant']}, {clients} at once")
    key = _key(tool, clients)
    count = max(clients, args.requests if clients > 1 else args.requests // 4, 1)
    run: Callable[..., dict[str, Any]] = _vllm_bench if tool == TOOLS[0] else _aiperf
    before = roof.read()
    try:
        found = run(made, url, key, model, files[tool], clients, count, args.max_tokens)
    except MissingPeerError as error:
        missing[tool] = str(error)
        say(f"n/a: {error}")
        return
    kept.add(turn | {"roof": [before, roof.read()], "found": found})


def _prompt_files(folder: Path, model: Path, args: argparse.Namespace) -> dict[str, Path]:
    """The same prompts as each tool reads them, by tool."""
    from engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    count = max(args.records, -(-max(args.requests, *args.clients) // 22))
    texts = [record.prompt for record, _ in first_that_fit(args.workloads, tokenizer, count, args.prompt_tokens)]
    files = {}
    for tool, key in zip(TOOLS, ("prompt", "text"), strict=True):
        files[tool] = folder / f"{key}s.jsonl"
        files[tool].write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return files


@contextmanager
def _serving(server: str, model: Path, args: argparse.Namespace, made: Environments) -> Iterator[str]:
    """A server on a free loopback port; its address."""
    running = max(args.clients)
    if server == "ours":
        settings = [
            f"model.dtype={args.dtype}", "model.device=cpu", f"model.threads={args.threads}",
            f"model.max_model_len={args.context}", f"model.served_name={_NAME}", f"engine.max_running={running}",
            "engine.prefix_caching=false",
        ]  # fmt: skip
        for key in (_key(tool, clients) for tool in TOOLS for clients in args.clients):
            settings.append(f'tenancy.tenants.{key}.keys=["{hash_key(key)}"]')
        with served(str(model), settings) as ours:
            yield ours.url
        return
    options = ("--served-model-name", _NAME, "--max-num-seqs", str(running), "--no-enable-prefix-caching")
    log = args.environments / "logs" / "vllm-server.log"
    with vllm_server(made, model, args.dtype, args.context, options, log) as url:
        yield url


@contextmanager
def vllm_server(
    made: Environments, model: Path, dtype: str, context: int, options: Sequence[str], log: Path, way: str = ""
) -> Iterator[str]:
    """vLLM's own server on a free loopback port; its address.

    Args:
        made: who has vLLM.
        model: folder.
        dtype: of its weights.
        context: tokens of prompt and output together.
        options: further ones of ``vllm serve``.
        log: file of what it says.
        way: ``suffix`` where it drafts so, which needs more than vLLM.

    Raises:
        MissingPeerError: it cannot be had, or does not start.
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
    """The API key of a turn, of its tenant as well."""
    return f"{tool.replace(' ', '-')}-{clients}"


def _vllm_bench(
    made: Environments, url: str, key: str, model: Path, prompts: Path, clients: int, count: int, most: int
) -> dict[str, Any]:
    python, extras = made.vllm(), made.vllm_extras()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(python), _VLLM, "bench", "serve", "--backend", "openai-chat", "--base-url", url,
            "--endpoint", "/v1/chat/completions", "--model", _NAME, "--tokenizer", str(model), "--dataset-name", "custom",
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


def _aiperf(
    made: Environments, url: str, key: str, model: Path, prompts: Path, clients: int, count: int, most: int
) -> dict[str, Any]:
    program = made.aiperf().parent / "aiperf"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(program), "profile", "--model", _NAME, "--url", url, "--api-key", key, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(model), "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
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
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        faults = [line for line in said if "rror" in line]
        raise MissingPeerError(f"{name} fails: {(faults or said or ['it said nothing'])[-1][:300]}")


def _summary(turns: Sequence[Turn], clients: Sequence[int]) -> dict[str, Any]:
    """By tool, server and clients; with how many times as many tokens a second ours gives, round by round."""
    found: dict[str, Any] = {}
    for tool in TOOLS:
        for level in clients:
            rounds: dict[str, dict[int, dict[str, Any]]] = {}
            for turn in turns:
                if turn["tool"] == tool and turn["level"] == level:
                    rounds.setdefault(turn["contestant"].removesuffix(" over HTTP"), {})[turn["round"]] = turn["found"]
            if not rounds:
                continue
            entry: dict[str, Any] = {}
            for server, of in rounds.items():
                entry[server] = {
                    key: [round(one[key], 2) for one in of.values()] for key in ("tokens_per_s", "ttft_ms", "tpot_ms")
                }
            both = set(rounds.get(SERVERS[0], {})) & set(rounds.get(SERVERS[1], {}))
            ratios = [rounds["ours"][number]["tokens_per_s"] / rounds["vLLM"][number]["tokens_per_s"] for number in sorted(both)]
            if ratios:
                entry["times_vllm"] = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
            found.setdefault(tool, {})[str(level)] = entry
    return found
