"""The step loop: schedule, propose, pack, execute, commit, observe, over several requests at once."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerFast

from outrider.configs.slices import EmulationOptions, EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.budget.attribution import step_report
from outrider.decoding.drafters.base import Drafter, TooManySettingsError, count_step
from outrider.decoding.drafters.registry import LOSSLESS, build_drafters, check_drafters, parse_strategy, setting_of
from outrider.decoding.request import FinishReason, Request, StepOutput
from outrider.decoding.sources.history import Histories
from outrider.decoding.tree import DraftTree
from outrider.engine.accelerator import accelerator, device_error, is_out_of_memory
from outrider.engine.child_process import report_progress
from outrider.engine.emulation.device import EmulatedDevice, local_executor
from outrider.engine.errors import ContextLengthError, QueueFullError, RequestError, fault_of, first_line
from outrider.engine.executor import Executor, VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.cached_checks import make_runner_with_cached_check
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import RunnerMaker
from outrider.engine.loading.draft_model import load_draft_model
from outrider.engine.loading.memory import release_heap
from outrider.engine.loading.model import LoadedModel, load_model
from outrider.engine.loading.model_info import ModelInfo, strategies_apart
from outrider.engine.loading.slot_memory import fitted
from outrider.engine.measures.energy import EnergyMeter, NoMeter
from outrider.engine.measures.energy_ledger import EnergyCounts, EnergyLedger
from outrider.engine.measures.metrics import (
    CountsByStrategy,
    EmulatedCounts,
    EngineCounts,
    EngineMetrics,
    MetricsCounts,
    StrategyCounts,
)
from outrider.engine.scheduling.planner import SlotPlacement, StepPlanner
from outrider.engine.scheduling.scheduler import Scheduler, check_options
from outrider.engine.target import LocalTarget
from outrider.engine.text.grammar import Grammars
from outrider.engine.text.outputs import Outputs

logger = logging.getLogger(__name__)


def load_runner(
    model: ModelOptions,
    options: EngineOptions,
    speculation: SpeculationOptions,
    world_size: int,
    emulation: EmulationOptions | None = None,
) -> tuple[LoadedModel, ModelRunner]:
    """Load a model, and create its runner for steps that up to ``world_size`` ranks share. Raises ``ModelLoadError``."""
    loaded = load_model(model, options.gpu_memory_utilization)
    loaded, runner = runner_over(loaded, options, speculation, world_size, emulation=emulation)
    _grammars_of(runner).prepare()
    release_heap()
    return loaded, runner


def _grammars_of(runner: ModelRunner) -> Grammars:
    assert runner.grammars is not None, "``runner_over`` gives it some"
    return runner.grammars


def runner_over(
    loaded: LoadedModel,
    options: EngineOptions,
    speculation: SpeculationOptions,
    world_size: int,
    make: RunnerMaker = make_runner_with_cached_check,
    emulation: EmulationOptions | None = None,
) -> tuple[LoadedModel, ModelRunner]:
    """Create the runner of a loaded model, on a GPU perhaps with a shorter context; its grammars are not prepared yet."""
    if world_size > 1 and options.kv_slots is None:  # the same number on every rank, whatever memory each of them has
        options = dataclasses.replace(options, kv_slots=options.max_running)
    if loaded.model.device.type == "cuda":
        loaded, options = fitted(loaded, options, speculation, world_size)
    drafts = speculation.most_draft_tokens * world_size
    runner = make(loaded.model, loaded.max_model_len + drafts, options, 1 + drafts)
    runner.grammars = Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    runner.adapt(loaded.adapters)
    if emulation is not None and emulation.device is not None:
        runner.emulated = EmulatedDevice.over(runner, loaded, emulation)
    return loaded, runner


class Engine:
    """Step loop, called by one thread. Drafts, other requests and preemptions change when tokens arrive, not which tokens."""

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        options: EngineOptions,
        max_draft_rows: int,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerFast | None = None,
        grammars: Grammars | None = None,
        target: LocalTarget | None = None,
        largest_tree: int | None = None,
        as_published: bool = False,
        limit_name: str | None = None,
        device: EmulatedDevice | None = None,  # if it is emulated
    ) -> None:
        """Create an engine; ``target`` learns the time of each step. Raises ``ValueError`` if an option is outside its range.

        Requests may be drafted for as published, in trees of ``largest_tree`` rows, by default if ``as_published``; see
        ``StepPlanner`` for ``limit_name``.
        """
        # Without a tokenizer outputs have no text and stop strings are refused; without grammars structured output is refused.
        self._grammars, self._target = grammars, target
        self._emulated, self._clock = device, time.perf_counter if device is None else device.clock.now
        self.info, self.tokenizer, self._device = info, tokenizer, torch.device(info.device)
        self._executor, self._drafter = executor, drafter
        self._admission = SlotPlacement(executor, drafter.histories, options.prefix_caching)
        self._as_published = as_published
        self._scheduler = Scheduler(
            options, max_draft_rows, self._admission.place, slots=executor.slots, largest_tree=largest_tree
        )
        self._requests: dict[str, Request] = {}
        self._outputs = Outputs(tokenizer, info.eos_token_ids)
        self._planner = StepPlanner(self._scheduler, drafter, info, self._outputs, executor.rope, limit_name, device)
        self._by_strategy = CountsByStrategy(info.choices, info.lossless_choices)
        self._ledger = EnergyLedger(NoMeter())
        self._metrics = EngineMetrics(info.max_model_len)
        self._cuts_logged: set[str] = set()  # strategies
        self._warmup: list[Iterator[None]] = []  # deferred warm-up tasks
        self.in_step: tuple[str, ...] = ()  # ids of the requests in the current or last step; empty until it is planned
        self.on_step: Callable[[Request | None], None] | None = None  # gets the quarantined request of the step, or None

    @classmethod
    def load(
        cls,
        model: ModelOptions,
        options: EngineOptions,
        speculation: SpeculationOptions,
        world_size: int = 1,
        executor: Callable[[ModelRunner], Executor] = local_executor,
        make: RunnerMaker = make_runner_with_cached_check,
        defer_warmup: bool = False,
        emulation: EmulationOptions | None = None,
    ) -> Engine:
        """Load a model into this process and create an engine over it.

        Args:
            world_size: most ranks that will ever share a step; trees may have as many times the rows.
            defer_warmup: leave work that only makes drafts faster to ``run_warmup_slice``, unless its result is on disk.

        Raises:
            ModelLoadError: the model, or the draft model, cannot be used.
            ValueError: an option is outside its range, or a strategy is unknown or not allowed by the options.
        """
        largest, most = speculation.most_draft_tokens, speculation.usual_draft_tokens
        if most < 0:
            raise ValueError(f"speculation.max_draft_tokens must not be negative, got {most}")
        paying = most if speculation.max_draft_tokens is None else None
        drafter = build_drafters(
            speculation.strategy, speculation.options, speculation.strategies, paying, speculation.max_settings
        )
        others = [parse_strategy(text) for text in speculation.strategies]
        names = (speculation.strategy, *(choice.name for choice in others))
        settings = tuple(choice.setting for choice in others)
        check_drafters(drafter, names, speculation.draft_model, speculation.exact, world_size > 1)
        check_options(options)
        report_progress("reading the weights")
        loaded = load_model(model, options.gpu_memory_utilization)
        with accelerator().current(loaded.model.device):
            report_progress("checking that steps are exact")
            info = loaded.info(speculation.strategy, LOSSLESS.issuperset(names), settings)  # before ``make`` drops parts of it
            loaded, runner = runner_over(loaded, options, speculation, world_size, make, emulation)
            info = dataclasses.replace(
                info, max_model_len=loaded.max_model_len, device=str(runner.model.device), exact=runner.exact,
                uncaptured_rows=tuple(runner.capture_failures),
                strategies_apart=strategies_apart(speculation),
                methods=tuple((choice.alias, choice.name) for choice in others if choice.alias),
                takes_options=speculation.max_settings > 0, request_options=speculation.request_options,
            )  # fmt: skip
            computes = executor(runner)  # first: it may pin this thread to CPUs, which changes the drafter's measurements
            if drafter.draft_rows and speculation.draft_model is not None:
                slots, rows = runner.cache.slots, options.max_step_tokens
                small = load_draft_model(speculation.draft_model, model, loaded, slots, rows, drafter.draft_rows)
                drafter.draft_model = small
            fixed_rows = runner.fixed_rows if runner.emulated is None else runner.emulated.roofline.fixed_rows
            if speculation.max_draft_tokens is None and fixed_rows is not None:
                # Drafts and root fit into one forward, except in the larger trees of requests that are drafted for as published.
                most = min(most, fixed_rows - 1)
            report_progress("preparing drafts")
            warmup: list[Iterator[None]] | None = [] if defer_warmup else None
            target = LocalTarget(runner, info, loaded.tokenizer, warmup=warmup)
            drafter.prepare(target)
            engine = cls(
                computes, drafter, options, most, info, loaded.tokenizer, runner.grammars, target, largest,
                speculation.as_published, None if speculation.max_draft_tokens is None else "speculation.max_draft_tokens",
                runner.emulated,
            )  # fmt: skip
            engine._warmup = warmup or []
            if defer_warmup:
                engine._warmup.insert(0, _grammars_of(runner).warmup())
            else:
                _grammars_of(runner).prepare()
                release_heap()
            return engine

    @property
    def has_work(self) -> bool:
        """Return whether a request is running or waiting."""
        return bool(self._requests)

    @property
    def has_warmup(self) -> bool:
        """Return whether deferred warm-up work is left for ``run_warmup_slice``."""
        return bool(self._warmup)

    def run_warmup_slice(self) -> None:
        """Run one piece of deferred warm-up, about as long as a step. It overwrites KV slots, so call it when idle."""
        assert not self._requests, "no request runs or waits"
        try:
            with accelerator().current(self._device):
                next(self._warmup[0])
            return
        except StopIteration:
            logger.debug("background warm-up finished")
        except Exception as error:  # costs speed only, so it is not retried; a lost device raises ``DeviceError``
            self._raise_lost(error)
            logger.exception("background warm-up failed, drafting will be slower")
        del self._warmup[0]
        release_heap()

    @property
    def histories(self) -> Histories | None:
        """Return the drafter's history of past outputs by tenant; None for a strategy that keeps none."""
        return self._drafter.histories

    def keeps_output(self, request: Request) -> bool:
        """Return whether the output of a request is kept for other requests of its tenant."""
        return not request.plain and self._drafter.keeps_output(request)

    def counts(self) -> EngineCounts:
        """Return the current numbers of requests and slots, and the counters of prefix reuse and preemptions."""
        scheduler, admission = self._scheduler, self._admission
        places = len(scheduler.running), scheduler.num_waiting, scheduler.num_free_slots
        return EngineCounts(*places, admission.queries, admission.hits, scheduler.num_preemptions)

    def meter(self, meter: EnergyMeter) -> None:
        """Report each request's energy (``SpecStats.energy_j``) by a counter over all devices. Call before the first request."""
        self._ledger = EnergyLedger(meter)

    def energy(self) -> EnergyCounts | None:
        """Return the energy that steps have used; None if it is not metered. Thread-safe."""
        return self._ledger.counts()

    def emulated(self) -> EmulatedCounts | None:
        """Return the counters of the emulated device; None for a real one. Thread-safe."""
        return None if self._emulated is None else self._emulated.counts()

    def by_strategy(self) -> tuple[StrategyCounts, ...]:
        """Return counters of ended requests by strategy, the default strategy first. Thread-safe."""
        return self._by_strategy.read()

    def metrics(self) -> MetricsCounts:
        """Return the counters for dashboards. Thread-safe."""
        return self._metrics.read(None if self.histories is None else self.histories.log_bytes, self._drafter.budget())

    def check_integrity(self) -> None:
        """Assert, between steps, that no slot, KV entry or request is lost and nothing is kept of ended requests."""
        self._scheduler.check_integrity()
        live = {request.request_id: request for request in self._scheduler.requests()}
        assert live == self._requests, (live.keys(), self._requests.keys())
        self._outputs.check_integrity(live.keys())
        assert live.keys() >= set(self._drafter.tracked_requests()), (set(self._drafter.tracked_requests()), live.keys())
        self._executor.check_integrity(self._scheduler.running)

    def add(self, request: Request, began_s: float | None = None) -> None:
        """Queue a request. ``began_s`` is the wall clock at its arrival, for an emulated device.

        Raises:
            ContextLengthError: prompt and ``max_tokens`` exceed the context.
            RequestError: the request uses an id that is in use, tokens outside the vocabulary, stop strings without a tokenizer,
                a priority, strategy or adapter that this engine does not have, a grammar that the model cannot follow, or choices
                that do not fit into a step.
            QueueFullError: too many requests wait.
        """
        params, limit = request.params, self.info.max_model_len
        if request.request_id in self._requests:
            raise RequestError("request_id", f"{request.request_id!r} is in use by a live request")
        if request.num_prompt + params.max_tokens > limit:
            field = "prompt" if request.num_prompt >= limit else "max_tokens"
            raise ContextLengthError(
                field,
                f"the context is {limit} tokens, but the prompt has {request.num_prompt} and max_tokens is {params.max_tokens}",
            )
        if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= self.info.vocab_size:
            raise RequestError("prompt", f"token ids must be between 0 and {self.info.vocab_size - 1}")
        self._check_choices(request)
        self.info.check_strategy(request.strategy)
        self.info.check_adapter(request.adapter)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer")
        if params.logit_bias and max(token for token, _ in params.logit_bias) >= self.info.vocab_size:
            raise RequestError("logit_bias", f"token ids must be between 0 and {self.info.vocab_size - 1}")
        if params.grammar is not None:
            if self._grammars is None:
                raise RequestError(params.grammar_field, "structured output needs a tokenizer")
            if request.grammar is None:
                self.compile(request)
        # First, because the queue may be full: nothing must be left of a refused request.
        self._scheduler.add(request)
        try:
            self._admit(request)
            self._outputs.begin(request)
        except Exception:
            self._scheduler.remove(request)
            self._drafter.finish(request)
            raise
        self._requests[request.request_id] = request
        if request.as_published is None:
            request.as_published = self._as_published
        request.arrived_s = self._clock()
        if self._emulated is not None:
            self._emulated.began(request.request_id, began_s)

    def _check_choices(self, request: Request) -> None:
        if request.choices is None:
            return
        if max(token for choice in request.choices.scored for _, token in choice) >= self.info.vocab_size:
            raise RequestError("choices", f"token ids must be between 0 and {self.info.vocab_size - 1}")
        rows, most = request.choices.rows, self._scheduler.most_choice_rows
        if rows > most:
            limits = "speculation.largest_tree, or max_draft_tokens if it is set, and engine.max_step_tokens limit it"
            raise RequestError("choices", f"their tree has {rows} tokens, the maximum is {most} ({limits}): send less")
        rope, length = self._executor.rope, request.num_prompt + request.params.max_tokens
        if rope is not None and length > rope.border and (rope.dynamic or request.num_prompt <= rope.border):
            message = f"with the prompt they are longer than {rope.border} tokens, where the model's RoPE frequencies change"
            raise RequestError("choices", f"{message}: send less")

    def _admit(self, request: Request) -> None:
        """Have the drafter prepare for a request. Raises ``RequestError`` or ``QueueFullError`` for its options."""
        if request.plain:
            return
        try:
            self._drafter.admit(request)
        except TooManySettingsError as error:
            raise QueueFullError(str(error)) from None
        except ValueError as error:
            raise RequestError("speculation.options", str(error)) from None

    def compile(self, request: Request) -> None:
        """Compile a request's grammar, if any, before ``add``. Thread-safe. Raises ``RequestError`` if it cannot be followed."""
        params = request.params
        if params.grammar is not None and self._grammars is not None:
            request.grammar = self._grammars.start(params.grammar, request.account, params.grammar_field)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request without further output, counted as ``reason``, and free its slot. Return False if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._release(request, reason)
        return True

    def step(self) -> list[StepOutput]:
        """Run one forward pass; return an output for each request with new tokens. Raises ``DeviceError`` if the device fails."""
        try:
            with accelerator().current(self._device):  # current device is per thread
                return self._step()
        except Exception as error:
            self._raise_lost(error)
            raise

    def _step(self) -> list[StepOutput]:
        self.in_step = ()
        self._ledger.begin()
        width = self._executor.begin_step()
        works: list[ScheduledRequest] = []
        try:
            works = self._planner.plan(width)
            if not works:
                return []
            outcomes, forward_s, now_s = self._execute(works)
        except Exception as error:
            # A step that runs out of device memory emits nothing, and the next steps are smaller.
            if not (is_out_of_memory(error) and self._scheduler.running):
                raise
            reason = first_line(error)
        else:
            return self._computed(works, outcomes, forward_s, now_s, width)
        return self._shrink(works, reason)  # not in the handler: the traceback holds the tensors of the step

    def _computed(
        self,
        works: Sequence[ScheduledRequest],
        outcomes: Sequence[VerifyResult | None],
        forward_s: float,
        now_s: float,
        width: int,
    ) -> list[StepOutput]:
        self._scheduler.computed()
        pairs = zip(works, outcomes, strict=True)
        outputs = [self._outcome(work, outcome, now_s) for work, outcome in pairs if outcome is not None]
        self._metrics.record_step(works, forward_s)
        if self._target is not None and width == 1:
            self._target.record_step(works, forward_s)
        return outputs

    def _shrink(self, works: Sequence[ScheduledRequest], reason: str) -> list[StepOutput]:
        """Make the next steps smaller after one that ran out of memory, or fail a request that does not fit alone."""
        accelerator().empty_cache()
        self._metrics.record_out_of_memory()
        rows = sum(work.end - work.start + (0 if work.tree is None else len(work.tree.tokens) - 1) for work in works)
        if self._scheduler.shrink(rows):
            logger.warning("out_of_memory: a step of %d rows is computed again in parts: %s", rows, reason)
            return []
        (request,) = self._scheduler.running
        logger.error("%s: out_of_memory: it does not fit alone: %s", request.label, reason)
        advice = "lower engine.kv_slots, engine.max_running or model.max_model_len to leave more memory for steps"
        return [self._fail(request, f"out of memory on {self.info.device} with this request alone: {advice}")]

    def _raise_lost(self, error: Exception) -> None:
        lost = device_error(error, self._device)
        if lost is error:
            raise error
        if lost is not None:
            raise lost from error

    def _execute(self, works: Sequence[ScheduledRequest]) -> tuple[list[VerifyResult | None], float, float]:
        """Compute a step; return an outcome for each work (None for a part of a prompt), the seconds, and the end time."""
        self.in_step = tuple(work.request.request_id for work in works)
        if self.on_step is not None:
            self.on_step(works[0].request if works[0].request.quarantined else None)
        started_s = self._clock()
        outcomes = self._executor.execute(works, self._drafter.top_k)
        ended_s = self._clock()
        self._ledger.record_step(works)
        for work, outcome in zip(works, outcomes, strict=True):
            work.request.stats.forward_s += ended_s - started_s
            if outcome is None:
                work.request.num_computed = work.end
        return outcomes, ended_s - started_s, ended_s

    def _outcome(self, work: ScheduledRequest, outcome: VerifyResult, now_s: float) -> StepOutput:
        request = work.request
        if request.grammar is not None:
            request.grammar.end_step()
            if request.fault is None and request.grammar.fault is not None:  # tokens chosen since then ignore the grammar
                request.fault, request.fault_field = request.grammar.fault, request.params.grammar_field
        if request.fault is not None:
            return self._fail(request, request.fault, request.fault_field)
        try:
            return self._commit(work, outcome, now_s)
        except Exception as error:
            # The request ends with an error, without effect on the others.
            self._raise_lost(error)
            if not isinstance(error, RequestError):
                logger.exception("%s: committing its result failed", request.label)
            return self._fail(request, *fault_of(error))

    def _fail(self, request: Request, message: str, field: str | None = None) -> StepOutput:
        """End a request with an error. A fault of the request itself (``field`` is set) counts as an abort."""
        if field is not None:
            logger.info("%s: it is invalid: %s: %s", request.label, field, message)
        if request.request_id in self._requests:  # ``_commit`` may have released it
            self._release(request, FinishReason.ERROR if field is None else FinishReason.ABORT)
        return StepOutput(request.request_id, (), "", FinishReason.ERROR, message, request.stats, fault_field=field)

    def _commit(self, work: ScheduledRequest, outcome: VerifyResult, now_s: float) -> StepOutput:
        request, tree, acceptance = work.request, outcome.tree, outcome.acceptance
        if outcome.scores is not None:
            self._count(request, tree, (), 0, now_s)
            self._release(request, FinishReason.STOP)
            return StepOutput(request.request_id, (), "", FinishReason.STOP, None, request.stats, scores=outcome.scores)
        tokens = [*(tree.tokens[list(acceptance.rows)].tolist() if acceptance.rows else ()), acceptance.next_token]
        pieces, reason = self._outputs.read(request, tokens)
        kept, text = len(pieces), "".join(pieces)
        emitted, accepted = tuple(tokens[:kept]), acceptance.rows[:kept]
        report = step_report(request, tree, accepted, pieces, self.histories) if request.report else None
        request.commit(emitted)
        # The executor has moved the KV of the accepted rows behind the committed entries.
        request.num_computed = work.end + len(acceptance.rows)
        self._count(request, tree, accepted, kept, now_s)
        logprobs = None if outcome.logprobs is None else outcome.logprobs[:kept]
        scores = None if request.prompt_logprobs is None else request.take_prompt_scores()
        if reason is None:
            if not request.plain:
                self._drafter.observe(request, tree, outcome.target, acceptance)
            if self._admission.crosses(request):
                self._scheduler.recompute(request)
            return StepOutput(request.request_id, emitted, text, logprobs=logprobs, report=report, prompt_logprobs=scores)
        self._release(request, reason)
        return StepOutput(request.request_id, emitted, text, reason, None, request.stats, logprobs, report, scores)

    def _count(self, request: Request, tree: DraftTree, accepted: tuple[int, ...], emitted: int, now_s: float) -> None:
        stats = request.stats
        assert request.admitted_s is not None, request.request_id
        self._metrics.record_output(request, tree, emitted, len(accepted), now_s)
        if request.first_token_s is None:
            request.first_token_s = now_s
            stats.prefill_s = now_s - request.admitted_s
        stats.decode_s = now_s - request.first_token_s
        count_step(stats, tree, accepted)
        if tree.num_candidates > 1:
            stats.acceptance_histogram += [0] * (tree.num_candidates - len(stats.acceptance_histogram))
            stats.acceptance_histogram[len(accepted)] += 1

    def _log_cut(self, request: Request) -> None:
        """Log, once per strategy, that drafts were smaller than its options ask for."""
        name = setting_of(request.strategy or self.info.strategy)
        cut = request.stats.cut(name)
        if cut is not None and name not in self._cuts_logged:
            self._cuts_logged.add(name)
            logger.info("drafts are smaller than the options ask for: %s", cut)

    def _release(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._scheduler.remove(request)
        self._executor.end(request)
        del self._requests[request.request_id]
        self._outputs.end(request)
        self._ledger.record_end(request, last=not self._requests)
        self._by_strategy.add(request)
        self._log_cut(request)
        self._metrics.record_end(request)
        if not request.plain:
            self._drafter.finish(request)
