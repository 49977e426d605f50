"""Acceptance rates of drafted rows by their features, learned while serving from a prior."""

from __future__ import annotations

from functools import cache

import numpy as np

from outrider.decoding.arrays import Float32Array, Float64Array, Int32Array
from outrider.decoding.budget.features import (
    ALONE,
    COPY,
    COPY_FRESH,
    HISTORY,
    HISTORY_FRESH,
    KIND_FEATURES,
    LEVELS,
    LIKELY,
    MATCH_BUCKETS,
    NUM_FEATURES,
    NUM_KINDS,
    RECYCLING,
    SHARE_BUCKETS,
    SIMILAR,
    SIMILAR_FRESH,
    UNIGRAM,
    UNRANKED,
)
from outrider.decoding.jit import compiled

# Priors, rounded from replays of retrieval, summary, code and chat texts. Counts replace them after the first steps.
_SHARE = np.array([0.015, 0.06, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0])  # by share bucket
_MATCH = np.array([0.5, 0.65, 0.8, 0.83, 0.85, 0.87, 0.88, 0.89, 0.9, 0.93, 0.97, 0.99])  # by match bucket
_HISTORY_MATCH = np.array([0.1, 0.35, 0.5, 0.82, 0.85, 0.87, 0.88, 0.89, 0.9, 0.93, 0.95, 0.97])
_SIMILAR_MATCH = np.array([0.0, 0.0, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])  # a long agreement is a copy
_CONTEXT = np.array([1.0, 0.45, 0.22, 0.15, 0.12, 0.1, 0.08, 0.06])  # by context bucket, for ranked tokens
_UNIGRAM = 0.04 / (1.0 + 0.5 * np.arange(MATCH_BUCKETS))  # by rank, two ranks per bucket
_RECYCLING = np.array([0.97, 0.93, 0.85, 0.72, 0.57, 0.42, 0.17, 0.07, 0.03, 0.012, 0.01, 0.005])  # by likelihood bucket
_DISTANCE = np.array([1.0, 1.0, 0.95, 0.82, 0.68, 0.42, 0.2, 0.0])  # by distance bucket; the last (unknown) is set below
_UNKNOWN_DISTANCE = np.array([0.35, 0.55, 0.65])  # unknown distance, by number of common context tokens
_RECYCLING_CONTEXT = np.array([0.65, 0.6, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1])  # by context bucket: ranked after a token alone
_UNRANKED = 0.5  # factor on the chance of an occurrence that the target did not rank
_LIKELY, _HISTORY_LIKELY = 0.35, 0.15  # fraction of (1 - chance) added if the target finds it likely
_PRIOR_WEIGHT = 4.0  # weight of the prior in observations
_HALVE_AT = 4096.0  # observations of one feature at which its counts are halved
_MAX_TENANTS = 1024

# A kind is set aside if at least _TRIAL accepted rows were expected and less than the share _LEAST_SHARE of them was accepted.
_TRIAL, _LEAST_SHARE = 16.0, 0.05
_FIRST_BACKOFF, _LONGEST_BACKOFF = 256, 8192  # steps


def prior() -> Float64Array:
    """Return the prior: [NUM_FEATURES] chance of a child given that its parent is accepted."""
    table = np.empty((NUM_KINDS, MATCH_BUCKETS, SHARE_BUCKETS, LEVELS))
    table[[COPY, COPY_FRESH]] = _leveled(_MATCH[:, None] * _SHARE)
    table[[HISTORY, HISTORY_FRESH]] = _leveled(_HISTORY_MATCH[:, None] * _SHARE, _HISTORY_LIKELY)
    table[[SIMILAR, SIMILAR_FRESH]] = _leveled(_MATCH[:, None] * np.maximum(_SHARE, _SIMILAR_MATCH[:, None] * (_SHARE > 0.2)))
    table[UNIGRAM] = (_UNIGRAM[:, None] * _CONTEXT)[:, :, None]
    table[RECYCLING] = (_RECYCLING[:, None] * _DISTANCE)[:, :, None]
    table[RECYCLING, :, -1, ALONE + 1 :] = _RECYCLING[:, None] * _UNKNOWN_DISTANCE
    table[RECYCLING, :, :, ALONE] = _RECYCLING[:, None] * _RECYCLING_CONTEXT
    return table.ravel()


@cache
def _prior() -> Float64Array:
    return prior()


def _leveled(chances: Float64Array, likely: float = _LIKELY) -> Float64Array:
    """Return [match, share, level] chances of occurrences, adjusted by whether the target ranked the token."""
    leveled = np.repeat(chances[:, :, None], LEVELS, axis=2)
    leveled[:, :, UNRANKED] *= _UNRANKED
    leveled[:, :, LIKELY] += (1.0 - chances) * likely
    return leveled


@compiled
def learn(
    parents: Int32Array, features: Int32Array, reached: Int32Array, prior: Float64Array, seen: Float32Array,
    accepted: Float32Array, chances: Float64Array, expected: Float64Array, hits: Float64Array,
) -> float:  # fmt: skip
    """Count the children of reached rows as accepted or rejected, and return the highest entry of ``expected``.

    Updates in place: [NUM_FEATURES] ``seen``, ``accepted`` and ``chances``; [NUM_KINDS] ``expected`` (accepted rows that the
    prior expects) and ``hits`` (rows accepted). ``reached`` are the root and the accepted rows, in order of depth.
    """
    for row in range(1, len(parents)):
        below = hit = False
        for at in range(len(reached)):
            below = below or parents[row] == reached[at]
            hit = hit or row == reached[at]
        if not below:
            continue
        entry, count = features[row], 1.0 if hit else 0.0
        expected[entry // KIND_FEATURES] += prior[entry]
        hits[entry // KIND_FEATURES] += count
        seen[entry] += 1.0
        accepted[entry] += count
        if seen[entry] > _HALVE_AT:
            seen[entry] *= 0.5
            accepted[entry] *= 0.5
        chances[entry] = (accepted[entry] + _PRIOR_WEIGHT * prior[entry]) / (seen[entry] + _PRIOR_WEIGHT)
    return float(expected.max())


class AcceptanceTable:
    """Beta means of acceptance given the parent's, per feature of ``decoding.budget.features``, in 55 KB.

    A kind of feature whose rows keep failing (for example a poisoned history) is set aside for a number of steps.
    """

    def __init__(self) -> None:
        self._prior = _prior()
        self._seen, self._accepted = np.zeros(NUM_FEATURES, np.float32), np.zeros(NUM_FEATURES, np.float32)
        self._chances = self._prior.copy()
        self._expected, self._hits = np.zeros(NUM_KINDS), np.zeros(NUM_KINDS)
        self._backoffs = np.full(NUM_KINDS, _FIRST_BACKOFF)  # steps of the next backoff, by kind
        self._backed_off = np.zeros(NUM_KINDS, np.int64)  # remaining steps
        self.disabled_sources: tuple[int, ...] = ()  # kinds that are not drafted from now

    def chances(self) -> Float64Array:
        """Return [NUM_FEATURES] chances of a child given its parent; 0 for kinds set aside. Valid until the next ``observe``."""
        # Written at each call, because another request of the tenant may have observed a tree with such rows since.
        for kind in self.disabled_sources:
            self._chances[kind * KIND_FEATURES : (kind + 1) * KIND_FEATURES] = 0.0
        return self._chances

    def observe(self, parents: Int32Array, features: Int32Array, accepted_rows: tuple[int, ...]) -> None:
        """Count a verified tree: [n] parent and feature of each row, and the accepted rows in order of depth."""
        if self.disabled_sources:
            self._pass_step()
        if len(parents) == 1:
            return
        most = learn(
            parents, features, np.array((0, *accepted_rows), np.int32), self._prior, self._seen, self._accepted, self._chances,
            self._expected, self._hits,
        )  # fmt: skip
        if most > _TRIAL:
            self._verdict()

    def compile(self) -> None:
        """Run the compiled code once. Do not use the table afterwards."""
        self.observe(np.array([-1, 0], np.int32), np.zeros(2, np.int32), (1,))

    def _verdict(self) -> None:
        for kind in np.flatnonzero(self._expected > _TRIAL).tolist():
            if self._hits[kind] < _LEAST_SHARE * self._expected[kind]:
                # A kind that fails again after its restart from the prior is set aside for twice as long.
                self._backed_off[kind] = self._backoffs[kind]
                self._backoffs[kind] = min(2 * self._backoffs[kind], _LONGEST_BACKOFF)
            else:
                self._backoffs[kind] = _FIRST_BACKOFF
            self._expected[kind] = self._hits[kind] = 0.0
        self._look()

    def _pass_step(self) -> None:
        """Advance the backoffs by one step, and reset kinds whose backoff ends to the prior."""
        over = self._backed_off == 1
        self._backed_off = np.maximum(self._backed_off - 1, 0)
        if over.any():
            forgotten = np.repeat(over, KIND_FEATURES)
            self._seen[forgotten] = self._accepted[forgotten] = 0.0
            self._chances[forgotten] = self._prior[forgotten]
            self._look()

    def _look(self) -> None:
        self.disabled_sources = tuple(np.flatnonzero(self._backed_off).tolist())


class AcceptanceTables:
    """One table per tenant, and one per request without a tenant, so that no tenant's drafts depend on another's texts."""

    def __init__(self) -> None:
        self._tenants: dict[str, AcceptanceTable] = {}

    def of(self, tenant: str | None) -> AcceptanceTable:
        """Return the tenant's table, or a new one without a tenant. The tables of the last ``_MAX_TENANTS`` tenants are kept."""
        if tenant is None:
            return AcceptanceTable()
        table = self._tenants.pop(tenant, None) or AcceptanceTable()
        # Reinserted at the end: the first tenant is the one not asked for the longest.
        self._tenants[tenant] = table
        if len(self._tenants) > _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return table
