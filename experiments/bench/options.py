"""Command-line options that several benches share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float32", "float64")
_LAYERS = 12
_SMALL = {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": _LAYERS, "num_attention_heads": 12}


def _layers(kind: str, attending: Collection[int]) -> list[str]:
    return ["full_attention" if number in attending else kind for number in range(_LAYERS)]


# Shapes of random models, Llama unless a type is named: with the 50,257 tokens of GPT-2 the first has 109 million parameters,
# the second 283. The hybrids have recurrent layers in the proportions of their families' own models.
SIZES: dict[str, dict[str, Any]] = {
    "110m": _SMALL,
    "280m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 18, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "lfm2-110m": {
        **_SMALL, "model_type": "lfm2", "num_key_value_heads": 4, "block_auto_adjust_ff_dim": False,
        "layer_types": _layers("conv", (2, 5, 8, 10)),
    },
    "qwen3.5-140m": {
        **_SMALL, "model_type": "qwen3_5_text", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128,
        "linear_num_key_heads": 12, "linear_num_value_heads": 12, "layer_types": _layers("linear_attention", (3, 7, 11)),
    },
    "granite4-120m": {
        **_SMALL, "model_type": "granitemoehybrid", "num_key_value_heads": 4, "num_local_experts": 0,
        "shared_intermediate_size": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128,
        "layer_types": _layers("linear_attention", (5, 11)), "position_embedding_type": None, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 1 / 64,
    },
}  # fmt: skip


def add_model(parser: argparse.ArgumentParser, dtype: str, dtypes: Sequence[str] = DTYPES, model: str = "demo_model") -> None:
    """Add ``--model`` and ``--dtype`` with their defaults."""
    parser.add_argument("--model", default=model, help=f"model folder or Hugging Face Hub name; default: {model}")
    parser.add_argument("--dtype", choices=dtypes, default=dtype)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options of benches that run an engine in this process."""
    parser.add_argument("--records", type=int, help="maximum number of records of each file")
    parser.add_argument("--max-tokens", type=int, help="maximum output tokens; default: 128, or the whole known output")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights and arrivals")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add ``--prompts``."""
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id, prompt, references, output")


def add_random_model(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the options of runs that follow known outputs, which a model with random weights can do."""
    more: dict[str, Any] = {"nargs": "+"} if several else {}
    parser.add_argument("--random-model", choices=SIZES, help="use random weights of this shape; needs --tokenizer", **more)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder for the known outputs; default: the model's")


def check_random_model(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if a random model has no tokenizer or dtype."""
    if args.random_model and (args.tokenizer is None or args.dtype == "auto"):
        parser.error("--random-model needs --tokenizer and a --dtype")


def check_prompts(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if two workload files have the same name."""
    if len({path.stem for path in args.prompts}) < len(args.prompts):
        parser.error("two files of --prompts have one name: a workload is called after its file")


def check_distinct(args: argparse.Namespace, parser: argparse.ArgumentParser, *names: str) -> None:
    """Exit with code 2 if one of these options lists a number twice."""
    for name in names:
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} must name no number twice")


def numbers(kind: Callable[[str], float], least: float) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of comma-separated numbers such as ``1,2,4``, each at least ``least``."""

    def read(text: str) -> tuple[float, ...]:
        try:
            found = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers with commas between them, such as 1,2,4: got {text!r}") from None
        if not all(least <= number < float("inf") for number in found):
            raise argparse.ArgumentTypeError(f"must be numbers from {least:g} on, got {text!r}")
        return found

    return read
