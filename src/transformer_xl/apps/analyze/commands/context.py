"""`txl analyze context`: how far back text still helps each of several models, as tables and a plot of gains.

Shape suffixes: K tokens of the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.apps.analyze.analysis_config import ContextSweep
from transformer_xl.cli.flags import check_flags, optional_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Integer, Json
from transformer_xl.cli.output import check_outputs, print_json, print_table, printed_before_files, say_weights
from transformer_xl.config import UserError
from transformer_xl.files import write_json
from transformer_xl.progress import ProgressBar, note, say

ContextFlags = optional_flags("context", ContextSweep.model_fields)


def context(
    *runs: str,
    memory_length: Annotated[int | Literal["all"] | None, Integer] = None,
    attention_window: Annotated[int | Literal["none"] | None, Integer] = None,
    clamp_length: Annotated[int | Literal["none"] | None, Integer] = None,
    settings: Annotated[ContextFlags | None, Parameter(name="*")] = None,
    corpus: Path | None = None,
    split: str = "test",
    out: Path | None = None,
    plot: Path | None = None,
    device_options: DeviceFlags = DEFAULT_DEVICE,
    json: Json = False,
) -> None:
    """Measure how far back a text still helps each model (the paper's relative effective context length).

    The runs are one group: each model is compared with the best of them.

    Parameters
    ----------
    runs
        Folders of runs with the same tokenizer; NAME=RUN gives one a name other than that of its folder.
    memory_length
        Memory slots of models with memory, in tokens; all: as many as the longest context. [default: the run's
        evaluation setting]
    attention_window
        Maximum number of keys that a query sees, itself included; none: no limit. [default: the run's evaluation
        setting]
    clamp_length
        Distances above this are treated as this one; none: no limit. [default: the run's evaluation setting]
    settings
        Context lengths, number of positions, and threshold.
    corpus
        Corpus with the runs' tokenizer. [default: the one the first run was trained on]
    split
        train, valid or test.
    out
        File for all results, as JSON.
    plot
        File for the curves of gains, .svg or .png.
    """
    paths = _run_paths(runs)
    check_outputs(out, plot)
    sweep = check_flags(ContextSweep, settings)
    from transformer_xl.apps.analyze.effective_context import draw_positions, load_group, measure_context
    from transformer_xl.run_folder import RunFolder

    device = str(device_options.choose())
    models = load_group(
        paths,
        memory_length=sweep.longest if memory_length == "all" else memory_length,
        attention_window=attention_window,
        clamp_length=clamp_length,
        device=device,
    )
    for model in models:
        say_weights(model.weights, model.name)
    text = RunFolder.open(next(iter(paths.values()))).open_corpus(corpus)
    tokens_K = text.split(split, verify=True).tokens
    draw_positions(sweep, len(tokens_K))  # fails before anything is computed if the text is too short
    costs = {model.name: model.cost(sweep) for model in models}
    say(f"tokens to process: {', '.join(f'{name} {cost:,}' for name, cost in costs.items())}")
    with ProgressBar("context", sum(costs.values()), "tokens") as bar:
        results = measure_context(models, tokens_K, sweep, bar.advance)
    source = {"corpus": str(text.path), "split": split, "device": device}
    values: dict[str, Any] = {**source, "runs": {name: str(path) for name, path in paths.items()}, **results}
    with printed_before_files():
        if json:
            print_json(values)
        else:
            _print_tables(values)
    fractions = {model["name"]: model["fractions"].values() for model in values["models"]}
    early = [name for name, found in fractions.items() if any(one["gains"][0] < sweep.threshold for one in found)]
    if early:
        note(
            f"{', '.join(early)}: the gain is below the threshold already at --min-context "
            f"{sweep.contexts[0]:,}, so the length may be shorter; try a smaller --min-context and --context-step"
        )
    if out is not None:
        write_json(out, values)
    if plot is not None:
        from transformer_xl.plots import draw_gains, write_plot

        write_plot(plot, draw_gains(values))


def _run_paths(runs: tuple[str, ...]) -> dict[str, Path]:
    """Return the run folders by name: the name of the folder unless NAME=RUN sets another."""
    if not runs:
        raise UserError("no run was given; name the folders of the runs of one group, such as runs/a runs/b")
    paths: dict[str, Path] = {}
    for argument in runs:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            name, path = Path(argument).resolve().name, argument
        if not name or not path:
            raise UserError(f"{argument}: must be the folder of a run, or NAME=RUN")
        if name in paths:
            raise UserError(f"two runs are called {name}, {paths[name]} and {path}; rename one of them: NAME=RUN")
        paths[name] = Path(path)
    return paths


def _print_tables(values: dict[str, Any]) -> None:
    from transformer_xl.apps.analyze.effective_context import format_length

    models = values["models"]
    print_table(
        f"Relative effective context length in tokens, {values['split']}: {len(values['positions']):,} positions, "
        f"a gain of {values['threshold']:.3g} by {values['context_step']:,} tokens more",
        ["model", "parameters", *(f"r = {fraction}" for fraction in values["baseline"])],
        [
            [model["name"], f"{model['parameters']:,}", *map(format_length, model["fractions"].values())]
            for model in models
        ],
    )
    print_table(
        "Mean loss in nats per token, by context in tokens",
        ["model", *(f"{context:,}" for context in values["contexts"])],
        [[model["name"], *(f"{loss:.4f}" for loss in model["nats_per_token"])] for model in models],
    )
