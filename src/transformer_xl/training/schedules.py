"""Schedules of the learning rate and of the segment and memory lengths.

Both depend only on the step and the settings, so a resumed run needs no additional state.
"""

from __future__ import annotations

import math

import torch

from transformer_xl.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear from 0 over `warmup_steps`, then according to `lr_schedule`.

    `cosine` decays right after the warm-up, and would reach the minimum at step `max_steps`, one after the last.
    `wsd` (warm-up, stable, decay: Hu et al. 2024) stays at the peak until `decay_steps` are left, then decays linearly
    to the minimum; so training can be extended from the stable phase without starting over. (In the authors' code the
    cosine starts at step 0, so that the rate drops when the warm-up ends; in this package it starts at that end.)

    Args:
        step: index of the step, from 0.
        config: settings of training.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "wsd":
        factor = 1 - max(0, step - (config.max_steps - config.decay_steps)) / max(1, config.decay_steps)
    else:
        progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * factor)


def set_learning_rate(optimizers: tuple[torch.optim.Optimizer, ...], rate: float) -> None:
    """Set the learning rate of every parameter group of every optimizer, times its `rate_factor` if it has one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("rate_factor", 1.0)


def num_halvings(step: int, config: TrainConfig) -> int:
    """Return how many times segment and memory lengths are halved for a segment that begins at a step.

    The segment warm-up has stages with equal numbers of steps; segments of a stage are twice as long as those of the
    stage before (a curriculum over the length, as in Li et al. 2022, "Stability-efficiency dilemma").

    Args:
        step: index of the step, from 0.
        config: settings of training.
    """
    if step >= config.segment_warmup_steps:
        return 0
    return config.num_doublings - step * config.num_doublings // config.segment_warmup_steps
