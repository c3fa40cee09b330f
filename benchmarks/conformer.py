"""Measure layers of Conformers as transformers computes them and accelerated, and the operator beside a whole matrix.

    python benchmarks/conformer.py [--audio 10,30,120,600] [--lengths 256,...,8192] [--quick] [--out FILE]

The first part has one encoder layer of each published size, with its dropout in training, for one recording: the time
and the peak memory of a forward pass in inference mode, and of a forward and backward pass, which is a training step
but for the optimizer. `ours` is the layer after `accelerate`, the others are transformers' implementations of
attention. The second part is `relative_attention` alone, causal and to both sides, by the fastest kernel and by
`sdpa`, which makes the matrix of position scores and calls `scaled_dot_product_attention`.

Every implementation and length has a process of its own. Peak memory is that of its first pass beyond what was in use;
then all implementations of a length are timed in turns, and medians are reported. A pass that takes longer than
--seconds is timed once. Not measured is what is expected, from the length before, to need more than --max-memory, or
more than --max-seconds.

Shape suffixes: B batch size, T queries, S keys, D model width, N heads, H head width.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero, listed, one_of, positive
from attention_cases import peak_beyond
from environment import results_file, say, surroundings, warn_if_busy, write
from torch import Tensor, nn

from transformer_xl.device import set_threads
from transformer_xl.integrations.conformer import accelerate
from transformer_xl.ops import relative_attention
from transformer_xl.ops.kernels import choose

PASSES = ("forward", "training")
ROUNDS = 3
IMPORTS = [
    "torch",
    "transformer_xl.ops",
    "transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer",
    "transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming",
    "transformers.models.parakeet.modeling_parakeet",
    "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer",
]
# words, frames in a second after subsampling, transformers' implementations of attention
MODELS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "parakeet": ("Parakeet CTC 0.6B and 1.1B (1,024, 8 heads)", 12.5, ("eager", "sdpa")),
    "nemotron": ("Nemotron ASR streaming 0.6B (the same, chunks of 14 frames that see 70 before)", 12.5, ("sdpa",)),
    "wav2vec2": ("Wav2Vec2-Conformer large (1,024, 16 heads)", 50, ("eager", "sdpa")),
    "fastspeech2": ("FastSpeech2-Conformer's decoder (384, 2 heads)", 22_050 / 256, ("eager",)),
}


def layer(model: str, frames: int, attention: str) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], int]:
    """Return an encoder layer with random weights, a function that calls it with hidden states, and its width."""
    import transformers
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as fastspeech2
    from transformers.models.nemotron_asr_streaming import modeling_nemotron_asr_streaming as nemotron
    from transformers.models.parakeet import modeling_parakeet as parakeet
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as wav2vec2

    if model == "fastspeech2":
        config = transformers.FastSpeech2ConformerConfig()
        module = fastspeech2.FastSpeech2ConformerEncoderLayer(config, config.decoder_config)
        nn.init.normal_(module.self_attn.pos_bias_u)
        nn.init.normal_(module.self_attn.pos_bias_v)
        positions = fastspeech2.FastSpeech2ConformerRelPositionalEncoding(config, config.decoder_config).eval()
        encoding = positions(torch.zeros(1, frames, config.hidden_size))[1]
        return module, lambda one, hidden_BTD: one(hidden_BTD, encoding)[0], config.hidden_size
    if model == "wav2vec2":
        config = transformers.Wav2Vec2ConformerConfig(
            hidden_size=1024, num_attention_heads=16, intermediate_size=4096, position_embeddings_type="relative",
            max_source_positions=max(5000, frames),
        )  # fmt: skip
        config._attn_implementation = attention
        encoding = wav2vec2.Wav2Vec2ConformerRelPositionalEmbedding(config)(torch.zeros(1, frames, 1024))
        module = wav2vec2.Wav2Vec2ConformerEncoderLayer(config)
        return module, lambda one, hidden_BTD: one(hidden_BTD, relative_position_embeddings=encoding), 1024
    if model == "parakeet":
        config = transformers.ParakeetEncoderConfig()
        module, encode = parakeet.ParakeetEncoderBlock(config, 0), parakeet.ParakeetEncoderRelPositionalEncoding
        mask = None
    else:
        config = transformers.NemotronAsrStreamingEncoderConfig(max_position_embeddings=max(5000, frames))
        module, encode = (
            nemotron.NemotronAsrStreamingEncoderBlock(config, 0),
            nemotron.NemotronAsrStreamingEncoderRelPositionalEncoding,
        )
        chunk_T = torch.arange(frames) // (config.default_num_lookahead_tokens + 1)
        num_before = (config.sliding_window - 1) // (config.default_num_lookahead_tokens + 1)
        difference_TS = chunk_T[:, None] - chunk_T
        mask = ((difference_TS >= 0) & (difference_TS <= num_before))[None, None]
    config._attn_implementation = attention
    encoding = encode(config)(torch.zeros(1, frames, config.hidden_size))
    return (
        module,
        lambda one, hidden_BTD: one(hidden_BTD, attention_mask=mask, position_embeddings=encoding),
        config.hidden_size,
    )


def passes_of_layer(model: str, frames: int, implementation: str, kernel: str) -> dict[str, Callable[[], object]]:
    """Return what is measured of a layer."""
    torch.manual_seed(1)
    module, call, width = layer(model, frames, "sdpa" if implementation == "ours" else implementation)
    if implementation == "ours":
        accelerate(module, implementation=kernel)
    hidden_BTD = torch.randn(1, frames, width)

    def forward() -> None:
        with torch.inference_mode():
            call(module.eval(), hidden_BTD)

    def training() -> None:
        call(module.train(), hidden_BTD.detach().requires_grad_()).sum().backward()
        module.zero_grad()

    return {"forward": forward, "training": training}


def passes_of_operator(
    causal: bool, length: int, sizes: tuple[int, int], kernel: str
) -> dict[str, Callable[[], object]]:
    """Return what is measured of the operator."""
    generator, num_distances = torch.Generator().manual_seed(1), length if causal else 2 * length - 1
    shapes = [*([(1, length)] * 3), (num_distances,), (), ()]
    tensors = [torch.randn(*shape, *sizes, generator=generator).requires_grad_() for shape in shapes]
    grad_BTNH = torch.ones(1, length, *sizes)

    def forward() -> None:
        with torch.inference_mode():
            relative_attention(*tensors, causal=causal, implementation=kernel)

    def both() -> None:
        torch.autograd.grad(relative_attention(*tensors, causal=causal, implementation=kernel), tensors, grad_BTNH)

    return {"forward": forward, "training": both}


def serve(what: dict[str, Any], requests: Connection) -> None:
    """Measure in this process what is asked for, until the other side closes."""
    set_threads(what.pop("threads"))
    make, size = (passes_of_layer, "frames") if "model" in what else (passes_of_operator, "length")
    for work in make(**what | {size: min(16, what[size])}).values():
        work()  # which allocates what stays
    passes = make(**what)
    while True:
        try:
            name, calls = requests.recv()
        except EOFError:
            return
        if calls == 0:
            ctypes.CDLL(None).malloc_trim(0)  # what earlier passes left
            requests.send(peak_beyond(passes[name], "cpu"))
            continue
        began = time.perf_counter()
        for _ in range(calls):
            passes[name]()
        requests.send((time.perf_counter() - began) / calls)


class Worker:
    """A new process that measures one implementation at one length."""

    def __init__(self, what: dict[str, Any]) -> None:
        """Start it from one that has imported transformers and computed nothing."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS if "model" in what else IMPORTS[:2])
        self.requests, other = context.Pipe()
        self.process = context.Process(target=serve, args=(what, other), daemon=True)
        self.process.start()
        other.close()

    def ask(self, name: str, calls: int) -> float | None:
        """Return the seconds of a call, or for 0 calls the peak bytes of one; None if the process died."""
        try:
            self.requests.send((name, calls))
            return self.requests.recv()
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """End the process."""
        self.requests.close()
        self.process.kill()
        self.process.join()


@contextmanager
def started(whats: dict[str, dict[str, Any]]) -> Iterator[dict[str, Worker]]:
    """Start a process for each implementation, and end them."""
    workers = {name: Worker(what) for name, what in whats.items()}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.end()


def measure(whats: dict[str, dict[str, Any]], seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Return seconds and peak bytes by implementation and pass; what failed is left out.

    Args:
        whats: the keywords of the passes' maker for each implementation, and `passes`, those to be measured.
        seconds: about the time that all rounds of one take.
    """
    asked = {name: what.pop("passes") for name, what in whats.items()}
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in whats}
    with started({name: what for name, what in whats.items() if asked[name]}) as workers:
        for of_pass in PASSES:
            calls: dict[str, int] = {}
            times: dict[str, list[float]] = {}
            for name, worker in workers.items():
                if of_pass not in asked[name]:
                    continue
                peak = worker.ask(of_pass, 0)
                first = None if peak is None else worker.ask(of_pass, 1)
                if peak is None or first is None:
                    say(f"{name}: its process ended, of memory perhaps")
                    continue
                found[name][of_pass] = {"peak_bytes": peak}
                times[name] = [first]
                calls[name] = 0 if first > seconds else max(1, round(seconds / ROUNDS / first))
            for _ in range(ROUNDS):
                for name in [name for name, number in calls.items() if number]:
                    times[name].append(workers[name].ask(of_pass, calls[name]) or float("nan"))
            for name, measured in times.items():
                found[name][of_pass]["seconds"] = statistics.median(measured[1:] or measured)
    return found


def series(
    lengths: list[int], whats: Callable[[int], dict[str, dict[str, Any]]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the results of growing lengths; what would need too much has `expected_bytes` or `expected_seconds`.

    The memory of ours is expected to grow with the length, all else with its square.
    """
    lines: list[dict[str, Any]] = []
    for length in lengths:
        expected: dict[str, dict[str, dict[str, float]]] = {}
        by_name = whats(length)
        for name, what in by_name.items():
            expected[name], what["passes"] = {}, []
            for of_pass in PASSES:
                last = next((r for line in reversed(lines) if (r := line["results"][name].get(of_pass))), None)
                factor = length / lines[-1]["length"] if lines else 1
                if last:
                    seconds = last.get("seconds", last.get("expected_seconds", 0)) * factor**2
                    size = last.get("peak_bytes", last.get("expected_bytes", 0)) * factor ** (
                        1 if name == "ours" else 2
                    )
                    if size > args.max_memory * 1e9 or seconds > args.max_seconds:
                        expected[name][of_pass] = {"expected_seconds": seconds, "expected_bytes": size}
                        continue
                what["passes"].append(of_pass)
        results = measure(by_name, args.seconds)
        lines.append({"length": length, "results": {name: results[name] | expected[name] for name in results}})
        for name, of_passes in lines[-1]["results"].items():
            say(f"  {length:>7,} {name:<8} " + "; ".join(f"{p}: {words(r)}" for p, r in of_passes.items()))
    return lines


def words(result: dict[str, float] | None) -> str:
    """Return time and memory as readable text."""
    if result is None:
        return "failed"
    if "expected_bytes" in result:
        return f"(about {result['expected_bytes'] / 1e9:,.0f} GB, {result['expected_seconds']:,.0f} s)"
    return f"{result['seconds'] * 1e3:,.1f} ms, {result['peak_bytes'] / 1e6:,.0f} MB"


def tables(results: dict[str, Any]) -> str:
    """Return the results as tables of Markdown."""
    lines = []
    for model in results["layers"]:
        names = list(model["lines"][0]["results"])
        lines += ["", f"**{model['words']}**, {model['frames_per_second']:.4g} frames/s", ""]
        lines += _table(["audio", "frames", "pass", *names], len(names))
        for line in model["lines"]:
            audio = f"{line['length'] / model['frames_per_second']:.0f} s"
            lines += [
                f"| {audio} | {line['length']:,} | {of_pass} | "
                + " | ".join(words(line["results"][name].get(of_pass)) for name in names)
                + " |"
                for of_pass in PASSES
            ]
    lines += ["", f"**The operator**, {results['operator']['sizes'][0]} heads of {results['operator']['sizes'][1]}", ""]
    lines += _table(["direction", "T", "pass", results["operator"]["kernel"], "sdpa", "ours: each key / causal"], 3)
    by_direction = results["operator"]["lines"]
    for direction, of_lengths in by_direction.items():
        for line, causal in zip(of_lengths, by_direction["causal"], strict=True):
            for of_pass in PASSES:
                mine, of_causal = (one["results"]["ours"].get(of_pass) for one in (line, causal))
                ratio = ""
                if direction != "causal" and "seconds" in (mine or {}) and "seconds" in (of_causal or {}):
                    pairs = line["length"] ** 2 / (line["length"] * (line["length"] + 1) / 2)
                    ratio = f"{mine['seconds'] / of_causal['seconds'] / pairs:.2f}"
                cells = [words(line["results"][name].get(of_pass)) for name in ("ours", "sdpa")]
                lines.append(f"| {direction} | {line['length']:,} | {of_pass} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines).strip()


def _table(heads: list[str], num_right: int) -> list[str]:
    rule = ["---"] * (len(heads) - num_right) + ["---:"] * num_right
    return [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|"]


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Times and memory of Conformer layers and of relative_attention.")
    models, counts = listed(one_of([*MODELS, "none"])), listed(positive)
    parser.add_argument("--models", type=models, default=",".join(MODELS), help=f"default: {','.join(MODELS)}; or none")
    parser.add_argument("--audio", type=counts, default="10,30,120,600", help="lengths of the recordings in seconds")
    parser.add_argument("--lengths", type=counts, default="256,512,1024,2048,4096,8192", help="T of the operator")
    parser.add_argument("--n-heads", type=positive, default=8, help="heads of the operator (default 8)")
    parser.add_argument("--d-head", type=positive, default=64, help="their width (default 64)")
    parser.add_argument("--kernel", default="auto", help="kernel of ours (default: the fastest)")
    parser.add_argument(
        "--seconds", type=above_zero, default=1.5, help="about the time of one measurement (default 1.5)"
    )
    parser.add_argument("--max-memory", type=above_zero, default=16, help="GB that a pass may be expected to need")
    parser.add_argument("--max-seconds", type=above_zero, default=100, help="seconds that it may be expected to need")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: torch's default")
    parser.add_argument("--out", type=Path, default=results_file("conformer"))
    parser.add_argument("--quick", action="store_true", help="short recordings, for a test of this file")
    args = parser.parse_args()
    if args.quick:
        args.audio, args.lengths, args.seconds, args.n_heads, args.d_head = [2, 4], [32, 64], 0.02, 2, 8
    args.models = [name for name in args.models if name != "none"]
    return args


def main() -> None:
    """Measure, write the results to a file, and print tables."""
    args = parsed()
    set_threads(args.threads)
    kernel = choose(args.kernel, torch.device("cpu"), torch.float32).name
    common = {"kernel": kernel, "threads": args.threads}
    results = surroundings("cpu", warn_if_busy(), ("torch", "transformers")) | {"layers": []}
    for model in args.models:
        described, rate, theirs = MODELS[model]
        say(described)

        def layers(frames: int, model: str = model, theirs: tuple[str, ...] = theirs) -> dict[str, dict[str, Any]]:
            names = ("ours", *theirs)
            return {name: {"model": model, "frames": frames, "implementation": name, **common} for name in names}

        lines = series([round(seconds * rate) for seconds in args.audio], layers, args)
        results["layers"].append({"model": model, "words": described, "frames_per_second": rate, "lines": lines})
    sizes, by_direction = (args.n_heads, args.d_head), {}
    for direction in ("causal", "two-sided"):
        say(f"operator, {direction}")

        def operators(length: int, causal: bool = direction == "causal") -> dict[str, dict[str, Any]]:
            asked = {"causal": causal, "length": length, "sizes": sizes, **common}
            return {"ours": dict(asked), "sdpa": asked | {"kernel": "sdpa"}}

        by_direction[direction] = series(args.lengths, operators, args)
    results["operator"] = {"kernel": kernel, "sizes": sizes, "lines": by_direction}
    write(results, args.out)
    print(tables(results))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
