"""This engine beside vLLM, llama.cpp and transformers: same prompts, token ids and threads, in turns.

    outrider bench peers --workloads DIR
    outrider bench peers --workloads DIR --vllm PYTHON --llama DIR    # given installations; else made in --environments
    outrider bench peers --workloads DIR --http    # also vllm bench serve and aiperf at this server and vLLM's

Other systems are installed once, in separate environments with pinned versions; a missing one is named in a line, and ``n/a`` in
the record. Each system loads its model once, and idles while others run. The memory's speed is read before and after every turn.
Turns are kept in ``--kept``, so that an interrupted run continues; another setting or revision needs another file.
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

from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.models import model_folder
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.record import ROOT, Kept, git_state, portable
from outrider.experiments.bench.run import Bench, Results, Run, run
from outrider.experiments.bench.workloads import first_that_fit
from outrider.experiments.peers import environments, over_http
from outrider.experiments.peers.contestants import (
    CONTESTANTS,
    LLAMA_LOOKUP,
    NGRAM,
    SUFFIX,
    Contestant,
    Field,
    Setting,
    end_tokens,
)
from outrider.experiments.peers.environments import Environments, MissingPeerError, add_environments
from outrider.experiments.peers.gguf_file import PACKAGED, packaged_file, write_gguf
from outrider.experiments.peers.rounds import ASKED_ONCE, ONCE, Roof, Rounds, Speeds, llama_bench, place, turns_of

LEVELS = (1, 8, 32)
TOKENIZER = "smollm2-135m-instruct"  # of models with random weights
TOGETHER = 4  # prompts of a turn with one request at a time


def read_prompts(args: argparse.Namespace, model: str) -> list[Prompt]:
    """Read the first records of each workload that fit, the first ones of all workloads first.

    Raises:
        PromptFileError: the folder cannot be read, or no prompt fits.
        ModelLoadError: the model has no usable tokenizer.
    """
    tokenizer = load_tokenizer(model)
    found = []
    for record, ids in first_that_fit(args.workloads, tokenizer, args.records, args.prompt_tokens):
        references = [tokenizer.encode(text, add_special_tokens=False) for text in record.references]
        found.append(Prompt(record.id, ids, references))
    return found


@contextmanager
def running(name: str, args: argparse.Namespace, made: Environments, progress: Progress) -> Iterator[tuple[Field, list[Prompt]]]:
    """Yield the processes of a model, not started yet, and its prompts.

    Raises:
        PromptFileError: no prompts fit.
        ModelLoadError: the model cannot be used.
    """
    folder: Path = args.environments
    naming = argparse.Namespace(**vars(args) | {"model": name, "tokenizer": TOKENIZER})
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
    """Run all rounds of all models.

    Raises:
        PromptFileError: no prompts fit.
        ModelLoadError: a model cannot be used.
        MissingPeerError: this project's engine has ended.
        ValueError: the file of turns has another setting.
    """
    progress = run.progress
    made = Environments(args.environments, {"vllm": args.vllm, "llama": args.llama}, args.install, progress.say)
    chosen = [one for one in CONTESTANTS if not args.contestants or one.name in args.contestants]
    shaping = ("model", "dtype", "threads", "records", "prompt_tokens", "max_tokens", "context", "levels")
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
    """Return bars of tokens per second by contestant for each number of requests; for one request, after the first token."""
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
            turns = list(turns_of(name, number, chosen, prompts, args.levels, TOGETHER))
            rounds.run([turn for turn in turns if turn[1] is not None or ASKED_ONCE[turn[0]["contestant"]] in systems])
        field.ready("ours")
        told = {name: {key: value for key, value in of.items() if key != "ready"} for name, of in field.told.items()}
    missing = dict(rounds.missing)
    http: dict[str, Any] = {}
    if args.http:  # after the processes of the field have ended
        http, faults = over_http.measure(name, args, made, kept, roof, progress.say)
        missing |= faults
    own = [turn for turn in kept.found if turn["model"] == name and "tool" not in turn]
    speeds, roofs = Speeds(own), [value for turn in own for value in turn["roof"]]
    once = {each: [turn["found"] for turn in speeds.of(each, ONCE)] for each in ASKED_ONCE}
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "told": told["ours"],
        "resident": {name: of["resident_bytes"] / of["weight_bytes"] for name, of in told.items() if "resident_bytes" in of},
        "roof_gb_s": [min(roofs), statistics.median(roofs), max(roofs)] if roofs else [],
        "speeds": speeds.summary([one.name for one in chosen], args.levels),
        "step": once.pop("rows"),
        "llama_bench": once,
        "missing": missing,
        **({"http": http} if http else {}),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    names, models = [one.name for one in CONTESTANTS], ["smollm2-135m-instruct", "110m"]
    parser.add_argument("--model", nargs="+", default=models, help="folders, names, or sizes of random weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--workloads", type=Path, required=True, help="folder of JSON-lines files")
    parser.add_argument("--records", type=int, default=2, help="of each file, the first that fit; default: 2")
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="longer prompts are left out; default: 1800")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an output; default: 128")
    parser.add_argument("--context", type=int, default=4096, help="tokens of prompt and output together; default: 4096")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant; default: 2")
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS), choices=LEVELS, help="requests at once")
    parser.add_argument("--contestants", nargs="+", choices=names, default=[], metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    add_environments(parser)
    parser.add_argument("--llama", type=Path, help="folder of llama-server and llama-bench; default: made in --environments")
    parser.add_argument("--http", action="store_true", help="also vllm bench serve and aiperf at this server and vLLM's")
    parser.add_argument("--kept", type=Path, default=Path("peers.kept.jsonl"), help="file of the turns so far")


BENCH = Bench(
    "peers", __doc__ or "", measure, options,
    dict.fromkeys(("records", "prompt_tokens", "threads", "rounds"), 1) | {"max_tokens": 2},
    refuses=(MissingPeerError,),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return 130 if interrupted: the same command continues with the turns that were kept."""
    try:
        return run(BENCH, argv)
    except KeyboardInterrupt:
        print("interrupted: the same command continues with what is in --kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
