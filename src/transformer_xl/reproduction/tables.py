"""Reproduce the paper's tables: train and score what is missing, then write the results and the report.

Each function continues where an earlier call in the same folder stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.analysis.attention import analyze_attention
from transformer_xl.analysis.effective_context import ContextSweep, GroupModel, measure_context
from transformer_xl.analysis.evaluation_speed import SpeedComparison, compare_speed
from transformer_xl.config import EvaluationConfig
from transformer_xl.device import choose_device
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_user_error
from transformer_xl.progress import ProgressBar, say
from transformer_xl.reproduction import ablation
from transformer_xl.reproduction.ablation import Metric, SystemResult
from transformer_xl.reproduction.context_table import GROUPS
from transformer_xl.reproduction.report import read_results, write_report, write_results
from transformer_xl.reproduction.reproduction import Reproduction, best_attention_window, check_folder, read_scores
from transformer_xl.reproduction.systems import ABLATION, BY_NAME, EQUAL_MEMORY, System
from transformer_xl.run_folder import RunFolder


@dataclass(frozen=True)
class AblationResult:
    """Results of the ablation (paper tables 6 and 10)."""

    metric: Metric
    systems: dict[str, SystemResult]
    """By the name of the system."""
    values: dict[str, Any]
    """All of it as plain values, as written to ablation.json."""
    report: Path


@dataclass(frozen=True)
class TableResult:
    """Results of one of the other tables."""

    values: dict[str, Any]
    """All of it as plain values, as written to the folder as JSON."""
    report: Path


def reproduce_ablation(
    reproduction: Reproduction,
    attention_windows: Sequence[int] | None = None,
    *,
    systems: Sequence[System] = (*ABLATION, *EQUAL_MEMORY),
) -> AblationResult:
    """Train the systems of the paper's ablation, and score each over a sweep of attention windows.

    Args:
        reproduction: folder and settings.
        attention_windows: in tokens; None: from half a segment to six segments.
        systems: the systems to compare.

    Raises:
        UserError: a training cannot start, failed, or was stopped; or a file in the folder is damaged.
    """
    windows = {system: reproduction.attention_windows(system, attention_windows) for system in systems}
    reproduction.finish_runs(windows)
    metric: Metric = "bits_per_byte" if reproduction.corpus.tokenizer.is_lossless else "perplexity"
    found: dict[str, SystemResult] = {}
    for system in systems:
        by_seed = [
            {entry["attention_window"]: entry[metric] for entry in read_scores(file)}
            for file in reproduction.scores(system)
        ]
        by_window = {window: [scores[window] for scores in by_seed] for window in windows[system]}
        segment_length, trained_window = reproduction.trained_lengths(system)
        found[system.name] = SystemResult(system, segment_length, trained_window, by_window, metric)
    values = {
        **reproduction.metadata(),
        "metric": metric,
        "systems": {name: result.as_dict() for name, result in found.items()},
        "verdicts": [list(pair) for pair in ablation.verdicts(found)],
    }
    return AblationResult(metric, found, values, write_results(reproduction.path, "ablation", values))


def reproduce_context(
    reproduction: Reproduction, sweep: ContextSweep, *, groups: Sequence[Sequence[str]] = GROUPS
) -> TableResult:
    """Train the models of the paper's two groups, and measure their relative effective context lengths (table 8).

    Each model is read with the attention window that scored best. Groups that an earlier call measured in the same way
    are not measured again.

    Args:
        reproduction: folder and settings.
        sweep: contexts and positions to measure.
        groups: names of the systems in each group.

    Raises:
        UserError: as `reproduce_ablation`; or the text is too short for the sweep.
    """
    tokens_K = reproduction.corpus.split("test").tokens
    sweep.draw_positions(len(tokens_K))
    systems = [BY_NAME[name] for names in groups for name in names]
    reproduction.finish_runs({system: reproduction.attention_windows(system) for system in systems})
    known = _measured_groups(reproduction.path / "context.json")
    measured: list[dict[str, Any]] = []
    values = {**reproduction.metadata(), "groups": measured}
    report = reproduction.path / "report.html"
    for index, seed in enumerate(reproduction.seeds):
        for names in groups:
            models = [_group_model(reproduction, BY_NAME[name], index) for name in names]
            found = next((group for group in known if _is_same(group, seed, models, sweep)), None)
            if found is None:
                cost = sum(model.cost(sweep) for model in models)
                say(f"seed {seed}: {', '.join(names)} read {cost:,} tokens in {len(sweep.contexts)} contexts")
                with ProgressBar("context", cost, "tokens") as bar:
                    found = measure_context(models, tokens_K, sweep, bar.advance).as_dict()
            measured.append({"trained_with_seed": seed, **found})
            report = write_results(reproduction.path, "context", values)
    return TableResult(values, report)


def reproduce_speed(
    path: Path,
    model: str = "enwik8-24l",
    *,
    smoke: bool = False,
    device: str = "auto",
    threads: int | None = None,
    command: str = "",
) -> TableResult:
    """Measure the paper's table of evaluation speed (table 9), and add it to the report.

    Args:
        path: folder of a reproduction, new or not.
        model: name of a recipe, or folder of a run: the sizes of the models.
        smoke: compare tiny models at short lengths, to try everything out.
        device: auto, cuda, mps or cpu.
        threads: CPU threads of one operation; None: torch's choice.
        command: the command that was typed, for the report.

    Raises:
        UserError: no such recipe or run, or the folder holds something else.
    """
    check_folder(path)
    comparison = SpeedComparison()
    if smoke:
        model, comparison = "tiny", SpeedComparison(attention_windows=(16, 32), segment_lengths=(8, 16), repeats=1)
    measured = compare_speed(model, comparison, device=device, threads=threads)
    values = {"command": command, **measured}
    with as_user_error(f"writing {path}"):
        path.mkdir(parents=True, exist_ok=True)
    return TableResult(values, write_results(path, "speed", values))


def reproduce_all(reproduction: Reproduction, *, smoke: bool = False, speed_recipe: str = "enwik8-24l") -> Path:
    """Reproduce all tables and the attention plots in one folder; return the report.

    Args:
        reproduction: folder and settings.
        smoke: use few positions, and tiny models for the speed, to try everything out.
        speed_recipe: recipe with the model sizes at which evaluation speed is measured.

    Raises:
        UserError: as the function for each table.
    """
    sweep = reproduction.context_sweep(num_positions=100 if smoke else 1000)
    reproduce_ablation(reproduction)
    reproduce_context(reproduction, sweep)
    plots, device, command = reproduction.path / "attention", reproduction.device, reproduction.command
    if not plots.exists():
        run = reproduction.path / "runs" / f"xl-full-seed{reproduction.seeds[0]}"
        analyze_attention(run, out=plots, device=device, command=command)
    file = reproduction.path / "speed.json"
    if not file.exists() or read_results(file).get("model") != ("tiny" if smoke else speed_recipe):
        say("measuring the speed of evaluation")
        reproduce_speed(reproduction.path, speed_recipe, smoke=smoke, device=device, command=command)
    return write_report(reproduction.path)


def _measured_groups(file: Path) -> list[dict[str, Any]]:
    """Return the groups in a file of results; none if it is missing or damaged, as it will be written again."""
    try:
        groups = json.loads(file.read_bytes())["groups"]
        return [group for group in groups if {"models", "contexts", "positions", "threshold"} <= group.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_same(group: dict[str, Any], seed: int, models: Sequence[GroupModel], sweep: ContextSweep) -> bool:
    """Return whether a measured group is what would be measured now."""
    names = ("name", "attention_window", "memory_length", "segment_length")
    found = [tuple(model.get(name) for name in names) for model in group["models"]]
    limits = [(model.name, model.plan.context_limits, model.plan.segment_length) for model in models]
    wanted = [(name, limit.attention_window, limit.memory_length, segment) for name, limit, segment in limits]
    how = (group["contexts"], len(group["positions"]), group["threshold"], group.get("trained_with_seed"))
    return found == wanted and how == (list(sweep.contexts), sweep.num_positions, sweep.threshold, seed)


def _group_model(reproduction: Reproduction, system: System, index: int) -> GroupModel:
    """Load the run of a system with one of the seeds, to be read with its best attention window."""
    folder, config = RunFolder.open(reproduction.runs(system)[index]), None
    if system.attends and system.has_memory:
        window = best_attention_window(reproduction.scores(system)[index])
        config = EvaluationConfig(memory_length=window - 1, attention_window=window)
    model = folder.load_model(choose_device(reproduction.device))
    return GroupModel(system.name, model, EvaluationPlan.resolve(folder.config, config))
