"""Answers in OpenAI's shapes, whole and in chunks.

Only fields that were set are written, so that one class serves every shape: a ``None`` that was set is written as null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from cluster.http.answers.extras import Extras
from cluster.http.answers.logprobs import TokenBytes
from cluster.http.answers.pieces import Pauses, to_json, written
from cluster.http.answers.reasoning import Thought
from cluster.http.answers.tool_calls import Arguments, Call, whole_calls
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.serving.generation import Generation, Job
from decoding.request import StepOutput, StepReport
from engine.loading.model_info import ModelInfo

_PART = 32  # of the text of a choice: what joining it takes, in bytes of JSON


class ReportedToken(BaseModel):
    """A token that was emitted."""

    text: str  # what it released: "" for a part of a character, and what stop strings held back with the token that decides it
    source: str  # model, prompt, document, output, trie, public, or the drafter's name: see decoding.budget.attribution


class ReportedStep(BaseModel):
    """A forward of the target model that emitted tokens, and these."""

    tokens: list[ReportedToken]
    drafted: int  # tokens that were verified
    accepted: int  # of these, emitted


class Reported(BaseModel):
    """Steps of a choice, in order. All texts together are what the model wrote: without an echo, with the calls of tools."""

    steps: list[ReportedStep]


class PromptTokensDetails(BaseModel):
    """Of the tokens of a prompt."""

    cached_tokens: int  # whose KV was there already: they begin another request of the same tenant


class CompletionTokensDetails(BaseModel):
    """Of the tokens of the answers."""

    reasoning_tokens: int | None = None  # up to the end of the reasoning, tags included; only of models that reason
    accepted_prediction_tokens: int | None = None  # of a predicted output; see cluster.http.answers.predicted
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """Tokens of a response. Emitted tokens count, the end token included, whether or not they show as text."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # only where there are such
    energy_joules: float | None = None  # as hardware counted it, see engine.measures.energy_ledger; only where it did


class Delta(BaseModel):
    """A message, or what a chunk adds to it. A call of a tool comes with its name, more of its arguments
    in the chunks that follow.

    Reasoning has vLLM's name, and the one that vLLM had before and DeepSeek, SGLang and llama.cpp have.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None = ""  # null where there are calls or reasoning, and no text
    reasoning: str | None = None  # what the model wrote between the tags of its template, before the content
    reasoning_content: str | None = None  # the same
    refusal: None = None
    tool_calls: list[dict[str, Any]] = []


class Choice(BaseModel):
    """One answer, or what a chunk adds to it: ``message`` of a chat, ``delta`` of its stream, ``text`` of a completion."""

    index: int
    message: Delta = Delta()
    delta: Delta = Delta()
    text: str = ""
    logprobs: dict[str, Any] | None = None  # see cluster.http.answers.logprobs
    token_ids: list[int] | None = None  # these three where the request asks for them; see cluster.http.answers.extras
    prompt_token_ids: list[int] | None = None  # of a completion
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # of a completion: by token id, for each token of the prompt
    speculation: Reported | None = None  # the steps that it comes from, where the request asks for them
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class Answer(BaseModel):
    """An answer, or one chunk of it."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int  # seconds since 1970
    model: str
    lossless: bool  # whether it has the distribution of plain decoding: how it was drafted for, if at all, changed nothing
    choices: list[Choice]
    usage: Usage | None = None
    obfuscation: str | None = None  # of a padded chunk, see stream_guard.py
    prompt_token_ids: list[int] | None = None  # of a chat, where the request asks for them, as its prompt_logprobs
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    async def to_json(self, pauses: Pauses) -> bytes:
        """Return the JSON of the fields that were set, lists in pieces; they may hold JSON that was written already."""
        if self._is_small:
            return self.model_dump_json(exclude_unset=True).encode()
        return await written(self, pauses)

    async def to_event(self, with_usage: bool, pauses: Pauses) -> str:
        """The chunk as a server-sent event. Where usage was asked for, the chunks before it say null, as OpenAI's do."""
        if with_usage and self.usage is None:
            self.usage = None
        data = await self.to_json(pauses)
        await pauses.after(len(data))  # a copy is a piece of its own
        return f"data: {data.decode()}\n\n"

    @property
    def _is_small(self) -> bool:
        """Return whether this is a chunk of one choice without lists."""
        if len(self.choices) > 1 or self.prompt_token_ids is not None or self.prompt_logprobs is not None:
            return False
        fields = ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs", "speculation")
        return all(getattr(choice, field) is None for choice in self.choices for field in fields)


class AnswerBuilder:
    """Builds the objects of one answer: all have its id."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        body: ChatCompletionRequest | CompletionRequest,
        info: ModelInfo,
        token_bytes: TokenBytes,
        jobs: Sequence[Job],
        echoes: Sequence[str] = (),
    ) -> None:
        """
        Args:
            answer_id: what the client sees, and what its texts are deleted by.
            created: seconds since 1970.
            body: of the request.
            info: the model.
            token_bytes: of the model's tokenizer.
            jobs: one for each choice.
            echoes: the prompt that the text of each choice begins with, if any.
        """
        self.id, self._model, self._created = answer_id, body.model, created
        self._kind: Literal["chat", "text"] = "chat" if isinstance(body, ChatCompletionRequest) else "text"
        self._lossless = info.is_lossless(body.drafting.strategy, body.drafting.max_draft_tokens)
        self.pauses = Pauses()  # of the work on it
        self._extras = Extras(body, jobs, token_bytes, self.pauses, echoes)
        self._steps: dict[int, list[bytes]] = {}  # by choice, what was heard of steps and is not told yet, written

    async def hear(self, index: int, output: StepOutput) -> None:
        """Takes in what an output of a choice tells besides its text, before anything is built of it."""
        if output.report is not None:
            self._steps.setdefault(index, []).append(reported_step(output.report))
        await self._extras.hear(index, output)

    async def whole(
        self, pieces: Sequence[Sequence[str | Thought | Call | Arguments]], reasons: list[Any], usage: Usage
    ) -> bytes:
        """Return the JSON of the answer that is not streamed, by choice."""
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
        """The first chunk of a choice of a chat, which says who speaks; a completion has none."""
        if self._kind == "text":
            return None
        return self._object([self._chunk(index, "", Delta(role="assistant", content="", refusal=None))])

    def piece(self, index: int, part: str | Thought) -> Answer:
        """Return a chunk with text, with log-probabilities and steps of tokens that were heard: their text may be held back."""
        if isinstance(part, Thought):
            choice = self._chunk(index, "", Delta(reasoning=part.text, reasoning_content=part.text))
        else:
            choice = self._chunk(index, part, Delta(content=part))
        choice.logprobs = self._extras.logprobs(index)
        self._report(choice)
        return self._object([choice])

    def call(self, index: int, part: Call | Arguments, position: int) -> Answer:
        """A chunk with a call of a tool, ``position`` of its choice, or more of its arguments."""
        told = _called(part) if isinstance(part, Call) else {"function": {"arguments": part.text}}
        return self._object([self._chunk(index, "", Delta(tool_calls=[{"index": position, **told}]))])

    def end(self, index: int, reason: Any) -> Answer:
        """The last chunk of a choice."""
        choice = self._chunk(index, "", Delta())
        choice.finish_reason = reason
        return self._object([choice])

    def _chunk(self, index: int, text: str, delta: Delta) -> Choice:
        """What is added to a choice: to a completion the text, to a chat the delta."""
        if self._kind == "chat":
            return Choice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return Choice(index=index, text=text, logprobs=None, finish_reason=None)

    def usage(self, usage: Usage) -> Answer:
        """The chunk after the last one, when the client asked for it."""
        return self._object([], usage=usage)

    def _report(self, choice: Choice) -> None:
        """Tells of steps where there are any; else the field is not written."""
        if steps := self._steps.pop(choice.index, None):
            choice.speculation = Reported.model_construct(steps=steps)

    def _object(self, choices: list[Choice], *, streamed: bool = True, usage: Usage | None = None) -> Answer:
        name: Any = "text_completion"
        if self._kind == "chat":
            name = "chat.completion.chunk" if streamed else "chat.completion"
        answer = Answer(
            id=self.id, object=name, created=self._created, model=self._model, lossless=self._lossless, choices=choices
        )
        if usage is not None:
            answer.usage = usage
        for choice in choices:
            of_choice, of_answer = self._extras.told(choice.index)
            for target, fields in ((choice, of_choice), (answer, of_answer)):
                for field, value in fields.items():
                    setattr(target, field, value)
        return answer


def usage_of(generation: Generation) -> Usage:
    """The tokens of a generation so far."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    details = PromptTokensDetails(cached_tokens=generation.cached_tokens)
    return Usage(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, prompt_tokens_details=details
    )


def reported_step(report: StepReport) -> bytes:
    """Return the JSON of a step's report."""
    pairs = zip(report.pieces, report.sources, strict=True)
    tokens = [ReportedToken(text=text, source=source) for text, source in pairs]
    return to_json(ReportedStep(tokens=tokens, drafted=report.drafted, accepted=report.accepted))


def _called(call: Call) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
