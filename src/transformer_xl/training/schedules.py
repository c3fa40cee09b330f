"""What changes with the step: the learning rate, and how much of a segment and its memory a step uses.

Functions of the step and the settings alone, so that a resumed run needs nothing else.
"""

from __future__ import annotations

import math

import torch

from transformer_xl.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: linear from 0 over `warmup` steps, then as `schedule` says.

    `cosine` falls at once, so that a step after the last would have the final rate. `wsd` (warm-up, stable, decay: Hu
    et al. 2024) stays at the peak until `decay` steps are left, and falls along a line to the final rate; so the stable
    part can be made longer without starting anew. (The authors' code lets the cosine start at step 0 and jumps into it
    when the warm-up ends; here it starts where the warm-up ends.)
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
    """Gives every group of every optimiser the rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def halvings(step: int, config: TrainConfig) -> int:
    """How often segment and memory are halved for a segment that begins at this step, counted from 0.

    The stages of the length warm-up are equally long, and each reads twice the length of the one before (a curriculum
    over the length, as in Li et al. 2022, "Stability-efficiency dilemma").
    """
    if step >= config.segment_warmup_steps:
        return 0
    return config.num_doublings - step * config.num_doublings // config.segment_warmup_steps
