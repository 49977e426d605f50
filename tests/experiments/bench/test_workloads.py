"""Workload files to records, and the order in which they are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from engine.text.tokenizer import load_tokenizer
from experiments.bench.workloads import fitting_records, interleaved, prompt_ids, read_workloads


def test_records_come_in_order_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    separator = chr(0x2028)  # a line separator to some, a part of the text to JSON
    first = f'{{"id": "x/1", "workload": "x", "prompt": "a{separator}b", "references": ["r"], "output": "o"}}'
    path.write_text(first + '\n\n{"prompt": "c", "references": null}\n', encoding="utf-8")
    assert read_prompts(path) == [PromptRecord("x/1", "x", f"a{separator}b", ("r",), "o"), PromptRecord("w/3", "w", "c", ())]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"w\.jsonl:2: not JSON"),
        ('{"id": 1}', r"w\.jsonl:2: .*`prompt`"),
        ('{"prompt": "a", "references": "b"}', "`references`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(PromptFileError, match=message):
        read_prompts(path)


def test_a_folder_without_workloads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"no \.jsonl file"):
        read_workloads(tmp_path)


def test_files_are_taken_by_name_one_record_of_each_in_turn(workloads: Path) -> None:
    assert [record.id for record in interleaved(read_workloads(workloads))] == ["a/1", "b/1", "a/2", "b/2"]
    assert list(interleaved([[1, 2, 3], [], [4]])) == [1, 4, 2, 3]
    assert list(interleaved([])) == []


def test_prompt_is_a_user_message_in_the_template(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}!"
    assert tokenizer.decode(prompt_ids(PromptRecord("1", "w", "lazy dog", ()), tokenizer)) == "<user>lazy dog!"


def test_a_prompt_may_be_as_long_as_is_said(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    record = PromptRecord("1", "w", "lazy dog", ())
    ids = prompt_ids(record, tokenizer)
    assert list(fitting_records([record], tokenizer, len(ids))) == [(record, ids)]
    assert list(fitting_records([record], tokenizer, len(ids) - 1)) == []
