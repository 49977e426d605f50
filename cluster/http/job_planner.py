"""From a checked API request to the engine jobs of its choices."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Sequence

import numpy as np

from cluster.admission.controller import AdmissionController
from cluster.admission.tenancy import Sharing
from cluster.http.answers.tool_calls import OPENING
from cluster.http.text_threads import TextThreads
from cluster.http.types.chat import text_of
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.serving.generation import Job
from decoding.request import SamplingParams
from decoding.tree import Int32Array
from engine.errors import ContextLengthError, RequestError
from engine.loading.model import ModelInfo
from engine.text.chat import bracketed_tokens, marks_tool_calls, render_chat

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat gets what is left of the context


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices of a prompt: the request's own for the first, so that ``n`` does not change it.

    For the others the first 63 bits of the BLAKE2b hash of ``SEED/CHOICE``: each choice can be asked for alone, and neighbouring
    seeds do not share choices.
    """
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()) >> 1


class Planner:
    """Tokenizes one request and settles what it leaves open. What all its choices share is computed once."""

    def __init__(
        self, threads: TextThreads, info: ModelInfo, answer_id: str, sharing: Sharing, admission: AdmissionController
    ) -> None:
        self._threads, self._tokenizer, self._info = threads, threads.tokenizer, info
        self._answer_id, self._sharing, self._admission = answer_id, sharing, admission

    async def chat(self, body: ChatCompletionRequest) -> list[Job]:
        """The jobs of a chat, one for each choice.

        Raises:
            RequestError, ApiError: naming the field that cannot be served.
        """
        ids = await self._threads.run(_length(body), self._render, body)
        if body.binds_calls is not None and not marks_tool_calls(self._tokenizer, body.shown_tools, OPENING):
            message = f"the model's chat template does not have {OPENING}, by which calls are bound; leave it out"
            raise RequestError(body.binds_calls, message)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = body.max_completion_tokens or body.max_tokens
        most = self._most_tokens("messages", ids, field, wanted, self._info.max_model_len)
        return await self._jobs(body, [(ids, most)])

    async def completion(self, body: CompletionRequest) -> list[Job]:
        """``n`` jobs for each prompt, in order. Raises as ``chat``."""
        prompts: list[tuple[list[int], int]] = []
        for prompt in body.prompt:
            ids = await self._threads.encode(prompt) if isinstance(prompt, str) else prompt
            prompts.append((ids, self._most_tokens("prompt", ids, "max_tokens", body.max_tokens, COMPLETION_MAX_TOKENS)))
        return await self._jobs(body, prompts)

    async def echoes(self, body: CompletionRequest) -> list[str]:
        """What the text of each choice begins with: its prompt, as the client spelled it."""
        if not body.echo:
            return []
        texts: list[str] = []
        for prompt in body.prompt:
            if not isinstance(prompt, str):
                prompt = str(await self._threads.run(len(prompt), self._decode, prompt, body.skips_special))
            texts += [prompt] * (body.n or 1)
        return texts

    def _render(self, body: ChatCompletionRequest) -> list[int]:
        return render_chat(self._tokenizer, [message.turn() for message in body.messages], body.shown_tools)

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    async def _jobs(self, body: ChatCompletionRequest | CompletionRequest, prompts: Sequence[tuple[list[int], int]]) -> list[Job]:
        """The jobs of all prompts, each with the most tokens of its answer."""
        self._info.check_strategy(body.drafting.strategy)
        self._check_ids("stop_token_ids", body.stop_token_ids or ())
        bound = body.bound_by or (isinstance(body, ChatCompletionRequest) and body.binds_calls)
        grammar = await self._threads.run(0, self._grammar, body) if bound else None
        params = [self._params(body, most, grammar) for _, most in prompts]
        references = await self._references(body)
        jobs: list[Job] = []
        for (ids, _), one in zip(prompts, params, strict=True):
            jobs += self._choices(self._job(body, ids, one, references), len(jobs), body.n or 1)
        return jobs

    async def _references(self, body: ChatCompletionRequest | CompletionRequest) -> tuple[Int32Array, ...]:
        """The tokens of all texts that the answer may repeat. Raises ``ApiError`` (400) as soon as they are too many."""
        found: list[Int32Array] = []
        first = len(body.references) - len(body.reference_documents or ())  # document; a prediction comes before
        for place, text in enumerate(body.references):
            found.append(np.asarray(await self._threads.encode(text, special_tokens=False), np.int32))
            field = "prediction" if place < first else f"reference_documents[{place - first}]"
            self._admission.check_references(sum(map(len, found)), field)
        return tuple(found)

    def _grammar(self, body: ChatCompletionRequest | CompletionRequest) -> str | None:
        if isinstance(body, ChatCompletionRequest) and body.binds_calls is not None:
            return body.calls_grammar(bracketed_tokens(self._tokenizer))
        return body.grammar()

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

    def _most_tokens(self, prompt: str, ids: list[int], field: str, wanted: int | None, default: int) -> int:
        """Of an answer. ``wanted`` is the value of ``field``; without one, ``default`` or what is left of the context."""
        self._check_ids(prompt, ids)
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
        return min(default, left) if wanted is None else max(1, wanted)  # of 0 the one token is not told

    def _job(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        ids: list[int],
        params: SamplingParams,
        references: tuple[Int32Array, ...],
    ) -> Job:
        """The job of a prompt, to which its choices give their numbers."""
        return Job(
            self._answer_id, np.asarray(ids, np.int32), params, references,
            self._sharing.tenant, self._sharing.public,
            strategy=body.drafting.strategy, max_draft_tokens=body.drafting.max_draft_tokens, priority=body.priority or 0,
            report=bool(body.drafting.report), prompt_logprobs=body.num_prompt_logprobs,
        )  # fmt: skip

    def _params(self, body: ChatCompletionRequest | CompletionRequest, max_tokens: int, grammar: str | None) -> SamplingParams:
        """The parameters with OpenAI's defaults. Raises ``RequestError`` for those that contradict each other."""
        logit_bias = tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())
        self._check_ids("logit_bias", [token for token, _ in logit_bias])
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


def _length(body: ChatCompletionRequest) -> int:
    """Characters of a chat."""
    return sum(len(text_of(message.content)) for message in body.messages)
