"""Speed and memory of `txl prepare`, beside reading the file alone and beside the older way of preparing text.

    python benchmarks/prepare.py byte [FILE ...] [--megabytes 100] [--rounds 5] [--out FILE]
    python benchmarks/prepare.py word FILE ...   [--megabytes 500] [--distinct] ... [--out FILE]

The text is that of the files (gzip is unpacked; for bytes, without files, the source of Python's standard library),
repeated to size in a temporary folder. Repeated text has few distinct words; with --distinct some rare words of each
repetition get an ending of their own, so that the distinct words grow as they do in WikiText-103 (267,735 in 540 MB).

`txl prepare` runs as a fresh process. The older way, written here from its description, goes over the text line by
line, counts words, and then looks each word up and makes an array for each line; bytes are first written out as
decimal numbers. It runs on a share of the text, and its time is scaled up by that share, which its results say. Both
take turns (A B, B A, ...); figures are medians over the rounds. Their tokens on the share are compared once.
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
from environment import RESULTS, command, commit, cpu_model, say, write

from transformer_xl import __version__
from transformer_xl.text.token_store import Corpus

MEGABYTE = 10**6
MARK = "<eos>"
WIKITEXT_WORDS, WIKITEXT_BYTES = 267_735, 540 * MEGABYTE


def source_text(files: list[Path]) -> bytes:
    """The text of the files, joined, up to its last line end."""
    if not files:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    text = b"".join(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in files)
    return text[: text.rfind(b"\n") + 1]


def repetitions(text: bytes, *, distinct: bool) -> Iterator[bytes]:
    """The text again and again; with `distinct`, each time with words not seen before."""
    if not distinct:
        while True:
            yield text
    counts = Counter(text.split())
    ends, place = [], 0  # where words end that stand in the text once
    for word in text.split():
        place = text.index(word, place) + len(word)
        if counts[word] == 1:
            ends.append(place)
    # words = len(counts) (bytes / len(text)) ** growth, through WikiText-103's figures
    growth = max(0.0, np.log(WIKITEXT_WORDS / len(counts)) / np.log(WIKITEXT_BYTES / len(text)))
    number = 0
    while True:
        more = round(len(counts) * ((number + 1) ** growth - number**growth)) if number else 0
        chosen = ends[:: max(1, len(ends) // more)][:more] if more else []
        edges = [0, *chosen, len(text)]
        ending = f"-{number}".encode()
        yield ending.join(text[start:stop] for start, stop in itertools.pairwise(edges))
        number += 1


def write_text(path: Path, text: bytes, size: int, *, distinct: bool) -> None:
    """Writes a text of this size, cut at a line end."""
    with path.open("wb") as file:
        left = size
        for part in repetitions(text, distinct=distinct):
            if len(part) > left:
                file.write(part[: part.rfind(b"\n", 0, left) + 1])
                return
            file.write(part)
            left -= len(part)


def share_of(path: Path, share: float) -> Path:
    """The beginning of a file, up to a line end, as a file beside it."""
    beginning = path.with_suffix(".share")
    with path.open("rb") as file:
        content = file.read(round(path.stat().st_size * share))
    beginning.write_bytes(content[: content.rfind(b"\n") + 1])
    return beginning


def older_way(kind: str, path: Path) -> dict[str, Any]:
    """Prepares a text word by word; says how long it took, and what came out."""
    began = time.perf_counter()
    if kind == "byte":
        numbers = path.with_suffix(".numbers")
        with path.open("rb") as file:
            content = " ".join("\n" if byte == 10 else str(byte) for byte in file.read())
        numbers.write_text(content, encoding="ascii")
        path = numbers
    words = OlderVocabulary()
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            words.counter.update([*line.strip().split(), MARK])
    words.build()
    parts = []
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            parts.append(np.array([words.look_up(word) for word in [*line.strip().split(), MARK]], dtype=np.int64))
    ids = np.concatenate(parts)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": len(ids), "vocab_size": len(words.ids), **digest(kind, ids)}


class OlderVocabulary:
    """Words and their ids, asked one by one."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self.counter: Counter[str] = Counter()
        self.ids: dict[str, int] = {}

    def build(self) -> None:
        """The mark first, then falling counts."""
        self.add(MARK)
        for word, _ in self.counter.most_common():
            self.add(word)

    def add(self, word: str) -> None:
        """Gives a new word the next id."""
        if word not in self.ids:
            self.ids[word] = len(self.ids)

    def look_up(self, word: str) -> int:
        """The id of a word."""
        return self.ids[word]


def digest(kind: str, ids: np.ndarray) -> dict[str, str]:
    """A checksum of the ids; not of bytes, where the two ways number differently."""
    return {"sha256": hashlib.sha256(ids.astype(np.int64)).hexdigest()} if kind == "word" else {}


def prepared(kind: str, path: Path, num_workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs `txl prepare`; gives how it ran, and what came out."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / "corpus"
        words = [sys.executable, "-m", "transformer_xl", "prepare", "--train", str(path), "--out", str(out)]
        ran = run([*words, "--tokenizer", kind, "--num-workers", str(num_workers), "--json"])
        corpus = Corpus.open(out)
        ids = corpus.split("train").tokens
        came = {"tokens": len(ids), "vocab_size": corpus.tokenizer.vocab_size, **digest(kind, ids[:])}
    return ran, came


def run(words: list[str]) -> dict[str, Any]:
    """Runs a command: seconds, the most memory it and its children had at once, and what it printed."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    most = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    printed, _ = process.communicate()
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"failed with status {process.returncode}: {shlex.join(words)}")
    return {"seconds": seconds, "peak_bytes": most[0], "printed": json.loads(printed)}


def resident(process: int) -> int:
    """Memory of a process and all its children, in bytes; memory that they share counts for each. 0 where unknown."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        # children belong to the thread that started them
        for thread in os.listdir(f"/proc/{process}/task"):
            if thread != str(process):
                children += Path(f"/proc/{process}/task/{thread}/children").read_text().split()
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


def reading_seconds(path: Path) -> float:
    """How long it takes to read the file and do nothing with it."""
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(2**20):
            pass
    return time.perf_counter() - began


def measure(path: Path, sizes: argparse.Namespace) -> dict[str, Any]:
    """Lets the two ways take turns; gives all times, medians and ratios."""
    size = path.stat().st_size
    beginning = share_of(path, sizes.older_share)
    scale = size / beginning.stat().st_size
    older_words = [sys.executable, __file__, sizes.tokenizer, str(beginning), "--older"]
    _, ours = prepared(sizes.tokenizer, beginning, sizes.num_workers)
    ran: dict[str, list[dict[str, Any]]] = {"txl": [], "older": []}
    reading = []
    for number in range(sizes.rounds):
        reading.append(reading_seconds(path))
        for way in ("txl", "older") if number % 2 == 0 else ("older", "txl"):
            one = run(older_words) if way == "older" else prepared(sizes.tokenizer, path, sizes.num_workers)[0]
            ran[way].append(one)
            say(f"round {number + 1} of {sizes.rounds}: {way} {one['seconds']:.2f} s")
    older = [one["printed"] for one in ran["older"]]
    seconds = [one["seconds"] for one in ran["txl"]]
    scaled = [one["seconds"] * scale for one in older]
    ratios = [other / one for one, other in zip(seconds, scaled, strict=True)]
    return {
        "text": {"bytes": size, "distinct_words": distinct_words(path)},
        "txl": {
            "median_seconds": round(statistics.median(seconds), 3),
            "median_seconds_beyond_reading": round(statistics.median(seconds) - statistics.median(reading), 3),
            "median_megabytes_per_second": round(size / MEGABYTE / statistics.median(seconds), 1),
            "peak_resident_bytes_of_all_processes": max(one["peak_bytes"] for one in ran["txl"]),
            "seconds": [round(one, 3) for one in seconds],
        },
        "reading_alone": {"median_seconds": round(statistics.median(reading), 3)},
        "older_way": {
            "measured_on_bytes": beginning.stat().st_size,
            "median_seconds_measured": round(statistics.median(one["seconds"] for one in older), 3),
            "median_seconds_scaled_linearly": round(statistics.median(scaled), 3),
            "peak_resident_bytes_measured": max(one["peak_bytes"] for one in ran["older"]),
            "seconds_measured": [round(one["seconds"], 3) for one in older],
        },
        "median_ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "same_tokens": agree(ours, older[0]),
    }


def agree(ours: dict[str, Any], older: dict[str, Any]) -> bool:
    """Whether both ways gave the same tokens (for bytes: as many), and say where not."""
    same = all(older[name] == ours[name] for name in ("tokens", "sha256") if name in ours)
    if not same:
        say(f"the ways differ: {ours} and {older}")
    return same


def distinct_words(path: Path) -> int:
    """How many different words a text has."""
    found: set[bytes] = set()
    with path.open("rb") as file:
        for line in file:
            found.update(line.split())
    return len(found)


def environment(sizes: argparse.Namespace) -> dict[str, Any]:
    """What someone else needs to measure the same."""
    return {
        "command": command(),
        "commit": commit(),
        "versions": {"transformer_xl": __version__, "numpy": np.__version__, "python": platform.python_version()},
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "sizes": {
            name: getattr(sizes, name) for name in ("tokenizer", "distinct", "num_workers", "rounds", "older_share")
        },
    }


def main() -> None:
    """Measures, prints the figures and writes them to a file."""
    parser = argparse.ArgumentParser(description="Speed of txl prepare beside the older way.")
    parser.add_argument("tokenizer", choices=["byte", "word"])
    parser.add_argument("files", type=Path, nargs="*", help="text to repeat; .gz is unpacked")
    parser.add_argument("--megabytes", type=float, help="size of the text (default 100 for byte, 500 for word)")
    parser.add_argument("--distinct", action="store_true", help="new words in each repetition")
    parser.add_argument(
        "--num-workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--older-share", type=float, default=0.1, help="share that the older way reads (default 0.1)")
    parser.add_argument("--out", type=Path, help="default prepare-TOKENIZER.json in results/ beside this file")
    parser.add_argument("--older", action="store_true", help=argparse.SUPPRESS)
    sizes = parser.parse_args()
    if sizes.older:
        print(json.dumps(older_way(sizes.tokenizer, sizes.files[0])))
        return
    if sizes.tokenizer == "word" and not sizes.files:
        parser.error("word needs a text: name files, such as wiki.valid.tokens")
    size = round((sizes.megabytes or {"byte": 100, "word": 500}[sizes.tokenizer]) * MEGABYTE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        write_text(path, source_text(sizes.files), size, distinct=sizes.distinct)
        results = {**environment(sizes), **measure(path, sizes)}
    txl, older = results["txl"], results["older_way"]
    print(
        f"txl prepare {txl['median_seconds']:,.2f} s ({txl['median_seconds_beyond_reading']:,.2f} s beyond reading), "
        f"the older way {older['median_seconds_scaled_linearly']:,.1f} s (scaled); {results['median_ratio']:.1f} times"
    )
    out = sizes.out or RESULTS / f"prepare-{sizes.tokenizer}.json"
    write(results, out)


if __name__ == "__main__":
    main()
