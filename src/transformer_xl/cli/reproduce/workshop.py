"""The folder of a reproduction: which runs belong to it, and what trains and scores those that are not done.

OUT/settings.yaml      what all of it is about; given again it must be the same
OUT/recipes/           a recipe for each system
OUT/runs/NAME-seedN    ordinary runs
OUT/scores/            what `txl evaluate` said of each
OUT/logs/              what the processes said
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from transformer_xl.cli.flags import ModelFlags, TrainFlags, given
from transformer_xl.cli.options import num_cores, whole_numbers
from transformer_xl.cli.output import say
from transformer_xl.cli.side_by_side import Command, Job, run_side_by_side
from transformer_xl.config import MOST, UserError, load_recipe, merge, read_yaml, run_settings
from transformer_xl.files import explained, write_text

if TYPE_CHECKING:
    from transformer_xl.analysis.systems import System
    from transformer_xl.evaluation.effective_context import ContextSweep
    from transformer_xl.text.token_store import Corpus

_SMOKE: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "width": 32, "heads": 2, "head_width": 16, "feedforward": 64},
    "train": {"segment": 16, "memory": 16, "rows": 8, "steps": 30, "warmup": 5, "evaluate_every": 30,
              "evaluate_tokens": 1024, "save_every": 10},
}  # fmt: skip
_SMOKE_TOKENS = 512
_HALVES = (1, 2, 3, 4, 6, 8, 12)  # of a segment: the attention lengths of a sweep


@dataclass(frozen=True)
class Scale:
    """How large all of it is."""

    corpus: Path = Path("corpora/enwik8")
    """Folder that 'txl prepare' made."""
    out: Path = Path("reproduction")
    """Folder for runs, figures and the report; what is there already is not done again."""
    recipe: str = "ablation"
    """Settings that all systems share."""
    seeds: str = "1,2"
    """Each system is trained once for each."""
    tokens: int = 16_384
    """Tokens of the test text that are scored, from its start."""
    smoke: bool = False
    """Tiny models, a few steps, one seed: whether everything works, in minutes."""
    workers: int | None = None
    """Trainings at a time. [default: one for each core; on a GPU one]"""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    model: ModelFlags | None = None
    train: TrainFlags | None = None


@dataclass(frozen=True)
class Workshop:
    """A reproduction's folder, opened."""

    path: Path
    corpus: Corpus
    base: dict[str, dict[str, Any]]
    """Settings all systems share."""
    seeds: tuple[int, ...]
    tokens: int
    workers: int
    device: str
    lock: int
    """File descriptor of the lock; processes at work keep it open."""

    @staticmethod
    @contextmanager
    def opened(scale: Scale) -> Iterator[Workshop]:
        """Checks everything, and makes the folder or finds it as it must be.

        Raises:
            UserError: no such corpus or recipe, settings that cannot be, or a folder with something else in it.
        """
        from transformer_xl.text.token_store import Corpus

        if scale.tokens < 1:
            raise UserError(f"--tokens {scale.tokens}: wanted 1 or more")
        if scale.workers is not None and scale.workers < 1:
            raise UserError(f"--workers {scale.workers}: wanted 1 or more")
        seeds = whole_numbers("--seeds", "1" if scale.smoke else scale.seeds)
        base = _base(scale)
        if not scale.corpus.exists():
            raise UserError(f"no corpus at {scale.corpus}; make one with 'txl prepare enwik8' or give --corpus DIR")
        corpus = Corpus.open(scale.corpus)
        tokens = min(_SMOKE_TOKENS if scale.smoke else scale.tokens, corpus.split("test").num_tokens)
        settings = {"corpus_sha256": corpus.record.splits["train"].sha256, "tokens": tokens, **base}
        workers = scale.workers or _workers(scale.device)
        _check_same(scale.out, settings)
        with explained(f"writing {scale.out}"):
            for name in ("recipes", "runs", "scores", "logs"):
                (scale.out / name).mkdir(parents=True, exist_ok=True)
        with _locked(scale.out) as lock:
            write_text(scale.out / "settings.yaml", yaml.safe_dump(settings, sort_keys=False))
            yield Workshop(scale.out, corpus, base, seeds, tokens, workers, scale.device, lock)

    def runs(self, system: System) -> list[Path]:
        """Where its runs are or will be, one for each seed."""
        return [self.path / "runs" / f"{system.name}-seed{seed}" for seed in self.seeds]

    def scores(self, system: System) -> list[Path]:
        """Where the figures of its runs are or will be."""
        return [self.path / "scores" / f"{run.name}.json" for run in self.runs(system)]

    def recipe(self, system: System) -> dict[str, dict[str, Any]]:
        """Its settings; they are found once and kept."""
        file = self.path / "recipes" / f"{system.name}.yaml"
        if file.exists():
            recipe = load_recipe(str(file))
            return {"model": recipe.model, "train": recipe.train, "evaluation": recipe.evaluation}
        say(f"settings of {system.name}")
        settings = system.settings(self.base, self.corpus.vocabulary.size)
        about = {"title": system.name, "source": "txl reproduce", "corpus": str(self.corpus.record.name)}
        write_text(file, yaml.safe_dump({**about, **settings}, sort_keys=False))
        return settings

    def windows(self, system: System, wanted: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Attention lengths at which a system is scored: those wanted, as far as it has them, and that of training.

        A window that moves token by token computes all of it anew, so that far fewer and shorter ones are taken.
        """
        if not system.attends:
            return ()
        segment, trained = self.lengths(system)
        unit = self.lengths(None)[0]
        most = {"sinusoidal": 3 * unit, "learned": segment}.get(system.encoding, MOST)
        swept = [share * unit // 2 for share in _HALVES] if wanted is None else list(wanted)
        most = most if wanted is None or system.encoding == "learned" else MOST
        return tuple(sorted({*(length for length in swept if 1 <= length <= most), trained}))

    def lengths(self, system: System | None) -> tuple[int, int]:
        """Segment, and the attention length of training: segment and memory; none: of the base."""
        train = run_settings(self.base if system is None else self.recipe(system), "settings").train
        return train.segment, train.segment + train.memory

    def context_sweep(self, step: int | None = None, longest: int | None = None, positions: int = 1000) -> ContextSweep:
        """Contexts in steps of half a segment, ten of them, unless told otherwise."""
        from transformer_xl.evaluation.effective_context import ContextSweep

        step = step or max(1, self.lengths(None)[0] // 2)
        return ContextSweep(start=step, step=step, longest=longest or 10 * step, positions=positions)

    def finish(self, systems: Sequence[System], windows: dict[str, tuple[int, ...]]) -> None:
        """Trains and scores what is not done yet.

        Args:
            systems: which.
            windows: attention lengths at which each is scored, by name; none: as it is.

        Raises:
            UserError: a training failed, or was stopped.
        """
        settings = {system.name: self.recipe(system) for system in systems}
        jobs = [
            self._job(system, index, settings[system.name], windows[system.name])
            for index in range(len(self.seeds))
            for system in systems
        ]
        open_jobs = [job for job in jobs if job is not None]
        say(f"{len(jobs) - len(open_jobs)} of {len(jobs)} runs are trained and scored already")
        if open_jobs:
            threads = max(1, num_cores() // self.workers)
            how = {"workers": min(self.workers, len(open_jobs)), "threads": threads, "held": (self.lock,)}
            run_side_by_side("reproduce", open_jobs, self.path / "logs", **how)

    def about(self) -> dict[str, Any]:
        """What figures of this folder are about, for JSON."""
        from transformer_xl.device import choose_device, circumstances

        return {
            "command": command_line(),
            "corpus": self.corpus.record.name,
            "train_tokens": self.corpus.split("train").num_tokens,
            "tokens": self.tokens,
            "seeds": list(self.seeds),
            "settings": self.base,
            **circumstances(choose_device(self.device)),
        }

    def keep(self, name: str, figures: dict[str, Any]) -> Path:
        """Writes the figures of a part, and the report anew; gives the report."""
        return keep(self.path, name, figures)

    def _job(
        self, system: System, index: int, settings: dict[str, dict[str, Any]], windows: tuple[int, ...]
    ) -> Job | None:
        """What is left to do for one run; none: nothing."""
        run, scores = self.runs(system)[index], self.scores(system)[index]
        steps = run_settings(settings, system.name).train.steps
        if scores.exists() and windows == tuple(score["window"] for score in read_scores(scores) if score["window"]):
            return None

        def commands() -> list[Command]:
            options = ("--device", self.device)
            train = ("train", str(self.path / "recipes" / f"{system.name}.yaml"), "--corpus", str(self.corpus.path),
                     "--run", str(run), "--train.seed", str(self.seeds[index]), *options)  # fmt: skip
            if run.exists():
                train = ("train", "--resume", str(run), "--corpus", str(self.corpus.path), *options)
            evaluate = ["evaluate", str(run), "--corpus", str(self.corpus.path), "--tokens", str(self.tokens), "--json"]
            if windows:
                evaluate += ["--sweep-window", ",".join(map(str, windows))]
            if not system.has_memory:
                evaluate += ["--method", "moving-window"]
            trained = [] if step_of(run) >= steps else [Command(train)]
            return [*trained, Command([*evaluate, *options], output=scores)]

        return Job(run.name, commands, steps, lambda: step_of(run))


def keep(out: Path, name: str, figures: dict[str, Any]) -> Path:
    """Writes the figures of a part into a reproduction's folder, and the report anew; gives the report."""
    from transformer_xl.analysis.reproduction_page import reproduction_page

    write_text(out / f"{name}.json", json.dumps(figures, indent=1) + "\n")
    report = out / "report.html"
    write_text(report, reproduction_page(out))
    return report


def check_folder(out: Path) -> None:
    """Whether a reproduction is there, or room for one.

    Raises:
        UserError: something else is.
    """
    known = ("settings.yaml", "report.html")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or any((out / name).exists() for name in known))):
        raise UserError(f"{out} exists and holds no reproduction; choose another --out")


def command_line() -> str:
    """What was typed."""
    return shlex.join(["txl", *sys.argv[1:]])


def step_of(run: Path) -> int:
    """How many steps of a run its log knows of."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    lines = file.read_bytes().splitlines(keepends=True)
    return max((json.loads(line)["step"] for line in lines[-2:] if line.endswith(b"\n")), default=0)


def read_scores(file: Path) -> list[dict[str, Any]]:
    """What `txl evaluate` found, one entry for each attention length.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = json.loads(file.read_bytes())
        return found.get("sweep", [found])
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{file} is damaged; delete it and give the command again") from None


def best_window(file: Path) -> int:
    """The attention length at which a run scored best."""
    return min(read_scores(file), key=lambda entry: entry["nats_per_token"])["window"]


def _base(scale: Scale) -> dict[str, dict[str, Any]]:
    recipe = load_recipe(scale.recipe)
    known = {"model": recipe.model, "train": recipe.train, "evaluation": recipe.evaluation}
    flags = given(model=scale.model, train=scale.train)
    if scale.smoke:
        known = merge(known, _SMOKE) | {"evaluation": dict[str, Any]()}
    base = merge(known, flags)
    for name in ("kind", "encoding"):
        if name in base["model"]:
            raise UserError(f"model.{name} is what the systems differ in; leave it out")
    for name in ("seed", "loss"):
        if name in base["train"]:
            raise UserError(f"train.{name} is not one for all systems; leave it out (--seeds says the seeds)")
    run_settings(base, "settings")
    return base


def _workers(device: str) -> int:
    from transformer_xl.device import choose_device

    if choose_device(device).type != "cpu":
        return 1
    return num_cores()


def _check_same(out: Path, settings: dict[str, Any]) -> None:
    """Whether the folder is new, or holds what is asked for."""
    check_folder(out)
    file = out / "settings.yaml"
    if not file.exists():
        return
    before, now = _flat(read_yaml(file.read_bytes(), str(file))), _flat(settings)
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise UserError(
                f"{out} was begun with {name} {before.get(name, 'as by default')}, and now it is "
                f"{now.get(name, 'as by default')}; give the same again, or another --out"
            )


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


@contextmanager
def _locked(out: Path) -> Iterator[int]:
    """Holds the folder for one command at a time; processes that inherit the descriptor hold it too."""
    with (out / ".lock").open("w") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield file.fileno()
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another txl reproduce is at work in {out}; wait for it, or choose another --out"
            ) from None
        yield file.fileno()
