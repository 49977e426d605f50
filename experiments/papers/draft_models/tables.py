"""MJSD's tables 2 and 3 and its figures 1 and 4: speed, perplexity and ROUGE-L of methods that draft with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from configs.slices import EngineOptions, SpeculationOptions
from decoding.drafters import WITH_DRAFT_MODEL
from decoding.request import Request, SamplingParams
from decoding.strategy_choice import StrategyChoice, parse_strategy
from engine.engine import Engine
from engine.loading.draft_model import LocalDraftModel
from experiments.bench.engines.contestants import EngineContestant, Prompt, Run
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.figure import panel
from experiments.papers.beside import Found
from experiments.papers.draft_models.methods import BEAMS, THRESHOLDS, mjsd_text
from experiments.papers.draft_models.mjgd import joint_greedy, over_target
from experiments.papers.draft_models.quality import output_nats, until_end
from experiments.papers.jacobi import SampledContestant
from experiments.papers.numbers.mjsd import ABLATED, BLOCKS, DRAWN, METHODS, ROUGE, SETTINGS, TASK, beams, block, threshold
from experiments.papers.numbers.published import Figure
from experiments.papers.stage import PLAIN, Score, Stage, race

LENGTHS = (1, 2, 4, 8)  # tokens of a draft, of MJSD
_GAMMA, _BEAMS, _THRESHOLD = 4, 8, 0.1
_SHOWN = ("tokens/s", "perplexity", "tokens_per_step")


class JointContestant(EngineContestant):
    """Multi-token joint greedy decoding with the target itself."""

    def __init__(
        self, make_engine: Callable[[], Engine], max_tokens: int, model: LocalDraftModel, length: int, ends: Sequence[int]
    ) -> None:
        """
        Args:
            make_engine: gives the name; nothing runs in it.
            max_tokens: of each output.
            model: the target, see ``over_target``.
            length: of a block.
            ends: tokens that end a text.
        """
        super().__init__(make_engine, max_tokens)
        self._model, self._length, self._ends, self._most = model, length, ends, max_tokens

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``. One prompt at a time."""
        (prompt,) = prompts
        return joint_greedy(
            self._model, Request(prompt.id, prompt.ids, SamplingParams(self._most)), self._length, _BEAMS, self._ends
        )


def methods() -> dict[str, str]:
    """Those of table 2, with the settings of the paper's table 5, as strategies."""
    bild = ",".join(f"{name}={value!r}" for name, value in SETTINGS["bild"].items())
    texts = (
        f"speculative:num_draft_tokens={_GAMMA},sampling=rejection", f"bild:variant=mjsd,{bild}",
        f"spectr:num_draft_tokens={_GAMMA},sequences={SETTINGS['spectr']['sequences']}", mjsd_text(_GAMMA, _BEAMS, _THRESHOLD),
    )  # fmt: skip
    return dict(zip(METHODS[1:], texts, strict=True))


def variants() -> dict[str, str]:
    """MJSD with other beams, drawn ones among them, thresholds and lengths, and blocks of the target itself (``mjgd``)."""
    found = {beams(count): mjsd_text(_GAMMA, count, _THRESHOLD) for count in BEAMS}
    found |= {threshold(value): mjsd_text(_GAMMA, _BEAMS, value) for value in THRESHOLDS}
    found |= {f"drafts of {length}": mjsd_text(length, _BEAMS, _THRESHOLD) for length in LENGTHS}
    found[DRAWN] = mjsd_text(_GAMMA, _BEAMS, _THRESHOLD) + ",joint_law=warped,do_sample=true"
    return found | blocks()


def blocks() -> dict[str, str]:
    """Blocks of the target itself (``mjgd``)."""
    return {block(length): PLAIN for length in BLOCKS}


def runs(sizes: Mapping[str, int], repeats: int) -> int:
    """How many there are, by records of each dataset."""
    return sum((len(METHODS) * repeats + (1 + len(_SWEPT[name]) if name in _SWEPT else 0)) * n for name, n in sizes.items())


def measure(stage: Stage, found: Found) -> None:
    """Table 2 on each dataset, figure 1 on two, and the rest on one."""
    found.notes += [
        "sampled with temperature 1, top-k 20 and top-p 0.9; each prompt with a seed of its own, another in each repeat",
        "perplexity is of the outputs, by the target's own law; the beams are searched for, and drawn where a label says so",
        f"{ROUGE} is the F-measure, words stemmed, of an output beside its file's known one, of a human or another model",
        "mjgd takes the likeliest blocks of the target itself and draws nothing; it is run once",
    ]
    table = found.tables.setdefault("table 2", {})
    known = [parse_strategy(text) for text in {**methods(), **variants()}.values() if text != PLAIN]
    rows = max(choice.build().draft_rows for choice in known if choice.name in WITH_DRAFT_MODEL)
    shared = stage.shared(SpeculationOptions().most_draft_tokens, draft_model=stage.draft(rows))
    scores = {name: _scores(stage, name, prompts, found) for name, prompts in stage.datasets.items()}
    for name, prompts in stage.datasets.items():
        measured = found.measures[name] = _race(stage, shared, name, prompts, methods(), scores[name])
        for metric in (*_SHOWN, *scores[name]):
            table[f"{name}, {metric}"] = {label: row[metric] for label, row in measured.items()}
        line = {name: {label: row["perplexity"].mean for label, row in measured.items()}}
        found.figures[f"table 2, {name}"] = panel("bars", "by the target", "", "perplexity", line)
    for dataset, texts in _SWEPT.items():
        if dataset in stage.datasets:
            prompts = stage.datasets[dataset]
            measured = _race(stage, shared, f"{dataset}, variants", prompts, texts, scores[dataset], repeats=1)
            found.measures[dataset] |= {label: row for label, row in measured.items() if label != PLAIN}
            for name, labels in _SWEEPS.items():
                if set(labels) <= measured.keys():
                    shown = name if dataset == ABLATED else f"{name}, {dataset}"
                    _sweep(found, shown, {label: measured[label] for label in labels}, (*_SHOWN, *scores[dataset]))


_SWEPT = {ABLATED: variants(), TASK: blocks()}
_SWEEPS = {
    "table 3": [beams(count) for count in BEAMS],
    "figure 4": [threshold(value) for value in THRESHOLDS],
    "drafts by length": [f"drafts of {length}" for length in LENGTHS],
    "beams": [beams(_BEAMS), DRAWN],
    "figure 1": [block(length) for length in BLOCKS],
}


def _sweep(found: Found, name: str, rows: Mapping[str, Mapping[str, Figure]], metrics: Sequence[str]) -> None:
    found.tables[name] = {metric: {label: row[metric] for label, row in rows.items()} for metric in metrics}
    line = {metric: {label: row[metric].mean for label, row in rows.items()} for metric in metrics[1:]}
    found.figures[name] = panel("lines", name, "", "", line)


def _scores(stage: Stage, name: str, prompts: Sequence[Prompt], found: Found) -> dict[str, Score]:
    """ROUGE-L, where the package is installed and the file has outputs; else a note says what is missing."""
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
) -> dict[str, dict[str, Figure]]:
    lengths = {label: length for length in BLOCKS if (label := block(length)) in texts}
    plain = StrategyChoice(PLAIN, "autoregressive", {})
    choices = {label: plain if label in lengths else parse_strategy(text) for label, text in texts.items()}
    ends = stage.loaded.eos_token_ids

    def contestant(make: Callable[[], Engine]) -> EngineContestant:
        label = make().info.strategy
        if label in lengths:
            model = over_target(stage.loaded, lengths[label], _BEAMS, EngineOptions().max_step_tokens)
            return JointContestant(make, stage.max_tokens, model, lengths[label], ends)
        return SampledContestant(make, SamplingParams(stage.max_tokens, 1.0, top_k=20, top_p=0.9), reseeded=True)

    def quality(prompt: Prompt, outputs: Sequence[Sequence[int]]) -> tuple[float, int]:
        nats = [output_nats(shared.runner, prompt.ids, until_end(output, ends)) for output in outputs]
        return float(sum(each.sum() for each in nats)), sum(map(len, nats))

    measured = race(stage, name, shared, prompts, choices, repeats, contestant=contestant, quality=quality, scores=scores)
    return {label: {metric: row[metric] for metric in row if metric != "differing"} for label, row in measured.items()}
