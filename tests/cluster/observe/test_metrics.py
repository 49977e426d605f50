"""``/metrics`` as Prometheus reads it: its numbers are those that clients got, while requests run and after a replica's end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from outrider.actors.description import Description, GroupState
from outrider.actors.replica import Replica
from outrider.cache_service.client.cache_client import CacheClientCounts
from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service
from outrider.cluster.observe.metrics import HISTOGRAMS, exposition
from outrider.configs.slices import SpeculationOptions, TenancyOptions
from outrider.decoding.request import BudgetCounts
from outrider.engine.measures.energy_ledger import EnergyCounts
from outrider.engine.measures.metrics import EmulatedCounts
from tests.cluster.circle import TEXT, TOKENIZER, LocalEngine, bearer, client_of, served, start_replica
from tests.helpers.waiting import eventually

ADMIN = "outrider-admin"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def replica_of(path: Path) -> Replica:
    return start_replica(path, SpeculationOptions(strategy="llma", max_draft_tokens=8, strategies=("prompt_lookup",)))


@pytest.fixture(scope="module")
def engines(circle_model: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(replica_of(circle_model))
    yield made
    for replica in made.replicas:
        replica.stop()


@pytest.fixture(scope="module")
def url(engines: LocalEngine) -> Iterator[str]:
    with served(Service(engines, TOKENIZER, replicas=2, open_metrics=True)) as address:
        yield address


def scrape(url: str) -> Series:
    """All samples, by name and labels."""
    response = httpx.get(f"{url}/metrics", timeout=60)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def total(series: Series, name: str, **labels: str) -> float:
    """The sum over the series of a name that have some labels."""
    return sum(value for (other, held), value in series.items() if other == name and labels.items() <= set(held))


def falls(before: Series, after: Series) -> list[str]:
    """The counters that are less than they were, of those that are still there."""
    counting = ("_total", "_bucket", "_count", "_sum")
    return [name for (name, held), value in before.items() if name.endswith(counting) and after.get((name, held), value) < value]


def ask(url: str, number: int) -> Any:
    """The usage of one answer; streams and whole answers in turns, a third of them without drafts."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        body: dict[str, Any] = TEXT | {"prompt": "<abc" * (number % 3 + 1), "max_tokens": 20 + number}
        extra = {"ignore_eos": True, "speculation": {"strategy": "autoregressive"} if number % 3 == 0 else {}}
        if number % 2:
            return client.completions.create(**body, extra_body=extra).usage
        options = {"include_usage": True}
        return list(client.completions.create(**body, stream=True, stream_options=options, extra_body=extra))[-1].usage


def test_totals_are_what_clients_got_and_nothing_falls_meanwhile(url: str) -> None:
    seen = [scrape(url)]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(ask, url, number) for number in range(12)]
        while not all(answer.done() for answer in answers):
            seen.append(scrape(url))
        usages = [answer.result() for answer in answers]
    seen.append(scrape(url))
    assert len(seen) > 3
    for before, after in itertools.pairwise(seen):
        assert not falls(before, after)
    last = seen[-1]

    def grown(name: str, **labels: str) -> float:
        return total(last, name, **labels) - total(seen[0], name, **labels)

    prompt, completion = sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
    assert (grown("vllm:prompt_tokens_total"), grown("vllm:generation_tokens_total")) == (prompt, completion)
    assert grown("vllm:request_success_total", finished_reason="length") == grown("vllm:request_success_total") == 12
    assert grown("vllm:request_prompt_tokens_sum") == prompt and grown("vllm:request_generation_tokens_sum") == completion
    for name in HISTOGRAMS:
        if name.startswith(("request_", "e2e_", "time_to_first")):
            assert grown(f"vllm:{name}_count") == grown(f"vllm:{name}_bucket", le="+Inf") == 12, name
    assert grown("outrider:tokens_total") == completion
    assert grown("outrider:requests_total", strategy="autoregressive", lossless="true") == 4
    assert grown("outrider:requests_total", strategy="llma", lossless="true") == 8
    accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
    assert (
        accepted
        == grown("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        == grown("outrider:accepted_tokens_by_source_total")
    )
    assert 0 < accepted == grown("outrider:accepted_tokens_total") < grown("vllm:spec_decode_num_draft_tokens_total")
    assert grown("outrider:request_steps_total") + accepted == completion
    assert total(last, "vllm:num_requests_running") == total(last, "vllm:num_requests_waiting") == 0
    assert (total(last, "outrider:replicas"), total(last, "outrider:replicas_configured")) == (1, 2)
    assert total(last, "outrider:exact") == 1


def test_sources_memory_and_what_the_door_counts(url: str) -> None:
    before = scrape(url)
    body = TEXT | {"max_tokens": 60, "ignore_eos": True}
    for more in ({"prompt": "<abc" * 3}, {"prompt": ["<", "a"], "n": 3}):
        assert httpx.post(f"{url}/v1/completions", json=body | more, timeout=60).status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json={**body, "prompt": "<", "speculation": {"strategy": "gone"}}, timeout=60)
    assert refused.status_code == 400
    eventually(lambda: total(scrape(url), "outrider:door_requests_in_flight") == 0)
    after = scrape(url)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    drafted = grown("vllm:spec_decode_num_draft_tokens_total")
    assert grown("outrider:draft_tokens_by_source_total", source="llma") == drafted > 0
    assert grown("outrider:drafts_by_source_total") == grown("vllm:spec_decode_num_drafts_total") > 0
    assert total(after, "outrider:accepted_tokens_by_source_total") <= total(after, "outrider:draft_tokens_by_source_total")
    assert grown("vllm:request_params_n_count") == 2 and grown("vllm:request_params_n_sum") == 4
    assert total(after, "vllm:request_params_n_bucket", le="1.0") >= 1
    for name in ("outrider:door_resident_bytes", "outrider:process_resident_bytes"):
        assert total(after, name) > 2**20, name
    assert ("outrider:door_requests_in_flight", ()) in after


def test_a_client_that_goes_away_is_an_abort(url: str, engines: LocalEngine) -> None:
    before = scrape(url)
    with httpx.Client(base_url=url, timeout=60) as client:
        body = {"model": "circle", "prompt": "<", "max_tokens": 10_000, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # closes the stream when it goes
            line = next(lines)
            assert line.startswith("data: ") and "error" not in line, line
            eventually(lambda: total(scrape(url), "vllm:num_requests_running") == 1)
            assert 0 < total(scrape(url), "vllm:kv_cache_usage_perc") < 1
    eventually(lambda: total(scrape(url), "vllm:num_requests_running") == 0)
    aborted = [total(series, "vllm:request_success_total", finished_reason="abort") for series in (before, scrape(url))]
    assert aborted[1] - aborted[0] == 1


def test_a_replica_in_another_s_place_counts_under_its_own_name(url: str, engines: LocalEngine, circle_model: Path) -> None:
    ask(url, 1)
    before = scrape(url)
    engines.replicas.append(replica_of(circle_model))
    both = scrape(url)
    engines.replicas.pop(0).stop()
    ask(url, 1)
    after = scrape(url)
    name = "vllm:generation_tokens_total"
    (old,), (new,) = (
        {dict(held)["engine"] for other, held in series if other == name} for series in (before, after)
    )  # fmt: skip
    assert old != new and total(both, name, engine=new) == 0
    assert total(both, name, engine=old) == total(before, name) and total(both, "outrider:replicas") == 2
    assert total(after, name) == 21 and not falls(before, both) and not falls(both, after)


def test_names_types_and_labels_are_vllm_s(url: str) -> None:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    gauges = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}
    histograms = {"vllm:request_params_n", *(f"vllm:{name}" for name in HISTOGRAMS)}
    assert {name for name in families if name.startswith("vllm:") and families[name].type == "gauge"} == gauges
    assert {name for name in families if families[name].type == "histogram"} == histograms
    for name, family in families.items():
        for sample in family.samples:
            if name.startswith("vllm:"):
                assert {"model_name", "engine"} <= sample.labels.keys(), name
                assert sample.labels["model_name"] == "circle"
    (info,) = families["vllm:cache_config_info"].samples
    held = {"block_size": "16384", "num_gpu_blocks": "3", "cache_dtype": "float32"}  # three slots for a context each
    assert info.value == 1 and held.items() <= info.labels.items()
    lines = text.splitlines()
    assert not any("_created" in line for line in lines)  # vllm bench serve adds up all lines that begin with vllm:spec_decode
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(line.startswith(f"vllm:spec_decode_{name}_total{{") for line in lines) == 1
    assert sum(line.startswith("vllm:iteration_tokens_total_bucket{") for line in lines) > 10


@pytest.mark.parametrize(("keys", "header", "status"), [
    ((), None, 403), ((ADMIN,), None, 401), ((ADMIN,), "wrong", 401), ((ADMIN,), ADMIN, 200),
])  # fmt: skip
def test_beyond_loopback_it_is_the_operator_s(keys: tuple[str, ...], header: str | None, status: int) -> None:
    tenancy = TenancyOptions(admin_keys=tuple(map(hash_key, keys)))
    with client_of(Service(LocalEngine(), TOKENIZER, tenancy), bearer(header)) as http:
        response = http.get("/metrics")
    assert response.status_code == status
    if status == 200:  # although no replica answers
        assert "outrider:replicas 0.0" in response.text and "# TYPE vllm:num_requests_running gauge" in response.text
        assert "vllm:num_requests_running{" not in response.text


def test_memory_energy_and_ranks(engines: LocalEngine) -> None:
    (description,) = asyncio.run(engines.describe())
    cache_client = CacheClientCounts(False, "open", 1, {"timeout": 3, "full": 2}, 10, 20, 30, 4, 5, 6, 7, 80, 9, 11, 2.5)
    group = GroupState(3, (0, 2), (1,), 4, "rank 1: gone", 5, 6, exchange_s=0.5, exchange_bytes=700)
    energy = EnergyCounts("rapl", 12.5, 3.0)
    emulated = EmulatedCounts("A100-80", "llama-3.1-8b", 8.0, 40, 0.5, 3, 0.25, 1.01, 3.5, 900.0)
    assert description.metrics is not None
    metrics = dataclasses.replace(description.metrics, budget=BudgetCounts(1, 2, 3, 0.5), history_bytes=7)
    told = dataclasses.replace(description, cache=cache_client, group=group, energy=energy, emulated=emulated, metrics=metrics)
    text = exposition([told], 1).decode()
    found = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    expected = {
        "outrider:cache_connected": 0, "outrider:cache_lag_seconds": 2.5, "outrider:cache_waiting_tokens": 11,
        "outrider:cache_outbox_bytes": 80, "outrider:cache_published_tokens_total": 10,
        "outrider:cache_dropped_tokens_total": 30,
        "outrider:cache_corrupt_records_total": 9, "outrider:cache_lost_records_total": 6, "outrider:idle_power_watts": 3,
        "outrider:energy_joules_total": 12.5, "outrider:ranks": 3, "outrider:ranks_ready": 2, "outrider:group_width": 2,
        "outrider:rank_losses_total": 4, "outrider:rank_divergences_total": 5, "outrider:rank_disagreements_total": 6,
        "outrider:exchange_seconds_total": 0.5, "outrider:exchange_bytes_total": 700,
        "outrider:emulated_forwards_total": 40, "outrider:emulated_device_seconds_total": 0.5,
        "outrider:emulated_late_forwards_total": 3, "outrider:emulated_late_seconds_total": 0.25,
        "outrider:emulated_hidden_seconds_total": 3.5, "outrider:emulated_step_ratio": 1.01,
        "outrider:emulated_exchange_bytes_total": 900, "outrider:budget_requests_total": 1,
        "outrider:budget_offered_rows_total": 2, "outrider:budget_rows_total": 3, "outrider:budget_least_chance": 0.5,
        "outrider:history_bytes": 7,
    }  # fmt: skip
    assert {name: found[name].value for name in expected} == expected
    assert found["outrider:energy_joules_total"].labels["meter"] == "rapl"
    assert 'kind="timeout",model_name="circle"} 3.0' in text
    elastic = dataclasses.replace(
        told, group=dataclasses.replace(group, width=2)
    )  # its ranks are replicas that tell of themselves
    assert "outrider:emulated_forwards_total{" not in exposition([description], 1).decode()  # of a real device
    assert "outrider:ranks{" in text and _single(elastic, "outrider:ranks") == _single(elastic, "outrider:ranks_ready") == 1
    assert _single(elastic, "outrider:group_width") == 2


def _single(description: Description, name: str) -> float:
    """The one sample of a metric."""
    families = text_string_to_metric_families(exposition([description], 1).decode())
    (value,) = (sample.value for family in families for sample in family.samples if sample.name == name)
    return value
