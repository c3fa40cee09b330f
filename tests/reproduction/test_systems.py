"""The paper's systems differ from a base in what they are about, and in nothing else."""

from functools import cache, partial

import pytest

from transformer_xl.config import UserError, merge, run_settings
from transformer_xl.model.cost import step_cost
from transformer_xl.reproduction import systems
from transformer_xl.reproduction.systems import ABLATION, BY_NAME, EQUAL_MEMORY, RECURRENT, num_parameters

BASE = {
    "model": {"n_layers": 3, "d_model": 32, "n_heads": 2, "d_ff": 64, "dropout": 0.0},
    "train": {"segment_length": 12, "memory_length": 12, "batch_size": 4, "max_steps": 7},
    "evaluation": {"segment_length": 5},
}


def made_of(base, name):
    settings = BY_NAME[name].settings(base, 50)
    return run_settings(merge(settings, {"model": {"vocab_size": 50}}), name)


made = cache(partial(made_of, BASE))  # to find the longest segment takes seconds


def test_the_rows_are_the_papers():
    told = [(system.recurrence, system.architecture, system.loss) for system in ABLATION]
    assert told == [
        (True, "transformer-xl", "full"),
        (True, "shaw", "full"),
        (True, "transformer-xl", "half"),
        (False, "transformer-xl", "full"),
        (False, "transformer-xl", "half"),
        (False, "shaw", "full"),
        (False, "shaw", "half"),
        (False, "vaswani", "half"),
        (False, "al-rfou", "half"),
        (True, "transformer-xl", "full"),
    ]
    best = [system.published.best for system in ABLATION]
    assert best == [26.77, 27.94, 28.33, 29.02, 30.10, 29.75, 30.50, 30.97, 31.16, 23.09]


@pytest.mark.parametrize("system", [*ABLATION, *EQUAL_MEMORY, *RECURRENT], ids=lambda system: system.name)
def test_a_system_is_what_it_says_and_the_rest_is_the_base(system):
    config = made(system.name)
    assert config.train.loss == system.loss
    assert config.train.memory_length == (12 if system.recurrence else 0)
    assert config.train.batch_size == 4
    assert config.train.max_steps == (round(7 * 12 / config.train.segment_length) if system.equal_memory else 7)
    assert config.model.n_layers == (4 if system.larger else 3)
    assert config.model.architecture == system.architecture
    if system.attends:
        assert config.model.d_model == 32
    if not system.equal_memory:
        assert config.train.segment_length == 12


@pytest.mark.parametrize("name", ["relative-full-longer", "relative-half-longer"])
def test_no_longer_segment_would_fit_into_the_same_memory(name):
    def needed(config, segment):
        return step_cost(
            config.model, batch_size=4, segment_length=segment, memory_length=config.train.memory_length
        ).bytes

    with_recurrence, longer = made("xl-full"), made(name)
    budget = needed(with_recurrence, 12)
    assert longer.train.segment_length > 12
    assert needed(longer, longer.train.segment_length) <= budget < needed(longer, longer.train.segment_length + 1)


@pytest.mark.parametrize("name", ["lstm", "qrnn"])
def test_recurrent_models_are_as_large_as_the_transformer(name):
    wanted, config = num_parameters(made("xl-full")), made(name)

    def apart(width):
        model = config.model.model_copy(update={"d_model": width})
        return abs(num_parameters(config.model_copy(update={"model": model})) - wanted)

    width = config.model.d_model
    assert width % 8 == 0
    assert apart(width) <= min(apart(width - 8), apart(width + 8))


def test_settings_that_a_system_does_not_have_are_left_out():
    odd = {
        "model": {"tie_attention_biases": False, "clamp_length": 9, "norm_first": True, "attention_dropout": 0.1},
        "evaluation": {"memory_length": 40, "clamp_length": 9},
    }
    base = merge(BASE, odd)
    assert made_of(base, "xl-full").evaluation.memory_length == 40
    assert made_of(base, "shaw-full").model.clamp_length == 9
    assert made_of(base, "learned-half").evaluation.memory_length is None
    assert "attention_dropout" not in made_of(base, "lstm").model.model_dump()


def test_what_cannot_be_is_told():
    with pytest.raises(UserError, match=r"model\.d_model: Input should be a multiple of 2"):
        BY_NAME["xl-full"].settings(merge(BASE, {"model": {"d_model": 31}}), 50)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 100])
def test_the_largest_number_that_fits(most):
    assert systems._largest(lambda number: number <= most) == most
