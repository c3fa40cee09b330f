"""Compares `generate` of transformers on our model (integrations/huggingface) with our own `generate`.

    python benchmarks/huggingface.py [--rounds 5] [--max-new-tokens 128]

Both generate the same tokens of the same random weights greedily, in one process with all cores, in turns, and the
ratio is computed for each round. The prompt is as long as the memory, so that this is full.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from environment import RESULTS, command, commit, cpu_features, cpu_model, positive, say, warn_if_busy, write

from transformer_xl import RunConfig, TrainConfig, TransformerXLConfig, build_model, generate
from transformer_xl.integrations.huggingface import from_run
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer

MODELS = {
    "3.2M": {"n_layers": 4, "d_model": 256, "n_heads": 4, "d_ff": 1024, "memory_length": 128},
    "41M": {"n_layers": 12, "d_model": 512, "n_heads": 8, "d_ff": 2048, "memory_length": 512},
}


def make_run(memory_length: int, **sizes: int) -> Run:
    """Return a run with random weights."""
    torch.manual_seed(1)
    model = TransformerXLConfig(vocab_size=256, dropout=0.0, **sizes)
    config = RunConfig(model=model, train=TrainConfig(segment_length=memory_length, memory_length=memory_length))
    return Run(build_model(model, memory_length=memory_length).eval(), ByteTokenizer(), config)


def callables(run: Run, batch_size: int, num_tokens: int) -> dict[str, Callable[[], list[list[int]]]]:
    """Return a function for each implementation that generates the new tokens of each row."""
    model, tokenizer = from_run(run)
    length = run.config.train.memory_length
    prompts_BT = torch.randint(32, 127, (batch_size, length), generator=torch.Generator().manual_seed(2))
    texts = [bytes(row).decode() for row in prompts_BT.tolist()]
    inputs = tokenizer(texts, return_tensors="pt")
    bos_B1 = torch.full((batch_size, 1), run.tokenizer.bos_token_id)
    inputs = {"input_ids": torch.cat([bos_B1, inputs["input_ids"]], dim=1)}  # our own reads this token first, too

    def theirs() -> list[list[int]]:
        outputs = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        return outputs[:, -num_tokens:].tolist()

    def ours() -> list[list[int]]:
        results = generate(run, texts, max_new_tokens=num_tokens, greedy=True)
        return [list(result.token_ids) for result in results]

    return {"transformers": theirs, "ours": ours}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Generation by transformers on our model, and by our own generate.")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    args = parser.parse_args()
    load = warn_if_busy()
    rows: list[dict[str, Any]] = []
    for name, sizes in MODELS.items():
        run = make_run(**sizes)
        for batch_size in (1, 8):
            chosen = callables(run, batch_size, args.max_new_tokens)
            if len({str(function()) for function in chosen.values()}) != 1:  # also the first, slower, call
                raise AssertionError(f"{name}, {batch_size} rows: the tokens differ")
            seconds: dict[str, list[float]] = {implementation: [] for implementation in chosen}
            for number in range(args.rounds):
                for implementation in chosen if number % 2 else reversed(chosen):
                    start = time.perf_counter()
                    chosen[implementation]()
                    seconds[implementation].append(time.perf_counter() - start)
            ratios = [theirs / ours for theirs, ours in zip(seconds["transformers"], seconds["ours"], strict=True)]
            row = {
                "model": name,
                "batch_size": batch_size,
                "seconds": {key: round(statistics.median(values), 4) for key, values in seconds.items()},
                "ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
                "ratio": round(statistics.median(ratios), 3),
            }
            rows.append(row)
            say(f"{name}, {batch_size} rows: {row['seconds']}, transformers / ours {row['ratio']}")
    machine = {"cpu": cpu_model(), "features": cpu_features(), "cores": os.cpu_count(), "load_average_before": load}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    result = {
        "command": command(),
        "commit": commit(),
        **versions,
        "machine": machine,
        "models": MODELS,
        "max_new_tokens": args.max_new_tokens,
        "results": rows,
    }
    write(result, RESULTS / "huggingface.json")


if __name__ == "__main__":
    main()
