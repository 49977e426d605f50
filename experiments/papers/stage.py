"""What a paper's tables are run on: a model, datasets in the place of the paper's, and strategies in turns on them."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.cli.generate.prompt_file import PromptFileError, read_prompts
from configs.schema import find_model
from configs.slices import EngineOptions, ModelOptions
from decoding.drafters.with_model.draft_model import DraftModel
from decoding.request import text_key
from decoding.strategy_choice import StrategyChoice
from engine.engine import Engine
from engine.loading.draft_model import LocalDraftModel, load_draft_model
from engine.loading.model import LoadedModel, load_model
from experiments.bench.engines.competition import Lap, Tally, compete, decode_ratios
from experiments.bench.engines.contestants import EngineContestant, Prompt
from experiments.bench.engines.models import MAX_TOKENS, Workload, chat_workload, fitting
from experiments.bench.engines.models import load_setting as load_random
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.progress import Progress
from experiments.bench.record import portable
from experiments.bench.workloads import interleaved
from experiments.papers.kept import KeptContestant, KeptRuns
from experiments.papers.numbers.published import Figure, figure_of

PLAIN = "plain"  # decoding token by token: what speed-ups are relative to
BEST = "best"  # a label under which measurements stand a second time
TENANT = "local"  # of all requests
SESSIONS = 4  # earlier requests whose answers are the references of a dataset of cached sessions
_CACHED = "cache"  # the dataset

Quality = Callable[[Prompt, Sequence[Sequence[int]]], tuple[float, int]]  # outputs of a prompt -> nats and tokens of all
Score = Callable[[Prompt, Sequence[int]], float]  # of one output of a prompt; more is better
Measures = dict[str, dict[str, dict[str, Figure]]]  # dataset -> label -> metric -> mean and spread over repeats
MakeContestant = Callable[[Callable[[], Engine]], EngineContestant]
FOLLOWS = "target-guided: forwards of this model, committed tokens of the files' known outputs (arXiv 2304.04487, 3.2)"
OWN = "the model's own outputs, greedy unless a temperature is named"


@dataclass(frozen=True, slots=True)
class Stage:
    """A model and the datasets that fit it."""

    loaded: LoadedModel
    datasets: dict[str, list[Prompt]]  # by the paper's name of what they stand for
    too_long: int  # records that do not fit the context
    guided: bool  # known outputs are followed
    how: str  # where outputs come from
    max_tokens: int
    repeats: int
    progress: Progress
    runs: KeptRuns
    options: ModelOptions | None = None  # of the model; None of one of random weights
    draft_path: str | None = None  # of its draft model

    def draft(self, rows: int) -> LocalDraftModel:
        """The draft model, with room for so many rows behind a request's tokens."""
        assert self.options is not None and self.draft_path is not None
        return load_draft_model(self.draft_path, self.options, self.loaded, 1, EngineOptions().max_step_tokens, rows)

    def shared(self, budget: int, max_running: int = 1, draft_model: DraftModel | None = None) -> SharedModel:
        """The model with KV slots for a budget.

        Args:
            budget: most drafted rows of a request in a step.
            max_running: requests at once.
            draft_model: for the strategies that draft with one.
        """
        rows = max(EngineOptions().max_step_tokens, (budget + 1) * max_running)
        options = EngineOptions(max_running=max_running, max_step_tokens=rows, prefix_caching=False)
        return SharedModel(self.loaded, options, budget, self.guided, draft_model)


def load_stage(args: argparse.Namespace, guided: bool, progress: Progress) -> Stage:
    """Reads the datasets and loads or makes the model. Prompts are user messages in the model's own chat template.

    Raises:
        PromptFileError: a file that cannot be used.
        ModelLoadError: a model that cannot be used.
    """
    files = list(dict.fromkeys(path for paths in args.prompts.values() for path in paths))
    options = None
    if getattr(args, "random_model", None):
        setting = load_random(argparse.Namespace(**vars(args) | {"prompts": files}), guided=True)
        loaded, workloads = setting.loaded, setting.workloads
    else:
        options = ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads)
        loaded = load_model(options)
        read = [chat_workload(path, loaded.tokenizer, args.records) for path in files]
        if guided:
            read = [_followed(workload, path, loaded, args) for workload, path in zip(read, files, strict=True)]
        workloads = [fitting(workload, args.max_tokens or MAX_TOKENS, loaded.max_model_len) for workload in read]
    by_file = {
        path: [replace(prompt, id=f"{path.stem}/{prompt.id}") for prompt in workload.prompts]
        for path, workload in zip(files, workloads, strict=True)
    }
    datasets = {name: list(interleaved([by_file[path] for path in paths])) for name, paths in args.prompts.items()}
    too_long = sum(workload.too_long for workload in workloads)
    how, most = FOLLOWS if guided else OWN, args.max_tokens or MAX_TOKENS
    draft = find_model(args.draft_model) if "draft_model" in args else None
    return Stage(loaded, datasets, too_long, guided, how, most, args.repeats, progress, KeptRuns(), options, draft)


def _followed(workload: Workload, path: Path, loaded: LoadedModel, args: argparse.Namespace) -> Workload:
    """With the known outputs of the file, which end as the model ends; those of cached sessions are its references there."""
    records, outputs = read_prompts(path), []
    for record in records:
        if record.output is None:
            raise PromptFileError(f"{path}: record {record.id} has no string `output`, which is followed here")
        outputs.append([*loaded.tokenizer.encode(record.output, add_special_tokens=False), *loaded.eos_token_ids[:1]])
    prompts = [replace(prompt, known=own[: args.max_tokens]) for prompt, own in zip(workload.prompts, outputs, strict=False)]
    if path in args.prompts.get(_CACHED, ()):
        alike = similar([loaded.tokenizer.encode(record.prompt, add_special_tokens=False) for record in records], SESSIONS)
        prompts = [
            replace(prompt, references=[outputs[other] for other in others])
            for prompt, others in zip(prompts, alike, strict=False)
        ]
    return replace(workload, prompts=prompts)


def similar(texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The places of the others that are most similar to each text, the most similar first.

    They share most tokens: each counts ``log(texts / texts that have it)``, over what both have together.
    """
    sets = [set(text) for text in texts]
    having = Counter(token for own in sets for token in own)
    weight = {token: math.log(len(sets) / number) for token, number in having.items()}

    def likeness(one: set[int], other: set[int]) -> float:
        return sum(weight[token] for token in one & other) / (sum(weight[token] for token in one | other) or 1.0)

    found = []
    for own in sets:
        alike = [-likeness(own, other) if other is not own else math.inf for other in sets]
        found.append(sorted(range(len(sets)), key=lambda place: alike[place])[: min(count, len(sets) - 1)])
    return found


def written(stage: Stage) -> Stage:
    """The stage along the model's own greedy outputs, which are written here: to follow them is to decode greedily."""
    shared = stage.shared(0)
    plain = EngineContestant(maker(shared, StrategyChoice(PLAIN, "autoregressive", {}), ()), stage.max_tokens)
    kept = KeptContestant("written", plain, stage.runs)
    stage.progress.say("the model's own outputs, which are followed below")

    def own(prompt: Prompt) -> Prompt:
        stage.progress.note(f"its own output of {prompt.id}")
        return replace(prompt, known=kept.run([prompt]).outputs[0])

    datasets = {name: [own(prompt) for prompt in prompts] for name, prompts in stage.datasets.items()}
    return replace(stage, datasets=datasets, guided=True)


def race(
    stage: Stage,
    name: str,
    shared: SharedModel,
    prompts: Sequence[Prompt],
    choices: Mapping[str, StrategyChoice],
    repeats: int | None = None,
    batch_size: int = 1,
    before: Sequence[Sequence[int]] = (),
    contestant: MakeContestant | None = None,
    warm: Mapping[str, int] | None = None,
    quality: Quality | None = None,
    scores: Mapping[str, Score] | None = None,
) -> dict[str, dict[str, Figure]]:
    """Strategies in turns on the same prompts, plain decoding first.

    Args:
        stage: where it runs.
        name: of its own among the races of a command.
        shared: of the stage, with room for ``batch_size`` requests.
        prompts: in their order.
        choices: label -> strategy.
        repeats: the stage's when absent.
        batch_size: prompts at once.
        before: outputs of earlier requests that every strategy remembers.
        contestant: makes one of an engine; one that decodes greedily when absent.
        warm: label -> of how many of ``before`` it remembers; of all where nothing is said.
        quality: says how likely outputs are; see ``Returns``.
        scores: metric -> what says how good an output is.

    Returns:
        Label -> metric -> figure: ``tokens/s`` and ``speedup`` of whole requests, as the papers have them; ``decode speedup``
        after the first tokens, which in batches tells little, since one request's prefill is in another's steps;
        ``tokens_per_step``, ``drafted_per_step``, ``differing`` (outputs that are not those of plain decoding), and with a
        ``quality`` ``perplexity``, and each of ``scores``.

    Raises:
        OutOfTimeError: the hours of the command are over.
    """
    repeats = repeats or stage.repeats
    runners: list[KeptContestant] = []
    for label, choice in {PLAIN: StrategyChoice(PLAIN, "autoregressive", {}), **choices}.items():
        make = maker(shared, replace(choice, label=label), before[: (warm or {}).get(label, len(before))])
        own = EngineContestant(make, stage.max_tokens, shared.guide) if contestant is None else contestant(make)
        runners.append(KeptContestant(name, own, stage.runs))
    outputs = {prompt.id: prompt.known for prompt in prompts if prompt.known is not None}
    stage.progress.say(f"{name}: {len(runners)} strategies on {len(prompts)} prompts")
    _, tallies = compete(runners, prompts, repeats, batch_size, stage.progress, outputs or None)
    rows = {label: _row(tally, tallies[PLAIN], [prompt.id for prompt in prompts], repeats) for label, tally in tallies.items()}
    for runner in runners:
        texts = [[runner.outputs[repeat + 1, prompt.id] for repeat in range(repeats)] for prompt in prompts]
        if quality is not None:
            rows[runner.name]["perplexity"] = _perplexity([quality(*each) for each in zip(prompts, texts, strict=True)])
        for metric, score in (scores or {}).items():
            of_each = [
                statistics.fmean(score(prompt, output) for output in outputs)
                for prompt, outputs in zip(prompts, texts, strict=True)
            ]
            rows[runner.name][metric] = Figure(statistics.fmean(of_each), samples=figure_of(of_each).samples)
    return rows


def _perplexity(nats: Sequence[tuple[float, int]]) -> Figure:
    """Of ``(nats, tokens)`` of each record: a sample moves the logarithm of it as the record moves the mean."""
    tokens = statistics.fmean(count for _, count in nats)
    mean = statistics.fmean(each for each, _ in nats) / tokens
    value = math.exp(mean)
    return Figure(value, samples=tuple((value * (tokens + each - mean * count), tokens) for each, count in nats))


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
        **({} if stage.draft_path is None else {"draft_model": portable(stage.draft_path)}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "how": stage.how,
        "datasets": lengths,
        "too_long": stage.too_long,
    }
