"""What each part of the regularised Penn Treebank model is worth: a small version of the recipe without one part each.

    python benchmarks/penn_treebank.py --corpus corpora/ptb --out runs/ptb-parts --steps 6000

Every version is an ordinary run in a folder of its own, with the same seed and number of steps. Runs that are done are
not trained again, and a stopped one is resumed. The table has the lowest perplexity of the validation text.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from transformer_xl import load, resume, train

Groups = dict[str, dict[str, Any]]

SMALL: Groups = {"model": {"n_layers": 4, "d_model": 190, "n_heads": 5, "d_ff": 450}, "train": {}}
# of the recipe's steps: warm-up, and the start of the average
_WARMUP, _AVERAGE_START = 3000 / 240_100, 171_500 / 240_100

PARTS: dict[str, Groups] = {
    "all parts": {},
    "no vocabulary dropout": {"model": {"embedding_dropout": 0.0}},
    "a mask for each token": {"model": {"variational_dropout": False}},
    "input dropout 0.2": {"model": {"input_dropout": None}},
    "output dropout 0.2": {"model": {"output_dropout": None}},
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
    """Train a version, or finish its training, and return the lowest perplexity of the validation text."""
    if (path / "config.yaml").exists():
        nats = resume(path, progress=False).best_nats_per_token
    else:
        settings = {group: base.get(group, {}) | changes.get(group, {}) for group in ("model", "train", "evaluation")}
        if settings["train"].get("weight_average") == "none":
            del settings["train"]["average_start_step"]
        nats = train("ptb", corpus, path, **settings, progress=False).best_nats_per_token
    assert nats is not None, "the corpus has no validation text"
    return math.exp(nats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus, made with --tokenizer word")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=6000, help="steps of each version")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="versions to train")
    args = parser.parse_args()
    schedule = {
        "max_steps": args.steps,
        "warmup_steps": max(1, round(_WARMUP * args.steps)),
        "average_start_step": round(_AVERAGE_START * args.steps),
        "eval_interval": max(1, args.steps // 10),
        "checkpoint_interval": max(1, args.steps // 10),
        "seed": args.seed,
    }
    print("| version | perplexity | parameters |\n|---|---|---|")
    for name in args.parts:
        path = args.out / f"{name.replace(',', '').replace(' ', '-')}-seed{args.seed}"
        perplexity = best_perplexity(args.corpus, path, PARTS[name], SMALL | {"train": schedule})
        print(f"| {name} | {perplexity:.2f} | {load(path).model.num_parameters():,} |", flush=True)


if __name__ == "__main__":
    main()
