"""Drives a drafter with known texts and times what it does: insertion and proposals."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from decoding.drafters.base import Drafter
from decoding.request import Request, SamplingParams
from decoding.tree import Int32Array

LIVE = 16  # requests that take turns
CHUNK = 500_000  # tokens of one measurement of insertion

Times = list[tuple[int, int]]  # nanoseconds, rows below the root


@contextmanager
def quiet() -> Iterator[None]:
    """On one core where that can be asked for, without garbage collections."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if cores:
            os.sched_setaffinity(0, cores)


def request_for(name: str, prompt: Sequence[int] | Int32Array, output: Int32Array) -> Request:
    """A request that has room for an output, and some more, so that drafts are not cut at its end."""
    return Request(name, prompt, SamplingParams(max_tokens=len(output) + 64), tenant="local")


def insert_whole(drafter: Drafter, texts: Sequence[Int32Array]) -> list[float]:
    """Outputs written at once when their requests end; tokens/s of each chunk."""
    rates = []
    ends = np.cumsum([len(text) for text in texts])
    chunks = np.split(np.arange(len(texts)), np.searchsorted(ends, np.arange(CHUNK, ends[-1], CHUNK)))
    for chunk in chunks:
        requests = [request_for(f"whole {number}", [0], texts[number]) for number in chunk]
        for request, number in zip(requests, chunk, strict=True):
            request.commit(texts[number].tolist())
        start = time.perf_counter()
        for request in requests:
            drafter.propose([request], [0])
            drafter.finish(request)
        rates.append(sum(request.num_output for request in requests) / (time.perf_counter() - start))
    return rates


def insert_streamed(drafter: Drafter, texts: Sequence[Int32Array], piece: int) -> list[float]:
    """Outputs written as they are emitted, some requests in turns; tokens/s of each group of requests."""
    rates = []
    for first in range(0, len(texts), LIVE):
        group = texts[first : first + LIVE]
        requests = [request_for(f"streamed {first + number}", [0], text) for number, text in enumerate(group)]
        seconds = 0.0
        for at in range(0, max(map(len, group)), piece):
            growing = [(request, text[at : at + piece].tolist()) for request, text in zip(requests, group, strict=True)]
            for request, new in growing:
                request.commit(new)
            start = time.perf_counter()
            for request, new in growing:
                if new:
                    drafter.propose([request], [0])
            seconds += time.perf_counter() - start
        for request in requests:
            drafter.finish(request)
        rates.append(sum(map(len, group)) / seconds)
    return rates


def run_steps(drafter: Drafter, texts: Sequence[Int32Array], budget: int, piece: int, written: bool) -> Times:
    """Times every proposal of some requests; with ``written`` what a step emitted is written before its proposal is timed."""
    times: Times = []
    for first in range(0, len(texts), LIVE):
        halves = [np.split(text, [len(text) // 2]) for text in texts[first : first + LIVE]]
        requests = [request_for(f"live {number}", *half) for number, half in enumerate(halves)]
        for request in requests:
            drafter.propose([request], [0])
        for at in range(0, max(len(output) for _, output in halves), piece):
            growing = [request for request, (_, output) in zip(requests, halves, strict=True) if at < len(output)]
            for request, (_, output) in zip(requests, halves, strict=True):
                request.commit(output[at : at + piece].tolist())
                if written and at < len(output):
                    drafter.propose([request], [0])
            for request in growing:
                start = time.perf_counter_ns()
                (tree,) = drafter.propose([request], [budget])
                times.append((time.perf_counter_ns() - start, len(tree) - 1))
        for request in requests:
            drafter.finish(request)
    return times
