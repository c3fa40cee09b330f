"""The folder of a reproduction: which runs belong to it, and what trains and scores those that are not done.

OUT/settings.yaml      what all of it is about; given again it must be the same
OUT/recipes/           a recipe for each system
OUT/runs/NAME-seedN    ordinary runs
OUT/scores/            what `txl evaluate` said of each
OUT/logs/              what the processes said
OUT/*.json             what was found, part by part
OUT/report.html        made of all of that
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from transformer_xl.cli.options import num_cores
from transformer_xl.cli.output import command_line
from transformer_xl.cli.reproduce.scale import Groups, Scale
from transformer_xl.config import INT32_MAX, RunConfig, UserError, load_recipe, merge, read_yaml, run_settings
from transformer_xl.files import as_user_error, write_text
from transformer_xl.progress import say
from transformer_xl.reproduction.parallel import Command, Job, run_parallel

if TYPE_CHECKING:
    from transformer_xl.analysis.effective_context import ContextSweep
    from transformer_xl.reproduction.systems import System
    from transformer_xl.text.token_store import Corpus

_HALVES = (1, 2, 3, 4, 6, 8, 12)  # of a segment: the attention lengths of a sweep
_MEASURED = ("nats_per_token", "bits_per_byte", "perplexity")


@dataclass(frozen=True)
class Reproduction:
    """A reproduction's folder, which need not be there yet."""

    path: Path
    corpus: Corpus
    base: Groups
    """Settings all systems share."""
    seeds: tuple[int, ...]
    tokens: int
    workers: int
    device: str
    found: dict[str, Groups] = field(default_factory=dict)
    """Settings of systems, once they are found."""

    @staticmethod
    def opened(scale: Scale) -> Reproduction:
        """Checks what can be checked; nothing is written.

        Raises:
            UserError: no such corpus or recipe, settings that cannot be, or a folder with something else in it.
        """
        from transformer_xl.text.token_store import Corpus

        seeds, base, workers = scale.all_seeds(), scale.base(), scale.num_workers()
        if not scale.corpus.exists():
            raise UserError(f"no corpus at {scale.corpus}; make one with 'txl prepare enwik8' or give --corpus DIR")
        corpus = Corpus.open(scale.corpus)
        tokens = scale.num_tokens(corpus.split("test").num_tokens)
        reproduction = Reproduction(scale.out, corpus, base, seeds, tokens, workers, scale.device)
        reproduction.check_same()
        return reproduction

    @property
    def settings(self) -> dict[str, Any]:
        """What may not change."""
        from transformer_xl.text.tokenizers import fingerprint

        splits = self.corpus.record.splits
        return {
            "train_sha256": splits["train"].sha256,
            "test_sha256": splits["test"].sha256,
            "tokenizer_sha256": fingerprint(self.corpus.tokenizer),
            "tokens": self.tokens,
            **self.base,
        }

    def check_same(self) -> None:
        """Whether the folder is new, or holds what is asked for.

        Raises:
            UserError: it does not.
        """
        check_folder(self.path)
        file = self.path / "settings.yaml"
        if not file.exists():
            if any((self.path / "runs").glob("*")):
                raise UserError(f"{file} is missing, so what the runs there are is not known; choose another --out")
            return
        before, now = _flat(read_yaml(file.read_bytes(), str(file))), _flat(self.settings)
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                raise UserError(
                    f"{self.path} was begun with {name} {before.get(name, 'as by default')}, and now it is "
                    f"{now.get(name, 'as by default')}; give the same again, or another --out"
                )

    def runs(self, system: System) -> list[Path]:
        """Where its runs are or will be, one for each seed."""
        return [self.path / "runs" / f"{system.name}-seed{seed}" for seed in self.seeds]

    def scores(self, system: System) -> list[Path]:
        """Where the figures of its runs are or will be."""
        return [self.path / "scores" / f"{run.name}.json" for run in self.runs(system)]

    def recipe(self, system: System) -> Groups:
        """Its settings; they are found once and kept."""
        if system.name not in self.found:
            file = self._recipe_file(system)
            if file.exists():
                recipe = load_recipe(str(file))
                groups = {"model": recipe.model, "train": recipe.train, "evaluation": recipe.evaluation}
            else:
                groups = system.settings(self.base, self.corpus.tokenizer.vocab_size)
            self.found[system.name] = groups
        return self.found[system.name]

    def _recipe_file(self, system: System) -> Path:
        return self.path / "recipes" / f"{system.name}.yaml"

    def windows(self, system: System, wanted: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Attention lengths at which a system is scored: those wanted, as far as it has them, and that of training.

        A window that moves token by token computes all of it anew, so that far fewer and shorter ones are taken.
        """
        if not system.attends:
            return ()
        segment, trained = self.lengths(system)
        unit = self.lengths(None)[0]
        most = {"vaswani": 3 * unit, "al-rfou": segment}.get(system.architecture, INT32_MAX)
        swept = [share * unit // 2 for share in _HALVES] if wanted is None else list(wanted)
        most = most if wanted is None or system.architecture == "al-rfou" else INT32_MAX
        return tuple(sorted({*(length for length in swept if 1 <= length <= most), trained}))

    def lengths(self, system: System | None) -> tuple[int, int]:
        """Segment, and the attention length of training: segment and memory, or the window; none: of the base."""
        config = run_settings(self.base if system is None else self.recipe(system), "settings")
        most = config.train.segment_length + config.train.memory_length
        return config.train.segment_length, min(most, config.model.limit("attention_window") or most)

    def context_sweep(self, step: int | None = None, longest: int | None = None, positions: int = 1000) -> ContextSweep:
        """Contexts in steps of half a segment, ten of them, unless told otherwise."""
        from transformer_xl.analysis.effective_context import ContextSweep

        step = max(1, self.lengths(None)[0] // 2) if step is None else step
        return ContextSweep(
            min_context=step,
            context_step=step,
            max_context=10 * step if longest is None else longest,
            num_positions=positions,
        )

    def finish(self, systems: Sequence[System], windows: dict[str, tuple[int, ...]]) -> None:
        """Trains and scores what is not done yet.

        Args:
            systems: which.
            windows: attention lengths at which each is scored, by name; none: as it is.

        Raises:
            UserError: a training cannot begin, failed, or was stopped.
        """
        configs = {system.name: self._checked(system) for system in systems}
        with self._at_work() as lock:
            for system in systems:
                self._keep_recipe(system)
            jobs = [
                self._job(system, index, configs[system.name], windows[system.name])
                for index in range(len(self.seeds))
                for system in systems
            ]
            open_jobs = [job for job in jobs if job is not None]
            say(f"{len(jobs) - len(open_jobs)} of {len(jobs)} runs are trained and scored already")
            if open_jobs:
                threads = max(1, num_cores() // self.workers)
                how = {"workers": min(self.workers, len(open_jobs)), "threads": threads, "held": lock}
                run_parallel("reproduce", open_jobs, self.path / "logs", **how)

    def _checked(self, system: System) -> RunConfig:
        """Its settings as a run of the first seed has them, with which training can begin."""
        from transformer_xl.device import choose_device
        from transformer_xl.training.trainer import check_trainable

        known = {"model": {"vocab_size": self.corpus.tokenizer.vocab_size}}
        config = run_settings(merge(self.recipe(system), known), system.name)
        check_trainable(config, self.corpus, choose_device(self.device))
        return config

    @contextmanager
    def _at_work(self) -> Iterator[tuple[int, ...]]:
        """Makes the folder, or finds it as it must be, and holds it; gives what holds it, for processes to inherit."""
        with as_user_error(f"writing {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
        with _locked(self.path) as lock:
            self.check_same()  # another may have been quicker
            write_text(self.path / "settings.yaml", yaml.safe_dump(self.settings, sort_keys=False))
            for name in ("recipes", "runs", "scores", "logs"):
                (self.path / name).mkdir(exist_ok=True)
            yield lock

    def _keep_recipe(self, system: System) -> None:
        file = self._recipe_file(system)
        if not file.exists():
            about = {"title": system.name, "source": "txl reproduce", "corpus": str(self.corpus.record.name)}
            write_text(file, yaml.safe_dump({**about, **self.recipe(system)}, sort_keys=False))

    def about(self) -> dict[str, Any]:
        """What figures of this folder are about, for JSON."""
        from transformer_xl.device import choose_device, environment

        return {
            "command": command_line(),
            "corpus": self.corpus.record.name,
            "train_tokens": self.corpus.split("train").num_tokens,
            "tokens": self.tokens,
            "seeds": list(self.seeds),
            "settings": self.base,
            **environment(choose_device(self.device)),
        }

    def _job(self, system: System, index: int, config: RunConfig, windows: tuple[int, ...]) -> Job | None:
        """What is left to do for one run; none: nothing.

        Raises:
            UserError: the run there is another one than its recipe says.
        """
        run, scores, seed = self.runs(system)[index], self.scores(system)[index], self.seeds[index]
        _check_run(run, config, seed)
        done = [score["attention_window"] for score in read_scores(scores)] if scores.exists() else []
        if done and set(windows) <= set(done):
            return None
        windows = tuple(sorted({*windows, *(window for window in done if window)}))

        def commands() -> list[Command]:
            options = ("--corpus", str(self.corpus.path), "--device", self.device)
            # a run whose steps are done may still lack its last validation; if nothing is lacking, nothing is done
            begin = (str(self._recipe_file(system)), "--run", str(run), "--train.seed", str(seed))
            train = ("train", *(("--resume", str(run)) if run.exists() else begin), *options)
            evaluate = ["evaluate", str(run), *options, "--max-tokens", str(self.tokens), "--json"]
            if windows:
                evaluate += ["--sweep-attention-window", ",".join(map(str, windows))]
            if not system.has_memory:
                evaluate += ["--method", "sliding-window"]
            return [Command(train), Command(evaluate, output=scores)]

        return Job(run.name, commands, config.train.max_steps, lambda: step_of(run))


def _check_run(run: Path, config: RunConfig, seed: int) -> None:
    """Whether the run that is there is what the recipe says.

    Raises:
        UserError: it is not.
    """
    from transformer_xl.run_folder import RunFolder

    if not run.exists():
        return
    there, unknown = RunFolder.open(run).config, {"cutoffs"}  # which are found from the corpus
    wanted = config.train.model_copy(update={"seed": seed})
    same = there.train == wanted and there.model.model_dump(exclude=unknown) == config.model.model_dump(exclude=unknown)
    if not same:
        raise UserError(
            f"{run} is not of the settings in the recipe beside it; delete the run, or choose another --out"
        )


def step_of(run: Path) -> int:
    """How many steps of a run its log knows of; it is for a progress bar alone."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith(b"\n")), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def read_scores(file: Path) -> list[dict[str, Any]]:
    """What `txl evaluate` found, one entry for each attention length.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = json.loads(file.read_bytes())
        entries = found.get("sweep", [found])
        if not all(isinstance(entry[name], float) for entry in entries for name in _MEASURED):
            raise ValueError
        return [{"attention_window": entry["attention_window"], **entry} for entry in entries]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise UserError(f"{file} is damaged; delete it and give the command again") from None


def best_window(file: Path) -> int:
    """The attention length at which a run scored best."""
    return min(read_scores(file), key=lambda entry: entry["nats_per_token"])["attention_window"]


def keep(out: Path, name: str, figures: dict[str, Any]) -> Path:
    """Writes the figures of a part into a reproduction's folder, and the report anew; gives the report."""
    write_text(out / f"{name}.json", json.dumps(figures, indent=1) + "\n")
    return keep_report(out)


def keep_report(out: Path) -> Path:
    """Writes the report of what is there."""
    from transformer_xl.reproduction.report import reproduction_page

    report = out / "report.html"
    write_text(report, reproduction_page(out))
    return report


def check_folder(out: Path) -> None:
    """Whether a reproduction is there, or room for one.

    Raises:
        UserError: something else is.
    """
    known = ("settings.yaml", "report.html", ".lock")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or any((out / name).exists() for name in known))):
        raise UserError(f"{out} exists and holds no reproduction; choose another --out")


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


@contextmanager
def _locked(out: Path) -> Iterator[tuple[int, ...]]:
    """Holds the folder for one command at a time; processes that inherit the descriptor hold it too."""
    with (out / ".lock").open("w") as file:
        if os.name != "posix":
            yield ()
            return
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another txl reproduce, or a training that it began, is at work in {out}; wait for it, stop it, or "
                "choose another --out"
            ) from None
        yield (file.fileno(),)
