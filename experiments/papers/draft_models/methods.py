"""What ``outrider bench draft-models`` runs: two models, prompts, and the methods."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.cli.generate.prompt_file import PromptFileError
from configs.schema import find_model
from configs.slices import EngineOptions, ModelOptions
from decoding.drafters import LOSSLESS, STRATEGIES, WITH_DRAFT_MODEL
from decoding.request import PLAIN, Request, SamplingParams
from decoding.strategy_choice import StrategyChoice, parse_strategy
from engine.engine import Engine
from engine.loading.draft_model import LocalDraftModel, load_draft_model
from engine.loading.model import LoadedModel, load_model
from experiments.bench.engines.contestants import Prompt, Run, run_requests
from experiments.bench.engines.models import MAX_TOKENS, chat_workload, fitting
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.workloads import interleaved
from experiments.papers.draft_models.mjgd import joint_greedy, over_target
from experiments.papers.numbers.mjsd import SETTINGS

BASELINE, GREEDY, MJGD = "sampled", "greedy", "mjgd"
BEAMS = (1, 2, 4, 8, 16)  # of the ablation
THRESHOLDS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0)
_WARM_UP_TOKENS = 16


def _mjgd_options(block: int = 4, beams: int = 8) -> tuple[int, int]:
    """The options of mjgd and their defaults."""
    return block, beams


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode, by the name that it has in tables."""

    label: str
    choice: StrategyChoice
    greedy: bool = False  # its requests take the likeliest token

    @property
    def lossless(self) -> bool:
        """Whether its outputs have the law of plain decoding of the same requests."""
        return self.choice.name in LOSSLESS

    def must_equal(self) -> str | None:
        """The method whose text its text must be, seed by seed; None where there is none. Greedy requests draw nothing, so that
        rules which preserve the law preserve their text."""
        if not self.lossless:
            return None
        if self.greedy:
            return GREEDY
        return None if self.choice.build().own_rules else BASELINE


def methods_of(args: argparse.Namespace) -> list[Method]:
    """Those that were asked for, or all, ``sampled`` first; then draft-free strategies, then mjsd of the ablations.

    Raises:
        ValueError: an unknown strategy or option, or a value outside its range; or one asked for twice.
    """
    named = _defaults(args) if args.strategy is None else [_method(text, text) for text in args.strategy]
    free = [name for name in STRATEGIES if name != PLAIN] if args.draft_free is None else args.draft_free
    chosen = [_method(BASELINE, BASELINE), *(method for method in named if method.label != BASELINE)]
    chosen += [_method(text, text) for text in free]
    if args.ablations:
        there = {method.choice.label for method in chosen}
        variants = [(beams, args.threshold) for beams in BEAMS] + [(args.beams, threshold) for threshold in THRESHOLDS]
        texts = dict.fromkeys(mjsd_text(args.gamma, beams, threshold) for beams, threshold in variants)
        chosen += [_method(text, text) for text in texts if text not in there]
    labels = [method.label for method in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{label} was asked for twice")
    return chosen


def mjsd_text(gamma: int, beams: int, threshold: float) -> str:
    """MJSD with these settings, as a strategy."""
    return f"mjsd:num_draft_tokens={gamma},beams={beams},threshold={threshold!r}"


def _defaults(args: argparse.Namespace) -> list[Method]:
    gamma, bild = args.gamma, SETTINGS["bild"]
    speculative = f"speculative:num_draft_tokens={gamma},sampling="
    texts = {
        GREEDY: GREEDY,
        "speculative greedy": speculative + "greedy",
        "speculative coupled": speculative + "coupled",
        "speculative rejection": speculative + "rejection",
        "spectr": f"spectr:num_draft_tokens={gamma},sequences={SETTINGS['spectr']['sequences']}",
        "bild": "bild:variant=mjsd," + ",".join(f"{name}={value!r}" for name, value in bild.items()),
        "mjsd": mjsd_text(gamma, args.beams, args.threshold),
        "mjsd, greedy": mjsd_text(gamma, args.beams, args.threshold) + ",greedy=true",
        "mjgd": f"{MJGD}:block={gamma},beams={args.beams}",
    }
    return [_method(label, text) for label, text in texts.items()]


def _method(label: str, text: str) -> Method:
    """A method by its text; it is built once to see that it can be."""
    choice, greedy = _split(parse_strategy(text))
    if choice.name in (BASELINE, GREEDY):
        if choice.options:
            raise ValueError(f"{choice.name} has no options, got {text!r}: it is plain decoding")
        plain = StrategyChoice(text, PLAIN, {})
        return Method(label, plain, choice.name == GREEDY)
    if choice.name == MJGD:
        known = inspect.signature(_mjgd_options).parameters
        for name, value in choice.options.items():
            if name not in known or type(value) is not int or value < 1:
                raise ValueError(f"mjgd has the options {', '.join(known)}, numbers from 1 on, got {name}={value!r}")
        return Method(label, choice, True)
    choice.build()
    return Method(label, choice, greedy)


def _split(choice: StrategyChoice) -> tuple[StrategyChoice, bool]:
    """A strategy without the option ``greedy``, which is not its own but that of its requests here, and this option."""
    greedy = choice.options.get(GREEDY, False)
    if type(greedy) is not bool:
        raise ValueError(f"{choice.label}: greedy must be true or false, got {greedy!r}")
    return StrategyChoice(choice.label, choice.name, {key: v for key, v in choice.options.items() if key != GREEDY}), greedy


@dataclass(frozen=True, slots=True)
class Setting:
    """Two models and the prompts."""

    loaded: LoadedModel  # of no longer context than is needed
    draft: LocalDraftModel | None  # None where no method drafts with a model
    shared: SharedModel
    prompts: list[Prompt]
    too_long: int  # prompts that do not fit the target's context


def load_setting(args: argparse.Namespace, methods: Sequence[Method]) -> Setting:
    """Reads the prompts and loads the models.

    Raises:
        PromptFileError: a file that cannot be used.
        ModelLoadError: a model that cannot be used, or two that do not go together.
    """
    options = ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads)
    loaded = load_model(options)
    max_tokens = args.max_tokens or MAX_TOKENS
    workloads = [chat_workload(path, loaded.tokenizer, args.records) for path in args.prompts]
    workloads = [fitting(workload, max_tokens, loaded.max_model_len) for workload in workloads]
    prompts = list(interleaved([workload.prompts for workload in workloads]))[: args.requests]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise PromptFileError("two records of --prompts have one id: give each its own")
    context = max(len(prompt.ids) for prompt in prompts) + max_tokens
    loaded = replace(loaded, max_model_len=context)
    rows = [method.choice.build().draft_rows for method in methods if method.choice.name in WITH_DRAFT_MODEL]
    engine = EngineOptions(max_running=1, prefix_caching=False)
    draft = None
    if rows:
        path = find_model(args.draft_model)
        draft = load_draft_model(path, options, loaded, 1, engine.max_step_tokens, max(rows))
    shared = SharedModel(loaded, engine, args.budget, draft_model=draft)
    return Setting(loaded, draft, shared, prompts, sum(workload.too_long for workload in workloads))


class Runner:
    """Runs the prompts of one method, one at a time."""

    def __init__(self, setting: Setting, method: Method, args: argparse.Namespace) -> None:
        self.method, self._setting = method, setting
        self._max_tokens, self._sampling = args.max_tokens or MAX_TOKENS, _sampling(args, method)
        self._engine: Engine | None = None
        self._run: Callable[[Request], Run] = self._by_engine
        if method.choice.name == MJGD:
            block, beams = _mjgd_options(**method.choice.options)
            model = over_target(setting.loaded, block, beams, EngineOptions().max_step_tokens)
            ends = setting.loaded.eos_token_ids
            self._run = lambda request: joint_greedy(model, request, block, beams, ends)

    @property
    def repeats(self) -> int | None:
        """Times that it is run at most: a reference of quality that draws nothing is run once."""
        return 1 if self.method.choice.name == MJGD else None

    def renew(self) -> None:
        """Forgets what earlier prompts taught."""
        self._engine = None

    def warm_up(self, prompt: Prompt) -> None:
        """A few tokens that nobody counts: code is compiled, tables are read."""
        self.run(prompt, 0, min(_WARM_UP_TOKENS, self._max_tokens))

    def run(self, prompt: Prompt, seed: int, max_tokens: int | None = None) -> Run:
        """The output of one prompt."""
        params = SamplingParams(max_tokens or self._max_tokens, seed=seed, **self._sampling)
        return self._run(Request(prompt.id, prompt.ids, params, prompt.references, tenant="local"))

    def _by_engine(self, request: Request) -> Run:
        if self._engine is None:
            self._engine = self._setting.shared.engine(self.method.choice)
        return run_requests(self._engine, [request])


def _sampling(args: argparse.Namespace, method: Method) -> dict[str, Any]:
    return {} if method.greedy else {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
