"""The one place that chooses a model, and settings that make no sense for it."""

import pytest
from model_configs import model_config

from transformer_xl.config import UserError, run_settings
from transformer_xl.model.baselines.absolute import AbsoluteTransformer
from transformer_xl.model.baselines.recurrent import RecurrentModel
from transformer_xl.model.baselines.shaw import ShawTransformer
from transformer_xl.model.build import build_model
from transformer_xl.model.transformer_xl import TransformerXL

SMALL = {"d_model": 14, "n_heads": 2, "n_layers": 1, "d_ff": 19}
SHAW = {"architecture": "shaw", "max_relative_positions": 3}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, TransformerXL),
        (SHAW, ShawTransformer),
        ({"architecture": "vaswani"}, AbsoluteTransformer),
        ({"architecture": "al-rfou", "max_position_embeddings": 3}, AbsoluteTransformer),
        ({"architecture": "lstm"}, RecurrentModel),
        ({"architecture": "qrnn"}, RecurrentModel),
    ],
)
def test_settings_choose_the_model(settings, kind):
    model = build_model(model_config(**SMALL, **settings))
    assert type(model) is kind
    assert model.config.memory == (0 if kind is AbsoluteTransformer else 128)


@pytest.mark.parametrize("settings", [{"architecture": "vaswani"}, {"architecture": "lstm"}, SHAW])
def test_transformer_xl_by_itself_is_no_other_model(settings):
    """It would be built with relative attention, whatever was asked for."""
    with pytest.raises(UserError, match=r"TransformerXL is not (encoding (sinusoidal|shaw)|lstm); use build_model"):
        TransformerXL(model_config(**SMALL, **settings))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            {"architecture": "lstm", "architecture": "shaw"},
            "encoding shaw needs kind transformer, and this is kind lstm",
        ),
        ({"architecture": "lstm", "attention_dropout": 0.1}, "attention_dropout 0.1 needs kind transformer"),
        (
            {"architecture": "qrnn", "norm_first": True},
            "norm pre needs kind transformer, and this is kind qrnn; leave it out",
        ),
        ({"architecture": "lstm", "qrnn_kernel_size": 1}, "qrnn_window 1 needs kind qrnn, and this is kind lstm"),
        ({"zoneout": 0.1}, "zoneout 0.1 needs kind qrnn, and this is encoding relative"),
        ({"architecture": "lstm", "window": 3}, "kind lstm does not attend, and window 3 was given; give window none"),
        (
            {"architecture": "qrnn", "clamp_length": 3},
            "kind qrnn does not attend, and clamp 3 was given; give clamp none",
        ),
        ({"architecture": "al-rfou", "clamp_length": 3}, "encoding learned knows no distances to clamp, and clamp 3"),
        ({"architecture": "vaswani", "attend_empty_memory": True}, "needs encoding relative or shaw"),
        ({"architecture": "shaw", "tie_attention_biases": False}, "tie_position_biases False needs encoding relative"),
        ({"architecture": "vaswani", "kernel": "cpu"}, "kernel cpu needs encoding relative or shaw"),
        ({"architecture": "vaswani", "learned_positions": 3}, "learned_positions 3 needs encoding shaw or learned"),
        ({"num_targets": 2}, "second_target True needs encoding sinusoidal or learned"),
        ({"architecture": "vaswani", "intermediate_layer_losses": True, "cutoffs": (5,)}, "need one softmax"),
    ],
)
def test_a_setting_of_another_kind_is_refused(model, text):
    with pytest.raises(UserError, match=text):
        run_settings({"model": model}, "settings")


@pytest.mark.parametrize(
    ("model", "others", "text"),
    [
        (
            {"architecture": "vaswani"},
            {"train": {"memory_length": 7}},
            "encoding sinusoidal has no memory, and memory 7 was",
        ),
        (
            {"architecture": "al-rfou"},
            {"evaluation": {"memory_length": 7}},
            "encoding learned has no memory, and memory 7 was",
        ),
        (
            {"architecture": "al-rfou"},
            {"evaluation": {"segment_length": 129}},
            "segment 129 is longer than the 128 learned",
        ),
        ({"architecture": "al-rfou", "max_position_embeddings": 64}, {}, "segment 128 is longer than the 64 learned"),
        (
            {"architecture": "shaw", "max_relative_positions": 300},
            {},
            "learned_positions 300 are more than training goes thr",
        ),
        (
            {"architecture": "lstm"},
            {"evaluation": {"attention_window": 7}},
            "kind lstm does not attend, and window 7 was given",
        ),
        ({"architecture": "qrnn"}, {"train": {"compile": "layers"}}, "train.compile layers is for transformers"),
    ],
)
def test_a_length_that_the_model_has_not_is_refused(model, others, text):
    with pytest.raises(UserError, match=text):
        run_settings({"model": model, **others}, "settings")


def test_learned_positions_are_those_that_training_goes_through():
    """None would otherwise be trained, yet used where evaluation looks further."""
    shaw = run_settings(
        {"model": {"architecture": "shaw"}, "train": {"segment_length": 7, "memory_length": 11}}, "settings"
    )
    assert shaw.model.learned_positions == 18
    learned = run_settings({"model": {"architecture": "al-rfou"}, "train": {"segment_length": 7}}, "settings")
    assert (learned.model.learned_positions, learned.train.memory_length, learned.model.memory) == (7, 0, 0)
    assert run_settings(learned.model_dump(), "settings") == learned
    assert run_settings(shaw.model_dump(), "settings") == shaw
