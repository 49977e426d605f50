"""Emulated GPUs: times by arithmetic, a clock that dilation does not change, and outputs that are the known ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.configs.slices import EmulationOptions
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.engine.emulation.clock import EmulatedClock
from outrider.engine.emulation.device import EmulatedDevice, local_executor
from outrider.engine.emulation.hardware import DEVICES, FIGURES, MODELS, find_device
from outrider.engine.emulation.known_outputs import KnownOutputs
from outrider.engine.emulation.roofline import DeviceRoofline
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import SequenceRows
from outrider.engine.text.tokenizer import load_tokenizer
from tests.helpers.models import engine_over, run, tiny_model
from tests.helpers.ranks import twin

DEMO = str(Path(__file__).resolve().parents[3] / "demo_model")
LLAMA = MODELS["llama-2-7b"]
GRAPHS = DeviceRoofline(*find_device("A100-80", None), LLAMA, form="graphs")


class Wall:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.at, self.late_s = 0.0, 0.0

    def __call__(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.at += seconds + self.late_s


def clock_of(dilation: float) -> tuple[EmulatedClock, Wall]:
    wall = Wall()
    return EmulatedClock(dilation, wall, wall.sleep), wall


@pytest.mark.parametrize("dilation", [1.0, 4.0, 16.0])
def test_dilation_hides_device_time_and_no_host_time(dilation: float) -> None:
    clock, wall = clock_of(dilation)
    for device_s, host_s in ((0.010, 0.002), (0.001, 0.030), (0.004, 0.0)):
        began, hidden_s = clock.now(), clock.hidden_s
        wall.at += host_s
        with clock.working(device_s) as booked:
            wall.at += 0.0005  # a model computes within the time of the device
        assert clock.now() - began == pytest.approx(host_s + device_s)
        assert booked == pytest.approx([device_s, 0.0])
        assert clock.hidden_s - hidden_s == pytest.approx((dilation - 1) * device_s)


def test_a_request_that_arrives_while_the_device_works() -> None:
    clock, wall = clock_of(4.0)
    wall.at += 0.002
    with clock.working(0.010):
        pass
    assert [clock.hidden_at(at) for at in (0.001, 0.012, 0.042, 0.050)] == pytest.approx([0.0, 0.0075, 0.03, 0.03])
    wall.at += 0.002
    clock.join(0.0, 0.043, [(0.044, 0.030)])
    assert clock.hidden_at(0.050) == clock.hidden_s and clock.hidden_at(0.001) == 0.0


@pytest.mark.parametrize("dilation", [1.0, 4.0])
def test_a_model_slower_than_the_device_counts_as_host_time(dilation: float) -> None:
    clock, wall = clock_of(dilation)
    with clock.working(0.010) as booked:
        wall.at += dilation * 0.010 + 0.003
    assert clock.now() == pytest.approx(0.013) and booked == pytest.approx([0.010, 0.003])


@pytest.mark.parametrize("dilation", [1.0, 4.0, 16.0])
@pytest.mark.parametrize(
    ("starts", "devices", "expected"),
    [
        ((0.0, 0.001), (0.010, 0.010), 0.011),  # the other one begins later
        ((0.002, 0.001), (0.010, 0.010), 0.012),  # the leader does
        ((0.0, 0.005), (0.010, 0.002), 0.010),  # the other one has waited for nothing
        ((0.0, 0.001), (0.002, 0.020), 0.021),
    ],
)
def test_a_step_of_several_devices_ends_with_the_last(
    dilation: float, starts: tuple[float, float], devices: tuple[float, float], expected: float
) -> None:
    clock, wall = clock_of(dilation)
    wall.at = starts[0]
    with clock.working(devices[0]):
        pass
    answered = starts[1] + dilation * devices[1]
    began = wall.at
    wall.at = max(began, answered) + 0.0005  # the answer is read
    clock.join(0.0, began, [(answered, (dilation - 1) * devices[1])])
    assert clock.now() == pytest.approx(expected + 0.0005)


def test_sleeps_that_end_late_are_begun_earlier() -> None:
    clock, wall = clock_of(1.0)
    wall.late_s = 0.0004
    taken = []
    for _ in range(60):
        with clock.working(0.010) as booked:
            pass
        taken.append(booked[0])
    assert taken[0] == pytest.approx(0.0104) and taken[-1] == pytest.approx(0.010, rel=0.003)


@pytest.mark.parametrize(
    ("roofline", "rows", "milliseconds"),
    [
        (GRAPHS, 1, 13.48e9 / (0.685 * 2.039e12) * 1e3),
        (DeviceRoofline(*find_device("A100-80", None), LLAMA), 64, 9.651),
        (DeviceRoofline(*find_device("A100-80", None), LLAMA), 65, 2 * 9.651),  # strict: two forwards of 64 rows
        (GRAPHS, 65, 9.651),  # a graph of 96 rows, still less than reading the weights
        (GRAPHS, 256, 256 * 2 * 6.74e9 / (0.6 * 312e12) * 1e3),  # beyond the graphs, and computing takes longest
        (DeviceRoofline(*find_device("A100-80", None), LLAMA, bits=4), 1, 9.651 * 104.9 / 196.8),
        (DeviceRoofline(*find_device("A100-80", None), LLAMA, form="eager"), 1, 1e3 / 25.5),
        (DeviceRoofline(*find_device("H100", None), LLAMA, form="graphs"), 1, 13.48e9 / (0.685 * 3.35e12) * 1e3),
    ],
)
def test_a_forward_takes_what_the_roofline_says(roofline: DeviceRoofline, rows: int, milliseconds: float) -> None:
    assert 1e3 * roofline.seconds([SequenceRows(0, 0, 0, rows, None)]) == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.parametrize(("ranks", "tokens_per_s"), [(2, 168.84), (4, 254.02), (8, 328.43)])
def test_tensor_parallelism_is_as_fast_as_published(ranks: int, tokens_per_s: float) -> None:
    """gpt-fast's README, of the same table as the all-reduces; its one GPU decodes 104.9 tokens a second."""
    group = DeviceRoofline(*find_device("A100-80", None), LLAMA, form="graphs", split="tensor", ranks=ranks)
    assert 1 / group.seconds([SequenceRows(0, 0, 0, 1, None)]) == pytest.approx(tokens_per_s, rel=0.03)


def test_links_and_pipelines() -> None:
    links = [find_device("A100-80", name)[1] for name in ("nvlink", "pcie", "ethernet")]
    sums = [link.all_reduce_s(8, 8192) for link in links]
    assert sums == sorted(sums) and sums[1] - sums[0] == pytest.approx(14 * 0.53e-6 + 14 / 8 * 8192 * (1 / 22.4e9 - 1 / 180e9))
    stages = DeviceRoofline(*find_device("L4", None), LLAMA, form="graphs", split="pipeline", ranks=4)
    alone = DeviceRoofline(*find_device("L4", None), LLAMA, form="graphs")
    one_row = [SequenceRows(0, 0, 0, 1, None)]
    assert stages.seconds(one_row) - alone.seconds(one_row) == pytest.approx(4 * stages.link.send_s(8192))
    assert stages.link.name == "pcie" and stages.exchanged_bytes(3) == 4 * 3 * 8192
    with pytest.raises(ModelLoadError, match=r"emulation\.link is nvlink, which L4 does not have: set pcie"):
        find_device("L4", "nvlink")
    with pytest.raises(ModelLoadError, match=r"emulation\.model 'x' is not known: give a folder .*llama-3\.1-8b"):
        DeviceRoofline.of(EmulationOptions("L4", "x"))


@pytest.mark.parametrize("form", ["strict", "graphs", "eager"])
def test_drafters_see_the_times_of_the_device(form: str) -> None:
    roofline = DeviceRoofline.of(EmulationOptions("A100-80", "llama-3.1-8b", form=form))  # type: ignore[arg-type]
    curve = roofline.curve()
    for rows, seconds in zip(curve.rows, curve.rows_s, strict=True):
        assert seconds == roofline.seconds([SequenceRows(0, 256, 0, rows, None)])
    few, many = curve.seconds(np.array([64.0, 65.0]), StepLoad(1, 1, 256))
    assert (many > 1.9 * few) == (form == "strict")


def test_every_figure_has_a_source() -> None:
    assert all(figure.source and figure.value > 0 for figure in FIGURES.values())
    assert all(find_device(name, None)[0].sources for name in DEVICES)


@pytest.mark.parametrize("strategy", ["autoregressive", "llma", "auto"])
def test_requests_follow_known_outputs(strategy: str) -> None:
    model = tiny_model("llama", "float32")
    prompts = [[5, 6, 7, 8, 5, 6], [9, 3, 4]]
    outputs = [[7, 8, 5, 6, 7, 8, 11, 0], [4, 4, 4, 12, 4, 4]]
    runner = twin("llama", "float32")
    runner.emulated = EmulatedDevice(GRAPHS, 1.0, KnownOutputs(zip(prompts, outputs, strict=True)), clock=clock_of(1.0)[0])
    drafter = build_drafter(strategy, {})
    drafter.prepare(model.target)
    engine = engine_over(runner, drafter, executor=local_executor(runner))
    asked = [Request(str(at), prompt, SamplingParams(12), [prompt]) for at, prompt in enumerate(prompts)]
    assert run(engine, *asked) == [outputs[0], 2 * outputs[1]]  # the second has no end, and is repeated
    assert asked[0].finish_reason is FinishReason.STOP
    counts = runner.emulated.counts()
    assert counts.forwards > 0 and counts.device_s == pytest.approx(
        sum(GRAPHS.step_s(1, 0, 0) for _ in range(counts.forwards)), 0.1
    )
    assert counts.ratio == pytest.approx(1.0)

    refused = {
        "prompt": Request("x", [1, 2, 3], SamplingParams(4)),
        "temperature": Request("y", prompts[0], SamplingParams(4, temperature=1.0)),
        "logprobs": Request("z", prompts[0], SamplingParams(4, logprobs=1)),
    }
    for field, request in refused.items():
        engine.add(request)
        (output,) = engine.step()
        assert output.finish_reason is FinishReason.ERROR and output.fault_field == field
        assert output.error is not None and "emulation.outputs" in output.error
    engine.check_integrity()


def test_a_file_of_outputs_knows_prompts_and_chats(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(DEMO)
    path = tmp_path / "known.jsonl"
    path.write_text(json.dumps({"prompt": "When?", "output": "At nine."}) + "\n")
    known = KnownOutputs.read(str(path), tokenizer, (1, 2))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "When?"}], tokenize=False, add_generation_prompt=True)
    for prompt in (tokenizer("When?").input_ids, tokenizer(chat, add_special_tokens=False).input_ids):
        output = known.of(Request("x", prompt, SamplingParams(4)))
        assert output is not None and output[-1] == 1 and tokenizer.decode(output[:-1]) == "At nine."
    assert known.of(Request("x", tokenizer("Why?").input_ids, SamplingParams(4))) is None


@pytest.mark.parametrize("text", ["{", '{"prompt": "x"}', '{"prompt": "x", "output": 3}', "[]", None])
def test_a_wrong_file_of_outputs_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "known.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelLoadError, match=r"emulation\.outputs .*give JSON lines with prompt and output"):
        KnownOutputs.read(str(path), load_tokenizer(DEMO), (0,))
