"""Contestants and servers: known outputs are followed exactly, and all give the outputs of ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.cluster.cli.generate.known_texts import TextTokenizer
from outrider.configs.slices import EngineOptions, ModelOptions
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.registry import STRATEGIES, parse_strategy
from outrider.decoding.replay import replay_workload
from outrider.decoding.request import Request
from outrider.decoding.tree import Acceptance, DraftTree
from outrider.engine.loading.hybrids import is_hybrid
from outrider.engine.loading.model import LoadedModel, load_model
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.competition import Tally, decode_ratios, where_time_goes
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, Run, SharedModel, make_request
from outrider.experiments.bench.engines.guided import random_model, stock_twin
from outrider.experiments.bench.engines.stock_batching import StockBatching
from outrider.experiments.bench.engines.stock_generate import StockGenerate, StockPromptLookup
from outrider.experiments.bench.engines.traffic import (
    ClosedLoop,
    EngineServer,
    Journey,
    Server,
    ServerCounts,
    drive,
    full_load_s,
    measured,
    poisson,
    rows_of_a_cell,
)
from outrider.experiments.bench.options import SIZES

BUDGET, MAX_TOKENS = 12, 10
FREE = [Prompt(f"p/{i}", [5 + i, 6, 7, 8, 5 + i, 6, 7][: 3 + i % 5], []) for i in range(7)]


@pytest.fixture(scope="module")
def known(tiny_model: Path) -> list[Prompt]:
    sentence, cutter = "The quick brown fox jumps over the lazy dog. ", TextTokenizer(tiny_model)
    texts = ((sentence, sentence * 2), ("Who jumps?", "The quick brown fox, over the lazy dog."), ("Nothing", "."))
    return [
        Prompt(str(at), list(ids), [list(cutter.encode([sentence])[0])], list(output))
        for at, (ids, output) in enumerate(cutter.encode(pair) for pair in texts)
    ]


@pytest.fixture(scope="module")
def guided(tiny_model: Path) -> SharedModel:
    model = random_model("tiny", TextTokenizer(tiny_model).vocab_size, 256, torch.bfloat16, seed=3)
    loaded = LoadedModel(model, load_tokenizer(str(tiny_model)), "random", 256, ())
    return SharedModel(loaded, EngineOptions(max_running=1), BUDGET, guided=True)


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def expected(stock: PreTrainedModel) -> dict[str, list[int]]:
    generate = StockGenerate(stock, MAX_TOKENS, (0,))
    return {prompt.id: generate.run([prompt]).outputs[0] for prompt in FREE}


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> SharedModel:
    loaded = load_model(ModelOptions(str(tiny_model), dtype="float32"))
    return SharedModel(loaded, EngineOptions(max_running=3, max_waiting=20), budget=8)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "llma:copy_length=3,include_prompt=false"])
def test_the_engine_emits_the_known_output_in_the_steps_of_a_replay(
    guided: SharedModel, known: list[Prompt], strategy: str
) -> None:
    choice, vocabulary = parse_strategy(strategy), guided.loaded.model.config.vocab_size
    run = guided.contestant(choice, 99).run(known)
    assert run.outputs == [prompt.known for prompt in known]
    replay = replay_workload([prompt.text() for prompt in known], choice.build, BUDGET, vocabulary, lambda: 0.0)
    assert (run.steps, run.drafted, run.accepted_by_source) == (replay.steps, replay.drafted, replay.accepted_by_source)
    assert [Prompt.of(prompt.text()) for prompt in known] == known
    assert strategy == "autoregressive" or run.steps < sum(map(len, run.outputs))
    counted = EngineContestant(partial(guided.engine, choice, counted=True), 99, guided.guide).run(known)
    assert (counted.outputs, counted.steps, counted.drafted) == (run.outputs, run.steps, run.drafted)


def test_drafters_see_the_known_token_on_the_known_path_and_the_model_beside_it(
    guided: SharedModel, known: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = known[0].known
    assert output is not None
    seen: list[tuple[list[int], list[int]]] = []

    class Fork(Drafter):
        """Two branches of two: the right tokens, and beside them a wrong one with the right one below."""

        top_k = 1

        def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
            return [self.fork(request) for request in requests]

        def fork(self, request: Request) -> DraftTree:
            first, second = output[request.num_output : request.num_output + 2]
            tokens, parents = [request.root, first ^ 1, first, second, second], [-1, 0, 0, 1, 2]
            return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(5, np.int8), 5)

        def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
            if len(tree) == 5:
                seen.append((target.ids.tolist(), target.top_k(range(5), 1)[:, 0].tolist()))

    monkeypatch.setitem(STRATEGIES, "fork", Fork)
    run = guided.contestant(parse_strategy("fork"), 99).run([Prompt("f", known[0].ids, [], output[:8])])
    assert run.outputs == [output[:8]] and run.steps == 4  # prefill, then three tokens a step, then one
    ids, best = seen[0]
    assert [ids[0], ids[2], ids[4]] == output[1:4] == [best[0], best[2], best[4]]
    assert ids[3] == best[3] != output[3]


def test_generate_follows_known_outputs_with_its_own_lookup(guided: SharedModel, known: list[Prompt]) -> None:
    model = guided.loaded.model
    twin = stock_twin(model)
    assert twin.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()  # the same memory
    plain = StockGenerate(twin, 99, ())
    assert plain.run(known[:1]).outputs == [known[0].known]
    run = StockPromptLookup(twin, 99, ()).run(known)
    assert run.outputs == [prompt.known for prompt in known] and run.steps < sum(map(len, run.outputs)) * 0.8
    assert known[0].known is not None
    assert plain.run([Prompt("u", known[0].ids, [])]).outputs[0][:5] != known[0].known[:5]  # the hook is removed


@pytest.mark.parametrize("size", [size for size in SIZES if size.endswith("m")])
def test_a_random_model_has_the_parameters_of_its_name(size: str) -> None:
    with torch.device("meta"):
        model = random_model(size, 50257, 64, torch.bfloat16, 0)
    assert 0.96 < model.num_parameters() / float(size.rpartition("-")[2].removesuffix("m")) / 1e6 < 1.04
    assert is_hybrid(model.config) == ("-" in size)


def our_server(shared: SharedModel, strategy: str = "llma") -> EngineServer:
    return EngineServer(strategy, partial(shared.engine, parse_strategy(strategy)), partial(make_request, max_tokens=MAX_TOKENS))


def test_every_server_answers_a_closed_loop_as_generate_does(
    shared: SharedModel, stock: PreTrainedModel, expected: dict[str, list[int]]
) -> None:
    servers: list[Server] = [our_server(shared), StockBatching(stock, MAX_TOKENS, (0,), 3, 64)]
    for server in servers:
        for _ in range(2):  # the second begins anew
            journeys, counts = drive(server, FREE, ClosedLoop(3))
            assert {journey.key: journey.output for journey in journeys} == expected, server.name
            assert all(journey.finished and journey.arrival_s <= journey.sent_s <= journey.first_s for journey in journeys)
            assert max(sum(j.sent_s <= own.sent_s < j.last_s for j in journeys) for own in journeys) == 3
            run = measured(journeys, counts, closed=True)
            assert run["output_tokens"] == sum(map(len, expected.values())) and run["tokens_per_step"] >= 1.0


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    times = poisson(4.0, 4000, 7).times_s
    assert times == poisson(4.0, 4000, 7).times_s != poisson(4.0, 4000, 8).times_s
    assert np.allclose(poisson(8.0, 4000, 7).times_s, np.array(times) / 2)
    gaps = np.diff(times)
    assert (gaps > 0).all() and 0.23 < gaps.mean() < 0.27 and 0.23 < gaps.std() < 0.27


def journey(key: str, sent_s: float, moments: list[tuple[float, int, int]]) -> Journey:
    return Journey(key, sent_s, sent_s, moments, [1] * sum(tokens for _, tokens, _ in moments), True)


def test_throughput_is_that_of_the_time_with_all_clients() -> None:
    journeys = [
        journey("a", 0.0, [(1.0, 1, 0), (2.0, 3, 6)]),
        journey("b", 0.0, [(1.0, 1, 0), (4.0, 1, 2)]),  # the first client without a new request: 4.0
        journey("c", 2.0, [(3.0, 1, 0), (6.0, 4, 4)]),
    ]
    assert full_load_s(journeys) == 4.0
    run = measured(journeys, ServerCounts(steps=6, tells_drafts=True), closed=True)
    assert (run["tokens_per_s"], run["span_s"], run["wall_s"], run["decode_s"]) == (7 / 4, 4.0, 6.0, 7.0)
    assert run["requests_per_s"] == round(7 / 4 / (11 / 3), 3)
    assert (run["tokens_per_step"], run["drafted_per_step"], run["drafted_per_request_step"]) == (round(11 / 6, 3), 2.0, 2.0)
    assert run["ttft_ms"] == {"p50": 1000.0, "p99": 1000.0, "mean": 1000.0}
    assert run["tpot_ms"]["p50"] == 750.0 and run["e2e_ms"]["mean"] == round(1e3 * 10 / 3, 2)
    assert measured(journeys, ServerCounts(), closed=False)["tokens_per_s"] == round(11 / 6, 2)


def test_ratios_are_those_of_the_same_repeat() -> None:
    def run(speed: float, e2e: float) -> dict[str, object]:
        times = {name: {"p50": e2e, "p99": e2e, "mean": e2e} for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
        absent = dict.fromkeys(("drafted_per_step", "drafted_per_request_step", "cached_tokens"))
        return {"requests_per_s": 1.0, "tokens_per_step": 1.0, "tokens_per_s": speed, "decode_s": e2e / 2, **times, **absent}

    rows = rows_of_a_cell({"plain": [run(10, 4), run(20, 2)], "auto": [run(20, 2), run(30, 1)], "one": [run(5, 8)]}, "plain")
    assert (rows["auto"]["ratio"], rows["auto"]["e2e_ratio"], rows["auto"]["tokens_per_s"]) == ([2.0, 1.5], [2.0, 2.0], 25)
    assert (rows["one"]["ratio"], rows["one"]["drafted_per_step"], rows["plain"]["ratio_median"]) == ([0.5], None, 1.0)
    assert rows["one"]["decode_ratio"] == [0.5] and rows["auto"]["decode_ratio"] == [2.0, 2.0]


def test_times_of_a_step_leave_out_the_prefill() -> None:
    base, own = Tally.empty(2), Tally.empty(2)
    for repeat in range(2):
        base.add(repeat, Run([[1] * 11], 11, 1.0, 9.0, 0.0, 0), 11.0)
        own.add(repeat, Run([[1] * 11], 6, 1.0, 2.0, 0.5, 20, {"llma": 5}), 5.0)
    assert decode_ratios(own, base) == [2.5, 2.5]
    assert where_time_goes(own, prefills=2) == {"propose": 100.0, "forward": 400.0, "rest": 300.0, "prefill": 1000.0}
    assert (own.drafted, own.accepted_by_source) == (40, {"llma": 10})
    own.add(0, Run([[1]], 1, 1.0, 0.0), 1.0)
    assert own.drafted is None and where_time_goes(own, prefills=3)["propose"] is None
