"""``GET /metrics``: what the engine replicas have counted, in Prometheus' text form. They are asked when somebody looks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from actors.replica import Description
from cluster.admission.tenancy import Tenancy
from cluster.http.documents import ERRORS
from cluster.observe.audit import Auditor
from cluster.observe.metric_families import FAMILIES
from cluster.observe.metric_family import Family, Told
from engine.measures.histogram import Histogram, HistogramCounts
from engine.measures.metrics import resident_bytes

_LABELS = ("model_name", "engine")
_ADMISSION = "door"  # stands for the engine in what only the API knows
_CHOICES = (1, 2, 5, 10, 20)  # vLLM's bounds of request_params_n

# vLLM's, by name without prefix. Lengths and times are those of requests that were served to their end, times from the arrival at
# the engine on.
HISTOGRAMS: dict[str, str] = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Between two steps that emitted tokens for a request.",
    "request_time_per_output_token_seconds": "Decode time over the tokens after the first, a request.",
    "e2e_request_latency_seconds": "From arrival to last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Tokens of the prompt.",
    "request_generation_tokens": "Tokens of the output.",
    "request_params_max_tokens": "Tokens that might have come at most.",
    "iteration_tokens_total": "Prompt tokens computed and tokens emitted in a step.",
}


class AdmissionState(Protocol):
    """What the limits of the API tell."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Requests that were refused since the start, by the error's code."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that were let in and are not answered to the end."""
        ...

    @property
    def upload_bytes(self) -> int:
        """Of bodies that are being received."""
        ...


class AdmissionCollector(Collector):
    """What the API itself has counted; it belongs to no engine."""

    def __init__(
        self,
        choices: HistogramCounts | None = None,
        model: str | None = None,
        audits: Mapping[str, int] | None = None,
        admission: AdmissionState | None = None,
    ) -> None:
        """
        Args:
            choices: of the requests that were let in.
            model: the name that is served; None while it is not known.
            audits: by result; None where there are none.
            admission: None where nothing limits it.
        """
        self._choices, self._model, self._audits, self._admission = choices, model, audits or {}, admission

    def collect(self) -> Iterator[Metric]:
        """All metrics, some of them without samples."""
        asked = HistogramMetricFamily("vllm:request_params_n", "Choices that a request asks for.", labels=_LABELS)
        if self._choices is not None and self._model is not None:
            asked.add_metric((self._model, _ADMISSION), _buckets(self._choices), self._choices.total)
        yield asked
        audits = CounterMetricFamily("outrider:audits", "Served choices computed again without drafts.", labels=("result",))
        for result, count in self._audits.items():
            audits.add_metric((result,), count)
        yield audits
        refused = CounterMetricFamily("outrider:door_refused", "Requests refused before any engine, by code.", labels=("code",))
        for code, count in ({} if self._admission is None else self._admission.refused).items():
            refused.add_metric((code,), count)
        yield refused
        in_flight = GaugeMetricFamily("outrider:door_requests_in_flight", "Requests let in and not answered to the end.")
        if self._admission is not None:
            in_flight.add_metric((), self._admission.in_flight)
        yield in_flight
        uploads = GaugeMetricFamily("outrider:door_upload_bytes", "Bytes of bodies that are being received.")
        if self._admission is not None:
            uploads.add_metric((), self._admission.upload_bytes)
        yield uploads
        memory = GaugeMetricFamily("outrider:door_resident_bytes", "Memory of the API's process.")
        held = resident_bytes()
        if held is not None:
            memory.add_metric((), held)
        yield memory


class EngineCollector(Collector):
    """The metrics of some replicas at one moment.

    The label ``engine`` is a replica's own name for this life: where one is replaced its series end and new ones begin at 0, so
    that no counter falls. Sums over engines are as Prometheus makes them of rates.
    """

    def __init__(self, replicas: Sequence[Description], configured: int) -> None:
        """
        Args:
            replicas: what those that answered say of themselves.
            configured: how many there should be.
        """
        self._answering, self._configured = len(replicas), configured
        told = [Told(replica, replica.metrics) for replica in replicas if replica.metrics is not None]
        self._told = [((one.replica.info.served_name, one.metrics.engine), one) for one in told]

    def collect(self) -> Iterator[Metric]:
        """All metrics; those of engines have no samples while none answers."""
        yield GaugeMetricFamily("outrider:replicas", "Engine replicas that answer.", self._answering)
        yield GaugeMetricFamily("outrider:replicas_configured", "Engine replicas that should.", self._configured)
        yield from map(self._family, FAMILIES)
        for name, help in HISTOGRAMS.items():
            yield self._histogram(name, help)

    def _family(self, family: Family) -> Metric:
        labelled = (*_LABELS, *family.labels)
        metric: CounterMetricFamily | GaugeMetricFamily
        if family.kind == "counter":
            metric = CounterMetricFamily(family.name, family.help, labels=labelled)
        else:
            metric = GaugeMetricFamily(family.name, family.help, labels=labelled)
        for labels, one in self._told:
            for more, value in family.samples(one):
                metric.add_metric((*labels, *more), value)
        return metric

    def _histogram(self, name: str, help: str) -> Metric:
        metric = HistogramMetricFamily(f"vllm:{name}", help, labels=_LABELS)
        for labels, one in self._told:
            counts = one.metrics.histograms[name]
            metric.add_metric(labels, _buckets(counts), counts.total)
        return metric


def _buckets(counts: HistogramCounts) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound: bounds 1 and 5 with the counts 2, 1, 1 are 2 up to 1.0, 3 up to 5.0, 4 up to +Inf."""
    bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(counts.counts), strict=True))


def exposition(replicas: Sequence[Description], configured: int, admission: AdmissionCollector | None = None) -> bytes:
    """The text that Prometheus scrapes. Arguments as for ``EngineCollector``; ``admission`` tells what the API counts."""
    return generate_latest(EngineCollector(replicas, configured)) + generate_latest(admission or AdmissionCollector())


class MetricsService:
    """What the route does."""

    def __init__(
        self,
        tenancy: Tenancy,
        replicas: Callable[[], Awaitable[Sequence[Description]]],
        configured: int,
        is_open: bool,
        auditor: Auditor | None = None,
        admission: Callable[[], AdmissionState] | None = None,
    ) -> None:
        """
        Args:
            tenancy: knows the operator's keys.
            replicas: what the engine replicas that answer say of themselves.
            configured: how many there should be.
            is_open: nobody needs a key: only this machine reaches the server. Otherwise it is the operator's, as /admin.
            auditor: counts audits; None where nothing is audited.
            admission: what the limits tell; None where there are none.
        """
        self._auditor, self._admission = auditor, admission
        self._choices = Histogram(_CHOICES)
        self._model: str | None = None
        self._tenancy, self._replicas, self._configured, self._is_open = tenancy, replicas, configured, is_open

    def asked(self, choices: int, model: str) -> None:
        """Counts a request for so many choices of each prompt."""
        self._choices.observe(choices)
        self._model = model

    async def expose(self, request: Request) -> Response:
        """The metrics, also while no replica answers. Raises ``ApiError`` as ``Tenancy.check_admin``."""
        if not self._is_open:
            self._tenancy.check_admin(request.headers.get("authorization"))
        # In a thread: it takes some milliseconds, in which other requests go on.
        replicas, audits = await self._replicas(), None if self._auditor is None else self._auditor.counts()
        told = AdmissionCollector(
            self._choices.read(), self._model, audits, None if self._admission is None else self._admission()
        )
        text = await asyncio.to_thread(exposition, replicas, self._configured, told)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def add_metrics_route(app: FastAPI, service: MetricsService) -> None:
    """Gives an application the route."""

    @app.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
    async def metrics(request: Request) -> Response:
        return await service.expose(request)
