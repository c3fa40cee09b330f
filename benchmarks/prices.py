"""What the paper's runs cost: a table of the recipes with a published figure, as docs/paper-runs.md has it.

    python benchmarks/prices.py

Operations and memory are those that the recipes record (`txl recipes`). Hours come from the speeds in
benchmarks/results: of the recipe itself where it was measured, else by arithmetic (*), from the operations per second
of the measured recipe whose model is nearest in width.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from transformer_xl.config import load_recipe, recipe_names

RESULTS = Path(__file__).parent / "results"
PROCESSORS = {"Zen 5": "training-avx512-bf16-zen5", "Zen 4": "training-avx512-bf16", "AVX2": "training-avx2"}
TOO_SMALL = ("ptb",)  # its operations do not decide its time
CPU_RECIPE = "enwik8-12l"  # what benchmarks/training.py measures


def cpu_flops(name: str) -> float:
    """Return operations per second of training on two cores, in bfloat16 where the processor has it."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["implementations"]
    speed = found.get("ours-bfloat16", found["ours-float32"])["median_tokens_per_second"]
    recipe = load_recipe(CPU_RECIPE)
    return speed * recipe.flops_per_step / (recipe.train["batch_size"] * recipe.train["segment_length"])


def gpu_steps() -> dict[str, float]:
    """Return the seconds of a step of each recipe measured on the GPU, the fastest way that was."""
    lines = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())["training"]["lines"]
    steps = dict[str, float]()
    for line in lines:
        steps[line["recipe"]] = min(line["step_seconds"], steps.get(line["recipe"], math.inf))
    return steps


def table() -> str:
    """Return the table in Markdown."""
    cpus, measured = {name: cpu_flops(file) for name, file in PROCESSORS.items()}, gpu_steps()
    width_of = {name: load_recipe(name).model["d_model"] for name in measured}
    titles = ["recipe", "the paper's figure", "steps", "operations", "memory", *cpus, "H200"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in recipe_names():
        recipe = load_recipe(name)
        is_of_paper = recipe.published and "Dai et al. 2019" in recipe.source
        if name in TOO_SMALL or not is_of_paper or recipe.flops_per_step is None:
            continue
        steps, flops = recipe.train["max_steps"], recipe.flops_per_step
        (metric, figure), *_ = recipe.published.items()
        nearest = min(width_of, key=lambda other: abs(math.log(width_of[other] / recipe.model["d_model"])))
        seconds = measured.get(name) or flops / (load_recipe(nearest).flops_per_step / measured[nearest])
        on_gpu = f"{hours(steps * seconds)}{'' if name in measured else ' *'}"
        days = [hours(steps * flops / rate) + ("" if name == CPU_RECIPE else " *") for rate in cpus.values()]
        memory = f"{recipe.bytes_per_step / 2**30:.0f} GiB"
        cells = [f"`{name}`", f"{figure:g} {metric.replace('_', ' ')}", f"{steps:,}", f"{steps * flops:.1e}", memory]
        lines.append(f"| {' | '.join([*cells, *days, on_gpu])} |")
    return "\n".join(lines)


def hours(seconds: float) -> str:
    """Return a time in hours, days or years."""
    days = seconds / 86_400
    if days < 2:
        return f"{seconds / 3600:.1f} h"
    return f"{days:,.0f} days" if days < 730 else f"{days / 365:,.0f} years"


if __name__ == "__main__":
    print(table())
