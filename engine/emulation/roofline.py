"""Time of a forward on an emulated device: reading, computing, launching, and the exchanges of the ranks that share it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from outrider.configs.slices import EmulationOptions
from outrider.decoding.budget.latency import LatencyCurve
from outrider.engine.cuda.static_runner import ROWS
from outrider.engine.emulation.hardware import FIGURES, DeviceLink, ModelShape, find_device, find_shape
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import SequenceRows
from outrider.engine.loading.cards import Card
from outrider.engine.loading.plan import seconds_of
from outrider.engine.loading.slot_memory import STRICT_ROWS

Split = Literal["none", "tensor", "pipeline"]
_CONTEXT, _FAR, _WIDE = 256, 2304, 64
_CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_STAIRS = tuple(sorted({1, *(at + more for at in range(STRICT_ROWS, 513, STRICT_ROWS) for more in (0, 1))}))


@dataclass(frozen=True, slots=True)
class DeviceRoofline:
    """Seconds of a forward of a model on one device, or on the devices of a group that hold parts of it."""

    card: Card
    link: DeviceLink
    model: ModelShape
    bits: int = 16  # of a weight
    form: Literal["strict", "graphs", "eager"] = "strict"
    split: Split = "none"
    ranks: int = 1

    @classmethod
    def of(cls, options: EmulationOptions) -> DeviceRoofline:
        """Return the roofline of a configuration. Raises ``ModelLoadError`` for an unknown model or a link that a GPU lacks."""
        assert options.device is not None
        card, link = find_device(options.device, options.link)
        try:
            shape = find_shape(options.model or "", "emulation.model")
        except ValueError as error:
            raise ModelLoadError(str(error)) from None
        return cls(card, link, shape, options.bits, options.form)

    @property
    def fixed_rows(self) -> int | None:
        """Return the rows of every forward; None: any number."""
        return STRICT_ROWS if self.form == "strict" else None

    def seconds(self, segments: Iterable[SequenceRows]) -> float:
        """Return the seconds of a step; each row of a segment looks at the entries before it."""
        own = [(one.rows, one.start) for one in segments]
        return self.step_s(sum(rows for rows, _ in own), sum(at for _, at in own), sum(rows * at for rows, at in own))

    def step_s(self, rows: int, context: float, looked_at: float) -> float:
        """Return the seconds of a step.

        Args:
            rows: of all sequences.
            context: KV entries before them, of all sequences.
            looked_at: entries that each row looks at, summed over the rows.

        Example: Llama-2-7B on an A100-80: 13.48 GB of weights at 0.685 * 2,039 GB/s take 9.65 ms. In the form ``strict`` 65 rows
        are two forwards of 64, 19.3 ms; in the form ``graphs`` one of 96.
        """
        if self.form == "strict":
            forwards = max(1, math.ceil(rows / STRICT_ROWS))
            # Each forward reads the entries of its own sequences: together about once, and all of one that is cut for each part.
            return forwards * self._forward_s(STRICT_ROWS, context / forwards, looked_at / forwards)
        if self.form == "graphs":
            rows = next((size for size in ROWS if size >= rows), rows)
        return self._forward_s(rows, context, looked_at)

    def _forward_s(self, rows: int, context: float, looked_at: float) -> float:
        model, ranks = self.model, self.ranks
        read = model.weight_bytes * FIGURES[f"step_{self.bits}"].value + context * model.entry_bytes
        bandwidth = self.card.bandwidth * FIGURES["bandwidth_share"].value
        step = seconds_of(read, model.operations(rows, looked_at), bandwidth, self.card.half_flops * FIGURES["flops_share"].value)
        launches = model.layers * FIGURES["launch_s"].value if self.form == "eager" else 0.0
        row_bytes = rows * model.hidden * model.value_bytes
        if self.split == "tensor":
            return max(step / ranks, launches) + 2 * model.layers * self.link.all_reduce_s(ranks, row_bytes)
        if self.split == "pipeline":  # from one rank to the next, and back to the leader, which has the output layer
            return max(step, launches) + ranks * self.link.send_s(row_bytes)
        return max(step, launches)

    def exchanged_bytes(self, rows: int) -> float:
        """Return the bytes that the devices of a group send in a forward: a ring's all-reduces, or the hidden states."""
        row_bytes = rows * self.model.hidden * self.model.value_bytes
        if self.split == "tensor":
            return 2 * self.model.layers * 2 * (self.ranks - 1) * row_bytes
        return self.ranks * row_bytes if self.split == "pipeline" else 0.0

    def curve(self) -> LatencyCurve:
        """Return the latency curve of steps of one sequence, for drafters and for the simulation."""

        def seconds(rows: int, context: int) -> float:
            return self.step_s(rows, context, rows * context)

        far = _FAR - _CONTEXT
        entry_s = (seconds(1, _FAR) - seconds(1, _CONTEXT)) / far
        row_entry_s = (seconds(_WIDE, _FAR) - seconds(_WIDE, _CONTEXT) - entry_s * far) / (far * _WIDE)
        rows = {"strict": _STAIRS, "graphs": (1, *(size + more for size in ROWS[1:] for more in (0, 1))), "eager": _CURVE_ROWS}
        found = tuple(sorted({*rows[self.form]} | ({512, 1024} if self.form == "graphs" else set())))
        times = tuple(seconds(count, _CONTEXT) for count in found)
        return LatencyCurve(found, times, _CONTEXT, 0.0, max(entry_s, 0.0), max(row_entry_s, 0.0))
