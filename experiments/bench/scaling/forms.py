"""The ways to put workers to requests, and which of them this machine can run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

_NAMES = {
    "one": "", "threads": "", "lookahead": "LP ", "elastic": "LP elastic ", "tensor": "TP ", "pipeline": "PP ",
    "replicas": "replicas ",
}  # fmt: skip
KINDS = tuple(_NAMES)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to put workers to requests."""

    kind: str  # of ``KINDS``
    workers: int  # that it has; threads of one rank count as workers, too
    threads: int  # of each worker

    @property
    def ranks(self) -> int:
        """Processes that compute."""
        return 1 if self.kind in ("one", "threads") else self.workers

    @property
    def rank_threads(self) -> int:
        """Torch threads of each."""
        return self.threads * self.workers // self.ranks

    @property
    def label(self) -> str:
        """For tables: ``LP 2 x 1`` has two ranks with a thread each."""
        return f"{_NAMES[self.kind]}{self.ranks} x {self.rank_threads}"

    def settings(self) -> list[str]:
        """Of its server."""
        found = [f"model.threads={self.rank_threads}", f"server.cpus_per_replica={min(0.5, 1 / self.ranks)}"]
        if self.kind in ("elastic", "replicas"):
            found.append(f"server.replicas={self.ranks}")
        if self.kind == "elastic":
            found += ["parallelism.mode=lookahead", "parallelism.world_size=auto", "parallelism.adaptive=false"]
        elif self.kind in ("lookahead", "tensor", "pipeline"):
            found += [f"parallelism.mode={self.kind}", f"parallelism.world_size={self.ranks}", "parallelism.adaptive=false"]
        return found


def forms_of(kinds: Sequence[str], workers: Sequence[int], threads: int, gpus: int | None) -> tuple[list[Form], dict[str, str]]:
    """The forms that can be tried, one worker first, and by label why the others cannot.

    Args:
        kinds: of ``KINDS``.
        workers: numbers of them; one is always there.
        threads: of each.
        gpus: of this machine, to compute on; None to compute on its processor.
    """
    found, skipped = [Form("one", 1, threads)], {}
    for count, kind in itertools.product([count for count in workers if count > 1], KINDS[1:]):
        form = Form(kind, count, threads)
        reason = _missing(form, gpus)
        if kind in kinds and reason is None:
            found.append(form)
        elif kind in kinds:
            skipped[form.label] = reason or ""
    return found, skipped


def _missing(form: Form, gpus: int | None) -> str | None:
    """What a form needs and does not find."""
    if form.kind == "threads" and gpus is not None:
        return "a GPU has no threads of ours"
    if gpus is not None and gpus < form.workers:
        return f"this machine has {gpus} GPU{'s' * (gpus != 1)}"
    if form.kind == "tensor" and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install -e '.[baselines]'"
    return None
