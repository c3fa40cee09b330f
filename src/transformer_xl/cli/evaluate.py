"""`txl evaluate`: score a text with a run, at any segment, memory, window and clamp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.output import ProgressBar, print_json, print_table
from transformer_xl.config import UserError

if TYPE_CHECKING:
    from transformer_xl.evaluation.scoring import Evaluation, Plan
    from transformer_xl.run_folder import Run
    from transformer_xl.text.token_store import TokenSplit


def evaluate(
    run: Path,
    /,
    *,
    corpus: Path | None = None,
    split: str = "test",
    segment: int | None = None,
    memory: int | None = None,
    window: int | Literal["none"] | None = None,
    clamp: int | Literal["none"] | None = None,
    sweep_memory: str | None = None,
    tokens: int | None = None,
    weights: Literal["best", "last"] = "best",
    precision: Literal["auto", "float32", "bfloat16"] = "float32",
    device: str = "auto",
    threads: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Score a text: perplexity and bits per byte, every token once, as one stream.

    Parameters
    ----------
    run
        Folder of a run.
    corpus
        Corpus with the run's vocabulary. [default: the one it was trained on]
    split
        train, valid or test.
    segment
        New tokens read in one step. [default: the run's]
    memory
        Memory slots, in tokens; may be far more than in training. [default: the run's]
    window
        Number of keys a query sees, itself included; none: all there are. [default: the run's]
    clamp
        Distances above this count as this one; none: no limit. [default: the run's]
    sweep_memory
        Several memory lengths, such as 0,64,512: one line of results for each.
    tokens
        Score only so many tokens, from the start of the split.
    weights
        The best weights on the validation text, or the last ones.
    precision
        Number format of matrix products; bfloat16 is faster where the machine has it, and less exact.
    device
        auto, cuda, mps or cpu.
    threads
        CPU threads of one operation.
    json
        Print one JSON object and nothing else on standard output.
    """
    lengths = memory_lengths(sweep_memory)
    if lengths and memory is not None:
        raise UserError("--memory and --sweep-memory were both given; use one of them")
    if tokens is not None and tokens < 1:
        raise UserError(f"--tokens {tokens}: wanted 1 or more")
    from transformer_xl.cli.train import corpus_of
    from transformer_xl.device import choose_device, set_threads
    from transformer_xl.evaluation.scoring import Plan
    from transformer_xl.run_folder import Run, RunFolder

    set_threads(threads)
    folder = RunFolder.open(run)
    text = corpus_of(folder, corpus).split(split)
    plans = [
        replace(Plan.of(folder.config, segment=segment, memory=length, window=window, clamp=clamp), precision=precision)
        for length in (lengths or [memory])
    ]
    model = folder.load_model(choose_device(device), weights)
    loaded = Run(model, folder.vocabulary, folder.config)
    results = [_scored(loaded, text, plan, tokens) for plan in plans]
    _show(run, split, results, json, swept=bool(lengths))


def memory_lengths(words: str | None) -> list[int]:
    """Reads `0,64,512`.

    Raises:
        UserError: something else than whole numbers from 0 on.
    """
    parts: list[str] = [] if words is None else words.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--sweep-memory {words}: wanted whole numbers with commas between, such as 0,64,512")
    return [int(part) for part in parts]


def _scored(run: Run, split: TokenSplit, plan: Plan, limit: int | None) -> dict[str, Any]:
    from transformer_xl.device import peak_memory_bytes
    from transformer_xl.evaluation.scoring import evaluate as score

    total = min(split.num_tokens, limit or split.num_tokens)
    with ProgressBar(f"memory {plan.reach.memory:,}", total, "tokens") as bar:
        result: Evaluation = score(run, split, plan, limit=limit, progress=bar.advance)
    return {**result.as_dict(), "peak_memory_bytes": peak_memory_bytes()}


def _show(run: Path, split: str, results: list[dict[str, Any]], json: bool, *, swept: bool) -> None:
    if json:
        head = {"run": str(run), "split": split}
        print_json({**head, "sweep": results} if swept else {**head, **results[0]})
        return
    rows = [
        [
            f"{result['memory']:,}",
            f"{result['segment']:,}",
            *("all" if result[name] is None else f"{result[name]:,}" for name in ("window", "clamp")),
            f"{result['bits_per_byte']:.4f}",
            f"{result['perplexity']:.3f}",
            f"{result['nats_per_token']:.4f}",
            f"{result['tokens_per_second']:,.0f}",
        ]
        for result in results
    ]
    columns = ["memory", "segment", "window", "clamp", "bits/byte", "perplexity", "nats/token", "tokens/s"]
    print_table(f"{run}, {split}: {results[0]['tokens']:,} tokens, {results[0]['bytes']:,} bytes", columns, rows)
