"""Reports of steps, under every strategy: they agree with the counters, the tokens and the text."""

from __future__ import annotations

import pytest

from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import Request, SamplingParams, StepOutput
from outrider.engine.engine import Engine
from tests.helpers.models import SENTENCES

NAMES = {"model", "prompt", "document", "output", "trie", "public", "jacobi", "recycling", "bigram", "unigram"}


def outputs(engine: Engine, name: str, params: SamplingParams, **fields: object) -> list[StepOutput]:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(SENTENCES[2])
    engine.add(Request(name, prompt, params, [engine.tokenizer.encode(SENTENCES[0])], **fields))  # type: ignore[arg-type]
    found = []
    while engine.has_work:
        found += engine.step()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_reports_agree_with_all_else_that_is_told(engine: Engine, strategy: str, temperature: float) -> None:
    params = SamplingParams(60, temperature=temperature, seed=3, ignore_eos=True)
    plain = outputs(engine, "plain", params, strategy="autoregressive")
    assert all(output.report is None for output in plain)
    told = outputs(engine, f"{strategy}/{temperature}", params, strategy=strategy, tenant="t", report=True)
    reports = [output.report for output in told if output.report is not None]
    assert len(reports) == len(told) == (stats := told[-1].stats).steps  # type: ignore[union-attr]
    assert [token for output in told for token in output.token_ids] == [token for one in plain for token in one.token_ids]
    for output, report in zip(told, reports, strict=True):
        assert len(report.pieces) == len(report.sources) == len(output.token_ids)
        assert "".join(report.pieces) == output.text
        assert "model" not in report.sources[:-1] and set(report.sources) <= NAMES
    assert "".join(output.text for output in told) == "".join(output.text for output in plain)
    assert sum(report.accepted for report in reports) == stats.accepted
    assert sum(report.drafted for report in reports) == stats.drafted
    if strategy == "autoregressive":
        assert {source for report in reports for source in report.sources} == {"model"}


def test_what_another_engine_emitted_is_not_told_again(engine: Engine) -> None:
    params = SamplingParams(40, ignore_eos=True)
    whole = outputs(engine, "whole", params, report=True)
    ids = [token for output in whole for token in output.token_ids]
    rest = outputs(engine, "rest", params, report=True, emitted=ids[:25])
    assert [token for output in rest for token in output.token_ids] == ids[25:]
    told = [source for output in rest if output.report is not None for source in output.report.sources]
    assert len(told) == 15
    pieces = "".join(piece for output in rest if output.report is not None for piece in output.report.pieces)
    assert "".join(output.text for output in whole).endswith(pieces) and pieces
