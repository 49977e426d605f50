"""What a paper's tables are run on: a model, datasets in the place of the paper's, and strategies in turns on them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.slices import EngineOptions
from decoding.request import text_key
from decoding.strategy_choice import StrategyChoice
from engine.engine import Engine
from engine.loading.model import LoadedModel
from experiments.bench.engines.competition import Lap, Tally, compete, decode_ratios
from experiments.bench.engines.contestants import Contestant, EngineContestant, Prompt
from experiments.bench.engines.models import MAX_TOKENS, load_setting
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.progress import Progress
from experiments.bench.workloads import interleaved
from experiments.papers.numbers.published import Figure, figure_of

PLAIN = "plain"  # decoding token by token: what speed-ups are relative to
BEST = "best"  # a label under which measurements stand a second time
TENANT = "local"  # of all requests

Measures = dict[str, dict[str, dict[str, Figure]]]  # dataset -> label -> metric -> mean and spread over repeats
MakeContestant = Callable[[Callable[[], Engine]], Contestant]


@dataclass(frozen=True, slots=True)
class Stage:
    """A model and the datasets that fit it."""

    loaded: LoadedModel
    datasets: dict[str, list[Prompt]]  # by the paper's name of what they stand for
    too_long: int  # records that do not fit the context
    guided: bool  # known outputs are followed
    max_tokens: int
    repeats: int
    progress: Progress

    def shared(self, budget: int, max_running: int = 1) -> SharedModel:
        """The model with KV slots for a budget.

        Args:
            budget: most drafted rows of a request in a step.
            max_running: requests at once.
        """
        rows = max(EngineOptions().max_step_tokens, (budget + 1) * max_running)
        options = EngineOptions(max_running=max_running, max_step_tokens=rows, prefix_caching=False)
        return SharedModel(self.loaded, options, budget, self.guided)


def load_stage(args: argparse.Namespace, guided: bool, progress: Progress) -> Stage:
    """Reads the datasets and loads or makes the model.

    Raises:
        PromptFileError: a file that cannot be used.
        ModelLoadError: a model that cannot be used.
    """
    files = list(dict.fromkeys(path for paths in args.prompts.values() for path in paths))
    setting = load_setting(argparse.Namespace(**vars(args) | {"prompts": files}), guided)
    by_file = {
        path: [replace(prompt, id=f"{path.stem}/{prompt.id}") for prompt in workload.prompts]
        for path, workload in zip(files, setting.workloads, strict=True)
    }
    datasets = {name: list(interleaved([by_file[path] for path in paths])) for name, paths in args.prompts.items()}
    too_long = sum(workload.too_long for workload in setting.workloads)
    return Stage(setting.loaded, datasets, too_long, guided, args.max_tokens or MAX_TOKENS, args.repeats, progress)


def race(
    stage: Stage,
    shared: SharedModel,
    prompts: Sequence[Prompt],
    choices: Mapping[str, StrategyChoice],
    repeats: int | None = None,
    batch_size: int = 1,
    before: Sequence[Sequence[int]] = (),
    contestant: MakeContestant | None = None,
) -> dict[str, dict[str, Figure]]:
    """Strategies in turns on the same prompts, plain decoding first.

    Args:
        stage: where it runs.
        shared: of the stage, with room for ``batch_size`` requests.
        prompts: in their order.
        choices: label -> strategy.
        repeats: the stage's when absent.
        batch_size: prompts at once.
        before: outputs of earlier requests that every strategy remembers.
        contestant: makes one of an engine; one that decodes greedily when absent.

    Returns:
        Label -> metric -> figure: ``tokens/s`` and ``speedup`` of whole requests, as the papers have them; ``decode speedup``
        after the first tokens, which in batches tells little, since one request's prefill is in another's steps;
        ``tokens_per_step``, ``drafted_per_step``, ``differing`` (outputs that are not those of plain decoding).
    """
    repeats = repeats or stage.repeats
    runners: list[Contestant] = []
    for label, choice in {PLAIN: StrategyChoice(PLAIN, "autoregressive", {}), **choices}.items():
        make = maker(shared, replace(choice, label=label), before)
        own = EngineContestant(make, stage.max_tokens, shared.guide) if contestant is None else contestant(make)
        runners.append(own)
    outputs = {prompt.id: prompt.known for prompt in prompts if prompt.known is not None}
    stage.progress.say(f"{len(runners)} strategies on {len(prompts)} prompts")
    _, tallies = compete(runners, prompts, repeats, batch_size, stage.progress, outputs or None)
    return {label: _row(tally, tallies[PLAIN], [prompt.id for prompt in prompts], repeats) for label, tally in tallies.items()}


def maker(shared: SharedModel, choice: StrategyChoice, before: Sequence[Sequence[int]]) -> Callable[[], Engine]:
    """Makes engines of a strategy that remember outputs of earlier requests, where it remembers any."""

    def make() -> Engine:
        engine = shared.engine(choice)
        history = None if engine.memory is None else engine.memory.of(TENANT)
        for number, output in enumerate(before if history is not None else ()):
            assert history is not None
            history.extend(text_key(f"before-{number}"), 0, output, final=True)
        return engine

    return make


def _row(tally: Tally, plain: Tally, ids: Sequence[str], repeats: int) -> dict[str, Figure]:
    own, base = (_by_record(each, repeats) for each in (tally, plain))
    whole = [there / here for there, here in zip(plain.wall_s, tally.wall_s, strict=True)]
    walls = [(there.wall_s, here.wall_s) for there, here in zip(base, own, strict=True)]
    after = [(there.wall_s - there.prefill_s, here.wall_s - here.prefill_s) for there, here in zip(base, own, strict=True)]
    differing = [(float(len(ids) * (name in tally.differing)), 1.0) for name in ids]
    return {
        "tokens/s": figure_of([tally.tokens / repeats / each for each in tally.wall_s]),
        "speedup": figure_of(whole, walls),
        "decode speedup": figure_of(decode_ratios(tally, plain), after),
        "tokens_per_step": figure_of([tally.tokens / tally.steps], [(each.tokens, each.steps) for each in own]),
        "drafted_per_step": Figure((tally.drafted or 0) / tally.steps),
        "differing": figure_of([float(len(tally.differing))], differing),
    }


def _by_record(tally: Tally, repeats: int) -> list[Lap]:
    """Each record's runs of all repeats in one; what ran at once stands as one record."""
    records = len(tally.laps) // repeats
    return [Lap(*map(sum, zip(*tally.laps[number::records], strict=True))) for number in range(records)]


def best(measured: Mapping[str, Mapping[str, Figure]], metric: str = "speedup") -> str:
    """The label with the most of a metric, plain decoding left out."""
    return max((label for label in measured if label != PLAIN), key=lambda label: measured[label][metric].mean)


def ran(stage: Stage, files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """What ran in the place of the paper's models and data."""
    model = stage.loaded.model
    how = "target-guided: forwards of this model, committed tokens of the files' known outputs (arXiv 2304.04487, 3.2)"
    lengths = {
        name: {
            "stands_in": [path.stem for path in files[name]],
            "records": len(prompts),
            "prompt_tokens": round(statistics.fmean(len(prompt.ids) for prompt in prompts), 1),
        }
        | ({"output_tokens": round(statistics.fmean(len(p.known or ()) for p in prompts), 1)} if stage.guided else {})
        for name, prompts in stage.datasets.items()
    }
    return {
        "model": stage.loaded.served_name,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "how": how if stage.guided else "the model's own outputs, greedy unless a temperature is named",
        "datasets": lengths,
        "too_long": stage.too_long,
    }
