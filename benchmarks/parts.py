"""Shows what each part of a recipe is worth: the recipe with one setting changed, trained for the same time.

    python benchmarks/parts.py --corpus DIR [--recipe fast-tiny] [--seconds 60] [--seeds 1,2,3] [--out FILE]
        [--changes "model.qk_norm=false model.dropout=0.1 ..."] [--threads 2]

First the duration of a training step of each is measured: all models in one process, in turns of a few steps, so that
a computer that is slower for a while is slower for all of them. Nothing else may run then. Each is then trained for the
number of steps that take `--seconds`, which may run beside other work, once with each seed, and scored with the trained
memory length. A change has several settings if they are joined by a colon, as in equal_time.py.

Results are added to the output file after each training, and trainings that it has already are not repeated. The table
is printed in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import RESULTS, command, commit, cpu_features, cpu_model, positive, say, warn_if_busy, write
from equal_time import ours_choice
from implementations.competitor import ConsecutiveSegments
from trainee import Trainee

from transformer_xl import Corpus, EvaluationConfig, evaluate, train
from transformer_xl.cli.main import keep_freed_memory
from transformer_xl.config import UserError, load_recipe, merge, run_settings

CHANGES = (
    "model.qk_norm=false",
    "model.norm_first=false",
    "model.tie_attention_biases=false",
    "model.clamp_length=64",
    "model.max_ngram=1",
    "model.dropout=0.1",
    "train.weight_average=ema:train.ema_decay=0.98",
    "train.weight_decay=0.1",
    "train.optimizer=adamw",
    "train.optimizer=adamw:train.learning_rate=1e-2",
    "train.learning_rate=2.5e-3",
    "train.learning_rate=1e-2",
    "train.batch_size=16",
    "train.batch_size=64",
    "train.segment_length=128:train.memory_length=128:train.batch_size=16",
)
STEPS_IN_A_TURN = 4


def settings_of(recipe: str, change: str) -> dict[str, Any]:
    """Return the recipe's settings with a change."""
    choice, loaded = ours_choice(f"{recipe}:{change}" if change else recipe), load_recipe(recipe)
    return merge({"model": loaded.model, "train": loaded.train}, {name: choice[name] for name in ("model", "train")})


def step_seconds(args: argparse.Namespace, corpus: Corpus, changes: list[str]) -> dict[str, list[float]]:
    """Return the duration of a step in each round, by change."""
    text_K = torch.from_numpy(np.asarray(corpus.split("train").first(10**6)[:]).astype(np.int64))
    turns = {}
    for change in changes:
        config = run_settings(settings_of(args.recipe, change), change or args.recipe)
        segments = ConsecutiveSegments(text_K, config.train.batch_size, config.train.segment_length)
        turns[change] = Trainee(config.model, config.train, "cpu"), segments
    seconds: dict[str, list[float]] = {change: [] for change in changes}
    for number in range(args.rounds + 1):
        for change, (trainee, segments) in turns.items() if number % 2 == 0 else reversed(turns.items()):
            start = time.perf_counter()
            for _ in range(STEPS_IN_A_TURN):
                trainee.step(*segments.next())
            if number:  # the first round warms up
                seconds[change].append((time.perf_counter() - start) / STEPS_IN_A_TURN)
    return seconds


def ratio(seconds: dict[str, list[float]], change: str) -> float:
    """Return the duration of a step beside that of the unchanged recipe, the median over the rounds."""
    return statistics.median(own / base for own, base in zip(seconds[change], seconds[""], strict=True))


def measure(args: argparse.Namespace, change: str, steps: int, seed: int) -> dict[str, float]:
    """Train once, in a temporary folder, and return the losses in nats per token."""
    settings = ours_choice(f"{args.recipe}:{change}" if change else args.recipe)
    schedule = {
        "max_steps": steps,
        "warmup_steps": max(1, steps // 10),
        "seed": seed,
        "eval_interval": steps,
        "eval_tokens": 4096,  # chooses nothing: the last weights are used
        "checkpoint_interval": steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            *(args.recipe, args.corpus, Path(folder) / "run"),
            model=settings["model"], train=settings["train"] | schedule, threads=args.threads, progress=False,
        ).run  # fmt: skip
        corpus, config = Corpus.open(args.corpus), EvaluationConfig(memory_length=run.config.train.memory_length)
        return {
            split: evaluate(run, corpus.split(split), config, max_tokens=args.eval_tokens).nats_per_token
            for split in ("valid", "test")
        }


def table(results: dict[str, Any]) -> list[str]:
    """Return a table in Markdown, in bits per token; the differences are those of the same seed."""
    seconds = results["step_seconds"]
    nats = {(entry["change"], entry["seed"]): entry["nats_per_token"] for entry in results["trainings"]}
    lines = [
        "| change | duration of a step | steps | seeds | validation | test | beside the recipe, test |",
        "|---|---|---|---|---|---|---|",
    ]
    for change in seconds:
        own = [entry for entry in results["trainings"] if entry["change"] == change]
        if not own:
            continue
        bits = {
            split: statistics.mean(entry["nats_per_token"][split] for entry in own) / np.log(2)
            for split in ("valid", "test")
        }
        both = [seed for changed, seed in nats if changed == change and ("", seed) in nats]
        more = [(nats[change, seed]["test"] - nats["", seed]["test"]) / np.log(2) for seed in both]
        beside = f"{statistics.mean(more):+.3f}" if change and more else ""
        beside += f" ({min(more):+.3f} to {max(more):+.3f})" if change and len(more) > 1 else ""
        name = f"`{change}`" if change else f"`{results['recipe']}`"
        lines.append(
            f"| {name} | {ratio(seconds, change):.2f} | {own[0]['steps']} | {len(own)} | {bits['valid']:.3f} "
            f"| {bits['test']:.3f} | {beside} |"
        )
    return lines


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and train what the output file lacks, and return all results."""
    corpus = Corpus.open(args.corpus)
    setting = {
        "text": corpus.record.name,
        "recipe": args.recipe,
        "seconds": args.seconds,
        "eval_tokens": args.eval_tokens,
        "machine": {"cpu": cpu_model(), "features": cpu_features(), "cores": os.cpu_count()},
    }
    results = {**setting, "step_seconds": {}, "trainings": []}
    if args.out.exists():
        results = json.loads(args.out.read_text(encoding="utf-8"))
        if different := [name for name, value in setting.items() if results[name] != value]:
            raise UserError(f"{args.out} has results with another {different[0]}; choose another --out")
    changes = ["", *args.changes]
    if missing := [change for change in changes if change not in results["step_seconds"]]:
        warn_if_busy()
        if results["step_seconds"]:
            raise UserError(f"{args.out} lacks {missing[0]}, but steps are measured together; choose another --out")
        results |= {"step_seconds": step_seconds(args, corpus, changes), "commit": commit(), "command": command()}
        write(results, args.out)
    for seed in args.seeds:
        for change in changes:
            if any((entry["change"], entry["seed"]) == (change, seed) for entry in results["trainings"]):
                continue
            duration = statistics.median(results["step_seconds"][""]) * ratio(results["step_seconds"], change)
            steps = max(2, round(args.seconds / duration))
            nats = measure(args, change, steps, seed)
            say(f"seed {seed}, {steps} steps, {nats['valid']:.4f} nats per token of the validation text: {change}")
            results["trainings"].append(
                {"change": change, "seed": seed, "steps": steps, "nats_per_token": nats, "commit": commit()}
            )
            write(results, args.out)
    return results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares a recipe with changes of it, at equal time.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare created, with all splits")
    parser.add_argument("--recipe", default="fast-tiny", help="what is changed (fast-tiny)")
    parser.add_argument("--changes", type=str.split, default=list(CHANGES), help="GROUP.NAME=VALUE[:...], with spaces")
    parser.add_argument("--seconds", type=float, default=60, help="time of each training (60)")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--rounds", type=positive, default=9, help="in which the steps are measured (9)")
    parser.add_argument("--eval-tokens", type=positive, default=65_536, help="scored of each text (65,536)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of a training (default: cores)")
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/parts-TEXT.json)")
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"parts-{args.corpus.resolve().name}.json"
    return args


def main() -> None:
    """Train what is missing, and print the table."""
    keep_freed_memory()  # as `txl train` does
    try:
        results = compare(parse_arguments())
    except UserError as error:
        raise SystemExit(str(error)) from None
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
