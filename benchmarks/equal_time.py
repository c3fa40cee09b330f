"""Compares the language models that different programs train in the same time, on the same text and processor.

    python benchmarks/equal_time.py --corpus DIR --seconds 300 [--seeds 1,2,3] [--contestants ours,lstm,nanogpt,...]
        [--nanogpt CHECKOUT] [--peers .venv-peers/bin/python] [--ours RECIPE[:SETTING=VALUE...],...] [--out FILE]

Each contestant trains for the same wall-clock time with all cores, one at a time: first every choice of its settings
with the first seed, contestants taking turns; then the choice with the lowest validation loss with the other seeds.
The models have about 3.2 million parameters in their layers. Time excludes the first step, validation and scoring.

Every token of the scored text is scored exactly once, and each contestant uses the context that is best on the
validation text: a memory length where it has memory, else overlapping windows whose tokens see at least seven eighths
of the block. The results are the means over the seeds, with their range.

Results are added to the output file after each training, and trainings that it has already are not repeated, so a
comparison can be interrupted. A file holds results of one machine, text and time.
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
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import RESULTS, commit, cpu_features, cpu_model, say, warn_if_busy, write
from implementations.competitor import Assignment
from training import PEERS

from transformer_xl import Corpus
from transformer_xl.config import UserError
from transformer_xl.device import has_bfloat16

HERE = Path(__file__).parent
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 256}
LSTM_SIZES = {"n_layers": 2, "d_model": 448}  # 3.2 million parameters in the layers
"""Architecture of this package's LSTM."""


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


def lstm_choice(learning_rate: float, segment_length: int, batch_size: int) -> dict[str, Any]:
    """Return settings of this package's LSTM."""
    train = {
        "optimizer": "adamw",
        "learning_rate": learning_rate,
        "segment_length": segment_length,
        "batch_size": batch_size,
        "max_grad_norm": 1.0,
    }
    model = {"architecture": "lstm", **LSTM_SIZES, "dropout": 0.0}
    return {"recipe": None, "model": model, "train": train}


def ours_choice(text: str) -> dict[str, Any]:
    """Parse RECIPE[:GROUP.SETTING=VALUE...], such as small:train.optimizer=muon:model.n_layers=6.

    Raises:
        UserError: a setting has another form.
    """
    recipe, *settings = text.split(":")
    choice: dict[str, Any] = {"recipe": recipe, "model": {}, "train": {}}
    for setting in settings:
        name, _, value = setting.partition("=")
        group, _, name = name.partition(".")
        if group not in ("model", "train") or not name or not value:
            raise UserError(f"'{setting}' is not a setting; give model.NAME=VALUE or train.NAME=VALUE")
        choice[group][name] = json.loads(value) if value[0] in "0123456789-." or value in ("true", "false") else value
    return choice


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """Return the chosen contestants with all choices of their settings."""
    blocks = [(128, 16), (256, 8)]
    windows = [
        {**SIZES, "block_size": block_size, "batch_size": batch_size, "learning_rate": rate}
        for rate in (1e-3, 2e-3, 4e-3)
        for block_size, batch_size in blocks
    ]
    segments = [
        {
            **SIZES,
            "segment_length": length,
            "memory_length": length,
            "batch_size": 2048 // length,
            "learning_rate": rate,
        }
        for rate in (1e-3, 2e-3, 4e-3)
        for length in (64, 128)
    ]
    known = [
        Contestant("ours", "competitor_ours", [ours_choice(choice) for choice in args.ours.split(",")]),
        Contestant(
            "lstm",
            "competitor_ours",
            [lstm_choice(rate, length, 2048 // length) for rate in (2e-3, 4e-3, 8e-3) for length in (64, 128)],
        ),
        Contestant("nanogpt", "competitor_nanogpt", [{**choice, "checkout": str(args.nanogpt)} for choice in windows]),
        Contestant("gpt2", "competitor_gpt2", windows),
        Contestant("x-transformers", "competitor_x_transformers", segments),
    ]
    names = args.contestants.split(",")
    if unknown := set(names) - {contestant.name for contestant in known}:
        raise UserError(f"no contestant {', '.join(unknown)}; known: {', '.join(known.name for known in known)}")
    chosen = [contestant for contestant in known if contestant.name in names]
    if args.nanogpt is None and any(contestant.name == "nanogpt" for contestant in chosen):
        raise UserError("nanogpt needs --nanogpt DIR, a checkout of nanoGPT; or leave it out of --contestants")
    if any(contestant.is_peer for contestant in chosen) and not args.peers.exists():
        raise UserError(f"{args.peers} does not exist; 'make bench' creates it, or give --peers PYTHON")
    return chosen


def export(corpus: Corpus, folder: Path, args: argparse.Namespace) -> None:
    """Write the tokens of each split as a .npy file, for programs that cannot open a corpus."""
    for split, limit in (("train", None), ("valid", args.valid_tokens), ("test", args.test_tokens)):
        np.save(folder / f"{split}.npy", np.asarray(corpus.split(split).first(limit)[:]))


def identity(contestant: str, settings: dict[str, Any], seed: int) -> str:
    """Return what identifies a training in the results; a checkout may lie anywhere."""
    known = {name: value for name, value in settings.items() if name != "checkout"}
    return json.dumps([contestant, known, seed], sort_keys=True)


class Comparison:
    """The trainings of one text and time, in a file that grows with each of them."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus, folder: Path) -> None:
        self.args, self.corpus, self.folder = args, corpus, folder
        fastest = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
        self.dtype = fastest if args.dtype == "auto" else args.dtype
        self.setting = {
            "text": corpus.record.name,
            "text_sha256": corpus.record.splits["train"].sha256,
            "seconds": args.seconds,
            "dtype": self.dtype,
            "valid_tokens": args.valid_tokens,
            "test_tokens": args.test_tokens,
            "machine": {"cpu": cpu_model(), "features": cpu_features(), "cores": os.cpu_count()},
            "versions": {"python": platform.python_version()},
        }
        self.trainings: list[dict[str, Any]] = []
        if args.out.exists():
            earlier = json.loads(args.out.read_text(encoding="utf-8"))
            if different := [name for name, value in self.setting.items() if earlier.get(name) != value]:
                raise UserError(f"{args.out} has results with another {different[0]}; choose another --out")
            self.trainings = earlier["trainings"]

    def training(self, contestant: Contestant, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        """Return the result of a training, from the file if it is there."""
        key = identity(contestant.name, settings, seed)
        for entry in self.trainings:
            if identity(entry["contestant"], entry["settings"], entry["seed"]) == key:
                return entry
        load = warn_if_busy()
        assignment = Assignment(
            implementation=contestant.implementation,
            settings=settings,
            seconds=self.args.seconds,
            seed=seed,
            folder=str(self.folder),
            corpus=str(self.args.corpus.resolve()),
            vocab_size=self.corpus.tokenizer.vocab_size,
            first_token=self.corpus.tokenizer.bos_token_id,
            dtype=self.dtype,
        )
        python = str(self.args.peers.absolute()) if contestant.is_peer else sys.executable
        process = subprocess.run(
            [python, "-m", "implementations.competitor", json.dumps(asdict(assignment))],
            cwd=HERE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(self.args.threads)},
        )  # fmt: skip
        if process.returncode:
            sys.exit(f"{contestant.name} ended with status {process.returncode}; see its error above")
        entry = {
            "contestant": contestant.name,
            "settings": {name: value for name, value in settings.items() if name != "checkout"},
            "seed": seed,
            "load_average_before": load,
            "commit": commit(),
            **json.loads(process.stdout.splitlines()[-1]),
        }
        self.trainings.append(entry)
        nats = entry["valid_nats_per_token"]
        say(f"{contestant.name}, seed {seed}: {describe(nats)} valid after {entry['train_seconds']} s; {settings}")
        write({**self.setting, "trainings": self.trainings, "table": self.table()}, self.args.out)
        time.sleep(self.args.rest)
        return entry

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each contestant, from the trainings of its best choice of settings."""
        rows = []
        for name in dict.fromkeys(entry["contestant"] for entry in self.trainings):
            own = [entry for entry in self.trainings if entry["contestant"] == name]
            best = min((entry for entry in own if entry["seed"] == own[0]["seed"]), key=valid_loss)
            same = [entry for entry in own if entry["settings"] == best["settings"]]
            test = [entry["test_nats_per_token"] / math.log(2) for entry in same]
            rows.append(
                {
                    "contestant": name,
                    "test_bits_per_token": round(statistics.mean(test), 4),
                    "range": [round(min(test), 4), round(max(test), 4)],
                    "seeds": len(same),
                    "parameters": best["parameters"],
                    "steps": best["steps"],
                    "context": best["context"],
                    "choices_tried": len({json.dumps(entry["settings"], sort_keys=True) for entry in own}),
                    "settings": best["settings"],
                }
            )
        return sorted(rows, key=lambda row: row["test_bits_per_token"])


def valid_loss(entry: dict[str, Any]) -> float:
    """Return the validation loss of a training; settings are chosen by it, never by the test text."""
    return entry["valid_nats_per_token"]


def describe(nats: float) -> str:
    """Return a loss in bits and as perplexity."""
    return f"{nats / math.log(2):.4f} bits per token (perplexity {math.exp(nats):.2f})"


def in_turns(chosen: list[Contestant]) -> Iterator[tuple[Contestant, dict[str, Any]]]:
    """Yield the choices of all contestants, which take turns."""
    for index in range(max(len(contestant.choices) for contestant in chosen)):
        for contestant in chosen:
            if index < len(contestant.choices):
                yield contestant, contestant.choices[index]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all trainings that the output file lacks, and return the table."""
    chosen, corpus = contestants(args), Corpus.open(args.corpus)
    with tempfile.TemporaryDirectory() as folder:
        export(corpus, Path(folder), args)
        comparison = Comparison(args, corpus, Path(folder))
        first_seed, *seeds = [int(seed) for seed in args.seeds.split(",")]
        tried: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in chosen}
        for contestant, settings in in_turns(chosen):
            result = comparison.training(contestant, settings, first_seed)
            tried[contestant.name].append({"valid_nats_per_token": result["valid_nats_per_token"], "of": settings})
        for seed in seeds:
            for contestant in chosen:
                comparison.training(contestant, min(tried[contestant.name], key=valid_loss)["of"], seed)
        return comparison.table()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares what different programs learn in the same time.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that txl prepare created, with all splits")
    parser.add_argument("--seconds", type=float, required=True, help="time of each training")
    parser.add_argument("--seeds", default="1,2,3", help="the first one chooses among settings (default 1,2,3)")
    parser.add_argument("--contestants", default="ours,lstm,nanogpt,gpt2,x-transformers", help="separated by commas")
    parser.add_argument("--ours", default="small", help="recipes with settings to choose from, separated by commas")
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT")
    parser.add_argument("--peers", type=Path, default=PEERS, help="Python of the other implementations")
    parser.add_argument("--valid-tokens", type=int, default=65_536, help="tokens that choices are made by (65,536)")
    parser.add_argument("--test-tokens", type=int, default=131_072, help="tokens of the results (131,072)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of matrix products")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each training (default: cores)")
    parser.add_argument("--rest", type=float, default=2.0, help="seconds between two trainings (default 2)")
    parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/equal-time-TEXT-SECONDS.json)")
    args = parser.parse_args()
    if args.out is None:
        args.out = RESULTS / f"equal-time-{args.corpus.resolve().name}-{args.seconds:g}.json"
    return args


def main() -> None:
    """Train what is missing, and print the table."""
    try:
        table = compare(parse_arguments())
    except UserError as error:
        raise SystemExit(str(error)) from None
    for row in table:
        low, high = row["range"]
        print(
            f"{row['contestant']:<16} {row['test_bits_per_token']:.4f} bits per token ({low:.4f} to {high:.4f}, "
            f"{row['seeds']} seeds), {row['parameters']:,} parameters, {row['steps']:,} steps, context {row['context']}"
        )


if __name__ == "__main__":
    main()
