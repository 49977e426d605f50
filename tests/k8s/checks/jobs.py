"""Jobs: what they run is a command that there is, on as many GPUs as they are given, and what it writes stays."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from experiments.bench.run import arguments
from experiments.bench.scaling.command import BENCH
from tests.k8s.manifests import Document, of_kind, pods_of, resource, title

_COMMAND = ["outrider", "bench", "scaling"]


def check(documents: list[Document]) -> list[str]:
    """Options that are refused, GPUs that do not fit, paths that are under no volume."""
    jobs = {title(job) for job in of_kind(documents, "Job")}
    own = [pods for pods in pods_of(documents) if pods.where in jobs]
    return [f"{pods.where}: {fault}" for pods in own for container in pods.containers for fault in _faults(container, pods.spec)]


def _faults(container: Document, spec: Document) -> Iterator[str]:
    if container.get("command") != _COMMAND:
        yield f"command {container.get('command')} is not {' '.join(_COMMAND)}"
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = arguments(BENCH, container.get("args", []))
    except SystemExit:
        yield f"its options are refused: {said.getvalue().strip().splitlines()[-1]}"
        return
    gpus = resource(container, "nvidia.com/gpu")
    if max(args.workers) != gpus:
        yield f"--workers goes to {max(args.workers)}, and it has {gpus} GPUs"
    if args.records * len(args.prompts) < max(args.clients):
        yield f"--clients goes to {max(args.clients)}, and there are {args.records * len(args.prompts)} prompts"
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
    for path in (args.model, *map(str, args.prompts)):
        if not any(path.startswith(f"{at}/") for at in mounts):
            yield f"{path} is under no mounted volume"
    kept = mounts.get(str(args.out), {})
    if kept.get("readOnly") or "persistentVolumeClaim" not in volumes.get(kept.get("name"), {}):
        yield f"--out {args.out} is no claim to write to: the record would go with the pod"
