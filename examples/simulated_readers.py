"""Simulated readers: a table of reading times that follow the surprisal of a run at one memory length.

Before an experiment it tells how many readers and words it takes to find that length again:

    python examples/simulated_readers.py runs/mine --memory-length 16 --readers 20 --out times.csv
    txl reading-times runs/mine times.csv --memory-lengths 4,16,64

Texts are from the test split of the run's corpus. A time is the sum of 300 ms, the reader's pace, the word's own
difficulty, what length and log-frequency take, the surprisal of the word and half as much of that of the word before,
and noise.

Shape suffixes: W words of all texts.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from transformer_xl import EvaluationConfig, load, surprisal
from transformer_xl.apps.surprisal.reading_times import bare, corpus_word_counts


def main(
    run: Path,
    *,
    memory_length: int,
    out: Path,
    readers: int = 20,
    texts: int = 20,
    words: int = 250,
    ms_per_bit: float = 3.0,
    noise: float = 100.0,
    reader_sd: float = 60.0,
    word_sd: float = 15.0,
    seed: int = 1,
) -> None:
    """Write the table.

    Args:
        run: Folder of a run.
        memory_length: How many tokens before its own each token is predicted from, in each layer.
        out: The table, CSV.
        readers: Number of readers; each reads all texts.
        texts: Number of texts.
        words: Words of each text.
        ms_per_bit: Milliseconds for each bit of surprisal of a word; the word after it takes half as many more.
        noise: Standard deviation of single readings, in milliseconds.
        reader_sd: Standard deviation of the paces of readers, in milliseconds.
        word_sd: Standard deviation of what words take besides, in milliseconds.
        seed: Seed of all random numbers.
    """
    loaded = load(run)
    corpus, tokenizer = loaded.open_corpus(), loaded.tokenizer
    wanted = texts * words
    test_K = corpus.split("test").tokens
    content = tokenizer.decode(test_K[: 40 * wanted]).split()
    if len(content) < wanted:
        raise SystemExit(f"the test split has {len(content):,} words, fewer than {texts} times {words}")
    items = {f"text{n}": " ".join(content[n * words : (n + 1) * words]) for n in range(texts)}
    # each token sees exactly so many, as in `txl reading-times`
    exact = EvaluationConfig(attention_window=memory_length + 1)
    rows = [row for row in surprisal(loaded, items, exact, memory_lengths=[memory_length]) if row["word"]]
    bits_W = np.array([row["surprisal_bits_alone"] for row in rows])
    before_W = np.where([row["word_number"] > 1 for row in rows], np.roll(bits_W, 1), 0)
    counts = corpus_word_counts(corpus)
    rng = np.random.default_rng(seed)
    mean_W = 300 + ms_per_bit * (bits_W + before_W / 2) + rng.normal(0, word_sd, len(rows))
    mean_W += [3 * len(bare(row["word"])) - 2 * np.log(counts[bare(row["word"])] + 1) for row in rows]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["reader", "item", "word_number", "word", "time"])
        for reader in range(readers):
            time_W = mean_W + rng.normal(0, reader_sd) + rng.normal(0, noise, len(rows))
            for row, time in zip(rows, np.maximum(time_W, 50), strict=True):
                writer.writerow([f"r{reader}", row["item"], row["word_number"], row["word"], f"{time:.1f}"])


if __name__ == "__main__":
    from cyclopts import run as run_main

    run_main(main)
