"""Python interface in the shape of vLLM's: ``LLM(model).generate(prompts, params)`` and ``.chat(messages, params)``. No Ray."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeGuard

from outrider.actors.offline import OfflineEngine
from outrider.configs.schema import find_model
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import SamplingParams, SpecStats, StepOutput, TokenLogprob
from outrider.engine.errors import RequestError
from outrider.engine.text.chat import render_chat

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
_MOST = 2**20  # waiting prompts: there is no client who could come back later


@dataclass(slots=True)
class CompletionOutput:
    """Text that follows a prompt."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None  # one per token, with ``SamplingParams.logprobs``


@dataclass(slots=True)
class RequestOutput:
    """Result of one prompt."""

    request_id: str
    prompt: str | None  # None for a prompt of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # one
    stats: SpecStats | None = None  # steps, drafted and accepted tokens
    error: str | None = None  # with the finish reason ``error``

    def take(self, output: StepOutput) -> None:
        """Add the output of one step."""
        (text,) = self.outputs
        text.text += output.text
        text.token_ids += output.token_ids
        if output.logprobs is not None:
            text.logprobs = [*(text.logprobs or ()), *output.logprobs]
        if output.finish_reason is not None:
            text.finish_reason, self.stats, self.error = str(output.finish_reason), output.stats, output.error


class LLM:
    """Model in this process. For one thread; ``close`` it, or use it in a ``with`` statement."""

    def __init__(
        self,
        model: str = "demo_model",
        *,
        engine: EngineOptions | None = None,
        speculation: SpeculationOptions | None = None,
        **options: Any,
    ) -> None:
        """Load a model: a folder, a .gguf file or a name on the hub.

        Args:
            options: further ``ModelOptions``, such as ``dtype`` and ``max_model_len``.

        Raises:
            ModelLoadError: the model cannot be used.
            TypeError: an option is unknown.
            ValueError: an option is out of range.
        """
        chosen = dataclasses.replace(engine or EngineOptions(), max_waiting=_MOST)
        self._engine = OfflineEngine(ModelOptions(find_model(model), **options), chosen, speculation or SpeculationOptions())
        self._numbers = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls without any: those of the model's ``generation_config.json``, else temperature 1."""
        defaults: dict[str, Any] = {"temperature": 1.0} | dict(self._engine.info.sampling_defaults)
        defaults["top_k"] = max(0, int(defaults.get("top_k", 0)))
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return the texts that follow one or several prompts, texts or lists of token ids, in their order.

        Raises ``RequestError`` before anything runs if a prompt cannot be answered.
        """
        given: list[Prompt] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)  # type: ignore[arg-type]
        tokenizer = self._engine.tokenizer
        pairs = [(one, tokenizer(one)["input_ids"]) if isinstance(one, str) else (None, list(one)) for one in given]
        return self._run(pairs, sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the assistant's next message of one or several conversations. Raises the errors of ``generate``."""
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        variables, tokenizer = dict(chat_template_kwargs or {}), self._engine.tokenizer
        ids = [render_chat(tokenizer, list(chat), [dict(tool) for tool in tools], variables=variables) for chat in chats]
        return self._run([(str(tokenizer.decode(one)), one) for one in ids], sampling_params)

    def close(self) -> None:
        """Release what the model needs beside memory."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        chosen = [params or self.get_default_sampling_params()] * len(prompts) if not isinstance(params, Sequence) else params
        if len(chosen) != len(prompts):
            raise RequestError("sampling_params", f"{len(chosen)} were given for {len(prompts)} prompts: give one, or as many")
        found: dict[str, RequestOutput] = {}
        try:
            for (text, ids), each in zip(prompts, chosen, strict=True):
                name = str(next(self._numbers))
                found[name] = RequestOutput(name, text, ids, [CompletionOutput()])
                self._engine.add(name, ids, each)
            for outputs in self._engine.outputs():
                for output in outputs:
                    if output.request_id in found:
                        found[output.request_id].take(output)
        finally:
            for name, one in found.items():
                if one.outputs[0].finish_reason is None:
                    self._engine.abort(name)
        return list(found.values())


def _is_ids(prompts: object) -> TypeGuard[Sequence[int]]:
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
