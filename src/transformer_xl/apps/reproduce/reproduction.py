"""The folder of a reproduction: its runs, and how those that are not finished are trained and scored.

OUT/settings.yaml      settings that all runs share; a later command with other settings is refused
OUT/recipes/           a recipe for each system (a model that the paper compares, see systems.py)
OUT/runs/NAME-seedN    ordinary run folders
OUT/scores/            results of `txl evaluate` for each run, as JSON
OUT/logs/              output of the processes
OUT/*.json             results of each part: ablation.json, context.json, speed.json
OUT/report.html        the report on these results
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from transformer_xl.apps.analyze.analysis_config import ContextSweep
from transformer_xl.apps.reproduce.parallel import Command, Job, run_parallel
from transformer_xl.apps.reproduce.systems import Groups, System
from transformer_xl.config import (
    RunConfig,
    UserError,
    check_settings,
    load_recipe,
    merge,
    merge_recipe,
    read_yaml,
    refuse_unused,
    run_settings,
)
from transformer_xl.device import choose_device, environment
from transformer_xl.evaluation.evaluate import check_max_tokens
from transformer_xl.files import as_path, as_user_error, lock_folder, write_text
from transformer_xl.progress import say
from transformer_xl.run_folder import RunFolder, first_difference
from transformer_xl.text.parallel import num_cores
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import fingerprint
from transformer_xl.training.data import open_data
from transformer_xl.training.train import complete_settings

REPORT = "report.html"
"""Name of the report in the folder."""
SMOKE_CAVEAT = "Smoke scale, to try everything out: nothing can be concluded from these results."
ONE_SEED_CAVEAT = "One seed for each system: another may reverse any comparison, so nothing can be concluded."

# settings that replace the recipe's with --smoke: tiny models, trained for a few steps
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
# default attention windows, in units of half the segment length of the settings that all systems share
_HALF_SEGMENTS = (1, 2, 3, 4, 6, 8, 12)
# results of `txl evaluate --json` that a file of scores must have
_SCORES = ("nats_per_token", "bits_per_byte", "token_perplexity")


@dataclass(frozen=True)
class Reproduction:
    """The folder of a reproduction, which need not exist yet, and the settings that all its runs share."""

    path: Path
    corpus: Corpus
    base: Groups
    """Settings that all systems share, by group (model, train, evaluation)."""
    seeds: tuple[int, ...]
    """Each system is trained once with each seed."""
    max_tokens: int
    """Number of test tokens to score, from the start of the test split."""
    device: str
    """cuda, mps, cpu, or auto for the fastest of these that is available."""
    command: str = ""
    """The command line of the user, for the report."""
    smoke: bool = False
    """Whether the models are tiny and trained for a few steps, so that nothing can be concluded from the results."""
    _recipes: dict[str, Groups] = field(default_factory=dict)
    """Cache of `recipe`, by name of the system: deriving the settings takes seconds."""

    @staticmethod
    def open(
        out: Path,
        corpus: Path,
        *,
        recipe: str = "ablation",
        model: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        seeds: Sequence[int] | None = None,
        max_tokens: int | None = None,
        smoke: bool = False,
        device: str = "auto",
        command: str = "",
    ) -> Reproduction:
        """Open the folder of a reproduction, or prepare a new one; everything is checked and nothing is written.

        Args:
            out: folder for runs, results and the report.
            corpus: folder that `prepare` made.
            recipe: name or path of the recipe that all systems share.
            model: model settings that replace the recipe's.
            train: training settings that replace the recipe's.
            seeds: each system is trained once with each seed; None for 1 and 2, or 1 with `smoke`.
            max_tokens: number of test tokens to score; None for 16,384, or 512 with `smoke`.
            smoke: train tiny models for a few steps, to try everything out in minutes.
            device: cuda, mps, cpu, or auto for the fastest of these that is available.
            command: the command line of the user, for the report.

        Raises:
            UserError: the corpus, recipe or device does not exist, settings contradict each other or are those that
                distinguish the systems, or the path is not the folder of a reproduction.
        """
        out, corpus = as_path(out, "out"), as_path(corpus, "corpus")
        seeds = tuple(seeds or ((1,) if smoke else (1, 2)))
        if len(set(seeds)) < len(seeds):
            raise UserError(f"seeds {','.join(map(str, seeds))}: each run needs its own seed; name each once")
        given = {"model": dict(model or {}), "train": dict(train or {})}
        base = _base_settings(recipe, given, smoke=smoke)
        refuse_unused(given, run_settings(base, "settings"))
        choose_device(device)
        check_max_tokens(max_tokens)
        max_tokens = (512 if smoke else 16_384) if max_tokens is None else max_tokens
        opened = Corpus.open(corpus)
        max_tokens = min(max_tokens, opened.split("test").num_tokens)
        reproduction = Reproduction(out, opened, base, seeds, max_tokens, device, command, smoke)
        reproduction._check_unchanged()
        return reproduction

    def runs(self, system: System) -> list[Path]:
        """Return the run folders of a system, one for each seed; they need not exist."""
        return [self.path / "runs" / f"{system.name}-seed{seed}" for seed in self.seeds]

    def scores(self, system: System) -> list[Path]:
        """Return the files with the scores of its runs, one for each seed; they need not exist."""
        return [self.path / "scores" / f"{run.name}.json" for run in self.runs(system)]

    def recipe(self, system: System) -> Groups:
        """Return the settings of a system: those in its recipe file if there is one, else derived from `base`."""
        if system.name not in self._recipes:
            file = self._recipe_file(system)
            self._recipes[system.name] = (
                merge_recipe(load_recipe(str(file)), {})
                if file.exists()
                else system.settings(self.base, self.corpus.tokenizer.vocab_size)
            )
        return self._recipes[system.name]

    @property
    def segment_length(self) -> int:
        """Segment length of the settings that all systems share."""
        return run_settings(self.base, "settings").train.segment_length

    def attention_windows(self, system: System, requested: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the attention windows with which a system is scored, among them that of training.

        The learned positions of the architecture al-rfou end at the segment length, so longer windows are left out. By
        default, the architecture vaswani (sinusoidal positions) is scored with short windows only, because a sliding
        window computes each window from scratch.

        Args:
            system: the system.
            requested: in tokens, or None for a range from half a segment to six segments.
        """
        if not system.attends:
            return ()
        segment_length, trained_window = self.trained_lengths(system)
        windows = [count * self.segment_length // 2 for count in _HALF_SEGMENTS] if requested is None else requested
        if system.architecture == "al-rfou":
            windows = [window for window in windows if window <= segment_length]
        elif system.architecture == "vaswani" and requested is None:
            windows = [window for window in windows if window <= 3 * self.segment_length]
        return tuple(sorted({*(window for window in windows if window > 0), trained_window}))

    def trained_lengths(self, system: System) -> tuple[int, int]:
        """Return the segment length and the attention window of a system in training.

        The attention window is that of the model, or segment and memory together if that is shorter.
        """
        config = run_settings(self.recipe(system), "settings")
        num_keys = config.train.segment_length + config.train.memory_length
        return config.train.segment_length, min(num_keys, config.model.limit("attention_window") or num_keys)

    def context_sweep(
        self, context_step: int | None = None, max_context: int | None = None, num_positions: int = 1000
    ) -> ContextSweep:
        """Return the contexts to measure: by default ten, in steps of half a segment.

        Raises:
            UserError: a value is out of range.
        """
        step = max(1, self.segment_length // 2) if context_step is None else context_step
        settings = {"context_step": step, "max_context": max_context, "num_positions": num_positions}
        return check_settings(ContextSweep, settings, "context sweep")

    def finish_runs(self, windows: Mapping[System, tuple[int, ...]]) -> None:
        """Train and score the runs that are not finished, several at a time.

        Args:
            windows: the attention windows with which each system is scored, or an empty tuple to score it once, with
                the evaluation settings of its recipe.

        Raises:
            UserError: a training run cannot start, failed, or was stopped.
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
                if not (file := self._recipe_file(system)).exists():
                    about = {"title": system.name, "source": "txl reproduce", "corpus": self.corpus.record.name}
                    write_text(file, yaml.safe_dump({**about, **self.recipe(system)}, sort_keys=False))
            jobs = [
                self._job(system, index, configs[system], windows[system])
                for index in range(len(self.seeds))
                for system in windows
            ]
            unfinished = [job for job in jobs if job is not None]
            say(f"{len(jobs) - len(unfinished)} of {len(jobs)} runs are trained and scored already")
            if unfinished:
                # one training process for each core, or one on a GPU
                workers = num_cores() if choose_device(self.device).type == "cpu" else 1
                run_parallel(
                    "reproduce",
                    unfinished,
                    self.path / "logs",
                    workers=min(workers, len(unfinished)),
                    threads=max(1, num_cores() // workers),
                    pass_fds=lock,
                )

    def metadata(self) -> dict[str, Any]:
        """Return the settings and the environment of the results in this folder, for JSON."""
        return {
            "command": self.command,
            "corpus": self.corpus.record.name,
            "train_tokens": self.corpus.split("train").num_tokens,
            "max_tokens": self.max_tokens,
            "seeds": list(self.seeds),
            "caveat": SMOKE_CAVEAT if self.smoke else ONE_SEED_CAVEAT if len(self.seeds) == 1 else "",
            "settings": self.base,
            **environment(choose_device(self.device)),
        }

    @property
    def _shared_settings(self) -> dict[str, Any]:
        """Settings and checksums that must be the same for all runs of the folder."""
        splits = self.corpus.record.splits
        return {
            "train_sha256": splits["train"].sha256,
            "test_sha256": splits["test"].sha256,
            "tokenizer_sha256": fingerprint(self.corpus.tokenizer),
            "max_tokens": self.max_tokens,
            **self.base,
        }

    def _check_unchanged(self) -> None:
        """Check that the path is the folder of a reproduction with the same settings, or new."""
        check_folder(self.path)
        file = self.path / "settings.yaml"
        if not file.exists():
            if any((self.path / "runs").glob("*")):
                raise UserError(f"{file} is missing, so the settings of the runs there are unknown; choose another out")
            return
        recorded = read_yaml(file.read_bytes(), str(file))
        if set(self.base) <= set(recorded):  # settings that an earlier version did not have are at their defaults
            recorded |= _complete({group: recorded[group] for group in self.base}, str(file))
        if difference := first_difference(self._shared_settings | _complete(self.base, "settings"), recorded):
            advice = "give the same again, or choose another out"
            raise UserError(f"{self.path} was started with other settings: {difference}; {advice}")

    def _recipe_file(self, system: System) -> Path:
        return self.path / "recipes" / f"{system.name}.yaml"

    def _config(self, system: System) -> RunConfig:
        """Return the settings of a system's runs except for the seed, after checking that they can be trained."""
        config = run_settings(self.recipe(system), system.name)
        config, _ = complete_settings(config, self.corpus.path, {}, lambda _: None)  # as training completes them
        open_data(config, self.corpus, choose_device(self.device))  # raises if training cannot start
        return config

    def _job(self, system: System, index: int, config: RunConfig, windows: tuple[int, ...]) -> Job | None:
        """Return the job that trains and scores a run, or None if that has been done.

        Raises:
            UserError: an existing run has other settings than its recipe.
        """
        run, scores, seed = self.runs(system)[index], self.scores(system)[index], self.seeds[index]
        _check_run(run, config, seed)
        scored = {entry["attention_window"] for entry in read_scores(scores)} if scores.exists() else set[int | None]()
        if scored and scored.issuperset(windows):
            return None
        windows = tuple(sorted({*windows, *(window for window in scored if window)}))
        options = ["--corpus", str(self.corpus.path), "--device", self.device]
        new = [str(self._recipe_file(system)), "--run", str(run), "--train.seed", str(seed)]
        # a run that has taken its last step is resumed too, because its last validation may be missing
        train = ["train", *(["--resume", str(run)] if run.exists() else new), *options]
        evaluate = ["evaluate", str(run), *options, "--max-tokens", str(self.max_tokens), "--json"]
        if windows:
            evaluate += ["--sweep-attention-window", ",".join(map(str, windows))]
        if not system.has_memory:
            evaluate += ["--method", "sliding-window"]
        commands = [Command(train), Command(evaluate, output=scores)]
        return Job(run.name, commands, config.train.max_steps, lambda: _last_step(run))


def _base_settings(recipe: str, overrides: Groups, *, smoke: bool) -> Groups:
    """Return the settings that all systems share: those of the recipe, replaced by the overrides."""
    for group, name in (("model", "architecture"), ("train", "seed"), ("train", "loss")):
        if name in overrides[group]:
            raise UserError(f"{group}.{name} differs between runs; leave it out (give seeds=1,2,3 instead)")
    settings = merge_recipe(load_recipe(recipe), {})
    if smoke:
        settings = merge(settings, _SMOKE_SETTINGS) | {"evaluation": dict[str, Any]()}
    base: Groups = merge(settings, overrides)
    config = run_settings(base, "settings")
    if config.model.architecture != "transformer-xl":
        raise UserError(f"recipe {recipe} is for {config.model.architecture}; give one for transformer-xl")
    if not config.train.memory_length:
        raise UserError("train.memory_length 0: systems with and without memory are compared; give 1 or more")
    return base


def _complete(groups: Groups, source: str) -> Groups:
    """Return groups of settings with those that they lack, which are at their defaults."""
    config = run_settings(groups, source).model_dump(mode="json")
    return {group: config[group] for group in groups}


def _check_run(run: Path, config: RunConfig, seed: int) -> None:
    """Check that a run, if it exists, has the settings of its recipe."""
    if not run.exists():
        return
    saved, expected = RunFolder.open(run).config, config.train.model_copy(update={"seed": seed})
    if saved.train != expected or saved.model != config.model:
        raise UserError(
            f"{run} has other settings than its recipe in {run.parent.parent}; delete the run, or choose another out"
        )


def _last_step(run: Path) -> int:
    """Return the last step in the metrics of a run, for a progress bar; 0 if they cannot be read."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith(b"\n")), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


@contextmanager
def report_damage(file: Path) -> Iterator[None]:
    """Raise a UserError that names the file if the `with` block does not find the expected values in it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{file} is damaged; delete it and run the command that wrote it again") from None


def read_scores(file: Path) -> list[dict[str, Any]]:
    """Read the results of `txl evaluate --json`, one entry for each attention window.

    Raises:
        UserError: the file is damaged.
    """
    with report_damage(file):
        results = json.loads(file.read_bytes())
        entries = results.get("sweep", [results])
        for entry in entries:
            if not all(isinstance(entry[name], float) for name in _SCORES) or "attention_window" not in entry:
                raise ValueError
        return entries


def check_folder(path: Path) -> None:
    """Check that a path is the folder of a reproduction, an empty folder, or nothing yet.

    Raises:
        UserError: it is anything else.
    """
    is_new = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not is_new and not any((path / name).exists() for name in ("settings.yaml", REPORT)):
        raise UserError(f"{path} exists and is not the folder of a reproduction; choose another out")
