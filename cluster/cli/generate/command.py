"""``outrider generate``: run an engine over a file of prompts, in this process without Ray, or on several ranks with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from outrider.cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from outrider.cluster.cli.generate.strategy_option import AS_PUBLISHED_HELP, OPTION_HELP, parse_options
from outrider.cluster.cli.terminal import fail, fail_input
from outrider.configs.schema import MAX_WORLD_SIZE, Config, find_model, load_config
from outrider.configs.slices import Dtype, EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions

if TYPE_CHECKING:
    from outrider.actors.offline import OfflineEngine
    from outrider.actors.offline_group import OfflineGroup
    from outrider.decoding.request import SamplingParams, SpecStats, StepOutput

_MODEL, _ENGINE, _SPECULATION = ModelOptions(), EngineOptions(), SpeculationOptions()  # the defaults


def generate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder, .gguf file or hub name (see README).")] = _MODEL.path,
    prompt: Annotated[str | None, typer.Option(help="A single prompt, instead of --prompts.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines file with `id`, `prompt` and optionally `references` (list of strings).")
    ] = None,
    strategy: Annotated[str, typer.Option(help="Drafting strategy (see README).")] = _SPECULATION.strategy,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per output.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this fraction of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, makes tokens of prompt and output less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted from the logits of tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtracted once per occurrence in the output.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of every record; the text does not depend on strategy or batch size.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user message in the model's chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = _MODEL.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = _MODEL.device,
    threads: Annotated[int | None, typer.Option(help="Torch threads on a CPU, per rank. Default: all cores.")] = None,
    batch_size: Annotated[int, typer.Option(help="Maximum requests per step.")] = _ENGINE.max_running,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Maximum draft tokens of a request per step. Default: as many as pay off on the device.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help=OPTION_HELP)] = None,
    as_published: Annotated[bool, typer.Option("--as-published", help=AS_PUBLISHED_HELP)] = _SPECULATION.as_published,
    draft_model: Annotated[
        str | None,
        typer.Option(help="Folder of a small model with the same tokenizer, for speculative, spectr, bild and mjsd."),
    ] = _SPECULATION.draft_model,
    exact: Annotated[bool, typer.Option(help="Refuse strategies that change the output (bild, mjsd).")] = _SPECULATION.exact,
    world_size: Annotated[
        str,
        typer.Option(
            help="Ranks that share each step, with one GPU or --threads cores each; auto: as many as fit. Each rank has the "
            "whole model, or a part if parallelism.mode in --config is tensor or pipeline."
        ),
    ] = "1",
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file as for `outrider serve`: model, engine, speculation, parallelism; flags override it."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line on stdout, a summary last.")] = False,
) -> None:
    """Generate for one prompt, or for every record of a file.

    A record that does not fit the context gets a line with `error`; the others are generated. Outputs keep the order of the file.
    """
    from outrider.decoding.request import SamplingParams

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
    # stdout holds results only, so that a pipe can read them.
    with contextlib.redirect_stdout(sys.stderr), _engine(settings) as engine:  # Ray prints the output of its processes
        started = time.perf_counter()
        for record in _run(engine, records, params, chat):
            print(json.dumps(record.result()) if as_json else record.readable(), file=stdout, flush=True)
        summary = summarize(records, time.perf_counter() - started) | _circumstances(settings, engine)
        summary |= _cut(records, settings.speculation.strategy)
    summary |= {"temperature": temperature, "seed": seed}
    print(json.dumps({"summary": summary}) if as_json else readable_summary(summary), flush=True)


def _read(prompt: str | None, prompts: Path | None) -> list[PromptRecord]:
    """Return the prompts; end the command unless exactly one of the two options was given."""
    if prompt is not None and prompts is not None:
        fail_input("--prompt and --prompts were both given: leave one of them out")
    if prompt is not None:
        return [PromptRecord("prompt", "prompt", prompt, ())]
    if prompts is None:
        fail_input("no prompt: give --prompt TEXT, or --prompts FILE.jsonl")
    return read_prompts(prompts)


def _given(context: typer.Context) -> dict[str, Any]:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    # By name, because the class is click's or, in newer releases, typer's.
    return {name: context.params[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


@contextlib.contextmanager
def _engine(settings: Settings) -> Iterator[OfflineEngine | OfflineGroup]:
    """Yield the engine; end the command with one line if it cannot be loaded, or if its ranks or device fail."""
    typer.echo(f"outrider: loading {settings.model.path}", err=True)
    from outrider.actors.heap import paused_collector

    with paused_collector():
        from outrider.engine.library_imports import import_transformers

        import_transformers()
        from outrider.actors.ranks import GroupError
        from outrider.engine.errors import DeviceError, ModelLoadError
    try:
        with paused_collector():
            engine = _load(settings)
        with contextlib.closing(engine):
            yield engine
    except (ModelLoadError, GroupError, DeviceError) as error:
        fail(str(error))


def _load(settings: Settings) -> OfflineEngine | OfflineGroup:
    """Load the engine; end the command if an option is out of range."""
    from outrider.engine.loading.model_files import find_files

    for path in (settings.model.path, settings.speculation.draft_model):
        if path is not None:
            find_files(path)  # fetch it here, so that all ranks find it
    slices = settings.model, settings.engine, settings.speculation
    try:
        if settings.parallelism.mode == "none":
            from outrider.actors.offline import OfflineEngine

            return OfflineEngine(*slices, brief=settings.engine.max_waiting == 1)
        if settings.parallelism.mode != "lookahead":
            return _of_parts(settings)
        from outrider.actors.offline_group import OfflineGroup  # imports Ray, which is slow

        return OfflineGroup(*slices, settings.parallelism)
    except ValueError as error:
        fail_input(str(error))


def _of_parts(settings: Settings) -> OfflineEngine:
    """Load an engine whose ranks, in separate processes, hold parts of the model; losing a rank ends the engine."""
    import torch

    from outrider.actors.offline import OfflineEngine
    from outrider.actors.offline_group import group_shape
    from outrider.actors.sharded.group import whole_model
    from outrider.actors.sharded.processes import process_group

    options = settings.parallelism
    assert options.mode == "tensor" or options.mode == "pipeline", options.mode
    shape = group_shape(options.world_size, settings.model, os.cpu_count() or 1, torch.cuda.device_count())
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
    from outrider.actors.offline import OfflinePrompt

    prompts = [OfflinePrompt(str(at), one.entry.prompt, one.entry.references) for at, one in enumerate(records)]
    for record, answer in zip(records, engine.submit(prompts, params, chat), strict=True):
        if isinstance(answer, int):
            record.prompt_tokens = answer
        else:
            record.error = answer
            print(f"record {record.entry.id}: {answer}", file=sys.stderr)


def _cut(records: Sequence[Record], strategy: str) -> dict[str, str]:
    """Return a line that drafts were smaller than the options ask for, if they were: mean rows of the records concerned."""
    cut = [record.stats for record in records if record.stats is not None and record.stats.wanted_rows]
    if not cut:
        return {}
    total = dataclasses.replace(cut[-1], steps=sum(one.steps for one in cut), drafted=sum(one.drafted for one in cut))
    line = total.cut(strategy)
    return {} if line is None else {"cut": line}


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


@dataclass(slots=True)
class Record:
    """One record of the file and its result."""

    entry: PromptRecord
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stats: SpecStats | None = None  # set once it is generated
    error: str | None = None  # reason why it was not generated

    @property
    def finished(self) -> bool:
        """Return whether the record is generated or has failed."""
        return self.stats is not None or self.error is not None

    def take(self, output: StepOutput) -> None:
        """Add the output of one step."""
        self.token_ids += output.token_ids
        self.text += output.text
        if output.finish_reason is not None:
            self.finish_reason, self.stats = str(output.finish_reason), output.stats

    def result(self) -> dict[str, Any]:
        """Return the JSON line of the record; ``prefill_s`` and ``decode_s`` are seconds."""
        if self.stats is None:
            return {"id": self.entry.id, "error": self.error}
        return {
            "id": self.entry.id,
            "output_token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "steps": self.stats.steps,
            "tokens_per_step": round(self.stats.tokens_per_step(len(self.token_ids)), 4),
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "accepted_by_source": self.stats.accepted_by_source,
            "prefill_s": round(self.stats.prefill_s, 6),
            "decode_s": round(self.stats.decode_s, 6),
        }

    def readable(self) -> str:
        """Return the record as text for people."""
        if self.stats is None:
            return f"[{self.entry.id}] not generated: {self.error}\n"
        count = len(self.token_ids)
        rate = self.stats.tokens_per_step(count)
        return f"[{self.entry.id}] {self.text.strip()}\n  ({count} tokens, {rate:.2f} per step, {self.finish_reason})\n"


def summarize(records: Sequence[Record], wall_s: float) -> dict[str, Any]:
    """Return totals over all generated records."""
    stats = [record.stats for record in records if record.stats is not None]
    tokens = sum(len(record.token_ids) for record in records)
    steps = sum(one.steps for one in stats)
    by_source: dict[str, int] = {}
    for one in stats:
        for source, count in one.accepted_by_source.items():
            by_source[source] = by_source.get(source, 0) + count
    return {
        "records": len(stats),
        "failed": len(records) - len(stats),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "output_tokens": tokens,
        "steps": steps,
        "tokens_per_step": round(tokens / steps, 4) if steps else 0.0,
        "drafted": sum(one.drafted for one in stats),
        "accepted": sum(one.accepted for one in stats),
        "accepted_by_source": by_source,
        "prefill_s": round(sum(one.prefill_s for one in stats), 3),
        "decode_s": round(sum(one.decode_s for one in stats), 3),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 2),
    }


def readable_summary(summary: dict[str, Any]) -> str:
    """Return the summary as one line for people."""
    parts = [
        f"{summary['records']} records, {summary['output_tokens']} tokens in {summary['wall_s']:.1f} s",
        f"{summary['tokens_per_s']:.1f} tokens/s",
        f"{summary['tokens_per_step']:.2f} tokens per step",
        f"{summary['accepted']} of {summary['drafted']} drafted tokens accepted",
    ]
    if not summary["lossless"]:
        parts.append(f"{summary['strategy']} is lossy")
    group = summary.get("group")
    if group is not None:
        parts.append(f"{group['mean_width']:.2f} of {summary['world_size']} ranks on average, {group['losses']} lost")
        parts.append(f"exchange {100 * group['exchange_share']:.1f} % of the steps")
    if "cut" in summary:
        parts.append(f"\n{summary['cut'].replace('as_published drafts', '--as-published drafts')}")
    if summary["failed"]:
        parts.append(f"{summary['failed']} records failed")
    return ", ".join(parts).replace(", \n", "\n")


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration slices of this command's engine."""

    model: ModelOptions
    engine: EngineOptions
    speculation: SpeculationOptions
    parallelism: ParallelismOptions  # mode none: one rank in this process


def read_settings(path: Path | None, flags: Mapping[str, Any], records: int) -> Settings:
    """Return the settings of a yaml file (None: defaults), overridden by flags. Raises ``ValueError`` naming a mistake."""
    config = load_config(path)
    dtype = flags.get("dtype", config.model.dtype)
    if dtype not in get_args(Dtype):
        raise ValueError(f"--dtype {dtype!r} is not known: give one of {', '.join(get_args(Dtype))}")
    model = dataclasses.replace(
        config.model,
        path=find_model(flags["model"]) if "model" in flags else config.model.path,
        dtype=dtype,
        device=flags.get("device", config.model.device),
        threads=flags.get("threads", config.model.threads),
    )
    running, speculation = flags.get("batch_size", config.engine.max_running), _speculation(config, flags)
    rows = 1 + speculation.most_draft_tokens if speculation.as_published else 2  # of a request in a step
    engine = dataclasses.replace(
        config.engine,
        max_running=running,
        max_step_tokens=max(config.engine.max_step_tokens, rows * running),
        max_waiting=records,
    )
    return Settings(model, engine, speculation, _parallelism(config, flags))


def _speculation(config: Config, flags: Mapping[str, Any]) -> SpeculationOptions:
    strategy = flags.get("strategy", config.speculation.strategy)
    # The file's options belong to its strategy; another one starts without options.
    options = config.speculation.options if strategy == config.speculation.strategy else {}
    drafted = flags.get("max_draft_tokens", config.speculation.max_draft_tokens)
    draft_model = flags.get("draft_model", config.speculation.draft_model)
    options = {**options, **parse_options(flags.get("option") or ())}
    if options:  # refuse a wrong one before the model is loaded
        from outrider.decoding.drafters.registry import build_drafter

        build_drafter(strategy, options)
    return dataclasses.replace(
        config.speculation,
        strategy=strategy,
        max_draft_tokens=drafted,
        as_published=flags.get("as_published", config.speculation.as_published),
        options=options,
        strategies=(),
        draft_model=None if draft_model is None else find_model(draft_model),
        exact=flags.get("exact", config.speculation.exact),
    )


def _parallelism(config: Config, flags: Mapping[str, Any]) -> ParallelismOptions:
    """Resolve ``--world-size``: above 1 selects lookahead parallelism, or the mode that the file names; 1 selects none."""
    kind = "lookahead" if config.parallelism.mode == "none" else config.parallelism.mode
    if kind != "lookahead" and (flags.get("draft_model") is not None or flags.get("world_size") == "auto"):
        refused = "--draft-model" if flags.get("draft_model") is not None else "--world-size auto"
        raise ValueError(f"{refused} is not for parallelism.mode {kind}, which the file asks for: leave it out")
    if "world_size" not in flags:
        alone = config.parallelism.mode == "none" or config.parallelism.world_size == 1
        return dataclasses.replace(config.parallelism, mode="none" if alone else kind)
    text = flags["world_size"]
    if text == "auto":
        return dataclasses.replace(config.parallelism, mode="lookahead", world_size="auto")
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_WORLD_SIZE:
        raise ValueError(f"--world-size {text!r} must be a number from 1 to {MAX_WORLD_SIZE}, or auto")
    return dataclasses.replace(config.parallelism, mode="none" if int(text) == 1 else kind, world_size=int(text))
