"""Measures speed and memory of `txl prepare`, compared with only reading the file and with a simple line loop.

    python benchmarks/prepare.py byte [FILE ...] [--megabytes 100] [--rounds 5] [--out FILE]
    python benchmarks/prepare.py word FILE ...   [--megabytes 500] [--distinct] ... [--out FILE]

The text of the files (gzip is decompressed; for byte, by default the source of Python's standard library) is repeated
to the requested size in a temporary folder. Repeated text has few distinct words; with --distinct some rare words get a
different ending in each repetition, so that the vocabulary grows as in WikiText-103 (267,735 words in 540 MB).

`txl prepare` runs in a new process. The simple loop, "the older way", counts the words line by line, then looks up each
word and creates an array for each line; for byte, the text is first converted to decimal numbers. It processes a
fraction of the text, and its time is scaled up. Both take turns (A B, B A, ...); results are medians over the rounds.
Their tokens for that fraction are compared once.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from environment import RESULTS, command, commit, cpu_model, positive, say, write

from transformer_xl import __version__
from transformer_xl.text.token_store import Corpus

MEGABYTE = 10**6
EOS = "<eos>"  # added at the end of each line
WIKITEXT_WORDS, WIKITEXT_BYTES = 267_735, 540 * MEGABYTE


def source_text(files: list[Path]) -> bytes:
    """Return the concatenated text of the files, up to its last newline."""
    if not files:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = b"".join(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in files)
    return text[: text.rfind(b"\n") + 1]


def repetitions(text: bytes, *, distinct: bool) -> Iterator[bytes]:
    """Yield the text again and again; with `distinct`, each time with new words."""
    if not distinct:
        while True:
            yield text
    counts = Counter(text.split())
    ends, position = [], 0  # ends of the words that occur once
    for word in text.split():
        position = text.index(word, position) + len(word)
        if counts[word] == 1:
            ends.append(position)
    # power law: words = len(counts) * (bytes / len(text)) ** growth, with the exponent that WikiText-103 has
    growth = max(0.0, np.log(WIKITEXT_WORDS / len(counts)) / np.log(WIKITEXT_BYTES / len(text)))
    yield text
    for repetition in itertools.count(1):
        num_new = round(len(counts) * ((repetition + 1) ** growth - repetition**growth))
        changed = ends[:: max(1, len(ends) // num_new)][:num_new] if num_new else []
        ending = f"-{repetition}".encode()
        yield ending.join(text[start:stop] for start, stop in itertools.pairwise([0, *changed, len(text)]))


def write_text(path: Path, text: bytes, size: int, *, distinct: bool) -> None:
    """Write a text of at most this size in bytes, truncated after a newline."""
    with path.open("wb") as file:
        remaining = size
        for part in repetitions(text, distinct=distinct):
            if len(part) > remaining:
                file.write(part[: part.rfind(b"\n", 0, remaining) + 1])
                return
            file.write(part)
            remaining -= len(part)


def write_beginning(path: Path, fraction: float) -> Path:
    """Write the first lines of a file, so large a fraction of it, to another file, and return its path."""
    beginning = path.with_suffix(".beginning")
    with path.open("rb") as file:
        content = file.read(round(path.stat().st_size * fraction))
    beginning.write_bytes(content[: content.rfind(b"\n") + 1])
    return beginning


def older_way(kind: str, path: Path) -> dict[str, Any]:
    """Prepare a text line by line, and return its seconds, number of tokens, vocabulary size and checksum."""
    start = time.perf_counter()
    if kind == "byte":
        numbers = path.with_suffix(".numbers")
        with path.open("rb") as file:
            content = " ".join("\n" if byte == 10 else str(byte) for byte in file.read())
        numbers.write_text(content, encoding="ascii")
        path = numbers
    counter: Counter[str] = Counter()
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            counter.update([*line.strip().split(), EOS])
    ids = {EOS: 0}
    for word, _ in counter.most_common():
        ids.setdefault(word, len(ids))
    arrays = []
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            arrays.append(np.array([ids[word] for word in [*line.strip().split(), EOS]], dtype=np.int64))
    tokens = np.concatenate(arrays)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": len(tokens), "vocab_size": len(ids), **checksum(kind, tokens)}


def checksum(kind: str, tokens: np.ndarray) -> dict[str, str]:
    """Return a checksum of the token ids; none for byte, whose ids differ between the two ways."""
    return {"sha256": hashlib.sha256(tokens.astype(np.int64)).hexdigest()} if kind == "word" else {}


def txl_prepare(kind: str, path: Path, num_workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `txl prepare`, and return the result of `run`, and the number of tokens, vocabulary size and checksum."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / "corpus"
        words = [sys.executable, "-m", "transformer_xl", "prepare", "--train", str(path), "--out", str(out)]
        result = run([*words, "--tokenizer", kind, "--num-workers", str(num_workers), "--json"])
        corpus = Corpus.open(out)
        tokens = corpus.split("train").tokens
        counts = {"tokens": len(tokens), "vocab_size": corpus.tokenizer.vocab_size, **checksum(kind, tokens[:])}
    return result, counts


def run(words: list[str]) -> dict[str, Any]:
    """Run a command, and return its seconds, the peak memory with its child processes, and the JSON it printed."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    peak = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, resident_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    printed, _ = process.communicate()
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"failed with status {process.returncode}: {shlex.join(words)}")
    return {"seconds": seconds, "peak_bytes": peak, "printed": json.loads(printed)}


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process and its descendants (shared memory once for each); 0 if unknown."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        # children belong to the thread that started them
        for thread in os.listdir(f"/proc/{process}/task"):
            if thread != str(process):
                children += Path(f"/proc/{process}/task/{thread}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def reading_seconds(path: Path) -> float:
    """Return the seconds that only reading the file takes."""
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(2**20):
            pass
    return time.perf_counter() - start


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run both ways in turns, and return all times, medians and ratios."""
    size = path.stat().st_size
    beginning = write_beginning(path, args.older_share)
    scale = size / beginning.stat().st_size
    older_command = [sys.executable, __file__, args.tokenizer, str(beginning), "--older"]
    _, txl_counts = txl_prepare(args.tokenizer, beginning, args.num_workers)
    runs: dict[str, list[dict[str, Any]]] = {"txl": [], "older": []}
    reading = []
    for number in range(args.rounds):
        reading.append(reading_seconds(path))
        for way in ("txl", "older") if number % 2 == 0 else ("older", "txl"):
            is_older = way == "older"
            result = run(older_command) if is_older else txl_prepare(args.tokenizer, path, args.num_workers)[0]
            runs[way].append(result)
            say(f"round {number + 1} of {args.rounds}: {way} {result['seconds']:.2f} s")
    older = [result["printed"] for result in runs["older"]]
    txl_seconds = [result["seconds"] for result in runs["txl"]]
    older_seconds = [result["seconds"] * scale for result in older]
    ratios = [slow / fast for fast, slow in zip(txl_seconds, older_seconds, strict=True)]
    compared = [name for name in ("tokens", "sha256") if name in txl_counts]
    same_tokens = all(older[0][name] == txl_counts[name] for name in compared)
    if not same_tokens:
        say(f"the tokens differ: {txl_counts} and {older[0]}")
    return {
        "text": {"bytes": size, "distinct_words": distinct_words(path)},
        "txl": {
            "median_seconds": round(statistics.median(txl_seconds), 3),
            "median_seconds_beyond_reading": round(statistics.median(txl_seconds) - statistics.median(reading), 3),
            "median_megabytes_per_second": round(size / MEGABYTE / statistics.median(txl_seconds), 1),
            "peak_resident_bytes_of_all_processes": max(result["peak_bytes"] for result in runs["txl"]),
            "seconds": [round(seconds, 3) for seconds in txl_seconds],
        },
        "reading_alone": {"median_seconds": round(statistics.median(reading), 3)},
        "older_way": {
            "measured_on_bytes": beginning.stat().st_size,
            "median_seconds_measured": round(statistics.median(result["seconds"] for result in older), 3),
            "median_seconds_scaled_linearly": round(statistics.median(older_seconds), 3),
            "peak_resident_bytes_measured": max(result["peak_bytes"] for result in runs["older"]),
            "seconds_measured": [round(result["seconds"], 3) for result in older],
        },
        "median_ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "same_tokens": same_tokens,
    }


def distinct_words(path: Path) -> int:
    """Return the number of distinct words in a file."""
    words: set[bytes] = set()
    with path.open("rb") as file:
        for line in file:
            words.update(line.split())
    return len(words)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is needed to repeat the measurement: command, commit, versions, hardware and args."""
    return {
        "command": command(),
        "commit": commit(),
        "versions": {"transformer_xl": __version__, "numpy": np.__version__, "python": platform.python_version()},
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "sizes": {
            name: getattr(args, name) for name in ("tokenizer", "distinct", "num_workers", "rounds", "older_share")
        },
    }


def main() -> None:
    """Measure, print the results and write them to a file."""
    parser = argparse.ArgumentParser(description="Speed of txl prepare compared with a simple line loop.")
    parser.add_argument("tokenizer", choices=["byte", "word"])
    parser.add_argument("files", type=Path, nargs="*", help="text to repeat; .gz is decompressed")
    parser.add_argument("--megabytes", type=float, help="size of the text (default 100 for byte, 500 for word)")
    parser.add_argument("--distinct", action="store_true", help="new words in each repetition")
    parser.add_argument(
        "--num-workers", type=positive, default=os.cpu_count(), help="processes (default: one for each core)"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument(
        "--older-share", type=float, default=0.1, help="fraction of the text that the older way processes (default 0.1)"
    )
    parser.add_argument("--out", type=Path, help="default benchmarks/results/prepare-TOKENIZER.json")
    parser.add_argument("--older", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.older:
        print(json.dumps(older_way(args.tokenizer, args.files[0])))
        return
    if args.tokenizer == "word" and not args.files:
        parser.error("word needs text files, such as wiki.valid.tokens")
    size = round((args.megabytes or {"byte": 100, "word": 500}[args.tokenizer]) * MEGABYTE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        write_text(path, source_text(args.files), size, distinct=args.distinct)
        results = {**environment(args), **measure(path, args)}
    txl, older = results["txl"], results["older_way"]
    print(
        f"txl prepare {txl['median_seconds']:,.2f} s ({txl['median_seconds_beyond_reading']:,.2f} s beyond reading), "
        f"the older way {older['median_seconds_scaled_linearly']:,.1f} s (scaled); {results['median_ratio']:.1f} times"
    )
    out = args.out or RESULTS / f"prepare-{args.tokenizer}.json"
    write(results, out)


if __name__ == "__main__":
    main()
