"""The bench beside other systems: speeds from turns, their order, an interrupted run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.record import Kept
from outrider.experiments.peers import revisions
from outrider.experiments.peers.__main__ import main
from outrider.experiments.peers.contestants import CONTESTANTS, Field, Setting
from outrider.experiments.peers.environments import Environments, MissingPeerError
from outrider.experiments.peers.rounds import ASKED_ONCE, Roof, Rounds, Speeds, asked, place, turns_of
from outrider.experiments.report.speeds import peers
from outrider.experiments.report.values import markdown


def _turn(name: str, level: int, seconds: float, **more: Any) -> dict[str, Any]:
    """Two answers of eleven tokens, ``seconds`` each after a tenth of a second to the first token."""
    return {
        "model": "m", "round": 0, "level": level, "part": 0, "contestant": name, "roof": [10.0, 10.0], "asks": ["a/1", "b/1"],
        "prompt_tokens": [100, 100], "tokens": [11, 11], "first_s": [0.1, 0.1], "last_s": [0.1 + seconds] * 2, "wall_s": seconds,
        "answers": ["x", "y"], **more,
    }  # fmt: skip


def test_speeds_from_turns() -> None:
    turns = [
        _turn("plain", 1, 0.1), _turn("vLLM", 1, 0.3), _turn("auto", 1, 0.05, answers=["x", "z"]), _turn("plain", 8, 0.2),
        _turn("vLLM", 8, 0.1), _turn("auto", 8, 0.1),
    ]  # fmt: skip
    found = Speeds(turns).summary(["plain", "vLLM", "auto", "llama.cpp"], [1, 8])
    assert found["plain"]["1"]["decode_tokens_per_s"] == [100.0] and found["vLLM"]["8"]["all_tokens_per_s"] == [220.0]
    assert found["auto"]["1"]["times_plain"] == [2.0] and found["vLLM"]["1"]["times_plain"] == [0.3333]
    assert found["auto"]["8"]["times_plain"] == [2.0] and found["auto"]["8"]["as_plain"] == found["auto"]["8"]["answers"] == 2
    assert (found["auto"]["1"]["as_plain"], found["auto"]["1"]["answers"]) == (1, 2)
    table = markdown(peers({"models": {"m": {"speeds": found}}}))
    assert "| Outrider, plain | 100 | 110 | n/a | 1000 |" in table and "llama" not in table


def test_a_ratio_is_taken_on_the_same_prompts() -> None:
    one = _turn("transformers", 1, 1.0)
    half = {key: value[:1] if isinstance(value, list) else value for key, value in one.items()}
    plain = _turn("plain", 1, 0.1)
    plain["last_s"][1] = 50.0  # the prompt that transformers was not asked
    assert Speeds([plain, half]).ratios("plain", "transformers", 1, "decode") == [pytest.approx(10.0)]


def test_turns_are_adjacent_and_change_their_order() -> None:
    prompts = [Prompt(f"{number}", [1], []) for number in range(5)]
    field = [one for one in CONTESTANTS if one.name in ("plain", "auto", "transformers")]
    turns = [
        (turn["level"], turn["part"], turn["contestant"], len(own))
        for turn, _, own in turns_of("m", 0, field, prompts, [1, 8], 3)
    ]
    assert turns[len(ASKED_ONCE) :] == [
        (1, 0, "plain", 3), (1, 0, "auto", 3), (1, 0, "transformers", 2), (1, 1, "plain", 2), (1, 1, "auto", 2),
        (8, 0, "plain", 5), (8, 0, "auto", 5),
    ]  # fmt: skip
    assert [turn["contestant"] for turn, _, _ in turns_of("m", 1, field, prompts, [8], 3)][len(ASKED_ONCE) :] == ["auto", "plain"]
    assert [prompt.id for prompt in asked(field[2], prompts, prompts)] == ["0", "1"]


def test_missing_systems_are_named(tmp_path: Path) -> None:
    made = Environments(tmp_path, {"vllm": tmp_path / "python", "llama": tmp_path}, False, print)
    with pytest.raises(MissingPeerError, match="--vllm python is no file"):
        made.vllm()
    with pytest.raises(MissingPeerError, match="no llama-server and no llama-bench"):
        made.llama()
    with pytest.raises(MissingPeerError, match="aiperf is not installed: leave out --no-install"):
        made.aiperf()
    (tmp_path / "a==1").mkdir()
    (tmp_path / ".a==1.made").touch()
    assert made.of("a==1").parent == tmp_path / "a==1" / "bin"


@pytest.mark.parametrize(
    ("levels", "theirs"),
    [
        ("1", ["transformers"]),
        pytest.param("1 8", [f"transformers{way}" for way in ("", " lookup", " batching")], marks=pytest.mark.proof),
    ],
    ids=["one at a time", "all"],
)
def test_end_to_end_beside_transformers(
    levels: str, theirs: list[str], tiny_model: Path, workloads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        f"--dtype float32 --threads 1 --levels {levels} --records 1 --prompt-tokens 200 --max-tokens 4 --context 256 --rounds 1"
    )
    field = ["plain", "vLLM", *theirs]
    given = ["--model", str(tiny_model), "--workloads", str(workloads), *options.split(), "--no-install", "--contestants", *field]
    given += ["--kept", str(tmp_path / "kept.jsonl"), "--environments", str(tmp_path / "made"), "--out", str(tmp_path)]
    assert main(given) == 0
    (found,) = json.loads(next(tmp_path.glob("*-peers.json")).read_text())["results"]["models"].values()
    assert set(found["speeds"]) == {"plain", *theirs}
    assert all(of["as_plain"] == of["answers"] > 0 for row in found["speeds"].values() for of in row.values())
    assert found["missing"] == {"vllm": "vllm is not installed: leave out --no-install, or name one that is"}
    assert found["speeds"]["plain"]["1"]["prefill_tokens_per_s"][0] > 0 and found["roof_gb_s"][0] > 0
    assert found["told"]["weight_bytes"] > 0 and found["step"][0]["ms"]["8"] > 0
    assert next(tmp_path.glob("*-peers.svg")).stat().st_size
    out = capsys.readouterr()
    assert "Outrider, plain" in out.out and "round 1: plain at 1, part 1" in out.err


_TIMED = """
import json, sys
starts = json.loads(sys.stdin.readline()).get("start")
print(json.dumps({{"peak_mib": {seconds}}} if starts else {{"ready": True}}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"wall_s": 1.0, "decode_s": {seconds}, "tokens": 10}}), flush=True)
"""


def test_two_revisions_in_turns_run_the_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder, seconds in (("this", "experiments", 1.0), ("other", "renamed/experiments", 2.0)):
        script = tmp_path / name / folder / "peers" / "revisions.py"
        script.parent.mkdir(parents=True)
        script.write_text(_TIMED.format(seconds=seconds), encoding="utf-8")
    monkeypatch.setattr(revisions, "ROOT", tmp_path / "this")
    found = revisions.compare(tmp_path / "other", {"path": "m"}, [([5, 6, 7], [])], 2, lambda line: None)
    assert found["cases"].keys() == {*(name for name, _, _ in revisions.CASES), "prefill"}
    assert all(case["times_as_long"] == 0.5 and case["tokens_per_s"]["other"] == [5.0, 5.0] for case in found["cases"].values())
    assert found["start"]["this"]["peak_mib"] == [1.0, 1.0] and found["start"]["other"]["peak_mib"] == [2.0, 2.0]


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    path, said, asks = tmp_path / "kept.jsonl", list[str](), list[str]()

    class Cut(Field):
        """Ends the run at its fourth job, as Ctrl-C does."""

        def __init__(self) -> None:
            made = Environments(tmp_path, {}, False, said.append)
            super().__init__(Setting("m", "float32", 1, 64, 64, 8, ()), made, Path, tmp_path)
            self.left = 4

        def ask(self, system: str, job: dict[str, Any]) -> dict[str, Any]:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            asks.append(job["mode"])
            count = len(job["asks"])
            return {"tokens": [[1, 2]] * count, "first_s": [0.1] * count, "last_s": [0.2] * count, "wall_s": 0.1}

    field = [one for one in CONTESTANTS if one.name in ("plain", "auto")]
    turns = list(turns_of("m", 0, field, [Prompt("a", "w", [1], [])], [8], 1))[len(ASKED_ONCE) :]
    with pytest.raises(KeyboardInterrupt):
        Rounds(Cut(), Kept(path, {"a": 1}, place), Roof(1), 8, lambda system: {}, said.append).run(turns)
    assert asks == ["plain", "plain", "auto"]  # the first job of each warms up
    kept = Kept(path, {"a": 1}, place)
    assert [turn["contestant"] for turn in kept.found] == ["plain"]
    Rounds(Cut(), kept, Roof(1), 8, lambda system: {}, said.append).run(turns)
    assert asks[3:] == ["auto", "auto"] and len(Kept(path, {"a": 1}, place).found) == 2
