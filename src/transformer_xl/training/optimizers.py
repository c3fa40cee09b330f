"""Adam and its learning rate."""

from __future__ import annotations

import math

import torch

from transformer_xl.config import TrainConfig
from transformer_xl.model.language_model import LanguageModel


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: linear from 0 over `warmup` steps, then a cosine down to 0.

    A function of the step alone, so that a resumed run needs nothing else. (The authors' code lets the cosine start at
    step 0 and jumps into it when the warm-up ends; here it starts where the warm-up ends.)
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def build_optimizer(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam over all parameters, with torch's defaults as in the authors' code."""
    return torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
