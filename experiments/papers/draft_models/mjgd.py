"""Multi-token joint greedy decoding: several tokens at a time, the likeliest together. A reference of quality, not of speed."""

from __future__ import annotations

import time
from collections.abc import Collection

from decoding.drafters.with_model.beam import beam_search
from decoding.request import Request
from engine.forward.runner import ModelRunner
from engine.loading.draft_model import LocalDraftModel
from engine.loading.model import LoadedModel
from experiments.bench.engines.contestants import Run

_SLOT = 0


def over_target(loaded: LoadedModel, block: int, beams: int, step_tokens: int) -> LocalDraftModel:
    """The target itself as the model of a beam search, with a slot of its own.

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
    """Runs a request to its end, ``block`` tokens at a time (MJGD, arXiv 2407.09722, section 3.1).

    Of each block the likeliest ``x_1 ... x_block`` together is wanted; beam search finds one that is as likely or nearly so. With
    a block of 1 it is greedy decoding, whatever the beams. An end token within a block ends the output there.

    Example: 5 has probability 0.6 and 6 has 0.4; then 7 has 0.5 after 5, and 8 has 0.9 after 6. Greedy says 5 7 (0.30), blocks of
    two say 6 8 (0.36).

    Args:
        model: see ``over_target``.
        request: new, without a slot; its sampling parameters but ``max_tokens`` are not looked at.
        block: tokens of a search, at least 1.
        beams: of a search, at least 1.
        end_tokens: after which nothing is said.

    Returns:
        What was said. A forward is a step, and has rows of all beams.
    """
    assert block >= 1 and beams >= 1, (block, beams)
    request.slot = _SLOT
    began, first_s, steps = time.perf_counter(), 0.0, 0
    while request.remaining and (not request.num_output or request.output_ids[-1] not in end_tokens):
        while not model.catch_up([request])[0]:
            assert request.num_tokens < model.max_model_len, (request.num_tokens, model.max_model_len)
        depth = min(block, request.remaining, model.max_model_len - request.num_tokens)
        found = list(beam_search(model, [request], [depth], beams)[0].tokens)
        ends = [at for at, token in enumerate(found) if token in end_tokens]
        request.commit(found[: ends[0] + 1] if ends else found)
        steps += depth
        if not first_s:
            first_s = time.perf_counter() - began
    request.slot = None
    return Run([request.output_ids.tolist()], steps, first_s, time.perf_counter() - began - first_s, 0.0, 0)
