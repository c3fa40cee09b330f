"""Shows whether a learning rate that is best at one width and number of steps is best at others too.

    python benchmarks/learning_rates.py --corpus DIR [--recipe fast-tiny[:train.weight_decay=0.1...]]
        [--widths 128,256,512] [--steps 300,1000] [--optimizers muon,adamw] [--rates 2.5e-3,5e-3,1e-2] [--seeds 1]
        [--jobs 2] [--threads 2] [--out FILE]

Trains the recipe with every combination: at width D with D / 64 heads of 64 and feed-forward layers of 4 D. A tenth of
the steps warm up. The loss is that of the first `--eval-tokens` of the validation text, with the trained memory length,
so nothing depends on time and trainings may run beside other work.

Results are added to the output file after each training, and trainings that it has already are not repeated. At the
end a table is printed in Markdown, with the best rate of each row in bold; it is read from the whole file, so that
several calls with other combinations add rows to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from environment import RESULTS, command, commit, cpu_features, cpu_model, positive, say, write
from equal_time import ours_choice

from transformer_xl import Corpus, EvaluationConfig, evaluate, train
from transformer_xl.config import UserError

HEAD_WIDTH, FEED_FORWARD_RATIO, WARMUP_SHARE = 64, 4, 0.1
ROW = ("recipe", "width", "steps", "optimizer")
"""What a row of the table has in common; its columns are the rates."""


def combinations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the trainings that were asked for."""
    axes = {
        "seed": [int(word) for word in args.seeds.split(",")],
        "width": [int(word) for word in args.widths.split(",")],
        "steps": [int(word) for word in args.steps.split(",")],
        "optimizer": args.optimizers.split(","),
        "rate": [float(word) for word in args.rates.split(",")],
    }
    for width in axes["width"]:
        if width % HEAD_WIDTH:
            raise UserError(f"--widths {width} is not a multiple of {HEAD_WIDTH}, the width of a head; choose one")
    return [
        {"recipe": args.recipe, **dict(zip(axes, values, strict=True))} for values in itertools.product(*axes.values())
    ]


def measure(chosen: dict[str, Any], corpus: Path, eval_tokens: int, threads: int) -> float:
    """Train once, in a temporary folder, and return the validation loss in nats per token."""
    width, steps, settings = chosen["width"], chosen["steps"], ours_choice(chosen["recipe"])
    model = {"d_model": width, "n_heads": width // HEAD_WIDTH, "d_ff": FEED_FORWARD_RATIO * width}
    schedule = {
        "max_steps": steps,
        "warmup_steps": max(1, round(WARMUP_SHARE * steps)),
        "optimizer": chosen["optimizer"],
        "learning_rate": chosen["rate"],
        "seed": chosen["seed"],
        "eval_interval": steps,
        "eval_tokens": 4096,  # chooses nothing: the last weights are used
        "checkpoint_interval": steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            *(settings["recipe"], corpus, Path(folder) / "run"),
            model=model | settings["model"], train=schedule | settings["train"], threads=threads, progress=False,
        ).run  # fmt: skip
        config = EvaluationConfig(memory_length=run.config.train.memory_length)
        return evaluate(run, Corpus.open(corpus).split("valid"), config, max_tokens=eval_tokens).nats_per_token


def table(trainings: list[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown: mean losses over the seeds by rate, the best of each row in bold."""
    rates = sorted({entry["rate"] for entry in trainings})
    rows: dict[str, dict[float, list[float]]] = {}
    for entry in sorted(trainings, key=lambda entry: [str(entry["recipe"]), entry["width"], entry["steps"]]):
        name = json.dumps({column: entry[column] for column in ROW})
        rows.setdefault(name, {}).setdefault(entry["rate"], []).append(entry["nats_per_token"])
    lines = [
        "| recipe | width | steps | optimizer | seeds | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---" * (len(ROW) + 1 + len(rates)) + "|",
    ]
    for name, losses in rows.items():
        means = {rate: statistics.mean(values) for rate, values in losses.items()}
        best = min(means, key=means.__getitem__)
        cells = [f"{means[rate]:.3f}" if rate in means else "" for rate in rates]
        cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
        seeds = max(len(values) for values in losses.values())
        lines.append("| " + " | ".join([*map(str, json.loads(name).values()), str(seeds), *cells]) + " |")
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares learning rates over widths and numbers of steps.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare created")
    parser.add_argument("--recipe", default="fast-tiny", help="with settings as in equal_time.py (fast-tiny)")
    parser.add_argument("--widths", default="128,256,512", help="d_model (128,256,512)")
    parser.add_argument("--steps", default="300", help="of each training (300)")
    parser.add_argument("--optimizers", default="muon,adamw", help="muon,adamw")
    parser.add_argument("--rates", default="2.5e-3,5e-3,1e-2", help="learning rates (2.5e-3,5e-3,1e-2)")
    parser.add_argument("--seeds", default="1", help="default 1")
    parser.add_argument("--eval-tokens", type=positive, default=65_536, help="tokens of the loss (65,536)")
    parser.add_argument("--jobs", type=positive, default=1, help="trainings side by side (1)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of all trainings (default: cores)")
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/learning-rates-CORPUS.json)")
    args = parser.parse_args()
    if args.out is None:
        args.out = RESULTS / f"learning-rates-{args.corpus.resolve().name}.json"
    return args


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what the output file lacks, and return all trainings in it."""
    setting = {
        "text": Corpus.open(args.corpus).record.name,
        "eval_tokens": args.eval_tokens,
        "machine": {"cpu": cpu_model(), "features": cpu_features(), "cores": os.cpu_count()},
    }
    trainings: list[dict[str, Any]] = []
    if args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        if different := [name for name, value in setting.items() if earlier[name] != value]:
            raise UserError(f"{args.out} has results with another {different[0]}; choose another --out")
        trainings = earlier["trainings"]
    done = [{name: entry[name] for name in (*ROW, "rate", "seed")} for entry in trainings]
    missing = [chosen for chosen in combinations(args) if chosen not in done]
    threads = max(1, args.threads // args.jobs)
    # spawn: torch's threads do not survive a fork
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measure, chosen, args.corpus, args.eval_tokens, threads): chosen for chosen in missing}
        for future in as_completed(futures):
            entry = {**futures[future], "nats_per_token": future.result(), "commit": commit(), "command": command()}
            say(f"{entry['nats_per_token']:.4f} nats per token: {futures[future]}")
            trainings.append(entry)
            write({**setting, "trainings": trainings}, args.out)
    return trainings


def main() -> None:
    """Train what is missing, and print the table of all results in the file."""
    try:
        trainings = compare(parse_arguments())
    except UserError as error:
        raise SystemExit(str(error)) from None
    print("\n".join(table(trainings)))


if __name__ == "__main__":
    main()
