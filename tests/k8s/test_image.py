"""The Dockerfile as far as it can be checked without a container runtime: linted, read, and installed as it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.k8s.dockerfile import context, line_of, stages
from tests.k8s.manifests import REPOSITORY as ROOT
from tests.k8s.manifests import overlay, ray_pods

TARGETS = ("cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [path.name for path in (ROOT / "outrider").iterdir() if path.is_symlink()]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
HASHED = ("constraints-hashed", "constraints-cuda-hashed")
SOURCE = "/opt/outrider/src"
# Parts of the packages that no image has.
REPOSITORY_ONLY = ("experiments/LOG.md", "experiments/results/", "client_scripts/")

Program = Callable[..., subprocess.CompletedProcess[str]]


STAGES = stages()


def texts(stage: str, name: str) -> list[str]:
    """Return the instructions of a name that make up a stage, those of the stages below it first."""
    return [one.line for each in line_of(STAGES, stage) for one in each.of(name)]


def variables(stage: str, name: str) -> dict[str, str]:
    pairs = re.findall(r'([\w.-]+)=("[^"]*"|\S+)', " ".join(texts(stage, name)))
    return {key: value.strip('"') for key, value in pairs}


def run(*command: str | Path, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False, **more)


def test_hadolint_finds_nothing() -> None:
    told = run(Path(sysconfig.get_path("scripts")) / "hadolint", "--no-color", "Dockerfile")
    assert (told.returncode, told.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_its_environment_and_the_source(target: str) -> None:
    copies = [f"--from={target}-environment /opt/outrider /opt/outrider", f". {SOURCE}"]
    assert list(STAGES)[-2:] == list(TARGETS) and texts(target, "COPY") == copies
    assert not any(texts(target, name) for name in ("ENTRYPOINT", "HEALTHCHECK", "ADD", "VOLUME"))
    assert json.loads(texts(target, "CMD")[-1]) == ["outrider", "--help"]
    assert texts(target, "RUN")[-1].endswith("&& python -m outrider.cluster.cli.launch.compile_ahead --image")
    lists = [f"-r {name}.txt" for name in ("requirements", "tracing", "baselines")]
    assert all(name in " ".join(texts(f"{target}-environment", "RUN")) for name in lists)
    assert STAGES["weights"].base == "scratch"
    assert [(one.name, one.line) for one in STAGES["weights"].instructions] == [("COPY", "--from=model . /model")]


def test_the_image_for_gpus_has_flash_attn_and_the_driver_besides() -> None:
    differing = set(texts("cuda", "RUN")) ^ set(texts("cpu", "RUN"))
    assert len(differing) == 1 and "--mount=type=bind,from=flash-attn,source=/wheels" in differing.pop()
    environment = variables("cuda", "ENV")
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in environment  # the head would see the GPUs of its node


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_the_programs_and_the_user_of_the_pods(target: str) -> None:
    base = texts(target, "RUN")[0]
    installed = base.split("apt-get install -y --no-install-recommends ")[1].split("&&")[0].split()
    # KubeRay's probes, the pod's certificate, and the compilers of Triton's launchers and DeepSpeed's sums.
    assert {"bash", "grep", "wget", "openssl", "gcc", "g++", "libc6-dev"} <= set(installed) and "ninja" in PINS
    path = "PATH=/opt/outrider/bin:"
    assert f"ENV {path}" in f"ENV {texts(target, 'ENV')[0]}" and f'echo "{path}\\$PATH" > /etc/profile.d/' in base
    last = STAGES[target].instructions[-1]
    user, group = last.text.split(":")
    assert last.name == "USER" and int(user) > 0
    assert f"groupadd --gid {group} ray" in base
    assert f"useradd --uid {user} --gid {group} --create-home --home-dir /home/ray" in base
    for pods in ray_pods(overlay("dgx-8xa100")):
        context = pods.spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user), int(group), int(group))
    assert PROJECT["project"]["scripts"] == {"outrider": "outrider.cluster.cli.main:main"}


def test_the_build_is_given_the_packages_and_no_model_test_or_record() -> None:
    given = context()
    tops = {"LICENSE", "README.md", *(f"{name}.txt" for name in HASHED), "pyproject.toml", "outrider", *PACKAGES}
    assert {name.split("/")[0] for name in given} == tops
    assert not [name for name in given if re.search(r"\.pyc|__pycache__|_cache/|\.safetensors|^experiments/results", name)]
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES)
    assert listed.returncode == 0, listed.stderr
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert {name for name in files if not any(part in name for part in REPOSITORY_ONLY)} <= given
    for copy in (text.split() for stage in STAGES for text in texts(stage, "COPY") if not text.startswith("--from")):
        assert set(copy[:-1]) <= given | {"."}


def test_versions_are_those_of_the_project() -> None:
    name, _, digest = STAGES["base"].base.partition("@")
    python = re.fullmatch(r"python:(3\.\d+)(\.\d+)-slim-bookworm", name)
    assert python is not None and re.fullmatch("sha256:[0-9a-f]{64}", digest)
    project = PROJECT["project"]
    assert Version(python[1] + python[2]) in SpecifierSet(project["requires-python"])
    assert python[1] == PROJECT["tool"]["mypy"]["python_version"]
    for target in TARGETS:
        label = {key.removeprefix("org.opencontainers.image."): value for key, value in variables(target, "LABEL").items()}
        assert (label["version"], label["licenses"]) == (project["version"], project["license"])
        assert label["base.name"].endswith(f"/{name}") and label["base.digest"] == digest
        assert project["description"].startswith(label["description"])
    kustomizations = (yaml.safe_load(path.read_text()) for path in (ROOT / "k8s" / "overlays").glob("*/kustomization.yaml"))
    tags = {image["newTag"] for kustomization in kustomizations for image in kustomization.get("images", ())}
    assert tags == {f"{project['version']}-{target}" for target in TARGETS}


def test_every_installation_has_hashes() -> None:
    found = [
        (text, match)
        for stage in STAGES
        for text in texts(stage, "RUN")
        for match in re.finditer(r"pip (install|wheel) [^&;]*", text)
    ]
    for text, match in found:
        words = match[0].split()
        exported = re.search(r'export PIP_REQUIRE_HASHES=1 PIP_CONSTRAINT="([^"]*)"', text[: match.start()])
        if exported is not None:
            assert [Path(path).stem for path in exported[1].split()] == list(HASHED)
        elif "--no-index" not in words:
            assert "--require-hashes" in words and ("--no-deps" in words or f"{HASHED[0]}.txt" in words), words
    assert len(found) > 10
    assert re.fullmatch("[0-9a-f]{64}", variables("cpu-environment", "ARG")["TORCH_SHA256"])


# Prints what pip would be asked.
_SAID = """
pip() { echo "$@" "$FLASH_ATTN_CUDA_ARCHS"; }
python() { :; }
ln() { :; }
"""
CUDA_12 = "https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    ("given", "index", "wheel"),
    [
        ({}, [], ["flash-attn==2.8.3.post2 80;90"]),  # A100, H100 and H200
        ({"CUDA": "cu126"}, [CUDA_12], []),  # drivers before 580
        ({"CUDA": "cu126", "FLASH_ATTN": "https://example.com/a.whl"}, [CUDA_12], ["https://example.com/a.whl 80;90"]),
        ({"CUDA": "cu126", "TORCH_INDEX_URL": "https://example.com/cu126"}, ["https://example.com/cu126"], []),
        ({"FLASH_ATTN": "none"}, [], []),
        ({"FLASH_ATTN_CUDA_ARCHS": "80"}, [], ["flash-attn==2.8.3.post2 80"]),
    ],
    ids=str,
)
def test_build_arguments_choose_the_cuda_and_the_gpus(given: dict[str, str], index: list[str], wheel: list[str]) -> None:
    arguments = {"FLASH_ATTN_CUDA_ARCHS": ""}
    lines: list[str] = []
    for stage in ("cuda-environment", "flash-attn"):
        for name, _, value in (one.text.partition("=") for one in STAGES[stage].of("ARG")):
            arguments[name] = given.get(name, re.sub(r"\$(\w+)", lambda match: arguments[match[1]], value))
        script = STAGES[stage].of("RUN")[-1].text
        told = run("/bin/bash", "-euo", "pipefail", "-c", _SAID + script, env=arguments)
        assert told.returncode == 0, told.stderr
        lines += told.stdout.splitlines()
    assert re.findall(r"--index-url (\S+)", "\n".join(lines)) == index
    assert [line.partition("-w /wheels ")[2] for line in lines if line.startswith("wheel")] == wheel


def hashed(name: str) -> dict[str, str]:
    """Return the versions of a list in which each entry has hashes."""
    lines = [line for line in (ROOT / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    entries = [entry.split() for entry in "\n".join(lines).replace("\\\n", "").splitlines()]
    assert all(hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes) for _, *hashes in entries)
    return {canonicalize_name(entry[0].split("==")[0]): entry[0].split("==")[1] for entry in entries}


def test_every_pinned_version_has_hashes() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    torch = {"torch": pins["torch"]}  # its CPU build is on another index than PyPI
    assert hashed(HASHED[0]) | torch == pins
    for_gpus = hashed(HASHED[1])
    assert for_gpus.items() >= torch.items() and {"nvidia-ml-py", "nvidia-cuda-nvcc", "nvidia-cublas"} <= for_gpus.keys()
    assert all(pins.get(name, version) == version for name, version in for_gpus.items())
    assert variables("flash-attn", "ARG")["FLASH_ATTN"] == f"flash-attn=={for_gpus['flash-attn']}"


def test_the_lists_of_requirements_are_those_of_the_project(tmp_path: Path) -> None:
    (script,) = re.findall(r"python -c '([^']*)'", " ".join(texts("environment", "RUN")))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    told = run(sys.executable, "-c", script, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    lists = {"requirements": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    assert {name: (tmp_path / f"{name}.txt").read_text().splitlines() for name in lists} == lists


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what an image has of the repository."""
    folder = tmp_path_factory.mktemp("src")
    for name in context():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def test_a_wheel_has_one_package_and_every_file_of_it(source: Path, tmp_path: Path) -> None:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path)
    told = run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"outrider"}
    files = {name for name in context() if name.split("/")[0] in PACKAGES}
    assert files and {f"outrider/{name}" for name in files if name.endswith((".py", ".yaml", ".js", ".css", ".html"))} <= names


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return a function that runs a program, in another folder, of an environment with the source as the image installs it.

    The requirements are those of this environment, without the repository that is installed in it as editable.
    """
    home, elsewhere = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    venv.create(home, symlinks=True, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read
    (options,) = re.findall(r"^pip install (.*?) &&", texts("cpu", "RUN")[-1])
    words = options.replace(SOURCE, str(source)).split()
    told = run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", *words, "--force-reinstall", cwd=home)
    assert told.returncode == 0, told.stderr
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return lambda name, *words: run(home / "bin" / name, *words, cwd=elsewhere, env=environment)


@pytest.mark.slow
def test_what_is_installed_works_outside_the_repository(installed: Program) -> None:
    script = """
import json
from outrider.cluster import app
from outrider.cluster.http import playground
from outrider.engine.cpu import attention_kernel
from outrider.configs.schema import REPOSITORY, load_config
from outrider.experiments.bench import run
from outrider.experiments.report import page
print(json.dumps({
    "repository": str(REPOSITORY),
    "modules": [module.__file__ for module in (app, attention_kernel, run, page)],
    "pages": sorted(path.name for path in playground._FOLDER.iterdir()),
    "configs": sorted(path.name for path in (REPOSITORY / "configs").glob("*.yaml") if load_config(path)),
}))
"""
    told = installed("python", "-c", script)
    assert told.returncode == 0, told.stderr
    seen = json.loads(told.stdout)
    assert not Path(seen["repository"]).is_relative_to(ROOT)
    assert all(Path(path).is_relative_to(seen["repository"]) for path in seen["modules"])
    assert seen["pages"] == sorted(path.name for path in (ROOT / "cluster" / "playground").iterdir())
    assert seen["configs"] == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
    assert installed("outrider", "version").stdout == f"outrider {PROJECT['project']['version']}\n"
    findings = {one["name"]: one["status"] for one in json.loads(installed("outrider", "doctor", "--json").stdout)["findings"]}
    assert findings["redis"] == findings["torch"] == findings["ray"] == "ok"
