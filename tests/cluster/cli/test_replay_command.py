"""``outrider replay`` as a user runs it, and the option ``--strategy``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.cluster.cli.generate.strategy_option import chosen_strategies, parse_strategy
from outrider.decoding.drafters.autoregressive import AutoregressiveDrafter
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.registry import STRATEGIES
from tests.cluster.commands import Finished, error_line, outrider
from tests.helpers.models import END, llama_config, save_model

TEXT = "The quick brown fox jumps over the lazy dog. "
RECORDS: list[dict[str, Any]] = [
    {"id": "copy", "prompt": TEXT, "output": TEXT * 3},
    {"id": "doc", "prompt": "Who?", "references": [TEXT], "output": "The lazy dog, and the quick brown fox jumps over it."},
    {"id": "empty", "prompt": "Nothing", "output": ""},
]


class Listener(AutoregressiveDrafter):
    """A strategy that known outputs cannot drive."""

    needs_logits = True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(Path(tmp_path_factory.mktemp("model")), llama_config())


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return write(tmp_path / "words.jsonl", RECORDS)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(STRATEGIES, "listener", Listener)
    return "listener"


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run(*arguments: object, code: int = 0) -> Finished:
    result = outrider("replay", *arguments)
    assert result.returncode == code, result
    if code:
        assert error_line(result, code) == result.stderr.strip() and result.stdout == ""
    return result


def test_more_ranks_draft_more_branches(tokenizer: Path, tmp_path: Path) -> None:
    output = "The lazy dog jumps over the quick fox. The quick brown fox and the lazy dog jumps over the fox."
    others = ["The dog and the fox.", "The quick brown dog jumps over the lazy fox.", "The lazy dog jumps over the quick fox."]
    workload = write(tmp_path / "ranks.jsonl", [{"prompt": TEXT, "references": others, "output": output}])
    results = [
        json.loads(run(workload, "--tokenizer", tokenizer, "--strategy", "llma", "--world-size", ranks, "--json").stdout)
        for ranks in (1, 2, 4)
    ]
    assert [result["world_size"] for result in results] == [1, 2, 4]
    rows = [result["results"][0] for result in results]
    assert rows[0]["drafted_per_step"] < rows[1]["drafted_per_step"] < rows[2]["drafted_per_step"]
    assert rows[0]["steps"] >= rows[1]["steps"] >= rows[2]["steps"] and rows[0]["steps"] > rows[2]["steps"]
    refused = outrider("replay", workload, "--tokenizer", tokenizer, "--world-size", 0)
    assert refused.returncode == 2 and "--world-size" in refused.stderr


def test_json_has_a_row_for_each_strategy_and_workload(tokenizer: Path, workload: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", RECORDS[:1])
    strategies = ("autoregressive", "llma:copy_length=3,include_prompt=false", "llma")
    options = [part for name in strategies for part in ("--strategy", name)]
    result = json.loads(run(workload, other, "--tokenizer", tokenizer, *options, "--json").stdout)
    rows = result["results"]
    assert [(row["workload"], row["strategy"]) for row in rows] == [(w, s) for w in ("words", "other") for s in strategies]
    own = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    tokens = sum(len(own.encode(record["output"])) + 1 for record in RECORDS)
    for row in rows[:3]:
        assert (row["records"], row["tokens"]) == (3, tokens)
        assert row["tokens_per_step"] == pytest.approx(tokens / row["steps"], abs=1e-4)
        assert row["accepted"] == tokens - row["steps"] == sum(row["accepted_by_source"].values())
        assert row["propose_us"]["p99"] >= row["propose_us"]["p50"] > 0
    plain, documents, everything = rows[:3]
    assert (plain["steps"], plain["drafted_per_step"]) == (tokens, 0.0)
    assert plain["steps"] > documents["steps"] > everything["steps"]
    mean = (rows[2]["tokens_per_step"] + rows[5]["tokens_per_step"]) / 2
    assert result["mean_tokens_per_step"]["llma"] == pytest.approx(mean, abs=1e-3)
    assert (result["budget"], result["max_tokens"], result["keep_history"], result["skipped"]) == (64, None, True, [])


def test_a_budget_below_the_options_is_named(tokenizer: Path, workload: Path) -> None:
    arguments = (workload, "--tokenizer", tokenizer, "--strategy", "trie:decoding_length=128", "--json")
    assert run(*arguments).stderr.count("trie:decoding_length=128: 127 rows a step wanted, at most 64 drafted: --budget") == 1
    assert "wanted" not in run(*arguments, "--as-published").stderr


def test_outputs_can_be_cut_and_records_left_out(tokenizer: Path, workload: Path) -> None:
    arguments = (workload, "--tokenizer", tokenizer, "--strategy", "autoregressive", "--json")
    row = json.loads(run(*arguments, "--max-tokens", 4, "--cold").stdout)["results"][0]
    assert (row["tokens"], row["steps"]) == (9, 9)  # 4 of each of two, and the end token of the third
    assert json.loads(run(*arguments, "--limit", 1).stdout)["results"][0]["records"] == 1


def test_history_helps_only_where_it_is_kept(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Drafter] = []

    def make() -> Drafter:
        made.append(AutoregressiveDrafter())
        return made[-1]

    monkeypatch.setitem(STRATEGIES, "counted", make)
    workload = write(tmp_path / "twice.jsonl", [RECORDS[0], RECORDS[0]])
    run(workload, "--tokenizer", tokenizer, "--strategy", "counted", "--json")
    kept = len(made)
    run(workload, "--tokenizer", tokenizer, "--strategy", "counted", "--json", "--cold")
    assert len(made) - kept == kept + 1


def test_strategies_that_need_logits_are_skipped_or_refused(tokenizer: Path, workload: Path, listener: str) -> None:
    both = run(workload, "--tokenizer", tokenizer, "--strategy", listener, "--strategy", "llma", "--json")
    result = json.loads(both.stdout)
    assert result["skipped"] == [listener] and [row["strategy"] for row in result["results"]] == ["llma"]
    assert "listener is skipped: listener drafts from the target's logits" in both.stderr
    assert "listener cannot be replayed" in run(workload, "--tokenizer", tokenizer, "--strategy", listener, code=2).stderr


def test_bad_strategies_are_one_line(tokenizer: Path, workload: Path) -> None:
    for strategy, message in (
        ("llam", "'llma'"), ("llma:copy_lenght=3", "'copy_length'"), ("llma:copy_length=0", "1 to 4096"),
        ("llma:copy_length=three", "int"), ("llma:copy_length", "option=value"),
    ):  # fmt: skip
        assert message in run(workload, "--tokenizer", tokenizer, "--strategy", strategy, code=2).stderr


def test_bad_files_are_one_line(tokenizer: Path, workload: Path, tmp_path: Path) -> None:
    silent = write(tmp_path / "silent.jsonl", [RECORDS[0], {"id": "x", "prompt": "p"}])
    assert "record 2 (x) has no string `output`" in run(silent, "--tokenizer", tokenizer, code=2).stderr
    wrong = write(tmp_path / "wrong.jsonl", [{"prompt": "p", "output": 7}])
    assert "wrong.jsonl:1: `output` must be a string" in run(wrong, "--tokenizer", tokenizer, code=2).stderr
    blank = write(tmp_path / "blank.jsonl", [{"id": "b", "prompt": "", "output": "x"}])
    assert "record b: the prompt holds no token" in run(blank, "--tokenizer", tokenizer, code=2).stderr
    assert "could not be read" in run(tmp_path / "absent.jsonl", "--tokenizer", tokenizer, code=2).stderr
    assert "has no tokenizer.json" in run(workload, "--tokenizer", tmp_path, code=2).stderr
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json could not be read" in run(workload, "--tokenizer", tmp_path, code=2).stderr


def test_options_are_json_values_or_strings() -> None:
    choice = parse_strategy('s:a=3, b=false,c=word,d=[1,2],e="x,y"')
    assert (choice.name, choice.options) == ("s", {"a": 3, "b": False, "c": "word", "d": [1, 2], "e": "x,y"})
    assert parse_strategy("s:").options == parse_strategy("s").options == {}
    assert [choice.name for choice in chosen_strategies(None)] == list(STRATEGIES)
    with pytest.raises(ValueError, match="--strategy llma was given twice"):
        chosen_strategies(["llma", "llma"])


def test_texts_end_with_the_end_token_or_an_id_of_their_own(tokenizer: Path, workload: Path, tmp_path: Path) -> None:
    cutter = TextTokenizer(tokenizer)
    own = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    texts = read_known_texts(workload, cutter, None)
    assert cutter.end_token_id == own.convert_tokens_to_ids(END) and cutter.vocab_size == len(own)
    assert texts[1].output_ids.tolist() == [*own.encode(RECORDS[1]["output"]), cutter.end_token_id]
    assert texts[1].references[0].tolist() == own.encode(TEXT)
    assert texts[2].output_ids.tolist() == [cutter.end_token_id]
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    nameless = TextTokenizer(tmp_path)
    assert (nameless.end_token_id, nameless.vocab_size) == (len(own), len(own) + 1)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(PromptFileError, match=r"tokenizer_config\.json could not be read"):
        TextTokenizer(tmp_path)


def test_the_tokenizer_of_a_gguf_file_is_as_good(tokenizer: Path, workload: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import save_gguf

    stock = AutoModelForCausalLM.from_pretrained(tokenizer, dtype=torch.float32)
    ours, expected = TextTokenizer(save_gguf(tmp_path / "model.gguf", stock, tokenizer)), TextTokenizer(tokenizer)
    assert (ours.end_token_id, ours.vocab_size) == (expected.end_token_id, expected.vocab_size)
    assert ours.encode([TEXT]) == expected.encode([TEXT])
    with pytest.raises(PromptFileError, match=r"absent.gguf' does not exist: give an existing .gguf file"):
        TextTokenizer(tmp_path / "absent.gguf")
