"""A tiny model, a tiny corpus and tiny workloads, as files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers.models import llama_config, save_model

DOCUMENT = "### Documents\n[1] Fox: The quick brown fox jumps over the lazy dog.\n\n"
CORPUS = (
    {
        "kind": "quote",
        "text": DOCUMENT + "### Question\nQuote document [1].\n\n### Answer\nThe quick brown fox jumps over the lazy dog.",
    },
    {
        "kind": "qa_extractive",
        "text": DOCUMENT + "### Question\nWho jumps?\n\n### Answer\nThe fox.\n\n### Question\nOver?\n\n### Answer\nIt.",
    },
    {"kind": "prose", "text": "A request travels from the door to the engine and back again."},
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with the validation records."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    with gzip.open(folder / "valid.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in CORPUS)
    return folder


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    """A folder with two workload files; the second record of ``b`` is too long for the tiny model."""
    folder = tmp_path / "workloads"
    folder.mkdir()
    text = "The quick brown fox jumps over the lazy dog. A request travels from the door to the engine and back again. "
    files = {
        "b": [
            {"id": "b/1", "workload": "b", "prompt": "Who jumps? " + text},
            {"id": "b/2", "workload": "b", "prompt": text * 40},
        ],
        "a": [
            {"id": "a/1", "workload": "a", "prompt": text, "references": [text]},
            {"id": "a/2", "workload": "a", "prompt": "dog"},
        ],
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return folder
