"""The measurement of transports, over real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from configs.schema import REPOSITORY
from experiments.exchange import figures


def test_every_transport_is_measured_and_the_whole_group_as_well(tmp_path: Path) -> None:
    sizes = ["--worlds", "2", "3", "--rounds", "1", "--steps", "4", "--compute-steps", "3", "--compute-ms", "0.5"]
    command = [sys.executable, "-m", "experiments.exchange", *sizes, "--transports", "tcp", "unix", "calls", "gloo"]
    # In a process of its own: it starts a Ray, and this process may have one.
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-exchange.json")
    cases = json.loads(path.read_text())["results"]["cases"]
    measured = {(row["world"], row["work"], row["transport"]) for row in cases}
    works = [(work, name) for work in ("none", "unpinned", "pinned") for name in ("tcp", "unix", "calls", "gloo")]
    assert measured == {(world, *rest) for world in (2, 3) for rest in [*works, ("model", "group")]}
    for row in cases:
        assert 0 < row["exchange_ms"]["p50"] <= row["exchange_ms"]["p90"] <= row["exchange_ms"]["p99"], row
        assert (row["waiting_cores"] is not None) == (row["work"] == "none"), row
        assert row["compute_ms"] <= row["step_ms"], row
        if row["work"] != "none":
            assert row["compute_ms"] > 0.01, row  # the ranks did compute
    assert path.with_suffix(".svg").stat().st_size > 1000


def test_the_exchange_is_the_step_without_the_slowest_rank() -> None:
    rows = figures([[(0.010, 0.009), (0.012, 0.009)], [(0.011, 0.009)]], [0.5, 0.25])
    assert rows["exchange_ms"]["p50"] == 2.0 and rows["step_ms"] == 11.0 and rows["compute_ms"] == 9.0
    assert rows["p50_of_rounds_ms"] == [2.0, 2.0] and rows["waiting_cores"] == 0.375
