"""Which text a drafted token is said to come from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.decoding.budget.attribution import origins, step_report
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.history import Histories
from outrider.decoding.tree import SOURCES, DraftTree

PARAMS = SamplingParams(max_tokens=64)


def asked(prompt: Sequence[int], output: Sequence[int], *documents: Sequence[int], tenant: str | None = "t") -> Request:
    request = Request("a", prompt, PARAMS, documents, tenant=tenant, report=True)
    request.commit(output)
    return request


def said(request: Request, accepted: Sequence[int], drafter: str = "copy", memory: Histories | None = None) -> list[str]:
    tree = DraftTree.chain(request.root, accepted, SOURCES.index(drafter))
    return origins(request, tree, range(1, len(accepted) + 1), memory)


def test_a_copy_goes_on_where_it_was_until_the_text_has_something_else() -> None:
    request = asked([8, 5, 6, 9], [4], [4, 5, 6, 7])
    assert said(request, [5, 6, 9]) == ["document", "document", "prompt"]


@pytest.mark.parametrize("drafter", ["copy", "suffix", "trie"])
def test_the_text_that_agrees_longest_is_told_and_of_equals_the_first(drafter: str) -> None:
    assert said(asked([1, 2, 3, 9], [7, 2], [5, 2, 3]), [3], drafter) == ["document"]
    assert said(asked([7, 2, 3, 9], [7, 2], [5, 2, 3]), [3], drafter) == ["prompt"]
    assert said(asked([7, 2, 3, 9], [1, 7, 2, 3, 1, 7, 2], [5, 2, 3]), [3, 1], drafter) == ["output", "output"]


def test_the_prompt_and_the_output_are_one_text() -> None:
    # 1 2 stands in the prompt, and what follows runs into the output.
    assert said(asked([1, 2, 3], [4, 5, 1, 2]), [3, 4, 5], "prompt_lookup") == ["prompt", "output", "output"]
    assert said(asked([3], [1, 2, 1, 2]), [1, 2, 1], "context_ngram") == ["output"] * 3


def test_llma_copies_from_its_output_only_what_stands_nowhere_else() -> None:
    request = asked([2, 3], [9, 8, 2, 3, 7, 9, 8, 2])
    assert said(request, [3], "llma") == ["prompt"] and said(request, [3], "copy") == ["output"]
    assert said(request, [3, 7], "llma") == ["prompt", "output"]


def test_past_outputs_are_the_tenants_or_everyones_and_not_the_requests_own() -> None:
    memory = Histories(1024)
    tenant = memory.of("t")
    assert tenant is not None
    tenant.log.add([1, 2, 3, 4])
    request = asked([9], [1, 2])
    tenant.start(request.text)
    tenant.extend(request.text, 0, [1, 2, 3, 3])  # as if it had been told more than was emitted
    memory.public.log.add([2, 3, 4, 6])
    assert said(request, [3, 4, 6], "history", memory) == ["trie", "trie", "public"]
    assert said(request, [3, 3], "history", memory)[0] == "trie"
    assert said(asked([9], [1, 2], tenant=None), [3, 4], "history", memory) == ["public", "public"]
    assert said(asked([9], [2]), [3], "trie", memory) == ["trie"]
    assert said(asked([2, 3], [2]), [3], "trie", memory) == ["prompt"]
    assert said(asked([9], [5]), [7], "history", memory) == ["trie"]  # its text is gone by now
    assert said(asked([9], [8], tenant="other"), [8], "history", memory) == ["public"]  # where else


def test_past_outputs_count_where_they_agree_longer_than_the_requests_own_texts() -> None:
    memory = Histories(1024)
    memory.of("t").log.add([1, 2, 3, 4])  # type: ignore[union-attr]
    assert said(asked([7, 2, 3], [1, 2]), [3], "trie", memory) == ["trie"]
    assert said(asked([7, 2, 3], [7, 2]), [3], "trie", memory) == ["prompt"]
    assert said(asked([7, 2, 3], [2]), [3], "trie", memory) == ["prompt"]  # of equals the request's own


@pytest.mark.parametrize("drafter", ["jacobi", "recycling", "bigram", "unigram", "draft_model", "grammar"])
def test_a_drafter_that_copies_nothing_is_told_itself(drafter: str) -> None:
    assert said(asked([1, 2], [1], [1, 2]), [2, 1], drafter) == [drafter, drafter]


def test_a_report_tells_of_every_token_that_is_emitted() -> None:
    request = asked([1, 2, 3], [1])
    tree = DraftTree.chain(1, [2, 3, 9, 9], SOURCES.index("copy"))
    whole = step_report(request, tree, (1, 2), ["b", "c", "d"], None)
    assert (whole.sources, whole.pieces) == (("prompt", "prompt", "model"), ("b", "c", "d"))
    assert (whole.drafted, whole.accepted) == (4, 2)
    ended = step_report(request, tree, (1, 2), ["b", "c"], None)  # by a stop string, before the bonus token
    assert (ended.sources, ended.accepted) == (("prompt", "prompt"), 2)
    first = step_report(request, DraftTree.chain(1, ()), (), ["b"], None)
    assert (first.sources, first.drafted, first.accepted) == (("model",), 0, 0)
