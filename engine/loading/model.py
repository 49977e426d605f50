"""Model and tokenizer from a folder, a GGUF file or the hub, refused early and in one line when they cannot be served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from configs.slices import ModelOptions
from decoding.drafters import LOSSLESS, WITH_DRAFT_MODEL
from decoding.request import PLAIN
from engine.errors import ModelLoadError, RequestError, first_line
from engine.forward.attention import TREE_ATTENTION
from engine.loading.gguf import is_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer
from engine.loading.model_files import find_files
from engine.loading.revisions import model_revision, tokenizer_revision

# All other layers keep a state that cannot be rolled back once drafts were refused, or attend in ways that are not computed here.
_KEPT_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a running engine says of itself."""

    served_name: str
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    dtype: str
    device: str
    num_parameters: int
    eos_token_ids: tuple[int, ...]  # each of them ends a text
    strategy: str
    lossless: bool
    model_revision: str  # hexadecimal digits that stand for the weights, and for what the tokenizer makes of a text
    tokenizer_revision: str
    strategies: tuple[str, ...] = ()  # what requests may ask for besides ``strategy`` and plain decoding
    exact: bool = False  # every row has the same bits in any company, as was seen at the start: ``engine.forward.exactness``

    @property
    def choices(self) -> tuple[str, ...]:
        """Every strategy that a request may ask for, first the one that it gets when it asks for none."""
        return tuple(dict.fromkeys((self.strategy, *self.strategies, PLAIN)))

    @property
    def lossless_choices(self) -> tuple[str, ...]:
        """Those of ``choices`` whose outputs have the distribution of plain decoding."""
        return tuple(name for name in self.choices if name in LOSSLESS)

    def is_lossless(self, strategy: str | None, max_draft_tokens: int | None = None) -> bool:
        """Whether what a request that asks for a strategy, or for none, is given has the distribution of plain decoding: without
        drafts it has."""
        return max_draft_tokens == 0 or (strategy or self.strategy) in LOSSLESS

    def check_strategy(self, strategy: str | None) -> None:
        """Raises ``RequestError`` for a strategy that requests may not ask for."""
        if strategy is not None and strategy not in self.choices:
            message = f"{strategy!r} cannot be asked for here; allowed: {', '.join(self.choices)}"
            if strategy in WITH_DRAFT_MODEL and strategy not in LOSSLESS:
                message += "; it changes the output: a server offers it with speculation.exact=false and speculation.strategies"
            raise RequestError("speculation.strategy", message)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with what the engine must know of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    served_name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Tokens of which the model gives logits."""
        return int(self.model.config.get_text_config().vocab_size)

    def info(self, strategy: str, lossless: bool, strategies: tuple[str, ...] = ()) -> ModelInfo:
        """What an engine with this model and a strategy, and further ones that requests may ask for, says of itself."""
        return ModelInfo(
            served_name=self.served_name,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            num_parameters=self.model.num_parameters(),
            eos_token_ids=self.eos_token_ids,
            strategy=strategy,
            lossless=lossless,
            model_revision=model_revision(self.model),
            tokenizer_revision=tokenizer_revision(self.tokenizer),
            strategies=strategies,
        )


def load_model(options: ModelOptions) -> LoadedModel:
    """Loads a stock causal language model with tree attention.

    Raises:
        ModelLoadError: no such model, a broken checkpoint, or an architecture that cannot be served; the message says which.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    config = load_config(options.path)
    _refuse_unsupported(config, options.path)
    device = _device(options.device)
    dtype: torch.dtype | Literal["auto"] = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    model = load_weights(options.path, dtype, TREE_ATTENTION, device).eval()
    tokenizer = load_tokenizer(options.path)
    return LoadedModel(model, tokenizer, options.name, _context(config, options), _end_tokens(model, tokenizer))


def load_config(path: str) -> PreTrainedConfig:
    """The configuration of a model.

    Args:
        path: as in ``ModelOptions``.

    Raises:
        ModelLoadError: no such model.
    """
    _refuse_missing_folder(path)
    files = find_files(path)
    if is_gguf(files):
        return load_gguf_config(files)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(files)
    except (OSError, ValueError) as error:
        message = f"model {path!r} could not be found or read: give a folder with config.json, a .gguf file, or a name on the hub"
        raise ModelLoadError(f"{message} ({first_line(error)})") from error
    return config


def load_weights(
    path: str, dtype: torch.dtype | Literal["auto"], attention: str, device: torch.device | None = None
) -> PreTrainedModel:
    """The model alone, whatever it is.

    Args:
        path: as in ``ModelOptions``.
        dtype: of the weights; auto: as the checkpoint says, bfloat16 for a GGUF file.
        attention: transformers' ``attn_implementation``.
        device: where it goes; the CPU when absent.

    Raises:
        ModelLoadError: no such model, or a broken checkpoint.
    """
    files = find_files(path)
    try:
        if is_gguf(files):
            model = load_gguf_model(files, torch.bfloat16 if dtype == "auto" else dtype, attention)
        else:
            model = AutoModelForCausalLM.from_pretrained(files, dtype=dtype, attn_implementation=attention)
        return model if device is None else model.to(device)
    except ModelLoadError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"model {path!r} could not be loaded: {first_line(error)}") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model.

    Args:
        path: as in ``ModelOptions``.

    Raises:
        ModelLoadError: there is none, or it has no fast implementation, which streaming text needs.
    """
    _refuse_missing_folder(path)
    files = find_files(path)
    try:
        tokenizer = load_gguf_tokenizer(files) if is_gguf(files) else AutoTokenizer.from_pretrained(files)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the tokenizer of {path!r} could not be loaded: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(f"the tokenizer of {path!r} has no fast implementation: add a tokenizer.json to the model")
    return tokenizer


def _refuse_missing_folder(path: str) -> None:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not is_gguf(path) and not Path(path).exists() and "/" in path:
        advice = "give a folder with config.json, a .gguf file, or a name on the hub"
        raise ModelLoadError(f"model path {path!r} does not exist: {advice}")


def _refuse_unsupported(config: PreTrainedConfig, path: str) -> None:
    """Refuses, by name, what tree attention cannot serve, before any weight is read."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(f"model {path!r} is of type {config.model_type!r}, which is not a causal language model")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = architecture.__name__
    if not getattr(architecture, "_supports_attention_backend", False):
        raise ModelLoadError(f"{name} cannot be served: its attention does not go through transformers' AttentionInterface")
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _KEPT_LAYERS
    if getattr(architecture, "_is_stateful", False) or others:
        layers = ", ".join(sorted(others)) or "recurrent state"
        raise ModelLoadError(f"{name} cannot be served: it has layers that cannot roll back refused drafts ({layers})")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"model.device {name!r} is not known: give cpu, cuda, cuda:1, ... or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("model.device is cuda, but torch sees no GPU: run `outrider doctor`, or set model.device=cpu")
    return device


def _context(config: PreTrainedConfig, options: ModelOptions) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    constant = _constant_positions(config)
    if options.max_model_len is None:
        if own is None:
            raise ModelLoadError(f"model {options.path!r} does not say how long its context is: set model.max_model_len")
        return int(own) if constant is None else min(int(own), constant)
    if options.max_model_len < 2:
        raise ModelLoadError(f"model.max_model_len must be at least 2, got {options.max_model_len}")
    if own is not None and options.max_model_len > own:
        raise ModelLoadError(
            f"model.max_model_len is {options.max_model_len}, but the context of {options.path!r} is {own} tokens"
        )
    if constant is not None and options.max_model_len > constant:
        raise ModelLoadError(
            f"model.max_model_len is {options.max_model_len}, but {options.path!r} changes the positions of all tokens beyond "
            f"{constant} (longrope), which cached keys cannot follow: set it to {constant} at most"
        )
    return options.max_model_len


def _constant_positions(config: PreTrainedConfig) -> int | None:
    """Tokens up to which longrope keeps one set of frequencies; None for other models.

    transformers picks the set by the longest sequence of a forward, so that beyond this length the other requests of a step, and
    refused drafts, would change an output.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one set, or one for each kind of layer
    limits = [
        entry.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for entry in settings
        if entry.get("rope_type") == "longrope"
    ]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """All end tokens: those `generate` would stop at, else those of the configuration, else the tokenizer's."""
    sources: tuple[Any, ...] = (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    )
    for ids in sources:
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()
