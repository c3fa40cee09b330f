"""Measures how fast a stream is read, how long a single line takes, and whether memory stays constant.

    python benchmarks/streams.py [--num-bytes 10000000] [--run DIR] [--segment-length 256] [--out FILE]

A synthetic log (service_log.py) is read in blocks of 8 KiB, as `txl watch` reads it, first without a pause, which gives
bytes per second and the resident memory over the whole text; then line by line with a flush after each, as where lines
come slowly, which gives the time from a line to its surprisal. Without a run the model is the tiny one of
flat_memory.py, so that the text is read in minutes. Linux only, because it reads /proc.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import command, commit, cpu_features, cpu_model, positive, results_file, say, warn_if_busy, write
from flat_memory import MIB, MODEL, PLAN, SETTLED, resident_bytes
from service_log import as_bytes, service_log

from transformer_xl import Run, RunConfig, SurprisalStream, TransformerXL, TransformerXLConfig, load
from transformer_xl.apps.watch.line_surprisal import LineStream
from transformer_xl.apps.watch.live import BLOCK_BYTES
from transformer_xl.config import TrainConfig
from transformer_xl.text.tokenizers import ByteTokenizer

_LOG_LINES = 10_000  # the log is repeated, so that only the stream takes memory


def tiny_run() -> Run:
    """Return a run of random weights."""
    torch.manual_seed(5)
    config, length = TransformerXLConfig(**MODEL), PLAN.context_limits.memory_length
    settings = RunConfig(model=config, train=TrainConfig(segment_length=PLAN.segment_length, memory_length=length))
    return Run(TransformerXL(config, memory_length=length).eval(), ByteTokenizer(), settings)


def measure(run: Run, num_bytes: int, segment_length: int | None, *, num_latencies: int = 300) -> dict[str, Any]:
    """Read a log of this many bytes, and return speed, samples of resident memory, and times of single lines."""
    log, settings = as_bytes(service_log(_LOG_LINES, seed=1)), {"segment_length": segment_length}
    lines = LineStream(SurprisalStream(run, **{name: value for name, value in settings.items() if value}))
    samples, done, num_lines, nats, start = [(0, resident_bytes())], 0, 0, 0.0, time.perf_counter()
    while done < num_bytes:
        begin = done % len(log)
        block = log[begin : begin + min(BLOCK_BYTES, num_bytes - done)]
        found = lines.read(block)
        done, num_lines, nats = done + len(block), num_lines + len(found), nats + sum(line.bits for line in found)
        if done >= len(samples) * num_bytes // 200:
            samples.append((done, resident_bytes()))
    seconds = time.perf_counter() - start
    settled = [resident for position, resident in samples if position >= SETTLED * num_bytes]
    lines.flush()
    latencies: list[float] = []
    for line in log.splitlines(keepends=True)[:num_latencies]:
        begin_line = time.perf_counter()
        lines.read(line)
        lines.flush()
        latencies.append(time.perf_counter() - begin_line)
    return {
        "bytes": done,
        "lines": num_lines,
        "bits_per_line": nats / max(1, num_lines),
        "seconds": round(seconds, 1),
        "bytes_per_second": round(done / seconds),
        "line_milliseconds": {
            name: round(float(np.quantile(latencies, quantile)) * 1000, 2)
            for name, quantile in (("median", 0.5), ("99%", 0.99))
        },
        "resident_bytes": {"start": samples[0][1], "least_settled": min(settled), "most_settled": max(settled)},
        "samples": samples,
    }


def main() -> None:
    """Measure, and write the results to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-bytes", type=positive, default=10_000_000)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--segment-length", type=positive)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=results_file("streams"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_average = warn_if_busy()
    run = load(args.run) if args.run else tiny_run()
    results = {
        "command": command(),
        "commit": commit(),
        "torch": torch.__version__,
        "machine": {
            "cpu": cpu_model(), "features": cpu_features(), "python": platform.python_version(),
            "threads": args.threads, "load": load_average,
        },
        "model": run.config.model.model_dump(mode="json"),
        "segment_length": args.segment_length or run.config.train.segment_length,
        **measure(run, args.num_bytes, args.segment_length),
    }  # fmt: skip
    resident = results["resident_bytes"]
    say(f"{results['bytes_per_second']:,} bytes per second; line: {results['line_milliseconds']} ms")
    say(f"resident: {resident['least_settled'] / MIB:.1f} to {resident['most_settled'] / MIB:.1f} MiB once settled")
    write(results, args.out)


if __name__ == "__main__":
    main()
