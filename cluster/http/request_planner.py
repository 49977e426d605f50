"""Conversion of validated API requests to the engine jobs of their choices."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.cluster.admission.controller import AdmissionController, AdmittedRequest
from outrider.cluster.admission.tenancy import Sharing, Tenancy
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.respond import ReasoningFormat, ToolCallFormat
from outrider.cluster.http.answers.resume import ResumePoint, StreamHeaders
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.request_ids import rename_request, request_id
from outrider.cluster.http.text_threads import SHORT, TextThreads
from outrider.cluster.http.turns import SENDER, Turns
from outrider.cluster.http.types.openai import (
    MAX_REPORTED_VALUES,
    ChatCompletionRequest,
    CompletionRequest,
    RequestFields,
    ScoreRequest,
)
from outrider.cluster.http.types.structural_tag import CallMarks
from outrider.cluster.http.types.tool_grammar import BOUND_FORMS, faulty_tool
from outrider.cluster.serving.generation import EnginePort, Generation, GenerationJob, Listener
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.registry import strategy_text
from outrider.decoding.request import PLAIN, SamplingParams, ThinkingBudget
from outrider.decoding.sources.embeddings import signs_of
from outrider.engine.errors import ContextLengthError, RequestError
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.text.chat import bracketed_tokens, knows_variable, render_chat
from outrider.engine.text.chat_format import CALL_MARKS, HARMONY, HARMONY_ENDS, ChatFormat, added_tokens
from outrider.engine.text.grammar import after_reasoning, behind_analysis, reason_of, vocabulary_of
from outrider.engine.text.grammar_check import NO_VOCABULARY, GrammarChecker
from outrider.engine.text.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chats default to the rest of the context


_LEAST_TOP_P = 1e-9  # less than the probability of the most likely token of any vocabulary


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a prompt's choice: the request's for choice 0, else 63 bits of the BLAKE2b hash of ``SEED/CHOICE``."""
    # So `n` does not change the first choice. With a hash, each of the others can be requested alone, and neighbouring seeds do
    # not share choices.
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()) >> 1


@dataclass(slots=True)
class PlannerServices:
    """Shared parts of all routes that generate."""

    threads: TextThreads
    tenancy: Tenancy
    admission: AdmissionController  # counts each choice
    info: Callable[[], Awaitable[ModelInfo]]  # describes the served model; raises ApiError (503) while no engine answers
    listeners: tuple[Listener, ...]  # output hooks of all generations
    stream_key: bytes  # signs event ids; empty disables them
    sampling_defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the server, before the model's
    chat_format: ChatFormat = dataclasses.field(init=False)  # reasoning and tool call formats of the chat template
    grammars: GrammarTurns = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.chat_format = ChatFormat.of(self.threads.tokenizer)
        self.grammars = GrammarTurns(self.threads.tokenizer)

    async def model(self, name: str | None = None) -> ModelInfo:
        """Return the served model. Raises ``ApiError`` (404) if ``name`` is neither the model nor one of its adapters."""
        info = await self.info()
        if name is not None and name not in info.names:
            message = f"the model {name!r} does not exist; this server has {', '.join(map(repr, info.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return info

    async def planner(
        self,
        prefix: str,
        body: RequestFields,
        authorization: str | None,
        session_id: str | None,
        headers: StreamHeaders | None = None,
    ) -> RequestPlanner:
        """Return a request's planner; ``prefix`` is the response id's. Raises ApiError: wrong key, model or event id."""
        rename_request(body.request_id)
        sharing, info = self.tenancy.sharing(authorization, body.cache), await self.model(body.model)
        # A session in the body wins over the header.
        session = body.prompt_cache_key or session_id or None
        begin = functools.partial(
            ResumePoint.of, prefix, body, self.tenancy.tenant_of(authorization), headers or StreamHeaders(), self.stream_key
        )
        beginning = await self.threads.run(begin) if SENDER.get().size > SHORT else begin()
        adapter = None if body.model in (info.served_name, *info.aliases) else body.model
        return RequestPlanner(
            self.threads, self.grammars, self.chat_format, info, beginning, sharing, self.admission, session, adapter,
            self.defaults(info),
        )  # fmt: skip

    def defaults(self, info: ModelInfo) -> dict[str, float]:
        """Return the sampling parameters of requests that leave them out: the server's, before those of the model."""
        return {**dict(info.sampling_defaults), **self.sampling_defaults}

    def generation(self, engine: EnginePort, admitted: AdmittedRequest, n: int = 1, silent: bool = False) -> Generation:
        """Return the generation of an admitted request; see ``Generation``."""
        return Generation(engine, admitted.jobs, n, silent, (*self.listeners, *admitted.listeners), admitted.deadline)


class RequestPlanner:
    """Builds the engine jobs of one request: tokenizes it and applies defaults. Work shared by all choices is done once."""

    def __init__(
        self,
        threads: TextThreads,
        grammars: GrammarTurns,
        chat_format: ChatFormat,
        info: ModelInfo,
        beginning: ResumePoint,
        sharing: Sharing,
        admission: AdmissionController,
        session: str | None = None,
        adapter: str | None = None,
        defaults: Mapping[str, float] | None = None,  # sampling parameters of requests that leave them out
    ) -> None:
        self._adapter, self._defaults = adapter, defaults or {}
        self.left_out: list[str] = []  # what the response's grammar does not enforce; set with its jobs
        self._threads, self._grammars, self._tokenizer, self.info = threads, grammars, threads.tokenizer, info
        self._format, self._begins_within = chat_format, False if chat_format.reasoning is None else None
        self.beginning, self._sharing, self._session = beginning, sharing, session
        self._admission, self._limits = admission, admission.limits

    async def chat(self, body: ChatCompletionRequest) -> list[GenerationJob]:
        """Return the jobs of a chat, one per choice. Raises RequestError or ApiError naming a field that cannot be served."""
        ids = self._truncated(body, await self._threads.run(self._render, body), 1)
        if body.binds_calls is not None and self._format.calls is None:
            message = "the format of tool calls in the model's chat template is unknown, so they cannot be constrained"
            raise RequestError(body.binds_calls, f"{message}; leave it out")
        if body.binds_calls is not None and self._format.calls not in BOUND_FORMS:
            message = f"tool calls in the format {self._format.calls} are parsed and not constrained"
            raise RequestError(body.binds_calls, f"{message}; leave it out")
        self._begins_within = self._format.begins_within(self._tokenizer, ids)
        return await self._jobs(body, [(ids, self._most_tokens(body, ids, self.info.max_model_len))])

    async def count(self, body: ChatCompletionRequest) -> int:
        """Return the number of the tokens of a chat's prompt. Raises the errors of ``chat``."""
        return len(await self._threads.run(self._render, body))

    async def completion(self, body: CompletionRequest) -> list[GenerationJob]:
        """Return ``n`` jobs per prompt, in order of the prompts. Raises the errors of ``chat``."""
        prompts: list[tuple[list[int], int]] = []
        for prompt in body.prompt:
            ids = await self._threads.encode(prompt) if isinstance(prompt, str) else prompt
            ids = self._truncated(body, ids, COMPLETION_MAX_TOKENS)
            prompts.append((ids, self._most_tokens(body, ids, COMPLETION_MAX_TOKENS)))
            await asyncio.sleep(0)  # all prompts together may be as large as a body: do not block the event loop
        return await self._jobs(body, prompts)

    async def score(self, body: ScoreRequest) -> list[GenerationJob]:
        """Return one job per prompt, with the choices to score. Raises the errors of ``chat``."""
        jobs: list[GenerationJob] = []
        for prompt, choices in body.pairs:
            first = len(jobs)  # of several prompts each has one choice
            fields = [body.prompt_field, *(f"{body.choices_field}[{first + at}]" for at in range(len(choices)))]
            texts: list[list[int]] = []
            for field, choice in zip(fields, ("", *choices), strict=True):
                ids = await self._threads.run(self._joined, prompt, choice)
                self._check_ids(field, ids)
                self._check_length(field, ids)
                if len(ids) > (context := self.info.max_model_len):
                    message = f"the context is {context} tokens, but the prompt and the choice have {len(ids)}: shorten them"
                    raise ContextLengthError(field, message)
                texts.append(ids)
            jobs.append(await self._threads.run(self._scoring, body, first, texts, fields))
        return jobs

    def _joined(self, prompt: str | ChatCompletionRequest, choice: str) -> list[int]:
        return token_ids(self._tokenizer, prompt + choice) if isinstance(prompt, str) else self._render(prompt, choice)

    def _scoring(self, body: ScoreRequest, index: int, texts: list[list[int]], fields: Sequence[str]) -> GenerationJob:
        """Return the job of a prompt; ``texts`` are the prompt alone and with each choice. What they share is not scored."""
        # A choice is tokenized with its prompt, as the model would read it: a token may hold the end of the one and the beginning
        # of the other. Then it is scored with every choice, so that all are probabilities of the same part of the text.
        shared = sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False)))
        if not shared:
            raise RequestError(fields[0], "must have a token before those that depend on the choices: make it longer")
        choices = tuple(tuple(ids[shared:]) for ids in texts[1:])
        if () in choices:
            raise RequestError(fields[1 + choices.index(())], "has no token of its own behind the prompt: leave it out")
        return GenerationJob(
            f"{self.beginning.answer_id}/{index}", np.asarray(texts[0][:shared], np.int32),
            SamplingParams(max_tokens=max(map(len, choices))), (), self._sharing.tenant, self._sharing.public, self._adapter,
            strategy=PLAIN, priority=body.priority or 0, salt=body.cache_salt or "", session=self._session, choices=choices,
            http_id=request_id() or "",
        )  # fmt: skip

    async def echoes(self, body: CompletionRequest) -> list[str]:
        """Return the prompt text that each choice begins with, as the client sent it; empty without ``echo``."""
        if not body.echo:
            return []
        texts: list[str] = []
        for prompt in body.prompt:
            if not isinstance(prompt, str):
                decode = functools.partial(self._tokenizer.decode, prompt, skip_special_tokens=body.skips_special)
                prompt = str(await self._threads.run(decode))
            texts += [prompt] * (body.n or 1)
        return texts

    def reads(self, body: ChatCompletionRequest, token_bytes: TokenBytes) -> tuple[ReasoningFormat | None, ToolCallFormat | None]:
        """Return how to parse reasoning and tool calls from the response to a chat. Call it after ``chat``."""
        reasoning, calls, form = None, None, self._format
        if form.reasoning is not None:
            is_included = body.include_reasoning is not False
            reasoning = ReasoningFormat(form.reasoning, self._begins_within, token_bytes, is_included)
        if form.calls is not None and body.shown_tools and body.leaves_text_free:
            schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
            most = 1 if body.parallel_tool_calls is False else None
            calls = ToolCallFormat(form.calls, most, schemas, CALL_MARKS[form.calls][0] in form.hidden)
        return reasoning, calls

    def _render(self, body: ChatCompletionRequest, ending: str = "") -> list[int]:
        turns = [message.turn() for message in body.messages]
        return render_chat(
            self._tokenizer, turns, body.shown_tools, body.opens_message, self._variables(body),
            bool(body.continue_final_message), body.documents or (), ending,
        )  # fmt: skip

    def _truncated(self, body: ChatCompletionRequest | CompletionRequest, ids: list[int], least: int) -> list[int]:
        """Return the last tokens of a prompt, as ``truncate_prompt_tokens`` says; -1 leaves room for the output."""
        if (kept := body.truncate_prompt_tokens) is None:
            return ids
        return ids[-max(1, self.info.max_model_len - (body.most_tokens[1] or least)) if kept == -1 else -kept :]

    def _variables(self, body: ChatCompletionRequest) -> dict[str, Any]:
        """Return the chat template's variables. Raises ``RequestError`` if it does not support ``reasoning_effort``."""
        kwargs, effort = body.chat_template_kwargs or {}, body.reasoning_effort
        switches = [name for name in ("enable_thinking", "thinking") if knows_variable(self._tokenizer, name)]
        switch = {switches[0]: body.thinks} if switches and body.thinks is not None else {}
        if effort is None or "reasoning_effort" in kwargs:
            return switch | kwargs
        if knows_variable(self._tokenizer, "reasoning_effort"):
            return {"reasoning_effort": effort, **(switch if body.LENIENT else {}), **kwargs}
        if switch or body.LENIENT:
            return switch | kwargs
        advice = 'send "none" or leave it out' if switches else "leave it out"
        raise RequestError("reasoning_effort", f"the model's chat template has no reasoning_effort; {advice}")

    async def _jobs(
        self, body: ChatCompletionRequest | CompletionRequest, prompts: Sequence[tuple[list[int], int]]
    ) -> list[GenerationJob]:
        """Return the jobs of all prompts, each given as (token ids, maximum output tokens)."""
        self.info.check_strategy(self._strategy(body))
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            self._check_ids(field, getattr(body, field) or ())
        self._check_report_size(body, prompts)
        bound = body.bound_by or (isinstance(body, ChatCompletionRequest) and body.binds_calls)
        grammar = await self._grammars.build(self.info, functools.partial(self._checked_grammar, body)) if bound else None
        rules: dict[str, Any] = {"bad_words": await self._bad_words(body), "thinking": self._thinking(body)}
        params = [self._params(body, most, grammar, rules) for _, most in prompts]
        references, vector = await self._references(body), body.reference_embedding
        embedding = None if vector is None else await self._threads.run(signs_of, vector)
        jobs: list[GenerationJob] = []
        for (ids, _), one in zip(prompts, params, strict=True):
            job = self._bounded(body, self._job(body, ids, one, references, embedding))
            jobs += self._choices(job, len(jobs), body.n or 1)
            await asyncio.sleep(0)
        return jobs

    async def _bad_words(self, body: ChatCompletionRequest | CompletionRequest) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word at the beginning of a text and, like vLLM, after a space."""
        texts = [form for word in body.bad_words or () for form in (word, f" {word.lstrip()}")]
        found = [tuple(await self._threads.encode(text, special_tokens=False)) for text in texts]
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def _thinking(self, body: ChatCompletionRequest | CompletionRequest) -> ThinkingBudget | None:
        if not isinstance(body, ChatCompletionRequest) or body.thinking_token_budget is None:
            return None
        tags = self._format.reasoning
        if tags is None or tags is HARMONY:
            if body.LENIENT:
                return None
            message = "the model's chat template has no tags around the reasoning that could be closed; leave it out"
            raise RequestError("thinking_token_budget", message)
        if self._begins_within is False:
            return None
        opening, closing = (tuple(token_ids(self._tokenizer, tag, special_tokens=False)) for tag in tags)
        return ThinkingBudget(body.thinking_token_budget, opening, closing, bool(self._begins_within))

    async def _references(self, body: ChatCompletionRequest | CompletionRequest) -> tuple[Int32Array, ...]:
        """Tokenize the reference texts. Raises ``ApiError`` (400) as soon as they have too many tokens."""
        found: list[Int32Array] = []
        first = len(body.references) - len(body.reference_documents or ())  # index of the first document, after a prediction
        for place, text in enumerate(body.references):
            found.append(np.asarray(await self._threads.encode(text, special_tokens=False), np.int32))
            field = "prediction" if place < first else f"reference_documents[{place - first}]"
            tokens, most = sum(map(len, found)), self._limits.max_reference_tokens
            if tokens > most:
                message = f"{field}: the reference texts have {tokens} tokens, the maximum is {most}"
                message += " (limits.max_reference_tokens): send less"
                raise self._admission.refuse(ApiError(400, message, param=field, code="too_many_references"))
        return tuple(found)

    def _checked_grammar(self, body: ChatCompletionRequest | CompletionRequest, fault: Fault) -> str:
        """Return the grammar of the response. Raises ``RequestError`` naming the field if the model cannot follow it."""
        grammar = self._grammar(body)
        assert grammar is not None, body.bound_by
        if reason := fault(grammar):
            field = body.bound_by
            if field is None and isinstance(body, ChatCompletionRequest):
                field = faulty_tool(body.tools or (), body.tool_choice, fault)
            raise RequestError(field or "tools", reason_of(reason))
        self.left_out = body.left_out()
        return grammar

    def _grammar(self, body: ChatCompletionRequest | CompletionRequest) -> str | None:
        tokens, form = added_tokens(self._tokenizer), self._format
        marks = CallMarks(form.calls or "hermes", form.has_call_names, tokens, bracketed_tokens(self._tokenizer))
        if not isinstance(body, ChatCompletionRequest):
            return body.grammar(marks)
        grammar = body.grammar(marks) if body.binds_calls is None else body.calls_grammar(marks)
        if grammar is None or form.reasoning is None:
            return grammar
        if form.reasoning is HARMONY:
            return behind_analysis(grammar, tokens, self._begins_within, has_header=body.binds_calls is not None)
        return after_reasoning(grammar, form.reasoning, tokens, self._begins_within)

    def _choices(self, job: GenerationJob, first: int, n: int) -> list[GenerationJob]:
        """Return the jobs of a prompt's ``n`` choices, numbered from ``first``."""
        seeds = [choice_seed(job.params.seed, choice) for choice in range(n)]
        return [
            dataclasses.replace(
                job,
                request_id=f"{self.beginning.answer_id}/{first + choice}",
                params=dataclasses.replace(job.params, seed=seed),
                siblings=n > 1,
            )
            for choice, seed in enumerate(seeds)
        ]

    def _most_tokens(self, body: ChatCompletionRequest | CompletionRequest, ids: list[int], default: int) -> int:
        """Return the maximum output tokens: as requested, otherwise ``default`` or the rest of the context, if that is less."""
        prompt, (field, wanted) = body.PROMPT, body.most_tokens
        self._check_ids(prompt, ids)
        if not ids:
            raise RequestError(prompt, "must not be empty")
        context = self.info.max_model_len
        left = context - len(ids)
        if left < 1:
            raise ContextLengthError(prompt, f"the context is {context} tokens, but the prompt has {len(ids)}: shorten it")
        if wanted is not None and wanted > left and isinstance(body, ChatCompletionRequest) and body.LENIENT:
            return left
        if wanted is not None and wanted > left:
            raise ContextLengthError(
                field,
                f"the context is {context} tokens, but the prompt's {len(ids)} plus {wanted} make {len(ids) + wanted}: "
                f"request at most {left}",
            )
        return min(default, left) if wanted is None else max(1, wanted)  # for 0, one token is generated and not returned

    def _job(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        ids: list[int],
        params: SamplingParams,
        references: tuple[Int32Array, ...],
        embedding: Int32Array | None,
    ) -> GenerationJob:
        """Return the job of a prompt, before ``_choices`` sets its request id and seed."""
        return GenerationJob(
            self.beginning.answer_id, np.asarray(ids, np.int32), params, references,
            self._sharing.tenant, self._sharing.public, self._adapter,
            strategy=self._strategy(body), as_published=body.drafting.as_published,
            max_draft_tokens=body.drafting.max_draft_tokens, priority=body.priority or 0,
            report=bool(body.drafting.report), prompt_logprobs=body.num_prompt_logprobs, embedding=embedding,
            salt=body.cache_salt or "", session=self._session, resumed=bool(self.beginning.sent),
            http_id=request_id() or "",
        )  # fmt: skip

    def _strategy(self, body: ChatCompletionRequest | CompletionRequest) -> str | None:
        """Return the strategy of a request, with its options; None for the server's default."""
        choice = body.drafting
        return strategy_text(choice.strategy or self.info.strategy, choice.options) if choice.options else choice.strategy

    def _bounded(self, body: ChatCompletionRequest | CompletionRequest, job: GenerationJob) -> GenerationJob:
        """Apply ``limits.max_prompt_tokens`` and ``limits.max_output_tokens``: lower a default, refuse a larger request."""
        most = self._limits.max_output_tokens
        self._check_length(body.PROMPT, job.prompt_ids)
        if most is None or job.params.max_tokens <= most:
            return job
        for field, value in (body.most_tokens, ("min_tokens", body.min_tokens)):
            if (value or 0) > most:
                raise RequestError(field, f"must be at most {most} on this server, got {value}")
        return dataclasses.replace(job, params=dataclasses.replace(job.params, max_tokens=most))

    def _params(
        self, body: ChatCompletionRequest | CompletionRequest, max_tokens: int, grammar: str | None, rules: Mapping[str, Any]
    ) -> SamplingParams:
        """Return the sampling parameters with defaults of the server, the model or OpenAI. Raises ``RequestError``.

        Args:
            rules: parameters that need the tokenizer: ``bad_words`` and ``thinking``.
        """
        logit_bias = tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())
        self._check_ids("logit_bias", [token for token, _ in logit_bias])
        if grammar is not None and body.ignore_eos:
            raise RequestError("ignore_eos", "must be false with structured output, which determines where the answer may end")
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                "min_tokens", f"must be at most the maximum number of tokens ({max_tokens}), got {body.min_tokens}"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self._given(body, "temperature", 1.0),
            top_p=max(self._given(body, "top_p", 1.0), _LEAST_TOP_P),
            top_k=max(0, int(self._given(body, "top_k", 0))),
            min_p=self._given(body, "min_p", 0.0),
            repetition_penalty=self._given(body, "repetition_penalty", 1.0),
            presence_penalty=self._given(body, "presence_penalty", 0.0),
            frequency_penalty=self._given(body, "frequency_penalty", 0.0),
            logit_bias=logit_bias,
            logprobs=0 if body.logprob_token_ids else body.num_logprobs,
            seed=self.beginning.seed if body.seed is None else body.seed % 2**63,
            min_tokens=body.min_tokens or 0,
            stop=tuple(body.stop or ()),
            stop_token_ids=(*(body.stop_token_ids or ()), *self._ends(body)),
            ignore_eos=bool(body.ignore_eos),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skips_special and not self._needs_special(body),
            grammar=grammar,
            grammar_field=body.bound_by or "tools",
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            logprob_token_ids=tuple(body.logprob_token_ids or ()),
            **rules,
        )

    def _given(self, body: ChatCompletionRequest | CompletionRequest, name: str, otherwise: float) -> float:
        value: float | None = getattr(body, name)
        return self._defaults.get(name, otherwise) if value is None else value

    def _ends(self, body: ChatCompletionRequest | CompletionRequest) -> list[int]:
        """Return the end tokens of the harmony format, which the model's configuration may not list."""
        if not isinstance(body, ChatCompletionRequest) or self._format.reasoning is not HARMONY or body.ignore_eos:
            return []
        tokens = added_tokens(self._tokenizer)
        return [tokens[mark] for mark in HARMONY_ENDS if mark in tokens]

    def _needs_special(self, body: ChatCompletionRequest | CompletionRequest) -> bool:
        """Return whether special tokens must be decoded, because reasoning or tool calls are delimited by them."""
        if not isinstance(body, ChatCompletionRequest):
            return False
        form = self._format
        calls = CALL_MARKS[form.calls] if form.calls is not None and body.shown_tools else ()
        return not form.hidden.isdisjoint((*(form.reasoning or ()), *calls))

    def _check_report_size(
        self, body: ChatCompletionRequest | CompletionRequest, prompts: Sequence[tuple[list[int], int]]
    ) -> None:
        """Raise ``RequestError`` if the response could hold too many log-probabilities and reported tokens."""
        n, is_chat, limit = body.n or 1, isinstance(body, ChatCompletionRequest), self._limits.max_output_tokens
        emitted = n * sum(tokens if limit is None else min(tokens, limit) for _, tokens in prompts)
        scored = n * sum(len(ids) for ids, _ in prompts)
        sizes = {"speculation.report": emitted if body.drafting.report else 0}
        if body.num_logprobs is not None:
            tokens = emitted + (scored if isinstance(body, CompletionRequest) and body.echo else 0)
            sizes["top_logprobs" if is_chat else "logprobs"] = tokens * (body.num_logprobs + 1)
        if body.prompt_logprobs is not None:  # a chat returns them once for all choices
            sizes["prompt_logprobs"] = scored // (n if is_chat else 1) * (body.prompt_logprobs + 1)
        if (total := sum(sizes.values())) > MAX_REPORTED_VALUES:
            length = "max_completion_tokens" if is_chat else "max_tokens"
            message = (
                f"choices x tokens x (alternatives + 1) make {total} log-probabilities and reported tokens, the maximum per "
                f"answer is {MAX_REPORTED_VALUES}: lower n, {length}, or the alternatives"
            )
            raise RequestError(max(sizes, key=lambda field: sizes[field]), message)

    def _check_length(self, field: str, ids: Sequence[int] | Int32Array) -> None:
        most = self._limits.max_prompt_tokens
        if most is not None and len(ids) > most:
            message = f"the prompt has {len(ids)} tokens, the maximum is {most}: shorten it"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self.info.vocab_size:
            raise RequestError(field, f"token ids must be between 0 and {self.info.vocab_size - 1}, got {max(ids)}")


Fault = Callable[[str], str]  # from a grammar to its error for the model; empty if it is valid


class GrammarTurns:
    """Threads for grammars, separate from those for texts, so that slow grammars do not delay texts of other keys."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._turns = tokenizer, Turns("grammars")
        self._lock = threading.Lock()
        self._known: tuple[int, tuple[int, ...]] | None = None  # (vocab_size, eos_token_ids) that the checker is for
        self._checker = GrammarChecker()

    async def build(self, info: ModelInfo, build: Callable[[Fault], str]) -> str:
        """Call ``build`` with a check for the model in a thread, and return its grammar. Raises the errors of ``Turns.run``."""
        return await self._turns.run(lambda: build(lambda grammar: self._fault(info, grammar)))

    def _fault(self, info: ModelInfo, grammar: str) -> str:
        # Making the checker takes long: threads wait for one instead of making it several times.
        with self._lock:
            if self._known != (info.vocab_size, info.eos_token_ids):
                try:
                    vocabulary = vocabulary_of(self._tokenizer, info.vocab_size, info.eos_token_ids)
                except ValueError as error:
                    return f"{NO_VOCABULARY}: {error}"
                self._checker.close()
                self._checker, self._known = GrammarChecker(vocabulary), (info.vocab_size, info.eos_token_ids)
            checker = self._checker
        return checker.fault(grammar)
