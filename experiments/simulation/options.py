"""The options of ``outrider simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from configs.slices import EngineOptions, SpeculationOptions
from experiments.simulation.steps import EXCHANGE_S, Host, Mode, Software

_HOST = Host()
_SOFTWARE = Software()


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    _add_times(parser)
    _add_deployments(parser)
    _add_traffic(parser)
    parser.add_argument("--find", help="the cheapest that meets a goal: p99<2 or ttft_p99<0.5,usd_per_million<3")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and the router")


def _add_times(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("how long a step takes")
    times.add_argument("--gpu", help="A100-80, A100-40, H100, V100-32; with --model")
    times.add_argument("--model", help="llama-2-7b, ... or a folder with a config.json")
    times.add_argument("--curve", type=Path, help="instead of both: a file that outrider doctor --calibrate kept or printed")
    times.add_argument("--bandwidth-share", type=float, default=_SOFTWARE.bandwidth_share, help="of the peak that is reached")
    times.add_argument("--flops-share", type=float, default=_SOFTWARE.flops_share, help="of the peak that is reached")
    times.add_argument("--launch-us", type=float, default=0.0, help="a layer on the host, where kernels are launched one by one")
    times.add_argument(
        "--host-ms", type=float, nargs=3, default=[1e3 * each for each in (_HOST.step_s, _HOST.request_s, _HOST.propose_s)],
        metavar=("STEP", "REQUEST", "DRAFT"), help="beside the forward: a step, each request in it, each that is drafted for",
    )  # fmt: skip
    times.add_argument(
        "--prefill-share", type=float, default=1.0, help="with --curve: what a row without logits takes of one with"
    )
    times.add_argument("--exchange-ms", type=float, default=1e3 * EXCHANGE_S, help="of a shared step, for each rank")


def _add_deployments(parser: argparse.ArgumentParser) -> None:
    many = parser.add_argument_group("deployments: all combinations")
    many.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    many.add_argument("--width", type=int, nargs="+", default=[1, 2, 4, 8], help="GPUs of a replica")
    many.add_argument("--mode", choices=get_args(Mode), nargs="+", default=["lookahead"], help="how they work together")
    many.add_argument("--max-gpus", type=int, default=8, help="in all; larger deployments are left out")
    many.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; auto when absent")
    many.add_argument("--max-running", type=int, default=EngineOptions().max_running, help="requests in one step")
    many.add_argument(
        "--budget", type=int, default=SpeculationOptions().most_draft_tokens, help="drafted rows of a request and rank"
    )
    many.add_argument(
        "--always-share", dest="adaptive", action="store_false", help="lookahead: every step, also where that was slower of late"
    )
    many.add_argument(
        "--lag-ms", type=_lag, default=25.0, help="until others draft from what a replica said; none: they never do"
    )
    many.add_argument("--router-ms", type=float, default=3.0, help="from the arrival of a request to its replica")
    many.add_argument("--usd-per-hour", type=float, help="of a GPU; of the table of GPUs when absent")


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic: at least one")
    traffic.add_argument(
        "--rate", type=float, nargs="+", default=[], help="requests a second by a Poisson process, however many are under way"
    )
    traffic.add_argument("--clients", type=int, nargs="+", default=[], help="that ask one request after the other")
    traffic.add_argument("--requests", type=int, help="so many of the records, files in turns; all when absent")
    traffic.add_argument("--max-tokens", type=int, help="cut outputs to so many tokens")


def _lag(text: str) -> float | None:
    return None if text == "none" else float(text)


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where options do not go together."""
    if (args.curve is None) == (args.gpu is None or args.model is None):
        parser.error("give --gpu and --model, or --curve")
    if args.curve is not None and {*args.mode} - {"lookahead"}:
        parser.error("--mode tensor and pipeline split a model over GPUs: give --gpu and --model, a curve is of one device")
    if not args.rate and not args.clients:
        parser.error("say what traffic comes: --rate or --clients")
    for name in ("replicas", "width", "rate", "clients", "requests", "max_tokens", "max_running", "max_gpus"):
        values = getattr(args, name)
        least = 0 if name == "rate" else 1
        for value in values if isinstance(values, list) else [values]:
            if value is not None and (value <= least if name == "rate" else value < least):
                parser.error(f"--{name.replace('_', '-')} must be {'above 0' if name == 'rate' else 'at least 1'}, got {value}")
    for name in ("bandwidth_share", "flops_share", "prefill_share"):
        if not 0 < getattr(args, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and at most 1, got {getattr(args, name)}")
    if min(*args.host_ms, args.launch_us, args.exchange_ms, args.router_ms, args.lag_ms or 0.0, args.budget) < 0:
        parser.error("times and --budget must not be negative")
    if len({path.stem for path in args.workloads}) < len(args.workloads):
        parser.error("two files have one name: a workload is called after its file")
    args.strategy = args.strategy or ["auto"]
