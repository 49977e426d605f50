"""Runs the steps of an image without a container runtime: ``python -m tests.k8s.image_steps --folder DIR --target cpu``.

Each stage of the Dockerfile is a layer of an overlay file system, the first one over a Debian 12 of debootstrap with the Python
that runs this, which stands for that of the image ``python``; its instructions are run in it one by one. A wrong package, path or
right ends it. What was built is then run as a pod's container is: user 1000, no capabilities, a read-only root, an empty home and
/tmp in memory.

Needs root, and of Debian the packages debootstrap, mount and util-linux. A record says what each step took, what each layer adds
and which packages it has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from outrider.experiments.bench.record import RESULTS, write_record
from tests.k8s.dockerfile import ROOT, Instruction, Stage, context, line_of, stages

MIRROR = "http://deb.debian.org/debian"
LIBRARIES = "ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libreadline8 libsqlite3-0 libssl3 libuuid1 zlib1g"  # of Python
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SHARE = Path("opt/outrider/share/outrider")  # ``decoding.jit.IMAGE`` of an image
READY_S = 300.0
_LINE = re.compile(r"^\[ *([\d.]+) s\] (.*)$", re.MULTILINE)
_SHELL = ["/bin/bash", "-euo", "pipefail", "-c"]


@dataclass
class Layer:
    """A stage that is built."""

    name: str
    folder: Path  # of what it adds
    mounted: Path  # the whole of it
    environment: dict[str, str]
    workdir: str = "/"
    user: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)


class Builder:
    """Builds stages below a folder, each once."""

    def __init__(
        self, folder: Path, arguments: Mapping[str, str], binds: Mapping[str, str], mounts: ExitStack, kept: bool
    ) -> None:
        """
        Args:
            folder: is made if need be; a Debian that lies in ``base`` is used again.
            kept: layers that were built before are taken as they lie in the folder.
            arguments: of the build, by the names of ARG.
            binds: folders and files of this machine that are seen in every stage, by their places there.
            mounts: closes what is mounted.
        """
        self._folder, self._arguments, self._binds, self._mounts = folder, arguments, binds, mounts
        self.found, self._kept = stages(), kept
        self.layers: dict[str, Layer] = {}

    def build(self, name: str) -> Layer:
        """A stage, with those that it stands on and copies from."""
        if name in self.layers:
            return self.layers[name]
        stage = self.found[name]
        sources = [source for one in stage.of("COPY") for source in one.flags.get("from", ()) if source in self.found]
        mounted = [part for one in stage.of("RUN") for part in _mounts(one) if part.get("from") in self.found]
        for needed in [*sources, *(part["from"] for part in mounted)]:
            self.build(needed)
        below = self.build(stage.base) if stage.base in self.found else None
        layer = self.layers[name] = self._mount(stage, below)
        built = self._folder / "layers" / f"{name}.json"
        steps = json.loads(built.read_text()) if self._kept and built.exists() else None
        for one in stage.instructions:
            self._do(layer, one, done=steps is not None)
        layer.steps = steps or layer.steps
        built.write_text(json.dumps(layer.steps))
        return layer

    def _mount(self, stage: Stage, below: Layer | None) -> Layer:
        lower = [self._folder / "layers" / each.name for each in reversed(line_of(self.found, stage.name)[:-1])]
        upper, work, mounted = (self._folder / kind / stage.name for kind in ("layers", "work", "mounted"))
        if not (self._kept and upper.with_suffix(".json").exists()):
            shutil.rmtree(upper, ignore_errors=True)
            upper.with_suffix(".json").unlink(missing_ok=True)
        for folder in (upper, work, mounted):
            folder.mkdir(parents=True, exist_ok=True)
        lowers = ":".join(str(each) for each in [*lower, self._base()])
        options = f"lowerdir={lowers},upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "overlay", "-o", options, str(mounted))
        self._mounts.callback(_run, "umount", "--recursive", "--lazy", str(mounted))
        for kind in ("proc", "dev"):
            _run("mount", "--rbind", f"/{kind}", str(mounted / kind))
            _run("mount", "--make-rslave", str(mounted / kind))
        for source, target in self._binds.items():
            self._bind(Path(source), mounted / target.lstrip("/"))
        made = Layer(stage.name, upper, mounted, {"HOME": "/root"} if below is None else dict(below.environment))
        if below is not None:
            made.workdir, made.user = below.workdir, below.user
        else:
            made.environment["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return made

    def _bind(self, source: Path, target: Path) -> None:
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _run("mount", "--bind", str(source), str(target))

    def _base(self) -> Path:
        """Debian with Python where the image ``python`` has it."""
        base = self._folder / "base"
        python = base / "usr" / "local" / "bin" / "python"
        if not python.exists():
            if not (base / "usr" / "bin" / "apt-get").exists():
                _run("debootstrap", "--variant=minbase", "bookworm", str(base), MIRROR)
            shutil.copy("/etc/resolv.conf", base / "etc" / "resolv.conf")
            _run("chroot", str(base), *_SHELL, f"apt-get update && apt-get install -y --no-install-recommends {LIBRARIES}")
            version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "include")]
            library = Path(sysconfig.get_config_var("LIBDIR"))
            for path in (*paths, *library.glob(f"lib{version}*.so*"), library / "libpython3.so"):
                target = base / "usr" / "local" / path.relative_to(sys.base_prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    leave = shutil.ignore_patterns("site-packages", "test", "__pycache__")
                    shutil.copytree(path, target, symlinks=True, ignore=leave, dirs_exist_ok=True)
                elif path.exists():
                    shutil.copy2(path, target, follow_symlinks=False)
            shutil.copy2(os.path.realpath(Path(sys.base_prefix) / "bin" / version), python.with_name(version))
            _run("chroot", str(base), "ldconfig")
            for name in ("python3", "python"):
                python.with_name(name).symlink_to(version)
        return base

    def _do(self, layer: Layer, one: Instruction, done: bool) -> None:
        began = time.monotonic()
        if one.name == "ENV":
            layer.environment |= {
                name: _filled(value, layer.environment) for name, value in (word.split("=", 1) for word in one.words)
            }
        elif one.name == "ARG":
            name, _, value = one.text.partition("=")
            layer.environment.setdefault(name, self._arguments.get(name, _filled(value, layer.environment)))
        elif one.name == "WORKDIR":
            layer.workdir = one.text
            (layer.mounted / one.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif one.name == "USER":
            layer.user = one.text
        elif done:
            return  # what is left changes files
        elif one.name == "COPY":
            self._copy(layer, one)
        elif one.name == "RUN":
            with self._for_run(layer, one):
                self._chroot(layer, one.text)
        if one.name in ("COPY", "RUN"):
            layer.steps.append({"step": f"{one.name} {one.text}", "s": round(time.monotonic() - began, 1)})

    @contextmanager
    def _for_run(self, layer: Layer, one: Instruction) -> Iterator[None]:
        """What ``--mount`` asks for: caches lie in the folder, what is bound comes from another stage or the context."""
        with ExitStack() as ended:
            for part in _mounts(one):
                target = layer.mounted / part["target"].lstrip("/")
                if part["type"] == "cache":
                    source = self._folder / "caches" / part["target"].strip("/").replace("/", "-")
                    source.mkdir(parents=True, exist_ok=True)
                else:
                    source = self.layers[part["from"]].mounted / part["source"].lstrip("/")
                self._bind(source, target)
                ended.callback(_run, "umount", "--lazy", str(target))
            yield

    def _copy(self, layer: Layer, one: Instruction) -> None:
        *sources, target = one.words
        place = layer.mounted / (target if target.startswith("/") else f"{layer.workdir}/{target}").lstrip("/")
        if one.flags.get("from"):
            (origin,) = one.flags["from"]
            (source,) = sources
            place.mkdir(parents=True, exist_ok=True)
            _run("cp", "-a", f"{self.layers[origin].mounted}{source}/.", str(place))
            return
        given = sorted(context())
        for source in sources:
            names = given if source == "." else [name for name in given if name == source or name.startswith(f"{source}/")]
            if not names:
                raise SystemExit(f"COPY {one.text}: the build is not given {source}")
            for name in names:
                file = place / name
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, file)

    def _chroot(self, layer: Layer, script: str) -> None:
        user = ["setpriv", "--clear-groups", *_ids(layer.user)] if layer.user else []
        enter = ["chroot", str(layer.mounted), *user, *_SHELL, f"cd {shlex.quote(layer.workdir)}; {script}"]
        print(f"[{layer.name}] RUN {script}", file=sys.stderr, flush=True)
        ended = subprocess.run(enter, env=layer.environment | _certificates(), stdin=subprocess.DEVNULL, check=False)
        if ended.returncode:
            raise SystemExit(f"[{layer.name}] exit code {ended.returncode}: RUN {script}")


def _mounts(one: Instruction) -> list[dict[str, str]]:
    """What ``--mount`` flags of an instruction say."""
    return [dict(part.split("=", 1) for part in flag.split(",")) for flag in one.flags.get("mount", ())]


def _filled(text: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        text = text.replace(f"${name}", value)
    return text


def _certificates() -> dict[str, str]:
    return {"PIP_CERT": str(CERTIFICATES)} if CERTIFICATES.exists() else {}


def _ids(user: str) -> list[str]:
    uid, _, gid = user.partition(":")
    return [f"--reuid={uid}", f"--regid={gid}"]


def _run(*command: str) -> None:
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if ended.returncode:
        raise SystemExit(f"exit code {ended.returncode}: {shlex.join(command)}")


@contextmanager
def pod(layer: Layer, models: Path | None, hidden: Path | None = None) -> Iterator[list[str]]:
    """The beginning of commands that run in a container of an image as a pod's does.

    Args:
        layer: of the image.
        models: a folder that is seen, read-only, at /models.
        hidden: a folder of the image that is not there.
    """
    root = layer.mounted
    places = {"/tmp": "mode=1777", "/home/ray": "uid=1000,gid=1000,mode=700", "/dev/shm": "mode=1777"}
    here = shlex.quote(str(root))
    script = [f"mount --rbind {here} {here}", f"mount -o remount,ro,bind {here}"]
    script += [f"mount -t tmpfs -o {options} none {shlex.quote(str(root) + place)}" for place, options in places.items()]
    if hidden is not None:
        script.append(f"mount -t tmpfs none {shlex.quote(str(root / hidden.relative_to('/')))}")
    if models is not None:
        (root / "models").mkdir(exist_ok=True)
        script.insert(0, f"mount --bind {shlex.quote(str(models))} {shlex.quote(str(root / 'models'))}")
    rights = "--clear-groups --no-new-privs"
    enter = f"exec chroot {shlex.quote(str(root))} setpriv {rights} {' '.join(_ids(layer.user or '0:0'))}"
    yield ["unshare", "--mount", "bash", "-euo", "pipefail", "-c", f'{"; ".join(script)}; {enter} "$@"', "pod"]


def tried(layer: Layer, model: Path, hidden: Path | None = None) -> dict[str, Any]:
    """``outrider serve`` in a pod with an empty home: seconds until it is ready, an answer, and what it said."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url, environment = f"http://127.0.0.1:{port}", layer.environment | {"HOME": "/home/ray", "RAY_USAGE_STATS_ENABLED": "0"}
    log = layer.folder.parent.parent / "serve.log"
    with pod(layer, model.parent, hidden) as enter, log.open("w") as out:
        command = [*enter, "outrider", "serve", "--model", f"/models/{model.name}", f"server.port={port}"]
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while True:
                try:
                    if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if process.poll() is not None or time.monotonic() - began > READY_S:
                    raise SystemExit(f"the server is not ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.05)
            ready_s = time.monotonic() - began
            body = {"model": model.name, "messages": [{"role": "user", "content": "When is it open?"}], "max_tokens": 16}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            home = Path(f"/proc/{process.pid}/root/home/ray/.cache/outrider")
            made = {path.name for path in home.rglob("*.nbc")} - {path.name for path in (layer.mounted / SHARE).rglob("*.nbc")}
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    said = {text.partition(" (")[0]: float(seconds) for seconds, text in reversed(_LINE.findall(log.read_text()))}
    return {
        "ready_s": round(ready_s, 1), "tokens": answer["usage"]["completion_tokens"], "exit_code": process.returncode,
        "functions_compiled": len(made), "said_at_s": dict(reversed(said.items())),
    }  # fmt: skip


def asked(layer: Layer, *command: str) -> str:
    """What a command says in a pod."""
    with pod(layer, None) as enter:
        environment = layer.environment | {"HOME": "/home/ray"}
        told = subprocess.run([*enter, *command], env=environment, capture_output=True, text=True, check=False)
    if not told.stdout:
        raise SystemExit(f"{shlex.join(command)}: exit code {told.returncode}: {told.stderr}")
    return told.stdout


def _mib(folder: Path) -> int:
    files = (each.lstat() for each in folder.rglob("*") if not each.is_symlink())
    return round(sum(each.st_blocks * 512 for each in files) / 2**20)


_PACKAGES = """
import importlib.metadata as m, json
def size(d): return sum(f.locate().lstat().st_size for f in d.files or () if f.locate().is_file())
print(json.dumps({d.name: [d.version, round(size(d) / 2**20, 1)] for d in m.distributions()}))
"""


def main() -> None:
    """Builds, tries and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, required=True, help="where it is built: some gigabytes")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build takes it")
    parser.add_argument("--bind", action="append", default=[], metavar="HERE:THERE", help="what every stage sees of this machine")
    parser.add_argument("--kept", action="store_true", help="layers that were built before are taken as they lie in the folder")
    parser.add_argument("--model", type=Path, default=ROOT / "demo_model", help="folder that is served in the end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("mounts and chroot need root")
    started = datetime.now(UTC)
    arguments = dict(each.split("=", 1) for each in args.build_arg)
    binds = dict(each.split(":", 1) for each in args.bind) | (
        {str(CERTIFICATES): str(CERTIFICATES)} if CERTIFICATES.exists() else {}
    )
    with ExitStack() as mounts:
        builder = Builder(args.folder.resolve(), arguments, binds, mounts, args.kept)
        layer = builder.build(args.target)
        findings = json.loads(asked(layer, "outrider", "doctor", "--json"))["findings"]
        results: dict[str, Any] = {
            "target": args.target,
            "steps": {name: each.steps for name, each in builder.layers.items()},
            "layers_mib": {name: _mib(each.folder) for name, each in builder.layers.items()},
            "packages": dict(sorted(json.loads(asked(layer, "python", "-c", _PACKAGES)).items())),
            "doctor": {each["name"]: [each["status"], each["found"]] for each in findings},
        }
        brought = Path("/") / SHARE
        results["starts"] = {
            "with compiled code": tried(layer, args.model.resolve()),
            "without": tried(layer, args.model.resolve(), hidden=brought),
        }
    config = {name: value for name, value in vars(args).items() if name not in ("folder", "bind", "build_arg", "out")}
    print(write_record(f"image-{args.target}", config, results, None, started, folder=args.out))


if __name__ == "__main__":
    main()
