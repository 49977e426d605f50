"""A request that cannot go on by its own fault: a 400 that names its field, in a stream an event with the same error."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from outrider.cluster.http.api import Service
from outrider.cluster.serving.generation import GenerationJob
from outrider.decoding.request import FinishReason, StepOutput
from tests.cluster.circle import CHAT, CHATS, COMPLETIONS, TEXT, TOKENIZER, LocalEngine, check_error, client_of

RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: TEXT, CHATS: CHAT, RESPONSES: {"model": CHAT["model"], "input": "ab", "max_output_tokens": 8},
}  # fmt: skip
FIELD = "response_format.json_schema.schema"


class Faulty(LocalEngine):
    """Each job's last output is an error, after so many tokens: by the request's own fault, or not."""

    tokens = 0
    field: str | None = FIELD

    async def _generate(self, job: GenerationJob) -> AsyncGenerator[StepOutput, None]:
        yield StepOutput(job.request_id, (), "")
        for _ in range(self.tokens):
            yield StepOutput(job.request_id, (97,), "a")
        yield StepOutput(job.request_id, (), "", FinishReason.ERROR, "it cannot be followed", fault_field=self.field)


@pytest.fixture(scope="module")
def faulty(circle_engine: LocalEngine) -> Faulty:
    return Faulty(*circle_engine.replicas)


@pytest.fixture(scope="module")
def caller(faulty: Faulty) -> Iterator[httpx.Client]:
    with client_of(Service(faulty, TOKENIZER)) as client:
        yield client


@pytest.mark.parametrize("tokens", [0, 50])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COMPLETIONS, {}), (COMPLETIONS, {"n": 128}), (COMPLETIONS, {"prompt": ["ab", "cd"]}), (CHATS, {}), (CHATS, {"n": 8}),
        (RESPONSES, {}),
    ],
)  # fmt: skip
def test_an_own_fault_is_a_400_that_names_the_field(
    caller: httpx.Client, faulty: Faulty, path: str, more: dict[str, Any], tokens: int
) -> None:
    faulty.tokens, faulty.field = tokens, FIELD
    param = "text.format.schema" if path == RESPONSES else FIELD
    body = BODIES[path] | more
    check_error(caller.post(path, json=body), 400, param, "it cannot be followed", param=param, code="invalid_value")
    wire = caller.post(path, json=body | {"stream": True}).raise_for_status().text
    last = json.loads(wire.rstrip().rpartition("data: ")[2])
    if path == RESPONSES:
        assert last["type"] == "response.failed" and param in last["response"]["error"]["message"]
    else:
        error = last["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_value")


def test_a_failed_step_is_a_500(caller: httpx.Client, faulty: Faulty) -> None:
    faulty.tokens, faulty.field = 1, None
    check_error(caller.post(COMPLETIONS, json=TEXT), 500, "it cannot be followed", code="engine_error")
