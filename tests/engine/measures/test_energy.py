"""Energy meters on counters that are real files, what an engine books on its requests, and a GPU's own counter."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.measures import energy
from outrider.engine.measures.energy import EnergyMeter, NoMeter, measure_idle, meter_name, open_meter
from outrider.engine.measures.energy_ledger import FRESH_S, READ_S, EnergyCounts, EnergyLedger
from tests.helpers.models import engine_over, prepared, run, tiny_model

RANGE_UJ = 1_000_000_000
ZONES = {  # of two processors: what counts, and what is a part or the sum of it
    "intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0",
}  # fmt: skip
NO_END: frozenset[int] = frozenset()


class Processor:
    """A powercap folder and the hand that moves its counters."""

    def __init__(self, folder: Path, zones: dict[str, str]) -> None:
        self.folder = folder
        for name, kind in zones.items():
            (folder / name).mkdir()
            (folder / name / "name").write_text(f"{kind}\n")
            (folder / name / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            self.set(name, 0)

    def set(self, zone: str, joules: float) -> None:
        new = self.folder / zone / "new"
        new.write_text(f"{round(joules * 1e6) % RANGE_UJ}\n")
        new.replace(self.folder / zone / "energy_uj")  # nobody reads half a number

    def meter(self) -> EnergyMeter:
        return open_meter(["cpu", torch.device("cpu")], self.folder)


@pytest.fixture
def processor(tmp_path: Path) -> Processor:
    """One package."""
    return Processor(tmp_path, {"intel-rapl:0": "package-0"})


@pytest.fixture
def ticking(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], float]]]:
    """A powercap folder whose package uses some 100 W of wall clock, and the joules that it says by now."""
    one = Processor(tmp_path, {"intel-rapl:0": "package-0"})
    over, began = threading.Event(), time.monotonic()

    def tick() -> None:
        while not over.wait(0.001):
            one.set("intel-rapl:0", (time.monotonic() - began) * 100)

    thread = threading.Thread(target=tick)
    thread.start()
    yield one.folder, lambda: int((tmp_path / "intel-rapl:0" / "energy_uj").read_text()) / 1e6
    over.set()
    thread.join()


def work(request: Request, rows: int, drafted: int = 0) -> ScheduledRequest:
    """A request's part of a step: so many committed tokens, and so many rows behind the last one."""
    return ScheduledRequest(request, 0, rows, DraftTree.chain(request.root, [1] * drafted), NO_END)


def test_packages_and_their_memory_count_once(tmp_path: Path) -> None:
    processor = Processor(tmp_path, ZONES)
    processor.set("intel-rapl:0", 400)
    meter = processor.meter()
    assert (meter.source, meter.works, meter.read_j()) == ("rapl", True, 0.0)
    for zone, joules in zip(ZONES, (410.5, 7, 2, 3.25, 5, 410.5), strict=True):
        processor.set(zone, joules)
    assert meter.read_j() == pytest.approx(10.5 + 2 + 3.25)


def test_a_counter_that_starts_again_goes_on(processor: Processor) -> None:
    processor.set("intel-rapl:0", 999)
    meter = processor.meter()
    told = []
    for joules in (999.5, 1000.25, 1000.25, 1999.0, 2000.0):  # the file holds them modulo 1000 J
        processor.set("intel-rapl:0", joules)
        told.append(meter.read_j())
    assert told == pytest.approx([0.5, 1.25, 1.25, 1000.0, 1001.0])


def test_nothing_is_told_where_there_is_no_whole_counter(tmp_path: Path) -> None:
    for devices in (["cpu"], ["cpu", "cuda:0"], ["meta"], []):
        meter = open_meter(devices, tmp_path)
        assert (type(meter), meter.source, meter.works, meter.read_j()) == (NoMeter, "n/a", False, None), devices
        assert measure_idle(meter, 60.0) is None, "no waiting"
    processor = Processor(tmp_path, {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1"})
    assert processor.meter().works
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert not processor.meter().works, "one package of two would be told as both"
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("")
    assert not processor.meter().works
    with NoMeter().span() as span:
        pass
    assert (span.joules, span.net_joules, span.idle_w, span.source) == (None, None, None, "n/a")


def test_a_counter_that_goes_away_is_not_made_up_for(processor: Processor) -> None:
    meter = processor.meter()
    with meter.span() as span:
        (processor.folder / "intel-rapl:0" / "energy_uj").unlink()
    processor.set("intel-rapl:0", 50)
    assert span.joules is None and meter.read_j() is None, "what was used meanwhile is not known"


def test_idle_power_is_measured_and_subtracted(ticking: tuple[Path, Callable[[], float]]) -> None:
    meter = open_meter(["cpu"], ticking[0])
    idle_w = measure_idle(meter, 0.4)
    assert idle_w is not None and 50 < idle_w < 200 and meter.idle_w == idle_w
    with meter.span() as span:
        before = ticking[1]()
        time.sleep(0.3)
        passed = ticking[1]() - before
    assert span.joules is not None and span.coarse and span.seconds >= 0.3
    assert span.joules - passed > -1e-9, "a counter's differences are rounded"
    assert span.net_joules == max(0.0, span.joules - idle_w * span.seconds)


def test_a_span_reads_often_enough_for_a_counter_that_starts_again(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy.RaplMeter, "reread_s", 0.01)
    meter = processor.meter()
    with meter.span() as span:
        for joules in range(0, 3001, 600):  # three times around
            processor.set("intel-rapl:0", joules)
            time.sleep(0.2)
    assert span.joules == pytest.approx(3000)


def test_a_window_is_shared_by_rows(processor: Processor) -> None:
    now = [0.0]
    meter = processor.meter()
    ledger = EnergyLedger(meter, lambda: now[0])
    a, b, c = (Request(name, [5] * 9, SamplingParams()) for name in "abc")
    processor.set("intel-rapl:0", 40)  # before the first request: nobody's
    ledger.begin()
    ledger.record_step([work(a, 1), work(b, 7, drafted=2)])
    assert a.stats.energy_j is None
    now[0] = READ_S
    processor.set("intel-rapl:0", 70)
    ledger.begin()
    ledger.record_step([work(a, 5)])
    assert (a.stats.energy_j, b.stats.energy_j) == pytest.approx((12.0, 18.0))
    ledger.record_step([work(b, 1), work(c, 3)])
    processor.set("intel-rapl:0", 90)
    now[0] += FRESH_S / 2
    ledger.record_end(c, last=False)  # too soon for another reading
    ledger.record_end(b, last=True)
    assert b.stats.energy_j == pytest.approx(23.0) and c.stats.energy_j is None, "the 15 J of c are nobody's"
    now[0] += 60.0
    processor.set("intel-rapl:0", 900)  # nobody's either
    ledger.begin()
    now[0] += 1.0
    processor.set("intel-rapl:0", 904)
    ledger.record_step([work(a, 2)])
    assert a.stats.energy_j == pytest.approx(16.0)
    assert ledger.counts() == EnergyCounts("rapl", 54.0, None)


def test_a_counter_that_fails_leaves_what_was_booked(processor: Processor) -> None:
    now = [0.0]
    ledger = EnergyLedger(processor.meter(), lambda: now[0])
    request = Request("a", [5], SamplingParams())
    for joules in itertools.chain(range(3), [None, 9]):
        ledger.begin()
        now[0] += 1.0
        if joules is None:
            (processor.folder / "intel-rapl:0" / "energy_uj").unlink()
        else:
            processor.set("intel-rapl:0", joules)
        ledger.record_step([work(request, 1)])
    ledger.record_end(request, last=True)
    assert (request.stats.energy_j, ledger.counts().steps_j) == (2.0, 2.0)


def test_an_engine_books_all_that_its_steps_used(
    ticking: tuple[Path, Callable[[], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_S", "FRESH_S"):  # a tiny model has ended before the usual ones
        monkeypatch.setattr(f"outrider.engine.measures.energy_ledger.{name}", 1e-3)
    model = tiny_model("llama", "float32")
    engine = engine_over(model.runner, prepared(build_drafter("prompt_lookup", {}), model), strategy="prompt_lookup")
    assert engine.energy() is None
    engine.meter(open_meter(["cpu"], ticking[0]))
    requests = [Request(f"r{number}", [7, 8, 9] * 4, SamplingParams(40 + 10 * number, ignore_eos=True)) for number in range(3)]
    before = ticking[1]()
    run(engine, *requests)
    passed = ticking[1]() - before
    told = engine.energy()
    assert told is not None and told.source == "rapl" and 0.0 < told.steps_j <= passed + 1.0
    booked = [request.stats.energy_j for request in requests]
    assert all(joules is not None and joules > 0.0 for joules in booked), booked
    total = sum(joules or 0.0 for joules in booked)
    assert 0.5 * told.steps_j < total <= told.steps_j + 0.01, "less by what was used between a reading and the end of a request"
    (own, plain) = engine.by_strategy()
    assert (own.strategy, own.lossless, own.requests, own.tokens) == ("prompt_lookup", True, 3, 150)
    assert own.accepted + own.steps >= own.tokens and own.energy_j == pytest.approx(total)
    assert (plain.strategy, plain.requests, plain.energy_j) == ("autoregressive", 0, None)
    engine.meter(NoMeter())
    again = Request("again", [7, 8, 9], SamplingParams(4), emitted=[5, 6], strategy="autoregressive")
    run(engine, again)
    assert again.stats.energy_j is None and engine.energy() is None
    counts = engine.by_strategy()[1]
    assert (counts.requests, counts.tokens, counts.steps) == (1, again.num_output - 2, again.num_output - 2)


@pytest.mark.gpu
def test_the_counter_of_a_gpu() -> None:
    pytest.importorskip("pynvml", reason="the extra `gpu` is not installed")
    name = meter_name("cuda")
    assert name.startswith("GPU-") and meter_name("cuda:0") == name and meter_name(name) == name
    meter = open_meter(["cuda:0", name])
    assert meter.source == "nvml"
    idle_w = measure_idle(meter, 2.0)
    assert idle_w is not None and 5 < idle_w < 1500
    operand = torch.randn(8192, 8192, device="cuda")
    with meter.span() as span:
        while time.perf_counter() - span._began < 2.0:
            operand = (operand @ operand).clamp(-1, 1)
            torch.cuda.synchronize()
    assert span.joules is not None and span.net_joules is not None and not span.coarse
    assert span.joules / span.seconds > idle_w and 0 < span.net_joules < span.joules
