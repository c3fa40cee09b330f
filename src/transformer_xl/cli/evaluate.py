"""`txl evaluate`: score a text with a run, at any segment, memory, window and clamp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import ProgressBar, print_json, print_table
from transformer_xl.config import RunConfig, UserError

if TYPE_CHECKING:
    from transformer_xl.evaluation.scoring import Evaluation, Plan
    from transformer_xl.run_folder import Run
    from transformer_xl.text.token_store import TokenSplit


@dataclass(frozen=True)
class Lengths:
    """How far attention looks; what is not given is as the run has it."""

    segment: int | None = None
    """New tokens read in one step."""
    memory: int | None = None
    """Memory slots, in tokens; may be far more than in training."""
    window: int | Literal["none"] | None = None
    """Number of keys a query sees, itself included; none: all there are."""
    clamp: int | Literal["none"] | None = None
    """Distances above this count as this one; none: no limit."""
    sweep_memory: str | None = None
    """Several memory lengths, such as 0,64,512: one line of results for each."""

    def check(self) -> None:
        """Refuses what cannot be meant.

        Raises:
            UserError: both memory and several memories, or something else than whole numbers from 0 on.
        """
        if self.sweep_memory is None:
            return
        if self.memory is not None:
            raise UserError("--memory and --sweep-memory were both given; use one of them")
        parts = [part.strip() for part in self.sweep_memory.split(",")]
        if not all(part.isascii() and part.isdecimal() and len(part) < 12 for part in parts):
            raise UserError(
                f"--sweep-memory {self.sweep_memory}: wanted whole numbers with commas between, such as 0,64,512"
            )

    def plans(self, config: RunConfig) -> list[Plan]:
        """One plan for each memory length."""
        from transformer_xl.evaluation.scoring import Plan

        swept = None if self.sweep_memory is None else [int(part) for part in self.sweep_memory.split(",")]
        return [
            Plan.of(config, segment=self.segment, memory=memory, window=self.window, clamp=self.clamp)
            for memory in (swept or [self.memory])
        ]


_THE_RUNS = Lengths()


def evaluate(
    run: Path,
    /,
    *,
    corpus: Path | None = None,
    split: str = "test",
    lengths: Annotated[Lengths, Parameter(name="*")] = _THE_RUNS,
    tokens: int | None = None,
    weights: Literal["best", "last"] = "best",
    precision: Literal["auto", "float32", "bfloat16"] = "float32",
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
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
    lengths
        How far attention looks.
    tokens
        Score only so many tokens, from the start of the split.
    weights
        The best weights on the validation text, or the last ones.
    precision
        Number format of matrix products; bfloat16 is faster where the machine has it, and less exact.
    """
    lengths.check()
    if tokens is not None and tokens < 1:
        raise UserError(f"--tokens {tokens}: wanted 1 or more")
    from transformer_xl.cli.train import corpus_of
    from transformer_xl.run_folder import Run, RunFolder

    device = machine.choose()
    folder = RunFolder.open(run)
    opened = corpus_of(folder, corpus)
    text = opened.split(split)
    opened.verify(split)
    plans = [replace(plan, precision=precision) for plan in lengths.plans(folder.config)]
    model = folder.load_model(device, weights)
    loaded = Run(model, folder.vocabulary, folder.config)
    results = [_scored(loaded, text, plan, tokens) for plan in plans]
    counted = (
        "words and line ends" if folder.vocabulary.kind == "words" and folder.vocabulary.closes_lines else "tokens"
    )
    _show(run, split, results, json, swept=lengths.sweep_memory is not None, counted=counted)


def _scored(run: Run, split: TokenSplit, plan: Plan, limit: int | None) -> dict[str, Any]:
    from transformer_xl.evaluation.scoring import evaluate as score

    total = min(split.num_tokens, limit or split.num_tokens)
    with ProgressBar(f"memory {plan.reach.memory:,}", total, "tokens") as bar:
        result: Evaluation = score(run, split, plan, limit=limit, progress=bar.advance)
    return result.as_dict()


def _show(run: Path, split: str, results: list[dict[str, Any]], json: bool, *, swept: bool, counted: str) -> None:
    if json:
        from transformer_xl.device import peak_memory_bytes

        head = {"run": str(run), "split": split, "peak_memory_bytes": peak_memory_bytes()}
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
    tokens, unknown = results[0]["tokens"], results[0]["unknown"]
    of_them = f" ({unknown:,} of them unknown words, {unknown / tokens:.1%})" if unknown else ""
    print_table(f"{run}, {split}: {tokens:,} {counted}{of_them}, {results[0]['bytes']:,} bytes", columns, rows)
