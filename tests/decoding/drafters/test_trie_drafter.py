"""The compiled, implicit trie against the explicit one in plain Python, and against the published selection written naively."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.drafters.trie import TrieDrafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import SOURCES, DraftTree
from outrider.experiments.papers.ablation.frequency_trie import Draft, FrequencyTrie, Mode
from tests.helpers.drafts import chains
from tests.helpers.targets import Target, is_chain, paths

END = 2
Path = tuple[int, ...]
Weights = dict[Path, tuple[int, int]]  # by path below the root: how often in the prompt, how often in outputs
TEXT = st.lists(st.integers(0, 5), max_size=40)  # END among them
MODES: tuple[Mode, ...] = ("mix", "input", "output")


@dataclass
class Script:
    """What happened before a request asks for a draft, and what it asks with."""

    outputs: list[list[int]]  # of finished requests
    prompts: list[list[int]]  # of the same requests
    growing: list[list[list[int]]]  # outputs of live requests, emitted in turns
    prompt: list[int]
    references: list[list[int]]
    output: list[int]  # of the asking request
    public: list[list[int]] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)


OPTIONS = st.fixed_dictionaries(
    {
        "decoding_length": st.integers(1, 24),
        "branch_length": st.integers(1, 12),
        "max_query_length": st.integers(1, 4),
        "min_input": st.integers(0, 6),
        "min_output": st.integers(-1, 6),
    }
)
SCRIPTS = st.builds(
    Script,
    outputs=st.lists(TEXT, max_size=4),
    prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=4, max_size=4),
    growing=st.lists(st.lists(TEXT, max_size=3), max_size=2),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    references=st.lists(TEXT, max_size=2),
    output=TEXT,
    public=st.lists(TEXT, max_size=2),
    options=OPTIONS,
)


def request(name: str, prompt: Sequence[int], references: Sequence[Sequence[int]] = (), output: Sequence[int] = ()) -> Request:
    made = Request(name, list(prompt), SamplingParams(max_tokens=len(output) + 1000), references, tenant="local")
    made.commit(list(output))
    return made


def prepared(**options: object) -> TrieDrafter:
    """One that only looks up branches, as the explicit trie does."""
    drafter = TrieDrafter(**{"similar_requests": 0} | options)  # type: ignore[arg-type]
    drafter.prepare(Target(8, (END,)))
    return drafter


def propose(drafter: TrieDrafter, asking: Request, budget: int = 4096) -> DraftTree:
    (tree,) = drafter.propose([asking], [budget])
    tree.check()
    assert tree.tokens[0] == asking.root and len(tree) <= budget + 1
    assert all(SOURCES[source] == "trie" for source in tree.sources[1:])
    return tree


def draft(tree: DraftTree) -> Draft:
    return Draft(tree.tokens.tolist(), tree.parents.tolist())


def play(script: Script, drafter: TrieDrafter, ended_early: bool = False) -> Request:
    """Drives a drafter through a script; returns the request that asks."""
    assert drafter.histories is not None
    for number, text in enumerate(script.public):
        drafter.histories.public.extend(number, 0, text, final=True)
    for number, (prompt, output) in enumerate(zip(script.prompts, script.outputs, strict=False)):
        past = request(f"past {number}", prompt)
        propose(drafter, past)
        past.commit(output)
        drafter.finish(past)
    live = [request(f"live {number}", [number]) for number in range(len(script.growing))]
    for turn in itertools.zip_longest(*script.growing, fillvalue=[]):
        for grower, piece in zip(live, turn, strict=True):
            grower.commit(piece)
            propose(drafter, grower)
    if ended_early:
        for grower in live:
            drafter.finish(grower)
    asking = request("asking", script.prompt, script.references)
    for token in script.output:  # token by token, as without any acceptance
        propose(drafter, asking, 3)
        asking.commit([token])
    return asking


def oracle(script: Script, reach: int) -> FrequencyTrie:
    """The explicit trie of the same texts, ``reach`` tokens deep."""
    trie = FrequencyTrie([END], max_nodes=10**9, max_output_nodes=10**9)
    for text in (
        *script.outputs[:4],
        *(list(itertools.chain(*pieces)) for pieces in script.growing),
        script.output,
        *script.references,
        *script.public,
    ):
        trie.put(text, reach)
    trie.put(script.prompt, reach, "asking")
    return trie


def stages(trie: FrequencyTrie, context: Sequence[int], longest: int, depth: int, mode: Mode) -> list[Weights]:
    """What lives below the place of each end of the context, of the longest end first."""
    found = []
    for length in range(min(longest, len(context)), 0, -1):
        first, *rest = context[-length:]
        below = {
            branch.path[len(rest) :]: (int(branch.prompt), int(branch.output))
            for branch in trie.branches(first, "asking")
            if branch.path[: len(rest)] == tuple(rest) and len(rest) < len(branch.path) <= len(rest) + depth
        }
        found.append({path: pair for path, pair in below.items() if weight(pair, mode)})
    return found


def weight(pair: tuple[int, int], mode: Mode) -> int:
    prompt, output = pair
    return {"mix": 9999 * prompt + output, "input": prompt, "output": output}[mode]


def selected(new: Weights, room: int, wanted: Sequence[tuple[Mode, int]]) -> tuple[list[Path], bool]:
    """The published selection: the best by each frequency in turn. Also whether nodes of equal frequency were cut."""
    if len(new) <= room:
        return list(new), False
    chosen: list[Path] = []
    ties = False
    for by, quota in wanted:
        order = sorted((path for path in new if weight(new[path], by)), key=lambda path: (-weight(new[path], by), len(path)))
        for taken, path in enumerate(order):
            if taken == quota or len(chosen) == room:
                ties = ties or (taken > 0 and weight(new[path], by) == weight(new[order[taken - 1]], by))
                break
            if path not in chosen:
                chosen.append(path)
    return chosen, ties


def naive(found: list[Weights], size: int, depth: int, wanted: Sequence[tuple[Mode, int]]) -> tuple[set[Path], bool]:
    """What is drafted, and whether it could as well be something else."""
    drafted: list[Path] = []
    ties = False
    for below in found:
        new = {path: pair for path, pair in below.items() if path not in drafted}
        chosen, cut = selected(new, size - 1 - len(drafted), wanted)
        drafted, ties = drafted + chosen, ties or cut
        if len(drafted) + 1 == size or 1 <= len(drafted) >= depth - 1:
            break
    return set(drafted), ties


def quotas(mode: Mode, min_input: int, min_output: int) -> list[tuple[Mode, int]]:
    reserved: list[tuple[Mode, int]] = [("input", min_input), ("output", min_output)]
    return [*(reserved if mode == "mix" else []), (mode, 10**9)]


@settings(max_examples=150)
@given(SCRIPTS, st.sampled_from(MODES), st.booleans(), st.integers(1, 40))
def test_the_tree_is_the_explicit_tries(script: Script, mode: Mode, ended_early: bool, budget: int) -> None:
    options = script.options
    drafter = prepared(frequencies=mode, **options)
    asking = play(script, drafter, ended_early)
    got = paths(propose(drafter, asking, budget))
    depth, longest = options["branch_length"], options["max_query_length"]
    size = min(options["decoding_length"], budget + 1)
    min_output = max(size // 2, 1) if options["min_output"] < 0 else options["min_output"]
    trie = oracle(script, depth + longest)
    context = asking.tokens.tolist()
    assert len(set(got)) == len(got)
    assert all(len(path) == 1 or path[:-1] in got for path in got)
    found = stages(trie, context, longest, depth, mode)
    wanted = quotas(mode, options["min_input"], min_output)
    answer, ties = naive(found, size, depth, wanted)
    assert ties or set(got) == answer
    if ties:
        assert_profile(found, got, size, depth, wanted)
    explicit = trie.hierarchical(context[-longest:], size, depth, options["min_input"], min_output, mode, "asking")
    assert len(explicit.tokens) == len(got) + 1
    if len(got) + 1 < size:  # all of it fits
        rows = DraftTree(np.array(explicit.tokens), np.array(explicit.parents), np.zeros(len(got) + 1, np.int8), len(got) + 1)
        assert set(paths(rows)) == set(got)


def assert_profile(found: list[Weights], got: list[Path], size: int, depth: int, wanted: list[tuple[Mode, int]]) -> None:
    """Of nodes with equal frequencies any may be taken, but the frequencies of those taken are the best there are."""
    at = 0
    for below in found:
        new = {path: pair for path, pair in below.items() if path not in got[:at]}
        room = size - 1 - at
        rows = got[at : at + min(room, len(new))]
        assert set(rows) <= set(new) and len(rows) == min(room, len(new))
        at += len(rows)
        if len(new) > room:
            assert profile_fits(new, rows, room, wanted), (new, rows)
        if at + 1 == size or 1 <= at >= depth - 1:
            break
    assert at == len(got)


def profile_fits(new: Weights, rows: list[Path], room: int, wanted: Sequence[tuple[Mode, int]], begin: int = 0) -> bool:
    """Whether the rows from ``begin`` on, in their order, can be what the quotas took: somewhere one ends and the next begins."""

    def ordered(nodes: Iterable[Path]) -> list[int]:
        return sorted((weight(new[path], by) for path in nodes if weight(new[path], by)), reverse=True)

    (by, quota), *further = wanted
    best, left = ordered(new), ordered(path for path in new if path not in rows[:begin])
    for end in range(begin, len(rows) + 1):
        took = ordered(rows[begin:end])
        if took != left[: end - begin]:
            return False
        if not further:
            if end == len(rows):
                return True
        elif (ordered(rows[:end])[:quota] == best[:quota] or end == room) and profile_fits(new, rows, room, further, end):
            return True
    return False


@settings(max_examples=40)
@given(SCRIPTS, st.sampled_from(MODES))
def test_parallel_is_the_leaves_of_the_tree(script: Script, mode: Mode) -> None:
    both = [prepared(layout=layout, frequencies=mode, **script.options) for layout in ("hierarchical", "parallel")]
    tree, side_by_side = (propose(drafter, play(script, drafter)) for drafter in both)
    assert draft(side_by_side) == chains(draft(tree))


@settings(max_examples=80)
@given(SCRIPTS, st.sampled_from(MODES))
def test_single_follows_the_best_child(script: Script, mode: Mode) -> None:
    options = script.options
    drafter = prepared(layout="single", frequencies=mode, **options)
    asking = play(script, drafter)
    tree = propose(drafter, asking)
    assert is_chain(tree)
    depth, longest = options["branch_length"], options["max_query_length"]
    trie, context = oracle(script, depth + longest), asking.tokens.tolist()
    most, chain = min(depth, options["decoding_length"] - 1), tuple(tree.tokens[1:].tolist())
    at = 0
    for below in stages(trie, context, longest, depth, mode):
        while at < most:
            children = {path: weight(below[path], mode) for path in below if path[:-1] == chain[:at] and len(path) == at + 1}
            if not children:
                break
            at += 1
            assert children.get(chain[:at]) == max(children.values())
        if at and at + 1 >= depth // 2:
            break
    assert len(chain) == at
    explicit = trie.single(context[-longest:], options["decoding_length"], depth, mode, "asking")
    if not any(len(set(values)) < len(values) for values in siblings(trie, mode)):
        assert explicit.tokens == [asking.root, *chain]


def siblings(trie: FrequencyTrie, mode: Mode) -> list[list[int]]:
    """The weights of the children of each node."""
    families: dict[Path, list[int]] = {}
    for first in trie.firsts():
        for branch in trie.branches(first, "asking"):
            families.setdefault((first, *branch.path[:-1]), []).append(weight((int(branch.prompt), int(branch.output)), mode))
    return list(families.values())


def test_half_of_a_tree_of_any_size_is_for_outputs() -> None:
    drafter = prepared(max_query_length=1)
    for number in range(20):
        past = request(str(number), [9])
        propose(drafter, past)
        past.commit([7, 100 + number])
        drafter.finish(past)
    prompt = [token for number in range(20) for token in (7, 200 + number)]
    asking = request("r", [*prompt, 7])
    for budget in (8, 20):
        tree = propose(drafter, asking, budget)
        assert len(tree) == budget + 1 and ((tree.tokens >= 100) & (tree.tokens < 200)).sum() == (budget + 1) // 2


def test_a_quota_counts_what_an_earlier_one_took() -> None:
    drafter = prepared(max_query_length=1, min_input=2, min_output=1)
    past = request("past", [9])
    propose(drafter, past)
    past.commit([7, 3, 8, 7, 3, 8, 7, 4])
    drafter.finish(past)
    asking = request("r", [7, 3, 6, 7, 3, 6, 7, 5, 6, 7])
    # In the prompt 3 and 3 6 are the best, in the output 3: the quota of outputs is met, and the third row is the prompt's.
    assert paths(propose(drafter, asking, 3)) == [(3,), (3, 6), (3, 6, 7)]


def test_a_prompt_is_drafted_from_by_its_own_request_only_and_not_after_its_end() -> None:
    drafter = prepared()
    first, second = request("a", [5, 6, 7, 5], [[5, 8]]), request("b", [5])
    assert set(paths(propose(drafter, first))) == {(6,), (6, 7), (6, 7, 5), (8,)}
    assert paths(propose(drafter, second)) == []
    first.commit([9, 1])
    assert paths(propose(drafter, second)) == []  # not told yet
    propose(drafter, first)
    second.commit([9])
    assert paths(propose(drafter, second)) == [(1,)]
    drafter.finish(first)
    assert paths(propose(drafter, request("a", [5]))) == []  # the same name again
    assert paths(propose(drafter, request("c", [9]))) == [(1,)]
    drafter.finish(request("never proposed for", [1, 2, 3]))


def test_no_branch_crosses_an_end_token_or_the_beginning_of_the_output() -> None:
    drafter = prepared(branch_length=12)
    asking = request("r", [3, 4, END, 5, 6], [[3, 7, END, 8]])
    for output, branches in (([9, 3, END, 4], set()), ([3], {(4,), (7,)}), ([1, 5], {(6,)}), ([6], set()), ([9], {(3,)})):
        asking.commit(output)  # 9 is the output's first, 6 the prompt's last
        assert set(paths(propose(drafter, asking))) == branches
    drafter.finish(asking)
    assert paths(propose(drafter, request("later", [END]))) == []
    assert paths(propose(drafter, request("later still", [4])))[-1] == (3, 1, 5, 6, 9)
    ends = request("ends", [END] * 50_000)
    assert paths(propose(drafter, ends)) == [] and drafter._states["ends"].log.nbytes < 100_000


def test_the_latest_occurrences_count() -> None:
    drafter = prepared(max_occurrences=3, max_query_length=1)
    asking = request("r", [token for follower in range(10, 20) for token in (1, follower)] + [1])
    assert sorted(path[0] for path in paths(propose(drafter, asking)) if len(path) == 1) == [17, 18, 19]


def test_nothing_is_drafted_that_may_not_be_emitted() -> None:
    drafter = prepared()
    asking = Request("r", [1, 3, 4, 5, 6, 1], SamplingParams(max_tokens=3))
    assert paths(propose(drafter, asking)) == [(3,), (3, 4)]
    asking.commit([3, 4])
    assert paths(propose(drafter, asking)) == []


def test_many_followers_of_one_token() -> None:
    drafter = prepared(max_occurrences=1024, max_query_length=1, decoding_length=4096, branch_length=1)

    def followed(start: int) -> list[int]:
        """1024 followers after four agreeing tokens, then after two, then after one."""
        ends = ([3, 4, 5, 1], [6, 7, 5, 1], [6, 7, 8, 1])
        return [token for kind in range(3) for at in range(1024) for token in (*ends[kind], start + 1024 * kind + at)]

    for chunk in range(0, 1024 * 15, 1000):
        other = request(f"past {chunk}", [9])
        propose(drafter, other)
        other.commit(followed(20_000)[chunk : chunk + 1000])
        drafter.finish(other)
    tree = propose(drafter, request("r", [*followed(100_000), 3, 4, 5, 1]))
    assert len(tree) > 2000 and len(set(paths(tree))) == len(tree) - 1


def test_a_long_prompt_and_a_small_capacity() -> None:
    drafter = prepared(capacity=1000)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50_000, 50_000).tolist()
    asking = request("r", [*prompt, *prompt[1234:1236]])
    assert paths(propose(drafter, asking))[-1] == tuple(prompt[1236:1248])
    for number in range(40):
        past = request(str(number), [1])
        propose(drafter, past)
        past.commit(rng.integers(0, 50_000, 100).tolist())
        drafter.finish(past)
    assert drafter.nbytes < 120_000 + 8 * 50_000  # logs of the tenant and the public texts, and how often each token came
    assert paths(propose(drafter, request("last", past.output_ids[50:52].tolist())))[-1] == tuple(past.output_ids[52:64].tolist())


def test_a_prompt_of_end_tokens_takes_no_memory() -> None:
    drafter = prepared()
    asking = request("r", [END] * 50_000)
    assert paths(propose(drafter, asking)) == []
    assert drafter._states["r"].log.nbytes < 100_000


def test_token_zero_is_a_token() -> None:
    drafter = prepared()
    assert draft(propose(drafter, request("a", [5, 0, 7, 5, 0]))) == ([0, 7, 5, 0], [-1, 0, 1, 2])
    assert draft(propose(drafter, request("b", [0] * 6))).tokens == [0] * 6
