"""Predictions for the GPUs of papers, compared with their published speeds.

outrider simulate papers
outrider simulate papers --tokenizer DIR --retrieval llma_rag.jsonl --code mbpp_human.jsonl

The input is one number of each paper's software, the speed of plain decoding of one model, which determines the time of its
launches (transformers launches every kernel from Python). Predicted are the speed of other sizes, the cost of wider steps, tensor
and pipeline parallelism, and with --retrieval and --code what strategies bring on texts. LLMA's own retrieval set is open; AntRAG
of the trie's paper and ClassEval with Lookahead Decoding are replaced by other texts.

A row agrees if the prediction is within 15 % of the published number, or of the nearer end of a range.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.configs.slices import EngineOptions
from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.replay import KnownText
from outrider.engine.emulation.hardware import MODELS, ModelShape
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.papers.numbers.published import load
from outrider.experiments.simulation.cluster import SimulatedCluster, keyed
from outrider.experiments.simulation.hardware import GPUS, Gpu
from outrider.experiments.simulation.replica import KnownTarget, SimulatedReplica
from outrider.experiments.simulation.steps import EXCHANGE_S, Host, Mode, Software, StepTimes, roofline_s, step_times

Rows = list[dict[str, Any]]
TOLERANCE = 0.15
_CONTEXT = 512  # entries before a step: the papers do not say how many
_NO_HOST = Host(0.0, 0.0, 0.0)  # included in the launches
_PUBLISHED = "published speed of plain decoding"
_PARALLEL: tuple[Mode, ...] = ("tensor", "pipeline")
LLMA, TRIE, JACOBI = (load(key) for key in ("llma", "trie", "jacobi"))
LLMA_SIZES = {  # model of a row -> its shape, GPUs in a pipeline by accelerate
    "7B": (MODELS["llama-2-7b"], 1),
    "13B": (MODELS["llama-2-13b"], 1),
    "30B": (MODELS["llama-30b"], 4),
}
LLMA_GPU, TRIE_GPU, SHARED_GPU = GPUS["V100-32"], GPUS["A100-80"], GPUS["A100-40"]  # table 3 of Jacobi is on the trie's GPU
TRIE_MODEL, LLAMA_7B, LLAMA_13B = MODELS["antglm-10b"], MODELS["llama-2-7b"], MODELS["llama-2-13b"]
LOOKAHEAD = JACOBI.number("figure 6", "ClassEval, lookahead parallelism", "highest")


def launching(gpu: Gpu, model: ModelShape, tokens_per_s: float) -> Software:
    """Return software whose plain decoding of one model has the published speed.

    Raises:
        ValueError: reading the weights alone takes longer: the shares of the peaks are too low.
    """
    step_s = 1 / tokens_per_s
    if roofline_s(gpu, model, Software(), 1, _CONTEXT, _CONTEXT) > step_s:
        raise ValueError(f"{model.name} on {gpu.name} decodes {tokens_per_s:g} tokens a second, which the roofline forbids")
    return Software(launch_s=step_s / model.layers)


def row(
    source: str, what: str, published: float | tuple[float, float], predicted: float, why: str = "", told: str = ""
) -> dict[str, Any]:
    """Return a comparison.

    Args:
        source: paper and place.
        what: is compared.
        published: a number, or the ends of a range.
        predicted: by the simulation.
        why: reason for a difference.
        told: inputs of the prediction.
    """
    low, high = published if isinstance(published, tuple) else (published, published)
    error = predicted / min(max(predicted, low), high) - 1
    agree = abs(error) <= TOLERANCE
    ends = low if low == high else [low, high]
    found = {"source": source, "what": what, "published": ends, "predicted": round(predicted, 3), "error": round(error, 3)}
    return found | {"agree": agree} | ({"told": told} if told else {}) | ({"why": why} if why and not agree else {})


def llma_software() -> Software:
    """Return the software of LLMA's table 3, from 7B."""
    return launching(LLMA_GPU, LLMA_SIZES["7B"][0], LLMA.number("table 3", "7B", "plain tokens/s"))


def trie_software() -> Software:
    """Return the software of the trie's table 4, from AntGLM-10B."""
    return launching(TRIE_GPU, TRIE_MODEL, TRIE.number("table 4", "AntRAG, AntGLM-10B", "plain"))


def llama_software() -> Software:
    """Return the software of Llama on A100s, from 13B in the trie's paper; Lookahead Decoding does not tell."""
    return launching(TRIE_GPU, LLAMA_13B, TRIE.number("table 4", "Dolly, Llama2-13B", "plain"))


def baselines() -> Rows:
    """Predict plain decoding of the other sizes."""
    rows = []
    for size, (model, gpus) in LLMA_SIZES.items():
        if size != "7B":
            rate = 1 / _step_s("pipeline" if gpus > 1 else "lookahead", gpus, LLMA_GPU, model, llma_software(), 1)
            why = "most likely the hooks by which accelerate moves hidden states between GPUs, which one GPU does not tell"
            what = f"plain, {model.name}, {gpus} GPU{'s' * (gpus > 1)}, tokens/s"
            published = LLMA.number("table 3", size, "plain tokens/s")
            rows.append(row(f"{LLMA.source} table 3", what, published, rate, why, _PUBLISHED + " of 7B"))
    rate = 1 / _step_s("lookahead", 1, TRIE_GPU, LLAMA_13B, trie_software(), 1)
    why = "another model's code, which most likely launches more kernels a layer"
    what, published = f"plain, {LLAMA_13B.name}, tokens/s", TRIE.number("table 4", "Dolly, Llama2-13B", "plain")
    return [*rows, row(f"{TRIE.source} table 4", what, published, rate, why, _PUBLISHED + " of 10B")]


def wide_steps() -> Rows:
    """Predict speed-ups of Lookahead Decoding from its own tokens per step, which shows the cost of wide steps."""
    software, rows = llama_software(), []
    plain_s = _step_s("lookahead", 1, TRIE_GPU, LLAMA_7B, software, 1)
    for label in JACOBI.rows_of("table 3"):
        if label == "plain":
            continue
        setting, step_rows = "prompt lookup, 10 tokens", 11
        if label.startswith("("):
            tag, _, prompt = label.partition(" ")
            n, w, g = map(int, tag.strip("()").split(","))
            setting, step_rows = f"N {n}, W {w}, G {g}{', prompt' if prompt else ''}", (w + g) * (n - 1) + 1
        step_s = _step_s("lookahead", 1, TRIE_GPU, LLAMA_7B, software, step_rows)
        predicted = JACOBI.number("table 3", label, "S") * plain_s / step_s
        published = JACOBI.number("table 3", label, "speed-up")
        why, told = "the time of drafting is not known", "its tokens per step"
        rows.append(row(f"{JACOBI.source} table 3", f"speed-up, {setting}", published, predicted, why, told))
    return rows


def shared_steps() -> Rows:
    """Predict tensor and pipeline parallelism with software that launches every kernel from Python."""
    slowdown = JACOBI.rows_of("figure 6")["TP (DeepSpeed) and PP (Accelerate), plain"]
    published = (float(str(slowdown["lowest"])), float(str(slowdown["highest"])))
    why = "most likely what the host does at each hand-over, which is not known"
    told = f"{_PUBLISHED} of 13B in {TRIE.source}"
    rows = []
    for model, mode, width in itertools.product((LLAMA_7B, LLAMA_13B), _PARALLEL, (2, 4, 8)):
        name = "DeepSpeed" if mode == "tensor" else "accelerate"
        what = f"{mode} parallelism ({name}), {width} GPUs, {model.name}, against one GPU"
        ratio = _against_one(mode, width, model, llama_software())
        rows.append(row(f"{JACOBI.source} section 5.2", what, published, ratio, why, told))
    return rows


def without_launches() -> Rows:
    """Predict the same GPUs with software that does not launch from Python, of which the papers publish nothing."""
    return [
        {
            "what": f"{mode}, {width} GPUs, {model.name}, plain decoding",
            "predicted": round(_against_one(mode, width, model, Software()), 3),
        }
        for model, mode, width in itertools.product((LLAMA_7B, LLAMA_13B), _PARALLEL, (2, 4, 8))
    ]


def needed_steps() -> Rows:
    """Return the tokens per step that the largest published speed-ups need, by the predicted cost of steps."""
    plain = TRIE.number("table 4", "AntRAG, AntGLM-10B", "plain")
    trie = _step_s("lookahead", 1, TRIE_GPU, TRIE_MODEL, trie_software(), 64) * plain
    one, shared = (_step_s("lookahead", 1, SHARED_GPU, LLAMA_7B, llama_software(), rows) for rows in (1, JACOBI.rows))
    costs = (
        ("trie, 64 rows, AntRAG", TRIE.number("table 4", "AntRAG, speed-up", "hierarchical"), trie),
        ("lookahead parallelism, 8 GPUs, 121 rows each, ClassEval", LOOKAHEAD, (shared + 8 * EXCHANGE_S) / one),
    )
    return [{"what": what, "speedup": ratio, "tokens_per_step": round(ratio * cost, 2)} for what, ratio, cost in costs]


def _step_s(mode: Mode, width: int, gpu: Gpu, model: ModelShape, software: Software, rows: int) -> float:
    step = roofline_s(gpu, model, software, rows, _CONTEXT, rows * _CONTEXT, width if mode == "tensor" else 1)
    return step + (software.hop_s * (width - 1) if mode == "pipeline" else 0.0)


def _against_one(mode: Mode, width: int, model: ModelShape, software: Software) -> float:
    """Return the speed of plain decoding relative to one GPU."""
    one = _step_s("lookahead", 1, SHARED_GPU, model, software, 1)
    return one / _step_s(mode, width, SHARED_GPU, model, software, 1)


class Texts:
    """Records with known outputs, one request after the other."""

    def __init__(self, tokenizer: Path, path: Path, count: int) -> None:
        """Read a file. Raises ``ValueError`` if it is unusable."""
        cutter = TextTokenizer(tokenizer)
        self.name, self._cutter = path.stem, cutter
        known = read_known_texts(path, cutter, None, count)
        self._texts: list[tuple[str, KnownText]] = keyed({path.stem: known}, len(known))
        self._context = max(len(text.prompt_ids) + len(text.output_ids) for text in known)

    def _rate(self, strategy: str, times: StepTimes) -> tuple[float, float]:
        """Return tokens per second, prefills included, and tokens per step."""
        cutter = self._cutter
        target = KnownTarget(cutter.vocab_size, cutter.end_token_id, self._context, times.curve)
        options = EngineOptions(max_running=1, max_waiting=len(self._texts))
        replica = SimulatedReplica(parse_strategy(strategy), times, target, options, 64, adaptive=False)
        found = SimulatedCluster([replica], None, 0.0, 0).closed_loop(self._texts, 1)
        return found["output_tokens"] / found["wall_s"], found["tokens_per_step"]

    def speedup(self, strategy: str, shared: StepTimes, alone: StepTimes) -> tuple[float, str]:
        """Return the speed relative to plain decoding on one GPU, and the tokens per step in words."""
        rate, steps = self._rate(strategy, shared)
        return rate / self._rate("autoregressive", alone)[0], f"{self.name}: {steps:.2f} tokens/step"


def retrieval(texts: Texts) -> Rows:
    """Predict LLMA on its own texts, and LLMA and the trie on these instead of AntRAG."""
    rows = []
    for size, (model, gpus) in LLMA_SIZES.items():
        times = step_times("pipeline" if gpus > 1 else "lookahead", gpus, LLMA_GPU, model, llma_software(), _NO_HOST)
        copied = int(LLMA.number("table 2", size, "retrieval k"))
        found, told = texts.speedup(f"llma:match_length=1,copy_length={copied},include_prompt=false", times, times)
        what, why = f"LLMA, {model.name}, speed-up", "a part of the texts, cut by another tokenizer"
        rows.append(row(f"{LLMA.source} table 3", what, LLMA.number("table 3", size, "speed-up"), found, why, told))
    times = step_times("lookahead", 1, TRIE_GPU, TRIE_MODEL, trie_software(), _NO_HOST)
    for strategy, column in (("llma", "llma"), ("trie", "hierarchical")):
        found, told = texts.speedup(strategy, times, times)
        why = "other texts: AntRAG's answers repeat their sources and each other far more; see what its speed-up needs"
        published = TRIE.number("table 4", "AntRAG, speed-up", column)
        rows.append(row(f"{TRIE.source} table 4", f"{strategy}, AntRAG, speed-up", published, found, why, told))
    return rows


def code(texts: Texts) -> Rows:
    """Predict lookahead parallelism with ``auto`` instead of the Jacobi window on ClassEval."""
    rows: Rows = []
    alone = step_times("lookahead", 1, SHARED_GPU, LLAMA_7B, llama_software(), _NO_HOST)
    for width in (1, 2, 4, 8):
        shared = step_times("lookahead", width, SHARED_GPU, LLAMA_7B, llama_software(), _NO_HOST)
        found, told = texts.speedup("auto", shared, alone)
        what = f"lookahead parallelism, auto, {width} GPUs, speed-up"
        if width < 8:
            rows.append({"source": "not published", "what": what, "predicted": round(found, 3), "told": told})
            continue
        why = "another strategy: what can be copied runs out as trees grow; a Jacobi window guesses anew with each rank"
        rows.append(row(f"{JACOBI.source} section 5.2", what, LOOKAHEAD, found, why, told))
    return rows


def compare(args: argparse.Namespace, run: Run) -> Results:
    """Make all comparisons. Raises ``ValueError`` for an unusable file."""
    rows = [*baselines(), *wide_steps(), *shared_steps()]
    if args.retrieval is not None:
        rows += retrieval(Texts(args.tokenizer, args.retrieval, args.records))
    if args.code is not None:
        rows += code(Texts(args.tokenizer, args.code, args.records))
    told = [each["agree"] for each in rows if "agree" in each]
    return {
        "prediction": True,
        "agree": sum(told),
        "told": len(told),
        "comparisons": rows,
        "needed": needed_steps(),
        "without_launches": without_launches(),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json, with --retrieval and --code")
    parser.add_argument("--retrieval", type=Path, help="LLMA's retrieval set with outputs")
    parser.add_argument("--code", type=Path, help="code with outputs")
    parser.add_argument("--records", type=int, default=60, help="of each file")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if texts have no tokenizer."""
    if (args.retrieval or args.code) and args.tokenizer is None:
        parser.error("--retrieval and --code need --tokenizer")


BENCH = Bench("simulate-papers", __doc__ or "", compare, options, check=check)
