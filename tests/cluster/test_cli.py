"""The commands as a user meets them: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cluster.cli.chat import ChatError, stream_answer
from cluster.cli.main import app
from decoding.jit import NATIVE

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "cluster.cli.main"]
PLAIN = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
ENVIRONMENT = os.environ | PLAIN | {"PYTHONPATH": str(REPOSITORY)}


Finished = subprocess.CompletedProcess[str]


def outrider(*arguments: str, cwd: Path = REPOSITORY, text: str | None = None) -> Finished:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, input=text, timeout=120)


def outrider_here(*arguments: str) -> Finished:
    """In this process, which has imported everything already; for what ends before anything starts."""
    run = CliRunner(env=PLAIN).invoke(app, list(arguments))
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return Finished(arguments, run.exit_code, run.stdout, run.stderr)


def one_line_error(run: Finished, code: int) -> str:
    """The line on stderr of a command that failed as it should."""
    assert run.returncode == code, run.stderr
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.stderr
    assert "Traceback" not in run.stderr
    return errors[0]


def test_help_names_every_command() -> None:
    run = outrider("--help")
    assert run.returncode == 0
    for command in ("serve", "generate", "chat", "doctor", "version"):
        assert command in run.stdout


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, cluster.cli.main; print({'ray', 'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=REPOSITORY, timeout=60)
    assert run.stdout.strip() == "set()", run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["server.prot=1"], "did you mean server.port?"),
        (["server.port=many"], "server.port is 'many'"),
        (["--config", "nothing.yaml"], "no config file nothing.yaml"),
        (["serverport"], "key=value"),
    ],
)
def test_bad_settings_are_exit_code_2(arguments: list[str], said: str) -> None:
    assert said in one_line_error(outrider_here("serve", *arguments), 2)


def test_unknown_option_is_exit_code_2() -> None:
    assert outrider_here("serve", "--nonsense").returncode == 2


def test_port_in_use_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = one_line_error(outrider("serve", f"server.port={port}"), 1)
    assert f"port {port} on 127.0.0.1 is in use" in error
    assert f"server.port={port + 1}" in error


def test_broken_model_path_says_what_to_do(tmp_path: Path) -> None:
    error = one_line_error(outrider_here("serve", "server.port=0x6ff7", "--model", str(tmp_path / "absent")), 1)
    assert "is not a folder" in error
    assert "no config.json" in one_line_error(outrider_here("serve", "server.port=0x6ff7", "--model", str(tmp_path)), 1)


def test_a_redis_that_others_use_needs_a_secret(circle_model: Path) -> None:
    run = outrider("serve", "server.port=28663", "--model", str(circle_model), "redis_url=redis://:pass@127.0.0.1:1/0")
    error = one_line_error(run, 1)
    assert "OUTRIDER_CACHE_SECRET is not set" in error and "openssl rand -hex 32" in error
    assert ":pass" not in run.stderr


def test_doctor_json_names_what_is_there(tmp_path: Path) -> None:
    run = outrider("doctor", "--json", cwd=tmp_path)
    report = json.loads(run.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"] is (run.returncode == 0)
    assert {"gpu", "torch", "flash-attn", "triton", "redis", "ray", "deepspeed", "memory", "gguf"} <= set(findings)
    assert (findings["exact outputs"]["status"] == "ok") is NATIVE
    assert findings["smollm2-135m-instruct"]["status"] in ("ok", "optional")
    for name in ("torch", "ray", "redis", "transformers"):
        assert findings[name]["status"] in ("ok", "optional"), findings[name]
    for finding in findings.values():
        assert finding["status"] == "ok" or finding["remedy"], finding


def test_doctor_table() -> None:
    run = outrider("doctor")
    assert "torch" in run.stdout
    assert "redis" in run.stdout
    assert "ok" in run.stdout


def test_chat_without_a_server_says_what_to_do() -> None:
    error = one_line_error(outrider_here("chat", "--url", "http://127.0.0.1:1"), 1)
    assert "no server answers at http://127.0.0.1:1" in error
    assert "outrider serve" in error


def test_chat_is_a_conversation(api_server: Any) -> None:
    run = outrider("chat", "--url", api_server.url, "--max-tokens", "8", text="hi\n\nagain\n/exit\nnever sent\n")
    assert run.returncode == 0, run.stderr
    answers = run.stdout.split("> ")[1:]
    assert len(answers) == 4  # the empty line is not sent, /exit answers nothing
    # The chat template of the model ends with ">", after which the circle begins anew.
    assert answers[0].strip() == "<abcdefg"
    assert answers[2].strip() == "<abcdefg"


def test_chat_shows_the_servers_error_and_goes_on(api_server: Any) -> None:
    run = outrider("chat", "--url", api_server.url, "--model", "absent", text="hi\n/exit\n")
    assert run.returncode == 0
    assert "absent" in one_line_error(run, 0)


def test_stream_answer_raises_what_the_server_says(http: httpx.Client, circle_model: Path) -> None:
    options = {"model": circle_model.name, "temperature": 9}
    with pytest.raises(ChatError, match="temperature"):
        list(stream_answer(http, options, [{"role": "user", "content": "hi"}]))


def test_ctrl_c_stops_the_answer_but_not_the_chat(api_server: Any) -> None:
    master, slave = pty.openpty()
    command = [*COMMAND, "chat", "--url", api_server.url, "--max-tokens", "12000"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, start_new_session=True)
    os.close(slave)
    try:
        read_until(master, "> ")
        os.write(master, b"hi\n")
        read_until(master, "<abcdefgh")
        os.killpg(process.pid, signal.SIGINT)
        read_until(master, "[stopped]")
        read_until(master, "> ")
        os.write(master, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert wait_until_idle(api_server), "the server still computes the answer that nobody reads"


def read_until(descriptor: int, text: str, timeout_s: float = 60.0) -> str:
    """What a terminal shows until ``text`` appears."""
    seen = b""
    deadline = time.monotonic() + timeout_s
    while text.encode() not in seen:
        assert time.monotonic() < deadline, seen[-500:]
        seen += os.read(descriptor, 1)
    return seen.decode(errors="replace")


def wait_until_idle(server: Any, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.health().get("running") == 0:
            return True
        time.sleep(0.1)
    return False


def test_version_is_that_of_the_distribution() -> None:
    run = outrider("version")
    expected: Sequence[str] = ("outrider 0.1.0\n", "")
    assert run.stdout in expected
    assert (run.returncode == 0) is bool(run.stdout)
