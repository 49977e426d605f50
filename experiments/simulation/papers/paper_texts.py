"""Speed-ups of papers, simulated along texts: their own where these are open, others in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from configs.slices import EngineOptions
from decoding.replay import KnownText
from decoding.strategy_choice import parse_strategy
from experiments.simulation.cluster import SimulatedCluster, keyed
from experiments.simulation.papers import published as paper
from experiments.simulation.papers.checks import launching, llama_software, row
from experiments.simulation.replica import KnownTarget, SimulatedReplica
from experiments.simulation.steps import Host, Mode, StepTimes, step_times

_NO_HOST = Host(0.0, 0.0, 0.0)  # it is in the launches already


class Texts:
    """Records whose outputs are known, one request after the other."""

    def __init__(self, tokenizer: Path, path: Path, count: int) -> None:
        """Raises ``ValueError`` for a file that cannot be used."""
        cutter = TextTokenizer(tokenizer)
        self.name, self._cutter = path.stem, cutter
        known = read_known_texts(path, cutter, None, count)
        self._texts: list[tuple[str, KnownText]] = keyed({path.stem: known}, len(known))
        self._context = max(len(text.prompt_ids) + len(text.output_ids) for text in known)

    def rate(self, strategy: str, times: StepTimes) -> tuple[float, float]:
        """Tokens a second, prefills included, and tokens per step."""
        cutter = self._cutter
        target = KnownTarget(cutter.vocab_size, cutter.end_token_id, self._context, times.curve)
        options = EngineOptions(max_running=1, max_waiting=len(self._texts))
        replica = SimulatedReplica(parse_strategy(strategy), times, target, options, 64, adaptive=False)
        found = SimulatedCluster([replica], None, 0.0, 0).closed_loop(self._texts, 1)
        return found["output_tokens"] / found["wall_s"], found["tokens_per_step"]

    def speedup(self, strategy: str, shared: StepTimes, alone: StepTimes) -> tuple[float, float]:
        """Against plain decoding on one GPU; and tokens per step."""
        rate, steps = self.rate(strategy, shared)
        return rate / self.rate("autoregressive", alone)[0], steps


def retrieval(texts: Texts, tolerance: float) -> list[dict[str, Any]]:
    """LLMA on its own texts, and it and the trie in the place of AntRAG."""
    first = paper.LLMA_TABLE_3[0]
    software, rows = launching(paper.LLMA_GPU, first.model, first.baseline), []
    for each in paper.LLMA_TABLE_3:
        mode: Mode = "pipeline" if each.gpus > 1 else "lookahead"
        times = step_times(mode, each.gpus, paper.LLMA_GPU, each.model, software, _NO_HOST)
        strategy = f"llma:match_length=1,copy_length={each.copy_length},include_prompt=false"
        found, steps = texts.speedup(strategy, times, times)
        what, why = f"LLMA, {each.model.name}, speed-up", "a part of the texts, cut by another tokenizer"
        rows.append(
            row(f"{paper.LLMA} table 3", what, each.speedup, found, tolerance, why, f"{texts.name}: {steps:.2f} tokens/step")
        )
    software = launching(paper.TRIE_GPU, paper.TRIE_MODEL, paper.TRIE_BASELINE)
    times = step_times("lookahead", 1, paper.TRIE_GPU, paper.TRIE_MODEL, software, _NO_HOST)
    for strategy, published in paper.TRIE_SPEEDUPS.items():
        found, steps = texts.speedup(strategy, times, times)
        why = "other texts: AntRAG's answers repeat their sources and each other far more; see what its speed-up needs"
        told = f"{texts.name}: {steps:.2f} tokens/step"
        rows.append(row(f"{paper.TRIE} table 4", f"{strategy}, AntRAG, speed-up", published, found, tolerance, why, told))
    return rows


def code(texts: Texts, tolerance: float) -> list[dict[str, Any]]:
    """Lookahead parallelism with a strategy that known outputs can drive, in the place of the Jacobi window on ClassEval."""
    software, model = llama_software(), paper.SHARED_MODELS[0]
    rows: list[dict[str, Any]] = []
    alone = step_times("lookahead", 1, paper.SHARED_GPU, model, software, _NO_HOST)
    for width in (1, 2, 4, 8):
        shared = step_times("lookahead", width, paper.SHARED_GPU, model, software, _NO_HOST)
        found, steps = texts.speedup("auto", shared, alone)
        told, what = f"{texts.name}: {steps:.2f} tokens/step", f"lookahead parallelism, auto, {width} GPUs, speed-up"
        if width < 8:
            rows.append({"source": "not published", "what": what, "predicted": round(found, 3), "told": told})
            continue
        why = "another strategy: what can be copied runs out as trees grow; a Jacobi window guesses anew with each rank"
        rows.append(row(f"{paper.JACOBI} section 5.2", what, paper.LOOKAHEAD_SPEEDUP, found, tolerance, why, told))
    return rows
