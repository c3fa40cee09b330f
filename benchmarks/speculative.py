"""Measures generation with drafts from the text so far (prompt_lookup_num_tokens) beside generation without.

    python benchmarks/speculative.py RUN [--draft 31] [--tokens 1000] [--rounds 5] [--text NAME=FILE ...] [--quick]

Of each text the run reads the first `--prompt-tokens` tokens and continues them, greedily and sampled, in turns without
and with drafts; ratios are computed for each round. Reading the prompt and learning its n-grams is not part of the
time. By default the texts are a module of Python's library (code), this project's page on surprisal (prose), and a
table whose rows repeat each other. Also recorded: calls of the model by generated token, and how many of the first
tokens are the same without and with drafts, where rounding can decide between tokens that are equally likely.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from arguments import listed, one_of, positive
from environment import results_file, say, surroundings, warn_if_busy, write

from transformer_xl import GenerationConfig, load
from transformer_xl.device import set_threads
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.generation.generate import encode_prompt, prepare_generation
from transformer_xl.run import Run

MODES: dict[str, dict[str, Any]] = {"greedy": {"greedy": True}, "sampled": {"top_p": 0.95, "temperature": 0.8}}


class Counted:
    """A model that counts its calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.num_calls = model, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        return self.model(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def texts(files: list[str]) -> dict[str, str]:
    """Return the texts by name: those of the files, NAME=FILE, or the usual ones."""
    if files:
        return {name: Path(file).read_text() for name, file in (item.split("=", 1) for item in files)}
    rows = [
        f'    Item("{name}", price={price}, stock=100),\n'
        for name, price in (("bread", 20), ("honey", 35), ("rice", 15))
    ]
    return {
        "code": Path(argparse.__file__).read_text(),
        "prose": (Path(__file__).parents[1] / "docs" / "surprisal.md").read_text(),
        "repetitive": "ITEMS = [\n" + "".join(rows) * 12,
    }


def generate(run: Run, prompt: str, num_prompt: int, num_new: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Continue the beginning of a text; return the tokens, their number a second, and the model's calls by token."""
    config = GenerationConfig(max_new_tokens=num_new, **settings)
    ids = encode_prompt(run.tokenizer, prompt, config, continued=False)[:num_prompt]
    model, memory, segment_length = prepare_generation(run, config, None, 1)
    counted: Any = Counted(model)
    generator = BatchGenerator(counted, [ids], config, segment_length=segment_length, memory=memory)
    counted.num_calls = 0
    start = time.perf_counter()
    token_ids = [generator.step()[0].token_id for _ in range(num_new)]
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": num_new / seconds,
        "calls_per_token": counted.num_calls / num_new,
        "token_ids": token_ids,
    }


def measure(run: Run, prompt: str, args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Return medians and the ratios of each round, after one round that is not counted."""
    variants = {"without": settings, "with": {**settings, "prompt_lookup_num_tokens": args.draft}}
    rounds = [
        {name: generate(run, prompt, args.prompt_tokens, args.tokens, changed) for name, changed in variants.items()}
        for _ in range(args.rounds + 1)
    ][1:]
    ratios = [one["with"]["tokens_per_second"] / one["without"]["tokens_per_second"] for one in rounds]
    first, second = (rounds[0][name]["token_ids"] for name in variants)
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return {
        **{
            f"median_tokens_per_second_{name}": round(
                statistics.median(r[name]["tokens_per_second"] for r in rounds), 1
            )
            for name in variants
        },
        "median_ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "calls_per_token": round(statistics.median(r["with"]["calls_per_token"] for r in rounds), 3),
        "same_tokens": next(differing, len(first)),
    }


def main() -> None:
    """Measure, print the results and write them to a file."""
    parser = argparse.ArgumentParser(description="Generation without and with drafts from the text so far.")
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, may be repeated")
    parser.add_argument("--draft", type=positive, default=31, help="the most drafted tokens (default 31)")
    parser.add_argument("--prompt-tokens", type=positive, default=2000, help="default 2,000")
    parser.add_argument("--tokens", type=positive, default=1000, help="new tokens (default 1,000)")
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument(
        "--dtypes",
        type=listed(one_of(["float32", "bfloat16"])),
        default="float32",
        help="float32, bfloat16 or both, separated by a comma",
    )
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: one for each core")
    parser.add_argument("--out", type=Path, default=results_file("speculative"))
    parser.add_argument("--quick", action="store_true", help="one round of few tokens, for a test of this file")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens = 1, 150
    load_average = warn_if_busy()
    set_threads(args.threads)
    run = load(args.run)
    results = {
        **surroundings("cpu", load_average),
        "recipe": run.config.recipe,
        "parameters": run.model.num_parameters(),
        **{name: getattr(args, name) for name in ("draft", "prompt_tokens", "tokens", "rounds")},
        "rows": [],
    }
    for dtype in args.dtypes:
        for name, text in texts(args.text).items():
            for mode, settings in MODES.items():
                say(f"{dtype} {name} {mode}")
                row = measure(run, text, args, {**settings, "dtype": dtype})
                results["rows"].append({"dtype": dtype, "text": name, "mode": mode, **row})
    for row in results["rows"]:
        low, high = row["ratio_range"]
        print(
            f"{row['dtype']:<9}{row['text']:<11}{row['mode']:<8}"
            f"{row['median_tokens_per_second_without']:9,.1f} -> {row['median_tokens_per_second_with']:9,.1f} tokens/s "
            f"({row['median_ratio']:.2f} times, {low:.2f} to {high:.2f}), {row['calls_per_token']:.2f} calls a token, "
            f"the first {row['same_tokens']:,} tokens the same"
        )
    write(results, args.out)


if __name__ == "__main__":
    main()
