"""`txl analyze context`: how far back a text still helps each of several models, as tables and a curve of gains."""

from __future__ import annotations

import json as encoder
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import EvaluationConfig, RelativeConfig, RunConfig, UserError, check_settings
from transformer_xl.files import write_text
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    import torch

    from transformer_xl.analysis.effective_context import ContextSweep, EffectiveContext, GroupModel
    from transformer_xl.evaluation.evaluate import EvaluationPlan
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.token_store import Tokens


@dataclass(frozen=True)
class Measured:
    """What is measured, and where."""

    fractions: str = "0.1,0.5,1.0"
    """Shares of the places that count, those that are hardest to predict: the paper's r."""
    threshold: float = 0.01
    """Smallest gain in perplexity that counts, as a share."""
    step: int = 100
    """How many tokens longer each context is than the one before."""
    start: int | None = None
    """The shortest context, in tokens. [default: the step]"""
    longest: int | None = None
    """No context is longer. [default: nine steps beyond the shortest]"""
    positions: int = 1000
    """Number of places drawn from the text."""
    seed: int = 1
    """Of that draw."""
    corpus: Path | None = None
    """Corpus with the runs' vocabulary. [default: the one the first was trained on]"""
    split: str = "test"
    """train, valid or test."""

    def sweep(self) -> ContextSweep:
        """The same, checked."""
        from transformer_xl.analysis.effective_context import ContextSweep

        start = self.step if self.start is None else self.start
        return ContextSweep(
            min_context=start,
            context_step=self.step,
            max_context=start + 9 * self.step if self.longest is None else self.longest,
            num_positions=self.positions,
            seed=self.seed,
            fractions=_shares(self.fractions),
            threshold=self.threshold,
        )


@dataclass(frozen=True)
class Attention:
    """How far models with memory look in one layer; each model as its run is evaluated where nothing is given."""

    memory: int | Literal["all"] | None = None
    """Memory slots, in tokens; all: as many as the longest context."""
    window: int | Literal["none"] | None = None
    """Keys a query sees, itself included; none: all."""
    clamp: int | Literal["none"] | None = None
    """Distances above this count as this one; none: no limit."""

    def plan(self, config: RunConfig, longest: int) -> EvaluationPlan:
        """How a run reads; what its model does not have is left as it is."""
        from transformer_xl.evaluation.evaluate import EvaluationPlan

        given: dict[str, int | str | None] = {}
        if config.model.has_memory:
            given["memory_length"] = longest if self.memory == "all" else self.memory
        if isinstance(config.model, RelativeConfig):
            given |= {"attention_window": self.window, "clamp_length": self.clamp}
        limits = {name: None if value == "none" else value for name, value in given.items() if value is not None}
        return EvaluationPlan.resolve(config, check_settings(EvaluationConfig, limits, "flags"))


@dataclass(frozen=True)
class Files:
    """What is written."""

    out: Path | None = None
    """File for all figures, as JSON."""
    picture: Path | None = None
    """File for the curves of gains, .svg or .png."""

    def check(self) -> None:
        """Refuses, before anything is computed, what could not be written in the end."""
        for flag, path in (("--out", self.out), ("--picture", self.picture)):
            if path is None:
                continue
            if path.exists():
                raise UserError(f"{path} exists already; choose another {flag}")
            if not path.absolute().parent.is_dir():
                raise UserError(f"{path}: there is no folder {path.parent}; make it, or choose another {flag}")
        if self.picture is not None:
            from transformer_xl.analysis.gain_curves import check_picture

            check_picture(self.picture)
            if self.picture == self.out:
                raise UserError(f"{self.out} was given for --out and --picture; choose two names")

    def write(self, figures: dict[str, Any]) -> None:
        """Writes what is wanted."""
        if self.out is not None:
            write_text(self.out, encoder.dumps(figures, indent=1) + "\n")
        if self.picture is not None:
            from transformer_xl.analysis.gain_curves import draw_gains, write_picture

            write_picture(self.picture, draw_gains(figures))


_THE_PAPERS, _THE_RUNS, _NONE = Measured(), Attention(), Files()


def context(
    *runs: str,
    measured: Annotated[Measured, Parameter(name="*")] = _THE_PAPERS,
    attention: Annotated[Attention, Parameter(name="*")] = _THE_RUNS,
    files: Annotated[Files, Parameter(name="*")] = _NONE,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Measure how far back a text still helps each model (the paper's relative effective context length).

    The runs are one group: each model is held to the best of them. What it will cost is said before it begins.

    Parameters
    ----------
    runs
        Folders of runs with the same vocabulary; NAME=RUN to call one something else than its folder.
    measured
        What is measured, and where.
    attention
        How far models with memory look in one layer.
    files
        What is written.
    """
    named = _named(runs)
    files.check()
    sweep = measured.sweep()
    from transformer_xl.analysis.effective_context import measure_context

    folders = _opened(named)
    tokens_K, corpus = _text(next(iter(folders.values())), measured)
    sweep.draw_positions(len(tokens_K))
    device = machine.choose()
    models = [_reader(name, folder, attention, sweep, device) for name, folder in folders.items()]
    total = _say_cost(models, sweep, tokens_K)
    with ProgressBar("context", total, "tokens") as bar:
        found = measure_context(models, tokens_K, sweep, bar.advance)
    figures = {
        "corpus": corpus,
        "split": measured.split,
        "device": str(device),
        "runs": {name: str(path) for name, path in named.items()},
        **found.as_dict(),
    }
    if json:
        print_json(figures)
    else:
        _show(measured.split, found)
    files.write(figures)  # last: should a disk be full, the figures are on the screen


def _shares(given: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in given.split(","))
    except ValueError:
        raise UserError(f"--fractions {given}: wanted shares with commas between, such as 0.1,0.5,1.0") from None


def _named(runs: tuple[str, ...]) -> dict[str, Path]:
    """The folders by name: that of the folder, where none was given."""
    if not runs:
        raise UserError("no run was given; name the folders of the runs of one group, such as runs/a runs/b")
    named: dict[str, Path] = {}
    for word in runs:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():
            name, path = Path(word).resolve().name, word
        if not name or not path:
            raise UserError(f"{word}: wanted the folder of a run, or NAME=RUN")
        if name in named:
            raise UserError(f"two runs are called {name}, {named[name]} and {path}; name one otherwise: NAME=RUN")
        named[name] = Path(path)
    return named


def _opened(named: dict[str, Path]) -> dict[str, RunFolder]:
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.tokenizers import fingerprint

    folders = {name: RunFolder.open(path) for name, path in named.items()}
    first = next(iter(folders.values()))
    for folder in folders.values():
        if fingerprint(folder.tokenizer) != fingerprint(first.tokenizer):
            raise UserError(
                f"{folder.path} has another vocabulary ({folder.tokenizer.kind}, {folder.tokenizer.vocab_size:,} tokens) "
                f"than {first.path} ({first.tokenizer.kind}, {first.tokenizer.vocab_size:,} tokens); give runs that read "
                "the same tokens"
            )
    return folders


def _text(first: RunFolder, measured: Measured) -> tuple[Tokens, str]:
    """The text, and where it comes from."""
    corpus = first.open_corpus(measured.corpus)
    tokens_K = corpus.split(measured.split).tokens
    corpus.verify(measured.split)
    return tokens_K, str(corpus.path)


def _reader(
    name: str, folder: RunFolder, attention: Attention, sweep: ContextSweep, device: torch.device
) -> GroupModel:
    from transformer_xl.analysis.effective_context import GroupModel

    return GroupModel(name, folder.load_model(device), attention.plan(folder.config, sweep.max_context))


def _say_cost(models: list[GroupModel], sweep: ContextSweep, tokens_K: Tokens) -> int:
    """Says how much there is to do, and after a trial how long it will take; gives the number of tokens."""
    costs = [reader.cost(sweep) for reader in models]
    contexts = sweep.contexts
    each = ", ".join(f"{reader.name} {cost:,}" for reader, cost in zip(models, costs, strict=True))
    say(
        f"{sweep.num_positions:,} places, {len(contexts)} contexts of {contexts[0]:,} to {contexts[-1]:,} tokens; "
        f"tokens to read: {each}{f'; in all {sum(costs):,}' if costs[1:] else ''}"
    )
    positions_P = sweep.draw_positions(len(tokens_K))
    minutes = sum(reader.estimate_seconds(sweep, tokens_K, positions_P) for reader in models) / 60
    say(f"by a short trial about {minutes:,.0f} minutes" if minutes >= 1.5 else "by a short trial a minute or less")
    return sum(costs)


def _show(split: str, found: EffectiveContext) -> None:
    sweep = found.sweep
    measured = [found.gains(fraction) for fraction in sweep.fractions]
    lengths = zip(*(found.lengths(gains) for gains in measured), strict=True)
    rows = [
        [
            reader.name,
            f"{reader.model.num_parameters():,}",
            *(f"{'' if length.found else '>= '}{length.tokens:,}" for length in row),
        ]
        for reader, row in zip(found.models, lengths, strict=True)
    ]
    print_table(
        f"Relative effective context length in tokens, {split}: {sweep.num_positions:,} places, "
        f"a gain of {sweep.threshold:.3g} by {sweep.context_step:,} tokens more",
        ["model", "parameters", *(f"r = {fraction:g}" for fraction in sweep.fractions)],
        rows,
    )
    means = found.nats_ICP.mean(axis=-1)
    print_table(
        "Mean loss in nats per token, by how many tokens before it may be seen",
        ["model", *(f"{context:,}" for context in sweep.contexts)],
        [[reader.name, *(f"{nats:.4f}" for nats in row)] for reader, row in zip(found.models, means, strict=True)],
    )
    early = {
        reader.name
        for gains in measured
        for reader, gain in zip(found.models, gains.gains_IC[:, 0], strict=True)
        if gain < sweep.threshold
    }
    if early:
        say(
            f"remark: {', '.join(sorted(early))}: no gain already at --start {sweep.min_context:,}, so the length may be "
            "shorter; a smaller --start and --step would tell"
        )
