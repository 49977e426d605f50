"""``outrider serve`` from the first line to the last: what it prints, what it starts, what it leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from outrider.cluster.cli.launch.preflight import check_port
from outrider.cluster.cli.launch.serve import _state_of_redis
from outrider.decoding.jit import cache_folder
from outrider.experiments.faults.redis_process import RedisProcess
from tests.cluster.circle import COMPLETIONS, TEXT
from tests.cluster.commands import COMMAND, REPOSITORY
from tests.helpers.network import certificate, free_port
from tests.helpers.waiting import eventually

MOST_MIB = 220  # of a process that computes nothing


def wants_a_token(port: int) -> bool:
    """Whether a replica of Serve listens there, which unpickles nothing of a stranger's."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        for metadata in ((), (("authorization", f"Bearer {'a' * 64}"),)):
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", metadata=metadata, timeout=30)
            if refused.value.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return False
    return True


class Serving:
    """``outrider serve`` in a process group of its own, as a terminal would start it."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.port, self._log = free_port(), log
        self.files = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: Ray keeps sockets in it
        for room in ("outrider", "engine", "configs"):  # the user's own
            (log.parent / room).mkdir(exist_ok=True)
            (log.parent / room / "__init__.py").write_text(f"raise SystemExit('{room} of the current folder was imported')")
        command = [sys.executable, "-P", *COMMAND[1:], "serve", f"server.port={self.port}", "model.threads=1", *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
                env={name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")} | {
                    "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80", "TMPDIR": str(self.files),
                    "OUTRIDER_CACHE_SECRET": "of the tests",
                },
            )  # fmt: skip
        self.started: set[psutil.Process] = set()  # everything below the process, ever seen

    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            self.look()
            time.sleep(0.1)
        self.look()

    def ends(self, timeout_s: float) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s:g} s: {self.output()}") from None

    def look(self) -> None:
        self.started.update(psutil.Process(self.process.pid).children(recursive=True))

    def listening(self) -> set[tuple[str, int]]:
        """Every address at which one of all that was started listens."""
        found = [one for process in self.started if process.is_running() for one in process.net_connections("inet")]
        return {(one.laddr.ip.removeprefix("::ffff:"), one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    def memory_mib(self) -> dict[str, int]:
        """Of the processes that compute nothing: this one, the controller, the API and the cache server."""
        found = {"launcher": psutil.Process(self.process.pid).memory_info().rss >> 20}
        for process in self.started:
            title = process.cmdline()[:1] if process.is_running() else []
            for name in ("ServeController", "outrider:api", "outrider:cache"):
                if title and title[0].startswith("ray::") and name in title[0]:
                    found[name] = process.memory_info().rss >> 20
        assert len(found) == 4, found
        return found

    def press_ctrl_c(self) -> None:
        """A terminal sends SIGINT to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left(self, timeout_s: float = 10.0) -> list[psutil.Process]:
        """What still lives of all that was started, after some time to end in."""
        _, alive = psutil.wait_procs(self.started, timeout_s)
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        for process in (*self.started, self.process):
            if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                process.kill()
        self.process.wait()
        shutil.rmtree(self.files)


def answers_the_printed_curl(output: str) -> None:
    curl = next(line for line in output.splitlines() if line.startswith("curl "))
    answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60)
    assert '"finish_reason":"length"' in answer.stdout.replace(" ", ""), answer


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "serve.log"


@pytest.fixture
def launched(log: Path, circle_model: Path) -> Iterator[Callable[..., Serving]]:
    """Launches a service; it is ended in any case."""
    with contextlib.ExitStack() as stack:

        def launch(*arguments: str, model: Path = circle_model) -> Serving:
            serving = Serving(log, "--model", str(model), *arguments)
            stack.callback(serving.end)
            return serving

        yield launch


def test_serve_answers_the_printed_curl_and_ctrl_c_leaves_nothing(launched: Callable[..., Serving]) -> None:
    serving = launched()
    serving.wait_for('max_tokens": 64}')
    output = serving.output()
    assert "Redis started" in output
    assert "Ray started" in output
    assert "loading" in output
    assert f"http://127.0.0.1:{serving.port}\n" in output
    answers_the_printed_curl(output)
    serving.look()
    assert len(serving.started) > 5
    assert not [name for name, mib in serving.memory_mib().items() if mib > MOST_MIB]
    others_reach = {port for host, port in serving.listening() if host != "127.0.0.1"}
    assert others_reach and all(map(wants_a_token, others_reach))  # those of Serve's replicas
    (folder,) = serving.files.glob("outrider-ray-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and f"{folder}/" in output and list(folder.rglob("plasma_store"))

    serving.press_ctrl_c()
    assert serving.ends(60) == 0, serving.output()
    assert serving.left() == []
    assert list(serving.files.iterdir()) == []
    check_port("127.0.0.1", serving.port)
    lines = [line.split("] ")[-1] for line in serving.output().splitlines()]
    positions = [lines.index(line) for line in ("Serve stopped", "Ray stopped", "Redis stopped", "stopped")]
    assert positions == sorted(positions)
    assert "Traceback" not in serving.output()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make a certificate with")
def test_https(launched: Callable[..., Serving], tmp_path: Path) -> None:
    own, key = certificate(tmp_path)
    serving = launched(f"server.ssl_certfile={own}", f"server.ssl_keyfile={key}")
    serving.wait_for('max_tokens": 64}')
    assert f"https://127.0.0.1:{serving.port}\n" in serving.output()
    answers_the_printed_curl(serving.output())
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{serving.port}/health")


@pytest.mark.proof
def test_second_ctrl_c_ends_everything_at_once(launched: Callable[..., Serving]) -> None:
    serving = launched()
    serving.wait_for('max_tokens": 64}')
    serving.press_ctrl_c()
    serving.wait_for("Serve: stopping")
    serving.press_ctrl_c()
    assert serving.ends(60) == 130
    assert serving.left() == []
    assert not list(serving.files.glob("outrider-redis-*"))
    check_port("127.0.0.1", serving.port)


@pytest.mark.parametrize(
    "moment",
    [*(pytest.param(each, marks=pytest.mark.proof) for each in ("Redis started", "Ray: starting")), "starting the replicas"],
)
def test_terminate_during_the_start_leaves_nothing(launched: Callable[..., Serving], moment: str) -> None:
    serving = launched()
    serving.wait_for(moment)
    serving.process.send_signal(signal.SIGTERM)
    serving.look()
    assert serving.ends(60) == 128 + signal.SIGTERM, serving.output()
    assert serving.left() == []
    eventually(lambda: list(serving.files.iterdir()) == [])
    assert "curl" not in serving.output() and "Traceback" not in serving.output() and "***" not in serving.output()


@pytest.mark.proof
def test_model_that_does_not_load_is_one_line(launched: Callable[..., Serving], tmp_path: Path, circle_model: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(circle_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    serving = launched(model=broken)
    assert serving.ends(240) == 1
    (error,) = [line for line in serving.output().splitlines() if line.startswith("error: ")]
    assert str(broken) in error and "Traceback" not in serving.output()


@pytest.mark.proof
def test_where_the_default_model_cannot_be_fetched_the_demo_model_is_served(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cache_folder(), log.parent / "cache" / "outrider", ignore=shutil.ignore_patterns("models"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(log.parent / "cache")}.items():
        monkeypatch.setenv(name, value)
    serving = Serving(log)
    try:
        serving.wait_for('max_tokens": 64}')
        assert "could not be fetched" in serving.output() and "serving the tiny model demo_model instead" in serving.output()
        assert httpx.get(f"http://127.0.0.1:{serving.port}/v1/models").json()["data"][0]["id"] == "demo_model"
        serving.press_ctrl_c()
        assert serving.ends(60) == 0 and serving.left() == []
        refused = Serving(log, "--model", "smollm2-135m-instruct")  # who names a model gets it, or an error
        try:
            assert refused.ends(120) == 1 and refused.left() == []
        finally:
            refused.end()
        (error,) = [line for line in refused.output().splitlines() if line.startswith("error: ")]
        assert "could not be fetched" in error
    finally:
        serving.end()


@pytest.mark.proof
def test_a_redis_that_comes_later_is_used_when_it_is_there_and_left_alone(launched: Callable[..., Serving]) -> None:
    with RedisProcess() as redis_server:
        redis_server.kill()
        serving = launched(f"redis_url={redis_server.url}")
        serving.wait_for('max_tokens": 64}')
        assert f"{redis_server.url} does not answer" in serving.output() and "embedded" not in serving.output()
        with httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=60) as client:

            def is_well() -> bool:
                return client.get("/health").json()["shared_cache"] == "connected"

            body = TEXT | {"max_tokens": 8}
            before = client.post(COMPLETIONS, json=body).raise_for_status().json()["choices"]
            assert not is_well() and client.get("/ready").status_code == 200
            redis_server.start()
            eventually(is_well, 60)
            assert client.post(COMPLETIONS, json=body).raise_for_status().json()["choices"] == before
        os.killpg(serving.process.pid, signal.SIGHUP)  # its terminal is closed
        assert serving.ends(60) == 128 + signal.SIGHUP and serving.left() == []
        assert not list(serving.files.glob("outrider-redis-*"))
        assert _state_of_redis(redis_server.url) == "Redis answers at redis_url"
