"""``outrider generate``: run an engine over a file of prompts, in this process without Ray, or on several ranks with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from cluster.cli.generate.records import Record, readable_summary, summarize
from cluster.cli.terminal import fail, fail_input
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions

if TYPE_CHECKING:
    from actors.offline import OfflineEngine
    from actors.offline_group import OfflineGroup
    from cluster.cli.generate.settings import Settings
    from decoding.request import SamplingParams

_MODEL, _ENGINE, _SPECULATION = ModelOptions(), EngineOptions(), SpeculationOptions()  # the defaults


def generate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of the model, .gguf file, or name: README says which.")] = _MODEL.path,
    prompt: Annotated[str | None, typer.Option(help="One prompt, in the place of --prompts.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `id`, `prompt` and, if wanted, `references` (list of strings).")
    ] = None,
    strategy: Annotated[str, typer.Option(help="How to draft: README lists the names.")] = _SPECULATION.strategy,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each output.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens that hold this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens of prompt and output come less often.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off the logit of a token that the output holds.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Taken off once for every time the output holds it.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every record. Same seed, same text, whatever the strategy and batch size.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be given several times.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user message in the model's chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = _MODEL.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = _MODEL.device,
    threads: Annotated[int | None, typer.Option(help="Torch threads on a CPU, of each rank; all cores when absent.")] = None,
    batch_size: Annotated[int, typer.Option(help="Requests in one step.")] = _ENGINE.max_running,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Most drafted rows of a request in a step; as many as pay on the device when absent.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="name=value of the strategy, such as copy_length=9; several times.")
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(help="Folder of a small model with the same tokenizer: speculative, spectr, bild, mjsd need one."),
    ] = _SPECULATION.draft_model,
    exact: Annotated[bool, typer.Option(help="Refuse strategies that change the output (bild, mjsd).")] = _SPECULATION.exact,
    world_size: Annotated[
        str,
        typer.Option(
            help="Ranks that share each step, one GPU, or --threads cores, each; auto: as many as fit. Each has the whole model, "
            "or a part where parallelism.mode of --config is tensor or pipeline."
        ),
    ] = "1",
    config: Annotated[
        Path | None,
        typer.Option(help="A yaml file as of `outrider serve`: model, engine, speculation, parallelism. Flags win over it."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, the last one a summary.")] = False,
) -> None:
    """Generate for one prompt, or for every record of a file.

    A record that does not fit the context gets a line with `error`; the others are generated. Outputs keep the order of the file.
    """
    from cluster.cli.generate.settings import read_settings
    from decoding.request import SamplingParams

    try:
        records = [Record(entry) for entry in _read(prompt, prompts)[:limit]]
    except PromptFileError as error:
        fail_input(f"--prompts: {error}")
    try:
        params = SamplingParams(
            max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()), min_p=min_p, repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        )  # fmt: skip
        settings = read_settings(config, _given(context), len(records))
    except ValueError as error:
        fail_input(str(error))
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), _engine(settings) as engine:  # Ray prints the output of its processes
        started = time.perf_counter()
        for record in _run(engine, records, params, chat):
            print(json.dumps(record.result()) if as_json else record.readable(), file=stdout, flush=True)
        summary = summarize(records, time.perf_counter() - started) | _circumstances(settings, engine)
    summary |= {"temperature": temperature, "seed": seed}
    print(json.dumps({"summary": summary}) if as_json else readable_summary(summary), flush=True)


def _read(prompt: str | None, prompts: Path | None) -> list[PromptRecord]:
    """Return the prompts; end the command unless exactly one of the two options was given."""
    if prompt is not None and prompts is not None:
        fail_input("--prompt and --prompts were both given: leave one of them out")
    if prompt is not None:
        return [PromptRecord("prompt", "prompt", prompt, ())]
    if prompts is None:
        fail_input("nothing to generate for: give --prompt TEXT, or --prompts FILE.jsonl")
    return read_prompts(prompts)


def _given(context: typer.Context) -> dict[str, Any]:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    # By name, because the class is click's or, in newer releases, typer's.
    return {name: context.params[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


@contextlib.contextmanager
def _engine(settings: Settings) -> Iterator[OfflineEngine | OfflineGroup]:
    """Yield the engine; end the command with one line if it cannot be loaded, or if its ranks or device fail."""
    from actors.ranks import GroupError
    from engine.errors import DeviceError, ModelLoadError

    try:
        with contextlib.closing(_load(settings)) as engine:
            yield engine
    except (ModelLoadError, GroupError, DeviceError) as error:
        fail(str(error))


def _load(settings: Settings) -> OfflineEngine | OfflineGroup:
    """Load the engine; end the command if an option is out of range."""
    from engine.loading.model_files import find_files

    for path in (settings.model.path, settings.speculation.draft_model):
        if path is not None:
            find_files(path)  # fetch it here, so that all ranks find it
    slices = settings.model, settings.engine, settings.speculation
    try:
        if settings.parallelism.mode == "none":
            from actors.offline import OfflineEngine

            return OfflineEngine(*slices)
        if settings.parallelism.mode != "lookahead":
            return _of_parts(settings)
        from actors.offline_group import OfflineGroup  # imports Ray, which is slow

        return OfflineGroup(*slices, settings.parallelism)
    except ValueError as error:
        fail_input(str(error))


def _of_parts(settings: Settings) -> OfflineEngine:
    """Load an engine whose ranks, in separate processes, hold parts of the model; losing a rank ends the engine."""
    import torch

    from actors.offline import OfflineEngine
    from actors.offline_group import shape_of
    from actors.sharded.group import whole_model
    from actors.sharded.processes import process_group

    options = settings.parallelism
    assert options.mode == "tensor" or options.mode == "pipeline", options.mode
    shape = shape_of(options.world_size, settings.model, os.cpu_count() or 1, torch.cuda.device_count())
    model = dataclasses.replace(settings.model, device=shape.device, threads=shape.threads)
    ranks = process_group(options.mode, shape.world_size, model, options)
    return OfflineEngine(whole_model(model), settings.engine, settings.speculation, ranks)


def _run(engine: OfflineEngine | OfflineGroup, records: list[Record], params: SamplingParams, chat: bool) -> Iterator[Record]:
    """Generate for all records; yield each once it and all before it are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        bar = progress.add_task("generating", total=len(records), speed="")
        _submit(engine, records, params, chat)
        done, tokens, started = 0, 0, time.perf_counter()
        outputs = engine.outputs()
        while True:
            while done < len(records) and records[done].finished:
                yield records[done]
                done += 1
            emitted = next(outputs, None)
            if emitted is None:
                break
            for output in emitted:
                records[int(output.request_id)].take(output)
                tokens += len(output.token_ids)
            speed = f"{tokens / (time.perf_counter() - started):.0f} tokens/s"
            progress.update(bar, completed=sum(record.finished for record in records), speed=speed)


def _submit(engine: OfflineEngine | OfflineGroup, records: list[Record], params: SamplingParams, chat: bool) -> None:
    from actors.offline import OfflinePrompt

    prompts = [OfflinePrompt(str(at), one.entry.prompt, one.entry.references) for at, one in enumerate(records)]
    for record, answer in zip(records, engine.submit(prompts, params, chat), strict=True):
        if isinstance(answer, int):
            record.prompt_tokens = answer
        else:
            record.error = answer
            print(f"record {record.entry.id}: {answer}", file=sys.stderr)


def _circumstances(settings: Settings, engine: OfflineEngine | OfflineGroup) -> dict[str, Any]:
    found = {
        "model": engine.info.served_name,
        "strategy": settings.speculation.strategy,
        "lossless": engine.info.lossless,
        "dtype": engine.info.dtype,
        "weights": engine.info.weights,
        "device": engine.info.device,
        "batch_size": settings.engine.max_running,
        "threads": engine.threads,
        "world_size": engine.world_size,
    }
    group = engine.group_counts()
    if settings.speculation.draft_model is not None:
        found["draft_model"] = Path(settings.speculation.draft_model).name
    return found if group is None else {**found, "group": dataclasses.asdict(group)}
