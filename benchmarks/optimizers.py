"""Compares optimizers and learning rate schedules on real text: final losses, and the cost of reaching a loss.

    python benchmarks/optimizers.py --corpus DIR [--recipe small] [--arms adam-cosine,muon-wsd,muon-wsd@0.7]
        [--seeds 1,2,3] (--seconds 300 | --tokens 2000000) [--out FILE]

An arm, one of the ways to train, is OPTIMIZER-SCHEDULE or OPTIMIZER-SCHEDULE-AVERAGE (weight average), with other
settings of training after colons: `muon-wsd:learning_rate=2e-3:muon_momentum=0.9`. `@0.7` gives it 0.7 of the budget,
and its schedule ends there. Each arm is trained once with each seed, with the recipe's other settings. With --seconds a
short timing of each arm determines the number of steps, so that the schedule ends with the time; with --tokens all arms
read the same number. Time excludes validation, checkpoints and the first step.

Results are the final validation loss, and the tokens and seconds after which an arm first reaches the final loss of the
first arm (interpolated linearly between validations): medians over the seeds, with their range. In the middle of a
schedule the loss is higher than at the end of a shorter one, so an arm saves at least this much; arms with `@` show how
much more.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, command, commit, cpu_model, device_name, say, warn_if_busy, write
from trainee import StepTimer
from typing_extensions import override

from transformer_xl.config import UserError, load_recipe
from transformer_xl.device import choose_device, set_threads
from transformer_xl.training import train as training
from transformer_xl.training.callbacks import Metrics
from transformer_xl.training.trainer import Trainer

# fractions of the steps
DECAY_SHARE = 0.2  # final decay of the schedule wsd (warmup, stable, decay)
TAIL_SHARE = 0.2  # last steps, whose weights a uniform average includes
WARMUP_SHARE = 0.1  # maximum warmup


@dataclass(frozen=True)
class Arm:
    """An optimizer, a schedule and other settings of training to compare."""

    name: str
    optimizer: str
    schedule: str
    average: str
    settings: dict[str, str]
    share: float
    """Fraction of the budget that it gets."""

    @staticmethod
    def parse(name: str) -> Arm:
        """Parse the name of an arm.

        Raises:
            UserError: the name is not that of an arm.
        """
        rest, _, share = name.partition("@")
        words, *settings = rest.split(":")
        optimizer, schedule, average = (*words.split("-"), "none")[:3] if words.count("-") else ("", "", "")
        known = optimizer in ("adam", "adamw", "muon") and schedule in ("cosine", "wsd")
        if not known or words.count("-") > 2 or not all("=" in setting for setting in settings):
            raise UserError(
                f"no arm '{name}'; must be like adam-cosine, muon-wsd or muon-wsd-uniform:muon_momentum=0.9@0.7"
            )
        pairs = dict(setting.split("=", 1) for setting in settings)
        return Arm(name, optimizer, schedule, average, pairs, float(share or 1))

    def train(self, recipe: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return the settings of training that this arm sets, for a number of steps, given those of the recipe."""
        settings: dict[str, Any] = {
            "optimizer": self.optimizer,
            "lr_schedule": self.schedule,
            "weight_average": self.average,
            "max_steps": steps,
            "warmup_steps": min(recipe.get("warmup_steps", 100), round(WARMUP_SHARE * steps)),
        }
        if self.schedule == "wsd":
            settings["decay_steps"] = max(1, round(DECAY_SHARE * steps))
        if self.average == "uniform":
            settings["average_start_step"] = steps - max(1, round(TAIL_SHARE * steps))
        return settings | self.settings


@dataclass(frozen=True)
class Point:
    """A validation, with the tokens and seconds of training before it."""

    step: int
    tokens: int
    seconds: float
    nats_per_token: float


class Recorder(StepTimer):
    """Records the seconds of the steps, without those of validation, and the validations."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Point] = []
        self.tokens = 0

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        super().on_step(trainer, num_tokens)
        self.tokens += num_tokens

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        if metrics["split"] == "valid":
            nats = metrics["nats_per_token"]
            self.points.append(Point(metrics["step"], self.tokens, sum(self.step_seconds), nats))
        super().on_metrics(trainer, metrics)


def train(arm: Arm, seed: int, steps: int, args: argparse.Namespace) -> Recorder:
    """Train once, in a temporary folder, and return what was recorded."""
    recipe = load_recipe(args.recipe).train
    settings = {
        **arm.train(recipe, steps),
        "seed": seed,
        "eval_interval": max(1, steps // args.points),
        "eval_tokens": args.eval_tokens,
        "checkpoint_interval": steps,
        "log_interval": steps,
    }
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        training.train(
            *(args.recipe, args.corpus, Path(folder) / "run"),
            train=settings, callbacks=[recorder], progress=False, device=args.device, threads=args.threads,
        )  # fmt: skip
    return recorder


def steps_within(arm: Arm, args: argparse.Namespace) -> int:
    """Return the number of steps that the budget allows the arm."""
    recipe = load_recipe(args.recipe).train
    if args.tokens:
        tokens_per_step = recipe.get("batch_size", 16) * recipe.get("segment_length", 128)
        return max(1, round(arm.share * args.tokens / tokens_per_step))
    step_seconds = train(arm, 1, args.timing_steps, args).step_seconds
    seconds = statistics.median(step_seconds[len(step_seconds) // 3 :])  # the first third warms up
    steps = max(1, round(arm.share * args.seconds / seconds))
    say(f"{arm.name}: {seconds:.3f} s per step, so {steps:,} steps")
    return steps


def cost_of_loss(points: Sequence[Point], nats: float) -> tuple[float, float] | None:
    """Return the tokens and seconds after which the loss was first this low, or None if it never was.

    Between validations the loss is interpolated linearly.
    """
    for before, point in zip([points[0], *points], points, strict=False):
        if point.nats_per_token <= nats:
            difference = before.nats_per_token - point.nats_per_token
            fraction = (before.nats_per_token - nats) / difference if difference else 1.0
            return (
                before.tokens + fraction * (point.tokens - before.tokens),
                before.seconds + fraction * (point.seconds - before.seconds),
            )
    return None


def compare(runs: dict[str, dict[int, list[Point]]]) -> dict[str, Any]:
    """Compare each arm with the first: its final loss, and the tokens and seconds to the final loss of the first.

    Args:
        runs: validations by arm and seed; the last one of a run is its final loss.
    """
    final = {seed: points[-1] for seed, points in next(iter(runs.values())).items()}  # of the first arm
    comparison: dict[str, Any] = {}
    for name, seeds in runs.items():
        losses = {seed: points[-1].nats_per_token for seed, points in seeds.items()}
        costs = {seed: cost_of_loss(points, final[seed].nats_per_token) for seed, points in seeds.items()}
        reached = [(final[seed], *cost) for seed, cost in costs.items() if cost is not None]
        comparison[name] = {
            "final_nats_per_token": spread(list(losses.values())),
            "final_nats_beyond_first": spread([loss - final[seed].nats_per_token for seed, loss in losses.items()]),
            "seeds_that_reach_the_first": f"{len(reached)} of {len(seeds)}",
            "share_of_tokens_to_reach_the_first": spread([tokens / end.tokens for end, tokens, _ in reached]),
            "share_of_seconds_to_reach_the_first": spread([seconds / end.seconds for end, _, seconds in reached]),
        }
    return comparison


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the median and the range of values, or None if there are none."""
    if not values:
        return None
    return {"median": round(statistics.median(values), 4), "range": [round(min(values), 4), round(max(values), 4)]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares optimizers and learning rate schedules on real text.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare created")
    parser.add_argument("--recipe", default="small", help="settings of the model, and of training (default small)")
    parser.add_argument(
        "--arms",
        default="adam-cosine,adam-wsd,muon-cosine,muon-wsd",
        help="separated by commas; the others are compared with the first",
    )
    parser.add_argument("--seeds", default="1,2,3", help="default 1,2,3")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, help="training time of each arm and seed")
    budget.add_argument("--tokens", type=int, help="tokens read by each arm and seed")
    parser.add_argument("--points", type=int, default=20, help="validations of each training (default 20)")
    parser.add_argument("--eval-tokens", type=int, default=50_000, help="tokens of a validation (default 50,000)")
    parser.add_argument("--timing-steps", type=int, default=15, help="steps of the short timing (default 15)")
    parser.add_argument("--device", default="auto", help="default auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=RESULTS / "optimizers.json", help="default results/optimizers.json")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train each arm with each seed, and return the comparison; arms take turns, so that disturbances affect all."""
    arms = [Arm.parse(name) for name in args.arms.split(",")]
    steps = {arm.name: steps_within(arm, args) for arm in arms}
    runs: dict[str, dict[int, list[Point]]] = {arm.name: {} for arm in arms}
    for seed in (int(word) for word in args.seeds.split(",")):
        for arm in arms:
            points = train(arm, seed, steps[arm.name], args).points
            runs[arm.name][seed] = points
            final = points[-1]
            cost = f"{final.tokens:,} tokens, {final.seconds:.1f} s"
            say(f"seed {seed}, {arm.name}: {final.nats_per_token:.4f} nats after {cost}")
    return {
        "compared_with": arms[0].name,
        "steps": steps,
        "arms": compare(runs),
        "runs": {
            name: {str(seed): [asdict(point) for point in points] for seed, points in seeds.items()}
            for name, seeds in runs.items()
        },
    }


def main() -> None:
    """Train, print the results and write them to a file."""
    args = parse_arguments()
    load = warn_if_busy()
    budget = {"seconds": args.seconds} if args.seconds else {"tokens": args.tokens}
    try:
        set_threads(args.threads)
        device = str(choose_device(args.device))
        comparison = measure(args)
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
        "recipe": args.recipe,
        "corpus": args.corpus.resolve().name,
        "budget": budget,
        **comparison,
    }
    for name, arm in comparison["arms"].items():
        tokens, seconds = arm["share_of_tokens_to_reach_the_first"], arm["share_of_seconds_to_reach_the_first"]
        cost = f"{tokens['median']:.2f} of the tokens and {seconds['median']:.2f} of the time" if tokens else "never"
        median, (low, high) = arm["final_nats_per_token"]["median"], arm["final_nats_per_token"]["range"]
        print(f"{name:<28} {median:.4f} nats ({low:.4f} to {high:.4f}); final loss of the first arm reached: {cost}")
    write(results, args.out)


if __name__ == "__main__":
    main()
