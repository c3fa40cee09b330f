"""Optimisers and schedules side by side on real text: how far each gets, and how soon it is where the first one ends.

    python benchmarks/optimizers.py --corpus DIR [--recipe small] [--arms adam-cosine,muon-wsd,muon-wsd@0.7]
        [--seeds 1,2,3] (--seconds 300 | --tokens 2000000) [--out FILE]

An arm is OPTIMIZER-SCHEDULE or OPTIMIZER-SCHEDULE-AVERAGE, with other settings of training after colons:
`muon-wsd:learning_rate=2e-3:muon_momentum=0.9`. `@0.7` gives it 0.7 of the budget, its schedule ending there. Each arm
and seed is a real training through the package, with the recipe's other settings. With --seconds the number of steps is
found from a short timing of each arm, so that the schedule ends when the time is over; with --tokens all read as many.
Time counts training alone, without validations and checkpoints, from the end of the first step.

For each seed: the tokens and seconds at which an arm's validation loss first is what the first arm ends with (between
two validations along a line), and its loss at the end. Figures are medians over the seeds, with their range. In the
middle of a schedule the loss is higher than a schedule that ends there would give, so the first figure is a lower bound
of what an arm saves; arms with `@` show what is saved in truth.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, command, commit, cpu_model, device_name, say, warn_if_busy, write
from typing_extensions import override

from transformer_xl.config import UserError, load_recipe
from transformer_xl.device import choose_device, set_threads
from transformer_xl.training import train as training
from transformer_xl.training.callbacks import Callback, Metrics
from transformer_xl.training.trainer import Trainer

DECAY_SHARE = 0.2  # of the steps, with wsd
TAIL_SHARE = 0.2  # of the steps, that a uniform average goes over
WARMUP_SHARE = 0.1  # of the steps, at most


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    optimizer: str
    schedule: str
    average: str
    settings: dict[str, str]
    share: float
    """Of the budget."""

    @staticmethod
    def parse(name: str) -> Arm:
        """From its name.

        Raises:
            UserError: the name is none of an arm.
        """
        rest, _, share = name.partition("@")
        words, *settings = rest.split(":")
        optimizer, schedule, average = (*words.split("-"), "none")[:3] if words.count("-") else ("", "", "")
        known = optimizer in ("adam", "adamw", "muon") and schedule in ("cosine", "wsd")
        if not known or words.count("-") > 2 or not all("=" in setting for setting in settings):
            raise UserError(
                f"no arm '{name}'; wanted such as adam-cosine, muon-wsd, muon-wsd-uniform:muon_momentum=0.9@0.7"
            )
        pairs = dict(setting.split("=", 1) for setting in settings)
        return Arm(name, optimizer, schedule, average, pairs, float(share or 1))

    def train(self, recipe: dict[str, Any], steps: int) -> dict[str, Any]:
        """Settings of training for so many steps."""
        chosen: dict[str, Any] = {
            "optimizer": self.optimizer,
            "lr_schedule": self.schedule,
            "weight_average": self.average,
            "max_steps": steps,
            "warmup_steps": min(recipe.get("warmup_steps", 100), round(WARMUP_SHARE * steps)),
        }
        if self.schedule == "wsd":
            chosen["decay_steps"] = max(1, round(DECAY_SHARE * steps))
        if self.average == "uniform":
            chosen["average_start_step"] = steps - max(1, round(TAIL_SHARE * steps))
        return chosen | self.settings


@dataclass(frozen=True)
class Point:
    """A validation."""

    step: int
    tokens: int
    seconds: float
    nats_per_token: float


class Recorder(Callback):
    """Records steps and validations; the clock stands still while the text is validated."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.step_seconds: list[float] = []
        self.tokens = 0
        self._last: float | None = None

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.step_seconds.append(now - self._last)
        self._last = now
        self.tokens += num_tokens

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        if metrics["split"] == "valid":
            nats = metrics["nats_per_token"]
            self.points.append(Point(metrics["step"], self.tokens, sum(self.step_seconds), nats))
            self._last = time.perf_counter()


def train(arm: Arm, seed: int, steps: int, sizes: argparse.Namespace) -> Recorder:
    """One training in a folder that is deleted after it."""
    recipe = load_recipe(sizes.recipe).train
    settings = {
        **arm.train(recipe, steps),
        "seed": seed,
        "eval_interval": max(1, steps // sizes.points),
        "eval_tokens": sizes.eval_tokens,
        "checkpoint_interval": steps,
        "log_interval": steps,
    }
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        training.train(
            *(sizes.recipe, sizes.corpus, Path(folder) / "run"),
            train=settings, callbacks=[recorder], progress=False, device=sizes.device, threads=sizes.threads,
        )  # fmt: skip
    return recorder


def steps_within(arm: Arm, sizes: argparse.Namespace) -> int:
    """How many steps the budget allows the arm."""
    recipe = load_recipe(sizes.recipe).train
    if sizes.tokens:
        return max(
            1, round(arm.share * sizes.tokens / (recipe.get("batch_size", 16) * recipe.get("segment_length", 128)))
        )
    timed = train(arm, 1, sizes.timing_steps, sizes).step_seconds
    each = statistics.median(timed[len(timed) // 3 :])
    steps = max(1, round(arm.share * sizes.seconds / each))
    say(f"{arm.name}: {each:.3f} s a step, so {steps:,} steps")
    return steps


def reached(points: Sequence[Point], nats: float) -> tuple[float, float] | None:
    """Tokens and seconds at which the loss first was this low, along lines between validations; none: never."""
    before: Point | None = None
    for point in points:
        if point.nats_per_token <= nats:
            if before is None:
                return point.tokens, point.seconds
            part = (before.nats_per_token - nats) / (before.nats_per_token - point.nats_per_token)
            return (
                before.tokens + part * (point.tokens - before.tokens),
                before.seconds + part * (point.seconds - before.seconds),
            )
        before = point
    return None


def compared(runs: dict[str, dict[int, list[Point]]]) -> dict[str, Any]:
    """For each arm, against the first: loss at the end, and the share of tokens and seconds to where the first ends."""
    first = next(iter(runs.values()))
    found: dict[str, Any] = {}
    for name, seeds in runs.items():
        ends = [points[-1].nats_per_token for points in seeds.values()]
        differences = [points[-1].nats_per_token - first[seed][-1].nats_per_token for seed, points in seeds.items()]
        places = {seed: reached(points, first[seed][-1].nats_per_token) for seed, points in seeds.items()}
        there = {seed: place for seed, place in places.items() if place is not None}
        of_tokens = [place[0] / first[seed][-1].tokens for seed, place in there.items()]
        of_seconds = [place[1] / first[seed][-1].seconds for seed, place in there.items()]
        found[name] = {
            "final_nats_per_token": spread(ends),
            "final_nats_beyond_first": spread(differences),
            "seeds_that_reach_the_first": f"{len(there)} of {len(seeds)}",
            "share_of_tokens_to_reach_the_first": spread(of_tokens) if there else None,
            "share_of_seconds_to_reach_the_first": spread(of_seconds) if there else None,
        }
    return found


def spread(numbers: Sequence[float]) -> dict[str, Any]:
    """Median and range."""
    return {"median": round(statistics.median(numbers), 4), "range": [round(min(numbers), 4), round(max(numbers), 4)]}


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Optimisers and schedules side by side on real text.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare made")
    parser.add_argument("--recipe", default="small", help="settings of the model, and of training (default small)")
    parser.add_argument(
        "--arms", default="adam-cosine,adam-wsd,muon-cosine,muon-wsd", help="the first is compared with"
    )
    parser.add_argument("--seeds", default="1,2,3", help="default 1,2,3")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, help="training time of each arm and seed")
    budget.add_argument("--tokens", type=int, help="tokens read by each arm and seed")
    parser.add_argument("--points", type=int, default=20, help="validations of a training (default 20)")
    parser.add_argument("--eval-tokens", type=int, default=50_000, help="tokens of a validation (default 50,000)")
    parser.add_argument("--timing-steps", type=int, default=15, help="steps of the short timing (default 15)")
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own choice")
    parser.add_argument("--out", type=Path, default=RESULTS / "optimizers.json", help="default results/optimizers.json")
    return parser.parse_args()


def measure(sizes: argparse.Namespace) -> dict[str, Any]:
    """Trains every arm with every seed; seeds outside, so that what a machine does over hours falls on all arms."""
    arms = [Arm.parse(name) for name in sizes.arms.split(",")]
    steps = {arm.name: steps_within(arm, sizes) for arm in arms}
    runs: dict[str, dict[int, list[Point]]] = {arm.name: {} for arm in arms}
    for seed in (int(word) for word in sizes.seeds.split(",")):
        for arm in arms:
            points = train(arm, seed, steps[arm.name], sizes).points
            runs[arm.name][seed] = points
            end = points[-1]
            after = f"after {end.tokens:,} tokens, {end.seconds:.1f} s"
            say(f"seed {seed}, {arm.name}: {end.nats_per_token:.4f} nats {after}")
    return {
        "compared_with": arms[0].name,
        "steps": steps,
        "arms": compared(runs),
        "runs": {
            name: {str(seed): [asdict(point) for point in points] for seed, points in seeds.items()}
            for name, seeds in runs.items()
        },
    }


def main() -> None:
    """Trains, prints the figures and writes them to a file."""
    sizes = parsed()
    load = warn_if_busy()
    budget = {"seconds": sizes.seconds} if sizes.seconds else {"tokens": sizes.tokens}
    try:
        set_threads(sizes.threads)
        device = str(choose_device(sizes.device))
        found = measure(sizes)
    except UserError as error:
        raise SystemExit(str(error)) from None
    results = {
        "command": command(),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": device_name(device),
            "load_average_before": load,
        },
        "recipe": sizes.recipe,
        "corpus": sizes.corpus.resolve().name,
        "budget": budget,
        **found,
    }
    for name, of in found["arms"].items():
        tokens, seconds = of["share_of_tokens_to_reach_the_first"], of["share_of_seconds_to_reach_the_first"]
        there = (
            f"there after {tokens['median']:.2f} of the tokens and {seconds['median']:.2f} of the time"
            if tokens
            else "never"
        )
        low, high = of["final_nats_per_token"]["range"]
        print(f"{name:<28} {of['final_nats_per_token']['median']:.4f} nats ({low:.4f} to {high:.4f}); {there}")
    write(results, sizes.out)


if __name__ == "__main__":
    main()
