"""The ablation of the trie from end to end on few texts, and the published trie without each of its parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from decoding.replay import KnownText, replay_workload
from experiments.explicit_trie import ExplicitTrieDrafter, TrieParts, count_nodes, trie_bytes
from experiments.frequency_trie import FrequencyTrie
from experiments.trie_ablation import PARTS, main, tokens_for
from experiments.trie_ablation_tables import FULL, PAPER_CAPACITIES, PAPER_PARTS, add_ratios

PHRASE = list(range(1, 10))
EVERYTHING = TrieParts()


def known(prompt: Sequence[int], output: Sequence[int]) -> KnownText:
    return KnownText("", np.asarray(prompt, np.int32), (), np.asarray(output, np.int32))


def steps(drafter: ExplicitTrieDrafter, *texts: KnownText) -> int:
    """Of a replay. Outputs here repeat nothing of themselves: without help a step emits one token."""
    return replay_workload(texts, lambda: drafter, 15, 1000, lambda: 0.0).steps


def contents(trie: FrequencyTrie) -> dict[int, list[tuple[tuple[int, ...], float]]]:
    return {first: [(branch.path, branch.output) for branch in trie.branches(first)] for first in trie.firsts()}


def test_a_prompt_is_drafted_from_unless_its_branches_are_left_out() -> None:
    copied = known([*PHRASE, 99], [2, *PHRASE[2:], 0])
    assert steps(ExplicitTrieDrafter(EVERYTHING), copied) == 2  # the prefill, then the phrase with the end after it
    assert steps(ExplicitTrieDrafter(replace(EVERYTHING, prompts=False)), copied) == len(copied.output_ids)


def test_an_earlier_output_is_drafted_from_unless_output_branches_are_left_out() -> None:
    first, again = known([50], PHRASE), known([60], PHRASE)
    alone = len(PHRASE)
    assert steps(ExplicitTrieDrafter(EVERYTHING), first, again) == alone + 2
    assert steps(ExplicitTrieDrafter(replace(EVERYTHING, outputs=False)), first, again) == 2 * alone


def test_an_earlier_prompt_is_drafted_from_only_without_elimination() -> None:
    first, later = known(PHRASE, range(50, 60)), known([60], PHRASE)
    assert steps(ExplicitTrieDrafter(EVERYTHING), first, later) == 10 + len(PHRASE)
    assert steps(ExplicitTrieDrafter(replace(EVERYTHING, elimination=False)), first, later) == 10 + 2


def test_pruning_keeps_what_is_frequent_and_follows_the_capacity() -> None:
    outputs = [[7, 8, 100 + number] for number in range(20)]
    texts = [known([5], output) for output in outputs]

    def left(parts: TrieParts) -> tuple[int, set[tuple[int, ...]]]:
        drafter = ExplicitTrieDrafter(parts, decoding_length=4, prune_after=1)
        steps(drafter, *texts)
        return count_nodes(drafter.trie)[1], {branch.path for branch in drafter.trie.branches(7)}

    unpruned, small, large = (left(parts) for parts in (TrieParts(pruning=False), TrieParts(capacity=1), TrieParts(capacity=8)))
    assert unpruned[0] == large[0] == 1 + 20 + 20  # below 7: 8 and what follows it; below 8: the same
    assert small[0] < 12 and (8,) in small[1]


def test_warming_inserts_what_the_end_of_a_request_leaves() -> None:
    outputs = [[1, 2, 3, 1, 2, 4], [2, 3], list(range(20))]
    warmed, replayed = ExplicitTrieDrafter(EVERYTHING), ExplicitTrieDrafter(replace(EVERYTHING, prompts=False))
    warmed.warm([np.asarray(output, np.int32) for output in outputs])
    steps(replayed, *(known([300 + number], output) for number, output in enumerate(outputs)))
    assert contents(warmed.trie) == contents(replayed.trie) != {}


def test_nodes_and_bytes_are_of_the_whole_trie() -> None:
    small, large = ExplicitTrieDrafter(EVERYTHING), ExplicitTrieDrafter(EVERYTHING)
    small.warm([np.arange(50, dtype=np.int32)])
    large.warm([np.arange(500, dtype=np.int32)])
    for trie in (small.trie, large.trie):
        assert count_nodes(trie) == (sum(1 for first in trie.firsts() for _ in trie.branches(first)),) * 2
    assert 8 < trie_bytes(large.trie) / trie_bytes(small.trie) < 14
    assert trie_bytes(large.trie) > 100 * count_nodes(large.trie)[0]


def test_ratios_are_to_the_full_method_and_time_counts_the_forward() -> None:
    rows: list[dict[str, float]] = [{"tokens_per_step": 1.9, "us_per_step": micros} for micros in (900.0, 7100.0)]
    add_ratios(rows, rows[0])
    assert [row["ratio"] for row in rows] == [1.0, 1.0] and rows[0]["ratio_in_time"] == 1.0
    assert rows[1]["ratio_in_time"] == pytest.approx(0.763, abs=0.001)
    assert tokens_for(400_000) == 32_768 and tokens_for(0) == 128


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two files of answers that begin alike, and one of answers that came before."""

    def record(number: int) -> str:
        answer = f"To get to place {number * 37 % 50} you take the second road after the old mill, then ask for Nr. {number * 7}."
        return json.dumps({"prompt": f"Where is place {number * 37 % 50}?", "output": answer, "references": [answer]}) + "\n"

    made = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "train.jsonl"
    for at, path in enumerate(made):
        path.write_text("".join(record(10 * at + number) for number in range(6)))
    return made


def test_writes_all_conditions_of_both_tries_and_a_figure(
    tiny_model: Path, files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, train = map(str, files)
    out = tmp_path / "out"
    options = ["--domain", "both", first, second, "--warm", "both", train, "--records", "4", "--output-dir", str(out)]
    assert main([second, *options, "--tokenizer", str(tiny_model)]) == 0
    said = capsys.readouterr()
    (record,), (picture,) = out.glob("*.json"), out.glob("*.svg")
    results = json.loads(record.read_text())["results"]
    assert results["workloads"].keys() == {"b", "both"} and ElementTree.parse(picture).getroot().tag.endswith("svg")
    both = results["workloads"]["both"]
    assert (both["records"], both["warm_records"]) == (4, 6 + 4)
    assert both["parts"]["explicit"].keys() == PARTS.keys() == PAPER_PARTS.keys()
    assert both["parts"]["compiled"].keys() == set(PARTS) - {"without pruning", "without elimination"}
    for trie in ("explicit", "compiled"):
        rows, capacities = both["parts"][trie], both["capacity"][trie]
        assert list(capacities) == [str(capacity) for capacity in PAPER_CAPACITIES]
        assert rows[FULL]["ratio"] == 1.0 and rows[FULL]["tokens_per_step"] > 1.5
        assert rows["without output branches"]["ratio"] < 0.9  # what answers share is in no prompt, and references are left out
        for row in (*rows.values(), *capacities.values()):
            assert row["steps"] > 0 and row["us_per_step"] > 0 and row["mib"] > 0
    assert both["capacity"]["explicit"]["16"]["tokens_per_step"] == both["parts"]["explicit"][FULL]["tokens_per_step"]
    assert results["mean_ratio"]["parts"]["explicit"][FULL] == {"ratio": 1.0, "ratio_in_time": 1.0}
    assert results["paper"]["parts"]["without pruning"] == {"tokens_per_s": 221.4, "ratio": 0.7882}
    assert "paper tok/s" in said.out and "capacity 128x" in said.out and record.name in said.out
    assert said.err.count("both, explicit") == len(PARTS) + len(PAPER_CAPACITIES)


def test_what_cannot_be_measured_is_one_line(
    tiny_model: Path, files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ["--tokenizer", str(tiny_model)]
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "Say it.", "output": ""}\n')
    for path, said in ((tmp_path / "none.jsonl", "none.jsonl"), (short, "workload short: no output is long enough")):
        assert main([str(path), *tokenizer]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error
    for wrong, said in (
        ([str(files[0]), "--warm", "c", str(files[2])], "--warm c: no such workload; there are a"),
        ([], "--domain NAME FILE"),
        ([str(files[0]), "--warm-share", "1"], "--warm-share"),
        ([str(files[0]), "--records", "0"], "--records"),
    ):
        with pytest.raises(SystemExit):
            main([*wrong, *tokenizer])
        assert said in capsys.readouterr().err
