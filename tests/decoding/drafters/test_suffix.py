"""The suffix automaton against a search through all substrings, and the drafter against its rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.drafters.options import OPTIONS
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.drafters.suffix import SuffixDecodingDrafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.suffix_automaton import MAX_CLASSES, CountedAutomaton, SuffixAutomaton
from outrider.decoding.tree import SOURCES
from tests.helpers.targets import Target, is_chain

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=MAX_CLASSES)


def automaton(*texts: list[int]) -> SuffixAutomaton:
    made = SuffixAutomaton()
    for text in texts:
        made.extend(text)
    return made


def ends(text: list[int], substring: list[int]) -> list[int]:
    """Where a substring ends, counted in tokens."""
    n = len(substring)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == substring]


def request(prompt: list[int], output: list[int], references: list[list[int]] | None = None) -> Request:
    made = Request("r", prompt, SamplingParams(max_tokens=1000), references or [])
    made.commit(output)
    return made


def drafted(of: Request, budget: int = 6, **options: object) -> list[int]:
    (tree,) = build_drafter("suffix", options).propose([of], [budget])
    tree.check()
    assert tree.tokens[0] == of.root and is_chain(tree) and len(tree) - 1 <= budget
    assert all(SOURCES[source] == "suffix" for source in tree.sources[1:])
    return list(tree.tokens[1:].tolist())


def naive_draft(request: Request, count: int, occurrence: str) -> list[int]:
    """The rule, read literally: every end of the text, the longest first, in every place."""
    texts = [*(reference.tolist() for reference in request.references), request.tokens.tolist()]
    own = len(texts) - 1
    for length in range(request.num_tokens, 0, -1):
        places = [(at, end) for at, text in enumerate(texts) for end in ends(text, texts[own][-length:])][:-1]
        if not places:
            continue
        in_output = places[-1][0] == own and places[-1][1] > request.num_prompt
        latest_first = occurrence == "latest" or (occurrence == "mixed" and in_output)
        for at, end in (places[-1], places[0]) if latest_first else (places[0], places[-1]):
            if span := texts[at][end:]:
                return [span[i % len(span)] for i in range(count)] if at == own else span[:count]
    return []


@given(TEXT)
def test_match_is_the_longest_repeated_end(text: list[int]) -> None:
    made = SuffixAutomaton()
    for n, token in enumerate(text, start=1):
        made.extend([token])
        repeated = [length for length in range(1, n) if len(ends(text[:n], text[n - length : n])) > 1]
        longest = max(repeated, default=0)
        assert made.length[made.match] == longest
        if longest:
            *earlier, _ = ends(text[:n], text[n - longest : n])
            assert (made.first_end[made.match], made.last_end[made.match]) == (earlier[0], earlier[-1])
    assert len(made.length) <= max(2 * len(text), 2)  # the bound on states


@given(TEXT, st.integers(0, MAX_CLASSES))
def test_how_a_text_is_cut_into_calls_does_not_matter(text: list[int], cut: int) -> None:
    whole, parts = automaton(text), automaton(text[:cut], text[cut:])
    assert (whole.text, whole.link, whole.length, whole.first_end, whole.last_end) == (
        (parts.text, parts.link, parts.length, parts.first_end, parts.last_end)
    )


def test_long_runs_match_in_full() -> None:
    made = automaton([5] * 300)
    assert made.length[made.match] == 299 and made.last_end[made.match] == 299
    made.extend([6, *[5] * 10])
    assert made.length[made.match] == 10 and made.text[made.last_end[made.match] - 10 :][:10] == [5] * 10


@given(TEXT, TEXT, st.lists(TEXT, max_size=3), st.integers(1, 9), st.sampled_from(OPTIONS["suffix"]["occurrence"].choices))
def test_drafter_is_the_naive_rule(
    prompt: list[int], output: list[int], references: list[list[int]], budget: int, occurrence: str
) -> None:
    growing = request(prompt[:16], output[:1], [reference[:10] for reference in references])
    options = {"max_spec_factor": 0.0, "max_spec_offset": 9.0, "occurrence": occurrence}
    drafter = build_drafter("suffix", options)
    for token in output[1:16]:
        (tree,) = drafter.propose([growing], [budget])
        assert tree.tokens[1:].tolist() == naive_draft(growing, budget, occurrence)
        growing.commit([token])


def test_draft_length_follows_match_length() -> None:
    text = request([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3])
    assert len(drafted(text, 99)) == 16  # 4 * 3 + 4
    assert drafted(text, 99, max_spec_factor=1.0, max_spec_offset=0.0) == [4, 5, 6]
    assert drafted(text, 99, max_spec_factor=1.0, max_spec_offset=-1.5) == [4]
    assert drafted(text, 99, max_spec_factor=1.0, max_spec_offset=-3.0) == []
    assert drafted(text, 99, max_spec_tokens=2) == drafted(text, 2) == [4, 5]
    assert drafted(text, 0) == []
    assert drafted(text, 99, min_match_length=4) == []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=50), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(2, 6)
)
def test_runs_are_counted_up_to_a_depth(text: list[int], context: list[int], depth: int) -> None:
    made = CountedAutomaton(depth)
    for token in text:
        made.extend([token])
    for asked, of in ((None, text), (context, context)):
        longest = 0
        for state, most, fewest in made.ends(asked):
            longest = max(longest, most)
            for length in range(fewest, most + 1):
                run = of[-length:]
                assert made.count[state] == len(ends(text, run))
                following = {token: made.count[follower] for token, follower in made.following(state)}
                for token in range(3) if length < depth else ():
                    assert following.get(token, 0) == len(ends(text, [*run, token]))
        assert longest == max((n for n in range(1, depth + 1) if n <= len(of) and ends(text, of[-n:])), default=0)


def suffix_decoding(of: Request, budget: int = 20, **options: object) -> list[tuple[int, int]]:
    """(token, parent) of the rows that are drafted."""
    (tree,) = build_drafter("suffix_decoding", options).propose([of], [budget])
    tree.check()
    return list(zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True))


def test_the_likeliest_tokens_are_drafted_as_a_tree() -> None:
    asked = request([1, 2, 3, 1, 2, 4], [1, 2])
    assert sorted(suffix_decoding(asked)) == [(3, 0), (4, 0)]  # 1/3 each: the end that is asked for stands there, too
    assert suffix_decoding(asked, min_token_prob=0.4) == [] and suffix_decoding(asked, budget=0) == []
    assert suffix_decoding(asked, budget=1) in ([(3, 0)], [(4, 0)])
    assert len(suffix_decoding(asked, max_spec_offset=2.0)) == 4
    frequent = request([1, 2, 3, 1, 2, 3, 1, 2, 4], [1, 2])
    assert suffix_decoding(frequent)[0] == (3, 0) and suffix_decoding(frequent, max_spec_factor=0.5) == [(3, 0)]
    longer = request([7, 1, 2, 3, 4, 5, 9, 2, 6, 9, 2, 6], [7, 1, 2])
    assert suffix_decoding(longer) == [(3, 0), (4, 1), (5, 2)]  # three rows of 1/2, where 2 alone has one of 2/5
    said = list(range(1, 60))
    assert len(suffix_decoding(request([*said, 0], said[:40]), budget=64, max_tree_depth=30)) == 15  # room for a draft
    assert suffix_decoding(request([5, 1], [1, 2], [[1, 2], [1, 2]])) == []  # no tree reaches across texts


def test_outputs_of_a_tenant_are_drafted_from_and_forgotten_by_halves() -> None:
    drafter = SuffixDecodingDrafter(capacity=24)

    def said(name: str, tenant: str | None, output: list[int]) -> list[int]:
        asked = Request(name, [99], SamplingParams(max_tokens=100), tenant=tenant)
        asked.commit(output[:2])
        (tree,) = drafter.propose([asked], [8])
        asked.commit(output[2:])
        drafter.finish(asked)
        return list(tree.tokens[1:].tolist())

    assert said("one", "a", [1, 2, 3, 4]) == []
    assert said("two", "b", [1, 2, 3]) == said("three", None, [1, 2, 3]) == []
    assert said("four", "a", [1, 2, 3, 4]) == [3, 4]
    for number in range(3):
        assert said(f"more {number}", "a", list(range(10 * number + 100, 10 * number + 108))) == []
    assert said("five", "a", [1, 2, 3, 4]) == []
    assert not drafter.tracked_requests()


def test_sam_copies_long_matches_and_leaves_the_rest_to_recycling() -> None:
    drafter = build_drafter("sam", {})
    drafter.prepare(Target(20))
    long, short = (Request(name, [1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=100)) for name in ("long", "short"))
    long.commit([1, 2, 3, 4, 5])
    short.commit([2, 3, 4, 5])
    trees = drafter.propose([long, short], [30, 30])
    assert trees[0].tokens[1:3].tolist() == [6, 7] and is_chain(trees[0]) and len(trees[1]) == 1  # nothing is ranked yet
    assert {*drafter.tracked_requests()} == {"long", "short"}
    drafter.finish(long)
    drafter.finish(short)
    assert not drafter.tracked_requests()


def test_automaton_worked_example() -> None:
    made = automaton([1, 2, 3, 1, 2])
    assert (made.length[made.match], made.last_end[made.match], made.text[2]) == (2, 2, 3)
    assert automaton().match == automaton([1]).match == automaton([1, 2]).match == 0


def test_first_and_last_occurrence_differ() -> None:
    made = automaton([1, 2, 8, 1, 2, 9, 1, 2])
    assert (made.length[made.match], made.first_end[made.match], made.last_end[made.match]) == (2, 2, 5)


def test_drafter_worked_example() -> None:
    assert drafted(request([1, 2, 4], [5, 1, 2], [[7, 1, 2, 3]])) == [3]
    assert drafted(request([1, 2, 4], [5, 1, 2, 6, 1, 2], [[7, 1, 2, 3]])) == [6, 1, 2, 6, 1, 2]
    assert drafted(request([1, 2], [3])) == []


def test_occurrences() -> None:
    text = request([1, 5, 1, 6], [1], [[1, 7], [1, 8]])
    assert [drafted(text, 1, occurrence=which) for which in ("mixed", "latest", "earliest")] == [[7], [6], [7]]
    text.commit([9, 1])
    assert [drafted(text, 1, occurrence=which) for which in ("mixed", "latest", "earliest")] == [[9], [9], [7]]
    assert drafted(request([9], [1], [[8, 1], [1, 6]])) == [6]  # nothing follows the first
    assert drafted(request([9], [1], [[8, 1], [7, 1]])) == []


def test_no_match_reaches_across_references() -> None:
    # 3 ends the first reference and 4 begins the second: after 3 4 only the 4 may match.
    assert drafted(request([9], [3, 4], [[2, 3], [4, 8], [5, 4, 7]])) == [8]


def test_periods_are_drafted_in_full() -> None:
    assert drafted(request([1, 2, 3, 1], [2]), 7) == [3, 1, 2, 3, 1, 2, 3]
    assert drafted(request([5], [5, 5]), 4) == [5, 5, 5, 5]


def test_a_longer_end_wins_where_its_tree_scores_more() -> None:
    asked = request([7, 1, 2, 3, 4, 5, 9, 2, 6, 9, 2, 6], [7, 1, 2])
    assert suffix_decoding(asked) == [(3, 0), (4, 1), (5, 2)]  # three rows of 1/2, where 2 alone has one of 2/5


def test_a_match_leaves_room_for_its_draft() -> None:
    said = list(range(1, 60))
    assert len(suffix_decoding(request([*said, 0], said[:40]), budget=64, max_tree_depth=30)) == 15


def test_no_tree_reaches_across_texts() -> None:
    asked = request([5, 1], [1, 2], [[1, 2], [1, 2]])
    assert suffix_decoding(asked) == []
