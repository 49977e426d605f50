"""Compiles what a first start would wait for: ``python -m cluster.cli.launch.compile_ahead``, which ``make install`` ends with.

Compiled code does not depend on the model: the demo model is run once by every strategy, and what is made for it is kept
(``decoding.jit.cache_folder``). Drafters are compiled beside, in a second process.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from configs.schema import REPOSITORY, load_config
from configs.slices import SpeculationOptions
from decoding.budget.latency import LatencyCurve
from decoding.drafters import STRATEGIES, build_drafters
from decoding.jit import cache_folder, compiles_first
from decoding.request import PLAIN, Request, SamplingParams
from decoding.tree import Int32Array

_DRAFTS = "drafts"  # the argument of the second process
_PROMPT = [5, 6, 7, 8, 9] * 4
_MAX_TOKENS = 24


class _AnyTarget:
    """A model of which nothing is known: enough for drafters to compile."""

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


def _run_engine(strategy: str, others: tuple[str, ...]) -> None:
    from transformers.utils.logging import disable_progress_bar

    from engine.engine import Engine

    disable_progress_bar()
    local = load_config(REPOSITORY / "configs" / "local.yaml", ["model.path=demo_model"])
    speculation = SpeculationOptions(strategy, strategies=others)
    engine = Engine.load(local.model, local.engine, speculation, put_off=True)
    for name in engine.info.choices:
        for temperature in (0.0, 0.8):
            params = SamplingParams(_MAX_TOKENS, temperature=temperature, seed=1, ignore_eos=True)
            engine.add(Request(f"{name} {temperature}", _PROMPT, params, strategy=name))
    while engine.has_work:
        engine.step()


def main() -> None:
    """Compiles all of it; where that was done before it takes a few seconds."""
    if sys.argv[1:] == [_DRAFTS]:
        _compile_drafts()
        return
    began = time.monotonic()
    drafts = subprocess.Popen([sys.executable, "-m", "cluster.cli.launch.compile_ahead", _DRAFTS])
    _run_engine(PLAIN, ())
    drafts.wait()
    _run_engine("auto", tuple(name for name in STRATEGIES if name not in ("auto", PLAIN)))
    if compiles_first():
        print(f"nothing can be kept in {cache_folder()}: every start compiles anew", file=sys.stderr)
    else:
        print(f"compiled in {time.monotonic() - began:.0f} s, kept in {cache_folder()}")


if __name__ == "__main__":
    main()
