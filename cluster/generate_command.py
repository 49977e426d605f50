"""``outrider generate``: the engine in this process, over a file of prompts, without Ray."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from cluster.prompt_file import PromptFileError, PromptRecord, read_prompts
from cluster.terminal import fail, fail_input
from configs.schema import find_model
from configs.slices import Dtype, EngineOptions, ModelOptions, SpeculationOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from decoding.request import Request, SamplingParams
    from engine.engine import Engine

_MODEL, _ENGINE, _SPECULATION = ModelOptions(), EngineOptions(), SpeculationOptions()  # the defaults


@dataclass(slots=True)
class _Record:
    """One record of the file, and what became of it."""

    entry: PromptRecord
    text: str = ""
    request: Request | None = None
    error: str | None = None
    finished: bool = field(default=False)

    def result(self) -> dict[str, Any]:
        """The line of the output; ``prefill_s`` and ``decode_s`` are seconds."""
        if self.request is None:
            return {"id": self.entry.id, "error": self.error}
        stats, output = self.request.stats, self.request.output_ids.tolist()
        return {
            "id": self.entry.id,
            "output_token_ids": output,
            "text": self.text,
            "finish_reason": str(self.request.finish_reason),
            "steps": stats.steps,
            "tokens_per_step": round(stats.tokens_per_step(len(output)), 4),
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "accepted_by_source": stats.accepted_by_source,
            "prefill_s": round(stats.prefill_s, 6),
            "decode_s": round(stats.decode_s, 6),
        }


def generate(
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")] = _MODEL.path,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with `id`, `prompt` and, if wanted, `references` (list of strings).")
    ] = ...,  # type: ignore[assignment]
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
    threads: Annotated[int | None, typer.Option(help="Torch threads on a CPU; all cores when absent.")] = None,
    batch_size: Annotated[int, typer.Option(help="Requests in one step.")] = _ENGINE.max_running,
    max_draft_tokens: Annotated[
        int, typer.Option(help="Most drafted rows of a request in a step.")
    ] = _SPECULATION.max_draft_tokens,
    option: Annotated[
        list[str] | None, typer.Option(help="name=value of the strategy, such as copy_length=9; several times.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N records.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, the last one a summary.")] = False,
) -> None:
    """Generate for every record of a file, in this process.

    A record that does not fit the context gets a line with `error`; the others are generated. Outputs keep the order of the file.
    """
    from decoding.request import SamplingParams

    try:
        records = [_Record(entry) for entry in read_prompts(prompts)[:limit]]
    except PromptFileError as error:
        fail_input(f"--prompts: {error}")
    if dtype not in get_args(Dtype):
        fail_input(f"--dtype {dtype!r} is not known: give one of {', '.join(get_args(Dtype))}")
    try:
        params = SamplingParams(
            max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()), min_p=min_p, repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        )  # fmt: skip
        model_options = ModelOptions(path=find_model(model), dtype=dtype, device=device, threads=threads)  # type: ignore[arg-type]
        engine_options = EngineOptions(
            max_running=batch_size, max_step_tokens=max(_ENGINE.max_step_tokens, 2 * batch_size), max_waiting=len(records)
        )
        speculation = SpeculationOptions(strategy, max_draft_tokens, _strategy_options(option or []))
        engine = _load(model_options, engine_options, speculation)
    except ValueError as error:
        fail_input(str(error))
    started = time.perf_counter()
    for record in _run(engine, records, params, chat):
        print(json.dumps(record.result()) if as_json else _readable(record), flush=True)
    summary = _summary(records, time.perf_counter() - started)
    summary |= {"model": engine.info.served_name, "strategy": strategy, "dtype": engine.info.dtype, "device": engine.info.device}
    summary |= {"batch_size": batch_size, "threads": threads, "temperature": temperature, "seed": seed}
    print(json.dumps({"summary": summary}) if as_json else _readable_summary(summary), flush=True)


def _load(model: ModelOptions, options: EngineOptions, speculation: SpeculationOptions) -> Engine:
    """The engine; ends the command when the model cannot be used. Raises ValueError for an option outside its range."""
    from engine.engine import Engine
    from engine.errors import ModelLoadError

    try:
        return Engine.load(model, options, speculation)
    except ModelLoadError as error:
        fail(str(error))


def _strategy_options(pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            fail_input(f"--option {pair!r} must be name=value")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _run(engine: Engine, records: list[_Record], params: SamplingParams, chat: bool) -> Iterator[_Record]:
    """Generates for all records; yields each once it and all before it are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    by_id = {str(index): record for index, record in enumerate(records)}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        bar = progress.add_task("generating", total=len(records), speed="")
        for index, record in enumerate(records):
            _add(engine, str(index), record, params, chat)
        done, tokens, started = 0, 0, time.perf_counter()
        while done < len(records):
            for output in engine.step():
                record = by_id[output.request_id]
                record.text += output.text
                record.finished = output.finish_reason is not None
                tokens += len(output.token_ids)
            _show(progress, bar, records, tokens / (time.perf_counter() - started))
            while done < len(records) and records[done].finished:
                yield records[done]
                done += 1


def _show(progress: Progress, bar: Any, records: list[_Record], tokens_per_s: float) -> None:
    progress.update(bar, completed=sum(record.finished for record in records), speed=f"{tokens_per_s:.0f} tokens/s")


def _add(engine: Engine, request_id: str, record: _Record, params: SamplingParams, chat: bool) -> None:
    """Hands a record to the engine; one that cannot be served is finished with its error."""
    from decoding.request import Request
    from engine.chat import render_chat
    from engine.errors import RequestError

    tokenizer = engine.tokenizer
    assert tokenizer is not None
    try:
        ids = (
            render_chat(tokenizer, [{"role": "user", "content": record.entry.prompt}])
            if chat
            else tokenizer(record.entry.prompt)["input_ids"]
        )
        if not ids:
            raise RequestError("prompt", "it holds no token")
        references = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in record.entry.references]
        request = Request(request_id, ids, params, references, tenant="local")
        engine.add(request)
        record.request = request
    except RequestError as error:
        record.error, record.finished = str(error), True
        print(f"record {record.entry.id}: {error}", file=sys.stderr)


def _summary(records: list[_Record], wall_s: float) -> dict[str, Any]:
    requests = [record.request for record in records if record.request is not None]
    tokens = sum(request.num_output for request in requests)
    steps = sum(request.stats.steps for request in requests)
    by_source: dict[str, int] = {}
    for request in requests:
        for source, count in request.stats.accepted_by_source.items():
            by_source[source] = by_source.get(source, 0) + count
    return {
        "records": len(requests),
        "failed": len(records) - len(requests),
        "prompt_tokens": sum(request.num_prompt for request in requests),
        "output_tokens": tokens,
        "steps": steps,
        "tokens_per_step": round(tokens / steps, 4) if steps else 0.0,
        "drafted": sum(request.stats.drafted for request in requests),
        "accepted": sum(request.stats.accepted for request in requests),
        "accepted_by_source": by_source,
        "prefill_s": round(sum(request.stats.prefill_s for request in requests), 3),
        "decode_s": round(sum(request.stats.decode_s for request in requests), 3),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 2),
    }


def _readable(record: _Record) -> str:
    if record.request is None:
        return f"[{record.entry.id}] not generated: {record.error}\n"
    count, reason = record.request.num_output, record.request.finish_reason
    rate = record.request.stats.tokens_per_step(count)
    return f"[{record.entry.id}] {record.text.strip()}\n  ({count} tokens, {rate:.2f} per step, {reason})\n"


def _readable_summary(summary: dict[str, Any]) -> str:
    parts = [
        f"{summary['records']} records, {summary['output_tokens']} tokens in {summary['wall_s']:.1f} s",
        f"{summary['tokens_per_s']:.1f} tokens/s",
        f"{summary['tokens_per_step']:.2f} tokens per step",
        f"{summary['accepted']} of {summary['drafted']} drafted tokens accepted",
    ]
    if summary["failed"]:
        parts.append(f"{summary['failed']} records failed")
    return ", ".join(parts)
