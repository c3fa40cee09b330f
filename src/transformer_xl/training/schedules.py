"""Schedules of the learning rate, and random segment lengths.

Both depend only on the step and the settings, so a resumed run needs no additional state.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch

from transformer_xl.config import TrainConfig

# random segment lengths as in AWD-LSTM (Merity et al. 2017)
_HALF_LENGTH_PROBABILITY, _LENGTH_STD, _MIN_LENGTH = 0.05, 5, 5


def learning_rate(step: int, config: TrainConfig, *, peak_ratio: float = 1.0) -> float:
    """Return the learning rate of a step: linear from 0 over `warmup_steps`, then according to `lr_schedule`.

    `cosine` and `linear` decay right after the warm-up, and would reach the minimum at step `max_steps`, one after the
    last. With `average_learning_rate`, schedules end at `average_start_step`, and from there on the rate is that one.
    `wsd` (warm-up, stable, decay: Hu et al. 2024) stays at the peak until `decay_steps` are left, then decays linearly
    to the minimum; so training can be extended from the stable phase without starting over. (In the authors' code the
    cosine starts at step 0, so that the rate drops when the warm-up ends; in this package it starts at that end.)

    Args:
        step: index of the step, from 0.
        config: settings of training.
        peak_ratio: factor of the peak; the rate at the end is the same for any.
    """
    num_steps, average_rate = config.schedule_steps, config.average_learning_rate
    if num_steps < config.max_steps and step >= num_steps and average_rate is not None:
        return average_rate
    if step < config.warmup_steps:
        return config.learning_rate * peak_ratio * (step + 1) / config.warmup_steps
    if config.lr_schedule == "wsd":
        factor = 1 - max(0, step - (num_steps - config.decay_steps)) / max(1, config.decay_steps)
    else:
        progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
        factor = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    end_ratio = config.min_learning_rate_ratio
    return config.learning_rate * (end_ratio + (peak_ratio - end_ratio) * factor)


def set_step_rates(
    optimizers: tuple[torch.optim.Optimizer, ...], step: int, config: TrainConfig, scale: float = 1.0
) -> None:
    """Set the learning rate of a step, times a scale, in every parameter group of every optimizer.

    Groups with `is_embedding` have the rate of the embedding; a `rate_factor` multiplies a group's rate.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            ratio = config.embedding_learning_rate_ratio if group.get("is_embedding") else 1.0
            group["lr"] = learning_rate(step, config, peak_ratio=ratio) * scale * group.get("rate_factor", 1.0)


def random_length(step: int, config: TrainConfig) -> int:
    """Return the segment length that is drawn for a step, in tokens; it depends only on the seed and the step.

    NumPy guarantees the same integers of SeedSequence for every version and platform, which a generator of normal
    numbers does not.

    Args:
        step: index of the step, from 0.
        config: settings of training.
    """
    # the second number of the key keeps these draws apart from those of shuffled documents
    state = np.random.SeedSequence(config.seed, spawn_key=(step, 0)).generate_state(2, np.uint64)
    choice, draw = (((int(bits) >> 12) + 0.5) / 2**52 for bits in state)  # between 0 and 1, both exclusive
    mean = config.segment_length / (2 if choice < _HALF_LENGTH_PROBABILITY else 1)
    return max(_MIN_LENGTH, int(NormalDist(mean, _LENGTH_STD).inv_cdf(draw)))
