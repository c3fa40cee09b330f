"""Compares ways to find anomalous lines in a log: a run with memory and without, and two simple baselines.

    python benchmarks/anomalies.py [--max-steps 1200] [--lines 20000] [--run DIR] [--out FILE]

A model of the recipe fast-tiny is trained on a normal synthetic log (service_log.py). Then every line of another log,
in which 2% of the lines are anomalous, gets a score by each system: the mean, the sum and the maximum of the surprisal
of its parts, in bits. The table has the area under the precision-recall curve (average precision), of each kind of
anomaly against all normal lines, and of all kinds. A threshold is chosen from a third log, which is normal, with false
alarms in 0.5% of its lines; its recall and its false alarms in the log with anomalies are in the results too.

The systems: `memory` reads the log as one text; `line alone` is the same run, with empty memory at each line;
`word frequency` has the frequencies of words in the log of training (digits count as 0); `character trigram` has
frequencies of characters after two others. With each, what never occurred has a small probability.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from environment import command, commit, cpu_features, cpu_model, positive, results_file, say, warn_if_busy, write
from service_log import ANOMALY_SEED, KINDS, LogLine, as_bytes, service_log, with_anomalies

from transformer_xl import Run, SurprisalStream, load, prepare, score, train
from transformer_xl.apps.watch.line_surprisal import LineStream

SCORES = ("mean", "sum", "max")
FALSE_ALARMS = 0.005
ANOMALOUS = 0.02
TRAIN = {"segment_length": 128, "memory_length": 384, "batch_size": 16}
READING = {"segment_length": 128, "memory_length": 512}

Scores = dict[str, npt.NDArray[np.float64]]
"""The scores of all lines by name: mean, sum, max."""


def summed(parts: list[list[float]]) -> Scores:
    """Return the three scores of each line from the surprisal of its parts, in bits."""
    return {
        "mean": np.array([sum(line) / len(line) for line in parts]),
        "sum": np.array([sum(line) for line in parts]),
        "max": np.array([max(line) for line in parts]),
    }


def with_memory(run: Run, lines: list[LogLine]) -> Scores:
    """Score lines as `txl watch` does."""
    stream, text = LineStream(SurprisalStream(run, **READING)), as_bytes(lines)
    found = [line for start in range(0, len(text), 2**13) for line in stream.read(text[start : start + 2**13])]
    found += stream.finish()
    return {name: np.array([line.score(name) for line in found]) for name in SCORES}


def alone(run: Run, lines: list[LogLine]) -> Scores:
    """Score each line as the only text."""
    scores = score(run, [f"{line.text}\n" for line in lines], **READING)
    return summed([(text.nats_K / math.log(2)).tolist() for text in scores])


def words_of(line: str) -> list[str]:
    """Return words and punctuation, with 0 for each digit."""
    return [*re.findall(r"\w+|[^\w\s]", re.sub(r"\d", "0", line)), "\n"]


def word_frequency(train_lines: list[LogLine]) -> Callable[[list[LogLine]], Scores]:
    """Return a function that scores lines by the frequency of their words."""
    counts = Counter(word for line in train_lines for word in words_of(line.text))
    total = counts.total() + len(counts) + 1

    def scores(lines: list[LogLine]) -> Scores:
        return summed([[-math.log2((counts[word] + 1) / total) for word in words_of(line.text)] for line in lines])

    return scores


def character_trigram(train_lines: list[LogLine]) -> Callable[[list[LogLine]], Scores]:
    """Return a function that scores lines by their characters, each after the two before it; add-0.1 smoothing."""
    texts = [f"\n\n{line.text}\n" for line in train_lines]
    trigrams = Counter(text[index : index + 3] for text in texts for index in range(len(text) - 2))
    bigrams = Counter[str]()
    for trigram, count in trigrams.items():
        bigrams[trigram[:2]] += count

    def scores(lines: list[LogLine]) -> Scores:
        parts: list[list[float]] = []
        for line in lines:
            text = f"\n\n{line.text}\n"
            keys = [text[index : index + 3] for index in range(len(text) - 2)]
            parts.append([-math.log2((trigrams[key] + 0.1) / (bigrams[key[:2]] + 25.6)) for key in keys])
        return summed(parts)

    return scores


def average_precision(is_anomalous: npt.NDArray[np.bool_], scores: npt.NDArray[np.float64]) -> float:
    """Return the area under the precision-recall curve: the mean precision at each anomaly; ties count as one step."""
    order = np.argsort(-scores, kind="stable")
    sorted_scores, hits = scores[order], np.cumsum(is_anomalous[order])
    is_last = np.append(sorted_scores[1:] != sorted_scores[:-1], True)
    hits_at, taken = hits[is_last], np.flatnonzero(is_last) + 1
    return float((np.diff(hits_at, prepend=0) * hits_at / taken).sum() / hits[-1])


def results_of(scores: Scores, clean: Scores, lines: list[LogLine]) -> dict[str, Any]:
    """Return for each score the average precision by kind of anomaly, and what the threshold of the clean log finds."""
    kinds = np.array([line.kind for line in lines])
    results: dict[str, Any] = {}
    for name in SCORES:
        by_kind = {}
        for kind in KINDS:
            chosen = (kinds == kind) | (kinds == "")
            by_kind[kind] = round(average_precision(kinds[chosen] == kind, scores[name][chosen]), 4)
        descending = np.sort(clean[name])[::-1]
        is_alarm = scores[name] > descending[int(FALSE_ALARMS * len(descending))]
        results[name] = {
            "all": round(average_precision(kinds != "", scores[name]), 4),
            **by_kind,
            "recall": round(float(is_alarm[kinds != ""].mean()), 4),
            "false_alarms": round(float(is_alarm[kinds == ""].mean()), 5),
        }
    return results


def trained(max_steps: int, num_lines: int, folder: Path) -> Run:
    """Train a model on a normal log, and return it."""
    for split, seed in (("train", 1), ("valid", 2)):
        lines = service_log(num_lines if split == "train" else num_lines // 20, seed)
        (folder / f"{split}.log").write_bytes(as_bytes(lines))
    corpus = prepare(
        train=[str(folder / "train.log")], valid=[str(folder / "valid.log")], out=folder / "corpus", tokenizer="byte"
    )
    settings = {**TRAIN, "max_steps": max_steps, "warmup_steps": max(1, max_steps // 10), "eval_interval": max_steps}
    settings |= {"checkpoint_interval": max_steps}
    return load(train("fast-tiny", corpus, folder / "run", train=settings).run.path or folder / "run", device="cpu")


def main() -> None:
    """Train or load a run, score the logs with all systems, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-steps", type=positive, default=1200)
    parser.add_argument("--train-lines", type=positive, default=60_000)
    parser.add_argument("--lines", type=positive, default=20_000)
    parser.add_argument("--run", type=Path, help="a run trained before, instead of training one")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--out", type=Path, default=results_file("anomalies"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_average, start = warn_if_busy(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = load(args.run) if args.run else trained(args.max_steps, args.train_lines, Path(folder))
    train_seconds, train_lines = time.perf_counter() - start, service_log(args.train_lines, seed=1)
    clean, lines = service_log(args.lines, seed=3), with_anomalies(service_log(args.lines, seed=4), ANOMALOUS)
    systems: dict[str, Callable[[list[LogLine]], Scores]] = {
        "memory": lambda log: with_memory(run, log),
        "line alone": lambda log: alone(run, log),
        "word frequency": word_frequency(train_lines),
        "character trigram": character_trigram(train_lines),
    }
    results: dict[str, Any] = {}
    for name, scores in systems.items():
        begin = time.perf_counter()
        results[name] = results_of(scores(lines), scores(clean), lines)
        results[name]["seconds"] = round(time.perf_counter() - begin, 1)
        for kind in SCORES:
            found = results[name][kind]
            say(f"{name}, {kind}: average precision {found['all']:.3f}, recall {found['recall']:.3f}")
    write(
        {
            "command": command(),
            "commit": commit(),
            "torch": torch.__version__,
            "machine": {
                "cpu": cpu_model(), "features": cpu_features(), "python": platform.python_version(),
                "threads": args.threads, "load": load_average,
            },
            "train": {**TRAIN, "recipe": "fast-tiny", "max_steps": args.max_steps, "lines": args.train_lines},
            "reading": READING,
            "train_seconds": round(train_seconds, 1),
            "lines": args.lines,
            "anomalies": dict(Counter(line.kind for line in lines if line.kind)),
            "anomaly_seed": ANOMALY_SEED,
            "systems": results,
        },
        args.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
