"""``GET /metrics``: the counters of the engine replicas in Prometheus' text format, read from the replicas on each scrape."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.actors.description import Description
from outrider.cluster.admission.controller import AdmissionCounts
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.observe.audit import Auditor
from outrider.cluster.observe.metric_families import FAMILIES, Family
from outrider.cluster.observe.shadow import Shadow, ShadowSummary
from outrider.cluster.serving.shared_answer import SharedAnswer
from outrider.engine.measures.metrics import Histogram, HistogramCounts, resident_bytes

_LABELS = ("model_name", "engine")
_ADMISSION = "door"  # value of the label `engine` for counts of the API itself
_CHOICES = (1, 2, 5, 10, 20)  # vLLM's bounds of request_params_n

# vLLM's histograms, by name without prefix. Lengths and times are those of requests that were served to their end; times start
# when a request arrives at the engine.
HISTOGRAMS: dict[str, str] = {
    "time_to_first_token_seconds": "Time from arrival to the first token.",
    "inter_token_latency_seconds": "Time between two steps that emitted tokens for a request.",
    "request_time_per_output_token_seconds": "Mean decode time per token after the first, per request.",
    "e2e_request_latency_seconds": "Time from arrival to the last token.",
    "request_queue_time_seconds": "Time from arrival to the first step.",
    "request_inference_time_seconds": "Time from the first step to the last token.",
    "request_prefill_time_seconds": "Time from the first step to the first token.",
    "request_decode_time_seconds": "Time from the first to the last token.",
    "request_prompt_tokens": "Prompt tokens per request.",
    "request_generation_tokens": "Output tokens per request.",
    "request_params_max_tokens": "Maximum output tokens per request.",
    "iteration_tokens_total": "Prompt tokens computed plus tokens emitted, per step.",
}


@dataclass(frozen=True, slots=True)
class ApiCounts:
    """Counts of the API itself, which belong to no engine."""

    choices: HistogramCounts | None = None  # choices per admitted request
    model: str | None = None  # served name; None while unknown
    audits: Mapping[str, int] = field(default_factory=dict)  # by result
    admission: AdmissionCounts | None = None  # None if nothing is limited
    shadow: ShadowSummary | None = None  # None if no baseline answers served requests
    device_failures: Mapping[str, int] = field(default_factory=dict)  # failures of engine replicas' devices, by kind


class Metrics(Collector):
    """Snapshot of the metrics of the engine replicas and of the API."""

    # The label `engine` is new whenever a replica is replaced: the old series end and new ones start at 0, so that no counter
    # falls. To sum over engines, sum their rates in Prometheus.

    def __init__(self, replicas: Sequence[Description] | None, configured: int, api: ApiCounts) -> None:
        """Take descriptions of the replicas that answer; None if another API replica reports the engines."""
        self._answering, self._configured, self._api = None if replicas is None else len(replicas), configured, api
        reported = [(replica, replica.metrics) for replica in replicas or () if replica.metrics is not None]
        self._reported = [((replica.info.served_name, metrics.engine), replica, metrics) for replica, metrics in reported]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; those of engines have no samples while no replica answers."""
        if self._answering is not None:
            yield GaugeMetricFamily("outrider:replicas", "Engine replicas that answer.", self._answering)
            yield GaugeMetricFamily("outrider:replicas_configured", "Configured engine replicas.", self._configured)
            yield from map(self._family, FAMILIES)
            for name, help in HISTOGRAMS.items():
                yield self._histogram(name, help)
        yield from _of_api(self._api)

    def _family(self, family: Family) -> Metric:
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(family.name, family.help, labels=(*_LABELS, *family.labels))
        for labels, replica, _ in self._reported:
            for more, value in family.samples(replica).items():
                metric.add_metric((*labels, *more), value)
        return metric

    def _histogram(self, name: str, help: str) -> Metric:
        metric = HistogramMetricFamily(f"vllm:{name}", help, labels=_LABELS)
        for labels, _, metrics in self._reported:
            counts = metrics.histograms[name]
            metric.add_metric(labels, _buckets(counts), counts.total)
        return metric


def _of_api(api: ApiCounts) -> Iterator[Metric]:
    asked = HistogramMetricFamily("vllm:request_params_n", "Choices per request.", labels=_LABELS)
    if api.choices is not None and api.model is not None:
        asked.add_metric((api.model, _ADMISSION), _buckets(api.choices), api.choices.total)
    yield asked
    held = api.admission
    audits = CounterMetricFamily("outrider:audits", "Served choices recomputed without drafts.", labels=("result",))
    refused = CounterMetricFamily(
        "outrider:door_refused", "Requests refused before they reached an engine, by code.", labels=("code",)
    )
    failed = CounterMetricFamily(
        "outrider:device_failures", "Replicas that ended because their device failed.", labels=("error",)
    )
    for metric, counts in ((audits, api.audits), (refused, held.refused if held else {}), (failed, api.device_failures)):
        for label, count in counts.items():
            metric.add_metric((label,), count)
        yield metric
    yield from _of_shadow(api.shadow)
    in_flight, upload_bytes = (held.in_flight, held.upload_bytes) if held else (None, None)
    yield GaugeMetricFamily("outrider:door_requests_in_flight", "Admitted requests whose answer is not complete.", in_flight)
    yield GaugeMetricFamily("outrider:door_upload_bytes", "Bytes of request bodies being received.", upload_bytes)
    yield GaugeMetricFamily("outrider:door_resident_bytes", "Resident memory of the API's process.", resident_bytes())


def _of_shadow(standing: ShadowSummary | None) -> Iterator[Metric]:
    asked = CounterMetricFamily(
        "outrider:baseline_requests", "Served requests also sent to the baseline, by result.", labels=("result",)
    )
    texts = CounterMetricFamily("outrider:baseline_texts", "Pairs of answers, by how their texts compare.", labels=("texts",))
    medians = GaugeMetricFamily("outrider:baseline_median", "Medians of the latest pairs of answers.", labels=("figure", "side"))
    ratios = GaugeMetricFamily(
        "outrider:baseline_ratio", "Ratio of engine to baseline: median of the latest pairs, with a 90 % bootstrap interval.",
        labels=("figure", "bound"),
    )  # fmt: skip
    if standing is not None:
        for counter, counts in ((asked, standing.results), (texts, standing.texts)):
            for label, count in counts.items():
                counter.add_metric((label,), count)
        for name, figure in standing.figures.items():
            for side, value in (("engine", figure.engine), ("baseline", figure.baseline)):
                medians.add_metric((name, side), value)
            for bound, value in (("low", figure.low), ("median", figure.ratio), ("high", figure.high)):
                ratios.add_metric((name, bound), value)
    yield from (asked, texts, medians, ratios)


def _buckets(counts: HistogramCounts) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound: bounds 1 and 5 with counts 2, 1, 1 give 2 up to 1.0, 3 up to 5.0, 4 up to +Inf."""
    bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(counts.counts), strict=True))


def exposition(replicas: Sequence[Description] | None, configured: int, api: ApiCounts | None = None) -> bytes:
    """Return the text that Prometheus scrapes. Arguments as for ``Metrics``."""
    return generate_latest(Metrics(replicas, configured, api or ApiCounts()))


@dataclass(slots=True)
class MetricsService:
    """Implementation of the route ``/metrics``."""

    tenancy: Tenancy  # checks admin keys
    replicas: Callable[[], Awaitable[Sequence[Description]]]  # returns the descriptions of the replicas that answer
    configured: int  # number of replicas that should exist
    is_open: bool  # no key is needed: only this machine, or the operator's port, reaches the route; else an admin key is
    admission: Callable[[], AdmissionCounts]
    auditor: Auditor | None = None  # None if nothing is audited
    shadow: Shadow | None = None  # None if nothing is compared with a baseline
    reports_engines: Callable[[], Awaitable[bool]] | None = None  # of several API replicas, one reports the engines
    device_failures: Callable[[], Mapping[str, int]] = dict  # failures of engine replicas' devices, by kind
    _choices: Histogram = field(default_factory=lambda: Histogram(_CHOICES), init=False)
    _model: str | None = field(default=None, init=False)  # served name, once a request was counted
    _text: SharedAnswer[bytes] = field(init=False)  # shared by simultaneous scrapes
    # A separate thread: writing takes milliseconds and must neither block the event loop nor wait for the default pool.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "metrics"), init=False)

    def __post_init__(self) -> None:
        self._text = SharedAnswer(self._written)

    def asked(self, choices: int, model: str) -> None:
        """Count an admitted request with this number of choices per prompt."""
        self._choices.observe(choices)
        self._model = model

    async def metrics(self, request: Request) -> Response:
        """Return the metrics, even while no replica answers. Raise ``ApiError`` as ``Tenancy.check_admin`` does."""
        if not self.is_open:
            self.tenancy.check_admin(request.headers.get("authorization"))
        return Response(await self._text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _written(self) -> bytes:
        tells, run = self.reports_engines is None or await self.reports_engines(), asyncio.get_running_loop().run_in_executor
        replicas, audits = await self.replicas() if tells else None, {} if self.auditor is None else self.auditor.counts()
        standing = None if self.shadow is None else await run(self._thread, self.shadow.summary)
        api = ApiCounts(self._choices.read(), self._model, audits, self.admission(), standing, self.device_failures())
        return await run(self._thread, exposition, replicas, self.configured, api)
