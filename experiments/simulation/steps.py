"""Time of a step: the roofline of a GPU as a latency curve, and ranks that share a step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.engine.emulation.hardware import ModelShape
from outrider.engine.loading.plan import BANDWIDTH_SHARE, FLOPS_SHARE, seconds_of
from outrider.experiments.simulation.hardware import Gpu

Mode = Literal["lookahead", "tensor", "pipeline"]
EXCHANGE_S = 0.14e-3  # of a shared step for each rank: 0.28 ms measured with two
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CONTEXT, _FAR, _WIDE = 256, 2304, 64


@dataclass(frozen=True, slots=True)
class Software:
    """Shares of a GPU's peak that a program reaches, and its times of launches and collectives.

    The shares are those of engines with graphs and fused kernels; ``launch_s`` is for those that launch every kernel from Python
    (transformers without graphs).
    """

    bandwidth_share: float = BANDWIDTH_SHARE  # while weights are read
    flops_share: float = FLOPS_SHARE  # with matrices of some hundred rows
    launch_s: float = 0.0  # of a layer, on the host
    collective_s: float = 20e-6  # of an all-reduce without its bytes: two phases of 10 us (calculon, systems/a100_80g.json)
    link_share: float = 0.65  # of the link's peak (the same)
    hop_s: float = 20e-6  # from one stage of a pipeline to the next
    fixed_rows: int | None = None  # of every forward, as with engine.exact=strict on a GPU (64); None: any number


def roofline_s(
    gpu: Gpu, model: ModelShape, software: Software, rows: float, context: float, looked_at: float, tensor: int = 1
) -> float:
    """Return the seconds of one forward: the longest of reading, computing and launching, plus the all-reduces.

    Weights are read once, KV entries once; 2 operations a weight and row; 4 a head's number for each entry that a row looks at.
    With ``tensor`` GPUs each has its share of all of it, and each layer ends twice in an all-reduce of the rows' activations, a
    ring's 2 (n - 1) / n of their bytes.

    Example: 13.48 GB of weights at 0.75 * 2,039 GB/s take 8.8 ms; one row's 13.5 GFLOP at 0.6 * 312 TFLOP/s 0.07 ms, so a step
    of a row takes 8.8 ms, one of 256 rows 18.4. With 8 GPUs it is 1.1 ms, and 64 all-reduces of 20 us, 1.3 ms, on top.

    Args:
        gpu, model, software: of the deployment.
        rows: of the step, all sequences.
        context: entries before them, all sequences.
        looked_at: entries that each row looks at, summed over the rows.
        tensor: GPUs that share each layer.
    """
    if software.fixed_rows is not None:
        forwards = max(1, math.ceil(rows / software.fixed_rows))
        one = dataclasses.replace(software, fixed_rows=None)
        parts = context / forwards, looked_at / forwards
        return forwards * roofline_s(gpu, model, one, software.fixed_rows, *parts, tensor)
    read = model.weight_bytes + context * model.entry_bytes
    operations = model.operations(rows, looked_at)
    rates = gpu.bandwidth * software.bandwidth_share, gpu.flops * software.flops_share
    step = max(seconds_of(read, operations, *rates) / tensor, model.layers * software.launch_s)
    if tensor > 1:
        moved = 2 * (tensor - 1) / tensor * rows * model.hidden * model.value_bytes / (gpu.link * software.link_share)
        step += 2 * model.layers * (software.collective_s + moved)
    return step


def roofline_curve(gpu: Gpu, model: ModelShape, software: Software, tensor: int = 1) -> LatencyCurve:
    """Return the roofline as a latency curve.

    The time of an entry is what 2,048 more of them add to a step of one row; a row's look at one is what they add to a step of
    64 rows beyond that.
    """

    def seconds(rows: int, context: int) -> float:
        return roofline_s(gpu, model, software, rows, context, rows * context, tensor)

    far = _FAR - _CONTEXT
    entry_s = (seconds(1, _FAR) - seconds(1, _CONTEXT)) / far
    row_entry_s = (seconds(_WIDE, _FAR) - seconds(_WIDE, _CONTEXT) - entry_s * far) / (far * _WIDE)
    fixed = software.fixed_rows
    stairs = {} if fixed is None else {at + more for at in range(fixed, _ROWS[-1], fixed) for more in (0, 1)}
    counts = tuple(sorted({*_ROWS, *stairs}))
    times = tuple(seconds(rows, _CONTEXT) for rows in counts)
    return LatencyCurve(counts, times, _CONTEXT, 0.0, max(entry_s, 0.0), max(row_entry_s, 0.0))


def read_curve(path: Path) -> LatencyCurve:
    """Read the curve of a file that ``outrider doctor --calibrate`` kept, or of its ``--json`` output.

    Raises:
        ValueError: it has none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return LatencyCurve.from_json(found["curve"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--curve {path}: no curve of outrider doctor --calibrate: {error}") from error


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the processor besides the forward; they add up."""

    step_s: float = 0.1e-3
    request_s: float = 0.1e-3  # of each request: packing, verifying, committing, observing
    propose_s: float = 0.2e-3  # of each request that is drafted for


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Work of one rank in a step."""

    sequences: int
    rows: int
    context: int  # KV entries before them, summed over the sequences
    bare: int = 0  # rows without logits: all of a prefill but the last


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the steps of one replica.

    ``lookahead``: each GPU holds the model and computes its part; the slowest one counts, and integers are exchanged. ``tensor``:
    the curve is that of all GPUs together. ``pipeline``: layers on one GPU after the other, as by accelerate's ``device_map``:
    the time of one GPU, and a hop between any two.
    """

    mode: Mode
    width: int  # GPUs of a replica
    curve: LatencyCurve
    host: Host
    exchange_s: float = EXCHANGE_S
    hop_s: float = 0.0  # between two stages of a pipeline
    bare_share: float = 1.0  # time of a row without logits relative to one with logits

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the trees of a step."""
        return self.width if self.mode == "lookahead" else 1

    def seconds(self, loads: Sequence[RankLoad], drafted_for: int) -> float:
        """Return the seconds of a step from the load of each rank and the number of requests that are drafted for."""
        slowest = max(self.forward_s(load) for load in loads)
        other = self.exchange_s * len(loads) if len(loads) > 1 else 0.0
        if self.mode == "pipeline":
            other += self.hop_s * (self.width - 1)
        host = self.host
        return slowest + other + host.step_s + host.request_s * loads[0].sequences + host.propose_s * drafted_for

    def forward_s(self, load: RankLoad) -> float:
        """Return the seconds of one rank's forward."""
        at = StepLoad(load.sequences, load.rows, load.context)
        rows = load.rows - (1 - self.bare_share) * load.bare
        return float(self.curve.seconds(np.array([rows], np.float64), at)[0])


def step_times(mode: Mode, width: int, gpu: Gpu, model: ModelShape, software: Software, host: Host) -> StepTimes:
    """Return the step times of a replica of ``width`` GPUs."""
    curve = roofline_curve(gpu, model, software, width if mode == "tensor" else 1)
    bare_share = 1 - model.vocabulary * model.hidden / model.parameters
    return StepTimes(mode, width, curve, host, hop_s=software.hop_s, bare_share=bare_share)


def fits(mode: Mode, width: int, gpu: Gpu, model: ModelShape, slots: int, capacity: int) -> bool:
    """Return whether weights and KV slots leave a tenth of each GPU's memory free."""
    whole = model.weight_bytes + slots * capacity * model.entry_bytes
    return whole / (1 if mode == "lookahead" else width) <= 0.9 * gpu.memory_bytes
