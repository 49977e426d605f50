"""Settings of ``outrider generate``: a configuration file, overridden by flags."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from outrider.configs.schema import MAX_WORLD_SIZE, Config, find_model, load_config
from outrider.configs.slices import Dtype, EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration slices of this command's engine."""

    model: ModelOptions
    engine: EngineOptions
    speculation: SpeculationOptions
    parallelism: ParallelismOptions  # mode none: one rank in this process


def read_settings(path: Path | None, flags: Mapping[str, Any], records: int) -> Settings:
    """Return the settings of a yaml file, overridden by the flags that were given.

    Args:
        path: a configuration; None for the defaults.
        flags: values that the user gave, by parameter name.
        records: number of records; all of them wait in the engine's queue.

    Raises:
        ValueError: the configuration or a flag is not allowed; the message names it.
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
    strategy = flags.get("strategy", config.speculation.strategy)
    # The file's options belong to its strategy; another one starts without options.
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
    """Parse ``name=value``; a value that is not JSON is a string."""
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
