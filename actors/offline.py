"""Engine that runs a fixed list of prompts, used by ``outrider generate``. Needs no Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams, StepOutput
from outrider.engine.engine import Engine
from outrider.engine.errors import RequestError
from outrider.engine.text.chat import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from outrider.actors.ranks import Ranks

TENANT = "local"  # all records of a file may draft from each other


@dataclass(frozen=True, slots=True)
class OfflinePrompt:
    """Input record as text."""

    request_id: str
    text: str
    references: tuple[str, ...] = ()  # documents that the answer may repeat
    messages: tuple[Mapping[str, Any], ...] = ()  # chat messages; replace the text


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Summary of how the ranks shared the steps."""

    mean_width: float  # mean number of participating ranks over the latest steps
    exchange_share: float  # fraction of those steps' time in which no rank computed: messages, waiting, merging
    losses: int
    divergences: int


class OfflineEngine:
    """Engine that takes all prompts at once (``max_waiting`` must suffice) and runs until all are finished. For one thread."""

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        ranks: Ranks | None = None,
        brief: bool = False,
    ) -> None:
        """Load the model and start the ranks; ``brief``: for a single answer, without timing the device for its drafts.

        Raises ModelLoadError, GroupError, or ValueError for an option out of range.
        """
        self._ranks = ranks
        if ranks is None:
            self._engine = Engine.load(model, engine, speculation, defer_warmup=brief)
        else:
            try:
                self._engine = Engine.load(model, engine, speculation, ranks.world_size, ranks.executor, ranks.runner)
                ranks.start()
            # Also after Ctrl-C, which is no `Exception`: the ranks' processes would go on.
            except BaseException:
                ranks.close()
                raise
        self.info = self._engine.info
        state = None if ranks is None else ranks.state()
        self.world_size = 1 if state is None else state.world_size
        self.threads = model.threads

    def submit(self, prompts: Sequence[OfflinePrompt], params: SamplingParams, chat: bool) -> list[int | str]:
        """Tokenize and add prompts (``chat``: as user messages). Return each one's number of tokens, or why it is refused."""
        return [self._add(prompt, params, chat) for prompt in prompts]

    def outputs(self, every_s: float = 0.0) -> Iterator[list[StepOutput]]:
        """Yield the step outputs, collected over ``every_s`` seconds, until no request is left; a last one has counters."""
        if self._ranks is not None:
            self._ranks.occupied(True)
        gathered: list[StepOutput] = []
        since = time.monotonic()
        while self._engine.has_work:
            gathered += self._engine.step()
            now = time.monotonic()
            if gathered and now - since >= every_s:
                yield gathered
                gathered, since = [], now
        if self._ranks is not None:
            self._ranks.occupied(False)
        if gathered:
            yield gathered

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer."""
        assert self._engine.tokenizer is not None
        return self._engine.tokenizer

    def add(self, request_id: str, ids: Sequence[int], params: SamplingParams, references: Sequence[Sequence[int]] = ()) -> None:
        """Add a prompt of token ids. Raises ``RequestError`` if it is refused."""
        if not len(ids):
            raise RequestError("prompt", "it holds no token")
        self._engine.add(Request(request_id, ids, params, references, tenant=TENANT))

    def abort(self, request_id: str) -> None:
        """Abort a request; does nothing if it has finished."""
        self._engine.abort(request_id)

    def group_counts(self) -> GroupCounts | None:
        """Return the ranks' summary; None without ranks."""
        if self._ranks is None:
            return None
        state, times = self._ranks.state(), self._ranks.times()
        assert state is not None
        wall_s = sum(max(step.rank_s) + step.exchange_s for step in times)
        return GroupCounts(
            mean_width=round(sum(len(step.rank_s) for step in times) / len(times), 4) if times else float(len(state.ready)),
            exchange_share=round(sum(step.exchange_s for step in times) / wall_s, 4) if wall_s else 0.0,
            losses=state.losses,
            divergences=state.divergences,
        )

    def close(self) -> None:
        """Stop the ranks, if any."""
        if self._ranks is not None:
            self._ranks.close()

    def _add(self, prompt: OfflinePrompt, params: SamplingParams, chat: bool) -> int | str:
        tokenizer = self.tokenizer
        try:
            if chat:
                ids = render_chat(tokenizer, prompt.messages or [{"role": "user", "content": prompt.text}])
            else:
                ids = tokenizer(prompt.text)["input_ids"]
            references = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompt.references]
            self.add(prompt.request_id, ids, params, references)
        except RequestError as error:
            return str(error)
        return len(ids)
