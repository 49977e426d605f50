"""Guided runs: known tokens are committed whatever the weights say, in as many steps as a replay counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from cluster.cli.generate.strategy_option import parse_strategy
from configs.slices import EngineOptions
from decoding.budget.latency import StepLoad
from decoding.drafters import STRATEGIES
from decoding.drafters.base import Drafter, TargetRows
from decoding.replay import KnownText, replay_workload
from decoding.request import Acceptance, Request
from decoding.tree import DraftTree
from engine.loading.hybrids import is_hybrid
from engine.loading.model import LoadedModel
from engine.text.tokenizer import load_tokenizer
from experiments.bench.engines.contestants import EngineContestant, Prompt
from experiments.bench.engines.guided import random_model, stock_twin
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.engines.stock_generate import StockGenerate, StockPromptLookup
from experiments.bench.options import SIZES

SENTENCE = "The quick brown fox jumps over the lazy dog. "
RECORDS = (
    {"id": "a", "prompt": SENTENCE, "output": SENTENCE * 2},
    {"id": "b", "prompt": "Who jumps?", "references": [SENTENCE], "output": "The quick brown fox, over the lazy dog."},
    {"id": "c", "prompt": "Nothing", "output": ""},
)
BUDGET = 12


@pytest.fixture(scope="module")
def texts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[KnownText]:
    path = Path(tmp_path_factory.mktemp("w")) / "known.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return read_known_texts(path, TextTokenizer(tiny_model), None)


@pytest.fixture(scope="module")
def prompts(texts: list[KnownText]) -> list[Prompt]:
    return [Prompt.of(text) for text in texts]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    return random_model("tiny", TextTokenizer(tiny_model).vocab_size, 256, torch.bfloat16, seed=3)


@pytest.fixture(scope="module")
def shared(tiny_model: Path, model: PreTrainedModel) -> SharedModel:
    loaded = LoadedModel(model, load_tokenizer(str(tiny_model)), "random", 256, ())
    return SharedModel(loaded, EngineOptions(max_running=1), BUDGET, guided=True)


def contestant(shared: SharedModel, strategy: str) -> EngineContestant:
    return shared.contestant(parse_strategy(strategy), 99)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "llma", "llma:copy_length=3,include_prompt=false"])
def test_the_engine_emits_the_known_output_in_the_steps_of_a_replay(
    shared: SharedModel, prompts: list[Prompt], texts: list[KnownText], strategy: str
) -> None:
    run = contestant(shared, strategy).run(prompts)
    assert run.outputs == [prompt.known for prompt in prompts]
    replay = replay_workload(texts, parse_strategy(strategy).build, BUDGET, shared.loaded.model.config.vocab_size, lambda: 0.0)
    assert (run.steps, run.drafted) == (replay.steps, replay.drafted)
    assert run.accepted_by_source == replay.accepted_by_source
    assert strategy == "autoregressive" or run.steps < sum(map(len, run.outputs))
    assert run.forward_s > 0 and run.prefill_s > 0


def test_generate_emits_the_known_output_and_keeps_its_own_lookup(model: PreTrainedModel, prompts: list[Prompt]) -> None:
    twin = stock_twin(model)
    plain = StockGenerate(twin, 99, ())
    assert plain.run(prompts[:1]).outputs == [prompts[0].known]
    run = StockPromptLookup(twin, 99, ()).run(prompts)
    assert run.outputs == [prompt.known for prompt in prompts]
    assert run.steps < sum(map(len, run.outputs)) * 0.8
    unguided = Prompt("u", prompts[0].ids, [])
    assert plain.run([unguided]).outputs[0][:5] != prompts[0].known[:5]  # the hook is gone


def test_drafters_see_the_known_token_on_the_known_path_and_the_model_beside_it(
    shared: SharedModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = prompts[0].known
    assert known is not None
    seen: list[tuple[list[int], list[int]]] = []

    class Fork(Drafter):
        """Two branches of two: the right tokens, and beside them a wrong one with the right one below."""

        top_k = 1

        def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
            return [self.fork(request) for request in requests]

        def fork(self, request: Request) -> DraftTree:
            first, second = known[request.num_output : request.num_output + 2]
            tokens, parents = [request.root, first ^ 1, first, second, second], [-1, 0, 0, 1, 2]
            return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(5, np.int8), 5)

        def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
            if len(tree) == 5:
                seen.append((target.ids.tolist(), target.top_k(range(5), 1)[:, 0].tolist()))

    monkeypatch.setitem(STRATEGIES, "fork", Fork)
    run = contestant(shared, "fork").run([Prompt("f", prompts[0].ids, [], known[:8])])
    assert run.outputs == [known[:8]] and run.steps == 4  # prefill, then three tokens a step, then one
    ids, best = seen[0]
    assert [ids[0], ids[2], ids[4]] == known[1:4] == [best[0], best[2], best[4]]
    assert ids[3] == best[3] != known[3]


def test_the_twin_computes_the_same_in_the_same_memory(model: PreTrainedModel) -> None:
    twin = stock_twin(model)
    assert twin.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert twin.lm_head.weight.data_ptr() == twin.model.embed_tokens.weight.data_ptr()
    assert twin.config._attn_implementation == "sdpa" != model.config._attn_implementation


def test_a_prompt_is_the_same_text_again(texts: list[KnownText], prompts: list[Prompt]) -> None:
    for text, prompt in zip(texts, prompts, strict=True):
        again = prompt.text()
        assert (again.id, again.prompt_ids.tolist(), again.output_ids.tolist()) == (text.id, prompt.ids, prompt.known)
        assert [ids.tolist() for ids in again.references] == prompt.references


def test_same_seed_same_weights() -> None:
    one, same, other = (random_model("tiny", 320, 64, torch.float32, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("size", [size for size in SIZES if size.endswith("m")])
def test_a_random_model_has_as_many_parameters_as_it_is_called_after(size: str) -> None:
    with torch.device("meta"):
        model = random_model(size, 50257, 64, torch.bfloat16, 0)
    assert 0.96 < model.num_parameters() / float(size.rpartition("-")[2].removesuffix("m")) / 1e6 < 1.04
    hybrid = is_hybrid(model.config)
    assert hybrid == ("-" in size) and len(set(getattr(model.config, "layer_types", None) or [0])) == 1 + hybrid
