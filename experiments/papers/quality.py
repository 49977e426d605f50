"""Perplexity of outputs under the target, and multi-token joint greedy decoding, a reference of quality."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.decoding.drafters.with_model.beam import beam_search
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree
from outrider.engine.forward.batch import DummySequence, ScheduledDummy, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.draft_model import LocalDraftModel
from outrider.engine.loading.model import LoadedModel
from outrider.experiments.bench.engines.contestants import Run

CHUNK = 256  # rows of a forward: their logits take CHUNK * vocab floats
_SLOT = 0


def output_nats(
    runner: ModelRunner, prompt_ids: Sequence[int], output_ids: Sequence[int], chunk: int = CHUNK
) -> npt.NDArray[np.float64]:
    """Return ``-log p`` of each output token, teacher-forced; p is the softmax of the raw logits, in float32 at least.

    The contents of the runner's first slot are overwritten.

    Args:
        runner: of the target, without requests in its slots.
        prompt_ids: at least one.
        output_ids: [n].
        chunk: rows of a forward.

    Returns:
        [n] nats.

    Raises:
        ValueError: the prompt is empty, or the sequence is longer than a slot.
    """
    if not len(prompt_ids):
        raise ValueError("prompt must hold at least one token")
    tokens = np.array([*prompt_ids, *output_ids], np.int32)
    if len(tokens) > runner.cache.capacity:
        raise ValueError(f"prompt and output have {len(tokens)} tokens, a slot of the model holds {runner.cache.capacity}")
    if not len(output_ids):
        return np.empty(0)
    runner.cache.prefixes.cut(0, 0)
    first = len(prompt_ids) - 1  # the row after which the output begins
    for start in range(0, first, chunk):
        end = min(start + chunk, first)
        runner.forward(pack([ScheduledDummy(DummySequence(0, tokens[:end]), start, end, None)]))
    nats = []
    for start in range(first, len(tokens) - 1, chunk):
        end = min(start + chunk, len(tokens) - 1)
        tree = DraftTree.chain(int(tokens[start]), tokens[start + 1 : end])
        logits = runner.forward(pack([ScheduledDummy(DummySequence(0, tokens[: start + 1]), start, start + 1, tree)]))
        expected = torch.from_numpy(tokens[start + 1 : end + 1].astype(np.int64)).to(logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats.append(torch.nn.functional.cross_entropy(logits, expected, reduction="none").double().cpu().numpy())
    return np.concatenate(nats)


def until_end(output_ids: Sequence[int], end_tokens: Collection[int]) -> list[int]:
    """Return an output up to its first end token, inclusive."""
    for at, token in enumerate(output_ids):
        if token in end_tokens:
            return list(output_ids[: at + 1])
    return list(output_ids)


def over_target(loaded: LoadedModel, block: int, beams: int, step_tokens: int) -> LocalDraftModel:
    """Return the target as the model of a beam search, with its own slot.

    Args:
        loaded: the target.
        block: tokens of a search.
        beams: of a search.
        step_tokens: rows of one forward of a prefill.
    """
    runner = ModelRunner(loaded.model, 1, loaded.max_model_len + beams * block)
    vocab_size = int(loaded.model.config.get_text_config().vocab_size)
    return LocalDraftModel(runner, vocab_size, loaded.max_model_len, step_tokens)


def joint_greedy(model: LocalDraftModel, request: Request, block: int, beams: int, end_tokens: Collection[int]) -> Run:
    """Run a request to its end, ``block`` tokens at a time (MJGD, arXiv 2407.09722, section 3.1).

    Beam search approximates the block with the highest joint probability. A block of 1 is greedy decoding. An end token within a
    block ends the output.

    Example: 5 has probability 0.6 and 6 has 0.4; then 7 has 0.5 after 5, and 8 has 0.9 after 6. Greedy decoding emits 5 7 (0.30),
    blocks of two 6 8 (0.36).

    Args:
        model: see ``over_target``.
        request: new, without a slot; of its sampling parameters only ``max_tokens`` is used.
        block: tokens of a search, at least 1.
        beams: of a search, at least 1.
        end_tokens: end the output.
    """
    assert block >= 1 and beams >= 1, (block, beams)
    request.slot = _SLOT
    began, first_s, steps = time.perf_counter(), 0.0, 0
    while request.remaining and (not request.num_output or request.output_ids[-1] not in end_tokens):
        while not model.catch_up([request])[0]:
            assert request.num_tokens < model.max_model_len, (request.num_tokens, model.max_model_len)
        depth = min(block, request.remaining, model.max_model_len - request.num_tokens)
        request.commit(until_end(list(beam_search(model, [request], [depth], beams)[0].tokens), end_tokens))
        steps += depth
        if not first_s:
            first_s = time.perf_counter() - began
    request.slot = None
    return Run([request.output_ids.tolist()], steps, first_s, time.perf_counter() - began - first_s, 0.0, 0)
