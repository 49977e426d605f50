"""The instructions of the Dockerfile by stage, and the files of the repository that its build is given."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from tests.k8s.manifests import REPOSITORY as ROOT

_FLAG = re.compile(r"--([a-z-]+)=(\S+) +")


@dataclass(frozen=True)
class Instruction:
    """An instruction of a stage."""

    name: str
    line: str  # with its flags
    text: str  # without them
    flags: dict[str, list[str]]

    @property
    def words(self) -> list[str]:
        """Words of the text."""
        return shlex.split(self.text)


@dataclass(frozen=True)
class Stage:
    """Instructions between two FROM."""

    name: str
    base: str  # an earlier stage, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, *names: str) -> list[Instruction]:
        """Return the instructions of some names."""
        return [instruction for instruction in self.instructions if instruction.name in names]


def stages() -> dict[str, Stage]:
    """Return the stages by name, in the order of the file."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, Stage] = {}
    for name, _, line in (line.partition(" ") for line in filter(None, text.splitlines())):
        line = line.strip()
        if name == "FROM":
            base, _, stage = line.partition(" AS ")
            found[stage] = Stage(stage, base)
            continue
        rest, flags = line, dict[str, list[str]]()
        while match := _FLAG.match(rest):
            flags.setdefault(match[1], []).append(match[2])
            rest = rest[match.end() :]
        list(found.values())[-1].instructions.append(Instruction(name, line, rest, flags))
    return found


def line_of(found: dict[str, Stage], name: str) -> list[Stage]:
    """Return a stage and those that it is based on, the first one first."""
    stage = found[name]
    return [*(line_of(found, stage.base) if stage.base in found else ()), stage]


def context() -> set[str]:
    """Return the files that a build is given: the last pattern of .dockerignore that matches a path or a parent decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    tokens = {"**/": "(?:.*/)?", "*": "[^/]*", ".": r"\."}
    expression = {line: re.sub(r"\*\*/|\*|\.", lambda match: tokens[match[0]], line.lstrip("!")) for line in lines}

    def is_given(name: str) -> bool:
        parts = name.split("/")
        names = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)] + ["."]
        return [line for line in lines if any(re.fullmatch(expression[line], each) for each in names)][-1].startswith("!")

    tops = [top for top in ROOT.iterdir() if is_given(top.name)]  # no pattern gives what is below an ignored top
    files = [path for top in tops for path in [top, *top.rglob("*")] if path.is_file() or path.is_symlink()]
    return {name for name in (path.relative_to(ROOT).as_posix() for path in files) if is_given(name)}
