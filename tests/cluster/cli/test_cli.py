"""The commands as a user meets them: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from outrider.cluster.cli.chat import ServerBackend
from outrider.cluster.cli.client import RefusedError
from outrider.decoding.jit import NATIVE
from tests.cluster.circle import Server, save_saying, speaking
from tests.cluster.commands import COMMAND, ENVIRONMENT, error_line, outrider, outrider_apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (("cluster.cli.main",), {"ray", "torch", "transformers", "fastapi"}),
        # The launcher, the API and the cache server import these, the controller what it is sent.
        (
            ("cluster.app", "cluster.cli.launch.serve", "cluster.serving.cache_actor", "actors.description"),
            {"torch", "transformers", "numba", "llvmlite"},
        ),
    ],
    ids=["commands", "service"],
)
def test_imports_of_processes_without_a_model(modules: Sequence[str], heavy: set[str]) -> None:
    names = ", ".join(f"outrider.{module}" for module in modules)
    run = outrider_apart(code=f"import sys, {names}; print({heavy} & set(sys.modules))")
    assert run.stdout.strip() == "set()", run.stderr


def test_imports_of_processes_with_a_model(circle_model: Path) -> None:
    heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "deepspeed", "ray", "sympy", "triton"}
    code = f"""if True:
        import sys
        from outrider.engine.library_imports import import_transformers
        import_transformers()
        from outrider.actors.offline import OfflineEngine
        from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
        model = ModelOptions({str(circle_model)!r}, device="cpu")
        OfflineEngine(model, EngineOptions(), SpeculationOptions(), brief=True)
        print({heavy} & set(sys.modules))
        import torch  # whose compiler is there for who asks for it
        print(int(torch.compile(lambda given: given + 1, backend="eager")(torch.ones(1, dtype=int))))
    """
    outrider_apart(code=code)  # keeps the outline of the model
    run = outrider_apart(code=code)
    assert run.stdout.split() == ["set()", "2"], run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["server.prot=1"], "did you mean server.port?"),
        (["server.port=many"], "server.port is 'many'"),
        (["demo_model", "--emulate", "A100-80"], "set emulation.model (--as)"),
        (["demo_model", "--emulate", "X100", "--as", "llama-3.1-8b"], "emulation.device is 'X100'"),
        (["demo_model", "--as", "llama-3.1-8b"], "set emulation.device (--emulate)"),
        (["demo_model", "--emulate", "L4", "--as", "llama-3.1-8b", "--time-dilation", "17"], "emulation.time_dilation is 17"),
        (["--config", "nothing.yaml"], "no config file nothing.yaml"),
        (["serverport"], "did you mean the setting server.port=VALUE?"),
        (["one", "server.port=1", "--model", "other"], "only one model can be served, got one and other"),
    ],
)
def test_bad_settings_are_exit_code_2(arguments: list[str], said: str) -> None:
    assert said in error_line(outrider("serve", *arguments), 2)


def test_what_ends_the_launch(tmp_path: Path, circle_model: Path) -> None:
    assert outrider("serve", "--nonsense").returncode == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1" in error_line(outrider("serve", f"server.port={port}"), 1)
    for folder in (tmp_path, tmp_path / "absent"):
        assert str(folder) in error_line(outrider("serve", "server.port=0x6ff7", "--model", str(folder)), 1)
    run = outrider("serve", "server.port=28663", "--model", str(circle_model), "redis_url=redis://:pass@127.0.0.1:1/0")
    assert "OUTRIDER_CACHE_SECRET" in error_line(run, 1) and ":pass" not in run.stderr


def test_doctor_json_names_what_is_there() -> None:
    run = outrider("doctor", "--json")
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


def test_chat_without_a_server() -> None:
    assert "http://127.0.0.1:1" in error_line(outrider("chat", "--url", "http://127.0.0.1:1"), 1)


def test_chat_is_a_conversation(api_server: Server) -> None:
    run = outrider_apart("chat", "--url", api_server.url, "--max-tokens", "8", text="hi\n\nagain\n/exit\nnever sent\n")
    assert run.returncode == 0, run.stderr
    answers = run.stdout.split("> ")[1:]
    assert len(answers) == 4  # the empty line is not sent, /exit answers nothing
    # The chat template of the model ends with ">", after which the circle begins anew.
    assert answers[0].strip() == "<abcdefg"
    assert answers[2].strip() == "<abcdefg"


def test_chat_takes_documents_and_shows_what_was_drafted(api_server: Server, tmp_path: Path) -> None:
    document = tmp_path / "notes on Füchse.md"
    document.write_text("The quick brown fox.", encoding="utf-8")
    text = f"/docs {document}\n/docs {tmp_path / 'absent'}\nWho?\n/exit\n"
    run = outrider("chat", "--url", api_server.url, "--max-tokens", "8", "--show-drafts", text=text)
    assert run.returncode == 0 and "20 characters" in run.stdout
    assert "<abcdefg" in run.stdout and "[8 tokens, " in run.stderr and "absent" in run.stderr


def test_chat_shows_reasoning_that_is_no_part_of_the_message(circle_model: Path, tmp_path: Path) -> None:
    said = ["<think>", "four? ", "</think>", "It is four."]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}>{# <think> </think> #}"
    with speaking(save_saying(circle_model, tmp_path / "thinking", said, template)) as speaker:
        run = outrider("chat", "--url", speaker.url, text="hi\nagain\n/exit\n")
        prompts = [speaker.tokenizer.decode(job.prompt_ids) for job in speaker.engine.jobs]
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("four?") == run.stdout.count("It is four.") == 2 and "<think>" not in run.stdout
    assert prompts == ["hi>", "hiIt is four.again>"]


@pytest.mark.slow
def test_chat_without_a_server_loads_a_model(circle_model: Path) -> None:
    run = outrider_apart("chat", "--model", str(circle_model), "--max-tokens", "8", text="hi\nagain\n/exit\n")
    assert run.returncode == 0, run.stderr
    assert "circle in this process" in run.stdout and run.stdout.count("<abcdefg") == 2 and "[8 tokens, " in run.stderr
    absent = outrider_apart("chat", "--model", "/no/such/folder", text="")
    assert "model path '/no/such/folder' does not exist" in error_line(absent, 1)


def test_chat_shows_the_servers_error_and_goes_on(api_server: Server) -> None:
    run = outrider("chat", "--url", api_server.url, "--model", "absent", text="hi\n/exit\n")
    assert "absent" in error_line(run, 0)


def test_a_refused_answer_raises_what_the_server_says(http: httpx.Client, circle_model: Path) -> None:
    options = {"model": circle_model.name, "temperature": 9}
    with pytest.raises(RefusedError, match="temperature"):
        list(ServerBackend(http, options).answer([{"role": "user", "content": "hi"}]))


class Terminal:
    """What a process shows on a terminal, read piece by piece."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unread = descriptor, b""

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Reads to the end of a text; fails when it does not come."""
        deadline, wanted = time.monotonic() + timeout_s, text.encode()
        while wanted not in self._unread:
            assert time.monotonic() < deadline, self._unread
            self._unread = self._unread[-len(wanted) :] + os.read(self._descriptor, 65536)
        self._unread = self._unread.partition(wanted)[2]


@pytest.mark.slow
@pytest.mark.parametrize("term", ["dumb", "xterm"])  # on the second one Markdown is drawn
def test_ctrl_c_stops_the_answer_but_not_the_chat(api_server: Server, term: str) -> None:
    master, slave = pty.openpty()
    command = [*COMMAND, "chat", "--url", api_server.url, "--max-tokens", "12000"]
    environment = ENVIRONMENT | {"TERM": term}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
    os.close(slave)
    terminal = Terminal(master)
    try:
        terminal.until("> ")
        os.write(master, b"hi\n")
        terminal.until("<abcdefgh")
        os.killpg(process.pid, signal.SIGINT)
        terminal.until("[stopped]")
        terminal.until("> ")
        os.write(master, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    api_server.becomes_idle()  # it computes no answer that nobody reads


def test_version_is_that_of_the_distribution() -> None:
    run = outrider_apart("version")
    expected: Sequence[str] = ("outrider 0.1.0\n", "")
    assert run.stdout in expected
    assert (run.returncode == 0) is bool(run.stdout)


@pytest.mark.slow
def test_simulate_refuses_in_one_line() -> None:
    of = ("none.jsonl", "--tokenizer", "none", "--gpu", "H100", "--model", "llama-2-7b", "--rate", "1")
    assert "tokenizer 'none'" in error_line(outrider_apart("simulate", *of), 2)
