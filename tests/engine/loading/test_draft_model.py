"""The draft model's own KV: whatever is drafted, refused, preempted or handed on, it says what a fresh forward says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outrider.configs.schema import load_config
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.registry import build_drafters, check_drafters
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.draft_model import LocalDraftModel, check_vocabularies, load_draft_model
from outrider.engine.loading.model import load_model
from outrider.engine.text.tokenizer import load_tokenizer
from tests.helpers.models import CONTEXT, SLOTS, VOCAB, llama_config, random_tree, run, save_model, tiny_model, tree_of

FAMILIES = ("llama", "mistral", "opt")
ROWS = 24  # of drafts
LIMIT = CONTEXT - ROWS  # capacity of the tiny models' slots is CONTEXT + MAX_DRAFT, which is 16


class CountingRunner(ModelRunner):
    """Knows how many rows it computed."""

    computed = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.computed += len(batch.token_ids)
        return super().forward(batch)


def draft_model(family: str = "llama", step_tokens: int = 512, vocab_size: int = VOCAB, limit: int = LIMIT) -> LocalDraftModel:
    model = tiny_model(family, "float64").runner.model
    return LocalDraftModel(CountingRunner(model, SLOTS, CONTEXT), vocab_size, limit, step_tokens)


def computed(model: LocalDraftModel) -> int:
    assert isinstance(model.runner, CountingRunner)
    return model.runner.computed


def request(name: str, prompt: Sequence[int], slot: int, scope: str | None = None, room: int = 60) -> Request:
    made = Request(name, prompt, SamplingParams(max_tokens=room))
    made.slot, made.scope = slot, scope
    return made


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


def fresh(family: str, sequence: Sequence[int]) -> torch.Tensor:
    """[vocab] what the stock model says after a sequence."""
    with torch.inference_mode():
        return tiny_model(family, "float64").stock(torch.tensor([list(sequence)])).logits[0, -1]


def entries(model: LocalDraftModel, request: Request) -> tuple[Int32Array, tuple[torch.Tensor, torch.Tensor]]:
    """The tokens that are computed of a request with a slot, and copies of their keys and values."""
    assert request.slot is not None
    slot = model._slots[request.slot]
    length = slot.length if slot.request is request else 0
    return slot.tokens[:length].copy(), model.runner.cache.entries(request.slot, length)


def assert_entries_are_fresh(model: LocalDraftModel, family: str, owner: Request) -> None:
    """Keys and values of a slot are those of a prefill of the tokens that it says it holds."""
    held, (keys, values) = entries(model, owner)
    assert len(held) > 0
    other = LocalDraftModel(ModelRunner(tiny_model(family, "float64").runner.model, 1, CONTEXT), VOCAB, CONTEXT, 512)
    twin = request("twin", [*held.tolist(), 1], 0)
    other.next_logits([twin], [[]])
    _, (expected_keys, expected_values) = entries(other, twin)
    torch.testing.assert_close(keys, expected_keys[:, :, : len(held)], atol=1e-9, rtol=0)
    torch.testing.assert_close(values, expected_values[:, :, : len(held)], atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_history_says_what_a_fresh_forward_says(family: str) -> None:
    """Chains, trees, acceptance of any part, other requests in the same slot, and requests that move to another slot."""
    model, rng = draft_model(family), np.random.default_rng(3)
    live = [request(str(at), tokens(at, 5 + 9 * at), at, scope="a" if at % 2 else None) for at in range(SLOTS)]
    for step in range(24):
        asked = [live[at] for at in sorted(rng.choice(SLOTS, int(rng.integers(1, SLOTS + 1)), replace=False))]
        assert model.catch_up(asked) == [True] * len(asked)
        if step % 3 == 2:
            trees = [random_tree(rng, one.root, int(rng.integers(2, 7)), 2) for one in asked]
            for one, tree, logits in zip(asked, trees, model.tree_logits(asked, trees), strict=True):
                row = int(rng.integers(len(tree)))
                path = tree.tokens[tree.path(row)].tolist()
                torch.testing.assert_close(logits[row], fresh(family, [*one.tokens, *path]), atol=1e-9, rtol=0)
            chains = [tree.tokens[tree.path(len(tree) - 1)].tolist() for tree in trees]
        else:
            chains = [[] for _ in asked]
            for _ in range(3):
                found = model.next_logits(asked, chains)
                for one, chain, logits in zip(asked, chains, found, strict=True):
                    torch.testing.assert_close(logits, fresh(family, [*one.tokens, *chain]), atol=1e-9, rtol=0)
                    chain.append(int(rng.integers(1, VOCAB)))
        for one, chain in zip(asked, chains, strict=True):
            assert_entries_are_fresh(model, family, one)
            one.commit([*chain[: int(rng.integers(len(chain) + 1))], int(rng.integers(1, VOCAB))])
        if step % 5 == 4:  # one ends and another takes its slot; two change places, as after preemptions
            live[0] = request(f"{step}", [*live[1].tokens[:20], *tokens(step, 4)], live[0].slot or 0, scope="a")
            live[1].slot, live[2].slot = live[2].slot, live[1].slot
        if any(one.remaining < 6 for one in live):
            live = [request(f"{step}/{at}", tokens(step + at, 7), at) for at in range(SLOTS)]


def test_only_what_is_missing_is_computed() -> None:
    model, one = draft_model(), request("a", tokens(1, 30), 0)
    model.catch_up([one])
    assert computed(model) == 0  # all of it fits into the first draft step
    chain: list[int] = []
    for number in range(4):
        model.next_logits([one], [chain])
        assert computed(model) == 30 + number
        chain.append(number + 1)
    one.commit([*chain, 9])  # all accepted: the last drafted token was never computed
    model.next_logits([one], [[]])
    assert computed(model) == 33 + 2
    one.commit([7])  # nothing was drafted
    model.next_logits([one], [[5]])
    model.next_logits([one], [[6]])  # refused at its first token
    assert computed(model) == 35 + 2 + 1


def test_the_first_rows_of_a_tree_are_kept() -> None:
    model, one = draft_model(), request("a", tokens(1, 10), 0)
    tree = tree_of([one.root, 4, 5, 6], [-1, 0, 1, 1])
    model.tree_logits([one], [tree])
    held, _ = entries(model, one)
    assert held.tolist() == [*one.tokens, 4, 5]  # 6 does not come after 5
    one.commit([4, 5, 8])
    before = computed(model)
    model.next_logits([one], [[]])
    assert computed(model) == before + 1


def test_a_long_request_is_computed_in_parts_while_others_are_drafted_for() -> None:
    model = draft_model(step_tokens=32)
    short, long, longer = request("a", tokens(1, 6), 0), request("b", tokens(2, 70), 1), request("c", tokens(3, 80), 2)
    assert model.catch_up([long, longer, short]) == [False, False, True]
    assert computed(model) == 32 - 6
    steps = 1
    while not all(ready := model.catch_up([long, longer, short])):
        before = computed(model)
        assert ready[2]
        model.next_logits([short], [[]])
        steps += 1
        assert computed(model) - before <= 6 and steps < 9
    found = model.next_logits([longer], [[3]])
    torch.testing.assert_close(found[0], fresh("llama", [*longer.tokens, 3]), atol=1e-9, rtol=0)


def test_what_a_scope_has_is_taken_over_and_nobody_elses() -> None:
    model, system = draft_model(), tokens(5, 40)
    first, second, third, alone = (request(n, [*system, at], at, s) for at, (n, s) in enumerate(zip("abcd", "xxy ", strict=True)))
    alone.scope = None
    model.next_logits([first], [[]])
    assert computed(model) == 41
    for other, rows in ((second, 1), (third, 41), (alone, 41)):
        model.catch_up([first, other])  # what the first one has is known from now on
        before = computed(model)
        model.next_logits([other], [[]])
        assert computed(model) - before == rows, other.request_id
        assert_entries_are_fresh(model, "llama", other)


def test_a_request_beyond_the_context_is_left_alone() -> None:
    model = draft_model(limit=20)
    fits, beyond = request("a", tokens(1, 19), 0), request("b", tokens(1, 20), 1)
    assert model.catch_up([beyond, fits]) == [False, True]
    assert computed(model) == 0


@pytest.mark.parametrize("vocab_size", [VOCAB - 20, VOCAB + 30])
def test_padded_vocabularies(vocab_size: int) -> None:
    """The target's vocabulary is smaller or larger: logits are as wide as it, and its further tokens can be read."""
    model = draft_model(vocab_size=vocab_size)
    one = request("a", [5, vocab_size - 1, 7], 0)
    (logits,) = model.next_logits([one], [[9]])
    expected = fresh("llama", [5, min(vocab_size, VOCAB) - 1, 7, 9])
    assert logits.shape == (vocab_size,)
    torch.testing.assert_close(logits[:VOCAB], expected[:vocab_size], atol=1e-9, rtol=0)
    assert bool((logits[VOCAB:] == -torch.inf).all())


def load(folder: str, strategy: str = "speculative", **speculation: object) -> Engine:
    options = SpeculationOptions(strategy, **{"draft_model": folder, **speculation})  # type: ignore[arg-type]
    return Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(max_running=2), options)


def test_vocabularies_must_agree(folder: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", llama_config())
    file = other / "tokenizer.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace('"A":', '"spare":').replace('"B":', '"A":').replace('"spare":', '"B":')
    )
    ids = load_tokenizer(folder).get_vocab()
    with pytest.raises(
        ModelLoadError, match=rf"other' and '.*target' have different vocabularies: token {ids['A']} is 'B' and 'A'"
    ):
        load(folder, draft_model=str(other))
    ours = load_tokenizer(folder)
    check_vocabularies("one", ours, "two", load_tokenizer(str(other)), min(ids["A"], ids["B"]))  # no model has what differs
    larger = load_tokenizer(folder)
    assert isinstance(larger, PreTrainedTokenizerFast) and larger.add_tokens(["<tool>"]) == 1
    check_vocabularies("one", ours, "two", larger, VOCAB + 1)
    check_vocabularies("one", larger, "two", ours, VOCAB + 1)


def test_short_list_of_tokens(folder: str, tmp_path: Path) -> None:
    """A draft model with ``draft_token_ids`` has the logits of these tokens, and drafts no other."""
    own = save_model(tmp_path / "short", llama_config())
    file = own / "config.json"
    ids = sorted(np.random.default_rng(3).permutation(VOCAB)[:40].tolist())
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"draft_token_ids": ids}))
    options = ModelOptions(folder, dtype="float64")
    target = load_model(options)
    short = load_draft_model(str(own), options, target, SLOTS, 512, ROWS)
    file.write_text(json.dumps(config))
    whole = load_draft_model(str(own), options, target, SLOTS, 512, ROWS)
    one, chain = request("a", tokens(2, 9), 0), tokens(4, 3)  # most of which are in no short list
    (logits,), (every,) = short.next_logits([one], [chain]), whole.next_logits([one], [chain])
    torch.testing.assert_close(logits[ids], every[ids], atol=1e-9, rtol=0)
    assert logits.shape == every.shape and int(torch.isfinite(logits).sum()) == 40
    for unusable in ([], [3, 3], [VOCAB], "all"):
        file.write_text(json.dumps(config | {"draft_token_ids": unusable}))
        with pytest.raises(ModelLoadError, match=rf"short': draft_token_ids of its config.json must be .* from 0 to {VOCAB - 1}"):
            load_draft_model(str(own), options, target, SLOTS, 512, ROWS)


def test_what_cannot_be_is_refused_with_what_to_do(folder: str) -> None:
    with pytest.raises(ValueError, match=r"speculative drafts with a second model: set speculation\.draft_model"):
        load(folder, draft_model=None)
    with pytest.raises(ValueError, match=r"spectr drafts with a second model"):
        load(folder, "auto", draft_model=None, strategies=("spectr",))
    for strategies in ({"strategy": "mjsd"}, {"strategy": "auto", "strategies": ("llma", "mjsd:beams=2")}):
        with pytest.raises(ValueError, match=r"^mjsd does not preserve .* set speculation\.exact=false"):
            load(folder, **strategies)  # type: ignore[arg-type]
    assert not load(folder, "mjsd", exact=False).info.lossless
    assert load(folder, "spectr").info.lossless
    with pytest.raises(ModelLoadError, match="absent"):
        load(folder, draft_model=f"{folder}/absent")
    for strategy, options in (("spectr", {}), ("speculative", {"sampling": "rejection"})):
        with pytest.raises(ValueError, match=rf"^{strategy}: with parallelism\.mode=lookahead .* coupled or greedy"):
            check_drafters(build_drafters(strategy, options, ()), (strategy,), "m", True, True)
    check_drafters(build_drafters("speculative", {}, ("auto",)), ("speculative", "auto"), "m", True, True)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("speculative", {"num_draft_tokens": 0}, "num_draft_tokens"),
        ("speculative", {"sampling": "soft"}, "coupled, greedy, rejection"),
        ("spectr", {"sequences": 0}, "sequences"),
        ("bild", {"fallback": 1.5}, "fallback"),
        ("bild", {"rollback": -1.0}, "rollback"),
        ("bild", {"variant": "x"}, "original, mjsd"),
        ("mjsd", {"beams": 0}, "beams"),
        ("mjsd", {"joint_law": "x"}, "raw, warped"),
        ("mjsd", {"beam": 3}, "did you mean 'beams'"),
    ],
)
def test_options_are_checked(strategy: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_drafters(strategy, options, ())


def test_the_draft_model_of_a_configuration_is_found_like_the_model(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(folder).parent)
    config = load_config(None, ["speculation.draft_model=target", "speculation.exact=false"])
    assert config.speculation.draft_model == folder and not config.speculation.exact
    assert load_config(None, ["speculation.draft_model=on/hub"]).speculation.draft_model == "on/hub"
    assert load_config().speculation == SpeculationOptions()


def test_the_draft_model_is_of_the_targets_type(folder: str) -> None:
    options = SpeculationOptions("mjsd", draft_model=folder, exact=False)
    engine = Engine.load(ModelOptions(folder, dtype="float64"), EngineOptions(max_running=3), options)
    model: Any = engine._drafter.draft_model
    assert model.runner.model.dtype == torch.float64 and model.runner.cache.slots == engine._executor.slots == 9
    outputs = run(engine, Request("a", [1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)))
    assert len(outputs[0]) == 200
