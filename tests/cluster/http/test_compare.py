"""``POST /v1/compare``: both answers, what differs, and what becomes of a comparison of which one side fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cluster.http.api import Service
from outrider.cluster.http.compare import Baseline
from outrider.configs.slices import SpeculationOptions
from tests.cluster.circle import CHAT, CIRCLE, TEXT, TOKENIZER, LocalEngine, client_of, local_engine
from tests.helpers.models import llama_config, save_model

PATH = "/v1/compare"
BODY = TEXT | {"prompt": "hgf<", "max_tokens": 30}


def compared(http: httpx.Client, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=body | {"reference_documents": [CIRCLE]} | more).raise_for_status().json()
    assert answer["object"] == "comparison" and answer["id"].startswith("cmp-")
    return dict(answer)


@pytest.mark.parametrize("body", [BODY, CHAT | {"max_tokens": 30}])
def test_both_answers_with_their_times(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = compared(http, body)
    accelerated, baseline = answer["accelerated"], answer["baseline"]
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    choice = http.post(route, json=body).json()["choices"][0]
    expected = choice["text"] if "text" in choice else choice["message"]["content"]
    assert accelerated["text"] == baseline["text"] == expected
    assert (answer["identical"], answer["first_difference"], answer["lossless"]) == (True, None, True)
    assert (answer["against"], answer["ran"], answer["model"]) == ("plain", "in turns", "circle")
    assert (accelerated["strategy"], baseline["strategy"], baseline["kind"]) == ("llma", "autoregressive", "plain")
    assert baseline["tokens_per_step"] == 1.0 < accelerated["tokens_per_step"]
    assert accelerated["cut"].endswith("speculation.max_draft_tokens is the limit") and baseline["cut"] is None
    for side in (accelerated, baseline):
        assert (side["finish_reason"], side["error"]) == ("length", None)
        assert side["usage"]["completion_tokens"] == 30
        assert 0 < side["ttft_s"] < side["latency_s"]
        assert side["tokens_per_s"] == pytest.approx(29 / (side["latency_s"] - side["ttft_s"]), rel=0.01)
    assert answer["speedup"] == pytest.approx(accelerated["tokens_per_s"] / baseline["tokens_per_s"], rel=0.01)


def test_both_sides_draw_alike_whether_a_seed_is_given_or_not(http: httpx.Client) -> None:
    for more in ({"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {"stop": ["k"]}, {"max_tokens": 1}):
        answer = compared(http, BODY | more)
        assert answer["identical"] and answer["accelerated"]["text"] == answer["baseline"]["text"], more
    assert answer["speedup"] is None  # of one token


def test_a_baseline_that_says_something_else_or_nothing(circle_engine: LocalEngine, tmp_path: Path) -> None:
    """The baseline has another model, which no deployment of ours would have, and a shorter context."""
    other = save_model(tmp_path / "tiny", llama_config(vocab_size=len(TOKENIZER)))
    with local_engine(other, SpeculationOptions("autoregressive", max_draft_tokens=0), max_model_len=64) as engine:
        service = Service(circle_engine, TOKENIZER, baseline=Baseline(engine, "plain", shares_devices=False))
        with client_of(service) as http:
            answer = compared(http, BODY)
            assert (answer["against"], answer["ran"], answer["identical"]) == ("baseline", "at once", False)
            difference = answer["first_difference"]
            assert difference["index"] == 0 and difference["accelerated"] == "a" != difference["baseline"]
            assert compared(http, BODY, against="plain")["identical"]
            failed = compared(http, BODY, max_tokens=100)
            assert failed["accelerated"]["usage"]["completion_tokens"] == 100
            error = failed["baseline"]["error"]
            assert (error["code"], failed["baseline"]["text"]) == ("context_length_exceeded", None)
            assert failed["identical"] is failed["first_difference"] is failed["speedup"] is None
