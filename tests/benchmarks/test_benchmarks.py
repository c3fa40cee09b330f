"""The benchmarks' checks find wrong kernels, and training.py and gpu.py run.

Shape suffixes: B batch size, T queries or new tokens, S keys, P distances, N heads, H head width, A all tokens of a
batch row.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import shutil
import time
from dataclasses import replace
from pathlib import Path

import attention_cases
import chart
import golden
import gpu
import inference
import prices
import pytest
import torch
import training
from attention_cases import Shape, check, check_deterministic, check_dropout, draw

from transformer_xl.ops.kernels import KERNELS
from transformer_xl.ops.kernels.reference import AttentionInputs, attention_terms

ROOT = Path(__file__).parents[2]
# batch size, queries, memory slots, heads, head width
SHAPE = Shape(2, 7, 5, 3, 11, attention_window=4)
DROPOUT_SHAPE = Shape(2, 32, 32, 2, 16, dropout=0.3)


def replace_kernel(monkeypatch: pytest.MonkeyPatch, name: str, wrong) -> None:
    """Register a kernel of that name that calls `wrong` with the reference kernel's function and the arguments."""

    def attend(inputs, mask, dropout):
        return wrong(KERNELS["reference"].attend, inputs, mask, dropout)

    monkeypatch.setitem(KERNELS, name, replace(KERNELS["reference"], name=name, attend=attend))


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, attention_window=None), replace(SHAPE, memory_length=0, attention_window=100)]
)
def test_pairs_are_the_visible_keys_of_all_queries(shape):
    inputs, mask = draw(shape)
    assert shape.pairs == int((attention_terms(inputs, mask).probabilities_BNTS[0, 0] > 0).sum())
    # a multiplication and an addition for each pair in content scores, position scores and weighted values
    assert shape.forward_flops == 6 * shape.batch_size * shape.n_heads * shape.d_head * shape.pairs


def without_position_bias(attend, inputs, mask, dropout):
    return attend(replace(inputs, position_bias_NH=torch.zeros_like(inputs.position_bias_NH)), mask, dropout)


def without_gradient_of_keys(attend, inputs, mask, dropout):
    return attend(replace(inputs, k_BSNH=inputs.k_BSNH.detach()), mask, dropout)


def with_nan(attend, inputs, mask, dropout):
    return attend(inputs, mask, dropout) * math.nan


@pytest.mark.parametrize("wrong", [without_position_bias, without_gradient_of_keys, with_nan])
def test_wrong_kernels_are_found(monkeypatch, wrong):
    replace_kernel(monkeypatch, "wrong", wrong)
    assert not check("wrong", SHAPE)["ok"]


def without_scaling(attend, inputs, mask, dropout):
    return attend(inputs, mask, dropout) * (1 - dropout)


def with_another_seed(attend, inputs, mask, dropout):
    torch.manual_seed(time.perf_counter_ns())
    return attend(inputs, mask, dropout)


def without_dropout(attend, inputs, mask, dropout):
    return attend(inputs, mask, 0.0)


class _OtherDropoutMask(torch.autograd.Function):
    """Attention whose backward pass draws a new dropout mask, with another seed than the forward pass."""

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


def with_another_dropout_mask_in_backward(attend, inputs, mask, dropout):
    return _OtherDropoutMask.apply(*inputs.tensors())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (without_scaling, "sum to about one"),
        (with_another_seed, "same seed"),
        (without_dropout, "another seed"),
        (with_another_dropout_mask_in_backward, "gradient of values"),
    ],
)
def test_wrong_dropout_is_found(monkeypatch, wrong, message):
    """`message` is part of the description of the property that the wrong kernel lacks."""
    replace_kernel(monkeypatch, "wrong", wrong)
    lines = check_dropout("wrong", DROPOUT_SHAPE)
    assert any(message in line["what"] for line in lines if not line["ok"])


def with_random_gradient_of_position_keys(attend, inputs, mask, dropout):
    r_PNH = inputs.position_key_PNH
    return attend(replace(inputs, position_key_PNH=r_PNH + (r_PNH - r_PNH.detach()) * torch.rand(())), mask, dropout)


def test_nondeterministic_kernels_are_found(monkeypatch):
    replace_kernel(monkeypatch, "wrong", with_random_gradient_of_position_keys)
    assert check_deterministic("sdpa", SHAPE)["ok"]
    assert not check_deterministic("wrong", SHAPE)["ok"]


def run_main(monkeypatch: pytest.MonkeyPatch, main, words: str) -> None:
    """Run a benchmark's main function with the words, which are separated by spaces, as its command line."""
    monkeypatch.setattr("sys.argv", words.split())
    main()


def test_training_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # of the process that trains
    sizes = "--n-layers 1 --d-model 16 --n-heads 2 --d-head 8 --d-ff 16 --segment-length 8 --memory-length 8"
    options = "--batch-size 2 --rounds 2 --threads 1 --implementations ours-float32"
    run_main(monkeypatch, training.main, f"training.py {sizes} {options} --out {tmp_path / 'training.json'}")
    results = json.loads((tmp_path / "training.json").read_text())
    ours = results["implementations"]["ours-float32"]
    assert ours["parameters"] > 204 * 16  # those of the embedding: vocabulary size times d_model
    assert ours["peak_resident_bytes"] > ours["peak_resident_bytes_beyond_libraries"] > 0
    # an untrained model has a loss of about log(204) = 5.3
    assert 4 < ours["losses"][-1] < math.log(204) + 0.5
    speed, memory = chart.training_chart(results).axes
    assert "tokens per second" in speed.get_xlabel()
    assert "GiB" in memory.get_xlabel()
    assert f"{ours['median_tokens_per_second']:,.0f}" in chart.training_table(results)


def test_inference_is_measured_and_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    sizes = "--n-layers 1 --d-model 16 --n-heads 2 --d-head 8 --d-ff 16 --memory-length 8 --clamp-length 4"
    options = "--rounds 1 --threads 1 --implementations ours-float32,ours-float32+hidden,ours-float32+int8"
    out = tmp_path / "inference.json"
    run_main(monkeypatch, inference.main, f"inference.py {sizes} {options} --out {out}")
    results = json.loads(out.read_text())
    for job in ("scoring", "generation"):
        assert all(ours["parameters"] > 204 * 16 for ours in results["jobs"][job]["implementations"].values())
    assert "this package, float32, int8 weights" in chart.inference_table(results)


def test_gpu_runs_all_parts(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    words = f"gpu.py --device cpu --quick --parts correctness,kernels,training --out {out}"
    with pytest.raises(SystemExit) as ended:
        run_main(monkeypatch, gpu.main, words)
    assert ended.value.code == 0
    results = json.loads(out.read_text())
    assert all(line["ok"] for line in results["correctness"]["lines"])
    assert {line["recipe"] for line in results["training"]["lines"]} == set(gpu.RECIPES)
    assert all(line["tokens_per_second"] > 0 for line in results["training"]["lines"])
    assert "enwik8-24l" in chart.gpu_table(results)


def gpu_arguments(*parts: str) -> argparse.Namespace:
    """Return what gpu.py parses from its command line; it starts no new measurement after the time `until`."""
    until = time.monotonic() + 60
    return argparse.Namespace(device="cpu", quick=True, until=until, peak_tflops=None, parts=parts)


def test_gpu_stops_after_a_wrong_kernel(monkeypatch, capsys):
    replace_kernel(monkeypatch, "sdpa", without_position_bias)
    # it trains models and compares their losses with those of the reference kernel; this test needs only kernel checks
    monkeypatch.setattr(gpu, "compiled", lambda recipe, args: [])
    results, status = gpu.run(gpu_arguments("correctness", "kernels"))
    assert status == 1
    assert "kernels" not in results
    # the first shape that --quick checks
    assert "WRONG sdpa     B 2, T 37, M 23, 2 x 41, float32: position_" in capsys.readouterr().out


def test_tables_are_replaced_between_their_comments():
    text = "before\n<!-- gpu: written by benchmarks/chart.py -->\nold\n<!-- end of gpu -->\nafter\n"
    once = chart.with_table(text, "gpu", r"new \1")
    assert once == text.replace("old", r"new \1")
    assert chart.with_table(once, "gpu", "old") == text
    with pytest.raises(AssertionError, match="comments of kernels exactly once"):
        chart.with_table(text, "kernels", "")


def test_documents_are_as_the_results_say(tmp_path, monkeypatch):
    for name in ("speed", "equal-time", "serving"):
        shutil.copy(ROOT / "docs" / f"{name}.md", tmp_path)
    run_main(monkeypatch, chart.main, f"chart.py --docs {tmp_path}")
    for document in tmp_path.glob("*.md"):
        assert document.read_text() == (ROOT / "docs" / document.name).read_text(), document.name


@pytest.mark.parametrize(
    ("program", "flag", "wanted"),
    [
        ("backbone", "--sizes=huge", "'huge' is none of small, medium"),
        ("conformer", "--audio=10,0", "'0' is no integer of at least 1"),
        ("conformer", "--max-seconds=nan", "'nan' is no number above 0"),
        ("conformer", "--models=rnn", "'rnn' is none of"),
        ("finetuning", "--seconds=60,x", "'x' is no number above 0"),
        ("finetuning", "--seeds=-1", "'-1' is no integer of at least 0"),
        ("gpu", "--parts=none", "'none' is none of"),
        ("inference", "--jobs=rest", "'rest' is none of"),
        ("kernels", "--lengths=64,,128", "'' is no integer of at least 1"),
        ("kernels", "--dtypes=int8", "'int8' is none of"),
        ("serving", "--clients=a", "'a' is no integer of at least 1"),
        ("speculative", "--dtypes=float64", "'float64' is none of"),
    ],
)
def test_bad_arguments_are_refused(program: str, flag: str, wanted: str, monkeypatch, capsys) -> None:
    """Before anything is loaded or measured."""
    monkeypatch.setattr("sys.argv", [f"{program}.py", flag])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "benchmarks" / f"{program}.py"), run_name="__main__")
    assert wanted in capsys.readouterr().err


def test_golden_numbers_that_differ_in_one_bit_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    entries = {"train/losses": [1.5, 2.5], "train/text": "ab", "evaluate/nats": 3.0}
    assert golden.compare(entries, dict(entries), "") == 0
    for name, value in (("train/losses", [1.5, math.nextafter(2.5, 3)]), ("train/text", "ac")):
        assert golden.compare(entries, {**entries, name: value}, "") == 1
    assert golden.compare(entries, {}, "") == 3


def test_the_page_of_prices_has_what_the_results_say() -> None:
    assert prices.table() in (ROOT / "docs" / "paper-runs.md").read_text()
