"""Logits processors: grammar, allowed tokens, bad words, logit bias, ``min_tokens`` and penalties, before a token is chosen.

Rules and order are vLLM's: grammar, allowed tokens, logit bias, minimum length, repetition penalty (CTRL, arXiv 1909.05858,
section 4.1, but negative logits are multiplied), frequency and presence penalty (OpenAI's API reference), bad words. Each row of
a draft tree is processed with its own prefix: the committed tokens and the path to the row.

Departures from vLLM: ``min_tokens`` bars the tokens that would end this request (vLLM also bars the model's own end tokens under
``ignore_eos``) and does not delay stop strings. It is ignored if a grammar or the allowed tokens leave nothing but the end. The
last token of a bad word is chosen only if a grammar, or the allowed tokens, leave nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.decoding.arrays import BoolArray, Int32Array, Int64Array
from outrider.decoding.request import SamplingParams
from outrider.decoding.verify.grammar import Grammar

# Logit of tokens that a grammar forbids. No bias or penalty outweighs it, no temperature makes it overflow float32, and its
# probability is 0. It is finite because ``decoding.sampling.row_draw`` draws from rows of finite numbers in one compiled call.
FORBIDDEN = -1e30
UNWANTED = -1e20  # of the last token of a bad word: above ``FORBIDDEN`` after any penalty, below every other logit
_MANY = 8  # from 1 in 8 tokens of the vocabulary on, dense operations are faster than indexing


class TokenCounts:
    """Distinct tokens of a sequence, with their counts in its output; ``prompt_ids`` are tokens outside the output."""

    __slots__ = ("_counts", "_ids", "_index", "_output", "_prompt_size", "_size")

    def __init__(self, prompt_ids: Sequence[int] | Int32Array) -> None:
        distinct = np.unique(np.asarray(prompt_ids, np.int64))
        self._prompt_size = self._size = len(distinct)
        self._ids = np.zeros(self._size + 64, np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), np.int64)
        self._index: dict[int, int] = {token: at for at, token in enumerate(distinct.tolist())}
        self._output: list[int] = []

    @property
    def ids(self) -> Int64Array:
        """Return the distinct tokens, those of the prompt first; a view, [d] int64."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Int64Array:
        """Return the count in the output of each of ``ids``; a view, [d] int64."""
        return self._counts[: self._size]

    @property
    def output(self) -> Sequence[int]:
        """Return the tokens of the output."""
        return self._output

    def push(self, token: int) -> None:
        """Append a token to the output."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self._size
            if at == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[at] = token
            self._size += 1
        self._counts[at] += 1
        self._output.append(token)

    def truncate(self, length: int) -> None:
        """Remove tokens from the end of the output until its length is at most ``length``."""
        while len(self._output) > length:
            at = self._index[self._output.pop()]
            self._counts[at] -= 1
            if self._counts[at] == 0 and at >= self._prompt_size:
                # Distinct tokens are in the order of their first occurrence, so the one that is gone is the last.
                assert at == self._size - 1, (at, self._size)
                del self._index[int(self._ids[at])]
                self._size -= 1

    def catch_up(self, output_ids: Int32Array) -> None:
        """Make the output equal to ``output_ids``; one of the two must be a prefix of the other."""
        self.truncate(len(output_ids))
        for token in output_ids[len(self._output) :].tolist():
            self.push(token)


class LogitRules:
    """Logits processors of one request, with the token counts and the grammar state that they depend on."""

    __slots__ = ("_allowed", "_barred", "_bias", "_params", "counts", "grammar")

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] | Int32Array, grammar: Grammar | None = None) -> None:
        self._params, self.grammar = params, grammar
        # Only the repetition penalty depends on the prompt.
        self.counts = TokenCounts(prompt_ids if params.repetition_penalty != 1.0 else ())
        # Built at the first row and reused: (token ids, None for a dense bias; biases), and (barred tokens, their ids or mask).
        self._bias: tuple[torch.Tensor | None, torch.Tensor] | None = None
        self._barred: tuple[Collection[int], torch.Tensor] | None = None
        self._allowed: BoolArray | None = None  # [vocab] mask of ``allowed_token_ids``

    def push(self, token: int) -> None:
        """Append a token to the output."""
        self.counts.push(token)
        if self.grammar is not None:
            self.grammar.push(token)

    def truncate(self, length: int) -> None:
        """Remove tokens from the end of the output until its length is at most ``length``."""
        self.counts.truncate(length)
        if self.grammar is not None:
            self.grammar.truncate(length)

    def catch_up(self, output_ids: Int32Array) -> None:
        """Make the output equal to ``output_ids``; one of the two must be a prefix of the other."""
        self.counts.catch_up(output_ids)
        if self.grammar is not None:
            self.grammar.catch_up(output_ids)

    def apply(self, logits: torch.Tensor, barred: Collection[int] = (), constrained: bool = True) -> torch.Tensor:
        """Return the logits after the rules, or ``logits`` itself if nothing changes it.

        Args:
            logits: [vocab] floating point; not modified.
            barred: tokens excluded by ``min_tokens``. Pass the same object in each call: its tensor is cached.
            constrained: whether the grammar is applied.

        Returns:
            [vocab] float32, or float64 if the logits are; -inf for barred tokens, about ``FORBIDDEN`` for forbidden ones.
        """
        params = self._params
        forced = None if params.thinking is None else params.thinking.forced(self.counts.output)
        if forced is not None:
            return torch.full_like(logits, FORBIDDEN, dtype=torch.promote_types(logits.dtype, torch.float32)).index_fill_(
                0, torch.tensor([forced], device=logits.device), 0.0
            )
        changes = params.penalized or params.logit_bias or params.allowed_token_ids or params.bad_words
        if not constrained and not barred and not changes:
            return logits
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        allowed = self._own_tokens(len(scores)) if params.allowed_token_ids else None
        if constrained and self.grammar is not None:
            allowed = self.grammar.allowed()
        if allowed is not None:
            forbidden = torch.from_numpy(~allowed).to(scores.device)
            scores[: len(forbidden)].masked_fill_(forbidden, FORBIDDEN)
        if params.logit_bias:
            self._add_bias(scores)
        if barred:
            at = self._places(barred, scores)
            if allowed is None or not _holds_all(at, allowed):  # otherwise no token would be left
                scores[at] = -torch.inf
        if params.penalized and len(self.counts.ids):
            self._penalize(scores)
        if ends := self._ends_of_bad_words():
            at = torch.tensor(ends, device=scores.device)
            scores[at] = scores[at].clamp(max=UNWANTED)
        return scores

    def _own_tokens(self, size: int) -> BoolArray:
        if self._allowed is None:
            self._allowed = np.zeros(size, np.bool_)
            self._allowed[list(self._params.allowed_token_ids)] = True
        return self._allowed

    def _ends_of_bad_words(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        output, words = self.counts.output, self._params.bad_words
        return [word[-1] for word in words if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]]

    def _add_bias(self, scores: torch.Tensor) -> None:
        if self._bias is None:
            ids, biases = zip(*self._params.logit_bias, strict=True)
            at, values = torch.tensor(ids, device=scores.device), torch.tensor(biases, dtype=torch.float64).to(scores)
            if _MANY * len(ids) < len(scores):
                self._bias = at, values
            else:
                self._bias = None, torch.zeros_like(scores).index_copy_(0, at, values)
        places, values = self._bias
        if places is None:
            scores += values
        else:
            scores[places] += values

    def _places(self, barred: Collection[int], scores: torch.Tensor) -> torch.Tensor:
        """Return the barred tokens within the vocabulary, [n] ids or, if they are many, a [vocab] mask."""
        if self._barred is None or barred is not self._barred[0]:
            at = torch.tensor([token for token in barred if token < len(scores)], dtype=torch.int64, device=scores.device)
            if _MANY * len(at) >= len(scores):
                at = torch.zeros(len(scores), dtype=torch.bool, device=scores.device).index_fill_(0, at, True)
            self._barred = barred, at
        return self._barred[1]

    def _penalize(self, scores: torch.Tensor) -> None:
        ids = self.counts.ids
        if scores.device.type == "cpu":
            values = scores.numpy()  # shares memory with the tensor
            values[ids] = self._penalized(values[ids])
        else:
            at = torch.from_numpy(ids).to(scores.device)
            scores[at] = torch.from_numpy(self._penalized(scores[at].cpu().numpy())).to(scores.device)

    def _penalized(self, seen: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Return the scores of ``counts.ids`` after the penalties, in their dtype; ``seen`` may be modified in place."""
        params, counts = self._params, self.counts.counts
        if params.repetition_penalty != 1.0:
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if params.frequency_penalty != 0.0:
            seen -= params.frequency_penalty * counts.astype(seen.dtype)
        if params.presence_penalty != 0.0:
            seen -= np.float32(params.presence_penalty) * (counts > 0)
        return seen


def _holds_all(places: torch.Tensor, allowed: BoolArray) -> bool:
    """Return whether ``places``, [n] token ids or a [vocab] mask, include all tokens of the [vocab] mask ``allowed``."""
    return bool(allowed.sum() == allowed[places.cpu().numpy()].sum())
