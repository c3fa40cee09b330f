"""The measurement of evaluation speed compares what it says it compares."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.analysis.evaluation_speed import PAPER, SpeedComparison, SpeedMeasurement, arithmetic_limit
from transformer_xl.config import TransformerXLConfig, UserError, load_recipe
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.transformer_xl import TransformerXL

SMALL = TransformerXLConfig(vocab_size=23, n_layers=2, d_model=14, n_heads=2, d_head=5, d_ff=19)


def test_limit_at_the_paper_s_size():
    """As arithmetic without a clamp allows: about 700, 1,390, 1,960 and 2,470."""
    config = TransformerXLConfig.model_validate(load_recipe("enwik8-24l").model)
    limits = [arithmetic_limit(config, length, None) for length in PAPER]
    assert [round(limit, -1) for limit in limits] == [700, 1390, 1960, 2470]
    assert arithmetic_limit(config, 3800, 1000) > limits[-1]


@pytest.mark.parametrize("clamp", [None, 4])
def test_limit_counts_what_is_multiplied(clamp):
    """Of a token beside a full memory: what torch counts in a step, all keys at their own distance in it."""
    length = 9
    model = TransformerXL(SMALL.model_copy(update={"attn_implementation": "sdpa"})).eval()
    with torch.inference_mode():
        _, memory = model(
            torch.zeros(1, length, dtype=torch.int64), model.inference_memory(1, ContextLimits(8, 9, clamp))
        )
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 1, dtype=torch.int64), memory)
    inner, layers = 10, 2
    window = layers * (length * (4 * 14 * inner + 2 * 14 * 19) + length * (length + 1) * inner)
    assert arithmetic_limit(SMALL, length, clamp) == pytest.approx(window / (counter.get_total_flops() / 2))


def test_both_models_have_the_same_sizes_and_take_turns():
    comparison = SpeedComparison((5, 7), (2, 3), repeats=2, dtype="float32")
    measurement = SpeedMeasurement(SMALL, comparison, torch.device("cpu"))
    memory, vanilla = measurement.num_parameters

    # a learned vector for each position on one side; position keys and one pair of biases on the other
    assert vanilla - memory == 2 * 14 * 7 - (2 * 14 * 10 + 2 * 2 * 5)
    told = []
    rows = list(measurement.rows(told.append))
    assert len(told) == 4
    assert [row.attention_window for row in rows] == [5, 7]
    for row in rows:
        assert row.segment_length in (2, 3)
        assert row.factor_fused == pytest.approx(row.vanilla_fused_seconds / row.memory_seconds)
        assert row.factor_stored == pytest.approx(row.vanilla_stored_seconds / row.memory_seconds)
        assert row.paper is None


def test_stored_really_stores_and_fused_really_is(monkeypatch):
    comparison = SpeedComparison((6,), dtype="float32")
    measurement = SpeedMeasurement(SMALL, comparison, torch.device("cpu"))
    text = torch.zeros(1, 6, dtype=torch.int64)
    used = {}
    for name, work in (("fused", measurement._predict_window), ("stored", measurement._predict_window_stored)):
        with torch.inference_mode(), torch.profiler.profile() as profile:
            work(text)
        used[name] = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in used["fused"]
    assert "aten::_scaled_dot_product_attention_math" in used["stored"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_windows": ()}, "attention_windows .none.: wanted 1 or more"),
        ({"attention_windows": (5, 0)}, "attention_windows 5,0: wanted 1 or more"),
        ({"repeats": 0}, "repeats 0"),
        ({"segment_lengths": (0,)}, "segment_lengths 0"),
        ({"clamp_length": 0}, "clamp_length 0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SpeedComparison(**settings)
