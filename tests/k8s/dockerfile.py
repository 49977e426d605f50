"""What a Dockerfile says, stage by stage, and which files of the repository its build is given."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?$")
_SEPARATORS = {"&&", "||", ";", "|", "&", "(", ")"}
_KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{"}
_ENDS = {"fi", "done", "}"}


@dataclass(frozen=True)
class Instruction:
    """One of them, without its flags."""

    name: str
    text: str
    flags: dict[str, list[str]]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


@dataclass(frozen=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str  # a stage before it, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, *names: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name in names]


def stages(path: Path = ROOT / "Dockerfile") -> dict[str, Stage]:
    """By name, in the order of the file."""
    found: dict[str, Stage] = {}
    stage = Stage("", "")
    for name, rest in _instructions(path.read_text()):
        if name == "FROM":
            base, _, own = rest.partition(" AS ")
            stage = found.setdefault(own, Stage(own, base))
        else:
            stage.instructions.append(_instruction(name, rest))
    return found


def line_of(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it stands on, the first one first."""
    stage = found[name]
    return [*(line_of(found, stage.base) if stage.base in found else []), stage]


def commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a line of shell: each its words.

    Example: ``a 1 && if [ -n x ]; then b; fi`` gives ``a 1``, ``[ -n x ]`` and ``b``.
    """
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if token in _SEPARATORS:
            if words:
                yield words
            words = []
        elif words or token not in _KEYWORDS | _ENDS:
            words.append(token)


def ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a build is not given a file: the last pattern decides that names it, or a folder that it is in."""
    parts = PurePosixPath(path).parts
    names = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    last = False
    for pattern in patterns:
        negative, bare = pattern.startswith("!"), pattern.lstrip("!").strip("/")
        if any(re.fullmatch(_expression(bare), name) for name in names):
            last = not negative
    return last


def patterns(path: Path = ROOT / ".dockerignore") -> list[str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def context() -> list[str]:
    """The files that a build is given."""
    rules = patterns()
    assert not any("/" in rule for rule in rules if rule.startswith("!"))  # else there may be something below what is left out
    tops = [top for top in sorted(os.listdir(ROOT)) if not ignored(top, rules)]
    found = [path for top in tops for path in [ROOT / top, *(ROOT / top).rglob("*")] if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if not ignored(name, rules)]


def _expression(pattern: str) -> str:
    """The regular expression of a pattern, in which ``**`` stands for any number of folders."""
    parts = []
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[[^]]*\]|.", pattern):
        parts.append(
            {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, token if token[0] == "[" else re.escape(token))
        )
    return "".join(parts)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and rest of each, with continued lines put together."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        name, rest = line.split(maxsplit=1)
        yield name.upper(), rest.strip()


def _instruction(name: str, rest: str) -> Instruction:
    flags: dict[str, list[str]] = {}
    while match := _FLAG.match(rest.split(maxsplit=1)[0]):
        flags.setdefault(match[1], []).append(match[2] or "")
        rest = rest.split(maxsplit=1)[1]
    return Instruction(name, rest, flags)
