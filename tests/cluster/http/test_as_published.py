"""Options and ``as_published`` in requests: the real application drafts the published rows where only one row pays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from outrider.cluster.http.api import Service
from outrider.configs.slices import SpeculationOptions, TenancyOptions
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.decoding.verify.exact import verify_exact
from outrider.engine import executor
from outrider.engine.forward.batch import Batch, ScheduledRequest
from outrider.engine.target import LocalTarget
from tests.cluster.circle import CIRCLE, COMPLETIONS, CONTEXT, TEXT, TOKENIZER, byte_ids, client_of, local_engine, read_stream
from tests.cluster.commands import lines, outrider

STEEP = LatencyCurve((1, 512), (0.01, 5.12), 0, 0.0, 0.0)  # each row takes as long as a step
JACOBI = {"window": 15, "ngram": 5, "guesses": 15, "prompt_as_reference": False}
TOKENS = 80
PASSAGE = CIRCLE[6:] + CIRCLE[:9] + "::" + CIRCLE[2:18]  # copies of it go wrong twice
OFFERED = ("fast = jacobi:window=5,prompt_as_reference=false", "jacobi", "ngrammys", "suffix", "llma", "trie")
Tree = tuple[list[int], list[int]]  # tokens and parents


TARGETS: list[LocalTarget] = []  # of the engine that was loaded last


@pytest.fixture(scope="module")
def computed() -> Iterator[list[Tree]]:
    """The trees that engines of this process computed, where only one row pays."""
    trees: list[Tree] = []
    pack = executor.pack

    def latency(target: LocalTarget) -> LatencyCurve:
        TARGETS[:] = [target]
        return STEEP

    def recording(works: Sequence[ScheduledRequest]) -> Batch:
        trees.extend((work.tree.tokens.tolist(), work.tree.parents.tolist()) for work in works if work.tree is not None)
        return pack(works)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTarget, "latency", latency)
        patch.setattr(executor, "pack", recording)
        yield trees


@pytest.fixture(scope="module")
def client(circle_model: Path, computed: list[Tree]) -> Iterator[httpx.Client]:
    """A client of a server whose default is plain lookup and which makes room for trees of 512 rows."""
    speculation = SpeculationOptions("prompt_lookup", strategies=OFFERED, largest_tree=512, max_settings=2)
    with (
        local_engine(circle_model, speculation, max_model_len=1024) as engine,
        client_of(Service(engine, TOKENIZER, TenancyOptions())) as http,
    ):
        yield http


def ask(client: httpx.Client, fields: dict[str, Any] | None = None, **speculation: Any) -> dict[str, Any]:
    """Return the choice of a greedy completion, with its report."""
    body = TEXT | {"max_tokens": TOKENS, "ignore_eos": True, "seed": 1, "speculation": {"report": True, **speculation}}
    choice: dict[str, Any] = client.post(COMPLETIONS, json=body | (fields or {})).raise_for_status().json()["choices"][0]
    return choice


def drafted(choice: dict[str, Any]) -> list[int]:
    return [step["drafted"] for step in choice["speculation"]["steps"]]


def by_hand(strategy: str, options: dict[str, Any], outputs: list[int], references: Sequence[str] = ()) -> list[DraftTree]:
    """Return the trees of each step of a published drafter without a row budget, whose output is known."""
    drafter = build_drafter(strategy, options)
    params = SamplingParams(TOKENS, seed=1, ignore_eos=True)
    request = Request("r", byte_ids("<"), params, [byte_ids(text) for text in references])
    after = dict(zip([*byte_ids("<"), *outputs[:-1]], outputs, strict=True))  # the last token alone decides the next
    drafter.prepare(TARGETS[0])
    trees = list[DraftTree]()
    while request.remaining:
        (tree,) = drafter.propose([request], [512 if request.remaining > 1 else 0])
        tree = tree.clipped(513, request.remaining - 1, len(TOKENIZER), CONTEXT)
        below = [after.get(int(token), byte_ids("<")[0]) for token in tree.tokens]
        acceptance = verify_exact(tree, below.__getitem__, request.remaining, frozenset())
        request.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
        trees.append(tree)
        if request.remaining:
            drafter.observe(request, tree, TargetRows(np.array(below, np.int32), None), acceptance)
    return trees


def counts(trees: Sequence[DraftTree]) -> list[int]:
    return [tree.num_candidates - 1 for tree in trees]


PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("jacobi", {"window": 15, "ngram": 5, "guesses": 15}), ("jacobi", JACOBI), ("jacobi", {"window": 20, "ngram": 2}),
    ("ngrammys", {"k": 10, "w": 10}), ("ngrammys", {"k": 25, "w": 14, "layout": "batched"}),
    ("trie", {"decoding_length": 128, "branch_length": 32}), ("trie", {"layout": "parallel"}),
    ("llma", {"match_length": 1, "copy_length": 20}), ("llma", {"match_length": 3, "copy_length": 300}),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "options"), PUBLISHED)
def test_each_row_is_the_published_one(
    client: httpx.Client, computed: list[Tree], outputs: list[int], strategy: str, options: dict[str, Any]
) -> None:
    computed.clear()
    choice = ask(client, {"reference_documents": [PASSAGE]}, strategy=strategy, options=options, as_published=True)
    trees = by_hand(strategy, options, outputs, [PASSAGE])
    assert byte_ids(choice["text"]) == outputs and drafted(choice) == counts(trees)
    assert computed == [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees]
    assert len(trees) < TOKENS / 1.5 or options.get("ngram") == 2  # plain Jacobi decoding does not converge on a circle


def test_no_further_strategy_has_to_be_configured(circle_model: Path, computed: list[Tree], outputs: list[int]) -> None:
    speculation = SpeculationOptions("jacobi", largest_tree=512)
    with (
        local_engine(circle_model, speculation, max_model_len=1024) as engine,
        client_of(Service(engine, TOKENIZER, TenancyOptions())) as http,
    ):
        computed.clear()
        choice = ask(http, options=JACOBI, as_published=True)
        assert byte_ids(choice["text"]) == outputs
        assert computed == [(tree.tokens.tolist(), tree.parents.tolist()) for tree in by_hand("jacobi", JACOBI, outputs)]


@pytest.mark.parametrize(("strategy", "options"), PUBLISHED)
def test_each_row_is_the_published_one_on_the_command_line(
    circle_model: Path, computed: list[Tree], outputs: list[int], tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    computed.clear()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "<", "references": [PASSAGE]}))
    given = [part for name, value in options.items() for part in ("--option", f"{name}={json.dumps(value)}")]
    run = outrider(
        "generate", "--model", circle_model, "--prompts", prompts, "--max-tokens", TOKENS, "--seed", 1, "--json",
        "--strategy", strategy, *given, "--as-published",
    )  # fmt: skip
    (record,), summary = lines(run)
    trees = by_hand(strategy, options, outputs, [PASSAGE])
    assert record["output_token_ids"] == outputs
    assert (record["steps"], record["drafted"]) == (len(trees), sum(counts(trees)))
    assert computed == [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees]
    assert "cut" not in summary


@pytest.fixture(scope="module")
def outputs(client: httpx.Client) -> list[int]:
    """The tokens of the completion by plain decoding."""
    return byte_ids(ask(client, strategy="autoregressive")["text"])


def test_without_it_only_what_pays_is_drafted_and_the_report_says_so(client: httpx.Client, outputs: list[int]) -> None:
    choice = ask(client, strategy="jacobi", options=JACOBI)
    assert byte_ids(choice["text"]) == outputs and max(drafted(choice)) <= 3
    cut = choice["speculation"]["cut"]
    assert cut.startswith("jacobi: 119 rows a step wanted, 0.0 drafted: more do not pay on this device")
    assert "as_published drafts all" in cut
    body = TEXT | {
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "speculation": {"report": True, "strategy": "jacobi", "options": JACOBI},
    }
    chunks = [choice for chunk in read_stream(client, COMPLETIONS, body) for choice in chunk["choices"]]
    assert [one["speculation"]["cut"] for one in chunks if "cut" in one.get("speculation", {})] == [cut]


def test_the_published_block_is_drafted_whole(client: httpx.Client, outputs: list[int]) -> None:
    options = {"k": 10, "w": 10, "layout": "batched"}
    choice = ask(client, strategy="ngrammys", options=options, as_published=True)
    assert byte_ids(choice["text"]) == outputs
    assert set(drafted(choice)[1:-2]) == {100}
    assert max(drafted(ask(client, strategy="ngrammys", options=options))) < 10


def test_options_of_requests_go_with_a_named_setting(client: httpx.Client, outputs: list[int]) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    names = ["prompt_lookup", "fast", "jacobi", "ngrammys", "suffix", "llma", "trie", "autoregressive"]
    assert model["strategies"] == model["lossless_strategies"] == names
    narrow = {"window": 5, "prompt_as_reference": False}
    assert drafted(ask(client, strategy="fast", as_published=True)) == counts(by_hand("jacobi", narrow, outputs))
    choice = ask(client, strategy="fast", options={"ngram": 3}, as_published=True)
    assert drafted(choice) == counts(by_hand("jacobi", narrow | {"ngram": 3}, outputs))
    choice = ask(client, options={"num_tokens": 40}, as_published=True)  # of the default strategy
    assert drafted(choice) == counts(by_hand("prompt_lookup", {"num_tokens": 40}, outputs))


@pytest.mark.parametrize(
    ("speculation", "param", "words"),
    [
        ({"strategy": "jacobi", "options": {"windows": 5}}, "speculation.options", "did you mean 'window'"),
        ({"strategy": "jacobi", "options": {"window": 0}}, "speculation.options", "1 to 512"),
        ({"strategy": "jacobi", "options": {"window": "5"}}, "speculation.options", "type int"),
        ({"strategy": "ngrammys", "options": {"table_width": 40}}, "speculation.options", "bigram table of 40"),
        ({"options": {"copy_length": 5}}, "speculation.options", "prompt_lookup has no option"),
        ({"strategy": "fast:window=x=3"}, "speculation.options", "window"),
        ({"strategy": "sam", "options": {"max_spec_tokens": 5}}, "speculation.strategy", "not available"),
        ({"strategy": "autoregressive", "options": {"k": 5}}, "speculation.options", "no option"),
    ],
)
def test_wrong_options_are_refused_by_name(client: httpx.Client, speculation: dict[str, Any], param: str, words: str) -> None:
    answer = client.post(COMPLETIONS, json=TEXT | {"speculation": speculation})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
