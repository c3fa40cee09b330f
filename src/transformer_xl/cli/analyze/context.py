"""`txl analyze context`: how far back text still helps each of several models, as tables and a plot of gains."""

from __future__ import annotations

import json as encoder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import UserError
from transformer_xl.files import write_text
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.analysis.effective_context import ContextSweep, EffectiveContext, GroupModel
    from transformer_xl.text.token_store import Tokens


def context(
    *runs: str,
    memory_length: int | Literal["all"] | None = None,
    attention_window: int | Literal["none"] | None = None,
    clamp_length: int | Literal["none"] | None = None,
    min_context: int | None = None,
    max_context: int | None = None,
    context_step: int = 100,
    num_positions: int = 1000,
    seed: int = 1,
    fractions: str = "0.1,0.5,1.0",
    threshold: float = 0.01,
    corpus: Path | None = None,
    split: str = "test",
    out: Path | None = None,
    plot: Path | None = None,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Measure how far back a text still helps each model (the paper's relative effective context length).

    The runs are one group: each model is compared with the best of them. The expected time is printed first.

    Parameters
    ----------
    runs
        Folders of runs with the same tokenizer; NAME=RUN to name one otherwise than its folder.
    memory_length
        Memory slots of models with memory, in tokens; all: as many as the longest context. [default: as the run is
        evaluated]
    attention_window
        Keys a query sees, itself included; none: all. [default: as the run is evaluated]
    clamp_length
        Distances above this count as this one; none: no limit. [default: as the run is evaluated]
    min_context
        The shortest context, in tokens. [default: the step]
    max_context
        No context is longer. [default: nine steps beyond the shortest]
    context_step
        How many tokens longer each context is than the one before.
    num_positions
        Number of positions drawn from the text.
    seed
        Seed of that draw.
    fractions
        Fractions of hardest positions to average over: the paper's r.
    threshold
        Minimum relative gain in perplexity of a longer context.
    corpus
        Corpus with the runs' tokenizer. [default: the one the first was trained on]
    split
        train, valid or test.
    out
        File for all results, as JSON.
    plot
        File for the curves of gains, .svg or .png.
    """
    named = _named(runs)
    from transformer_xl.analysis.effective_context import ContextSweep, load_group, measure_context
    from transformer_xl.analysis.gain_curves import check_plot_path, draw_gains, write_plot
    from transformer_xl.run_folder import RunFolder

    _check_outputs(out, plot)
    if plot is not None:
        check_plot_path(plot)
    start = context_step if min_context is None else min_context
    sweep = ContextSweep(
        min_context=start,
        context_step=context_step,
        max_context=start + 9 * context_step if max_context is None else max_context,
        num_positions=num_positions,
        seed=seed,
        fractions=_fractions(fractions),
        threshold=threshold,
    )
    device = machine.choose()
    models = load_group(
        named,
        memory_length=sweep.max_context if memory_length == "all" else memory_length,
        attention_window=attention_window,
        clamp_length=clamp_length,
        device=str(device),
    )
    text = RunFolder.open(next(iter(named.values()))).open_corpus(corpus)
    tokens_K = text.split(split).tokens
    text.verify(split)
    _say_cost(models, sweep, tokens_K)
    with ProgressBar("context", sum(model.cost(sweep) for model in models), "tokens") as bar:
        found = measure_context(models, tokens_K, sweep, bar.advance)
    paths = {name: str(path) for name, path in named.items()}
    head = {"corpus": str(text.path), "split": split, "device": str(device), "runs": paths}
    values: dict[str, Any] = {**head, **found.as_dict()}
    if json:
        print_json(values)
    else:
        _show(split, found)
    # written last: should the disk be full, the results are on the screen
    if out is not None:
        write_text(out, encoder.dumps(values, indent=1) + "\n")
    if plot is not None:
        write_plot(plot, draw_gains(values))


def _check_outputs(out: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written in the end, before anything is computed."""
    for flag, path in (("--out", out), ("--plot", plot)):
        if path is not None and path.exists():
            raise UserError(f"{path} exists already; choose another {flag}")
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: folder {path.parent} does not exist; create it, or choose another {flag}")
    if plot is not None and plot == out:
        raise UserError(f"{out} was given for --out and --plot; choose different files")


def _fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--fractions {text}: must be numbers separated by commas, such as 0.1,0.5,1.0") from None


def _named(runs: tuple[str, ...]) -> dict[str, Path]:
    """Return the run folders by name: the name of the folder unless NAME=RUN sets another."""
    if not runs:
        raise UserError("no run was given; name the folders of the runs of one group, such as runs/a runs/b")
    named: dict[str, Path] = {}
    for word in runs:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():
            name, path = Path(word).resolve().name, word
        if not name or not path:
            raise UserError(f"{word}: must be the folder of a run, or NAME=RUN")
        if name in named:
            raise UserError(f"two runs are called {name}, {named[name]} and {path}; name one otherwise: NAME=RUN")
        named[name] = Path(path)
    return named


def _say_cost(models: list[GroupModel], sweep: ContextSweep, tokens_K: Tokens) -> None:
    """Print how many tokens will be read and, after a trial, how long it will take."""
    positions_P = sweep.draw_positions(len(tokens_K))
    costs = {model.name: model.cost(sweep) for model in models}
    total = f"; in all {sum(costs.values()):,}" if len(costs) > 1 else ""
    say(
        f"{sweep.num_positions:,} positions, {len(sweep.contexts)} contexts of {sweep.contexts[0]:,} to "
        f"{sweep.contexts[-1]:,} tokens; tokens to read: "
        f"{', '.join(f'{name} {cost:,}' for name, cost in costs.items())}{total}"
    )
    minutes = sum(model.estimate_seconds(sweep, tokens_K, positions_P) for model in models) / 60
    say(f"estimated time: {f'about {minutes:,.0f} minutes' if minutes >= 1.5 else 'a minute or less'}")


def _show(split: str, found: EffectiveContext) -> None:
    sweep = found.sweep
    gains = [found.gains(fraction) for fraction in sweep.fractions]
    lengths = zip(*(found.lengths(one) for one in gains), strict=True)
    rows = [
        [
            model.name,
            f"{model.model.num_parameters():,}",
            *(f"{'' if length.found else '>= '}{length.tokens:,}" for length in row),
        ]
        for model, row in zip(found.models, lengths, strict=True)
    ]
    print_table(
        f"Relative effective context length in tokens, {split}: {sweep.num_positions:,} positions, "
        f"a gain of {sweep.threshold:.3g} by {sweep.context_step:,} tokens more",
        ["model", "parameters", *(f"r = {fraction:g}" for fraction in sweep.fractions)],
        rows,
    )
    means = found.nats_ICP.mean(axis=-1)
    print_table(
        "Mean loss in nats per token, by context in tokens",
        ["model", *(f"{context:,}" for context in sweep.contexts)],
        [[model.name, *(f"{nats:.4f}" for nats in row)] for model, row in zip(found.models, means, strict=True)],
    )
    early = {
        model.name
        for one in gains
        for model, gain in zip(found.models, one.gains_IC[:, 0], strict=True)
        if gain < sweep.threshold
    }
    if early:
        say(
            f"warning: {', '.join(sorted(early))}: no gain already at --min-context {sweep.min_context:,}, so the "
            "length may be shorter; try a smaller --min-context and --context-step"
        )
