"""``outrider generate`` as a user runs it: a file in, JSON lines out, faults in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.executor import LocalExecutor
from outrider.engine.text.tokenizer import load_tokenizer
from tests.cluster.commands import REPOSITORY, error_line, lines, outrider, outrider_apart

FIELDS = {
    "id", "output_token_ids", "text", "finish_reason", "steps", "tokens_per_step", "drafted", "accepted", "accepted_by_source",
    "prefill_s", "decode_s",
}  # fmt: skip


@pytest.mark.slow
def test_one_object_a_record_then_a_summary(model: Path, prompts: Path) -> None:
    run = outrider_apart(
        "generate", "--model", model, "--prompts", prompts, "--max-tokens", 20, "--strategy", "prompt_lookup", "--json"
    )
    records, summary = lines(run)
    assert [record["id"] for record in records] == ["first", "2", "prompts/3", "long", "last"]
    made = [record for record in records if record["id"] != "long"]
    assert all(set(record) == FIELDS for record in made)
    assert "256" in records[3]["error"] and "long" in run.stderr
    tokenizer = load_tokenizer(str(model))
    for record in made:
        ids = record["output_token_ids"]
        assert record["text"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert len(ids) == record["steps"] + record["accepted"] <= 20
        assert record["finish_reason"] == ("stop" if ids[-1] == 0 else "length")
        assert record["prefill_s"] > 0 and record["accepted"] == sum(record["accepted_by_source"].values())
    assert (summary["records"], summary["failed"]) == (4, 1)
    for name in ("steps", "drafted", "accepted"):
        assert summary[name] == sum(record[name] for record in made)
    assert summary["output_tokens"] == sum(len(record["output_token_ids"]) for record in made)
    assert summary["tokens_per_s"] == pytest.approx(summary["output_tokens"] / summary["wall_s"], rel=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_size_and_strategy_change_no_token(model: Path, prompts: Path, temperature: float) -> None:
    outputs = []
    for strategy, batch in [("autoregressive", 1), ("llma", 1), ("llma", 8)]:
        arguments = ["--temperature", temperature, "--seed", 3, "--strategy", strategy, "--batch-size", batch]
        if temperature:
            arguments += ["--min-p", 0.02, "--repetition-penalty", 1.1]
            arguments += ["--presence-penalty", 0.1, "--frequency-penalty", 0.1]
        run = outrider(
            "generate", "--model", model, "--prompts", prompts, "--max-tokens", 16, "--dtype", "float32", "--json", *arguments
        )
        records, summary = lines(run)
        assert (summary["strategy"], summary["batch_size"], summary["dtype"]) == (strategy, batch, "float32")
        outputs.append([(record["id"], record.get("output_token_ids"), record.get("text")) for record in records])
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_draft_model_changes_no_token_and_lossy_strategies_say_so(model: Path, prompts: Path) -> None:
    arguments = ["--model", model, "--prompts", prompts, "--max-tokens", 16, "--dtype", "float32", "--limit", 2]
    plain, summary = lines(outrider("generate", *arguments, "--strategy", "autoregressive", "--json"))
    assert summary["lossless"] is True and "draft_model" not in summary
    arguments += ["--draft-model", model]
    drafted, summary = lines(outrider("generate", *arguments, "--strategy", "speculative", "--json"))
    assert [one["output_token_ids"] for one in drafted] == [one["output_token_ids"] for one in plain]
    assert (summary["lossless"], summary["draft_model"]) == (True, model.name)
    assert 0 < summary["drafted"] - 2 <= summary["accepted"]  # it is the target itself; end tokens are never taken from a draft
    run = outrider("generate", *arguments, "--strategy", "mjsd", "--no-exact")
    assert run.returncode == 0 and "mjsd is lossy" in run.stdout


def test_a_device_that_fails_is_told_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be late")

    monkeypatch.setattr(LocalExecutor, "execute", fails)
    run = outrider("generate", "--model", model, "--prompt", "a", "--max-tokens", 4)
    assert error_line(run, 1) == "error: the device failed: an illegal memory access was encountered"


def test_one_prompt_on_the_command_line(model: Path, prompts: Path) -> None:
    (record,), _ = lines(outrider("generate", "--model", model, "--prompt", "A request travels", "--max-tokens", 4, "--json"))
    records, _ = lines(outrider("generate", "--model", model, "--prompts", prompts, "--max-tokens", 4, "--json"))
    assert record["output_token_ids"] == records[-1]["output_token_ids"] and record["id"] == "prompt"
    for arguments, said in (
        ((), "give --prompt TEXT, or --prompts FILE.jsonl"),
        (("--prompt", "a", "--prompts", prompts), "--prompt and --prompts were both given"),
    ):
        run = outrider("generate", "--model", model, *arguments)
        assert run.returncode == 2 and said in run.stderr and run.stderr.count("\n") == 1


def test_a_gguf_file_is_a_model_and_a_draft_model(model: Path, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from tests.helpers.gguf_files import save_gguf

    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    file = save_gguf(tmp_path / "tiny.Q0.gguf", stock, model)
    arguments = ["--prompts", prompts, "--max-tokens", 8, "--dtype", "float32", "--limit", 2, "--json"]
    expected, _ = lines(outrider("generate", "--model", model, *arguments))
    for more in ([], ["--strategy", "speculative", "--draft-model", file]):
        found, summary = lines(outrider("generate", "--model", file, *arguments, *more))
        assert [one["output_token_ids"] for one in found] == [one["output_token_ids"] for one in expected]
        assert summary["model"] == "tiny.Q0"
    run = outrider("generate", "--model", tmp_path / "absent.gguf", *arguments)
    assert "does not exist: give an existing .gguf file" in error_line(run, 1)


def test_readable_output_and_limit(model: Path, prompts: Path) -> None:
    run = outrider("generate", "--model", model, "--prompts", prompts, "--max-tokens", 4, "--limit", 1)
    assert run.returncode == 0 and run.stdout.startswith("[first] ")
    assert "1 records" in run.stdout and "tokens per step" in run.stdout
    assert "generating" in run.stderr


def test_chat_wraps_the_prompt_in_the_template(model: Path, prompts: Path) -> None:
    arguments = ["--model", model, "--prompts", prompts, "--max-tokens", 2, "--limit", 1, "--json"]
    _, plain = lines(outrider("generate", *arguments))
    _, wrapped = lines(outrider("generate", *arguments, "--chat"))
    assert wrapped["prompt_tokens"] > plain["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--strategy", "lma"], 2, "did you mean 'llma'"),
        (["--strategy", "llma", "--option", "copy_len=3"], 2, "did you mean 'copy_length'"),
        (["--option", "max_depth"], 2, "name=value"),
        (["--strategy", "speculative"], 2, "set speculation.draft_model"),
        (["--strategy", "speculative", "--draft-model", "/no/such"], 1, "'/no/such'"),
        (["--strategy", "mjsd", "--draft-model", "demo_model"], 2, "set speculation.exact=false"),
        (["--option", "max_depth=many"], 2, "max_depth"),
        (["--temperature", 9], 2, "temperature"),
        (["--min-p", 2], 2, "min_p"),
        (["--max-tokens", 0], 2, "max_tokens"),
        (["--batch-size", 0], 2, "max_running"),
        (["--world-size", 0], 2, "--world-size '0' must be a number from 1 to 64, or auto"),
        (["--world-size", "two"], 2, "--world-size 'two'"),
        (["--config", "/no/such/file.yaml"], 2, "/no/such/file.yaml"),
        (["--dtype", "int8"], 2, "--dtype"),
        (["--stop", ""], 2, "stop"),
        (["--prompts", "/no/such/file"], 2, "/no/such/file"),
        (["--prompts", "/dev/null"], 2, "no record"),
        (["--prompts", REPOSITORY / "README.md"], 2, "README.md:1: not JSON"),
        (["--model", "/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_faults_are_one_line(model: Path, prompts: Path, arguments: list[object], code: int, said: str) -> None:
    run = outrider("generate", "--model", model, "--prompts", prompts, *arguments)
    assert said in error_line(run, code) and run.stdout == ""


def test_a_fault_ends_the_process_with_its_code() -> None:
    run = outrider_apart("generate", "--prompts", "/no/such/file")
    assert (run.returncode, run.stdout) == (2, "") and run.stderr.startswith("error: ") and "Traceback" not in run.stderr


@pytest.mark.parametrize("line", ["[1]", '{"id": 1}', '{"prompt": 3}', '{"prompt": "a", "references": "b"}', "{"])
def test_a_broken_record_names_file_and_line(model: Path, tmp_path: Path, line: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    run = outrider("generate", "--model", model, "--prompts", path)
    assert run.returncode == 2 and "broken.jsonl:2" in run.stderr


@pytest.mark.slow
def test_flags_win_over_the_file(model: Path, prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{path: {model}, dtype: float32, threads: 1}}\nengine: {{max_running: 2}}\n"
        "speculation: {strategy: llma, options: {copy_length: 3}}\n"
    )
    arguments = ["--prompts", prompts, "--max-tokens", 4, "--limit", 1, "--json", "--config", config]
    _, summary = lines(outrider("generate", *arguments))
    assert (summary["strategy"], summary["batch_size"], summary["dtype"]) == ("llma", 2, "float32")
    assert (summary["threads"], summary["world_size"]) == (1, 1) and "group" not in summary
    _, summary = lines(outrider("generate", *arguments, "--strategy", "prompt_lookup", "--batch-size", 3, "--dtype", "float64"))
    assert (summary["strategy"], summary["batch_size"], summary["dtype"]) == ("prompt_lookup", 3, "float64")
