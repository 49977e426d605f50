"""Energy as counters of the hardware tell it: NVML's for GPUs, RAPL's for processors. Where there is none, nothing is told.

No figure here is an estimate. What a counter covers is what its device used, whoever used it: a GPU's counter is that of the
whole board, a processor's is that of its packages and their memory with all that runs on them.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.accelerator import accelerator

logger = logging.getLogger(__name__)

POWERCAP = Path("/sys/class/powercap")
COARSE_S = 1.0  # counters move every 20 to 100 ms: over less than this a difference says little
_REREAD_S = 30.0  # RAPL's counters start again after minutes: within a span they are read so often that none does so twice


class EnergyMeter(ABC):
    """A counter of joules. Threads may share it."""

    source: str = "n/a"  # where the figures come from: nvml, rapl, or n/a
    _devices = ""
    _faults: tuple[type[Exception], ...] = ()  # by which it is told that the counter cannot be read
    reread_s: float | None = None  # to be read at least so often, or turns of the counter are missed; None: as one likes

    def __init__(self) -> None:
        self.idle_w: float | None = None  # what the devices draw with nothing to compute, once ``measure_idle`` was called
        self._failed, self._lock = False, threading.Lock()

    @property
    def works(self) -> bool:
        """Whether there is a counter at all."""
        return self.source != "n/a"

    def read_j(self) -> float | None:
        """Joules since the meter was opened, never fewer than the last time; None where nothing can be read (any more)."""
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
        """As ``read_j``. Raises one of ``_faults``."""

    def span(self) -> EnergySpan:
        """What is used from here on, for a ``with`` block."""
        return EnergySpan(self)


class EnergySpan:
    """The energy of a block, known when it is left.

    Example: 330 J in 2 s, on a device that draws 65 W with nothing to do: ``net_joules`` is 200.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self.source, self.idle_w = meter.source, meter.idle_w
        self.joules: float | None = None  # of the devices, idle power included; None where there is no counter
        self.seconds = 0.0
        self._meter = meter
        self._over = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def net_joules(self) -> float | None:
        """``joules`` without what idle devices had drawn meanwhile; None where either is not known.

        Never below zero: idle power is a measurement, too, and a block that computes next to nothing may come out below it.
        """
        if self.joules is None or self.idle_w is None:
            return None
        return max(0.0, self.joules - self.idle_w * self.seconds)

    @property
    def coarse(self) -> bool:
        """Whether the block was too short for the counter's steps."""
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
    """Where no counter can be read."""

    def _counted_j(self) -> None:
        return None


class RaplMeter(EnergyMeter):
    """Processor packages and their memory, by the kernel's powercap files (``Documentation/power/powercap`` of Linux).

    A zone's counter is in microjoules and starts again at ``max_energy_range_uj``.

    Example: a range of 1,000,000, read at 900,000 and then at 300,000: 0.4 J were used.
    """

    source, reread_s = "rapl", _REREAD_S
    _devices, _faults = "the processor", (OSError, ValueError)

    def __init__(self, zones: Sequence[Path]) -> None:
        """
        Args:
            zones: folders with ``energy_uj`` and ``max_energy_range_uj``, none of them a part of another.

        Raises:
            OSError: one of them cannot be read; before Linux 5.10 everybody may, since then root alone unless told otherwise.
            ValueError: one of them holds no number.
        """
        super().__init__()
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = [int(file.read_text()) for file in self._files]
        self._total_uj = 0

    def _counted_j(self) -> float:
        read = [int(file.read_text()) for file in self._files]
        for now, last, span in zip(read, self._last, self._ranges, strict=True):
            self._total_uj += now - last if now >= last else now - last + span
        self._last = read
        return self._total_uj / 1e6


class NvmlMeter(EnergyMeter):
    """GPUs, by the counter of millijoules that NVML keeps for each since its driver was loaded (Volta and later)."""

    source, _devices = "nvml", "the GPUs"

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        """Over the module ``pynvml``, initialized, and handles of GPUs. Raises ``NVMLError`` where one has no such counter."""
        super().__init__()
        self._nvml, self._handles, self._faults = nvml, list(handles), (nvml.NVMLError,)
        self._first_mj = self._sum_mj()

    def _counted_j(self) -> float:
        return (self._sum_mj() - self._first_mj) / 1e3

    def _sum_mj(self) -> int:
        return sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in self._handles)


def open_meter(devices: Sequence[str | torch.device], powercap: Path = POWERCAP) -> EnergyMeter:
    """The meter of some devices together; one that tells nothing where any of them has no counter that can be read.

    Args:
        devices: ``cpu``, ``cuda``, ``cuda:N``, or a GPU of this machine by its name for NVML (``meter_name``). Processors are
            metered where all devices are ``cpu``; beside GPUs there is no telling.
        powercap: folder of the kernel's powercap zones.
    """
    names = list(dict.fromkeys(map(meter_name, devices)))
    if names == ["cpu"]:
        return _rapl(powercap)
    return _nvml(names) if names and all(name.startswith("GPU-") for name in names) else NoMeter()


def meter_name(device: str | torch.device) -> str:
    """What ``open_meter`` knows a device by, in any process of this machine: ``cpu``, or of a GPU ``GPU-`` and its UUID."""
    if isinstance(device, str) and device.startswith("GPU-"):
        return device
    known = torch.device(device)
    if known.type != "cuda":
        return known.type
    gpus = accelerator()
    return str(known) if gpus.unavailable() else gpus.uuid(torch.device("cuda", known.index or 0))


def measure_idle(meter: EnergyMeter, seconds: float) -> float | None:
    """Watts that the devices draw while this process computes nothing, kept in the meter; None where they are not metered.

    What else runs on the devices is in it.

    Args:
        meter: of the devices.
        seconds: how long to wait, a second at least to be of use.
    """
    if not meter.works:
        return None
    with meter.span() as span:
        time.sleep(seconds)
    meter.idle_w = None if span.joules is None else span.joules / span.seconds
    return meter.idle_w


def _rapl(powercap: Path) -> EnergyMeter:
    """Packages and the memory beside them. Their other parts are in the package's counter, the platform's counter is of both."""
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
