"""Map of the fastest form of parallelism: replicas, lookahead, tensor or pipeline, by model, GPUs and concurrent requests.

outrider simulate forms RECORD.json --gpu A100-80 --model llama-2-7b llama-2-13b llama-2-70b

RECORD is one of `outrider bench scaling`. Its tokens per step and drafted rows, with one rank and with as many as lookahead
parallelism had, are assumed for the larger models and any number of requests; the time of a step is the roofline of the GPU. The
answer is therefore a prediction: other texts and models draft otherwise, and a real drafter drafts less under load. Every form
checks the tree that is fastest for it, of one rank's size or of more ranks'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import ModelShape, find_shape
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.options import numbers
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.simulation.hardware import Gpu, find_gpu
from outrider.experiments.simulation.steps import Host, Mode, RankLoad, Software, fits, step_times

KINDS = ("one", "replicas", "lookahead", "tensor", "pipeline")
Kinds = Mapping[str, Mapping[str, Any]]  # kind -> its fastest strategy, the fastest kind first


@dataclass(frozen=True, slots=True)
class Brought:
    """Measured step of a request."""

    tokens: float  # emitted
    drafted: float  # rows besides the root, of all ranks


Drafts = Mapping[str, Mapping[int, Brought]]  # by strategy and number of ranks


def read_drafts(path: Path) -> Drafts:
    """Read the steps of a record of ``outrider bench scaling``, with one request at once.

    Raises:
        ValueError: it is no such record, or lacks lookahead parallelism.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]["overall"].values()
        found: dict[str, dict[int, Brought]] = {}
        for row in rows:
            if row["kind"] in ("one", "lookahead") and row["clients"] == 1:
                brought = Brought(row["tokens_per_step"], row["drafted_per_step"])
                found.setdefault(row["strategy"], {})[row["ranks"]] = brought
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no record of outrider bench scaling with tokens per step: {error!r}") from error
    if not any(len(ranks) > 1 and 1 in ranks for ranks in found.values()):
        raise ValueError(f"{path}: it needs one worker and lookahead parallelism: run outrider bench scaling with both")
    return found


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, their model and software."""

    gpu: Gpu
    model: ModelShape
    software: Software
    context: int  # tokens of each request

    def tokens_per_s(self, kind: str, workers: int, requests: int, brought: Brought, plain: bool) -> float | None:
        """Return the tokens per second of all requests; None if weights and KV do not fit.

        Example: 4 requests on 2 replicas, each 2 to a step of 10 ms that emits 3 tokens of each: 1,200 tokens a second.
        """
        busy = min(workers, requests) if kind == "replicas" else 1
        own = -(-requests // busy)
        width = 1 if kind in ("one", "replicas") else workers
        mode: Mode = "tensor" if kind == "tensor" else "pipeline" if kind == "pipeline" else "lookahead"
        if not fits(mode, width, self.gpu, self.model, own, self.context):
            return None
        times = step_times(mode, width, self.gpu, self.model, self.software, Host())
        rows = own * (1 + brought.drafted / times.ranks)
        load = RankLoad(own, round(rows), own * self.context)
        step_s = times.seconds([load] * (times.ranks if brought.drafted >= 1 else 1), 0 if plain else own)
        return requests * brought.tokens / step_s


def best_of(machine: Machine, drafts: Drafts, workers: int, requests: int) -> dict[str, dict[str, Any]]:
    """Return the fastest strategy of each kind that fits, the fastest kind first.

    Trees are those that were measured with at most ``workers`` ranks.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        for strategy, by_ranks in drafts.items():
            for brought in (own for ranks, own in by_ranks.items() if ranks <= workers):
                speed = machine.tokens_per_s(kind, workers, requests, brought, strategy == PLAIN)
                if speed is not None and speed > found.get(kind, {"tokens_per_s": 0.0})["tokens_per_s"]:
                    found[kind] = {"strategy": strategy, "tokens_per_s": speed, "tokens_per_step": brought.tokens}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["tokens_per_s"]))


def sentence(place: str, machine: Machine, workers: int, cells: Mapping[int, Kinds]) -> str:
    """Return the form to choose by the number of concurrent requests, with the reason."""
    parts: list[str] = []
    former = None
    for requests, kinds in cells.items():
        if not kinds:
            parts.append(f"from {requests} at once nothing, since the KV does not fit")
            break
        best = next(iter(kinds))
        if best != former:
            strategy = "plain" if kinds[best]["strategy"] == PLAIN else kinds[best]["strategy"]
            parts.append(f"from {requests} at once {best} with {strategy}, {_why(best, kinds, machine)}")
        former = best
    return f"{place}, {workers} GPUs: {'; '.join(parts)}."


def _why(best: str, kinds: Kinds, machine: Machine) -> str:
    """Return the lead over lookahead parallelism, or lookahead's lead over the next, and its reason."""
    if best == "lookahead":
        other = next((kind for kind in kinds if kind != best), best)
        ahead = kinds[best]["tokens_per_s"] / kinds[other]["tokens_per_s"]
        more = kinds[best]["tokens_per_step"] / kinds[other]["tokens_per_step"]
        return f"{ahead:.2f} times {other}, since its ranks share a tree of {more:.2f} times the tokens a step"
    reasons = {
        "tensor": "since each GPU reads a part of the weights",
        "pipeline": "since no GPU holds the model alone",
        "replicas": "since requests share no step",
        "one": "since one GPU checks the same tree in the same time, and exchanges nothing",
    }
    if machine.software.launch_s:
        reasons["tensor"] = "since what it checks is computed in parts, while launches take as long as ever"
    if "lookahead" not in kinds:
        return f"{reasons[best]}; a copy of the model a GPU does not fit"
    ahead = kinds[best]["tokens_per_s"] / kinds["lookahead"]["tokens_per_s"]
    return f"{ahead:.2f} times lookahead, {reasons[best]}"


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Compare the forms for all machines, numbers of GPUs and numbers of concurrent requests.

    Returns:
        ``prediction``: true; ``drafts`` as measured; ``cells`` by machine, GPUs and requests; ``answer``, a sentence for each
        machine and number of GPUs.

    Raises:
        ValueError: an unusable record, GPU or model.
    """
    drafts, gpu = read_drafts(args.record), find_gpu(args.gpu)
    workers = sorted({count for ranks in drafts.values() for count in ranks} - {1})
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    answer: list[str] = []
    panels: dict[str, Any] = {}
    for launch_us in args.launch_us:
        launches = f"launches of {launch_us:g} us a layer" if launch_us else "no launches"
        lead: dict[str, dict[str, float]] = {}
        for name in args.model:
            machine = Machine(gpu, find_shape(name), Software(launch_s=launch_us / 1e6), args.context)
            place = f"{machine.model.name} on {gpu.name}, {launches}"
            run.progress.note(place)
            for count in workers:
                own = {requests: best_of(machine, drafts, count, requests) for requests in args.clients}
                cells.setdefault(place, {})[str(count)] = {str(requests): kinds for requests, kinds in own.items()}
                answer.append(sentence(place, machine, count, own))
                ahead = {str(requests): _lead(kinds) for requests, kinds in own.items() if "lookahead" in kinds}
                if ahead:
                    lead[f"{machine.model.name}, {count}"] = ahead
        if lead:
            panels[launches] = panel("heat", "lookahead over the best other form", "requests at once", "model, GPUs", lead)
    told = {
        strategy: {str(ranks): {"tokens_per_step": one.tokens, "drafted_per_step": one.drafted} for ranks, one in own.items()}
        for strategy, own in drafts.items()
    }
    return {"prediction": True, "drafts": told, "cells": cells, "answer": answer, "figures": panels}


def _lead(kinds: Kinds) -> float:
    """Return the speed of lookahead parallelism relative to the best other form."""
    others = [own["tokens_per_s"] for kind, own in kinds.items() if kind != "lookahead"]
    return round(float(kinds["lookahead"]["tokens_per_s"]) / max(others), 3)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("record", type=Path, help="of outrider bench scaling, with one worker and lookahead parallelism")
    parser.add_argument("--gpu", default="A100-80", help="A100-80, A100-40, H100, V100-32")
    models = ["llama-2-7b", "llama-2-13b", "llama-2-70b"]
    parser.add_argument("--model", nargs="+", default=models, help="known model, or folder with a config.json")
    parser.add_argument("--clients", type=numbers(int, 1), default=(1, 2, 4, 8, 16, 32, 64), help="concurrent requests")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request")
    launches = "a layer on the host: 0 with graphs; 735 where Python launches (34 tokens/s of 13B, arXiv 2312.12728)"
    parser.add_argument("--launch-us", type=numbers(float, 0), default=(0.0, 735.0), help=launches)


BENCH = Bench("simulate-forms", __doc__ or "", measure, options, {"context": 1})
