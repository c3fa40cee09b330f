"""Load on a server: tokens per second, time to the first token and memory, with any number of clients.

    python benchmarks/serving.py RUN --clients 1,8,64 --seconds 60 [--tokens 128] [--prompt-tokens 64]
    python benchmarks/serving.py RUN --clients 64 --seconds 60 --server transformers     the peer
    python benchmarks/serving.py RUN --clients 64 --seconds 60 --drop 0.1 --check 200    with clients that vanish

RUN is the folder of a run, or the name of a recipe, of which a run with random weights is made. The server is a process
of its own. Each client sends one request after the other and reads the stream; with --drop, that share of requests is
given up after the first tokens. With --check, so many of the texts are compared with those of the same requests alone.

The bound is what the processor's memory bandwidth allows: a step reads the weights once, but for the tables of n-grams
and value embeddings, and the keys and values of every sequence. The bandwidth is measured here, before the server
starts.

The peer is a plain server around transformers' `generate` with the same run: it puts all requests that wait into one
batch, padded on the left, and answers them when the batch is done (implementations/transformers_server.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero, listed, natural, positive
from environment import command, commit, cpu_features, cpu_model, results_file, say, warn_if_busy, write

from transformer_xl.architectures import build_model
from transformer_xl.config import run_settings
from transformer_xl.config.run_config import load_recipe, merge_recipe
from transformer_xl.generation.generate import memory_plan
from transformer_xl.model.sizes import min_cache
from transformer_xl.run import load
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.tokenizers import ByteTokenizer

PEER = Path(__file__).parent / "implementations" / "transformers_server.py"
_BANDWIDTH_BYTES = 2**30


@dataclass
class Load:
    """What the clients saw."""

    first_token_seconds: list[float] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)
    num_tokens: float = 0.0
    """Tokens that arrived while the load was measured, of requests that were read to their end."""
    num_dropped: int = 0
    errors: list[str] = field(default_factory=list)
    texts: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Requests and the texts that they got."""


def make_run(name: str, folder: Path, memory_length: int | None) -> Path:
    """Return the folder of a run, which for the name of a recipe is made with random weights."""
    if Path(name).is_dir():
        return Path(name)
    settings: dict[str, Any] = {"model": {"vocab_size": 256}}
    if memory_length is not None:
        settings["evaluation"] = {"memory_length": memory_length}
    config = run_settings(merge_recipe(load_recipe(name), settings), name)
    torch.manual_seed(1)
    model = build_model(config.model, memory_length=config.train.memory_length)
    return RunFolder.create(folder / name, config, ByteTokenizer(), model.state_dict()).path


def bandwidth(threads: int) -> float:
    """Return how many bytes per second are read from memory: the best of five sums of a large tensor."""
    torch.set_num_threads(threads)
    numbers = torch.ones(_BANDWIDTH_BYTES // 4)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return _BANDWIDTH_BYTES / min(times)


def body_of(index: int, args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the body of a request, which depends on its index alone."""
    draw = random.Random(index)
    prompt = [draw.randrange(97, 123) for _ in range(draw.randint(args.prompt_tokens // 2, args.prompt_tokens))]
    tokens = draw.randint(args.tokens // 2, args.tokens)
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "seed": index}


async def request(url: str, body: dict[str, Any], on_chunk: Any, *, whole: bool = False) -> int | None:
    """Send a request, and call `on_chunk` with each chunk, or the whole answer, until it returns false; return the
    status.
    """
    host, port = re.fullmatch(r"http://([^:/]+):(\d+)", url).groups()
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
    try:
        stream = {} if whole else {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps({**body, **stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            return status
        async for line in reader:
            start = line.find(b"{") if whole or line.startswith(b"data: {") else -1
            if start >= 0 and not on_chunk(json.loads(line[start:])):
                return None
        return status
    finally:
        writer.close()


class Answer:
    """The stream of one request, as it arrives."""

    def __init__(self, load_: Load, end: float, is_dropped: bool) -> None:
        self._load, self._end, self._is_dropped = load_, end, is_dropped
        self.start = time.perf_counter()
        self.first_seconds: float | None = None
        self.texts: list[str] = []
        self._num_timely = 0  # characters that arrived while the load was measured

    def add(self, chunk: dict[str, Any]) -> bool:
        """Take a chunk; return whether to go on."""
        now = time.perf_counter()
        if self.first_seconds is None:
            self.first_seconds = now - self.start
        if "error" in chunk:
            self._load.errors.append(chunk["error"]["message"])
            return False
        self.texts += [choice["text"] for choice in chunk["choices"]]
        num_characters = sum(map(len, self.texts))
        if now < self._end:
            self._num_timely = num_characters
        if usage := chunk.get("usage"):  # once, at the end: a chunk has any number of tokens
            share = self._num_timely / num_characters if num_characters else now < self._end
            self._load.num_tokens += usage["completion_tokens"] * share
        return not (self._is_dropped and self.texts)  # a short answer may come in one piece


async def client(
    url: str, name: str, indices: Iterator[int], end: float, load_: Load, args: argparse.Namespace
) -> None:
    """Send one request after the other until the time is up."""
    while time.perf_counter() < end:
        index = next(indices)
        body, answer = body_of(index, args, name), Answer(load_, end, random.Random(-index).random() < args.drop)
        try:
            status = await request(url, body, answer.add, whole=args.whole)
        except (OSError, ValueError, IndexError) as error:
            load_.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
            continue
        if status is None:
            load_.num_dropped += 1
        elif status != 200:
            load_.errors.append(f"status {status}")
            await asyncio.sleep(0.1)
        else:
            load_.first_token_seconds.append(answer.first_seconds or 0.0)
            load_.request_seconds.append(time.perf_counter() - answer.start)
            if len(load_.texts) < args.check:
                load_.texts.append((body, "".join(answer.texts)))


async def run_load(url: str, name: str, clients: int, args: argparse.Namespace) -> Load:
    """Let so many clients send requests for the time given."""
    load_, indices = Load(), iter(range(clients * 1000, 10**12))
    end = time.perf_counter() + args.seconds
    await asyncio.gather(*(client(url, name, indices, end, load_, args) for _ in range(clients)))
    return load_


async def count_wrong(url: str, load_: Load) -> int:
    """Return how many of the texts differ from those that the same requests get alone."""
    wrong = 0
    for body, text in load_.texts:
        alone: list[str] = []
        await request(url, body, lambda chunk, into=alone: into.extend(c["text"] for c in chunk["choices"]) or True)
        wrong += "".join(alone) != text
    return wrong


def resident_bytes(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Return the memory of a process, and its highest so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    now, peak = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def start_server(run: Path, clients: int, args: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    """Start a server as a process, and return its address when it is ready."""
    threads = ["--threads", str(args.threads)]
    if args.server == "transformers":
        words = [str(PEER), str(run), "--max-batch", str(clients), *threads]
    else:
        words = ["-m", "transformer_xl", "serve", str(run), "--port", "0", "--max-batch", str(clients), *threads]
        words += ["--max-waiting", "1000", *args.option]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if match := re.search(r"on (http://\S+)", line):
            return process, match[1]
    process.communicate()
    raise SystemExit(f"the server did not start: {process.returncode}")


def percentile(values: list[float], share: float) -> float | None:
    """Return the value that this share of the values does not exceed, or None if there is no value."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None


def measure(run: Path, clients: int, bound: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure with one number of clients, with a server of its own."""
    process, url = start_server(run, clients, args)
    try:
        before, _ = resident_bytes(process)
        load_ = asyncio.run(run_load(url, run.name, clients, args))
        after, peak = resident_bytes(process)
        wrong = asyncio.run(count_wrong(url, load_)) if args.check else None
    finally:
        process.kill()
        process.communicate()
    rate = load_.num_tokens / args.seconds
    result = {
        "clients": clients,
        "tokens_per_second": round(rate, 2),
        "share_of_bound": round(rate / bound, 3),
        "bound_tokens_per_second": round(bound, 1),
        "first_token_seconds_p50": percentile(load_.first_token_seconds, 0.5),
        "first_token_seconds_p99": percentile(load_.first_token_seconds, 0.99),
        "request_seconds_p50": percentile(load_.request_seconds, 0.5),
        "request_seconds_p99": percentile(load_.request_seconds, 0.99),
        "requests": len(load_.request_seconds),
        "dropped": load_.num_dropped,
        "errors": len(load_.errors),
        "first_errors": load_.errors[:3],
        "resident_bytes_before": before,
        "resident_bytes_after": after,
        "resident_bytes_peak": peak,
        "checked": len(load_.texts) if args.check else 0,
        "wrong": wrong,
    }
    say(json.dumps(result))
    return result


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description="Load on a server.")
    parser.add_argument("run", help="folder of a run, or name of a recipe")
    parser.add_argument("--clients", type=listed(positive), default="1,8,64")
    parser.add_argument("--seconds", type=above_zero, default=60.0)
    parser.add_argument(
        "--tokens", type=positive, default=128, help="tokens of a request, at most; at least half as many"
    )
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="at most; at least half as many")
    parser.add_argument("--memory-length", type=natural, help="of a run made from a recipe")
    parser.add_argument("--server", choices=["ours", "transformers"], default="ours")
    parser.add_argument("--whole", action="store_true", help="clients ask for whole answers, not for streams")
    parser.add_argument("--option", action="append", default=[], help="a word for txl serve; may be repeated")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--drop", type=float, default=0.0, help="share of requests that are given up")
    parser.add_argument(
        "--check", type=natural, default=0, help="number of texts to compare with the same request alone"
    )
    parser.add_argument("--out", type=Path, help="default: results/serving-RUN-SERVER-PROCESSOR.json")
    return parser


def main() -> None:
    """Measure, and write the results to a file."""
    args = arguments().parse_args()
    args.out = args.out or results_file(f"serving-{Path(args.run).resolve().name}-{args.server}")
    busy = warn_if_busy()
    bytes_per_second = bandwidth(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(args.run, Path(folder), args.memory_length)
        loaded = load(run, device="cpu")
        tables = re.compile(r"ngrams\.tables\.|.*\.value_embedding\.table\.")  # a step reads a few rows of these
        looked_up = sum(one.numel() for name, one in loaded.model.named_parameters() if tables.match(name))
        number_bytes = 2 if "bfloat16" in args.option else 4
        weights = number_bytes * (loaded.model.num_parameters() - looked_up)
        slots = memory_plan(loaded).context_limits.memory_length
        # a sequence that begins empty has on average filled this many slots of its memory
        filled = statistics.mean(
            min(slots, 0.75 * args.prompt_tokens + step) for step in range(int(0.75 * args.tokens))
        )
        cache = number_bytes * min_cache(loaded.config.model, 1) * filled
        del loaded
        results = []
        for clients in args.clients:
            bound = clients * bytes_per_second / (weights + clients * cache)
            results.append(measure(run, clients, bound, args))
    values = {
        "command": command(),
        "commit": commit(),
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "torch": torch.__version__,
        "threads": args.threads,
        "busy": busy,
        "bytes_per_second": round(bytes_per_second),
        "weight_bytes": weights,
        "number_bytes": number_bytes,
        "memory_slots": slots,
        "results": results,
    }
    write(values, args.out)


if __name__ == "__main__":
    main()
