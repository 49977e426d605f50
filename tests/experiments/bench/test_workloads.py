"""Workload files, and the order of their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.workloads import fitting_records, interleaved, prompt_ids, read_workloads


def test_records_come_in_order_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    separator = chr(0x2028)  # a line separator in Unicode, an ordinary character in JSON
    first = f'{{"id": "x/1", "workload": "x", "prompt": "a{separator}b", "references": ["r"], "output": "o"}}'
    path.write_text(first + '\n\n{"prompt": "c", "references": null}\n', encoding="utf-8")
    assert read_prompts(path) == [PromptRecord("x/1", "x", f"a{separator}b", ("r",), "o"), PromptRecord("w/3", "w", "c", ())]


def test_unusable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    for line, message in (("{", "not JSON"), ('{"id": 1}', "`prompt`"), ('{"prompt": "a", "references": "b"}', "`references`")):
        path.write_text('{"prompt": "a"}\n' + line + "\n")
        with pytest.raises(PromptFileError, match=rf"w\.jsonl:2: .*{message}"):
            read_prompts(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptFileError, match=r"no \.jsonl file"):
        read_workloads(tmp_path / "empty")


def test_files_are_interleaved_by_name(workloads: Path) -> None:
    assert [record.id for record in interleaved(read_workloads(workloads))] == ["a/1", "b/1", "a/2", "b/2"]
    assert list(interleaved([[1, 2, 3], [], [4]])) == [1, 4, 2, 3] and list(interleaved([])) == []


def test_prompts_are_user_messages_of_limited_length(tiny_model: Path) -> None:
    tokenizer, record = load_tokenizer(str(tiny_model)), PromptRecord("1", "w", "lazy dog", ())
    tokenizer.chat_template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}!"
    ids = prompt_ids(record, tokenizer)
    assert tokenizer.decode(ids) == "<user>lazy dog!"
    assert list(fitting_records([record], tokenizer, len(ids))) == [(record, ids)]
    assert list(fitting_records([record], tokenizer, len(ids) - 1)) == []
