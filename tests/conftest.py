"""For all tests: what a GPU is needed for is skipped without one, Ray gets a secret of this run's own, and of several workers
(``pytest -n 2``) one runs all tests that start a Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

from outrider.decoding.jit import cache_folder

# Before anything imports Ray; without it, Ray writes a token into the home folder.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray's processes would otherwise give way to those of other tests, and be late for deadlines.
os.environ.setdefault("RAY_worker_niceness", "0")
# Tiny models gain nothing from a second thread, and two threads wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests keep (tables of tiny models) stays out of the home folder; `make clean` removes it. Code that the installation has
# compiled and models that it has fetched are taken from there.
_HOME = cache_folder()
_MADE = [folder.relative_to(_HOME) for folder in (*_HOME.glob("native-*"), *_HOME.glob("models/[a-z]*"))]
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "user_cache")
(cache_folder() / "models").mkdir(parents=True, exist_ok=True)
for _folder in _MADE:
    with contextlib.suppress(FileExistsError):
        (cache_folder() / _folder).symlink_to((_HOME / _folder).resolve())

settings.register_profile("outrider", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("outrider")


def work_unit(nodeid: str) -> str:
    """The tests that one worker of pytest-xdist runs, one after another: those of a file, or all that start a Ray.

    ``tests/cluster/service/test_launch.py::test_check_port`` is of the unit ``ray``: in two workers, the service that these tests
    share would start twice, and Rays that start at once can choose the same ports.
    """
    file = nodeid.split("::")[0]
    own = ("tests/actors/lookahead/test_group.py", "tests/actors/placement/test_own_ray.py")
    return "ray" if file.startswith("tests/cluster/service/") or file in own else file


class OneRay(LoadScopeScheduling):
    """Gives workers the units of ``work_unit``; pytest-xdist 3.8 overlooks groups by marker (``loadgroup``) under pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return work_unit(nodeid)


@pytest.hookimpl(optionalhook=True)  # -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneRay:
    """For ``-n``, whatever ``--dist`` says."""
    config.option.loadscopereorder = False  # the order is that of ``pytest_collection_modifyitems``
    return OneRay(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", type=Path, help="run the long proofs (marker proof) in one process; folder of their record")


# Marked ``slow`` as a whole: a service, a benchmark or a model of each family takes seconds.
SLOW = ("tests/cluster/service/", "tests/engine/cuda/test_gpu_double.py", "tests/experiments/", "tests/lossless/models/")
QUICK = "tests/experiments/report/"
PROVED = pytest.StashKey[dict[str, dict[str, Any]]]()  # by test
STARTED = pytest.StashKey[datetime]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PROVED], config.stash[STARTED] = {}, datetime.now(UTC)


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the test's entry in the record of the long proofs. Tests that use it are part of the proofs and of other runs."""
    return request.config.stash[PROVED].setdefault(request.node.nodeid, {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        found = item.config.stash[PROVED].setdefault(item.nodeid, {})
        found |= {"outcome": report.outcome, "seconds": round(report.duration, 1)}
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record of the long proofs."""
    folder = session.config.getoption("--proof")
    if folder is not None and session.config.stash[PROVED]:
        from outrider.experiments.bench.record import write_record

        chosen = {"chosen": session.config.option.keyword}
        write_record("long-proofs", chosen, session.config.stash[PROVED], None, session.config.stash[STARTED], folder=folder)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the folders of slow tests. Select the long proofs or the other tests, slow units first.

    Tests marked ``gpu`` are skipped without a CUDA device.
    """
    proving = config.getoption("--proof") is not None
    chosen, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if item.nodeid.startswith(SLOW) and not item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.slow)
        is_proof = item.get_closest_marker("proof") is not None
        wanted = is_proof or "proof" in getattr(item, "fixturenames", ()) if proving else not is_proof
        (chosen if wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
    items.sort(key=lambda item: (work_unit(item.nodeid) != "ray", not item.nodeid.startswith("tests/lossless/")))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Says at once what failed, and how: a run that is cut off ends without a summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid} ({report.when})\n{report.longreprtext[-1500:]}", flush=True)


@pytest.fixture(scope="session")
def circle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that goes round in circles, and its tokenizer."""
    from tests.cluster.circle import TOKENIZER, build_model

    path = tmp_path_factory.mktemp("models") / "circle"
    build_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path
