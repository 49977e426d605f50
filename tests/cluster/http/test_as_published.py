"""Options and ``as_published`` in requests: the real application drafts the published rows where only one row pays."""

from __future__ import annotations

from collections.abc import Iterator
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
from outrider.decoding.verify.exact import verify_exact
from outrider.engine.target import LocalTarget
from tests.cluster.circle import COMPLETIONS, TEXT, TOKENIZER, byte_ids, client_of, local_engine, read_stream
from tests.helpers.targets import Target

STEEP = LatencyCurve((1, 512), (0.01, 5.12), 0, 0.0, 0.0)  # each row takes as long as a step
JACOBI = {"window": 15, "ngram": 5, "guesses": 15, "prompt_as_reference": False}
TOKENS = 80
OFFERED = ("fast = jacobi:window=5,prompt_as_reference=false", "jacobi", "ngrammys", "suffix")


@pytest.fixture(scope="module")
def client(circle_model: Path) -> Iterator[httpx.Client]:
    """A client of a server whose default is plain lookup and which makes room for trees of 512 rows."""
    speculation = SpeculationOptions("prompt_lookup", strategies=OFFERED, largest_tree=512, max_settings=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTarget, "latency", lambda self: STEEP)
        with (
            local_engine(circle_model, speculation, max_model_len=1024) as engine,
            client_of(Service(engine, TOKENIZER, TenancyOptions())) as http,
        ):
            yield http


def ask(client: httpx.Client, **speculation: Any) -> dict[str, Any]:
    """Return the choice of a greedy completion, with its report."""
    body = TEXT | {"max_tokens": TOKENS, "ignore_eos": True, "seed": 1, "speculation": {"report": True, **speculation}}
    choice: dict[str, Any] = client.post(COMPLETIONS, json=body).raise_for_status().json()["choices"][0]
    return choice


def drafted(choice: dict[str, Any]) -> list[int]:
    return [step["drafted"] for step in choice["speculation"]["steps"]]


def by_hand(strategy: str, options: dict[str, Any], outputs: list[int]) -> list[int]:
    """Return the candidates of each step of a published drafter without a row budget, whose output is known."""
    drafter = build_drafter(strategy, options)
    request = Request("r", byte_ids("<"), SamplingParams(TOKENS, seed=1, ignore_eos=True))
    after = dict(zip([*byte_ids("<"), *outputs[:-1]], outputs, strict=True))  # the last token alone decides the next
    drafter.prepare(Target(len(TOKENIZER), (0,)))
    counts = [0]
    request.commit(outputs[:1])  # the prefill has no draft
    while request.remaining:
        (tree,) = drafter.propose([request], [512 if request.remaining > 1 else 0])
        tree = tree.clipped(513, request.remaining - 1, len(TOKENIZER))
        ids = np.array([after.get(int(token), -1) for token in tree.tokens], np.int32)
        acceptance = verify_exact(tree, lambda row, ids=ids: int(ids[row]), request.remaining, frozenset())
        request.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
        counts.append(tree.num_candidates - 1)
        if request.remaining:
            drafter.observe(request, tree, TargetRows(ids, None), acceptance)
    return counts


@pytest.fixture(scope="module")
def outputs(client: httpx.Client) -> list[int]:
    """The tokens of the completion by plain decoding."""
    return byte_ids(ask(client, strategy="autoregressive")["text"])


def test_jacobi_drafts_the_published_candidates_step_by_step(client: httpx.Client, outputs: list[int]) -> None:
    choice = ask(client, strategy="jacobi", options=JACOBI, as_published=True)
    assert byte_ids(choice["text"]) == outputs
    assert drafted(choice) == by_hand("jacobi", JACOBI, outputs)
    assert len(drafted(choice)) < TOKENS / 1.5  # more than one token a step, without n-grams of the prompt
    assert "cut" not in choice["speculation"]


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
    names = ["prompt_lookup", "fast", "jacobi", "ngrammys", "suffix", "autoregressive"]
    assert model["strategies"] == model["lossless_strategies"] == names
    narrow = {"window": 5, "prompt_as_reference": False}
    assert drafted(ask(client, strategy="fast", as_published=True)) == by_hand("jacobi", narrow, outputs)
    choice = ask(client, strategy="fast", options={"ngram": 3}, as_published=True)
    assert drafted(choice) == by_hand("jacobi", narrow | {"ngram": 3}, outputs)
    choice = ask(client, options={"num_tokens": 40}, as_published=True)  # of the default strategy
    assert drafted(choice) == by_hand("prompt_lookup", {"num_tokens": 40}, outputs)


@pytest.mark.parametrize(
    ("speculation", "param", "words"),
    [
        ({"strategy": "jacobi", "options": {"windows": 5}}, "speculation.options", "did you mean 'window'"),
        ({"strategy": "jacobi", "options": {"window": 0}}, "speculation.options", "1 to 512"),
        ({"strategy": "jacobi", "options": {"window": "5"}}, "speculation.options", "type int"),
        ({"strategy": "ngrammys", "options": {"table_width": 40}}, "speculation.options", "bigram table of 40"),
        ({"options": {"copy_length": 5}}, "speculation.options", "prompt_lookup has no option"),
        ({"strategy": "fast:window=x=3"}, "speculation.options", "window"),
        ({"strategy": "trie", "options": {"branch_length": 5}}, "speculation.strategy", "not available"),
        ({"strategy": "autoregressive", "options": {"k": 5}}, "speculation.options", "no option"),
    ],
)
def test_wrong_options_are_refused_by_name(client: httpx.Client, speculation: dict[str, Any], param: str, words: str) -> None:
    answer = client.post(COMPLETIONS, json=TEXT | {"speculation": speculation})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
