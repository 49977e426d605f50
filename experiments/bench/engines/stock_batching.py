"""Continuous batching of transformers, on a CPU too.

On a CPU it runs with ``attn_implementation="sdpa"``, without CUDA graphs, and needs ``num_blocks`` and ``max_batch_tokens``,
since it would size its cache by the free memory otherwise. Its manager takes requests while others run, as this engine does.
"""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from outrider.configs.slices import EngineOptions
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.traffic import Progress, ServerCounts

_PAGE = 256  # tokens of a cache page, transformers' default
_STOP_S = 30.0  # timeout of its thread to end


class StockBatching:
    """Server of a load: an unmodified model behind transformers' continuous batching, greedy, without prefix sharing."""

    name = "generate_batch"

    def __init__(
        self, model: PreTrainedModel, max_tokens: int, end_tokens: tuple[int, ...], max_running: int, context: int
    ) -> None:
        """Serve a model with "sdpa" attention, at most ``max_running`` requests per step, each of ``context`` tokens at most."""
        self._model = model
        self._generation = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(end_tokens) or -1,
            pad_token_id=end_tokens[0] if end_tokens else 0,
        )
        self._batching = {
            "num_blocks": max_running * (-(-context // _PAGE) + 1),
            "max_batch_tokens": EngineOptions().max_step_tokens,
            "max_requests_per_batch": max_running,
            "allow_block_sharing": False,
            "use_cuda_graph": None if model.device.type == "cuda" else False,
        }
        self._manager: ContinuousBatchingManager | None = None

    def begin(self) -> None:
        """Start a new manager with an empty cache."""
        assert self._manager is None, "begun before"
        batching = ContinuousBatchingConfig(**self._batching)
        manager: ContinuousBatchingManager = self._model.init_continuous_batching(self._generation, batching)
        manager.warmup()  # allocate its memory before the first request
        manager.start()
        self._manager = manager

    def submit(self, prompt: Prompt) -> None:
        """Send a request."""
        assert self._manager is not None, "not begun"
        self._manager.add_request(prompt.ids, request_id=prompt.id, record_timestamps=True)

    def poll(self, wait_s: float) -> list[Progress]:
        """Return the tokens of a request that has ended, with the time of each.

        Raises:
            RuntimeError: transformers failed.
        """
        assert self._manager is not None, "not begun"
        result = self._manager.get_result(timeout=wait_s)
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching ended by itself: its log says why")
            return []
        if result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed at {result.request_id}: {result.error}")
        last = len(result.generated_tokens) - 1
        moments = zip(result.generated_tokens, result.timestamps or (), strict=True)
        return [Progress(result.request_id, at, (token,), 0, place == last) for place, (token, at) in enumerate(moments)]

    def end(self) -> ServerCounts:
        """Stop the manager."""
        if self._manager is not None:
            self._manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
            self._manager.destroy()
            self._manager = None
        return ServerCounts()
