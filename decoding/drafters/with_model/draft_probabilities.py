"""A draft model's distributions under the request's own bias, penalties and warps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from outrider.decoding.arrays import Float64Array
from outrider.decoding.request import Request
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.sampling.philox import raw_stream
from outrider.decoding.sampling.probabilities import DRAFT, pick, uniform
from outrider.decoding.sampling.sampler import choose, gumbel
from outrider.decoding.verify.target_probabilities import request_distribution


class DraftDistributions:
    """Draft model logits after the rules of the request, at the prefix that they belong to."""

    def __init__(self, end_token_ids: Collection[int] = ()) -> None:
        self._own_ends = tuple(end_token_ids)
        self._rules: dict[str, LogitRules] = {}
        self._ends: dict[str, frozenset[int]] = {}

    def tracked_requests(self) -> Collection[str]:
        """Return the ids of requests with state."""
        return self._rules.keys() | self._ends.keys()

    def forget(self, request: Request) -> None:
        """Drop the state of a request."""
        self._rules.pop(request.request_id, None)
        self._ends.pop(request.request_id, None)

    def ends(self, request: Request) -> frozenset[int]:
        """Return the tokens that end a request."""
        ends = self._ends.get(request.request_id)
        if ends is None:
            own = () if request.params.ignore_eos else self._own_ends
            ends = self._ends[request.request_id] = frozenset((*own, *request.params.stop_token_ids))
        return ends

    def altered(self, request: Request, chain: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return [vocab] logits at the end of a chain of drafted tokens, after grammar, bias, minimum length and penalties."""
        params = request.params
        if not params.alters_logits:
            return logits
        rules = self._rules.get(request.request_id)
        if rules is None:
            rules = self._rules[request.request_id] = LogitRules(params, request.prompt_ids, request.grammar)
        if params.penalized or request.grammar is not None:
            rules.catch_up(request.output_ids)
            for token in chain:
                rules.push(token)
        barred = self.ends(request) if request.num_output + len(chain) < params.min_tokens else ()
        scores = rules.apply(logits, barred)
        rules.truncate(request.num_output)  # the chain may be rejected
        return scores

    def choose(self, request: Request, chain: Sequence[int], logits: torch.Tensor) -> int:
        """Return the token that the target would choose from these logits: by the same function with the same noise."""
        return choose(self.altered(request, chain, logits), request.params, request.num_tokens + len(chain))

    def warped(self, request: Request, chain: Sequence[int], logits: torch.Tensor) -> Float64Array:
        """Return [vocab] probabilities after rules, temperature, min-p, top-k and top-p; for a greedy request 1 at its token."""
        return request_distribution(self.altered(request, chain, logits), request.params)

    def draw(self, request: Request, chain: Sequence[int], logits: torch.Tensor, sequence: int = 0) -> tuple[int, Float64Array]:
        """Draw a token after a chain; return it and its [vocab] distribution. Each ``sequence`` has its own random stream."""
        probs = self.warped(request, chain, logits)
        return self.pick(request, len(chain), probs, sequence), probs

    def pick(self, request: Request, depth: int, probs: Float64Array, sequence: int = 0) -> int:
        """Draw a token from ``probs``, at ``depth`` drafted tokens after the request's own; see ``draw``."""
        return pick(probs, uniform(request.params.seed, request.num_tokens + depth, DRAFT + sequence))

    def noise(self, request: Request, depth: int, count: int) -> torch.Tensor:
        """Return [count] float64 standard Gumbel noise for draws at ``depth`` drafted tokens after the request's own."""
        return torch.from_numpy(gumbel(raw_stream(request.params.seed, request.num_tokens + depth, count, DRAFT)))
