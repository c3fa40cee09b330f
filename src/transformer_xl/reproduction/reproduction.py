"""The folder of a reproduction: which runs belong to it, and what trains and scores those that are not finished.

OUT/settings.yaml      settings that all runs share; a later command with other settings is refused
OUT/recipes/           a recipe for each system
OUT/runs/NAME-seedN    ordinary run folders
OUT/scores/            results of `txl evaluate` for each run, as JSON
OUT/logs/              output of the processes
OUT/*.json             results of each part
OUT/report.html        made from all of these
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from transformer_xl.analysis.effective_context import ContextSweep
from transformer_xl.config import (
    INT32_MAX,
    RunConfig,
    TransformerXLConfig,
    UserError,
    load_recipe,
    merge,
    merge_recipe,
    read_yaml,
    run_settings,
)
from transformer_xl.device import choose_device, environment
from transformer_xl.files import as_user_error, lock_folder, write_text
from transformer_xl.progress import say
from transformer_xl.reproduction.parallel import Command, Job, run_parallel
from transformer_xl.reproduction.systems import Groups, System
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.parallel import num_cores
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import fingerprint
from transformer_xl.training.trainer import check_trainable

_SMOKE_SETTINGS: Groups = {
    "model": {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "d_ff": 64},
    "train": {
        "segment_length": 16,
        "memory_length": 16,
        "batch_size": 8,
        "max_steps": 30,
        "warmup_steps": 5,
        "eval_interval": 30,
        "eval_tokens": 1024,
        "checkpoint_interval": 10,
    },
}
_HALF_SEGMENTS = (1, 2, 3, 4, 6, 8, 12)  # the attention windows of a sweep
_SCORES = ("nats_per_token", "bits_per_byte", "perplexity")


@dataclass(frozen=True)
class Reproduction:
    """The folder of a reproduction, which need not exist yet, and the settings that all its runs share."""

    path: Path
    corpus: Corpus
    base: Groups
    """Settings that all systems share, by group."""
    seeds: tuple[int, ...]
    """Each system is trained once with each seed."""
    max_tokens: int
    """Tokens of the test split that are scored, from its start."""
    workers: int
    """Number of trainings at a time."""
    device: str
    command: str = ""
    """The command that was typed, for the report."""
    _recipes: dict[str, Groups] = field(default_factory=dict)

    @staticmethod
    def open(
        path: Path,
        corpus: Path,
        *,
        recipe: str = "ablation",
        model: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        seeds: Sequence[int] | None = None,
        max_tokens: int | None = None,
        smoke: bool = False,
        workers: int | None = None,
        device: str = "auto",
        command: str = "",
    ) -> Reproduction:
        """Open the folder of a reproduction, or prepare a new one; everything is checked and nothing is written.

        Args:
            path: folder for runs, results and the report.
            corpus: folder that `prepare` made.
            recipe: name or path of the recipe that all systems share.
            model: settings of the model in place of the recipe's.
            train: settings of training in place of the recipe's.
            seeds: each system is trained once with each seed; None: 1 and 2, with `smoke` 1.
            max_tokens: tokens of the test split that are scored; None: 16,384, with `smoke` 512.
            smoke: train tiny models for a few steps, to try everything out in minutes.
            workers: number of trainings at a time; None: one for each core, on a GPU one.
            device: auto, cuda, mps or cpu.
            command: the command that was typed, for the report.

        Raises:
            UserError: no such corpus, recipe or device, settings that do not go together or that the systems differ in,
                or a folder that holds something else.
        """
        given_seeds = tuple(seeds or ((1,) if smoke else (1, 2)))
        if len(set(given_seeds)) < len(given_seeds):
            raise UserError(f"seeds {','.join(map(str, given_seeds))}: each run needs its own seed; name each once")
        base = _base_settings(recipe, {"model": dict(model or {}), "train": dict(train or {})}, smoke=smoke)
        cores = num_cores() if choose_device(device).type == "cpu" else 1
        tokens = (512 if smoke else 16_384) if max_tokens is None else max_tokens
        workers = cores if workers is None else workers
        for name, number in (("max_tokens", tokens), ("workers", workers)):
            if number < 1:
                raise UserError(f"{name} {number}: wanted 1 or more")
        if not corpus.exists():
            raise UserError(f"no corpus at {corpus}; make one with 'txl prepare enwik8' or give --corpus DIR")
        opened = Corpus.open(corpus)
        tokens = min(tokens, opened.split("test").num_tokens)
        reproduction = Reproduction(path, opened, base, given_seeds, tokens, workers, device, command)
        reproduction._check_unchanged()
        return reproduction

    def runs(self, system: System) -> list[Path]:
        """Return the run folders of a system, one for each seed; they need not exist."""
        return [self.path / "runs" / f"{system.name}-seed{seed}" for seed in self.seeds]

    def scores(self, system: System) -> list[Path]:
        """Return the files with the scores of its runs, one for each seed; they need not exist."""
        return [self.path / "scores" / f"{run.name}.json" for run in self.runs(system)]

    def recipe(self, system: System) -> Groups:
        """Return the settings of a system; they are derived once and then read from its recipe file."""
        if system.name not in self._recipes:
            file = self._recipe_file(system)
            self._recipes[system.name] = (
                merge_recipe(load_recipe(str(file)), {})
                if file.exists()
                else system.settings(self.base, self.corpus.tokenizer.vocab_size)
            )
        return self._recipes[system.name]

    def attention_windows(self, system: System, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the attention windows at which a system is scored: the wanted ones that it has, and that of training.

        A sliding window computes each window from scratch, so that far fewer and shorter ones are used.

        Args:
            system: the system.
            wanted: in tokens; None: from half a segment to six segments.
        """
        if not system.attends:
            return ()
        segment_length, trained = self.trained_lengths(system)
        unit = self.trained_lengths(None)[0]
        most = {"vaswani": 3 * unit, "al-rfou": segment_length}.get(system.architecture, INT32_MAX)
        if wanted is not None and system.architecture != "al-rfou":
            most = INT32_MAX
        windows = [count * unit // 2 for count in _HALF_SEGMENTS] if wanted is None else wanted
        return tuple(sorted({*(window for window in windows if 1 <= window <= most), trained}))

    def trained_lengths(self, system: System | None) -> tuple[int, int]:
        """Return the segment length and the attention window in training, of a system or (None) of the base.

        The attention window is that of the model, or segment and memory together if that is shorter.
        """
        config = run_settings(self.base if system is None else self.recipe(system), "settings")
        most = config.train.segment_length + config.train.memory_length
        return config.train.segment_length, min(most, config.model.limit("attention_window") or most)

    def context_sweep(
        self, context_step: int | None = None, max_context: int | None = None, num_positions: int = 1000
    ) -> ContextSweep:
        """Return the contexts to measure: by default ten, in steps of half a segment.

        Raises:
            UserError: numbers that are out of range.
        """
        step = max(1, self.trained_lengths(None)[0] // 2) if context_step is None else context_step
        return ContextSweep(
            min_context=step,
            context_step=step,
            max_context=10 * step if max_context is None else max_context,
            num_positions=num_positions,
        )

    def finish_runs(self, windows: Mapping[System, tuple[int, ...]]) -> None:
        """Train and score the runs that are not finished, several at a time.

        Args:
            windows: the systems, and the attention windows at which each is scored; none: only as it was trained.

        Raises:
            UserError: a training cannot start, failed, or was stopped.
        """
        configs = {system: self._config(system) for system in windows}
        with as_user_error(f"writing {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path) as lock:
            self._check_unchanged()  # another command may have written settings since the folder was opened
            write_text(self.path / "settings.yaml", yaml.safe_dump(self._shared_settings, sort_keys=False))
            for name in ("recipes", "runs", "scores", "logs"):
                (self.path / name).mkdir(exist_ok=True)
            for system in windows:
                self._save_recipe(system)
            jobs = [
                self._job(system, index, configs[system], windows[system])
                for index in range(len(self.seeds))
                for system in windows
            ]
            unfinished = [job for job in jobs if job is not None]
            say(f"{len(jobs) - len(unfinished)} of {len(jobs)} runs are trained and scored already")
            if unfinished:
                run_parallel(
                    "reproduce",
                    unfinished,
                    self.path / "logs",
                    workers=min(self.workers, len(unfinished)),
                    threads=max(1, num_cores() // self.workers),
                    pass_fds=lock,
                )

    def metadata(self) -> dict[str, Any]:
        """Return what the results of this folder were measured with, for JSON."""
        return {
            "command": self.command,
            "corpus": self.corpus.record.name,
            "train_tokens": self.corpus.split("train").num_tokens,
            "max_tokens": self.max_tokens,
            "seeds": list(self.seeds),
            "settings": self.base,
            **environment(choose_device(self.device)),
        }

    @property
    def _shared_settings(self) -> dict[str, Any]:
        """What must stay the same for all runs of the folder."""
        splits = self.corpus.record.splits
        return {
            "train_sha256": splits["train"].sha256,
            "test_sha256": splits["test"].sha256,
            "tokenizer_sha256": fingerprint(self.corpus.tokenizer),
            "max_tokens": self.max_tokens,
            **self.base,
        }

    def _check_unchanged(self) -> None:
        """Refuse a folder that holds something else, or a reproduction with other settings."""
        check_folder(self.path)
        file = self.path / "settings.yaml"
        if not file.exists():
            if any((self.path / "runs").glob("*")):
                raise UserError(f"{file} is missing, so the settings of the runs there are unknown; choose another out")
            return
        before, now = _flat(read_yaml(file.read_bytes(), str(file))), _flat(self._shared_settings)
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                raise UserError(
                    f"{self.path} was started with {name} {before.get(name, 'as by default')}, and now it is "
                    f"{now.get(name, 'as by default')}; give the same again, or choose another out"
                )

    def _recipe_file(self, system: System) -> Path:
        return self.path / "recipes" / f"{system.name}.yaml"

    def _save_recipe(self, system: System) -> None:
        file = self._recipe_file(system)
        if not file.exists():
            about = {"title": system.name, "source": "txl reproduce", "corpus": str(self.corpus.record.name)}
            write_text(file, yaml.safe_dump({**about, **self.recipe(system)}, sort_keys=False))

    def _config(self, system: System) -> RunConfig:
        """Return the settings of its run with the first seed; training has been checked to be possible with them."""
        known = {"model": {"vocab_size": self.corpus.tokenizer.vocab_size}}
        config = run_settings(merge(self.recipe(system), known), system.name)
        check_trainable(config, self.corpus, choose_device(self.device))
        return config

    def _job(self, system: System, index: int, config: RunConfig, windows: tuple[int, ...]) -> Job | None:
        """Return what is left to do for one run, or None if nothing is.

        Raises:
            UserError: the run there has other settings than its recipe.
        """
        run, scores, seed = self.runs(system)[index], self.scores(system)[index], self.seeds[index]
        _check_run(run, config, seed)
        scored = [entry["attention_window"] for entry in read_scores(scores)] if scores.exists() else []
        if scored and set(windows) <= set(scored):
            return None
        windows = tuple(sorted({*windows, *(window for window in scored if window)}))

        def commands() -> list[Command]:
            options = ("--corpus", str(self.corpus.path), "--device", self.device)
            new = (str(self._recipe_file(system)), "--run", str(run), "--train.seed", str(seed))
            # after its last step a run may still lack the last validation; if nothing is missing, nothing is done
            train = ("train", *(("--resume", str(run)) if run.exists() else new), *options)
            evaluate = ["evaluate", str(run), *options, "--max-tokens", str(self.max_tokens), "--json"]
            if windows:
                evaluate += ["--sweep-attention-window", ",".join(map(str, windows))]
            if not system.has_memory:
                evaluate += ["--method", "sliding-window"]
            return [Command(train), Command(evaluate, output=scores)]

        return Job(run.name, commands, config.train.max_steps, lambda: _last_step(run))


def _base_settings(recipe: str, overrides: Groups, *, smoke: bool) -> Groups:
    """Return the settings that all systems share: the recipe's, with the overrides in their place."""
    if "architecture" in overrides["model"]:
        raise UserError("model.architecture is what the systems differ in; leave it out")
    for name in ("seed", "loss"):
        if name in overrides["train"]:
            raise UserError(f"train.{name} differs between runs; leave it out (--seeds gives the seeds)")
    settings = merge_recipe(load_recipe(recipe), {})
    if smoke:
        settings = merge(settings, _SMOKE_SETTINGS) | {"evaluation": dict[str, Any]()}
    base: Groups = merge(settings, overrides)
    config = run_settings(base, "settings")
    if not isinstance(config.model, TransformerXLConfig):
        raise UserError(f"recipe {recipe} is of {config.model.architecture}; give one of transformer-xl")
    if not config.train.memory_length:
        raise UserError("train.memory_length 0: recurrence is what is compared; give 1 or more")
    return base


def _check_run(run: Path, config: RunConfig, seed: int) -> None:
    """Check that the run there, if any, has the settings of the recipe."""
    if not run.exists():
        return
    found, derived = RunFolder.open(run).config, {"cutoffs"}  # found from the corpus
    expected = config.train.model_copy(update={"seed": seed})
    same_model = found.model.model_dump(exclude=derived) == config.model.model_dump(exclude=derived)
    if found.train != expected or not same_model:
        raise UserError(f"{run} has other settings than the recipe beside it; delete the run, or choose another out")


def _last_step(run: Path) -> int:
    """Return the last step in the log of a run, for a progress bar; 0 if it cannot be read."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith(b"\n")), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def read_scores(file: Path) -> list[dict[str, Any]]:
    """Read the results of `txl evaluate --json`, one entry for each attention window.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = json.loads(file.read_bytes())
        entries = found.get("sweep", [found])
        if not all(isinstance(entry[name], float) for entry in entries for name in _SCORES):
            raise ValueError
        return [{"attention_window": entry["attention_window"], **entry} for entry in entries]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise UserError(f"{file} is damaged; delete it and run the command again") from None


def best_attention_window(file: Path) -> int:
    """Return the attention window with the lowest loss in a file of scores."""
    return min(read_scores(file), key=lambda entry: entry["nats_per_token"])["attention_window"]


def check_folder(path: Path) -> None:
    """Check that the folder of a reproduction is there, or can be made.

    Raises:
        UserError: the path holds something else.
    """
    known = ("settings.yaml", "report.html")
    is_new = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_new and not any((path / name).exists() for name in known):
        raise UserError(f"{path} exists and holds no reproduction; choose another out")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
