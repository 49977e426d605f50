"""A form of ``outrider bench scaling`` in a process of its own, and the contestants that stand for it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from actors.heap import spare_collector
from actors.ranks import GroupError
from cluster.cli.generate.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from decoding.drafters import LOSSLESS
from engine.engine import Engine
from engine.errors import ModelLoadError, one_line
from engine.target import LocalTarget
from experiments.contestants import Prompt, Run, make_request, run_requests
from experiments.guided import GuidedExecutor
from experiments.guided_ranks import RankModel
from experiments.scaling_clocks import Spent
from experiments.scaling_forms import Known, Place, open_place
from experiments.scaling_options import Form, called


class FormError(RuntimeError):
    """A form's process could not start its ranks, or ended. The message says which, and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A strategy in a form."""

    form: Form
    strategy: StrategyChoice
    budget: int  # most drafted rows of a step, for each rank

    @property
    def way(self) -> str:
        """Without the budget."""
        return f"{self.form.label}, {called(self.strategy.label)}"

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.way}, {self.budget}" if self.budget else self.way


@dataclass(frozen=True, slots=True)
class Setting:
    """What a form is started with."""

    model: RankModel
    known: Known | None  # outputs to follow, by request id
    device: str  # cpu or cuda
    pin: bool
    max_tokens: int  # of an output


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt for an engine; without one, the engine is to be made."""

    entry: Entry
    prompt: Prompt | None
    fresh: bool  # with a drafter that knows nothing


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it."""

    run: Run
    spent: Spent


class Engines:
    """In a form's process: its engines, which take turns."""

    def __init__(self, place: Place, setting: Setting) -> None:
        self._place, self._setting = place, setting
        self._target = LocalTarget(place.local.runner, place.info, place.tokenizer)
        self._engines: dict[str, Engine] = {}

    def do(self, task: Task) -> Done | str | None:
        """Runs a request to its end; or makes an engine, and says why that cannot be."""
        label = task.entry.label
        try:
            if task.fresh or label not in self._engines:
                self._engines[label] = self._engine(task.entry)
        except (ValueError, ModelLoadError) as error:
            return one_line(error)
        return None if task.prompt is None else self._run(self._engines[label], task.prompt)

    def _run(self, engine: Engine, prompt: Prompt) -> Done:
        local = self._place.local
        guide = local if isinstance(local, GuidedExecutor) else None
        request = make_request(prompt, self._setting.max_tokens, guide)
        started = time.perf_counter()
        run = run_requests(engine, [request], self._place.first_token)
        wall_s = time.perf_counter() - started
        return Done(dataclasses.replace(run, wall_s=wall_s), self._place.spent(self._target.latency))

    def facts(self) -> dict[str, Any]:
        """See ``Place``."""
        return self._place.facts()

    def _engine(self, entry: Entry) -> Engine:
        drafter = entry.strategy.build()
        drafter.prepare(self._target)
        info = dataclasses.replace(self._place.info, strategy=entry.label, lossless=entry.strategy.name in LOSSLESS)
        options = EngineOptions(max_running=1, prefix_caching=False)  # every prompt is computed anew, by every form
        return Engine(self._place.executor, drafter, options, entry.budget, info)


def _serve(pipe: Connection, form: Form, setting: Setting) -> None:
    """The form's process: says that it is ready, or why not, then does what it is told until the other end is gone."""
    try:
        place = open_place(form, setting.model, setting.known, setting.device, setting.pin)
    except (GroupError, ModelLoadError, OSError, RuntimeError, ImportError) as error:
        pipe.send(one_line(error))
        return
    spare_collector()
    engines = Engines(place, setting)
    pipe.send(None)
    try:
        while True:
            task: Task | None = pipe.recv()
            pipe.send(engines.facts() if task is None else engines.do(task))
    except EOFError:
        place.close()


class FormProcess:
    """A form, seen from the bench's process."""

    def __init__(self, form: Form, setting: Setting) -> None:
        """Starts it; see ``wait``."""
        self.form = form
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, form, setting), name=form.label)
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it is ready. Raises ``FormError``."""
        reason = self._answer()
        if reason is not None:
            raise FormError(str(reason))

    def prepare(self, entry: Entry) -> str | None:
        """Makes the engine of an entry; or says why there can be none. Raises ``FormError``."""
        self._pipe.send(Task(entry, None, fresh=True))
        reason: str | None = self._answer()
        return reason

    def do(self, task: Task) -> Done:
        """Runs a request. Raises ``FormError``."""
        self._pipe.send(task)
        done = self._answer()
        if not isinstance(done, Done):
            raise FormError(f"{task.entry.label}: {done}")
        return done

    def facts(self) -> dict[str, Any]:
        """See ``Engines.facts``."""
        self._pipe.send(None)
        found: dict[str, Any] = self._answer()
        return found

    def close(self) -> None:
        """Ends it and its ranks."""
        self._pipe.close()
        self._process.join(10.0)
        self._process.kill()
        self._process.join()

    def __enter__(self) -> FormProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise FormError(f"the process of {self.form.label} ended: its own lines above say why") from None


class FormContestant:
    """An entry as a ``Contestant``; it adds up what its steps after the first token were made of."""

    def __init__(self, process: FormProcess, entry: Entry) -> None:
        self.name, self.entry, self._process = entry.label, entry, process
        self.spent, self.steps = Spent(), 0
        self._fresh, self._counts = True, False

    def renew(self) -> None:
        """See ``Contestant``. What ran before the first time was to warm up."""
        if not self._counts:
            self.spent, self.steps, self._counts = Spent(), 0, True
        self._fresh = True

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``: one prompt at a time. Raises ``FormError``."""
        (prompt,) = prompts
        done = self._process.do(Task(self.entry, prompt, self._fresh))
        self._fresh = False
        self.spent, self.steps = self.spent + done.spent, self.steps + done.run.steps - 1
        return done.run
