"""What is kept for the next start lies where nobody else can have put it, and is what was kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.decoding import jit, private_files
from outrider.decoding.private_files import open_private, read_sealed, save_file, save_sealed


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is asked for, two below one of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider"


def linked(folder: Path, to: Path) -> None:
    to.mkdir(parents=True)
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(to)


def writable(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)


REFUSED: dict[str, Callable[[Path], None]] = {
    "others may write": lambda folder: writable(folder, 0o777),
    "a group may write": lambda folder: writable(folder, 0o770),
    "others may write, and it is sticky": lambda folder: writable(folder, 0o1777),
    "others may write above": lambda folder: writable(folder.parent, 0o777),
    "a link to where others may write": lambda folder: (linked(folder, folder.parents[1] / "x"), folder.chmod(0o777))[0],
    "a link through where others may write": lambda folder: (
        linked(folder, folder.parents[1] / "x" / "y"), (folder.parents[1] / "x").chmod(0o777),
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("state", REFUSED)
def test_a_folder_that_others_may_change_is_not_used(state: str, wanted: Path, caplog: pytest.LogCaptureFixture) -> None:
    REFUSED[state](wanted)
    found = jit.cache_folder()
    assert found != wanted and found == jit.cache_folder()
    assert found.stat().st_mode & 0o777 == 0o700 and not list(found.iterdir())
    (record,) = caplog.records
    assert str(wanted) in record.getMessage() and "XDG_CACHE_HOME" in record.getMessage()


def test_a_folder_of_another_user_is_not_used(wanted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.cache_folder() == wanted
    other = os.geteuid() + 4711
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert jit.cache_folder() != wanted


def test_a_folder_of_ones_own_is_used_and_made_for_this_user_alone(wanted: Path) -> None:
    before = os.umask(0)
    try:
        assert jit.cache_folder() == wanted
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (wanted, wanted.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("state", ["sticky above", "a link of ones own", "others may read"])
def test_safe_folders_are_used(state: str, wanted: Path, caplog: pytest.LogCaptureFixture) -> None:
    if state == "sticky above":
        writable(wanted.parent, 0o1777)
    elif state == "others may read":
        writable(wanted, 0o755)
    else:
        linked(wanted, wanted.parents[1] / "x")
    assert jit.cache_folder() == wanted and not caplog.records


def test_a_volume_of_a_container_is_safe_though_anybody_may_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes gives an emptyDir the mode 0777, without the sticky bit."""

    def found(mode: int, owner: int) -> os.stat_result:
        return os.stat_result((0o40000 | mode, 1, 1, 1, owner, 4711, 0, 0, 0, 0))

    for mounted in (False, True):
        monkeypatch.setattr(os.path, "ismount", lambda _, mounted=mounted: mounted)
        assert private_files._is_shared_safely(Path("/home/ray"), found(0o777, 0)) is mounted
        assert not private_files._is_shared_safely(Path("/home/ray"), found(0o777, 1000))
        assert not private_files._is_shared_safely(Path("/home/ray"), found(0o775, 1000)), "a group of others"


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_nothing_of_a_name_that_others_know(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        monkeypatch.setattr(Path, "home", lambda: Path(home))
    found = jit.cache_folder()
    assert found.parent == Path(tempfile.gettempdir()).resolve() or found.parent == Path(tempfile.gettempdir())
    assert found.name != "outrider" and found.stat().st_mode & 0o777 == 0o700


def test_without_any_folder_nothing_is_kept(wanted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writable(wanted, 0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(wanted.parent))
    open_to_all = wanted.parent / "tmp"
    writable(open_to_all, 0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(open_to_all))
    private_files._temporary.cache_clear()
    with pytest.raises(FileExistsError):
        private_files.save_file(jit.cache_folder() / "file", b"content")
    assert not list(open_to_all.iterdir())
    private_files._temporary.cache_clear()


def test_a_sealed_file_is_what_was_kept_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    save_sealed(path, b"content")
    assert read_sealed(path) == b"content"
    whole = path.read_bytes()
    others = [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    others += [bytes(each ^ (at == turned) for at, each in enumerate(whole)) for turned in range(len(whole))]
    for other in others:
        path.write_bytes(other)
        with pytest.raises(ValueError, match="damaged"):
            read_sealed(path)
    path.write_bytes(whole)
    path.rename(tmp_path / "other")
    with pytest.raises(ValueError, match="damaged"):
        read_sealed(tmp_path / "other")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "kept"
    path.touch(0o600)
    open_private(path).close()
    path.chmod(mode)
    with pytest.raises(PermissionError):
        open_private(path)


def test_what_is_no_file_of_ones_own_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").touch(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in {"link": "symbolic", "pipe": "not a regular", "": "not a regular", "kept/x": "Not a directory"}.items():
        with pytest.raises(OSError, match=said):
            open_private(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if os.getuid():
        with pytest.raises(PermissionError):
            open_private(tmp_path / "kept")


def test_a_write_that_is_cut_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(tmp_path / "kept", b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_file(tmp_path / "kept", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
