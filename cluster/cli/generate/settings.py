"""What ``outrider generate`` was asked for: a configuration, and the flags on top of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from configs.schema import MAX_WORLD_SIZE, Config, find_model, load_config
from configs.slices import Dtype, EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """The slices that an engine of this command gets."""

    model: ModelOptions
    engine: EngineOptions
    speculation: SpeculationOptions
    parallelism: ParallelismOptions  # mode none: one rank, in this process


def read_settings(path: Path | None, flags: Mapping[str, Any], records: int) -> Settings:
    """The settings of a yaml file, and on top of them the flags that were given.

    Args:
        path: a configuration; its defaults when absent.
        flags: values by the names of the command's parameters, those only that the user gave.
        records: how many there are to generate: they all wait in the engine.

    Raises:
        ValueError: the configuration, or a flag, is not allowed; the message names it.
    """
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
    running = flags.get("batch_size", config.engine.max_running)
    engine = dataclasses.replace(
        config.engine,
        max_running=running,
        max_step_tokens=max(config.engine.max_step_tokens, 2 * running),
        max_waiting=records,
    )
    return Settings(model, engine, _speculation(config, flags), _parallelism(config, flags))


def _speculation(config: Config, flags: Mapping[str, Any]) -> SpeculationOptions:
    """The options in the file are those of the strategy in the file."""
    strategy = flags.get("strategy", config.speculation.strategy)
    options = config.speculation.options if strategy == config.speculation.strategy else {}
    drafted = flags.get("max_draft_tokens", config.speculation.max_draft_tokens)
    draft_model = flags.get("draft_model", config.speculation.draft_model)
    return dataclasses.replace(
        config.speculation,
        strategy=strategy,
        max_draft_tokens=drafted,
        options={**options, **_pairs(flags.get("option") or ())},
        strategies=(),
        draft_model=None if draft_model is None else find_model(draft_model),
        exact=flags.get("exact", config.speculation.exact),
    )


def _pairs(texts: Sequence[str]) -> dict[str, Any]:
    """Values are JSON, or strings where they are not."""
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--option {text!r} must be name=value")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _parallelism(config: Config, flags: Mapping[str, Any]) -> ParallelismOptions:
    """``--world-size`` above 1 asks for lookahead parallelism, or for the other kind that the file names, 1 for none."""
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
