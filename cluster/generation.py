"""From a checked API request to engine requests, and from their outputs to the choices of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from actors.replica import Description
from cluster.errors import ApiError
from cluster.openai_types import ChatCompletionRequest, CompletionRequest, SpeculationChoice
from cluster.tenancy import Sharing
from cluster.tool_calls import OPENING
from decoding.request import FinishReason, SamplingParams, StepOutput
from decoding.tree import Int32Array
from engine.chat import bracketed_tokens, marks_tool_calls, render_chat
from engine.errors import ContextLengthError, RequestError
from engine.loading import ModelInfo

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat gets what is left of the context


@dataclass(frozen=True, slots=True)
class Job:
    """What a replica needs for one choice."""

    request_id: str  # ANSWER_ID/INDEX: the id that the client sees, and the number of the choice
    prompt_ids: Int32Array  # [n]
    params: SamplingParams
    references: tuple[Int32Array, ...] = ()
    tenant: str | None = None  # whose texts it drafts from and adds to; None: nobody's
    public: bool = True  # may draft from the public corpus
    emitted: tuple[int, ...] = ()  # output tokens that another replica emitted before; their outputs do not come again
    strategy: str | None = None  # who drafts for it; None: the engine's own
    max_draft_tokens: int | None = None  # most drafted rows in a step; None: as many as the engine's own limit
    priority: int = 0  # lower goes first
    siblings: bool = False  # other jobs have the same prompt and the same ANSWER_ID: it is computed once
    report: bool = False  # outputs say who drafted their tokens
    prompt_logprobs: int | None = None  # alternatives told with each log-probability of the prompt; None: none are told


class EnginePort(Protocol):
    """The engine replicas as the API sees them."""

    def generate(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        """The outputs of a job; the first is empty and says that an engine took it. ``aclose`` frees the slot.

        The engine knows it by ``job.request_id``, from which the names of its texts in the shared memory follow.

        Raises:
            engine.errors.QueueFullError, engine.errors.RequestError: no engine takes it.
            cluster.errors.ApiError: 503, no engine answers.
        """
        ...

    async def describe(self) -> list[Description]:
        """One description for each replica that serves; empty when none does."""
        ...


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices of a prompt: the request's own for the first, so that ``n`` does not change it.

    For the others the first 63 bits of the BLAKE2b hash of ``SEED/CHOICE``: each choice can be asked for alone, and neighbouring
    seeds do not share choices.
    """
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()) >> 1


class Planner:
    """Tokenizes one request and settles what it leaves open."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, info: ModelInfo, answer_id: str, sharing: Sharing) -> None:
        self._tokenizer, self._info, self._answer_id, self._sharing = tokenizer, info, answer_id, sharing

    def chat(self, body: ChatCompletionRequest) -> list[Job]:
        """The jobs of a chat, one for each choice. Raises ``RequestError`` naming the field that cannot be served."""
        ids = render_chat(self._tokenizer, [message.turn() for message in body.messages], body.shown_tools)
        if body.binds_calls is not None and not marks_tool_calls(self._tokenizer, body.shown_tools, OPENING):
            message = f"the model's chat template does not have {OPENING}, by which calls are bound; leave it out"
            raise RequestError(body.binds_calls, message)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = body.max_completion_tokens or body.max_tokens
        return self._choices(self._job(0, body, "messages", ids, field, wanted, self._info.max_model_len), 0, body.n or 1)

    def completion(self, body: CompletionRequest) -> list[Job]:
        """``n`` jobs for each prompt, in order. Raises ``RequestError`` naming the field that cannot be served."""
        jobs: list[Job] = []
        for index, prompt in enumerate(body.prompt):
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            job = self._job(index, body, "prompt", ids, "max_tokens", body.max_tokens, COMPLETION_MAX_TOKENS)
            jobs += self._choices(job, len(jobs), body.n or 1)
        return jobs

    def echoes(self, body: CompletionRequest) -> list[str]:
        """What the text of each choice begins with: its prompt, as the client spelled it."""
        if not body.echo:
            return []
        skip, decode = body.skips_special, self._tokenizer.decode
        prompts = [text if isinstance(text, str) else str(decode(text, skip_special_tokens=skip)) for text in body.prompt]
        return [prompt for prompt in prompts for _ in range(body.n or 1)]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is no prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _choices(self, job: Job, first: int, n: int) -> list[Job]:
        """The jobs of a prompt's choices, of which ``first`` is the number of the first one."""
        seeds = [choice_seed(job.params.seed, choice) for choice in range(n)]
        return [
            dataclasses.replace(
                job,
                request_id=f"{self._answer_id}/{first + choice}",
                params=dataclasses.replace(job.params, seed=seed),
                siblings=n > 1,
            )
            for choice, seed in enumerate(seeds)
        ]

    def _job(
        self,
        index: int,
        body: ChatCompletionRequest | CompletionRequest,
        prompt: str,
        ids: list[int],
        field: str,
        wanted: int | None,
        default: int,
    ) -> Job:
        """The job of a choice. ``wanted`` is the value of ``field``; without one, ``default`` or what is left of the context."""
        self._check_ids(prompt, ids)
        self._check_ids("stop_token_ids", body.stop_token_ids or ())
        if not ids:
            raise RequestError(prompt, "must not be empty")
        context = self._info.max_model_len
        left = context - len(ids)
        if left < 1:
            raise ContextLengthError(prompt, f"the context is {context} tokens, but the prompt has {len(ids)}: shorten it")
        if wanted is not None and wanted > left:
            raise ContextLengthError(
                field,
                f"the context is {context} tokens, but the prompt's {len(ids)} and {wanted} more make {len(ids) + wanted}: "
                f"at most {left} can be asked for",
            )
        params = self._params(body, min(default, left) if wanted is None else max(1, wanted))  # of 0 the one token is not told
        references = tuple(np.asarray(self.encode(text), np.int32) for text in body.references)
        speculation = body.speculation or SpeculationChoice()
        self._info.check_strategy(speculation.strategy)
        return Job(
            f"{self._answer_id}/{index}", np.asarray(ids, np.int32), params, references,
            self._sharing.tenant, self._sharing.public,
            strategy=speculation.strategy, max_draft_tokens=speculation.max_draft_tokens, priority=body.priority or 0,
            report=bool(speculation.report), prompt_logprobs=body.num_prompt_logprobs,
        )  # fmt: skip

    def _params(self, body: ChatCompletionRequest | CompletionRequest, max_tokens: int) -> SamplingParams:
        """The parameters with OpenAI's defaults."""
        logit_bias = tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())
        self._check_ids("logit_bias", [token for token, _ in logit_bias])
        if isinstance(body, ChatCompletionRequest) and body.binds_calls is not None:
            grammar: str | None = body.calls_grammar(bracketed_tokens(self._tokenizer))
        else:
            grammar = body.grammar()
        if grammar is not None and body.ignore_eos:
            raise RequestError("ignore_eos", "must be off where the form of the answer says where it may end")
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError("min_tokens", f"at most {max_tokens} tokens may come, but min_tokens is {body.min_tokens}")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            min_p=body.min_p or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=logit_bias,
            logprobs=body.num_logprobs,
            seed=secrets.randbelow(2**63) if body.seed is None else body.seed,
            min_tokens=body.min_tokens or 0,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skips_special,
            grammar=grammar,
        )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self._info.vocab_size:
            raise RequestError(field, f"token ids must be between 0 and {self._info.vocab_size - 1}, got {max(ids)}")


class Generation:
    """The choices of one request while they are computed: ``async with`` starts them, leaving it frees their slots."""

    def __init__(self, engine: EnginePort, jobs: Sequence[Job], n: int = 1, silent: bool = False) -> None:
        """
        Args:
            engine: computes them.
            jobs: one for each choice, ``n`` of each prompt side by side.
            n: choices of a prompt, which counts once in the usage.
            silent: what the jobs emit is left out: only their prompts are scored.
        """
        self.jobs, self._silent = tuple(jobs), silent
        self._n, self.num_choices = n, len(jobs)
        self.prompt_tokens = sum(len(job.prompt_ids) for job in jobs[::n])
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # of the prompts, by choice; of choices that have ended
        self.energy_j: float | None = 0.0  # of choices that have ended; None where one of them was not measured
        self._streams = [engine.generate(job) for job in jobs]
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Generation:
        """Returns when an engine has taken every job. Raises what ``EnginePort.generate`` does."""
        try:
            for stream in self._streams:
                await self._open.enter_async_context(contextlib.aclosing(stream))
            async with asyncio.TaskGroup() as group:
                for stream in self._streams:
                    group.create_task(self._accepted(stream))
        except ExceptionGroup as refusals:
            await self._open.aclose()
            raise refusals.exceptions[0] from None
        except BaseException:  # a cancelled request, above all: nothing may keep running
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts whose KV was there already. What one choice computed and the others took over was not."""
        fewest: dict[int, int] = {}  # by prompt
        for index, count in self._cached.items():
            fewest[index // self._n] = min(count, fewest.get(index // self._n, count))
        return sum(fewest.values())

    async def outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """The outputs of all choices as they come, with the number of the choice.

        Raises:
            ApiError: a choice failed.
        """
        async for index, output in _merge(self._streams):
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise ApiError(500, output.error or "the engine ended the request", code="engine_error")
            if self._silent:
                reason = output.finish_reason and FinishReason.LENGTH
                output = dataclasses.replace(output, token_ids=(), text="", logprobs=None, report=None, finish_reason=reason)
            self.completion_tokens += len(output.token_ids)
            if output.stats is not None:
                self._cached[index] = output.stats.cached_tokens
                energy_j = output.stats.energy_j
                self.energy_j = None if energy_j is None or self.energy_j is None else self.energy_j + energy_j
            yield index, output

    @staticmethod
    async def _accepted(stream: AsyncIterator[StepOutput]) -> None:
        await anext(stream)


async def _merge(streams: Sequence[AsyncIterator[StepOutput]]) -> AsyncIterator[tuple[int, StepOutput]]:
    """What several streams give, in the order in which it comes; the first failure is raised."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    items: asyncio.Queue[tuple[int, StepOutput | None]] = asyncio.Queue()  # None: the stream has ended

    async def pump(index: int, stream: AsyncIterator[StepOutput]) -> None:
        try:
            async for output in stream:
                items.put_nowait((index, output))
        finally:
            items.put_nowait((index, None))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        live = len(pumps)
        while live:
            index, item = await items.get()
            if item is not None:
                yield index, item
            else:
                live -= 1
                await pumps[index]  # raises what the stream raised
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
