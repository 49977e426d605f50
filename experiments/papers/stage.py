"""Model and datasets of a paper's run, and races of strategies on them."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.cluster.cli.generate.prompt_file import PromptFileError, read_prompts
from outrider.configs.schema import find_model
from outrider.configs.slices import EngineOptions, ModelOptions
from outrider.decoding.drafters.base import DraftModel
from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.sources.text_keys import text_key
from outrider.engine.engine import Engine
from outrider.engine.loading.draft_model import LocalDraftModel, load_draft_model
from outrider.engine.loading.model import LoadedModel, load_model
from outrider.experiments.bench.engines.competition import Lap, Tally, compete, decode_ratios
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, SharedModel
from outrider.experiments.bench.engines.models import MAX_TOKENS, Workload, chat_workload, fitting
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.record import portable
from outrider.experiments.bench.workloads import interleaved
from outrider.experiments.papers.kept import KeptContestant, KeptRuns
from outrider.experiments.papers.numbers.mjsd import ENERGY
from outrider.experiments.papers.numbers.published import KNOWN, Figure, Value, figure_of

PLAIN = "plain"  # label of plain decoding, the baseline of speed-ups
BEST = "best"  # label under which the measurements of the fastest setting are repeated
TENANT = "local"
_PLAIN_CHOICE = StrategyChoice(PLAIN, "autoregressive", {})
SESSIONS = 4  # earlier requests whose answers are the references of the dataset of cached sessions
_CACHED = "cache"  # name of that dataset
_KNOWN_TEXTS = 300  # of the dataset ``KNOWN``
_FOLLOWS = "target-guided: forwards of this model, committed tokens of the files' known outputs (arXiv 2304.04487, 3.2)"
_OWN = "the model's own outputs, greedy unless a temperature is named"

Row = dict[str, Figure]  # by metric
Quality = Callable[[Prompt, Sequence[Sequence[int]]], tuple[float, int]]  # outputs of a prompt -> their nats and tokens
Score = Callable[[Prompt, Sequence[int]], float]  # output of a prompt -> score, higher is better
MakeContestant = Callable[[Callable[[], Engine]], EngineContestant]


@dataclass(frozen=True, slots=True)
class Stage:
    """A model and the datasets that fit it."""

    loaded: LoadedModel
    options: ModelOptions
    draft_path: str | None  # draft model
    datasets: dict[str, list[Prompt]]  # by the paper's name of the dataset that they stand for
    too_long: int  # records that do not fit the context
    guided: bool  # whether known outputs are followed
    max_tokens: int
    repeats: int
    timed: int  # first prompts of each race whose speed is measured, where steps are counted without the model; may be 0
    seed: int  # of sampled outputs
    progress: Progress
    strategies: Mapping[str, str]  # further ones
    runs: KeptRuns

    def draft(self, rows: int) -> LocalDraftModel:
        """Load the draft model, with room for a number of rows behind a request's tokens."""
        assert self.draft_path is not None
        return load_draft_model(self.draft_path, self.options, self.loaded, 1, EngineOptions().max_step_tokens, rows)

    def shared(self, budget: int, max_running: int = 1, draft_model: DraftModel | None = None) -> SharedModel:
        """Return the model with KV slots for ``budget`` draft tokens per request."""
        rows = max(EngineOptions().max_step_tokens, (budget + 1) * max_running)
        options = EngineOptions(max_running=max_running, max_step_tokens=rows, prefix_caching=False)
        return SharedModel(self.loaded, options, budget, self.guided, draft_model)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens of the model."""
        return int(self.loaded.model.config.get_text_config().vocab_size)


def load_stage(args: argparse.Namespace, guided: bool, progress: Progress) -> Stage:
    """Read the datasets, user messages in the model's chat template, and load the model.

    Raises:
        PromptFileError, ModelLoadError: an unusable file or model.
    """
    options = ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads)
    loaded = load_model(options)
    datasets: dict[str, list[Prompt]] = {}
    too_long = 0
    for name, paths in args.prompts.items():
        parts = []
        for path in paths:
            workload = chat_workload(path, loaded.tokenizer, None if name == KNOWN else args.records)
            if guided or name == KNOWN:
                workload = _followed(workload, path, loaded, args)
            workload = fitting(workload, args.max_tokens or MAX_TOKENS, loaded.max_model_len)
            parts.append([replace(prompt, id=f"{path.stem}/{prompt.id}") for prompt in workload.prompts])
            too_long += workload.too_long
        datasets[name] = list(interleaved(parts))[: _KNOWN_TEXTS if name == KNOWN else None]
    draft = find_model(args.draft_model) if "draft_model" in args else None
    most, further = args.max_tokens or MAX_TOKENS, {text: text for text in getattr(args, "strategy", ())}
    return Stage(
        loaded,
        options,
        draft,
        datasets,
        too_long,
        guided,
        most,
        args.repeats,
        args.timed,
        args.seed,
        progress,
        further,
        KeptRuns(),
    )


def _followed(workload: Workload, path: Path, loaded: LoadedModel, args: argparse.Namespace) -> Workload:
    """Add the known outputs of the file, and to cached sessions the outputs of similar records as references."""
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
    """Return for each text the indices of the ``count`` most similar others, the most similar first.

    Similarity is the weight of the common tokens over that of all tokens of both; a token weighs ``log(texts / texts with it)``.
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
    """Generate the model's greedy outputs and return the stage that follows them, which equals greedy decoding."""
    shared = stage.shared(0)
    plain = EngineContestant(maker(shared, _PLAIN_CHOICE, ()), stage.max_tokens)
    kept = KeptContestant("written", plain, stage.runs)
    stage.progress.say("the model's own outputs, which are followed below")

    def own(prompt: Prompt) -> Prompt:
        stage.progress.note(f"its own output of {prompt.id}")
        return replace(prompt, known=kept.run([prompt]).outputs[0])

    datasets = {
        name: prompts if name == KNOWN else [own(prompt) for prompt in prompts] for name, prompts in stage.datasets.items()
    }
    return replace(stage, datasets=datasets, guided=True)


def along_files(stage: Stage, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts that have an output in their file, which is followed instead of the model's own."""
    ends, tokenizer = list(stage.loaded.eos_token_ids[:1]), stage.loaded.tokenizer
    return [
        replace(prompt, known=[*tokenizer.encode(prompt.answer, add_special_tokens=False), *ends][: stage.max_tokens])
        for prompt in prompts
        if prompt.answer
    ]


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
    reads_target: Collection[str] = (),
    sweep: bool = False,
) -> dict[str, Row]:
    """Run plain decoding and strategies on the same prompts.

    Where known outputs are followed, steps are counted along all of them without the model, and speeds are measured with it on
    the first ``stage.timed`` prompts; elsewhere all runs are in turns with the model.

    Args:
        stage: model and datasets.
        name: unique among the races of a command.
        shared: the model with room for ``batch_size`` requests.
        prompts: in their order.
        choices: label -> strategy.
        repeats: the stage's if None.
        batch_size: concurrent prompts.
        before: outputs of earlier requests that every strategy remembers.
        contestant: makes a contestant of an engine; a greedy one if None.
        warm: label -> number of outputs of ``before`` that it remembers; all by default.
        quality: likelihood of outputs, for ``perplexity``.
        scores: metric -> score of an output.
        reads_target: labels of strategies that draft from the target's rows, which need the model for all prompts.
        sweep: count steps alone where that is possible.

    Returns:
        Label -> metric -> figure: ``tokens/s`` and ``speedup`` of whole requests, as in the papers; ``decode speedup`` after the
        first tokens; ``tokens_per_step``, ``drafted_per_step``, ``differing`` (outputs that differ from plain decoding),
        ``J/token`` if the device has a counter, ``perplexity`` and the ``scores``.

    Raises:
        OutOfTimeError: the hours of the command are over.
    """
    repeats = repeats or stage.repeats
    stage.progress.say(f"{name}: {len(choices) + 1} strategies on {len(prompts)} prompts")

    def turns(part: str, labels: Collection[str], chosen: Sequence[Prompt], times: int, counted: bool) -> _Raced:
        runners: list[KeptContestant] = []
        for label, choice in {PLAIN: _PLAIN_CHOICE, **choices}.items():
            if label in labels:
                own = before[: (warm or {}).get(label, len(before))]
                make = maker(shared, replace(choice, label=label), own, counted)
                runner = EngineContestant(make, stage.max_tokens, shared.guide) if contestant is None else contestant(make)
                runners.append(KeptContestant(part, runner, stage.runs))
        outputs = {prompt.id: prompt.known for prompt in chosen if prompt.known is not None}
        _, tallies = compete(runners, chosen, times, batch_size, stage.progress, outputs or None)
        return _Raced(tallies, {runner.name: runner for runner in runners}, times)

    everything = (PLAIN, *choices)
    if not stage.guided:
        return _rows(turns(name, everything, prompts, repeats, False), prompts, quality, scores or {})
    reading = [label for label in choices if label in reads_target]
    rows = _steps(turns(f"{name}, steps", [label for label in everything if label not in reading], prompts, 1, True))
    if reading:
        rows |= _steps(turns(f"{name}, with the model", reading, prompts, 1, False))
    if stage.timed and not sweep:
        timed = prompts[: stage.timed]
        measured = _rows(turns(f"{name}, timed", everything, timed, repeats, False), timed)
        rows = {label: measured[label] | rows[label] for label in everything}
    return {label: rows[label] for label in everything}


@dataclass(frozen=True, slots=True)
class _Raced:
    """Tallies and contestants by label, and the number of repeats."""

    tallies: Mapping[str, Tally]
    runners: Mapping[str, KeptContestant]
    repeats: int


def _rows(
    raced: _Raced, prompts: Sequence[Prompt], quality: Quality | None = None, scores: Mapping[str, Score] | None = None
) -> dict[str, Row]:
    """Return all metrics of runs in turns with plain decoding."""
    repeats, texts = raced.repeats, {
        label: [[runner.outputs[repeat + 1, prompt.id] for repeat in range(raced.repeats)] for prompt in prompts]
        for label, runner in raced.runners.items()
    }  # fmt: skip
    rows: dict[str, Row] = _steps(raced)
    plain = raced.tallies[PLAIN]
    for label, runner in raced.runners.items():
        tally, own_texts, row = raced.tallies[label], texts[label], rows[label]
        row |= _speeds(tally, plain, repeats)
        differing = [prompt.id in tally.differing for prompt in prompts]
        if quality is not None:  # sampled, with another seed in each repeat
            differing = [one != other for one, other in zip(own_texts, texts[PLAIN], strict=True)]
        moved = [(float(len(differing) * one), 1.0) for one in differing]
        row["differing"] = figure_of([float(sum(differing))], moved)
        if runner.energy:
            joules, tokens = map(sum, zip(*runner.energy.values(), strict=True))
            row[ENERGY] = Figure(joules / tokens, samples=tuple(runner.energy.values()))
        if quality is not None:
            row["perplexity"] = perplexity([quality(*each) for each in zip(prompts, own_texts, strict=True)])
        for metric, score in (scores or {}).items():
            each = [statistics.fmean(score(prompt, one) for one in own) for prompt, own in zip(prompts, own_texts, strict=True)]
            row[metric] = Figure(statistics.fmean(each), samples=figure_of(each).samples)
    return rows


def perplexity(nats: Sequence[tuple[float, int]]) -> Figure:
    """Return the perplexity of ``(nats, tokens)`` of each record; a sample moves its logarithm as the record moves the mean.

    Example: (0.69, 1) and (4.16, 3), a token of probability 1/2 and three of 1/4, give exp(4.85 / 4) = 3.36.
    """
    tokens = statistics.fmean(count for _, count in nats)
    mean = statistics.fmean(each for each, _ in nats) / tokens
    value = math.exp(mean)
    return Figure(value, samples=tuple((value * (tokens + each - mean * count), tokens) for each, count in nats))


def maker(
    shared: SharedModel, choice: StrategyChoice, before: Sequence[Sequence[int]], counted: bool = False
) -> Callable[[], Engine]:
    """Return a function that makes engines of a strategy, whose memory, if any, has outputs of earlier requests."""

    def make() -> Engine:
        engine = shared.engine(choice, counted=counted)
        history = None if engine.histories is None else engine.histories.of(TENANT)
        if history is not None:
            for number, output in enumerate(before):
                history.extend(text_key(f"before-{number}"), 0, output, final=True)
        return engine

    return make


def _steps(raced: _Raced) -> dict[str, Row]:
    """Return the counts of steps and drafts, which no clock changes."""
    rows: dict[str, Row] = {}
    for label, tally in raced.tallies.items():
        own = _by_record(tally, raced.repeats)
        drafted = [(float(each.drafted), float(each.steps)) for each in own]
        rows[label] = {
            "tokens_per_step": figure_of([tally.tokens / tally.steps], [(each.tokens, each.steps) for each in own]),
            "drafted_per_step": figure_of([(tally.drafted or 0) / tally.steps], drafted),
        }
    return rows


def _speeds(tally: Tally, plain: Tally, repeats: int) -> Row:
    own, base = (_by_record(each, repeats) for each in (tally, plain))
    whole = [there / here for there, here in zip(plain.wall_s, tally.wall_s, strict=True)]
    walls = [(there.wall_s, here.wall_s) for there, here in zip(base, own, strict=True)]
    after = [(there.wall_s - there.prefill_s, here.wall_s - here.prefill_s) for there, here in zip(base, own, strict=True)]
    return {
        "tokens/s": figure_of([tally.tokens / repeats / each for each in tally.wall_s]),
        "speedup": figure_of(whole, walls),
        "decode speedup": figure_of(decode_ratios(tally, plain), after),
    }


def _by_record(tally: Tally, repeats: int) -> list[Lap]:
    """Return the sum of all repeats for each record; concurrent prompts are one record."""
    records = len(tally.laps) // repeats
    return [Lap(*map(sum, zip(*tally.laps[number::records], strict=True))) for number in range(records)]


def others(measured: Mapping[str, Row]) -> dict[str, Row]:
    """Return the measurements without those of plain decoding."""
    return {label: row for label, row in measured.items() if label != PLAIN}


def best(measured: Mapping[str, Row], metric: str = "speedup") -> str:
    """Return the label with the highest value of a metric, plain decoding excluded."""
    return max(others(measured), key=lambda label: measured[label][metric].mean)


def shown(row: Row, columns: Mapping[str, str]) -> dict[str, Value]:
    """Return the figures of a row by the column names of a table, without those that are not measured."""
    return {column: row[metric] for column, metric in columns.items() if metric in row}


def means(measured: Mapping[str, Row], metric: str, lines: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, float]]:
    """Return the series of a panel from labels by line and x."""
    return {name: {x: measured[label][metric].mean for x, label in line.items()} for name, line in lines.items()}


def ran(stage: Stage, files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Describe the models and data of a run."""
    model = stage.loaded.model
    datasets: dict[str, dict[str, Any]] = {}
    for name, prompts in stage.datasets.items():
        tokens = statistics.fmean(len(prompt.ids) for prompt in prompts)
        stands_in = [path.stem for path in files[name]]
        datasets[name] = {"stands_in": stands_in, "records": len(prompts), "prompt_tokens": round(tokens, 1)}
        if all(prompt.known is not None for prompt in prompts):
            datasets[name]["output_tokens"] = round(statistics.fmean(len(prompt.known or ()) for prompt in prompts), 1)
    return {
        "model": stage.loaded.served_name,
        "parameters": model.num_parameters(),
        **({} if stage.draft_path is None else {"draft_model": portable(stage.draft_path)}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "how": _FOLLOWS if stage.guided else _OWN,
        "datasets": datasets,
        "too_long": stage.too_long,
    }
