"""Limits on the length of prompts and answers (``limits.max_prompt_tokens``, ``limits.max_output_tokens``)."""

from __future__ import annotations

import dataclasses

from cluster.http.errors import ApiError
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.serving.generation import Job
from configs.slices import LimitsOptions


def bounded_job(job: Job, body: ChatCompletionRequest | CompletionRequest, limits: LimitsOptions) -> Job:
    """The job of a request within the limits.

    Example: with ``max_output_tokens=100`` a chat that names no number of tokens gets 100 at most, and one that asks for 101 is
    refused.

    Raises:
        ApiError: 400 that names the field which asks for too much.
    """
    _check_prompt(job, body, limits.max_prompt_tokens)
    most = limits.max_output_tokens
    if most is None or job.params.max_tokens <= most:
        return job
    longer = body.max_completion_tokens if isinstance(body, ChatCompletionRequest) else None
    field = "max_tokens" if longer is None else "max_completion_tokens"
    for name, value in ((field, longer or body.max_tokens), ("min_tokens", body.min_tokens)):
        if (value or 0) > most:
            message = f"{name}: {value} tokens are asked for, and this server gives at most {most} in an answer"
            raise ApiError(400, message, param=name, code="invalid_value")
    return dataclasses.replace(job, params=dataclasses.replace(job.params, max_tokens=most))


def _check_prompt(job: Job, body: ChatCompletionRequest | CompletionRequest, most: int | None) -> None:
    if most is not None and len(job.prompt_ids) > most:
        message = f"the prompt has {len(job.prompt_ids)} tokens, and this server takes {most}: shorten it"
        field = "messages" if isinstance(body, ChatCompletionRequest) else "prompt"
        raise ApiError(400, message, param=field, code="context_length_exceeded")
