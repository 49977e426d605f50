"""Responses in OpenAI's format, whole and in chunks. Only fields that were set are written, ``None`` as null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.pieces import Pauses, event_data, to_json, written
from outrider.cluster.http.answers.reasoning import Thought
from outrider.cluster.http.answers.response_extras import ResponseExtras
from outrider.cluster.http.answers.tool_calls import Arguments, whole_calls
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from outrider.cluster.serving.generation import GenerationJob
from outrider.decoding.request import SpecStats, StepOutput, StepReport
from outrider.engine.loading.model_info import ModelInfo

_PART = 32  # cost of joining one part of a choice's text, in bytes of JSON


class ReportedToken(BaseModel):
    """Emitted token and its draft source."""

    # Text that the token released: "" for a part of a character. Text held back for stop strings comes with a later token.
    text: str
    source: str  # model, prompt, document, output, trie, public, or the drafter's name: see decoding.budget.attribution


class ReportedStep(BaseModel):
    """Forward pass of the target model that emitted tokens."""

    tokens: list[ReportedToken]
    drafted: int  # verified draft tokens
    accepted: int  # emitted draft tokens


class Reported(BaseModel):
    """Steps of a choice, in order. Their texts together are the model's output: no echoed prompt, but with tool calls."""

    steps: list[ReportedStep] = []
    cut: str | None = None  # with the last steps: that drafts were smaller than the strategy's options ask for, and why
    refused_by_penalty: int | None = None  # with the last steps: steps that refused a draft only because of a penalty


class PromptTokensDetails(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int  # tokens whose KV was reused from another request of the same tenant


class CompletionTokensDetails(BaseModel):
    """Details of the completion tokens."""

    reasoning_tokens: int | None = None  # tokens up to the end of the reasoning, tags included; reasoning models only
    accepted_prediction_tokens: int | None = None  # tokens of a prediction; see cluster.http.answers.predicted
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """Token counts of a response. All emitted tokens count, including end tokens and tokens without text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # absent if there are none
    energy_joules: float | None = None  # measured by hardware counters, see engine.measures.energy_ledger; absent without them


class Delta(BaseModel):
    """Message, or an addition to it in a chunk. A tool call starts with its name; its arguments may follow in later chunks.

    ``reasoning`` is vLLM's name; ``reasoning_content`` is the name in older vLLM, DeepSeek, SGLang and llama.cpp.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None = ""  # null if there are tool calls or reasoning, and no text
    reasoning: str | None = None  # text between the reasoning tags, before the content
    reasoning_content: str | None = None  # same as reasoning
    refusal: None = None
    tool_calls: list[dict[str, Any]] = []


class Choice(BaseModel):
    """Choice, or an addition to it in a chunk: ``message`` for chats, ``delta`` for their streams, ``text`` for completions."""

    index: int
    message: Delta = Delta()
    delta: Delta = Delta()
    text: str = ""
    logprobs: dict[str, Any] | None = None  # see cluster.http.answers.logprobs
    token_ids: list[int] | None = None  # on request, like the next two; see cluster.http.answers.response_extras
    prompt_token_ids: list[int] | None = None  # completions only
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # completions only: per prompt token, by token id
    speculation: Reported | None = None  # draft report, on request
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class Answer(BaseModel):
    """Response to a chat or completion, or one chunk of it."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int  # Unix time in seconds
    model: str
    lossless: bool  # whether the output has the distribution of plain decoding
    choices: list[Choice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None  # vLLM's, see speculative_metrics; with the usage, if the server's options ask for it
    unenforced: list[str] | None = None  # keywords of schemas without strict that the answer need not follow; absent if none
    obfuscation: str | None = None  # padding of a chunk, see stream_guard.py
    prompt_token_ids: list[int] | None = None  # chats only, on request, like prompt_logprobs
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    async def to_json(self, pauses: Pauses) -> bytes:
        """Return the JSON of the fields that were set. Lists are written in pieces, and may hold ready JSON as ``bytes``."""
        if self._is_small:
            return self.model_dump_json(exclude_unset=True).encode()
        return await written(self, pauses)

    async def to_event(self, with_usage: bool, pauses: Pauses) -> str:
        """Return the chunk as a server-sent event."""
        if with_usage and self.usage is None:
            self.usage = None  # marks the field as set: like OpenAI, chunks before the usage chunk have null
        data = await self.to_json(pauses)
        await pauses.after(len(data))  # the copy below counts as a piece too
        return event_data(data)

    @property
    def _is_small(self) -> bool:
        if len(self.choices) > 1 or self.prompt_token_ids is not None or self.prompt_logprobs is not None:
            return False
        fields = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "speculation")
        return all(getattr(choice, field) is None for choice in self.choices for field in fields)


class AnswerBuilder:
    """Builder of one response, or of its chunks."""

    def __init__(
        self,
        answer_id: str,  # response id, by which the client can delete its texts
        created: int,  # Unix time in seconds
        body: ChatCompletionRequest | CompletionRequest,
        info: ModelInfo,
        token_bytes: TokenBytes,
        jobs: Sequence[GenerationJob],  # one per choice
        echoes: Sequence[str] = (),  # prompt that the text of each choice begins with; empty without ``echo``
        left_out: Sequence[str] = (),  # keywords of schemas that are not enforced
        tells_metrics: bool = False,
    ) -> None:
        self.id, self._model, self._created = answer_id, body.model, created
        self._kind: Literal["chat", "text"] = "chat" if isinstance(body, ChatCompletionRequest) else "text"
        self._strategy = body.drafting.strategy or info.strategy
        self._ends: dict[int, dict[str, Any]] = {}  # by choice: unsent fields of ``reported_end``
        self._lossless = info.is_lossless(body.drafting.strategy, body.drafting.max_draft_tokens)
        self.pauses = Pauses()
        self._left_out = list(left_out)  # until the first object has it
        self._tells_metrics, self._is_single, self._stats = tells_metrics, len(jobs) == 1, SpecStats()
        self._extras = ResponseExtras(body, jobs, token_bytes, self.pauses, echoes)
        self._steps: dict[int, list[bytes]] = {}  # by choice: unsent step reports as JSON

    async def on_output(self, index: int, output: StepOutput) -> None:
        """Store the extra fields of a choice's output. Call it before the output's chunks are built."""
        if output.report is not None:
            self._steps.setdefault(index, []).append(reported_step(output.report))
            if end := reported_end(output, self._strategy):
                self._ends[index] = end
        self._stats = output.stats or self._stats
        await self._extras.on_output(index, output)

    async def whole(
        self, pieces: Sequence[Sequence[str | Thought | Call | Arguments]], reasons: list[Any], usage: Usage
    ) -> bytes:
        """Return the JSON of the response without streaming; ``pieces`` and ``reasons`` are per choice."""
        choices = []
        for index, (parts, reason) in enumerate(zip(pieces, reasons, strict=True)):
            choice = Choice(index=index, logprobs=self._extras.logprobs(index), finish_reason=reason)
            text = "".join(part for part in parts if isinstance(part, str))
            if self._kind == "text":
                choice.text = text
            else:
                calls = [_called(call) for call in whole_calls(parts)]
                thought = "".join(part.text for part in parts if isinstance(part, Thought))
                content = text or (None if calls or thought else "")
                choice.message = Delta(role="assistant", content=content, refusal=None)
                if thought:
                    choice.message.reasoning = choice.message.reasoning_content = thought
                if calls:
                    choice.message.tool_calls = calls
            self._report(choice)
            choices.append(choice)
            await self.pauses.after(_PART * len(parts))
        return await self._object(choices, streamed=False, usage=usage).to_json(self.pauses)

    def opening(self, index: int) -> Answer | None:
        """Return the first chunk of a chat's choice, with the role; None for a completion."""
        if self._kind == "text":
            return None
        return self._object([self._chunk(index, "", Delta(role="assistant", content="", refusal=None))])

    def piece(self, index: int, part: str | Thought) -> Answer:
        """Return a chunk with text, and the log-probabilities and steps so far, whose text may be held back."""
        if isinstance(part, Thought):
            choice = self._chunk(index, "", Delta(reasoning=part.text, reasoning_content=part.text))
        else:
            choice = self._chunk(index, part, Delta(content=part))
        choice.logprobs = self._extras.logprobs(index)
        self._report(choice)
        return self._object([choice])

    def call(self, index: int, part: Call | Arguments, position: int) -> Answer:
        """Return a chunk with a tool call, or with more of its arguments; ``position`` is its index in the choice."""
        fields = _called(part) if isinstance(part, Call) else {"function": {"arguments": part.text}}
        return self._object([self._chunk(index, "", Delta(tool_calls=[{"index": position, **fields}]))])

    def end(self, index: int, reason: Any) -> Answer:
        """Return the last chunk of a choice."""
        choice = self._chunk(index, "", Delta())
        choice.finish_reason = reason
        self._report(choice)
        return self._object([choice])

    def _chunk(self, index: int, text: str, delta: Delta) -> Choice:
        if self._kind == "chat":
            return Choice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return Choice(index=index, text=text, logprobs=None, finish_reason=None)

    def usage(self, usage: Usage) -> Answer:
        """Return the usage chunk, which is sent last if requested."""
        return self._object([], usage=usage)

    def _report(self, choice: Choice) -> None:
        steps, end = self._steps.pop(choice.index, None), self._ends.pop(choice.index, {})
        if steps or end:
            choice.speculation = Reported.model_construct(steps=steps or [], **end)

    def _object(self, choices: list[Choice], *, streamed: bool = True, usage: Usage | None = None) -> Answer:
        name: Any = "text_completion"
        if self._kind == "chat":
            name = "chat.completion.chunk" if streamed else "chat.completion"
        answer = Answer(
            id=self.id, object=name, created=self._created, model=self._model, lossless=self._lossless, choices=choices
        )
        if usage is not None:
            answer.usage = usage
            if self._tells_metrics:
                answer.metrics = speculative_metrics(self._stats) if self._is_single else None
        if self._left_out:
            answer.unenforced, self._left_out = self._left_out, []
        for choice in choices:
            of_choice, of_answer = self._extras.take(choice.index)
            for target, fields in ((choice, of_choice), (answer, of_answer)):
                for field, value in fields.items():
                    setattr(target, field, value)
        return answer


def speculative_metrics(stats: SpecStats) -> dict[str, Any]:
    """Return the statistics of a request's drafts by vLLM's names. Draft tokens are all rows of the draft trees."""
    histogram = stats.acceptance_histogram or [0]
    steps = sum(histogram)
    found = {
        "mean_acceptance_length": 1 + stats.accepted / max(1, steps),
        "draft_acceptance_rate": stats.accepted / max(1, stats.drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(histogram) - 1,  # of the largest tree
    }
    return {"speculative_decoding": found}


def reported_step(report: StepReport) -> bytes:
    """Return a step's report as JSON."""
    pairs = zip(report.pieces, report.sources, strict=True)
    tokens = [ReportedToken(text=text, source=source) for text, source in pairs]
    return to_json(ReportedStep(tokens=tokens, drafted=report.drafted, accepted=report.accepted))


def reported_end(output: StepOutput, strategy: str) -> dict[str, Any]:
    """Return the fields of ``Reported`` that come with the last steps: why drafts were smaller, and what penalties refused."""
    if output.stats is None:
        return {}
    found = {"cut": output.stats.cut(strategy), "refused_by_penalty": output.stats.refused_by_penalty}
    return {name: value for name, value in found.items() if value is not None}


def _called(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
