"""What the benchmarks count and compare is right, and the run for a GPU goes through all its parts."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import attention_cases
import chart
import gpu
import kernels
import optimizers
import pytest
import torch
import training
from attention_cases import Shape, check, check_deterministic, check_dropout, draw
from implementations.task import Task
from implementations.worker import Segments
from optimizers import Arm, Point
from step_times import Tokens, settings

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.model.kernels import KERNELS
from transformer_xl.model.kernels.reference import AttentionInputs, attention_terms

ROOT = Path(__file__).parents[2]
SHAPE = Shape(2, 7, 5, 3, 11, attention_window=4)


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change) -> None:
    """Makes a kernel of that name that computes something else."""

    def attend(inputs, sight, dropout):
        return change(KERNELS["reference"].attend, inputs, sight, dropout)

    monkeypatch.setitem(KERNELS, name, replace(KERNELS["reference"], name=name, attend=attend))


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, attention_window=None), replace(SHAPE, memory_length=0, attention_window=100)]
)
def test_pairs_are_the_keys_that_queries_see(shape):
    inputs, sight = draw(shape)
    assert shape.pairs == int((attention_terms(inputs, sight).probabilities_BNTS[0, 0] > 0).sum())
    assert shape.forward_flops == 6 * shape.batch_size * shape.n_heads * shape.d_head * shape.pairs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_kernel_passes(dtype):
    shape = replace(SHAPE, dtype=dtype, empty_slots=3)
    assert all(line["ok"] for name in gpu.fitting("cpu", dtype) for line in [check(name, shape)])


def without_position_bias(attend, inputs, sight, dropout):
    return attend(replace(inputs, position_bias_NH=torch.zeros_like(inputs.position_bias_NH)), sight, dropout)


def without_gradient_of_keys(attend, inputs, sight, dropout):
    return attend(replace(inputs, k_BSNH=inputs.k_BSNH.detach()), sight, dropout)


def without_a_number(attend, inputs, sight, dropout):
    return attend(inputs, sight, dropout) * math.nan


@pytest.mark.parametrize("change", [without_position_bias, without_gradient_of_keys, without_a_number])
def test_a_wrong_kernel_is_found(monkeypatch, change):
    spoil(monkeypatch, "wrong", change)
    assert not check("wrong", SHAPE)["ok"]


def test_dropout_of_the_kernels_passes():
    shape = Shape(2, 32, 32, 2, 16, dropout=0.3)
    lines = [line for name in ("sdpa", "reference") for line in check_dropout(name, shape)]
    assert [line for line in lines if not line["ok"]] == []


def unscaled(attend, inputs, sight, dropout):
    return attend(inputs, sight, dropout) * (1 - dropout)


def with_fresh_randomness(attend, inputs, sight, dropout):
    torch.manual_seed(time.perf_counter_ns())
    return attend(inputs, sight, dropout)


def never_dropping(attend, inputs, sight, dropout):
    return attend(inputs, sight, 0.0)


class _OtherMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return KERNELS["reference"].attend(AttentionInputs(*tensors), attention_cases.AttentionMask(None), 0.3)

    @staticmethod
    def backward(ctx, grad_BTNH):
        with torch.enable_grad():
            tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            torch.manual_seed(5)
            out_BTNH = KERNELS["reference"].attend(AttentionInputs(*tensors), attention_cases.AttentionMask(None), 0.3)
            return torch.autograd.grad(out_BTNH, tensors, grad_BTNH)


def with_another_mask_in_the_backward_pass(attend, inputs, sight, dropout):
    return _OtherMask.apply(*attention_cases.as_list(inputs))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (unscaled, "sum to about one"),
        (with_fresh_randomness, "same seed"),
        (never_dropping, "another seed"),
        (with_another_mask_in_the_backward_pass, "gradient of values"),
    ],
)
def test_wrong_dropout_is_found(monkeypatch, change, found):
    spoil(monkeypatch, "wrong", change)
    wrong = [line["what"] for line in check_dropout("wrong", Shape(2, 32, 32, 2, 16, dropout=0.3)) if not line["ok"]]
    assert any(found in what for what in wrong)


def with_a_changing_gradient_of_position_keys(attend, inputs, sight, dropout):
    r_PNH = inputs.position_key_PNH
    return attend(replace(inputs, position_key_PNH=r_PNH + (r_PNH - r_PNH.detach()) * torch.rand(())), sight, dropout)


def test_other_bits_each_time_are_found(monkeypatch):
    spoil(monkeypatch, "wrong", with_a_changing_gradient_of_position_keys)
    assert check_deterministic("sdpa", SHAPE)["ok"]
    assert not check_deterministic("wrong", SHAPE)["ok"]


@pytest.mark.parametrize(("power", "ratio"), [(1, 2), (2, 4)])
def test_growth_is_that_beyond_what_is_always_there(power, ratio):
    assert kernels.growth_of([10**9 + 3 * size**power for size in (1024, 2048, 4096, 8192)]) == pytest.approx(ratio)


def test_rates_are_compared_round_by_round():
    found = training.metrics([20.0, 60.0, 30.0], [10.0, 20.0, 30.0])
    assert found["median_tokens_per_second"] == 30.0
    assert (found["median_ratio"], found["ratio_range"]) == (2.0, [1.0, 3.0])


def test_implementations_are_parsed_by_name():
    entry = training.Entry.parse("x-transformers-bfloat16+bias", training.MODULES)
    assert (entry.module, entry.dtype, entry.variant) == ("peer_x_transformers", "bfloat16", "bias")
    with pytest.raises(SystemExit, match="no implementation 'theirs-float32'; wanted NAME-DTYPE"):
        training.Entry.parse("theirs-float32", training.MODULES)


def test_implementations_read_the_text_in_order():
    task = Task("ours", "float32", "", "cpu", 1, 8, 1, 8, 8, 204, 3, 5, 5, 0.0, 1e-3, 1.0)
    segments = Segments(task)
    first, second = segments.next(), segments.next()
    assert torch.equal(first[1][:, -1:], second[0][:, :1])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0][0], first[0][1])
    segments.place = segments.ids_BA.shape[1] - 1
    assert torch.equal(segments.next()[0], first[0])


def test_drawn_tokens_fall_with_their_rank():
    inputs_BT, targets_BT = Tokens(settings("enwik8-12l", {"segment_length": 400}, small=True)).next()
    assert torch.equal(inputs_BT[:, 1:], targets_BT[:, :-1])
    assert (inputs_BT < 16).sum() > (inputs_BT >= 128).sum() > 0


POINTS = [Point(1, 100, 1.0, 5.0), Point(2, 200, 3.0, 4.0), Point(3, 300, 5.0, 4.5), Point(4, 400, 7.0, 3.0)]


@pytest.mark.parametrize(
    ("nats", "place"), [(6.0, (100, 1.0)), (4.5, (150, 2.0)), (4.0, (200, 3.0)), (3.75, (350, 6.0)), (2.9, None)]
)
def test_where_a_loss_is_reached_first(nats, place):
    assert optimizers.reached(POINTS, nats) == place


def test_arms_are_compared_with_the_first_seed_by_seed():
    faster = [replace(point, nats_per_token=point.nats_per_token - 1) for point in POINTS]
    found = optimizers.compared({"a": {1: POINTS, 2: POINTS}, "b": {1: faster, 2: POINTS}})
    assert found["a"]["share_of_tokens_to_reach_the_first"] == {"median": 1.0, "range": [1.0, 1.0]}
    assert found["b"]["share_of_tokens_to_reach_the_first"] == {"median": 0.75, "range": [0.5, 1.0]}
    assert found["b"]["final_nats_beyond_first"] == {"median": -0.5, "range": [-1.0, 0.0]}
    never = optimizers.compared({"a": {1: faster}, "b": {1: POINTS}})["b"]
    assert (never["seeds_that_reach_the_first"], never["share_of_seconds_to_reach_the_first"]) == ("0 of 1", None)


@pytest.mark.parametrize(
    "name", ["adam-cosine", "adamw-wsd:weight_decay=0.1", "muon-wsd-uniform:muon_momentum=0.9@0.5"]
)
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_arms_give_settings_of_training(name, steps):
    arm = Arm.parse(name)
    config = TrainConfig.model_validate(arm.train({"warmup_steps": 50}, steps))
    assert (config.max_steps, config.optimizer) == (steps, name.split("-")[0])
    assert arm.share == (0.5 if "@" in name else 1)


@pytest.mark.parametrize("name", ["adam", "sgd-cosine", "adam-linear", "adam-cosine-none-more", "adam-cosine:clip"])
def test_an_unknown_arm_is_refused(name):
    with pytest.raises(UserError, match=f"no arm '{name}'; wanted such as"):
        Arm.parse(name)


def run_script(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = (sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:])
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def test_training_is_measured_and_drawn(tmp_path):
    small = (
        "--n-layers 1 --d-model 16 --n-heads 2 --d-head 8 --d-ff 16 --segment-length 8 --memory-length 8 --batch-size 2"
    )
    words = [*small.split(), "--rounds", "2", "--threads", "1", "--implementations", "ours-float32"]
    ended = run_script("training.py", *words, "--out", str(tmp_path / "training.json"))
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "training.json").read_text())
    ours = results["implementations"]["ours-float32"]
    assert ours["parameters"] > 204 * 16
    assert ours["peak_resident_bytes"] > ours["peak_resident_bytes_beyond_libraries"] > 0
    assert 4 < ours["losses"][-1] < math.log(204) + 0.5
    picture = chart.training_chart(results)
    assert [axes.get_xlabel() for axes in picture.axes] == [
        "tokens a second (line: range of the rounds)",
        "peak resident memory, GiB",
    ]
    assert f"{ours['median_tokens_per_second']:,.0f}" in chart.training_table(results)


def test_the_run_for_a_gpu_goes_through_its_parts(tmp_path):
    out = tmp_path / "gpu.json"
    ended = run_script(
        "gpu.py", "--device", "cpu", "--quick", "--parts", "correctness,kernels,training", "--out", str(out)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(out.read_text())
    assert all(line["ok"] for line in results["correctness"]["lines"])
    assert {line["recipe"] for line in results["training"]["lines"]} == set(gpu.RECIPES)
    assert all(line["tokens_per_second"] > 0 for line in results["training"]["lines"])
    assert "enwik8-24l" in chart.gpu_table(results)


def test_the_run_for_a_gpu_needs_one():
    ended = run_script("gpu.py")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("no CUDA device here")


def sizes(**more) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", quick=True, until=time.monotonic() + 60, peak_tflops=None, **more)


def test_the_run_for_a_gpu_stops_where_a_kernel_is_wrong(monkeypatch, capsys):
    spoil(monkeypatch, "sdpa", without_position_bias)
    monkeypatch.setattr(gpu, "compiled", lambda recipe, sizes: [])
    results, status = gpu.run(sizes(parts=["correctness", "kernels"]))
    assert status == 1
    assert "kernels" not in results
    assert "WRONG sdpa     B 2, T 37, M 23, 2 x 41, float32: position_" in capsys.readouterr().out


def test_a_part_that_fails_leaves_the_others(monkeypatch):
    def fail(_):
        raise ValueError("no")

    monkeypatch.setitem(gpu.PARTS, "kernels", fail)
    monkeypatch.setitem(gpu.PARTS, "training", lambda _: [{"recipe": "one"}])
    results, status = gpu.run(sizes(parts=["kernels", "training"]))
    assert status == 1
    assert "ValueError: no" in results["kernels"]["lines"][0]["failed"]
    assert results["training"]["lines"] == [{"recipe": "one"}]


def test_tables_stand_between_their_marks():
    text = "before\n<!-- gpu: written by benchmarks/chart.py -->\nold\n<!-- end of gpu -->\nafter\n"
    once = chart.with_table(text, "gpu", r"new \1")
    assert once == text.replace("old", r"new \1")
    assert chart.with_table(once, "gpu", "old") == text
    with pytest.raises(AssertionError, match="the marks of kernels are not in the document once"):
        chart.with_table(text, "kernels", "")


def test_the_page_on_speed_has_a_place_for_every_table():
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for name in chart.DRAWN:
        chart.with_table(text, name, "")
