"""Emulated device: executors whose forwards take the time of a GPU, around a real model or along known outputs."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from outrider.configs.slices import EmulationOptions
from outrider.decoding.replay import known_rows
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree
from outrider.decoding.verify.exact import verify_exact
from outrider.engine.emulation.clock import EmulatedClock
from outrider.engine.emulation.known_outputs import CHANGED, UNKNOWN_PROMPT, KnownOutputs
from outrider.engine.emulation.roofline import DeviceRoofline
from outrider.engine.errors import ModelLoadError
from outrider.engine.executor import LocalExecutor, VerifyResult
from outrider.engine.forward.batch import Batch, ScheduledRequest, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.engine.measures.metrics import EmulatedCounts

_KEPT = 4096  # latest forwards of which the median is told


class EmulatedDevice:
    """A device, or the devices of a group, that do nothing but take time. Not thread-safe, except for ``counts``."""

    # Announces a forward to the ranks of a group with parts of the model; the block is the leader's own part.
    together: Callable[[Batch], AbstractContextManager[None]] = staticmethod(lambda batch: contextlib.nullcontext())

    def __init__(
        self, roofline: DeviceRoofline, dilation: float, known: KnownOutputs | None = None, drafter_s: float = 0.0,
        clock: EmulatedClock | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            roofline: seconds of a forward.
            dilation: factor of all device times.
            known: outputs to follow; None if a model computes.
            drafter_s: seconds that each call of the drafter takes longer.
        """
        self.roofline, self.known, self.drafter_s = roofline, known, drafter_s
        self.clock = clock or EmulatedClock(dilation)
        self._forwards = self._late = 0
        self._device_s = self._late_s = self._bytes = self._hidden_s = 0.0
        self._live: dict[str, float] = {}  # ``hidden_s`` of the clock when a request arrived, by its id
        self._ratios: deque[float] = deque(maxlen=_KEPT)

    @classmethod
    def over(cls, runner: ModelRunner, loaded: LoadedModel, options: EmulationOptions) -> EmulatedDevice:
        """Return the device of a configuration. Raises ``ModelLoadError`` if the runner or an option cannot be used."""
        if runner.model.device.type != "cpu":
            raise ModelLoadError(
                f"emulation.device is {options.device}, but the model is on {runner.model.device}: set model.device=cpu"
            )
        known = None
        if options.outputs is not None:
            if runner.cache.states is not None:
                raise ModelLoadError("emulation.outputs is for models without recurrent layers: set model.path to another one")
            known = KnownOutputs.read(options.outputs, loaded.tokenizer, loaded.eos_token_ids)
        return cls(DeviceRoofline.of(options), options.time_dilation, known, options.drafter_ms / 1e3)

    @contextlib.contextmanager
    def working(self, batch: Batch) -> Iterator[None]:
        """Run the block, and return when the device would have computed the batch."""
        seconds = self.roofline.seconds(batch.segments)
        with self.together(batch), self.clock.working(seconds) as booked:
            yield
        taken, late = booked
        self._forwards += 1
        self._device_s += seconds
        self._bytes += self.roofline.exchanged_bytes(len(batch.token_ids))
        if late > 0.0:
            self._late += 1
            self._late_s += late
        self._ratios.append((taken + late) / seconds)

    def began(self, request_id: str, wall_s: float | None) -> None:
        """Store the arrival of a request; ``wall_s`` is now if it is None."""
        self._live[request_id] = self.clock.hidden_at(self.clock.wall() if wall_s is None else wall_s)

    def ended(self, request_id: str) -> None:
        """Count the seconds that dilation hid from a request."""
        self._hidden_s += self.clock.hidden_s - self._live.pop(request_id, self.clock.hidden_s)

    def counts(self) -> EmulatedCounts:
        """Return the counters."""
        ratios, roofline = list(self._ratios), self.roofline
        return EmulatedCounts(
            roofline.card.name, roofline.model.name, self.clock.dilation, self._forwards, self._device_s,
            self._late, self._late_s, statistics.median(ratios) if ratios else 0.0, self._hidden_s, self._bytes,
        )  # fmt: skip


class EmulatedExecutor(LocalExecutor):
    """``LocalExecutor`` whose model computes within the time of the emulated device."""

    def __init__(self, runner: ModelRunner, device: EmulatedDevice) -> None:
        super().__init__(runner)
        self.emulated = device
        self.clock = device.clock.now

    def end(self, request: Request) -> None:
        """See ``Executor``."""
        self.emulated.ended(request.request_id)
        super().end(request)

    def _forward(self, batch: Batch) -> torch.Tensor:
        with self.emulated.working(batch):
            return super()._forward(batch)


class KnownOutputsExecutor(EmulatedExecutor):
    """Executor that computes nothing: requests follow known outputs, which a request that goes on beyond their end repeats."""

    def __init__(self, runner: ModelRunner, device: EmulatedDevice) -> None:
        super().__init__(runner, device)
        self._outputs: dict[str, list[int]] = {}  # by the id of a live request

    def end(self, request: Request) -> None:
        """See ``Executor``."""
        self._outputs.pop(request.request_id, None)
        super().end(request)

    def expect(self, request: Request) -> None:
        """See ``LocalExecutor``: no grammar is compiled, since requests with one are refused."""

    def _execute(self, works: Sequence[ScheduledRequest]) -> list[VerifyResult | None]:
        batch, prefixes = pack(works), self._cache.prefixes
        for segment in batch.segments:
            prefixes.cut(segment.slot, segment.start)
        with self.emulated.working(batch):
            pass
        outcomes: list[VerifyResult | None] = []
        for work, segment in zip(works, batch.segments, strict=True):
            prefixes.keep(segment.slot, work.request.scope, work.request.tokens[: work.end])
            outcomes.append(None if work.tree is None else self._follow(work.request, work.tree, work.end_tokens))
        return outcomes

    def _follow(self, request: Request, tree: DraftTree, end_tokens: frozenset[int]) -> VerifyResult:
        """Return the rows of a tree that continue the known output; set the request's fault if it follows none."""
        known = self._known_of(request)
        position = request.num_output

        def token_at(row: int) -> int:
            nonlocal position
            position += 1
            return known[(position - 1) % len(known)]

        acceptance = verify_exact(tree, token_at, request.remaining, end_tokens)
        return VerifyResult(tree, acceptance, known_rows(tree, acceptance))

    def _known_of(self, request: Request) -> list[int]:
        known = self._outputs.get(request.request_id)
        if known is not None:
            return known
        assert self.emulated.known is not None
        refused = _refused(request)
        found = self.emulated.known.of(request)
        if refused is not None:
            request.fault, request.fault_field = CHANGED.format(refused), refused
        elif not found:
            request.fault, request.fault_field = UNKNOWN_PROMPT, "prompt"
        known = self._outputs[request.request_id] = found or [0]
        return known


def _refused(request: Request) -> str | None:
    """Return the first field of a request that asks for other tokens than the known ones, or for their probabilities."""
    params = request.params
    asked = {
        params.grammar_field: params.grammar is not None,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "temperature": not params.greedy,
        "logit_bias": bool(params.logit_bias),
        "min_tokens": params.min_tokens > 0,
        "repetition_penalty": params.penalized,
    }
    return next((field for field, given in asked.items() if given), None)


def local_executor(runner: ModelRunner) -> LocalExecutor:
    """Return the executor of a runner, whose device may be emulated."""
    device = runner.emulated
    if device is None:
        return LocalExecutor(runner)
    return EmulatedExecutor(runner, device) if device.known is None else KnownOutputsExecutor(runner, device)
