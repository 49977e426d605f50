"""The servers of ``outrider bench load``, and the loads that they go through in turns."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.progress import Progress as ProgressBar

from cluster.cli.generate.prompt_file import PromptFileError
from cluster.cli.generate.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from experiments.bench_models import MAX_TOKENS, Setting
from experiments.contestants import Prompt
from experiments.guided import GuidedExecutor
from experiments.load_measures import measured, rows_of_a_cell
from experiments.load_servers import EngineServer, OneAtATime
from experiments.load_step import back_after_text, drive_step, told
from experiments.load_traffic import Arrivals, ClosedLoop, Journey, Server, ServerCounts, drive, poisson
from experiments.shared_model import SharedModel
from experiments.stock_batching import StockBatching
from experiments.stock_generate import StockGenerate, StockPromptLookup
from experiments.workloads import interleaved

BASELINE = "autoregressive"
MAIN = ("auto", BASELINE)  # the comparison that is repeated; single strategies run fewer times
_CALIBRATION = 1.25  # requests by client of the run that tells how many fill --duration
_LEAST_REQUESTS = 8  # of a cell
_ROUNDS = 6  # requests of each client at least: the first and the last ones of a cell are not what the load is
_FAULTS = (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError)  # what transformers' batching may raise


class LoadBench:
    """The servers of a run, and the cells that they go through in turns."""

    def __init__(self, setting: Setting, choices: Sequence[StrategyChoice], args: argparse.Namespace, bar: ProgressBar) -> None:
        """
        Args:
            setting: the model twice, and its workloads.
            choices: our strategies, ``autoregressive`` first.
            args: as ``experiments.bench`` reads them.
            bar: shows how far it is.

        Raises:
            PromptFileError: too few prompts, or two with one id.
        """
        self._setting, self._args, self._bar = setting, args, bar
        self.prompts = list(interleaved([workload.prompts for workload in setting.workloads]))
        if len(self.prompts) < max(2, *args.concurrency):
            count = max(2, *args.concurrency)
            raise PromptFileError(
                f"{len(self.prompts)} prompts fit, {count} are needed: lower --concurrency or give more --prompts"
            )
        if len({prompt.id for prompt in self.prompts}) < len(self.prompts):
            raise PromptFileError("two records of --prompts have one id: give each its own")
        max_tokens = args.max_tokens or MAX_TOKENS
        clients = max(*args.concurrency, *args.step, 1)
        step_tokens = max(EngineOptions().max_step_tokens, 2 * clients)
        options = EngineOptions(max_running=clients, max_step_tokens=step_tokens, max_waiting=len(self.prompts))
        shared = SharedModel(setting.loaded, options, args.budget, args.guided)
        guide = shared.executor if isinstance(shared.executor, GuidedExecutor) else None
        self.ours = [EngineServer(c.label, partial(shared.engine, c), max_tokens, guide) for c in choices]
        self._main = {c.label for c in choices if c.name in MAIN}
        end_tokens, context = setting.loaded.eos_token_ids, setting.loaded.max_model_len
        self.batching = StockBatching(setting.stock, max_tokens, end_tokens, clients, context, step_tokens)
        self.alone = [OneAtATime(kind(setting.stock, max_tokens, end_tokens)) for kind in (StockGenerate, StockPromptLookup)]
        self.skipped: dict[str, str] = {}
        self.differing: dict[str, int] = {}  # by server: outputs that are not what they must be

    def warm_up(self) -> None:
        """Each server answers two prompts: code is compiled, tables are read; and batching of transformers that fails is out."""
        everyone: list[Server] = [*self.ours]
        if not self._args.no_stock:
            everyone += [*self.alone, self.batching]
        task = self._bar.add_task("warm up", total=len(everyone))
        for server in everyone:
            self._bar.update(task, description=f"warm up: {server.name}")
            self._driven(server, self.prompts[:2], ClosedLoop(1))
            self._bar.advance(task)

    def _driven(
        self, server: Server, prompts: Sequence[Prompt], arrivals: Arrivals
    ) -> tuple[Sequence[Journey], ServerCounts] | None:
        """As ``drive``; None where transformers' batching fails, which does not end the run: it is out from then on."""
        try:
            return drive(server, prompts, arrivals)
        except _FAULTS as error:
            if server is not self.batching:
                raise
            self.skipped[server.name] = f"transformers could not run it: {type(error).__name__}: {error}".splitlines()[0]
            return None

    def closed(self) -> dict[str, Any]:
        """A cell for each concurrency. transformers one prompt at a time takes part where there is one client."""
        cells = {}
        for concurrency in self._args.concurrency:
            prompts = self.prompts[: self._fitting(concurrency)]
            theirs = [*(self.alone if concurrency == 1 else ()), self.batching]
            cells[str(concurrency)] = self._cell(f"{concurrency} at once", prompts, ClosedLoop(concurrency), self.ours, theirs)
        return cells

    def open(self, capacity: float) -> dict[str, Any]:
        """A cell for each load, relative to ``capacity`` requests a second."""
        cells = {}
        for load in self._args.load:
            rate = load * capacity
            count = self._args.requests or max(_LEAST_REQUESTS, math.ceil(rate * self._args.duration))
            prompts = self.prompts[:count]
            arrivals = poisson(rate, len(prompts), self._args.seed)
            cell = self._cell(f"{100 * load:.0f} % load", prompts, arrivals, self.ours, [self.batching])
            cells[f"{load:g}"] = cell | {"requests_per_s": round(rate, 3)}
        return cells

    def workloads(self, count: int) -> dict[str, Any]:
        """A cell for each workload, one client, with the strategies that are repeated."""
        servers = [server for server in self.ours if server.name in self._main]
        return {
            workload.name: self._cell(workload.name, workload.prompts[:count], ClosedLoop(1), servers, [])
            for workload in self._setting.workloads
        }

    def steps(self) -> dict[str, Any]:
        """The load step of the strategies that are repeated, in turns; of all where only the baseline is among these."""
        servers = [server for server in self.ours if server.name in self._main]
        servers = servers if len(servers) > 1 else self.ours
        runs: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
        task = self._bar.add_task("load step", total=len(servers) * self._args.repeats)
        for repeat in range(self._args.repeats):
            for server in servers[:: -1 if repeat % 2 else 1]:
                self._bar.update(task, description=f"load step: {server.name}")
                run = told(drive_step(server, self.prompts, self._args.step, self._args.phase))
                runs[server.name].append(run)
                if run["back_after"]:
                    self._say(f"load step, {server.name}: {back_after_text(run['back_after'])}")
                self._bar.advance(task)
        return {"levels": list(self._args.step), "phase_s": self._args.phase, "runs": runs}

    def _fitting(self, concurrency: int) -> int:
        """How many prompts fill ``--duration`` with plain decoding at a concurrency."""
        if self._args.requests:
            return max(concurrency, self._args.requests)
        count = max(_LEAST_REQUESTS // 2, math.ceil(_CALIBRATION * concurrency))
        run = measured(*drive(self.ours[0], self.prompts[:count], ClosedLoop(concurrency)), closed=True)
        return max(_LEAST_REQUESTS, _ROUNDS * concurrency, math.ceil(run["requests_per_s"] * self._args.duration))

    def _cell(
        self, name: str, prompts: Sequence[Prompt], arrivals: Arrivals, ours: Sequence[EngineServer], theirs: Sequence[Server]
    ) -> dict[str, Any]:
        """One load for all in turns; every other repeat in reverse, so that a drift of the machine hits all alike."""
        theirs = [] if self._args.no_stock else [server for server in theirs if server.name not in self.skipped]
        servers = [*ours, *theirs]
        times = {s.name: self._args.repeats if s.name in self._main else self._args.single_repeats for s in servers}
        runs: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
        expected = {prompt.id: prompt.known for prompt in prompts}
        task = self._bar.add_task(name, total=sum(times.values()))
        for repeat in range(max(times.values())):
            for server in servers[:: -1 if repeat % 2 else 1]:
                if repeat >= times[server.name] or server.name in self.skipped:
                    continue
                self._bar.update(task, description=f"{name}: {server.name}")
                driven = self._driven(server, prompts, arrivals)
                if driven is None:
                    continue
                journeys, counts = driven
                run = measured(journeys, counts, isinstance(arrivals, ClosedLoop))
                run["differing"] = self._differing(server, journeys, expected)
                runs[server.name].append(run)
                ttft, tpot = run["ttft_ms"]["p50"], run["tpot_ms"]["p50"]
                self._say(
                    f"{name}, {server.name}: {run['tokens_per_s']:.0f} tokens/s, TTFT {ttft:.0f} ms, TPOT {tpot or 0:.1f} ms"
                )
                self._bar.advance(task)
        return {"requests": len(prompts), "servers": rows_of_a_cell({key: own for key, own in runs.items() if own}, BASELINE)}

    def _differing(self, server: Server, journeys: Sequence[Journey], expected: dict[str, list[int] | None]) -> int | None:
        """Outputs that are not the known ones, or not the baseline's first; None where a guided server writes its own tokens."""
        if server is self.batching and self._args.guided:
            return None
        wrong = 0
        for journey in journeys:
            known = expected[journey.key]
            if known is None:
                expected[journey.key] = journey.output
            elif known != journey.output:
                wrong += 1
        self.differing[server.name] = self.differing.get(server.name, 0) + wrong
        return wrong

    def _say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)
