"""``model.revision``: a pinned revision of a model on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from outrider.configs.schema import load_config
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model_files import find_files, revision_of


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name@v1.0", ("owner/name", "v1.0")),
        ("owner/name@refs/pr/1", ("owner/name", "refs/pr/1")),
        ("./a@b/c", ("./a@b/c", None)),
        ("name@v1", ("name@v1", None)),
        ("owner/name@", ("owner/name@", None)),
    ],
)
def test_the_revision_of_a_path(path: str, expected: tuple[str, str | None]) -> None:
    assert revision_of(path) == expected


def test_a_revision_is_downloaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(name: str, revision: str, **_: Any) -> str:
        asked.append((name, revision))
        if revision == "gone":
            raise OSError("404")
        return f"/snapshots/{revision}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = load_config(None, ["model.path=owner/pinned", "model.revision=abc"])
    assert (config.model.path, config.model.name) == ("owner/pinned@abc", "pinned")
    assert [find_files(config.model.path) for _ in range(2)] == ["/snapshots/abc"] * 2
    assert asked == [("owner/pinned", "abc")]
    with pytest.raises(ModelLoadError, match=r"owner/pinned.*gone.*model\.revision"):
        find_files("owner/pinned@gone")


def test_a_folder_with_such_a_name_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name@v1").mkdir(parents=True)
    assert revision_of("owner/name@v1") == ("owner/name@v1", None)
