"""Learning rates and random segment lengths, compared with values computed by hand.

The schedules `cosine` and `linear` decay from the end of the warm-up to the last step, `wsd` (warm-up, stable, decay)
only in the last `decay_steps` steps.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.training.schedules import (
    learning_rate,
    random_length,
    set_step_rates,
)

COSINE = TrainConfig(max_steps=20, warmup_steps=4, learning_rate=2.0)
WSD = TrainConfig(
    max_steps=20, warmup_steps=2, learning_rate=2.0, lr_schedule="wsd", decay_steps=4, min_learning_rate_ratio=0.25
)

AVERAGED = {"weight_average": "uniform", "average_start_step": 20, "average_learning_rate": 0.5}


@pytest.mark.parametrize(
    ("config", "rates"),  # rates: the learning rate by step
    [
        # linear warm-up: the last of its steps has the peak; then the cosine: cos 0, pi / 4, pi / 2, 3 pi / 4, pi
        (COSINE, {0: 0.5, 1: 1, 2: 1.5, 3: 2, 4: 2, 8: 1 + 0.5**0.5, 12: 1, 16: 1 - 0.5**0.5, 20: 0}),
        (COSINE.model_copy(update={"min_learning_rate_ratio": 0.1}), {4: 2, 12: 1.1, 20: 0.2}),
        (COSINE.model_copy(update={"warmup_steps": 0}), {0: 2, 5: 1 + 0.5**0.5, 10: 1, 15: 1 - 0.5**0.5}),
        (COSINE.model_copy(update={"lr_schedule": "linear"}), {1: 1, 3: 2, 4: 2, 8: 1.5, 12: 1, 20: 0}),
        # the warm-up is as long as training, or longer
        (COSINE.model_copy(update={"warmup_steps": 20}), {0: 0.1, 1: 0.2, 19: 2}),
        (COSINE.model_copy(update={"warmup_steps": 40}), {0: 0.05, 1: 0.1, 19: 1}),
        # warm-up, constant, and linear from step 16 to a quarter of the peak
        (WSD, {0: 1, 1: 2, 2: 2, 15: 2, 16: 2, 17: 1.625, 18: 1.25, 19: 0.875, 20: 0.5}),
        (WSD.model_copy(update={"decay_steps": 0}), dict.fromkeys(range(2, 20), 2)),
        (WSD.model_copy(update={"max_steps": 40}), {15: 2, 16: 2, 35: 2, 36: 2, 37: 1.625}),
        # the schedules end where averaging with a rate of its own begins
        (COSINE.model_copy(update={**AVERAGED, "max_steps": 30}), {4: 2, 12: 1, 16: 1 - 0.5**0.5, 20: 0.5, 29: 0.5}),
        (WSD.model_copy(update={**AVERAGED, "max_steps": 30}), {16: 2, 17: 1.625, 19: 0.875, 20: 0.5, 29: 0.5}),
        (COSINE.model_copy(update={**AVERAGED, "weight_average": "none"}), {12: 1, 16: 1 - 0.5**0.5, 20: 0}),
    ],
)
def test_learning_rate(config: TrainConfig, rates: dict[int, float]) -> None:
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(rates, abs=1e-12)


def test_random_lengths_have_the_distribution_of_awd_lstm() -> None:
    """Of 20,000 steps: 95% with mean 70, 5% with mean 35, standard deviation 5, rounded down."""
    config = TrainConfig(segment_length=70, memory_length=0, random_segment_lengths=True)
    lengths = np.array([random_length(step, config) for step in range(20_000)])
    is_long = lengths > 52
    assert abs(is_long.mean() - 0.95) < 0.005
    for chosen, mean in ((lengths[is_long], 69.5), (lengths[~is_long], 34.5)):
        assert abs(chosen.mean() - mean) < 5 * 5 / len(chosen) ** 0.5
        assert abs(chosen.std() - 5) < 0.5
    # no draw depends on the one before it
    assert abs(np.corrcoef(lengths[is_long][:-1], lengths[is_long][1:])[0, 1]) < 0.03
    assert [random_length(step, config) for step in (7, 3)] == [lengths[7], lengths[3]]
    assert random_length(7, config.model_copy(update={"seed": 2})) != lengths[7]
    short = config.model_copy(update={"segment_length": 4})
    assert min(random_length(step, short) for step in range(100)) == 5


def test_embedding_has_twice_the_peak_and_the_same_end() -> None:
    """As in the authors' code for Penn Treebank: both rates end at the minimum, and are equal while weights are
    averaged."""
    config = COSINE.model_copy(update={**AVERAGED, "max_steps": 30, "min_learning_rate_ratio": 0.25})
    config = config.model_copy(update={"embedding_learning_rate_ratio": 2.0, "average_start_step": 20})
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "is_embedding": True}, {"params": weights[1:], "rate_factor": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for step, scale, embedding, other in ((0, 1, 1, 0.5), (4, 0.5, 2, 1), (12, 1, 2.25, 1.25), (20, 1, 0.5, 0.5)):
        set_step_rates((optimizer,), step, config, scale)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([embedding, 0.5 * other])
    set_step_rates((optimizer,), 19, config)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5, abs=0.04)
