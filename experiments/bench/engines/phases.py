"""Splits the steps of an engine into phases, by the clock: what the model's forward takes, and what is around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from decoding.request import Request
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.forward.batch import Batch, Work

PHASES = ("schedule", "propose", "pack", "forward", "verify", "commit", "observe")


class PhaseClock:
    """Splits the steps of one engine into phases.

    Example: ``execute`` runs from 10 to 20 ms and the forward in it from 11 to 18: 1 ms packed, 7 ms forward, 2 ms verified.
    """

    def __init__(self, engine: Engine) -> None:
        """
        Args:
            engine: of this process, whose steps are timed by ``step``.
        """
        self._engine, executor = engine, engine._executor
        assert isinstance(executor, LocalExecutor), executor
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._works: Sequence[Work] = ()  # of the step
        for name, piece, method in (
            ("schedule", engine._scheduler, "schedule"),
            ("execute", executor, "execute"),
            ("forward", executor.runner, "forward"),
            ("observe", engine._drafter, "observe"),
        ):
            setattr(piece, method, self._timed(name, getattr(piece, method)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute":
                self._works = args[0]
            started = time.perf_counter()
            result = method(*args, **kwargs)
            self._spans.setdefault(name, []).append((started, time.perf_counter()))
            return result

        return timed

    def step(self, batch: int) -> dict[str, float] | None:
        """One step of the engine: seconds of each phase, drafted rows and emitted tokens of all requests.

        None where anything was prefilled, or fewer than ``batch`` requests decoded.
        """
        self._spans.clear()
        self._works = []  # set by ``execute``
        started = time.perf_counter()
        outputs = self._engine.step()
        ended = time.perf_counter()
        works: Sequence[Work] = self._works
        if len(works) != batch or any(work.tree is None or work.end - work.start != 1 for work in works):
            return None
        (execute,), (forward,), (schedule,) = (self._spans[name] for name in ("execute", "forward", "schedule"))
        observe = sum(end - start for start, end in self._spans.get("observe", ()))
        return {
            "schedule": schedule[1] - schedule[0],
            "propose": execute[0] - started - (schedule[1] - schedule[0]),
            "pack": forward[0] - execute[0],
            "forward": forward[1] - forward[0],
            "verify": execute[1] - forward[1],
            "commit": ended - execute[1] - observe,
            "observe": observe,
            "drafted": sum(len(work.tree) - 1 for work in works if work.tree is not None),
            "emitted": sum(len(output.token_ids) for output in outputs),
        }


class WaitingForward:
    """A forward that computes nothing: the host waits as it does while a GPU computes, and the text goes on as it stands.

    In the place of ``ModelRunner.forward``, so that the host's part of a step can be timed as it is beside a GPU: a forward on
    the CPU leaves nothing of the host's code and data in the processor's caches.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, rows: int, wait_s: float) -> None:
        """
        Args:
            tokens: of the text from which the prompts are cut.
            vocab_size: of the logits.
            rows: the most of a forward.
            wait_s: of a forward.
        """
        self._tokens, self._wait_s = np.array(tokens, np.int64), wait_s
        self._logits = torch.zeros(rows, vocab_size)
        self._set: tuple[torch.Tensor, torch.Tensor] | None = None
        self.live: list[tuple[Request, int]] = []  # with the place of each prompt in the text

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Logits whose largest is the token that follows in the text; they are there until the next call."""
        ends = time.perf_counter() + self._wait_s
        if self._set is not None:
            self._logits[self._set] = 0.0
        place = np.zeros(len(batch.token_ids), np.int64)
        for segment in batch.segments:
            (start,) = (start for request, start in self.live if request.slot == segment.slot)
            place[segment.offset : segment.offset + segment.rows] = start
        wanted = (place + batch.positions)[batch.logit_rows] + 1
        following = torch.from_numpy(self._tokens[wanted % len(self._tokens)])
        self._set = torch.arange(len(following)), following
        self._logits[self._set] = 1.0
        while time.perf_counter() < ends:
            pass
        return self._logits[: len(following)]
