"""Grammars are compiled beside the steps of a replica."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from outrider.actors.replica import Replica
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from outrider.engine.text.grammar import Grammars, regex_grammar
from tests.helpers.models import llama_config, save_model

DATE = r"20[0-9]{2}-[01][0-9]"


def bound(name: str, account: str = "a", pattern: str = DATE) -> Request:
    return Request(name, [5, 6, 7], SamplingParams(max_tokens=16, grammar=regex_grammar(pattern)), account=account)


def test_steps_go_on_while_a_grammar_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, proceed, threads = threading.Event(), threading.Event(), set()
    compile_it = Grammars._compile

    def blocked(self: Grammars, grammar: str, vocabulary: Any) -> Any:
        threads.add(threading.current_thread().name)
        entered.set()
        assert proceed.wait(60)
        return compile_it(self, grammar, vocabulary)

    monkeypatch.setattr(Grammars, "_compile", blocked)
    folder = save_model(tmp_path, llama_config(tie_word_embeddings=True))
    replica = Replica(
        ModelOptions(path=str(folder), dtype="float32", threads=1), EngineOptions(max_running=4), SpeculationOptions("llma")
    )

    async def collect(request: Request) -> list[StepOutput]:
        return [output async for output in replica.generate(request)]

    async def run() -> None:
        first = asyncio.create_task(collect(bound("first")))
        queued = asyncio.create_task(collect(bound("second", pattern="[xyz]{4}")))  # has its turn behind it
        gone = asyncio.create_task(collect(bound("gone", pattern="[uvw]{4}")))
        assert await asyncio.to_thread(entered.wait, 60)
        plain = await collect(Request("plain", [5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True)))
        assert plain[-1].finish_reason is FinishReason.LENGTH and not first.done()
        gone.cancel()
        proceed.set()
        dates, letters = await first, await queued
        assert re.fullmatch(DATE, "".join(output.text for output in dates))
        assert re.fullmatch("[xyz]{4}", "".join(output.text for output in letters))

    try:
        asyncio.run(run())
    finally:
        proceed.set()
        replica.stop()
    assert threads and all(name.startswith("grammars") for name in threads)
