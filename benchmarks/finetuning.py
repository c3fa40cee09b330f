"""Compares fine-tuning a run on another text with training a new model on that text for the same time.

    python benchmarks/finetuning.py --base RUN --corpus DIR [--seconds 60,300,900] [--seeds 1,2,3]
        [--arms fine-tuned,new] [--replace-tokenizer] [--out FILE]

First the duration of a step is measured: the median of two trainings of 15 seconds; nothing else may run then. Then
both train for the number of steps that take `--seconds`, with the learning rate of the base and a tenth of the steps of
warm-up: the new model with the base's recipe as it is today, the fine-tuned one as `finetune` does. As the number of
steps is fixed, these trainings may run beside other work. Losses are those of the weights with the lowest validation
loss, in nats per token of the whole validation and test text, and for the fine-tuned model also of the first 65,536
tokens of the base's own test text.

Where the base's recipe has neither dropout nor text in random order, a seed changes only the weights that a new model
begins with, so fine-tuning gives the same loss with every seed; then `--arms new` trains the other seeds.

Results are added to the output file after each training, and trainings that it has already are not repeated.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero, listed, natural, one_of, positive
from environment import command, commit, cpu_features, cpu_model, read, results_file, say, warn_if_busy, write
from implementations.competitor_ours import Clock

from transformer_xl import Callback, Corpus, evaluate, finetune, load, train
from transformer_xl.cli.main import keep_freed_memory
from transformer_xl.config import UserError

ARMS = ("fine-tuned", "new")


def fit(arm: str, steps: int, seed: int, args: argparse.Namespace, callbacks: list[Callback]) -> dict[str, Any]:
    """Train in a temporary folder, and return the losses before and after."""
    keep_freed_memory()  # as `txl train` does
    torch.set_num_threads(args.threads)
    base = load(args.base).config
    assert base.train is not None, "the base must have been trained here"
    settings = {
        "max_steps": steps,
        "warmup_steps": max(1, steps // 10),
        "learning_rate": base.train.learning_rate,
        "eval_interval": max(1, steps // 10),
        "eval_tokens": 32_768,
        "checkpoint_interval": steps,
        "seed": seed,
    }
    losses: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        if arm == "new":
            run = train(base.recipe, args.corpus, path, train=settings, callbacks=callbacks, progress=False).run
        else:
            options = {"replace_tokenizer": args.replace_tokenizer, "callbacks": callbacks, "progress": False}
            result = finetune(args.base, args.corpus, path, train=settings, **options)
            run = result.run
            losses = {f"{one.text}_{when}": getattr(one, when) for one in result.losses for when in ("before", "after")}
        if not callbacks:
            for split in ("valid", "test"):
                losses[split] = evaluate(run, Corpus.open(args.corpus).split(split)).nats_per_token
    return losses


def step_seconds(args: argparse.Namespace) -> float:
    """Return the median duration of a step of a new model."""
    clock = Clock(15)
    fit("new", 100_000, 1, args, [clock])
    return statistics.median(clock.step_seconds)


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Return the result of a function that a fresh process computes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    """Measure, and write the results to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="a run that was trained with a recipe")
    parser.add_argument("--corpus", type=Path, required=True, help="prepared with the base's tokenizer (or another)")
    parser.add_argument("--seconds", type=listed(above_zero), default="60,300,900")
    parser.add_argument("--seeds", type=listed(natural), default="1,2,3")
    parser.add_argument("--arms", type=listed(one_of(ARMS)), default=",".join(ARMS), help="with commas")
    parser.add_argument("--replace-tokenizer", action="store_true", help="the corpus has a vocabulary of its own")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=results_file("finetuning"))
    args = parser.parse_args()
    try:
        base = load(args.base).config
        Corpus.open(args.corpus)
    except UserError as error:
        parser.error(str(error))
    if base.train is None or base.recipe is None:
        parser.error(f"--base {args.base} was not trained here with a recipe; give a folder made by txl train")
    results: dict[str, Any] = read(args.out) if args.out.exists() else {}
    if not results:
        machine = {"cpu": cpu_model(), "instructions": cpu_features(), "python": platform.python_version()}
        results = {
            "command": command(),
            "commit": commit(),
            "torch": torch.__version__,
            "machine": {**machine, "threads": args.threads, "load": warn_if_busy()},
            "step_seconds": statistics.median(in_a_process(step_seconds, args) for _ in range(2)),
            "trainings": [],
        }
        write(results, args.out)
    done = {(one["seconds"], one["seed"], one["arm"]) for one in results["trainings"]}
    for seed in args.seeds:
        for seconds in args.seconds:
            for arm in args.arms:
                if (seconds, seed, arm) in done:
                    continue
                steps = round(seconds / results["step_seconds"])
                losses = in_a_process(fit, arm, steps, seed, args, [])
                results["trainings"].append({"seconds": seconds, "seed": seed, "arm": arm, "steps": steps, **losses})
                say(f"{seconds:g} s, seed {seed}, {arm}: " + ", ".join(f"{k} {v:.4f}" for k, v in losses.items()))
                write(results, args.out)


if __name__ == "__main__":
    main()
