"""Beam search with a draft model: the likeliest continuations of several tokens, by joint probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.decoding.drafters.base import DraftModel
from outrider.decoding.request import Request
from outrider.decoding.tree import tree_of

# (request, n chains behind it, [n, vocab] logits after them) -> [n, vocab] log-probabilities by which beams are scored.
Score = Callable[[Request, Sequence[Sequence[int]], torch.Tensor], torch.Tensor]
Noise = Callable[[Request, int, int], torch.Tensor]  # (request, level, n) -> [n] standard Gumbel noise


@dataclass(frozen=True, slots=True)
class Beam:
    """Continuation with the conditional log-probability of each of its tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float = 0.0  # their sum


def raw_score(request: Request, chains: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of the logits, regardless of the request's rules."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def beam_search(
    model: DraftModel,
    requests: Sequence[Request],
    depths: Sequence[int],
    beams: int,
    score: Score = raw_score,
    source: int = 0,
    noise: Noise | None = None,
) -> list[Beam]:
    """Return the best continuation of each request, with one forward per level for all of them.

    Used for multi-token joint speculative decoding (arXiv 2407.09722, section 4). The search starts with one beam, so that all
    beams differ; there is no length penalty, since all have the same length; end tokens are treated like other tokens.

    Example: after the request, 5 has probability 0.6 and 6 has 0.4; then 7 has 0.5 after 5, and 8 has 0.9 after 6. With one beam
    5 7 is found (0.3), with two 6 8 (0.36): greedy is not the likeliest.

    Args:
        depths: tokens per continuation, at least 1.
        beams: number of beams kept at each level.
        score: scores of continuations; -inf excludes a token. A beam without any allowed continuation ends.
        source: source index of the computed rows.
        noise: if given, the beams of a level are drawn without replacement from the softmax of all continuations' scores
            (``num_beams`` and ``do_sample`` of ``transformers``), as the ``beams`` largest noisy scores.
    """
    alive = [[Beam((), ())] for _ in requests]
    for level in range(max(depths)):
        # Beams that could not be extended at an earlier level have ended.
        active = [at for at, depth in enumerate(depths) if level < depth and len(alive[at][0].tokens) == level]
        if not active:
            break
        active_requests = [requests[at] for at in active]
        trees = [
            tree_of(request.root, ((beam.tokens, source) for beam in alive[at]), beams * level)
            for at, request in zip(active, active_requests, strict=True)
        ]
        for at, tree, logits in zip(active, trees, model.tree_logits(active_requests, trees), strict=True):
            leaves = [_row_of(tree.tokens.tolist(), tree.parents.tolist(), beam.tokens) for beam in alive[at]]
            logprobs = score(requests[at], [beam.tokens for beam in alive[at]], logits[torch.tensor(leaves).to(logits.device)])
            added = None if noise is None else noise(requests[at], level, logprobs.numel()).to(logprobs)
            alive[at] = _extended(alive[at], logprobs, beams, added) or alive[at]
    return [beams_of[0] for beams_of in alive]


def _extended(alive: Sequence[Beam], logprobs: torch.Tensor, count: int, noise: torch.Tensor | None = None) -> list[Beam]:
    """Return the best one-token extensions, best first, ties in order of the beams; [beams * vocab] ``noise`` makes it a draw."""
    scores = logprobs + torch.tensor([beam.score for beam in alive], dtype=logprobs.dtype).to(logprobs.device)[:, None]
    best = torch.topk(scores.flatten() if noise is None else scores.flatten() + noise, min(count, scores.numel()))
    owns = logprobs.flatten()[best.indices].tolist()
    found = []
    for value, own, at in zip(best.values.tolist(), owns, best.indices.tolist(), strict=True):
        if value > float("-inf"):
            beam, token = alive[at // logprobs.shape[1]], at % logprobs.shape[1]
            found.append(Beam((*beam.tokens, token), (*beam.logprobs, own), beam.score + own))
    # Noise decides which beams are drawn; their order is by their own scores.
    return found if noise is None else sorted(found, key=lambda beam: -beam.score)


def _row_of(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> int:
    """Return the row at the end of a path from the root, in a tree without duplicate branches."""
    row = 0
    for token in path:
        row = next(at for at in range(row + 1, len(tokens)) if parents[at] == row and tokens[at] == token)
    return row
