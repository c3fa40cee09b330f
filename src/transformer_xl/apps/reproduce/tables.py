"""Reproduce the paper's tables: train and score what is missing, then write the results and the report.

Each function continues where an earlier call in the same folder stopped, and returns the results as plain values, as
written to a JSON file in the folder.

Shape suffixes: K tokens of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_xl.apps.analyze.analysis_config import ContextSweep, SpeedComparison
from transformer_xl.apps.analyze.attention import analyze_attention
from transformer_xl.apps.analyze.effective_context import GroupModel, draw_positions, measure_context
from transformer_xl.apps.analyze.evaluation_speed import compare_speed
from transformer_xl.apps.reproduce.ablation import Metric, SystemResult, verdicts
from transformer_xl.apps.reproduce.report import read_results, write_report, write_results
from transformer_xl.apps.reproduce.reproduction import (
    SMOKE_CAVEAT,
    Reproduction,
    check_folder,
    read_scores,
    report_damage,
)
from transformer_xl.apps.reproduce.systems import ABLATION, BY_NAME, CONTEXT_GROUPS, EQUAL_MEMORY, System
from transformer_xl.config import EvaluationConfig
from transformer_xl.device import choose_device
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_user_error
from transformer_xl.progress import ProgressBar, say
from transformer_xl.run import load_run
from transformer_xl.run_folder import RunFolder


def reproduce_ablation(
    reproduction: Reproduction,
    attention_windows: Sequence[int] | None = None,
    *,
    systems: Sequence[System] = (*ABLATION, *EQUAL_MEMORY),
) -> dict[str, Any]:
    """Train the systems of the paper's ablation, and score each over a sweep of attention windows (tables 6 and 10).

    Args:
        reproduction: folder and settings.
        attention_windows: in tokens, or None for a range from half a segment to six segments.
        systems: the systems to compare.

    Raises:
        UserError: a training run cannot start, failed, or was stopped; or a file in the folder is damaged.
    """
    windows = {system: reproduction.attention_windows(system, attention_windows) for system in systems}
    reproduction.finish_runs(windows)
    tokenizer = reproduction.corpus.tokenizer
    # integers are not words, and the words of another library's tokens are not known in part of a text
    metric: Metric = "perplexity" if tokenizer.is_text and tokenizer.counts_words else "token_perplexity"
    if tokenizer.is_lossless:
        metric = "bits_per_byte"
    results: dict[str, SystemResult] = {}
    for system in systems:
        by_seed = [
            {entry["attention_window"]: entry[metric] for entry in read_scores(file)}
            for file in reproduction.scores(system)
        ]
        by_window = {window: [scores[window] for scores in by_seed] for window in windows[system]}
        results[system.name] = SystemResult(system, *reproduction.trained_lengths(system), by_window, metric)
    values = {
        **reproduction.metadata(),
        "metric": metric,
        "systems": {name: result.as_dict() for name, result in results.items()},
        "verdicts": [list(pair) for pair in verdicts(results, smoke=reproduction.smoke)],
    }
    write_results(reproduction.path, "ablation", values)
    return values


def reproduce_context(
    reproduction: Reproduction, sweep: ContextSweep, *, groups: Sequence[Sequence[str]] = CONTEXT_GROUPS
) -> dict[str, Any]:
    """Train the models of the paper's two groups, and measure their relative effective context lengths (table 8).

    Each model is evaluated with the attention window that scored best. Groups that an earlier call measured with the
    same settings are not measured again.

    Args:
        reproduction: folder and settings.
        sweep: contexts and positions to measure.
        groups: names of the systems in each group.

    Raises:
        UserError: for the reasons of `reproduce_ablation`, or the text is too short for the sweep.
    """
    tokens_K = reproduction.corpus.split("test").tokens
    draw_positions(sweep, len(tokens_K))  # fails now, and not after training, if the text is too short
    systems = [BY_NAME[name] for names in groups for name in names]
    reproduction.finish_runs({system: reproduction.attention_windows(system) for system in systems})
    file = reproduction.path / "context.json"
    with report_damage(file):
        earlier = [(_identity(group), group) for group in read_results(file)["groups"]] if file.exists() else []
    measured: list[dict[str, Any]] = []
    values = {**reproduction.metadata(), "groups": measured}
    for index, seed in enumerate(reproduction.seeds):
        for names in groups:
            models = [_group_model(reproduction, BY_NAME[name], index) for name in names]
            limits = [
                (model.name, model.plan.context_limits.attention_window, model.plan.context_limits.memory_length)
                for model in models
            ]
            expected = (seed, limits, list(sweep.contexts), sweep.num_positions, sweep.threshold)
            group = next((group for identity, group in earlier if identity == expected), None)
            if group is None:
                cost = sum(model.cost(sweep) for model in models)
                say(f"seed {seed}: {', '.join(names)} process {cost:,} tokens in {len(sweep.contexts)} contexts")
                with ProgressBar("context", cost, "tokens") as bar:
                    results = measure_context(models, tokens_K, sweep, bar.advance)
                group = {"trained_with_seed": seed, **results}
            measured.append(group)
            write_results(reproduction.path, "context", values)
    return values


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what determines the results of a group: seed, models, contexts, number of positions, and threshold.

    Segment lengths cannot change: they are settings of the runs, which are the same in all of the folder.
    """
    limits = [(model["name"], model["attention_window"], model["memory_length"]) for model in group["models"]]
    return group["trained_with_seed"], limits, group["contexts"], len(group["positions"]), group["threshold"]


def _group_model(reproduction: Reproduction, system: System, index: int) -> GroupModel:
    """Load the run of a system with the seed of this index, to be evaluated with its best attention window."""
    folder, config = RunFolder.open(reproduction.runs(system)[index]), None
    if system.attends and system.has_memory:
        scores = read_scores(reproduction.scores(system)[index])
        window = min(scores, key=lambda entry: entry["nats_per_token"])["attention_window"]
        config = EvaluationConfig(memory_length=window - 1, attention_window=window)
    run = load_run(folder, choose_device(reproduction.device))
    return GroupModel(system.name, run.model, EvaluationPlan.resolve(folder.config, config), run.weights)


def reproduce_speed(
    path: Path,
    model: str = "enwik8-24l",
    *,
    smoke: bool = False,
    device: str = "auto",
    threads: int | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Measure the speed of evaluation as in the paper's table 9, and add it to the report.

    Args:
        path: folder of a reproduction; it need not exist.
        model: name of a recipe, or folder of a run, which sets the sizes of the models.
        smoke: compare tiny models at short lengths, to try everything out.
        device: cuda, mps, cpu, or auto for the fastest of these that is available.
        threads: CPU threads of one operation, or None for torch's default.
        command: the command line of the user, for the report.

    Raises:
        UserError: the recipe or run does not exist, or the path is not the folder of a reproduction.
    """
    check_folder(path)
    comparison = SpeedComparison()
    if smoke:  # the recipe tiny
        model, comparison = "tiny", SpeedComparison(attention_windows=(16, 32), segment_lengths=(8, 16), repeats=1)
    values = {
        "command": command,
        "caveat": SMOKE_CAVEAT if smoke else "",
        **compare_speed(model, comparison, device=device, threads=threads),
    }
    with as_user_error(f"writing {path}"):
        path.mkdir(parents=True, exist_ok=True)
    write_results(path, "speed", values)
    return values


def reproduce_all(reproduction: Reproduction) -> Path:
    """Reproduce all tables and the attention plots in one folder; return the report.

    Args:
        reproduction: folder and settings; at smoke scale, few positions, and tiny models for the speed.

    Raises:
        UserError: for the reasons of the functions that it calls.
    """
    smoke = reproduction.smoke
    sweep = reproduction.context_sweep(num_positions=100 if smoke else 1000)
    reproduce_ablation(reproduction)
    reproduce_context(reproduction, sweep)
    options = {"device": reproduction.device, "command": reproduction.command}
    plots, speed = reproduction.path / "attention", reproduction.path / "speed.json"
    if not plots.exists():
        run, corpus = reproduction.runs(BY_NAME["xl-full"])[0], reproduction.corpus.path
        analyze_attention(run, corpus=corpus, out=plots, **options)
    if not speed.exists():
        say("measuring the speed of evaluation")
        reproduce_speed(reproduction.path, smoke=smoke, **options)
    return write_report(reproduction.path)
