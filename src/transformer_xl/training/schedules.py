"""What changes with the step: the learning rate, and the lengths of segment and memory.

These are functions of the step and the settings alone, so that a resumed run needs no further state.
"""

from __future__ import annotations

import math

import torch

from transformer_xl.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear from 0 over `warmup_steps`, then as `lr_schedule` says.

    `cosine` decays right after the warm-up, so that a step after the last would have the minimum. `wsd` (warm-up,
    stable, decay: Hu et al. 2024) stays at the peak until `decay_steps` are left, then decays linearly to the minimum;
    so the stable part can be extended without starting over. (The authors' code starts the cosine at step 0 and jumps
    into it when the warm-up ends; here it starts where the warm-up ends.)

    Args:
        step: counted from 0.
        config: settings of training.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "wsd":
        left = 1 - max(0, step - (config.max_steps - config.decay_steps)) / max(1, config.decay_steps)
    else:
        share = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        left = 0.5 * (1 + math.cos(math.pi * share))
    return config.learning_rate * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * left)


def set_learning_rate(optimizers: tuple[torch.optim.Optimizer, ...], rate: float) -> None:
    """Set the learning rate of every parameter group of every optimizer."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def num_halvings(step: int, config: TrainConfig) -> int:
    """Return how often segment and memory are halved for a segment that begins at a step.

    The stages of the segment warm-up are equally long, and each reads twice the length of the one before (a curriculum
    over the length, as in Li et al. 2022, "Stability-efficiency dilemma").

    Args:
        step: counted from 0.
        config: settings of training.
    """
    if step >= config.segment_warmup_steps:
        return 0
    return config.num_doublings - step * config.num_doublings // config.segment_warmup_steps
