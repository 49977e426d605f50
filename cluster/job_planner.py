"""From a checked API request to the engine jobs of its choices."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast

from cluster.generation import Job
from cluster.openai_types import ChatCompletionRequest, CompletionRequest
from cluster.tenancy import Sharing
from cluster.tool_calls import OPENING
from decoding.request import SamplingParams
from engine.chat import bracketed_tokens, marks_tool_calls, render_chat
from engine.errors import ContextLengthError, RequestError
from engine.loading import ModelInfo

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
        self._info.check_strategy(body.drafting.strategy)
        return Job(
            f"{self._answer_id}/{index}", np.asarray(ids, np.int32), params, references,
            self._sharing.tenant, self._sharing.public,
            strategy=body.drafting.strategy, max_draft_tokens=body.drafting.max_draft_tokens, priority=body.priority or 0,
            report=bool(body.drafting.report), prompt_logprobs=body.num_prompt_logprobs,
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
