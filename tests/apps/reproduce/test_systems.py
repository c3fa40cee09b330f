"""The paper's systems differ from the base settings only in what defines them, such as architecture and recurrence.

Systems are the models that the paper's tables compare; `systems.py` explains their names.
"""

from functools import cache

import pytest

from transformer_xl.apps.reproduce.systems import ABLATION, BY_NAME, EQUAL_MEMORY, RECURRENT, _largest, num_parameters
from transformer_xl.config import merge, run_settings
from transformer_xl.training.cost import step_cost

# the settings that all systems share
BASE = {
    "model": {"n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 64, "dropout": 0.0},
    "train": {"segment_length": 12, "memory_length": 12, "batch_size": 4, "max_steps": 7},
    "evaluation": {"segment_length": 5},
}


def config_of(name, base=BASE):
    settings = BY_NAME[name].settings(base, vocab_size=50)
    return run_settings(merge(settings, {"model": {"vocab_size": 50}}), name)


cached_config = cache(config_of)  # deriving the settings of some systems takes seconds


@pytest.mark.parametrize("system", [*ABLATION, *EQUAL_MEMORY, *RECURRENT], ids=lambda system: system.name)
def test_other_settings_are_those_of_the_base(system):
    config = cached_config(system.name)
    assert config.train.loss == system.loss
    assert config.train.memory_length == (12 if system.recurrence else 0)
    assert config.train.batch_size == 4
    assert config.train.max_steps == (round(7 * 12 / config.train.segment_length) if system.equal_memory else 7)
    # a larger system has a quarter more layers than the base, at least one more
    assert config.model.n_layers == (2 if system.larger else 1)
    assert config.model.architecture == system.architecture
    # recurrent models (which do not attend) have the width that gives them as many parameters
    assert config.model.d_model == 32 or not system.attends
    assert config.train.segment_length == 12 or system.equal_memory


@pytest.mark.parametrize("name", ["relative-full-longer", "relative-half-longer"])
def test_segment_is_the_longest_that_fits_into_the_same_memory(name):
    def needed_bytes(config, segment_length):
        lengths = {"segment_length": segment_length, "memory_length": config.train.memory_length}
        return step_cost(config.model, batch_size=4, **lengths).bytes

    longer = cached_config(name)
    # bytes of device memory that a training step needs
    budget, length = needed_bytes(cached_config("xl-full"), 12), longer.train.segment_length
    assert length > 12
    assert needed_bytes(longer, length) <= budget < needed_bytes(longer, length + 1)


@pytest.mark.parametrize("name", ["lstm", "qrnn"])
def test_recurrent_models_have_as_many_parameters_as_the_transformer(name):
    expected, config = num_parameters(cached_config("xl-full")), cached_config(name)

    def difference(width):
        model = config.model.model_copy(update={"d_model": width})
        return abs(num_parameters(config.model_copy(update={"model": model})) - expected)

    width = config.model.d_model
    assert width % 8 == 0
    assert difference(width) <= min(difference(width - 8), difference(width + 8))


def test_settings_that_a_system_does_not_have_are_left_out():
    model = {"tie_attention_biases": False, "clamp_length": 9, "norm_first": True, "attention_dropout": 0.1}
    base = merge(BASE, {"model": model, "evaluation": {"memory_length": 40, "clamp_length": 9}})
    assert config_of("xl-full", base).evaluation.memory_length == 40
    assert config_of("shaw-full", base).model.clamp_length == 9
    assert config_of("learned-half", base).evaluation.memory_length is None
    assert "attention_dropout" not in config_of("lstm", base).model.model_dump()


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 100])
def test_largest_number_that_fits(most: int) -> None:
    assert _largest(lambda number: number <= most) == most
    assert _largest(lambda number: False) == 1
