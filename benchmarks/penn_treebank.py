"""What each part of the regularised Penn Treebank model is worth: a small version of the recipe without one part each.

    python benchmarks/penn_treebank.py --corpus corpora/ptb --out runs/ptb-parts [--steps 1200] [--seeds 1,2,3]
        [--learning-rate 1e-3] [--eval-tokens 32768] [--parts "no L2 regularization"] [--results FILE]

The small version has two layers of 152, half the recipe's dropout rates (a narrow model keeps too little of its input
with the recipe's), a higher learning rate, and warm-up for a tenth of the steps. Every version is an ordinary run in a
folder of its own, with the same number of steps. Runs that are done are not trained again, and a stopped one is
resumed. The table has the lowest perplexity of the validation text: the mean over the seeds, and that of each. A model
whose perplexity is that of the words' frequencies has learned nothing from context, and says nothing about a part; the
results have that too. They are added to a JSON file after each training.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import RESULTS, command, commit, cpu_features, cpu_model, positive, say, write

from transformer_xl import Corpus, load, resume, train
from transformer_xl.config import UserError
from transformer_xl.run_folder import RunFolder

Groups = dict[str, dict[str, Any]]

SMALL = {
    "n_layers": 2,
    "d_model": 152,
    "n_heads": 4,
    "d_ff": 360,
    "dropout": 0.1,
    "embedding_dropout": 0.1,
    "input_dropout": 0.3,
    "output_dropout": 0.25,
    "attention_dropout": 0.1,
    "qkv_dropout": 0.1,
}
"""Settings of the small model that are not the recipe's."""
_AVERAGE_START = 171_500 / 240_100  # of the recipe's steps

PARTS: dict[str, Groups] = {
    "all parts": {},
    "no vocabulary dropout": {"model": {"embedding_dropout": 0.0}},
    "a mask for each token": {"model": {"variational_dropout": False}},
    "input dropout 0.1": {"model": {"input_dropout": None}},
    "output dropout 0.1": {"model": {"output_dropout": None}},
    "no dropout of queries, keys and values": {"model": {"qkv_dropout": 0.0}},
    "no dropout of probabilities": {"model": {"attention_dropout": 0.0}},
    "no penalties": {"model": {"activation_penalty": 0.0, "temporal_activation_penalty": 0.0}},
    "no L2 regularization": {"train": {"weight_decay": 0.0}},
    "learned u and v, and projections of positions": {
        "model": {"learned_attention_biases": True, "tie_key_projections": False}
    },
    "memory, no extended context": {
        "train": {"memory_length": 70, "extended_context_length": 0},
        "evaluation": {"memory_length": 130, "extended_context_length": 0},
    },
    "neither memory nor context": {
        "train": {"extended_context_length": 0},
        "evaluation": {"extended_context_length": 0},
    },
    "segments of 70 tokens": {"train": {"random_segment_lengths": False}},
    "one learning rate": {"train": {"embedding_learning_rate_ratio": 1.0}},
    "no average": {"train": {"weight_average": "none"}},
}
"""What differs from the recipe, by the name of the version."""


def best_perplexity(corpus: Path, path: Path, changes: Groups, base: Groups) -> float:
    """Train a version, or finish its training, and return the lowest perplexity of the validation text.

    Raises:
        UserError: the folder has a run with other settings.
    """
    settings = {group: base.get(group, {}) | changes.get(group, {}) for group in ("model", "train", "evaluation")}
    if settings["train"].get("weight_average") == "none":
        del settings["train"]["average_start_step"], settings["train"]["average_learning_rate"]
    if (path / "config.yaml").exists():
        config = RunFolder.open(path).config
        for group, values in settings.items():
            for name, value in values.items():
                if (found := getattr(getattr(config, group), name)) != value:
                    raise UserError(f"{path} is a run with {name} {found}, not {value}; choose another --out")
        nats = resume(path, progress=False).best_nats_per_token
    else:
        nats = train("ptb", corpus, path, **settings, progress=False).best_nats_per_token
    assert nats is not None, "the corpus has no validation text"
    return math.exp(nats)


def perplexity_of_frequencies(corpus: Corpus, eval_tokens: int | None) -> float:
    """Return the perplexity of the validation text by the frequencies of words in the training text, one added to each
    count."""
    counts_V = np.bincount(corpus.split("train").tokens[:], minlength=corpus.tokenizer.vocab_size) + 1
    ids = corpus.split("valid").tokens[:eval_tokens]
    return math.exp(-np.log(counts_V / counts_V.sum())[ids].mean())


def print_table(trainings: list[dict[str, Any]]) -> None:
    """Print the mean perplexity of each version over its seeds, that of each seed, and what the part is worth."""
    perplexities: dict[str, dict[int, float]] = {}
    for one in trainings:
        perplexities.setdefault(one["version"], {})[one["seed"]] = one["perplexity"]
    complete = perplexities.get("all parts", {})
    print("| version | perplexity | of each seed | above all parts |\n|---|---|---|---|")
    for name, by_seed in perplexities.items():
        above = [value - complete[seed] for seed, value in by_seed.items() if seed in complete]
        print(
            f"| {name} | {statistics.mean(by_seed.values()):.1f} | {', '.join(f'{v:.1f}' for v in by_seed.values())} | "
            f"{f'{min(above):+.1f} to {max(above):+.1f}' if above and name != 'all parts' else ''} |"
        )


def main() -> None:
    """Train the versions, print the table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus, made with --tokenizer word")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=positive, default=1200, help="steps of each version")
    parser.add_argument("--seeds", default="1,2,3", help="with commas")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-tokens", type=positive, help="tokens of the validation text that are read (all)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="VERSION")
    parser.add_argument("--results", type=Path, default=RESULTS / "penn-treebank-parts.json", metavar="FILE")
    args = parser.parse_args()
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
        corpus = Corpus.open(args.corpus)
        if args.out.exists() and not args.out.is_dir():
            raise UserError(f"{args.out} is not a folder; choose another --out")
    except (UserError, ValueError) as error:
        parser.error(str(error))
    setting = {
        "text_sha256": corpus.record.splits["train"].sha256,
        "steps": args.steps,
        "learning_rate": args.learning_rate,
        "eval_tokens": args.eval_tokens,
        "perplexity_of_frequencies": round(perplexity_of_frequencies(corpus, args.eval_tokens), 3),
    }
    earlier = json.loads(args.results.read_text()) if args.results.exists() else setting
    if different := [name for name, value in setting.items() if earlier[name] != value]:
        parser.error(f"{args.results} has results with another {different[0]}; choose another --results and --out")
    trainings: list[dict[str, Any]] = earlier.get("trainings", [])
    schedule = {
        "max_steps": args.steps,
        "warmup_steps": max(1, args.steps // 10),
        "average_start_step": round(_AVERAGE_START * args.steps),
        "average_learning_rate": args.learning_rate / 6,  # as in the recipe
        "learning_rate": args.learning_rate,
        "eval_interval": max(1, args.steps // 10),
        "eval_tokens": args.eval_tokens,
        "checkpoint_interval": max(1, args.steps // 2),
    }
    machine = {"cpu": cpu_model(), "features": cpu_features()}
    for seed in seeds:
        for name in args.parts:
            if any((one["version"], one["seed"]) == (name, seed) for one in trainings):
                continue
            path = args.out / f"{name.replace(',', '').replace(' ', '-')}-seed{seed}"
            base = {"model": SMALL, "train": schedule | {"seed": seed}}
            try:
                perplexity = best_perplexity(args.corpus, path, PARTS[name], base)
            except UserError as error:
                parser.error(str(error))
            trainings.append(
                {
                    "version": name,
                    "seed": seed,
                    "perplexity": round(perplexity, 3),
                    "parameters": load(path).model.num_parameters(),
                    "commit": commit(),
                }
            )
            say(f"{name}, seed {seed}: {perplexity:.2f}")
            write(
                {
                    **setting,
                    "command": command(),
                    "torch": torch.__version__,
                    "machine": machine,
                    "trainings": trainings,
                },
                args.results,
            )
    print(f"frequencies of words alone: {setting['perplexity_of_frequencies']}")
    print_table(trainings)


if __name__ == "__main__":
    main()
