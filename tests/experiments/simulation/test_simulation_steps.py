"""How long simulated steps take: the roofline against its arithmetic, and ranks that share a step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.engine.emulation.hardware import MODELS, shape_of
from outrider.experiments.simulation.hardware import GPUS
from outrider.experiments.simulation.steps import (
    Host,
    RankLoad,
    Software,
    StepTimes,
    fits,
    roofline_curve,
    roofline_s,
    step_times,
)
from tests.helpers.models import llama_config

GPU, MODEL, SOFTWARE = GPUS["A100-80"], MODELS["llama-2-7b"], Software()
LINE = LatencyCurve((1, 1000), (0.001, 1.0), 0, 0.0, 0.0)  # a millisecond a row


def test_a_step_takes_what_its_slowest_part_takes() -> None:
    read = 13.48e9 / (0.75 * 2.039e12)
    assert roofline_s(GPU, MODEL, SOFTWARE, 1, 0, 0) == pytest.approx(read, rel=1e-6) == pytest.approx(8.8e-3, rel=0.01)
    assert roofline_s(GPU, MODEL, SOFTWARE, 256, 0, 0) == pytest.approx(18.4e-3, rel=0.01)  # computing
    with_context = roofline_s(GPU, MODEL, SOFTWARE, 1, 4096, 4096)
    assert with_context == pytest.approx(read + 4096 * 2 * 32 * 4096 * 2 / (0.75 * 2.039e12), rel=1e-6)
    slow = dataclasses.replace(SOFTWARE, launch_s=0.4e-3)
    assert roofline_s(GPU, MODEL, slow, 1, 0, 0) == pytest.approx(12.8e-3)  # 32 launches


def test_tensor_parallelism_divides_work_and_adds_all_reduces() -> None:
    shared = roofline_s(GPU, MODEL, SOFTWARE, 1, 0, 0, tensor=8)
    assert shared == pytest.approx(8.8e-3 / 8 + 64 * 20e-6, rel=0.02)
    slow = dataclasses.replace(SOFTWARE, launch_s=0.4e-3)
    assert roofline_s(GPU, MODEL, slow, 1, 0, 0, tensor=8) > roofline_s(GPU, MODEL, slow, 1, 0, 0)  # launches are not divided
    wide = roofline_s(GPU, MODEL, SOFTWARE, 512, 0, 0, tensor=2) - roofline_s(GPU, MODEL, SOFTWARE, 512, 0, 0) / 2
    assert wide == pytest.approx(64 * (20e-6 + 512 * 4096 * 2 / (0.65 * 300e9)), rel=1e-3)


def test_the_curve_is_the_roofline_where_it_was_taken() -> None:
    curve = roofline_curve(GPU, MODEL, SOFTWARE)
    for rows, seconds in zip(curve.rows, curve.rows_s, strict=True):
        assert seconds == roofline_s(GPU, MODEL, SOFTWARE, rows, 256, rows * 256)
    times = StepTimes("lookahead", 1, curve, Host(0.0, 0.0, 0.0))
    far = roofline_s(GPU, MODEL, SOFTWARE, 1, 2304, 2304)
    assert times.forward_s(RankLoad(1, 1, 2304)) == pytest.approx(far, rel=0.01)


def test_forwards_of_fixed_rows_are_stairs() -> None:
    strict = dataclasses.replace(SOFTWARE, fixed_rows=64)
    for rows, forwards in ((1, 1), (64, 1), (65, 2), (512, 8)):
        one = roofline_s(GPU, MODEL, SOFTWARE, 64, 256 / forwards, rows * 256 / forwards)
        assert roofline_s(GPU, MODEL, strict, rows, 256, rows * 256) == pytest.approx(forwards * one)
    few, many = roofline_curve(GPU, MODEL, strict).seconds(np.array([64.0, 65.0]), StepLoad(1, 1, 256))
    assert many == pytest.approx(2 * few, rel=0.01)


def test_ranks_wait_for_the_slowest_and_for_each_other() -> None:
    host = Host(0.001, 0.002, 0.004)
    alone = StepTimes("lookahead", 1, LINE, host)
    assert alone.seconds([RankLoad(2, 10, 0)], 1) == pytest.approx(0.010 + 0.001 + 2 * 0.002 + 0.004)
    shared = StepTimes("lookahead", 2, LINE, Host(0.0, 0.0, 0.0), exchange_s=0.0005)
    assert shared.ranks == 2 and shared.seconds([RankLoad(1, 3, 0), RankLoad(1, 7, 0)], 0) == pytest.approx(0.007 + 2 * 0.0005)
    assert shared.seconds([RankLoad(1, 7, 0)], 0) == pytest.approx(0.007)  # not shared: nothing is exchanged
    stages = StepTimes("pipeline", 4, LINE, Host(0.0, 0.0, 0.0), hop_s=0.001)
    assert stages.ranks == 1 and stages.seconds([RankLoad(1, 7, 0)], 0) == pytest.approx(0.010)


def test_rows_without_logits_may_cost_less() -> None:
    times = StepTimes("lookahead", 1, LINE, Host(0.0, 0.0, 0.0), bare_share=0.5)
    assert times.forward_s(RankLoad(1, 101, 0, bare=100)) == pytest.approx(0.051)
    real = step_times("lookahead", 1, GPU, MODEL, SOFTWARE, Host())
    assert real.bare_share == pytest.approx(1 - 32000 * 4096 / 6.74e9)


def test_shapes_count_the_parameters_of_real_models() -> None:
    config = llama_config()
    real = AutoModelForCausalLM.from_config(config).num_parameters()
    assert shape_of("tiny", config.to_dict()).parameters == pytest.approx(real, rel=0.01)
    known = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "model_type": "llama",
    }  # fmt: skip
    seven = shape_of("llama-2-7b", known)
    assert seven.parameters == pytest.approx(MODEL.parameters, rel=0.001) and seven.entry_bytes == MODEL.entry_bytes == 524288
    assert MODELS["llama-3.1-8b"].entry_bytes == MODEL.entry_bytes / 4  # eight heads of keys instead of 32


def test_memory_holds_weights_and_slots() -> None:
    slots = {"slots": 8, "capacity": 4096}  # 17 GB
    assert fits("lookahead", 1, GPU, MODEL, **slots)
    assert not fits("lookahead", 8, GPUS["A100-40"], MODELS["codellama-34b"], **slots)  # each GPU holds all of it
    assert fits("tensor", 4, GPUS["A100-40"], MODELS["codellama-34b"], **slots)
