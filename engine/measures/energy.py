"""Energy readings from hardware counters, each of all use of its device: NVML for GPUs, RAPL for processors."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.engine.accelerator import accelerator

logger = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
COARSE_S = 1.0  # counters update every 20 to 100 ms, so shorter spans are imprecise
_REREAD_S = 30.0  # RAPL's counters wrap after minutes: this interval sees every wrap within a span


class EnergyMeter(ABC):
    """Thread-safe counter of joules."""

    source: str = "n/a"  # nvml, rapl, or n/a
    _devices = ""
    _faults: tuple[type[Exception], ...] = ()  # exceptions that mean that the counter cannot be read
    reread_s: float | None = None  # longest interval between readings, to see every wrap; None: unlimited

    def __init__(self) -> None:
        self.idle_w: float | None = None  # power of the idle devices, set by ``measure_idle``
        self._failed, self._lock = False, threading.Lock()

    @property
    def works(self) -> bool:
        """Return whether a counter exists."""
        return self.source != "n/a"

    def read_j(self) -> float | None:
        """Return joules since the meter was opened, never decreasing; None if the counter cannot be read, or not any more."""
        with self._lock:
            if not self._failed:
                try:
                    return self._counted_j()
                except self._faults as error:
                    logger.warning("the energy of %s cannot be read any more: %s", self._devices, error)
                    self._failed = True
            return None

    @abstractmethod
    def _counted_j(self) -> float | None:
        """Return joules as ``read_j``, or raise one of ``_faults``."""

    def span(self) -> EnergySpan:
        """Return a context manager that measures a block."""
        return EnergySpan(self)


class EnergySpan:
    """Energy of a ``with`` block, available after it.

    Example: 330 J in 2 s, on a device that draws 65 W with nothing to do: ``net_joules`` is 200.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self.source, self.idle_w = meter.source, meter.idle_w
        self.joules: float | None = None  # including idle power; None without a counter
        self.seconds = 0.0
        self._meter = meter
        self._over = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def net_joules(self) -> float | None:
        """Return ``joules`` minus the idle energy of the devices, at least 0; None if either is unknown."""
        if self.joules is None or self.idle_w is None:
            return None
        # Idle power is a measurement too, so the difference may be negative for a nearly idle block.
        return max(0.0, self.joules - self.idle_w * self.seconds)

    @property
    def coarse(self) -> bool:
        """Return whether the block was too short for the resolution of the counter."""
        return self.seconds < COARSE_S

    def __enter__(self) -> EnergySpan:
        if self._meter.reread_s is not None:
            self._reader = threading.Thread(target=self._keep_reading, args=(self._meter.reread_s,), name="energy", daemon=True)
            self._reader.start()
        self._first_j, self._began = self._meter.read_j(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, last_j = time.perf_counter() - self._began, self._meter.read_j()
        if self._reader is not None:
            self._over.set()
            self._reader.join()
        if self._first_j is not None and last_j is not None:
            self.joules = last_j - self._first_j

    def _keep_reading(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            self._meter.read_j()


class NoMeter(EnergyMeter):
    """Meter for devices without a readable counter."""

    def _counted_j(self) -> None:
        return None


class RaplMeter(EnergyMeter):
    """Processor packages and their memory, by the kernel's powercap files (``Documentation/power/powercap`` of Linux).

    The counter of a zone is in microjoules and wraps around at ``max_energy_range_uj``.

    Example: a range of 1,000,000, read at 900,000 and then at 300,000: 0.4 J were used.

    Args:
        zones: folders with ``energy_uj`` and ``max_energy_range_uj``, none of them part of another.

    Raises:
        OSError: a zone cannot be read (since Linux 5.10 only root may read it by default).
        ValueError: a zone contains no number.
    """

    source, reread_s = "rapl", _REREAD_S
    _devices, _faults = "the processor", (OSError, ValueError)

    def __init__(self, zones: Sequence[Path]) -> None:
        super().__init__()
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = [int(file.read_text()) for file in self._files]
        self._total_uj = 0

    def _counted_j(self) -> float:
        read = [int(file.read_text()) for file in self._files]
        for now, last, span in zip(read, self._last, self._ranges, strict=True):
            # A smaller number means that the counter has wrapped around.
            self._total_uj += now - last if now >= last else now - last + span
        self._last = read
        return self._total_uj / 1e6


class NvmlMeter(EnergyMeter):
    """GPUs, by NVML's counter of millijoules (Volta and later). Raises ``NVMLError`` if a GPU has no such counter."""

    source, _devices = "nvml", "the GPUs"

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        super().__init__()
        self._nvml, self._handles, self._faults = nvml, list(handles), (nvml.NVMLError,)
        self._first_mj = self._sum_mj()

    def _counted_j(self) -> float:
        return (self._sum_mj() - self._first_mj) / 1e3

    def _sum_mj(self) -> int:
        return sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in self._handles)


def open_meter(devices: Sequence[str | torch.device], powercap: Path = POWERCAP) -> EnergyMeter:
    """Return one meter for ``cpu``, or for GPUs (``cuda``, ``cuda:N``, a ``meter_name``); ``NoMeter`` without a counter."""
    names = list(dict.fromkeys(map(meter_name, devices)))
    if names == ["cpu"]:
        return _rapl(powercap)
    return _nvml(names) if names and all(name.startswith("GPU-") for name in names) else NoMeter()


def meter_name(device: str | torch.device) -> str:
    """Return the name of a device in every process of this machine: its type, or ``GPU-`` and the UUID of a GPU."""
    if isinstance(device, str) and device.startswith("GPU-"):
        return device
    known = torch.device(device)
    if known.type != "cuda":
        return known.type
    gpus = accelerator()
    return str(known) if gpus.unavailable() else gpus.uuid(torch.device("cuda", known.index or 0))


def measure_idle(meter: EnergyMeter, seconds: float) -> float | None:
    """Measure for ``seconds``, at least one, the idle watts of the devices, and store them in the meter; None if not metered."""
    if not meter.works:
        return None
    with meter.span() as span:
        time.sleep(seconds)
    meter.idle_w = None if span.joules is None else span.joules / span.seconds
    return meter.idle_w


def _rapl(powercap: Path) -> EnergyMeter:
    """Open the counters of packages and DRAM; the package counter includes its other zones, and that of the platform both."""
    try:
        named = [(zone, (zone / "name").read_text().strip()) for zone in sorted(powercap.glob("intel-rapl:*"))]
        zones = [zone for zone, name in named if name.startswith("package") or name == "dram"]
        return RaplMeter(zones) if zones else NoMeter()
    except (OSError, ValueError) as error:
        logger.info("the energy of the processor cannot be read: %s", error)
        return NoMeter()


def _nvml(names: Sequence[str]) -> EnergyMeter:
    try:
        import pynvml
    except ImportError:
        logger.info("the energy of the GPUs is not metered: install outrider with the extra `gpu`")
        return NoMeter()
    try:
        pynvml.nvmlInit()
        return NvmlMeter(pynvml, [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names])
    except pynvml.NVMLError as error:
        logger.info("the energy of the GPUs cannot be read: %s", error)
        return NoMeter()
