"""The measurement of evaluation speed runs the models and the attention kernels that it reports."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.apps.analyze.analysis_config import SpeedComparison
from transformer_xl.apps.analyze.evaluation_speed import SpeedMeasurement, flops_ratio
from transformer_xl.config import TransformerXLConfig
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL

SMALL = TransformerXLConfig(vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_head=5, d_ff=19)


@pytest.mark.parametrize("clamp", [None, 4])
def test_flops_ratio_equals_counted_flops(clamp):
    """torch's FLOP counter counts one token with a full memory of 8; it counts two FLOPs for each multiplication."""
    window = 9
    model = prepare_inference(TransformerXL(SMALL.model_copy(update={"attn_implementation": "sdpa"})).eval())
    tokens = torch.zeros(1, window, dtype=torch.int64)
    with torch.inference_mode():
        # memory length, attention window, clamp length
        _, memory = model(tokens, model.initial_memory(1, ContextLimits(8, window, clamp)))
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, :1], memory)
    n_layers, d_model, inner, d_ff = 2, 14, 2 * 5, 19
    linear, attention = window * (4 * d_model * inner + 2 * d_model * d_ff), window * (window + 1) * inner
    expected = n_layers * (linear + attention) / (counter.get_total_flops() / 2)
    assert flops_ratio(SMALL, window, clamp) == pytest.approx(expected)


def test_both_models_are_timed_in_turns(capsys):
    comparison = SpeedComparison(attention_windows=(5, 7), segment_lengths=(2, 3), repeats=2, dtype="float32")
    measurement = SpeedMeasurement(SMALL, comparison, None, torch.device("cpu"))
    # vanilla: 7 position embeddings in each layer; memory: r_proj in each layer, and one pair of attention biases
    difference = measurement.num_vanilla_parameters - measurement.num_parameters
    assert difference == 2 * 14 * 7 - (2 * 14 * 10 + 2 * 2 * 5)
    for window in (5, 7):
        row = measurement.measure(window)
        assert row["attention_window"] == window
        assert row["segment_length"] in (2, 3)
        assert row["factor_fused"] == pytest.approx(row["vanilla_fused_seconds"] / row["memory_seconds"])
        assert row["factor_stored"] == pytest.approx(row["vanilla_stored_seconds"] / row["memory_seconds"])
        assert row["paper"] is None
    assert capsys.readouterr().err.count("repeat") == 4  # two windows with two repeats


def test_vanilla_model_runs_both_attention_kernels():
    comparison = SpeedComparison(attention_windows=(6,), dtype="float32")
    measurement = SpeedMeasurement(SMALL, comparison, None, torch.device("cpu"))
    kernels = {}  # names of the operators that torch called
    for predict in (measurement.predict_window, measurement.predict_window_stored):
        with torch.inference_mode(), torch.profiler.profile() as profile:
            predict(torch.zeros(1, 6, dtype=torch.int64))
        kernels[predict.__name__] = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in kernels["predict_window"]
    assert "aten::_scaled_dot_product_attention_math" in kernels["predict_window_stored"]
