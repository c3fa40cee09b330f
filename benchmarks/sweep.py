"""Shows what changes of a recipe are worth: each trained for the same time, or the same number of steps.

    python benchmarks/sweep.py --corpus DIR --seconds 60 --changes model.qk_norm=false train.optimizer=adamw ...
    python benchmarks/sweep.py --corpus DIR --steps 300 --changes train.learning_rate={2.5e-3,5e-3,1e-2}

A change has several settings if they are joined by a colon, such as model.n_layers=2:model.n_heads=2; a shell's braces
make all combinations. A tenth of the steps warm up, and the last weights are scored, with the memory length of the
recipe's evaluation or else of its training.

With `--seconds`, first the duration of a training step of each change is measured: all models in one process, in turns
of a few steps, so that a computer that is slower for a while is slower for all of them. Nothing else may run then. The
trainings themselves may run beside other work.

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
from arguments import above_zero, listed, natural, positive
from environment import RESULTS, command, commit, cpu_features, cpu_model, read, refuse, say, warn_if_busy, write
from implementations.competitor import ConsecutiveSegments
from trainee import Trainee

from transformer_xl import Corpus, evaluate, train
from transformer_xl.cli.main import keep_freed_memory
from transformer_xl.config import RunConfig, UserError, load_recipe, merge, run_settings

STEPS_IN_A_TURN = 10  # as soap-muon does more in each tenth


def parsed(text: str) -> dict[str, Any]:
    """Parse RECIPE[:GROUP.SETTING=VALUE...], such as small:train.optimizer=muon:model.n_layers=6.

    Raises:
        UserError: a setting has another form.
    """
    recipe, *settings = text.split(":")
    choice: dict[str, Any] = {"recipe": recipe, "model": {}, "train": {}, "evaluation": {}}
    for setting in settings:
        name, _, value = setting.partition("=")
        group, _, name = name.partition(".")
        if group not in ("model", "train", "evaluation") or not name or not value:
            raise UserError(f"'{setting}' is not a setting; give model.NAME=VALUE or train.NAME=VALUE")
        try:
            choice[group][name] = json.loads(value)
        except ValueError:
            choice[group][name] = value  # a word
    return choice


def chosen(recipe: str, change: str) -> tuple[dict[str, Any], RunConfig]:
    """Return the name of the recipe and the settings that are not the recipe's, by group; and all settings."""
    choice = parsed(f"{recipe}:{change}" if change else recipe)
    loaded = load_recipe(choice["recipe"])
    groups = {"model": loaded.model, "train": loaded.train, "evaluation": loaded.evaluation}
    config = run_settings(merge(groups, {name: choice[name] for name in groups}), change or recipe)
    if config.evaluation.memory_length is None:
        choice["evaluation"]["memory_length"] = config.train.memory_length
    return choice, config


def step_seconds(args: argparse.Namespace, corpus: Corpus, changes: list[str]) -> dict[str, float]:
    """Return the duration of a step by change: that of the unchanged recipe times the median ratio of the rounds."""
    text_K = torch.from_numpy(np.asarray(corpus.split("train").first(10**6)[:]).astype(np.int64))
    turns = {}
    for change in changes:
        _, config = chosen(args.recipe, change)
        segments = ConsecutiveSegments(text_K, config.train.batch_size, config.train.segment_length)
        model = config.model.model_copy(update={"vocab_size": corpus.tokenizer.vocab_size})
        turns[change] = Trainee(model, config.train, "cpu"), segments
    seconds: dict[str, list[float]] = {change: [] for change in changes}
    for number in range(args.rounds + 1):
        for change, (trainee, segments) in turns.items() if number % 2 == 0 else reversed(turns.items()):
            start = time.perf_counter()
            for _ in range(STEPS_IN_A_TURN):
                trainee.step(*segments.next())
            if number:  # the first round warms up
                seconds[change].append((time.perf_counter() - start) / STEPS_IN_A_TURN)
    base = seconds[""]
    return {
        change: statistics.median(base) * statistics.median(one / other for one, other in zip(own, base, strict=True))
        for change, own in seconds.items()
    }


def measure(args: argparse.Namespace, change: str, steps: int, seed: int) -> dict[str, float]:
    """Train once, in a temporary folder, and return the loss in nats per token of each scored split."""
    choice, _ = chosen(args.recipe, change)
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
            *(choice["recipe"], args.corpus, Path(folder) / "run"),
            model=choice["model"], train=schedule | choice["train"], evaluation=choice["evaluation"],
            threads=args.threads, progress=False,
        ).run  # fmt: skip
        corpus = Corpus.open(args.corpus)
        return {
            split: evaluate(run, corpus.split(split), max_tokens=args.eval_tokens).nats_per_token
            for split in ("valid", "test")
            if split in corpus.splits
        }


def table(results: dict[str, Any]) -> list[str]:
    """Return a table in Markdown, in bits per token of the test text, or else of the validation text.

    The differences are those of the same seed.
    """
    trainings = results["trainings"]
    split = "test" if all("test" in entry["nats_per_token"] for entry in trainings) else "valid"
    bits = {(entry["change"], entry["seed"]): entry["nats_per_token"][split] / np.log(2) for entry in trainings}
    lines = [f"| change | steps | seeds | {split}, bits per token | beside the recipe |", "|---|---|---|---|---|"]
    for change in dict.fromkeys(entry["change"] for entry in trainings):
        own = {seed: value for (changed, seed), value in bits.items() if changed == change}
        more = [value - bits["", seed] for seed, value in own.items() if change and ("", seed) in bits]
        beside = f"{statistics.mean(more):+.3f} ({min(more):+.3f} to {max(more):+.3f})" if more else ""
        steps = next(entry["steps"] for entry in trainings if entry["change"] == change)
        mean = statistics.mean(own.values())
        lines.append(f"| `{change or results['recipe']}` | {steps} | {len(own)} | {mean:.3f} | {beside} |")
    return lines


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and train what the output file lacks, and return all results."""
    corpus, changes = Corpus.open(args.corpus), list(dict.fromkeys(["", *args.changes]))
    setting = {
        "text": corpus.record.name,
        "recipe": args.recipe,
        "seconds": args.seconds,
        "max_steps": args.steps,
        "eval_tokens": args.eval_tokens,
        "machine": {"cpu": cpu_model(), "features": cpu_features(), "cores": os.cpu_count()},
    }
    results = {**setting, "step_seconds": {}, "trainings": []}
    if args.out.exists():
        results = read(args.out)
        if different := [name for name, value in setting.items() if results.get(name) != value]:
            raise UserError(f"{args.out} has results with another {different[0]}; choose another --out")
    if args.seconds and (missing := [change for change in changes if change not in results["step_seconds"]]):
        if results["step_seconds"]:
            raise UserError(f"{args.out} lacks {missing[0]}, but steps are measured together; choose another --out")
        warn_if_busy()
        results["step_seconds"] = step_seconds(args, corpus, changes)
    done = {(entry["change"], entry["seed"]) for entry in results["trainings"]}
    for seed in args.seeds:
        for change in changes:
            if (change, seed) in done:
                continue
            steps = args.steps or max(2, round(args.seconds / results["step_seconds"][change]))
            nats = measure(args, change, steps, seed)
            say(f"seed {seed}, {steps} steps, {nats['valid']:.4f} nats per token of the validation text: {change}")
            entry = {"change": change, "seed": seed, "steps": steps, "nats_per_token": nats}
            results["trainings"].append({**entry, "commit": commit(), "command": command()})
            write(results, args.out)
    return results


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description="Compares a recipe with changes of it.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare created")
    parser.add_argument("--recipe", default="fast-tiny", help="what is changed: RECIPE[:GROUP.NAME=VALUE...]")
    parser.add_argument("--changes", nargs="+", required=True, metavar="GROUP.NAME=VALUE[:...]")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=above_zero, help="time of each training")
    length.add_argument("--steps", type=positive, help="number of steps of each training")
    parser.add_argument("--seeds", type=listed(natural), default=[1, 2, 3])
    parser.add_argument("--rounds", type=positive, default=9, help="in which the steps are measured (9)")
    parser.add_argument("--eval-tokens", type=positive, default=65_536, help="scored of each text (65,536)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of a training (default: cores)")
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/sweep-TEXT.json)")
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"sweep-{args.corpus.resolve().name}.json"
    keep_freed_memory()  # as `txl train` does
    try:
        results = compare(args)
    except UserError as error:
        refuse(str(error))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
