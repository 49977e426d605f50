"""Our engine beside vLLM, llama.cpp and transformers: same prompts, same token ids, same threads, in turns.

    python -m experiments.peers --workloads DIR
    python -m experiments.peers --workloads DIR --vllm PYTHON --llama DIR    # installed already; else made in --environments
    python -m experiments.peers --workloads DIR --http    # besides, vllm bench serve and aiperf at our server and vLLM's

The yardstick of what is claimed about speed. Systems are installed once, in environments of their own, with pinned versions; one
that cannot be had is named in a line, and ``n/a`` in the record. Each loads its model once, and waits while others run. The
memory's roof is read before and after every turn. Turns are kept in ``--kept`` as they come, so that a run which is cut off goes
on; another setting or revision needs another file. The record has all rounds, and a line for every goal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.cli.generate.prompt_file import PromptFileError
from engine.text.tokenizer import load_tokenizer
from experiments.bench.engines.models import model_folder
from experiments.bench.figure import panel
from experiments.bench.progress import Progress
from experiments.bench.record import ROOT, Kept, git_state, portable
from experiments.bench.run import Bench, Results, Run, run
from experiments.bench.workloads import first_that_fit
from experiments.peers import environments, over_http
from experiments.peers.contestants import CONTESTANTS, LLAMA_LOOKUP, NGRAM, SUFFIX, Contestant, Field, Setting, end_tokens
from experiments.peers.environments import Environments, MissingPeerError, add_environments
from experiments.peers.gguf_file import PACKAGED, packaged_file, write_gguf
from experiments.peers.goals import Speeds, goals, summary
from experiments.peers.rounds import ASKED_ONCE, ONCE, Prompt, Roof, Rounds, llama_bench, place, turns_of

LEVELS = (1, 8, 32)


def read_prompts(args: argparse.Namespace, model: str) -> list[Prompt]:
    """The first records of each workload that fit, the first of all workloads first.

    Raises:
        PromptFileError: the folder cannot be read, or nothing in it fits.
        ModelLoadError: the model has no tokenizer that can be used.
    """
    tokenizer = load_tokenizer(model)
    found = []
    for record, ids in first_that_fit(args.workloads, tokenizer, args.records, args.prompt_tokens):
        references = [tokenizer.encode(text, add_special_tokens=False) for text in record.references]
        found.append(Prompt(record.id, record.workload or "", ids, references))
    return found


@contextmanager
def running(name: str, args: argparse.Namespace, made: Environments, progress: Progress) -> Iterator[tuple[Field, list[Prompt]]]:
    """The field of a model, which is loaded by whom it is asked of.

    Raises:
        PromptFileError: there are no prompts that fit.
        ModelLoadError: the model cannot be used.
    """
    folder: Path = args.environments
    naming = argparse.Namespace(**vars(args) | {"model": name})
    with model_folder(naming) as path, tempfile.TemporaryDirectory() as scratch:
        prompts = read_prompts(args, path)
        longest = max(len(prompt.ids) for prompt in prompts) + args.max_tokens
        if longest > args.context:
            raise PromptFileError(f"--context {args.context} is too short for prompts and outputs of {longest} tokens")
        setting = Setting(path, args.dtype, args.threads, args.context, longest, max(args.levels), end_tokens(path))

        def gguf(kind: str) -> Path:
            if args.dtype != "bfloat16":
                raise MissingPeerError(f"llama.cpp's files are written in bf16 and Q4_1, not in --dtype {args.dtype}")
            packaged = packaged_file(folder / "models")
            if kind == "q4_1" and name == PACKAGED:
                return packaged
            file = (folder / "models" if name == PACKAGED else Path(scratch)) / f"{Path(name).name}.{kind}.gguf"
            if not file.is_file():
                progress.say(f"writing {name} as {file.name}")
                file.parent.mkdir(parents=True, exist_ok=True)
                write_gguf(path, kind, packaged, file.with_suffix(".partial"))
                file.with_suffix(".partial").replace(file)
            return file

        with Field(setting, made, gguf, folder / "logs") as field:
            yield field, prompts


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All rounds of all models.

    Raises:
        PromptFileError: there are no prompts that fit.
        ModelLoadError: a model cannot be used.
        MissingPeerError: our own engine has ended.
        ValueError: the file of turns is of another setting.
    """
    progress = run.progress
    given = {"vllm": args.vllm, "llama": args.llama, "aiperf": args.aiperf}
    made = Environments(args.environments, given, args.install, progress.say)
    chosen = [one for one in CONTESTANTS if not args.contestants or one.name in args.contestants]
    shaping = (
        "model", "dtype", "threads", "records", "prompt_tokens", "max_tokens", "context", "levels", "together", "clients",
        "requests",
    )  # fmt: skip
    setting = {key: getattr(args, key) for key in shaping} | {"workloads": args.workloads.name, "git": git_state(ROOT)}
    kept, roof = Kept(args.kept, portable(setting), place), Roof(args.threads)
    results: dict[str, Any] = {"models": {}}
    for name in args.model:
        results["models"][name] = _measure_model(name, chosen, args, made, kept, roof, progress)
    results["turns"] = kept.found
    results["systems"] = {"vllm_ngram": NGRAM, "vllm_suffix": SUFFIX, "llama_lookup": list(LLAMA_LOOKUP)}
    results["systems"] |= {key: getattr(environments, key.upper()) for key in ("vllm", "llama", "aiperf", "suffix", "torch")}
    return results | {"figures": figures(results["models"])}


def figures(models: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of each contestant by the number of requests; with one it is decoding alone, after the first token."""
    panels = {}
    for model, found in models.items():
        for level in sorted({int(level) for row in found["speeds"].values() for level in row}):
            kind = "decode" if level == 1 else "all"
            rates = {name: row.get(str(level), {}).get(f"{kind}_tokens_per_s") for name, row in found["speeds"].items()}
            series = {"": {name: values for name, values in rates.items() if values}}
            unit = "tokens per second" + (" after the first" if level == 1 else "")
            panels[f"{model}, {level} at once"] = panel("bars", "", "", unit, series)
    return panels


def _measure_model(
    name: str,
    chosen: Sequence[Contestant],
    args: argparse.Namespace,
    made: Environments,
    kept: Kept,
    roof: Roof,
    progress: Progress,
) -> dict[str, Any]:
    with running(name, args, made, progress) as (field, prompts):

        def bench(system: str) -> dict[str, Any]:
            return llama_bench(made.llama() / "llama-bench", field.gguf(system.removeprefix("llama ")), args.threads)

        rounds = Rounds(field, kept, roof, args.max_tokens, bench, progress.say)
        systems = {one.system for one in chosen}
        for number in range(args.rounds):
            turns = list(turns_of(name, number, chosen, prompts, args.levels, args.together))
            rounds.run([turn for turn in turns if turn[1] is not None or ASKED_ONCE[turn[0]["contestant"]] in systems])
        field.ready("ours")
        told = {name: {key: value for key, value in of.items() if key != "ready"} for name, of in field.told.items()}
    missing = dict(rounds.missing)
    http: dict[str, Any] = {}
    if args.http:  # after the field has ended: its processes would share the cores
        http, faults = over_http.measure(name, args, made, kept, roof, progress.say)
        missing |= faults
    own = [turn for turn in kept.found if turn["model"] == name and "tool" not in turn]
    speeds = Speeds(own)
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "told": told["ours"],
        "resident": {name: of["resident_bytes"] / of["weight_bytes"] for name, of in told.items() if "resident_bytes" in of},
        "roof_gb_s": [min(found), statistics.median(found), max(found)] if (found := speeds.roofs()) else [],
        "speeds": summary(speeds, [one.name for one in chosen], args.levels),
        "llama_bench": {name: speeds.found(name) for name in ASKED_ONCE if name.startswith("llama-bench")},
        "step": [turn["found"] | {"roof_gb_s": statistics.median(turn["roof"])} for turn in speeds.of("rows", ONCE)],
        "goals": goals(speeds, told, {prompt.key: prompt.workload for prompt in prompts}, missing),
        "missing": missing,
        **({"http": http} if http else {}),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    names, models = [one.name for one in CONTESTANTS], ["smollm2-135m-instruct", "110m"]
    parser.add_argument("--model", nargs="+", default=models, help="folders, names, or sizes of random weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--workloads", type=Path, required=True, help="folder of JSON-lines files")
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="of a model with random weights")
    parser.add_argument("--records", type=int, default=2, help="of each file, the first that fit; default: 2")
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="longer prompts are left out; default: 1800")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an output; default: 128")
    parser.add_argument("--context", type=int, default=4096, help="tokens of prompt and output together; default: 4096")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant; default: 2")
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS), choices=LEVELS, help="requests at once")
    parser.add_argument("--together", type=int, default=4, help="prompts of a turn with one request at a time; default: 4")
    parser.add_argument("--contestants", nargs="+", choices=names, default=[], metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    add_environments(parser)
    parser.add_argument("--llama", type=Path, help="a folder with llama-server and llama-bench, instead of ones that are made")
    parser.add_argument("--aiperf", type=Path, help="a Python that has aiperf, instead of one that is made")
    parser.add_argument("--http", action="store_true", help="besides, vllm bench serve and aiperf at our server and vLLM's")
    parser.add_argument("--clients", type=int, nargs="+", default=list(LEVELS), help="with --http: at once; default: 1 8 32")
    parser.add_argument("--requests", type=int, default=44, help="with --http: of a turn, at most; a quarter with one client")
    parser.add_argument("--kept", type=Path, default=Path("peers.kept.jsonl"), help="file of the turns so far")


BENCH = Bench(
    "peers", __doc__ or "", measure, options,
    dict.fromkeys(("records", "prompt_tokens", "threads", "rounds", "together", "clients", "requests"), 1) | {"max_tokens": 2},
    refuses=(MissingPeerError,),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; 130 where it was interrupted: the same command goes on with the turns that were kept."""
    try:
        return run(BENCH, argv)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with what is in --kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
