"""A replica without a model: the steps of a replay, and those of the real engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.configs.slices import EngineOptions
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.replay import KnownText, replay_workload
from outrider.engine.loading.model import LoadedModel
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.contestants import Prompt, SharedModel, make_request
from outrider.experiments.bench.engines.guided import random_model
from outrider.experiments.simulation.replica import TENANT, KnownTarget, Piece, SimulatedReplica
from outrider.experiments.simulation.steps import Host, StepTimes

SENTENCE = "The quick brown fox jumps over the lazy dog. "
RECORDS = (
    {"id": "a", "prompt": SENTENCE, "output": SENTENCE * 2},
    {"id": "b", "prompt": "Who jumps?", "references": [SENTENCE], "output": "The quick brown fox, over the lazy dog."},
    {"id": "c", "prompt": SENTENCE + "Again?", "output": "Over the lazy dog. " + SENTENCE},
    {"id": "d", "prompt": "Nothing", "output": ""},
)
BUDGET, CONTEXT = 12, 256
LINE = LatencyCurve((1, 1000), (0.001, 1.0), 0, 0.0, 0.0)  # a millisecond a row
TIMES = StepTimes("lookahead", 1, LINE, Host(0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def cutter(tiny_model: Path) -> TextTokenizer:
    return TextTokenizer(tiny_model)


@pytest.fixture(scope="module")
def texts(cutter: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[KnownText]:
    path = Path(tmp_path_factory.mktemp("w")) / "known.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return read_known_texts(path, cutter, None)


def replica(strategy: str, vocab_size: int, times: StepTimes = TIMES, options: EngineOptions | None = None) -> SimulatedReplica:
    target = KnownTarget(vocab_size, vocab_size, CONTEXT, times.curve)
    return SimulatedReplica(parse_strategy(strategy), times, target, options or EngineOptions(max_running=2), BUDGET, False)


def run(one: SimulatedReplica) -> tuple[list[tuple[Piece, ...]], list[float]]:
    """The pieces of each step, and its milliseconds."""
    pieces, seconds = [], []
    while (step := one.step(0.0)) is not None:
        pieces.append(step.pieces)
        seconds.append(round(1e3 * step.seconds, 6))
    return pieces, seconds


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "llma", "trie", "llma:copy_length=3"])
def test_one_request_after_the_other_takes_the_steps_of_a_replay(
    texts: list[KnownText], cutter: TextTokenizer, strategy: str
) -> None:
    one, given = replica(strategy, cutter.vocab_size), []
    for text in texts:
        one.add(text.id, text, 0.0)
        given += [piece for pieces in run(one)[0] for piece in pieces]
    counts = replay_workload(texts, parse_strategy(strategy).build, BUDGET, cutter.vocab_size, lambda: 0.0)
    assert (len(given), sum(piece.drafted for piece in given)) == (counts.steps, counts.drafted)
    for text in texts:
        own = [piece for piece in given if piece.key == text.id]
        assert [token for piece in own for token in piece.tokens] == text.output_ids.tolist()
        assert own[-1].finished and own[1:] == [piece for piece in own if piece.offset]
    assert strategy == "autoregressive" or counts.steps < counts.tokens


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "llma", "trie"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_it_takes_the_steps_of_the_engine(
    tiny_model: Path, texts: list[KnownText], cutter: TextTokenizer, strategy: str, prefix_caching: bool
) -> None:
    """Who is in which step, with which tokens: prefills in chunks, a queue, and KV that is found again."""
    options = EngineOptions(max_running=2, max_step_tokens=8, prefix_caching=prefix_caching)
    model = random_model("tiny", cutter.vocab_size, CONTEXT, torch.float32, seed=3)
    loaded = LoadedModel(model, load_tokenizer(str(tiny_model)), "random", CONTEXT, ())
    shared = SharedModel(loaded, options, BUDGET, guided=True)
    engine, one = shared.engine(parse_strategy(strategy)), replica(strategy, cutter.vocab_size, options=options)
    for text in texts:
        engine.add(make_request(Prompt.of(text), 1, shared.guide))
        one.add(text.id, text, 0.0)
    real: list[list[tuple[str, tuple[int, ...]]]] = []
    while engine.has_work:
        real.append([(output.request_id, output.token_ids) for output in engine.step()])
    simulated = [[(piece.key, piece.tokens) for piece in pieces] for pieces in run(one)[0]]
    assert simulated == real and max(map(len, real)) == 2 and [] in real  # a step with a chunk alone gives nothing


def test_ranks_compute_again_what_others_accepted() -> None:
    text = known([1, 2, 9, 1, 4, 5, 8], [1, 4, 5, 1, 2, 9, 7, 0])
    both = StepTimes("lookahead", 2, LINE, Host(0.0, 0.0, 0.0), exchange_s=0.0)
    pieces, milliseconds = timed("llma:copy_length=2", both, text)
    assert pieces == [(1,), (4, 5, 1), (2, 9, 7), (0,)]
    # The prompt, on the leader; 1 with 4 5 on the other rank, which has computed nothing of the text yet; 4 5 again, the 1 and
    # 2 9 on the leader, while the other has 1 and 4 5; and 7 alone, which the leader need not share.
    assert milliseconds == [7.0, 10.0, 5.0, 1.0]
    alone = timed("llma:copy_length=2", TIMES, text)
    assert alone == ([(1,), (4,), (5, 1), (2, 9, 7), (0,)], [7.0, 3.0, 3.0, 3.0, 1.0])  # one copy at a time


def test_wider_groups_draft_wider_trees(texts: list[KnownText], cutter: TextTokenizer) -> None:
    drafted = {}
    for width in (1, 4):
        times = StepTimes("lookahead", width, LINE, Host(0.0, 0.0, 0.0))
        one = replica("trie:decoding_length=4", cutter.vocab_size, times)
        for text in texts:
            one.add(text.id, text, 0.0)
        pieces = [piece for step in run(one)[0] for piece in step]
        for text in texts:
            assert [token for p in pieces if p.key == text.id for token in p.tokens] == text.output_ids.tolist()
        drafted[width] = max(piece.drafted for piece in pieces)
    assert drafted[1] <= 3 < drafted[4]


def test_what_another_replica_said_is_drafted_once_it_has_arrived(texts: list[KnownText], cutter: TextTokenizer) -> None:
    first = replica("trie", cutter.vocab_size)
    first.add("first", texts[2], 0.0)
    said = [piece for pieces in run(first)[0] for piece in pieces]
    steps = {}
    for arrives in (0.0, 9.0):
        second = replica("trie", cutter.vocab_size)
        second.told.extend((arrives, TENANT, piece) for piece in said)
        second.add("second", texts[2], 1.0)
        count = 0
        while second.step(1.0) is not None:
            count += 1
        steps[arrives] = count
    assert steps[0.0] < steps[9.0] == len(said)


def known(prompt: Sequence[int], output: Sequence[int]) -> KnownText:
    return KnownText("x", np.array(prompt, np.int32), (), np.array(output, np.int32))


def timed(strategy: str, times: StepTimes, text: KnownText) -> tuple[list[tuple[int, ...]], list[float]]:
    one = replica(strategy, 20, times)
    one.add("x", text, 0.0)
    pieces, seconds = run(one)
    return [piece.tokens for (piece,) in pieces], seconds
