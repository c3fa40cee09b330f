"""Measure whole training steps of a recipe on one device: time, tokens per second, peak memory, and FLOPs utilization.

Shape suffixes: B batch size, T new tokens, V vocabulary.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from attention_cases import median_seconds, wait
from torch import Tensor
from trainee import Trainee

from transformer_xl.config import RunConfig, load_recipe, run_settings
from transformer_xl.training.cost import step_cost

# 10^12 FLOPs per second of dense bfloat16 products with float32 sums, from the manufacturers' data sheets; the first
# name that is part of the device's name is used
PEAK_TFLOPS = {
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
SMALL = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "d_ff": 64}
SMALL_TRAIN = {"segment_length": 16, "memory_length": 16, "batch_size": 4, "warmup_steps": 0}


def peak_tflops(device: str) -> float | None:
    """Return the peak TFLOPS of a device, or None if it is unknown."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def settings(recipe: str, train: dict[str, Any], *, small: bool) -> RunConfig:
    """Return the recipe with changed training settings; with `small`, in a small size for testing this code."""
    loaded = load_recipe(recipe)
    model = {**loaded.model, **(SMALL if small else {})}
    if small and model.get("cutoffs"):
        model |= {"vocab_size": 100, "cutoffs": (20, 40), "d_embed": 32}
    return run_settings({"model": model, "train": {**loaded.train, **(SMALL_TRAIN if small else {}), **train}}, recipe)


class Tokens:
    """Segments of random tokens, whose frequencies follow Zipf's law, as those of words do."""

    def __init__(self, config: RunConfig) -> None:
        frequency_V = 1 / (torch.arange(config.model.vocab_size) + 2.7)
        size = (config.train.batch_size * (config.train.segment_length + 1),)
        generator = torch.Generator().manual_seed(5)
        # four segments, used in turn
        self.segments = [
            torch.searchsorted(
                frequency_V.double().cumsum(0) / frequency_V.double().sum(),
                torch.rand(size, generator=generator).double(),
            )
            .clamp(max=len(frequency_V) - 1)
            .view(config.train.batch_size, -1)
            for _ in range(4)
        ]
        self.index = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T), on the CPU."""
        self.index = (self.index + 1) % len(self.segments)
        tokens_BT = self.segments[self.index]
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def losses(recipe: str, device: str, steps: int, train: dict[str, Any], model: dict[str, Any]) -> list[float]:
    """Return the losses of the first steps of a small model of this recipe, with memory but without dropout."""
    config = settings(recipe, {"batch_size": 4, "segment_length": 24, "memory_length": 32, **train}, small=True)
    changed = config.model.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0, **model})
    torch.compiler.reset()  # discard compiled code of other models
    tokens, trainee = Tokens(config), Trainee(changed, config.train, device)
    return torch.stack([trainee.step(*tokens.next()) for _ in range(steps)]).tolist()


def measure(recipe: str, device: str, train: dict[str, Any], *, small: bool, peak: float | None) -> dict[str, Any]:
    """Time whole training steps; the batch size is halved until it fits into the device's memory."""
    batch_size = settings(recipe, train, small=small).train.batch_size
    while True:
        try:
            return _measure(settings(recipe, {**train, "batch_size": batch_size}, small=small), device, peak) | {
                "recipe": recipe
            }
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
        batch_size //= 2
        torch.cuda.empty_cache()


def _measure(config: RunConfig, device: str, peak: float | None) -> dict[str, Any]:
    cuda = device.startswith("cuda")
    torch.compiler.reset()  # compiled code of another recipe occupies memory
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tokens, trainee = Tokens(config), Trainee(config.model, config.train, device)
    train = config.train
    # warm-up: fills the memory, and compiles layers or captures CUDA graphs
    for _ in range(4 + -(-train.memory_length // train.segment_length)):
        trainee.step(*tokens.next())
    wait(device)
    seconds = median_seconds(lambda: trainee.step(*tokens.next()), device, seconds=2.0 if cuda else 0.1, rounds=5)
    loss = statistics.fmean(float(trainee.step(*tokens.next())) for _ in range(2))
    flops = step_cost(
        config.model,
        batch_size=train.batch_size,
        segment_length=train.segment_length,
        memory_length=train.memory_length,
    ).flops
    return {
        "compile": train.compile,
        "dtype": train.dtype,
        "attn_implementation": config.model.attn_implementation,
        "batch_size": train.batch_size,
        "segment_length": train.segment_length,
        "memory_length": train.memory_length,
        "step_seconds": seconds,
        "tokens_per_second": train.batch_size * train.segment_length / seconds,
        "tflops": flops / seconds / 1e12,
        "model_flops_utilisation": flops / seconds / (peak * 1e12) if peak else None,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_device_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "loss": loss,
    }
