"""Ahead-of-time compilation: ``python -m outrider.cluster.cli.launch.compile_ahead``, the last step of ``make install``."""

# Compiled code does not depend on the model: every strategy runs once on a tiny model with random weights, and the code is cached
# in `decoding.jit.cache_folder`; with `--image`, in `decoding.jit.IMAGE`, for each kind of this processor and weight type.

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.registry import STRATEGIES, build_drafters
from outrider.decoding.jit import IMAGE, KINDS, cache_folder, compile_for, compiles_first, kinds_of_processor, set_modes
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.child_process import child_environment, python_module

_COMMAND = python_module("outrider.cluster.cli.launch.compile_ahead")
_DRAFTS, _TYPES = "drafts", "types"  # arguments of the subprocesses
_PROMPT = [5, 6, 7, 8, 9] * 4
_MAX_TOKENS = 24
_VOCABULARY, _CONTEXT = 512, 512


class _AnyTarget:
    """Minimal ``Target`` with which drafters compile."""

    vocab_size, max_model_len = 64, 512
    end_token_ids: tuple[int, ...] = (0,)

    def bigram_table(self, width: int) -> Int32Array:
        """See ``Target``."""
        return np.zeros((self.vocab_size, width), np.int32)

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``Target``."""
        return np.arange(width, dtype=np.int32)

    def latency(self) -> LatencyCurve:
        """See ``Target``."""
        return LatencyCurve((1, 64), (0.01, 0.02), 64, 0.0, 0.0)


def _compile_drafts() -> None:
    drafter = build_drafters("auto", {}, [name for name in STRATEGIES if name != "auto"], 8)
    drafter.prepare(_AnyTarget())
    requests = [Request(name, _PROMPT, SamplingParams(_MAX_TOKENS), strategy=name) for name in STRATEGIES if name != PLAIN]
    drafter.propose(requests, [8] * len(requests))


def _make_model(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=_CONTEXT, tie_word_embeddings=True, eos_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"</s>": 0} | {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def _run_engine(model: ModelOptions, strategy: str, others: tuple[str, ...]) -> None:
    from outrider.engine.engine import Engine

    speculation = SpeculationOptions(strategy, strategies=others)
    engine = Engine.load(model, EngineOptions(max_running=8), speculation, defer_warmup=True)
    for name in engine.info.choices:
        for temperature in (0.0, 0.8):
            params = SamplingParams(_MAX_TOKENS, temperature=temperature, seed=1, ignore_eos=True)
            engine.add(Request(f"{name} {temperature}", _PROMPT, params, strategy=name))
    while engine.has_work:
        engine.step()


def _compile(all_types: bool) -> None:
    with contextlib.ExitStack() as ended:
        drafts = ended.enter_context(subprocess.Popen([*_COMMAND, _DRAFTS], env=child_environment()))
        ended.callback(drafts.kill)  # in case this process is interrupted
        folder = ended.enter_context(tempfile.TemporaryDirectory())
        _make_model(Path(folder))
        model = ModelOptions(folder, device="cpu", dtype="bfloat16")  # the weights are initialized in float32
        _run_engine(model, PLAIN, ())
        # Now the engine drafts, too: its drafters' code is in the cache only when the other process has ended.
        drafts.wait()
        _run_engine(model, "auto", tuple(name for name in STRATEGIES if name not in ("auto", PLAIN)))
        others: tuple[dict[str, Any], ...] = ({"dtype": "float32"}, {"weights": "int8"}, {"weights": "int4"})
        for other in others if all_types else ():
            _run_engine(dataclasses.replace(model, **other), PLAIN, ())


def _compile_for_image() -> None:
    """Compile into ``IMAGE``. Raise subprocess.CalledProcessError if that fails, OSError if ``IMAGE`` cannot be written."""
    kinds = kinds_of_processor()
    for kind in kinds:
        IMAGE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=IMAGE) as scratch:
            variables = child_environment() | compile_for(kind) | {"XDG_CACHE_HOME": scratch}
            subprocess.run([*_COMMAND, _TYPES], env=variables, check=True)
            shutil.rmtree(IMAGE / kind, ignore_errors=True)
            (IMAGE / kind).mkdir()
            for made in (Path(scratch) / "outrider").glob("native-*"):
                made.rename(IMAGE / kind / made.name)
            set_modes(IMAGE / kind, 0o755, 0o644)  # readable for any user that runs the image
    others = ", ".join(kind for kind in KINDS if kind not in kinds)
    rest = f"; pods on {others} compile at their start, because this processor is of another kind" if others else ""
    print(f"kept in {IMAGE} for {', '.join(kinds) or 'no kind of processor'}{rest}")


def main() -> None:
    """Compile everything; takes a few seconds if it was done before."""
    if sys.argv[1:] == [_DRAFTS]:
        _compile_drafts()
        return
    if sys.argv[1:] == ["--image"]:
        _compile_for_image()
        return
    began = time.monotonic()
    _compile(sys.argv[1:] == [_TYPES])
    if compiles_first():
        print(f"cannot cache in {cache_folder()}: every start compiles again", file=sys.stderr)
    else:
        print(f"compiled in {time.monotonic() - began:.0f} s, kept in {cache_folder()}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: also ends the second process and removes the folder
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
