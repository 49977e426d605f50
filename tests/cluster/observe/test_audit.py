"""The audit with a real engine: content with what is exact, it finds what is not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from outrider.actors.replica import Replica
from outrider.cache_service.namespace import hash_key
from outrider.cluster.cli.client import ADMIN_KEY
from outrider.cluster.http.api import Service
from outrider.cluster.observe.audit import Audit, Auditor, Result, Served
from outrider.cluster.serving.generation import GenerationJob, next_output
from outrider.configs.slices import AuditOptions, EngineOptions, SpeculationOptions, TenancyOptions
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.decoding.tree import Acceptance, DraftTree
from outrider.decoding.verify.target_probabilities import TargetDistributions
from outrider.engine.loading.model_info import strategies_apart
from tests.cluster.circle import CIRCLE, TOKENIZER, LocalEngine, bearer, byte_ids, local_engine, served
from tests.cluster.commands import outrider
from tests.helpers.models import draft_with
from tests.helpers.waiting import eventually

ADMIN = bearer("outrider-admin")
TENANCY = TenancyOptions(anonymous="acme", admin_keys=(hash_key("outrider-admin"),))
SCHEDULING = EngineOptions(max_running=3, scheduling_policy="priority")
WALK = (CIRCLE * 2)[1:]  # what greedy decoding says after "<"


class _AcceptAll:
    """No rule at all: whatever was drafted is emitted."""

    def accept(self, tree: DraftTree, distributions: TargetDistributions) -> Acceptance:
        rows = tuple(range(1, min(len(tree), distributions.remaining)))
        return Acceptance(rows, distributions.choose(rows[-1] if rows else 0))


class Careless(Drafter):
    """A drafter whose drafts are emitted unseen: what the audit is there to find."""

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        trees = [DraftTree.chain(one.root, [self._token] * min(2, rows), 1) for one, rows in zip(requests, budgets, strict=True)]
        for tree in trees:
            tree.rule = _AcceptAll()
        return trees


@dataclass
class Audited:
    """A served API whose requests are audited."""

    url: str
    port: LocalEngine
    auditor: Auditor

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to a completion, greedy and of 12 tokens unless asked otherwise."""
        body = {"model": "circle", "prompt": "<", "max_tokens": 12, "temperature": 0, **body}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return dict(response.json()) if not body.get("stream") else {}

    def replay(self, **body: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The lines of an audit, and its summary."""
        response = httpx.post(f"{self.url}/admin/audit", json=body, headers=ADMIN, timeout=60)
        assert response.status_code == 200, response.text
        *lines, last = map(json.loads, response.text.splitlines())
        return lines, last["summary"]

    def counters(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/admin/audit", headers=ADMIN, timeout=60).raise_for_status().json())


@pytest.fixture(scope="module")
def replica(circle_model: Path) -> Iterator[Replica]:
    """One that offers strategies with a draft model, lossy ones, too."""
    with local_engine(circle_model, speculation(circle_model), SCHEDULING) as engine:
        yield engine.replicas[0]


def speculation(path: Path) -> SpeculationOptions:
    others = ("prompt_lookup", "spectr", "bild")
    return SpeculationOptions(strategy="llma", max_draft_tokens=8, strategies=others, draft_model=str(path), exact=False)


@pytest.fixture
def audited(replica: Replica, circle_model: Path) -> Iterator[Callable[..., Audited]]:
    """Serves with options of the audit."""
    with contextlib.ExitStack() as stack:

        def serve(**options: Any) -> Audited:
            port = LocalEngine(replica)
            auditor = Auditor(port, AuditOptions(**options), speculation(circle_model), SCHEDULING)
            service = Service(port, TOKENIZER, TENANCY, open_metrics=True, auditor=auditor)
            return Audited(stack.enter_context(served(service)), port, auditor)

        yield serve


@pytest.fixture
def careless(replica: Replica) -> Iterator[None]:
    """The replica drafts Z and emits it unseen."""
    before = replica._engine._drafter
    draft_with(replica._engine, Careless(byte_ids("Z")[0]))
    yield
    draft_with(replica._engine, before)


def test_what_is_exact_is_found_identical(audited: Callable[..., Audited]) -> None:
    server = audited()
    bodies: list[dict[str, Any]] = [
        {}, {"prompt": "<abc" * 4, "max_tokens": 30}, {"temperature": 1.0, "seed": 5, "n": 3}, {"stop": [":"], "max_tokens": 40},
        {"temperature": 0.8, "seed": 9, "top_p": 0.9, "stream": True}, {"logit_bias": {"70": 5}, "frequency_penalty": 0.5},
        {"prompt": "s", "logprobs": 5}, {"structured_outputs": {"regex": "[ab]{4,9}"}}, {"reference_documents": ["<abcdefgh"]},
        {"prompt": ["<", "a"], "speculation": {"strategy": "prompt_lookup"}, "temperature": 2.0, "min_tokens": 4},
    ]  # fmt: skip
    for body in bodies:
        server.complete(**body)
    for unaudited in ({"speculation": {"max_draft_tokens": 0}}, {"speculation": {"strategy": "autoregressive"}}):
        server.complete(**unaudited)
    for cache in ("private", "off"):  # nobody's: not kept
        server.complete(cache=cache)
    lines, summary = server.replay()
    assert [line["result"] for line in lines] == ["identical"] * 13, lines
    assert summary == {"identical": 13, "different": 0, "skipped": 0, "failed": 0}
    assert len({line["request"] for line in lines}) == 13 and {line["strategy"] for line in lines} == {None, "prompt_lookup"}
    assert len(server.replay(last=2)[0]) == 2
    assert server.counters() == {
        "kept": 13, "last_differences": [],
        "audits": {"identical": 15, "different": 0, "skipped": 0, "failed": 0, "dropped": 0},
    }  # fmt: skip


def test_private_requests_are_kept_where_that_is_wanted_and_the_last_ones_only(audited: Callable[..., Audited]) -> None:
    server = audited(keep=2, private=True)
    answers = [server.complete(cache="private", max_tokens=number)["id"] for number in (3, 4, 5)]
    lines, _ = server.replay()
    assert [(line["request"], line["tokens"]) for line in lines] == [(f"{answers[1]}/0", 4), (f"{answers[2]}/0", 5)]
    assert audited(keep=0).replay()[1]["identical"] == 0


@pytest.mark.parametrize(("body", "result", "why"), [
    ({"strategy": "bild"}, "skipped", "bild is lossy"),
    ({"strategy": "spectr"}, "identical", None),
])  # fmt: skip
def test_a_lossy_strategy_is_skipped(audited: Callable[..., Audited], body: Any, result: str, why: str | None) -> None:
    server = audited()
    server.complete(speculation=body)
    ((line,), _) = server.replay()
    assert (line["result"], line.get("detail")) == (result, why)


def test_a_strategy_that_draws_by_itself_is_compared_where_nothing_is_drawn(audited: Callable[..., Audited]) -> None:
    server = audited()
    server.complete(speculation={"strategy": "spectr"}, temperature=1.0)
    ((line,), summary) = server.replay()
    assert summary["skipped"] == 1 and "spectr samples on its own" in line["detail"]
    rejecting = SpeculationOptions(strategy="speculative", options={"sampling": "rejection"}, strategies=("spectr", "llma"))
    assert strategies_apart(rejecting) == {"speculative", "spectr"}
    assert strategies_apart(SpeculationOptions(strategy="auto", strategies=("speculative:sampling=rejection",))) == {
        "speculative"
    }
    assert strategies_apart(SpeculationOptions(strategy="speculative")) == frozenset()


def test_a_verification_that_accepts_anything_is_found_out(
    audited: Callable[..., Audited], careless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = audited()
    text = server.complete()["choices"][0]["text"]
    assert text == "ZZ<" * 4  # two drafted, and what the model says after them
    ((line,), summary) = server.replay()
    assert summary == {"identical": 0, "different": 1, "skipped": 0, "failed": 0}
    found = line["difference"]
    assert (found["position"], found["served"]["text"], found["plain"]["text"]) == (0, "Z", "a")
    assert found["gap"] == pytest.approx(found["plain"]["logprob"] - found["served"]["logprob"]) and found["gap"] > 1
    told = server.counters()
    assert told["audits"]["different"] == 1 and told["last_differences"] == [line]
    assert text[1:] not in json.dumps(told)  # of the text no more than the two tokens
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'outrider:audits_total{result="different"} 1.0' in metrics

    monkeypatch.setenv(ADMIN_KEY, "outrider-admin")
    run = outrider("audit", "--url", server.url)
    assert run.returncode == 1 and "different" in run.stdout and "'Z'" in run.stdout and "'a'" in run.stdout
    assert "error: 1 different; the first: " in run.stderr

    (one,) = server.auditor.last(1)
    job = dataclasses.replace(one.job, params=dataclasses.replace(one.job.params, max_tokens=100_000))  # more than fits
    server.auditor.keep(dataclasses.replace(one, job=job))
    run = outrider("audit", "--url", server.url, "--last", "1")
    assert run.returncode == 1 and "error: 1 failed; the first: " in run.stderr


def test_what_a_tenant_deletes_is_in_no_audit(audited: Callable[..., Audited], careless: None) -> None:
    server = audited()
    first, _, third = (server.complete()["id"] for _ in range(3))
    assert server.replay()[1]["different"] == 3
    answers = f"{server.url}/admin/cache/tenants/acme/requests"
    assert httpx.delete(f"{answers}/{first}").status_code == 401
    assert httpx.delete(f"{server.url}/admin/cache/tenants/other", headers=ADMIN).status_code == 404  # nothing is shared here
    assert httpx.delete(f"{answers}/none", headers=ADMIN).status_code == 404
    assert server.counters()["kept"] == 3 == len(server.counters()["last_differences"])
    assert httpx.delete(f"{answers}/{first}", headers=ADMIN).status_code == 404
    left = [str(line) for line in server.counters()["last_differences"]]
    assert server.counters()["kept"] == 2 == len(left) and not any(first in name for name in left) and third in left[-1]
    (one,) = server.auditor.last(1)
    server.auditor.keep(dataclasses.replace(one, job=dataclasses.replace(one.job, adapter="style")))
    assert httpx.delete(f"{server.url}/v1/cache").status_code == 404
    assert (server.counters()["kept"], server.counters()["last_differences"]) == (0, [])
    server.complete()
    assert server.counters()["kept"] == 1


def test_prompts_through_the_public_api(audited: Callable[..., Audited], replica: Replica, tmp_path: Path) -> None:
    server, file = audited(), tmp_path / "prompts.jsonl"
    records = [{"id": "one", "prompt": "<abc<abc"}, {"id": "two", "prompt": "s", "references": ["stuvw."]}]
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    for arguments in ((), ("--strategy", "prompt_lookup"), ("--temperature", "1", "--seed", "3")):
        run = outrider("audit", "--url", server.url, "--prompts", str(file), "--max-tokens", "20", *arguments)
        assert run.returncode == 0 and "2 identical" in run.stdout, run
    for strategy, said in (("bild", "bild is lossy"), ("lmla", "is not available on this server")):
        run = outrider("audit", "--url", server.url, "--prompts", str(file), "--strategy", strategy)
        assert run.returncode == 1 and said in run.stderr, run
    before = replica._engine._drafter
    draft_with(replica._engine, Careless(byte_ids("Z")[0]))
    run = outrider("audit", "--url", server.url, "--prompts", str(file), "--json")
    draft_with(replica._engine, before)
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 1 and [row["result"] for row in rows] == ["different"] * 2
    for row, plain in zip(rows, ("defg", "tuvw"), strict=True):
        found = row["difference"]
        assert (found["served"]["text"], found["plain"]["text"]) == ("Z", plain[found["position"]]) and found["gap"] > 1


def test_the_background_audits_what_is_served_while_nobody_waits(audited: Callable[..., Audited]) -> None:
    server = audited(sample=1.0, keep=0)
    for number in range(3):
        server.complete(temperature=1.0, seed=number)
    eventually(lambda: server.counters()["audits"]["identical"] == 3)
    assert server.counters()["kept"] == 0
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    series = {
        (sample.name, sample.labels.get("result")): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    assert series[("outrider:audits_total", "identical")] == 3
    assert (series[("vllm:request_params_n_count", None)], series[("vllm:request_params_n_sum", None)]) == (3, 3)


def serve_locally(port: LocalEngine, auditor: Auditor, tokens: list[int], **more: Any) -> Served:
    """A choice of 12 tokens after a prompt, as it was served."""

    async def served() -> Served:
        job = GenerationJob("told/0", np.asarray(tokens, np.int32), SamplingParams(**{"max_tokens": 12, **more}), tenant="acme")
        async with contextlib.aclosing(next_output(port.generate(job)[0], job, [auditor.on_output])) as outputs:
            assert sum([len(output.token_ids) async for output in outputs]) == 12
        (one,) = auditor.last()
        return one

    return asyncio.run(served())


def test_where_a_record_was_altered(replica: Replica, circle_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = LocalEngine(replica)
    auditor = Auditor(port, AuditOptions(), speculation(circle_model), SCHEDULING)
    served = serve_locally(port, auditor, byte_ids("<"))
    ids = served.token_ids
    assert ids == tuple(byte_ids(WALK)[:12])

    def found(**changes: Any) -> Audit:
        return asyncio.run(auditor.audit(dataclasses.replace(served, **changes)))

    assert found().result is Result.IDENTICAL
    unlikely = byte_ids("@")[0]
    altered = found(token_ids=(*ids[:5], unlikely, *ids[6:]))
    model = AutoModelForCausalLM.from_pretrained(circle_model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([byte_ids("<") + list(ids[:5])])).logits[0, -1].log_softmax(-1)
    assert altered.difference is not None and altered.result is Result.DIFFERENT
    assert (altered.difference.position, altered.difference.served, altered.difference.plain) == (5, unlikely, ids[5])
    assert altered.difference.served_logprob == pytest.approx(float(logprobs[unlikely]), abs=1e-4)
    assert altered.difference.plain_logprob == pytest.approx(float(logprobs[ids[5]]), abs=1e-4)
    assert altered.difference.gap == pytest.approx(float(logprobs[ids[5]] - logprobs[unlikely]), abs=1e-4)
    assert "request told/0: audit: the served tokens differ" in caplog.text

    for shorter, longer in (((12, 9)), ((9, 12))):  # one of them ended before the other
        job = dataclasses.replace(served.job, params=dataclasses.replace(served.job.params, max_tokens=longer))
        ended = found(token_ids=ids[:shorter], job=job)
        assert ended.difference is not None and ended.difference.position == 9 and ended.difference.gap is None
        assert (ended.difference.served, ended.difference.plain) == ((ids[9], None) if shorter == 12 else (None, ids[9]))
    otherwise = found(finish_reason=FinishReason.STOP)
    assert otherwise.detail == "served ended with stop, plain with length"
    broken = found(job=dataclasses.replace(served.job, params=dataclasses.replace(served.job.params, max_tokens=100_000)))
    assert broken.result is Result.FAILED and broken.detail
    assert auditor.counts() == {"identical": 1, "different": 4, "skipped": 0, "failed": 1, "dropped": 0}


def test_the_background_gives_way_and_drops_what_it_has_no_time_for(replica: Replica, circle_model: Path) -> None:
    port, kept = LocalEngine(replica), AuditOptions(sample=1.0)
    auditor = Auditor(port, kept, speculation(circle_model), SCHEDULING)
    served = serve_locally(port, Auditor(port, AuditOptions(), speculation(circle_model), SCHEDULING), byte_ids("<"))

    async def run() -> None:
        prompt = np.asarray(byte_ids("<"), np.int32)
        params = SamplingParams(max_tokens=8000, ignore_eos=True)
        async with contextlib.AsyncExitStack() as stack:
            for number in range(4):  # three run, one waits
                job = GenerationJob(f"long-{number}/0", prompt, params, max_draft_tokens=0)
                stream = await stack.enter_async_context(contextlib.aclosing(port.generate(job)[0]))
                await anext(stream)
            for _ in range(10):
                auditor.keep(served)
            assert auditor.counts()["dropped"] == 2
            await asyncio.sleep(0.2)
            assert auditor.counts()["identical"] == 0
        async with asyncio.timeout(30):
            while auditor.counts()["identical"] < 8:
                await asyncio.sleep(0.02)

    asyncio.run(run())
    assert auditor.counts() == {"identical": 8, "different": 0, "skipped": 0, "failed": 0, "dropped": 2}


@pytest.mark.parametrize(("keys", "auditing", "header", "status"), [
    ((), True, ADMIN, 403), (TENANCY.admin_keys, True, {}, 401), (TENANCY.admin_keys, False, ADMIN, 404),
])  # fmt: skip
def test_it_is_the_operator_s(
    replica: Replica, circle_model: Path, keys: tuple[str, ...], auditing: bool, header: dict[str, str], status: int
) -> None:
    port = LocalEngine(replica)
    auditor = Auditor(port, AuditOptions(), speculation(circle_model), SCHEDULING) if auditing else None
    with served(Service(port, TOKENIZER, TenancyOptions(admin_keys=keys), auditor=auditor)) as url:
        for method in ("GET", "POST"):
            assert httpx.request(method, f"{url}/admin/audit", headers=header, timeout=60).status_code == status


@pytest.mark.parametrize("body", ['{"last": 0}', '{"last": "2"}', '{"first": 1}', "[]", "{", "9" * 5000])
def test_a_body_that_is_none_is_refused(audited: Callable[..., Audited], body: str) -> None:
    response = httpx.post(f"{audited().url}/admin/audit", content=body, headers=ADMIN, timeout=60)
    assert response.status_code == (413 if len(body) > 4096 else 400) and response.json()["error"]["message"]
