"""Compares the language models that different programs train in the same time, on the same text and processor.

    python benchmarks/equal_time.py --corpus DIR --seconds 60 [--seeds 1,2,3] [--contestants ours,lstm,nanogpt,...]
        [--nanogpt CHECKOUT] [--nanochat CHECKOUT] [--peers .venv-peers/bin/python] [--out FILE]
    python benchmarks/equal_time.py --corpus DIR --seconds 300 --best 2 ...

The settings of all are chosen alike: of each, two sizes at three learning rates, without n-gram embeddings, and with
those of `fast-small` (ours-ngrams, lstm-ngrams and so on). `--layers`, `--rates` and `--block-size` add other
sizes, rates and lengths to a file. Those with n-gram embeddings read the text once at most, as they learn by heart what
they read twice. All read the whole text in random order before they read any of it again, but for nanoGPT without
n-gram embeddings, which draws its blocks from anywhere.

First the duration of each contestant's training step is measured: all cores, one contestant at a time, in turns, the
median over the rounds of the mean of a round. Nothing else may run then. Each contestant then trains for the number of
steps that take `--seconds`: every choice of its settings with the first seed, then the choice with the lowest
validation loss with the other seeds. As the number of steps is fixed, these trainings may run at any time, side by side
(`--jobs`). Time excludes the first step (and with it compilation), validation and scoring.

Every token of the scored text is scored exactly once, and each contestant uses the context that is best on the
validation text: a memory length where it has memory, else overlapping windows whose tokens see at least seven eighths
of the block. The results are the means over the seeds, with their range.

Results are added to the output file after each training, and trainings that it has already are not repeated, so a
comparison can be interrupted. A file holds the results of one text, for any number of times, with steps of one machine;
another may do the trainings that are left, for the numbers of steps of the first. `--best N` leaves out all but the N
best models, each at its best rate, of the longest shorter time in the file, or with `--best-of FILE` of the same time
in another file, or else of its shortest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import above_zero, listed, natural, positive
from environment import RESULTS, commit, cpu_features, cpu_model, read, refuse, say, warn_if_busy, write
from implementations.competitor import Assignment
from training import PEERS

from transformer_xl import Corpus
from transformer_xl.config import UserError
from transformer_xl.device import has_bfloat16

HERE = Path(__file__).parent
STEP_TOKENS = 2048  # of all contestants
NGRAMS = {"max_ngram": 8, "ngram_buckets": 65_536, "d_ngram": 32}
"""The n-gram embeddings of all contestants: those of `fast-small` with a quarter of its rows, since the optimizers of
others go over all of them in each step."""
OWN_PARTS = {"value_embeddings": True, "key_offset": True, "attention_sinks": True}


@dataclass(frozen=True)
class Contestant:
    """A program and the choices of its settings, of which the best is reported."""

    name: str
    implementation: str
    """Module in implementations/; all but competitor_ours run with the Python of the other implementations."""
    choices: list[dict[str, Any]]

    @property
    def is_peer(self) -> bool:
        """Whether it is another program than this package."""
        return self.implementation != "competitor_ours"


def all_contestants(args: argparse.Namespace) -> list[Contestant]:
    """Return all contestants with two sizes of each, or `--layers`, at all rates, without and with n-grams."""
    found = []
    # n-gram embeddings need fewer layers
    for suffix, ngrams, usual in (("", {}, (2, 4)), ("-ngrams", NGRAMS, (1, 2))):
        depths = (args.layers,) if args.layers else usual
        shapes = [(layers, rate) for layers in depths for rate in args.rates]
        sizes = [
            {"n_layer": layers, "n_head": 4, "n_embd": 256, "learning_rate": rate, "ngrams": ngrams}
            for layers, rate in shapes
        ]
        block_size, segment_length = (args.block_size or usual for usual in (128, 64))
        blocks = [{**size, "block_size": block_size, "batch_size": STEP_TOKENS // block_size} for size in sizes]
        segments = [{**size, **in_segments(segment_length), "memory_length": segment_length} for size in sizes]
        nanochats = [
            {**block, "checkout": str(args.nanochat), "learning_rate": 10 * block["learning_rate"]}  # Muon's
            for block in blocks
        ]
        own, epochs = {"max_ngram": 1, **ngrams, **OWN_PARTS}, {} if ngrams else {"max_epochs": None}
        own_segments = {**in_segments(block_size), "memory_length": block_size}
        ours = [
            {
                "recipe": "fast-small",
                "model": {"n_layers": layers, "d_model": 256, "n_heads": 4, "d_ff": 1024, **own},
                "train": {"learning_rate": 5 * rate, **own_segments, **epochs},
            }
            for layers, rate in shapes
        ]
        lstms = [
            {
                "recipe": None,
                "model": {"architecture": "lstm", "n_layers": layers, "d_model": 448, "dropout": 0.0, **ngrams},
                "train": {"optimizer": "adamw", "max_grad_norm": 1.0, "learning_rate": 2 * rate}
                | in_segments(segment_length),
            }
            for layers in ((args.layers,) if args.layers else (1, 2))
            for rate in args.rates
        ]
        found += [
            Contestant(f"ours{suffix}", "competitor_ours", ours),
            Contestant(f"lstm{suffix}", "competitor_ours", lstms),
            Contestant(
                f"nanogpt{suffix}", "competitor_nanogpt", [{**block, "checkout": str(args.nanogpt)} for block in blocks]
            ),
            Contestant(f"nanochat{suffix}", "competitor_nanochat", nanochats),
            Contestant(f"gpt2{suffix}", "competitor_gpt2", blocks),
            Contestant(f"x-transformers{suffix}", "competitor_x_transformers", segments),
        ]
    return found


def in_segments(length: int) -> dict[str, Any]:
    """Return the settings of training by segments of this length, pieces of at least two in random order."""
    return {"segment_length": length, "batch_size": STEP_TOKENS // length, "shuffle_length": max(256, 2 * length)}


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """Return the chosen contestants.

    Raises:
        UserError: a name is not one of a contestant, or what it needs is not there.
    """
    known = all_contestants(args)
    names = args.contestants.split(",") if args.contestants else [contestant.name for contestant in known]
    if unknown := set(names) - {contestant.name for contestant in known}:
        raise UserError(f"no contestant {', '.join(unknown)}; known: {', '.join(known.name for known in known)}")
    chosen = [contestant for contestant in known if contestant.name in names]
    for name in ("nanogpt", "nanochat"):
        checkout = getattr(args, name)
        is_there = checkout is not None and checkout.is_dir()
        if not is_there and any(contestant.name.startswith(name) for contestant in chosen):
            raise UserError(f"{name} needs --{name} DIR, a checkout of it; or leave it out of --contestants")
    if any(contestant.is_peer for contestant in chosen) and not args.peers.exists():
        raise UserError(f"{args.peers} does not exist; 'make bench' creates it, or give --peers PYTHON")
    return chosen


def export(corpus: Corpus, folder: Path, args: argparse.Namespace) -> None:
    """Write the tokens of each split as a .npy file, for programs that cannot open a corpus."""
    for split, limit in (("train", None), ("valid", args.valid_tokens), ("test", args.test_tokens)):
        np.save(folder / f"{split}.npy", np.asarray(corpus.split(split).first(limit)[:]))


def without_checkout(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are recorded; a checkout may lie anywhere."""
    return {name: value for name, value in settings.items() if name != "checkout"}


def without_rate(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded settings without those that change no step's duration, such as the learning rate."""
    rates = ("learning_rate", "max_epochs")
    kept = {name: value for name, value in without_checkout(settings).items() if name not in rates}
    return {name: without_rate(value) if isinstance(value, dict) else value for name, value in kept.items()}


class Comparison:
    """The step durations and trainings of one text, in a file that grows with each of them."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus, folder: Path) -> None:
        self.args, self.corpus, self.folder = args, corpus, folder
        fastest = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
        self.dtype = fastest if args.dtype == "auto" else args.dtype
        self.setting = {
            "text": corpus.record.name,
            "text_sha256": corpus.record.splits["train"].sha256,
            "dtype": self.dtype,
            "valid_tokens": args.valid_tokens,
            "test_tokens": args.test_tokens,
            "machine": {"cpu": cpu_model(), "features": cpu_features(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version()},
        }
        self.machine = self.setting["machine"]
        self.step_times: list[dict[str, Any]] = []
        self.trainings: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        if args.out.exists():
            earlier = read(args.out)
            self.setting["machine"] = earlier.get("machine")  # the steps are that one's
            if different := [name for name, value in self.setting.items() if earlier.get(name) != value]:
                raise UserError(f"{args.out} has results with another {different[0]}; choose another --out")
            self.step_times, self.trainings = earlier["step_times"], earlier["trainings"]

    def step_seconds(self, contestant: Contestant, settings: dict[str, Any]) -> float | None:
        """Return the median duration of a training step; None if it was not measured."""
        for entry in self.step_times:
            if (entry["contestant"], entry["settings"]) == (contestant.name, without_rate(settings)):
                return statistics.median(entry["seconds"])
        return None

    def measure_steps(self, choices: list[tuple[Contestant, dict[str, Any]]]) -> None:
        """Measure the steps of those choices that were not measured yet, in turns."""
        missing: dict[str, tuple[Contestant, dict[str, Any]]] = {}
        for contestant, settings in choices:
            if self.step_seconds(contestant, settings) is None:
                missing.setdefault(json.dumps([contestant.name, without_rate(settings)]), (contestant, settings))
        if not missing:
            return
        if self.machine != self.setting["machine"]:
            raise UserError(f"{self.args.out} lacks steps that its machine must measure; choose another --out")
        load = warn_if_busy()
        seconds: dict[str, list[float]] = {key: [] for key in missing}
        for number in range(self.args.rounds):
            for key in missing if number % 2 == 0 else reversed(missing):
                contestant, settings = missing[key]
                result = self.run(contestant, settings, 1, None, os.cpu_count() or 1)
                seconds[key].append(result["step_seconds"])
            say(f"round {number + 1} of {self.args.rounds}: " + ", ".join(f"{of[-1]:.3f} s" for of in seconds.values()))
        self.step_times += [
            {
                "contestant": contestant.name,
                "settings": without_rate(settings),
                "seconds": seconds[key],
                "load_average_before": load,
                "commit": commit(),
            }
            for key, (contestant, settings) in missing.items()
        ]
        self.write()

    def run(
        self, contestant: Contestant, settings: dict[str, Any], seed: int, steps: int | None, threads: int
    ) -> dict[str, Any]:
        """Return the result of a process that trains and scores, or measures steps if their number is None."""
        assignment = Assignment(
            implementation=contestant.implementation,
            settings=settings,
            steps=steps,
            seconds=self.args.round_seconds,
            seed=seed,
            folder=str(self.folder),
            corpus=str(self.args.corpus.resolve()),
            vocab_size=self.corpus.tokenizer.vocab_size,
            first_token=self.corpus.tokenizer.bos_token_id,
            dtype=self.dtype,
            once=contestant.name != "nanogpt",
        )
        python = str(self.args.peers.absolute()) if contestant.is_peer else sys.executable
        return run_process(
            [python, "-m", "implementations.competitor", json.dumps(asdict(assignment))], contestant.name, threads
        )

    def training(self, contestant: Contestant, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        """Return the result of a training, from the file if it is there."""
        key = {
            "contestant": contestant.name,
            "settings": without_checkout(settings),
            "seconds": self.args.seconds,
            "seed": seed,
        }
        for entry in self.trainings:
            if all(entry[name] == value for name, value in key.items()):
                return entry
        step_seconds = self.step_seconds(contestant, settings)
        assert step_seconds is not None
        steps = max(2, round(self.args.seconds / step_seconds))
        if contestant.name.endswith("-ngrams"):
            steps = min(steps, -(-self.corpus.split("train").num_tokens // STEP_TOKENS))
        result = self.run(contestant, settings, seed, steps, max(1, self.args.threads // self.args.jobs))
        other = {"machine": self.machine} if self.machine != self.setting["machine"] else {}
        entry = {**key, "commit": commit(), **other, **result}
        say(f"{contestant.name}, seed {seed}: {describe(valid_loss(entry))} valid after {steps} steps; {settings}")
        with self.lock:
            self.trainings.append(entry)
            self.write()
        return entry

    def best_of_shorter(self, contestant: Contestant) -> list[dict[str, Any]]:
        """Return a contestant's best choices of another time, or of this one in another file; all without --best.

        Raises:
            UserError: a choice has no training of that time.
        """
        choices, file = contestant.choices, self.args.best_of or self.args.out
        if self.args.best is None or len(choices) <= self.args.best:
            return choices
        if self.args.best_of:
            trainings = read(file).get("trainings", [])
            times = {entry["seconds"] for entry in trainings} or {0.0}
            seconds = self.args.seconds if self.args.seconds in times else min(times)
        else:
            trainings = self.trainings
            seconds = max((e["seconds"] for e in trainings if e["seconds"] < self.args.seconds), default=0)
        best: dict[str, tuple[float, int]] = {}  # of each model, over its rates
        found = 0
        for index, choice in enumerate(choices):
            same = [
                valid_loss(entry)
                for entry in trainings
                if entry["seconds"] == seconds
                and (entry["contestant"], entry["settings"]) == (contestant.name, without_checkout(choice))
            ]
            if same:
                found += 1
                shape = json.dumps(without_rate(choice))
                best[shape] = min(best.get(shape, (math.inf, 0)), (same[0], index))  # the first seed's, which all have
        # of the same time the file of another text may have the best choices only
        if found < (self.args.best if seconds == self.args.seconds else len(choices)):
            raise UserError(f"--best needs all choices of {contestant.name} at a shorter time in {file}")
        return [choices[index] for _, index in sorted(best.values())[: self.args.best]]

    def write(self) -> None:
        """Write all results with the tables that follow from them."""
        times = sorted({entry["seconds"] for entry in self.trainings})
        tables = {f"{seconds:g}": self.table(seconds) for seconds in times}
        write(
            {**self.setting, "step_times": self.step_times, "trainings": self.trainings, "tables": tables},
            self.args.out,
        )

    def table(self, seconds: float) -> list[dict[str, Any]]:
        """Return a row for each contestant, from the trainings of its best choice of settings."""
        rows, trainings = [], [entry for entry in self.trainings if entry["seconds"] == seconds]
        for name in dict.fromkeys(entry["contestant"] for entry in trainings):
            own = [entry for entry in trainings if entry["contestant"] == name]
            first_seed = own[0]["seed"]
            best = min((entry for entry in own if entry["seed"] == first_seed), key=valid_loss)
            same = [entry for entry in own if entry["settings"] == best["settings"]]
            test = [entry["test_nats_per_token"] / math.log(2) for entry in same]
            rows.append(
                {
                    "contestant": name,
                    "test_bits_per_token": statistics.mean(test),
                    "range": [min(test), max(test)],
                    "seeds": len(same),
                    "parameters": best["parameters"],
                    "steps": best["steps"],
                    "context": best["context"],
                    "choices_tried": len({json.dumps(entry["settings"], sort_keys=True) for entry in own}),
                    "settings": best["settings"],
                }
            )
        return sorted(rows, key=lambda row: row["test_bits_per_token"])


def run_process(command: list[str], name: str, threads: int) -> dict[str, Any]:
    """Run a process that ends when this one does, and return the JSON of the last line that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        command, cwd=HERE, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        lines = process.stdout.read().splitlines()
        if process.wait():
            sys.exit(f"{name} ended with status {process.returncode}; see its error above")
    return json.loads(lines[-1])


def valid_loss(entry: dict[str, Any]) -> float:
    """Return the validation loss of a training; settings are chosen by it, never by the test text."""
    return entry["valid_nats_per_token"]


def describe(nats: float) -> str:
    """Return a loss in bits and as perplexity."""
    return f"{nats / math.log(2):.4f} bits per token (perplexity {math.exp(nats):.2f})"


def in_turns(chosen: list[tuple[Contestant, list[dict[str, Any]]]]) -> Iterator[tuple[Contestant, dict[str, Any]]]:
    """Yield the choices of all contestants, which take turns."""
    for index in range(max(len(choices) for _, choices in chosen)):
        for contestant, choices in chosen:
            if index < len(choices):
                yield contestant, choices[index]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and train what the output file lacks, and return the table of this time."""
    chosen, corpus = contestants(args), Corpus.open(args.corpus)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        export(corpus, Path(folder), args)
        comparison = Comparison(args, corpus, Path(folder))
        best = {contestant.name: comparison.best_of_shorter(contestant) for contestant in chosen}
        choices = list(in_turns([(contestant, best[contestant.name]) for contestant in chosen]))
        comparison.measure_steps(choices)
        first_seed, *seeds = args.seeds
        results = pool.map(lambda choice: comparison.training(*choice, first_seed), choices)
        tried = [
            (contestant.name, settings, valid_loss(result))
            for (contestant, settings), result in zip(choices, results, strict=True)
        ]
        again = []
        for contestant in chosen:
            own = [entry for entry in tried if entry[0] == contestant.name]
            settings = min(own, key=lambda entry: entry[2])[1]
            again += [(contestant, settings, seed) for seed in seeds]
        list(pool.map(lambda training: comparison.training(*training), again))
        return comparison.table(args.seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares what different programs learn in the same time.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare created, with all splits")
    parser.add_argument("--seconds", type=above_zero, required=True, help="time of each training")
    parser.add_argument(
        "--seeds", type=listed(natural), default="1,2,3", help="the first one chooses among settings (default 1,2,3)"
    )
    parser.add_argument("--contestants", help="separated by commas (default: all)")
    parser.add_argument("--best", type=positive, help="train only the best N models of a shorter time in the file")
    parser.add_argument("--best-of", type=Path, help="results of another text, for --best (default: those of --out)")
    parser.add_argument("--layers", type=positive, help="of each model, instead of two sizes")
    parser.add_argument(
        "--block-size", type=positive, help="of blocks, segments and memory (128; LSTM and x-transformers 64)"
    )
    parser.add_argument(
        "--rates",
        type=listed(above_zero),
        default="1e-3,2e-3,4e-3",
        help="AdamW's; LSTM times 2, ours 5, nanochat 10 (1e-3,2e-3,4e-3)",
    )
    parser.add_argument("--jobs", type=positive, default=1, help="trainings side by side (1); steps are measured alone")
    parser.add_argument("--rounds", type=positive, default=3, help="in which the steps are measured (3)")
    parser.add_argument("--round-seconds", type=above_zero, default=10.0, help="of each contestant in a round (10)")
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT")
    parser.add_argument("--nanochat", type=Path, help="checkout of nanochat")
    parser.add_argument("--peers", type=Path, default=PEERS, help="Python of the other implementations")
    parser.add_argument(
        "--valid-tokens", type=positive, default=65_536, help="tokens that choices are made by (65,536)"
    )
    parser.add_argument("--test-tokens", type=positive, default=131_072, help="tokens of the results (131,072)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of matrix products")
    parser.add_argument(
        "--threads", type=positive, default=os.cpu_count(), help="threads of all trainings (default: cores)"
    )
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/equal-time-TEXT.json)")
    args = parser.parse_args()
    if args.block_size and STEP_TOKENS % args.block_size:
        parser.error(f"--block-size {args.block_size} does not divide {STEP_TOKENS:,}, the tokens of a step")
    if args.out is None:
        args.out = RESULTS / f"equal-time-{args.corpus.resolve().name}.json"
    return args


def main() -> None:
    """Train what is missing, and print the table of this time in Markdown."""
    try:
        table = compare(parse_arguments())
    except UserError as error:
        refuse(str(error))
    print("| contestant | bits per token | range | seeds | parameters | steps | context | settings tried |")
    print("|---|---|---|---|---|---|---|---|")
    for row in table:
        low, high = row["range"]
        print(
            f"| {row['contestant']} | {row['test_bits_per_token']:.3f} | {low:.3f} to {high:.3f} | {row['seeds']} "
            f"| {row['parameters']:,} | {row['steps']:,} | {row['context']} | {row['choices_tried']} |"
        )


if __name__ == "__main__":
    main()
