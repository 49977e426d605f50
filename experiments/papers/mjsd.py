"""MJSD's tables 2 and 3 and figures 1 and 4: speed, energy, perplexity and ROUGE-L of methods that draft with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.decoding.drafters.registry import LOSSLESS, WITH_DRAFT_MODEL, StrategyChoice, parse_strategy
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.draft_model import LocalDraftModel
from outrider.engine.measures.latency import Case, time_steps
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, Run, SharedModel
from outrider.experiments.bench.figure import panel
from outrider.experiments.papers.beside import Found
from outrider.experiments.papers.jacobi import SampledContestant
from outrider.experiments.papers.numbers.mjsd import (
    ABLATED,
    BLOCKS,
    DRAWN,
    ENERGY,
    ROUGE,
    TASK,
    beams,
    block,
    load_mjsd,
    threshold,
)
from outrider.experiments.papers.numbers.published import Value
from outrider.experiments.papers.priced import PRICED, PRICED_ENERGY, add_prices, priced_on
from outrider.experiments.papers.quality import joint_greedy, output_nats, over_target, until_end
from outrider.experiments.papers.stage import PLAIN, Row, Score, Stage, means, others, race

_BEAM_COUNTS, _THRESHOLDS, _LENGTHS = (1, 2, 4, 8, 16), (0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0), (1, 2, 4, 8)
_GAMMA, _BEAMS, _THRESHOLD = 4, 8, 0.1
_CONTEXT = 256  # KV entries of the timed steps
_SHOWN = ("tokens/s", "perplexity", "tokens_per_step")
_SWEEPS = {
    "table 3": [beams(count) for count in _BEAM_COUNTS],
    "figure 4": [threshold(value) for value in _THRESHOLDS],
    "drafts by length": [f"drafts of {length}" for length in _LENGTHS],
    "beams": [beams(_BEAMS), DRAWN],
    "figure 1": [block(length) for length in BLOCKS],
}
_BLOCKS = {block(length): length for length in BLOCKS}


class JointContestant(EngineContestant):
    """Multi-token joint greedy decoding with the target; nothing runs in the engine, which gives the name."""

    def __init__(
        self, make_engine: Callable[[], Engine], max_tokens: int, model: LocalDraftModel, length: int, ends: Sequence[int]
    ) -> None:
        super().__init__(make_engine, max_tokens)
        self._model, self._length, self._ends, self._most = model, length, ends, max_tokens

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``. One prompt at a time."""
        (prompt,) = prompts
        request = Request(prompt.id, prompt.ids, SamplingParams(self._most))
        return joint_greedy(self._model, request, self._length, _BEAMS, self._ends)


def _mjsd(gamma: int = _GAMMA, count: int = _BEAMS, bound: float = _THRESHOLD) -> str:
    return f"mjsd:num_draft_tokens={gamma},beams={count},threshold={bound!r}"


def variants() -> dict[str, str]:
    """Return MJSD with other numbers of beams, thresholds and lengths, with drawn beams, and blocks of the target itself."""
    found = {beams(count): _mjsd(count=count) for count in _BEAM_COUNTS}
    found |= {threshold(value): _mjsd(bound=value) for value in _THRESHOLDS}
    found |= {f"drafts of {length}": _mjsd(length) for length in _LENGTHS}
    return found | {DRAWN: _mjsd() + ",joint_law=warped,do_sample=true"} | dict.fromkeys(_BLOCKS, PLAIN)


def measure(stage: Stage, found: Found) -> None:
    """Measure table 2 on each dataset, figure 1 on two, and the rest on one."""
    found.notes += [
        "sampled with temperature 1, top-k 20 and top-p 0.9; each prompt with a seed of its own, another in each repeat",
        "perplexity is of the outputs, by the target's own law; the beams are searched for, and drawn where a label says so",
        f"{ROUGE} is the F-measure, words stemmed, of an output beside its file's known one, of a human or another model",
        "mjgd takes the likeliest blocks of the target itself and draws nothing; it is run once",
    ]
    table = found.tables.setdefault("table 2", {})
    methods = {**load_mjsd().strategies, **stage.strategies}
    choices = [parse_strategy(text) for text in (*methods.values(), *variants().values()) if text != PLAIN]
    rows = max(choice.build().draft_rows for choice in choices if choice.name in WITH_DRAFT_MODEL)
    draft = stage.draft(rows)
    shared = stage.shared(SpeculationOptions().most_draft_tokens, draft_model=draft)
    found.tables["step of one row"] = _step_times(shared.runner, draft.runner)
    scores = {name: _scores(stage, name, prompts, found) for name, prompts in stage.datasets.items()}
    for name, prompts in stage.datasets.items():
        measured = found.measures[name] = _race(stage, shared, name, prompts, methods, scores[name])
        for metric in (*_SHOWN, ENERGY, PRICED, PRICED_ENERGY, *scores[name]):
            if metric in measured[PLAIN]:
                table[f"{name}, {metric}"] = {label: row[metric] for label, row in measured.items()}
        line = means(measured, "perplexity", {name: {label: label for label in measured}})
        found.figures[f"table 2, {name}"] = panel("bars", "by the target", "", "perplexity", line)
    for dataset, texts in {ABLATED: variants(), TASK: dict.fromkeys(_BLOCKS, PLAIN)}.items():
        if dataset in stage.datasets:
            prompts = stage.datasets[dataset]
            measured = _race(stage, shared, f"{dataset}, variants", prompts, texts, scores[dataset], repeats=1)
            found.measures[dataset] |= others(measured)
            for name, labels in _SWEEPS.items():
                if set(labels) <= measured.keys():
                    shown = name if dataset == ABLATED else f"{name}, {dataset}"
                    _sweep(found, shown, {label: measured[label] for label in labels}, (*_SHOWN, *scores[dataset]))


def _step_times(target: ModelRunner, draft: ModelRunner) -> dict[str, dict[str, Value]]:
    """Return the time of a step of one row of both models, and the draft model's share of the target's."""
    step = Case(1, 1, _CONTEXT)
    target_s, draft_s = (time_steps(runner, [step]).seconds[step] for runner in (target, draft))
    return {"target": {"ms": 1e3 * target_s}, "draft model": {"ms": 1e3 * draft_s, "share of the target's": draft_s / target_s}}


def _sweep(found: Found, name: str, rows: Mapping[str, Row], metrics: Sequence[str]) -> None:
    found.tables[name] = {metric: {label: row[metric] for label, row in rows.items()} for metric in metrics}
    line = {metric: {label: row[metric].mean for label, row in rows.items()} for metric in metrics[1:]}
    found.figures[name] = panel("lines", name, "", "", line)


def _scores(stage: Stage, name: str, prompts: Sequence[Prompt], found: Found) -> dict[str, Score]:
    """Return ROUGE-L if the package is installed and the file has outputs; else add a note."""
    answers = {prompt.id: prompt.answer for prompt in prompts if prompt.answer is not None}
    if len(answers) < len(prompts):
        found.notes.append(f"{ROUGE} of {name} is not measured: a record of its file has no string `output`")
        return {}
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        found.notes.append(f"{ROUGE} is not measured: pip install 'outrider[papers]'")
        return {}
    scorer, ends, tokenizer = RougeScorer(["rougeL"], use_stemmer=True), stage.loaded.eos_token_ids, stage.loaded.tokenizer

    def score(prompt: Prompt, output: Sequence[int]) -> float:
        text = tokenizer.decode(until_end(output, ends), skip_special_tokens=True)
        return float(scorer.score(answers[prompt.id], text)["rougeL"].fmeasure)

    return {ROUGE: score}


def _race(
    stage: Stage,
    shared: SharedModel,
    name: str,
    prompts: Sequence[Prompt],
    texts: Mapping[str, str],
    scores: Mapping[str, Score],
    repeats: int | None = None,
) -> dict[str, Row]:
    """Run a race of sampled strategies and of joint greedy decoding."""
    plain = StrategyChoice(PLAIN, "autoregressive", {})
    choices = {label: plain if label in _BLOCKS else parse_strategy(text) for label, text in texts.items()}
    exact = {label for label, choice in choices.items() if label not in _BLOCKS and _keeps_text(choice)}
    params = SamplingParams(stage.max_tokens, 1.0, top_k=20, top_p=0.9, seed=stage.seed)
    ends = stage.loaded.eos_token_ids

    def contestant(make: Callable[[], Engine]) -> EngineContestant:
        label = make().info.strategy
        if label in _BLOCKS:
            model = over_target(stage.loaded, _BLOCKS[label], _BEAMS, EngineOptions().max_step_tokens)
            return JointContestant(make, stage.max_tokens, model, _BLOCKS[label], ends)
        return SampledContestant(make, params, reseeded=True)

    def quality(prompt: Prompt, outputs: Sequence[Sequence[int]]) -> tuple[float, int]:
        nats = [output_nats(shared.runner, prompt.ids, until_end(output, ends)) for output in outputs]
        return float(sum(each.sum() for each in nats)), sum(map(len, nats))

    measured = race(stage, name, shared, prompts, choices, repeats, contestant=contestant, quality=quality, scores=scores)
    sequences = {label: int(choice.options.get("sequences", 1)) for label, choice in choices.items()}
    drafted = {label: row for label, row in measured.items() if label not in _BLOCKS}
    lengths = [len(prompt.ids) for prompt in prompts]
    add_prices(drafted, priced_on("mjsd", name), lengths, repeats=repeats or stage.repeats, sequences=sequences)
    return {
        label: {metric: figure for metric, figure in row.items() if metric != "differing" or label in exact}
        for label, row in measured.items()
    }


def _keeps_text(choice: StrategyChoice) -> bool:
    """Return whether a strategy keeps the seed's text, and not just its law."""
    return choice.name in LOSSLESS and not choice.build().own_rules
