"""Train a model on a corpus, or resume a run: everything from settings to a finished run folder.

The same functions run alone and under torchrun, where each process calls them with the same arguments.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from transformer_xl.config import (
    INT32_MAX,
    RunConfig,
    UserError,
    load_recipe,
    merge,
    merge_recipe,
    run_settings,
)
from transformer_xl.device import choose_device, set_threads
from transformer_xl.files import lock_folder, write_text
from transformer_xl.model.cost import find_cutoffs
from transformer_xl.progress import say
from transformer_xl.run_folder import Run, RunFolder, config_text, load
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import fingerprint
from transformer_xl.training.callbacks import Callback, ProgressBarCallback
from transformer_xl.training.distributed import DistributedContext, is_restartable, process_group
from transformer_xl.training.trainer import Trainer, check_trainable

Overrides = Mapping[str, Any]
"""Settings of one group by name, such as {"max_steps": 1000}."""

# What a resumed run may change: nothing that shapes the model, its memory or the order of the text, and nothing that a
# kept average of gradients or weights depends on. With another batch size memory starts empty.
_CHANGEABLE = {
    *("max_steps", "learning_rate", "lr_schedule", "warmup_steps", "decay_steps", "min_learning_rate_ratio"),
    *("beta1", "beta2", "muon_momentum", "weight_decay", "max_grad_norm", "ema_decay"),
    *("batch_size", "micro_batch_size", "compile", "activation_checkpointing", "parallelism"),
    *("log_interval", "eval_interval", "eval_tokens", "checkpoint_interval", "tensorboard"),
}


@dataclass(frozen=True)
class TrainResult:
    """How training ended."""

    path: Path
    """Folder of the run."""
    device: str
    """What it was trained on."""
    step: int
    """Optimizer steps done, in all."""
    max_steps: int
    """Optimizer steps asked for, in all."""
    finished: bool
    """False: training was stopped before its end, and can be resumed."""
    best_nats_per_token: float | None
    """Lowest validation loss; None without a validation text."""
    seconds: float
    """Time spent in training, in all."""
    stop_signal: int | None = None
    """The signal that stopped training, with `handle_signals`."""
    rank: int = 0
    """Index of this process, under torchrun."""

    @cached_property
    def run(self) -> Run:
        """The trained model with its tokenizer and config, ready to use; loaded at the first access (best weights)."""
        return load(self.path, device=self.device)


def train(
    config: str | Path | RunConfig | None,
    corpus: Corpus | Path | str,
    run: Path | str | None = None,
    *,
    model: Overrides | None = None,
    train: Overrides | None = None,
    evaluation: Overrides | None = None,
    device: str = "auto",
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Train a new model on a corpus.

    Everything is checked before the run folder is made. Ctrl-C (KeyboardInterrupt) is raised only after the current
    step, when a checkpoint is written; a second one is raised at once. `resume` continues from there as if training had
    never stopped. Under torchrun all processes train together, and a restart of the program resumes the run.

    Args:
        config: name of a recipe (`txl recipes` lists them), path of a YAML file like them, a RunConfig, or None for the
            defaults. The size of the vocabulary is the corpus's.
        corpus: what to train on: a corpus, or the folder that `prepare` made.
        run: new folder for settings, weights and metrics; None for runs/CORPUS-RECIPE.
        model: settings of the model that replace those of `config`, such as {"n_layers": 6}.
        train: settings of training that replace those of `config`, such as {"max_steps": 1000}.
        evaluation: settings of evaluation that replace those of `config`.
        device: auto, cuda, mps or cpu.
        threads: CPU threads of one operation; None for torch's choice.
        callbacks: called while training; they can stop it.
        progress: show a progress bar and notes on standard error.
        handle_signals: let SIGINT and SIGTERM stop training after the current step, with a checkpoint and a result. For
            programs that end then; signal handlers are the caller's own otherwise.

    Returns:
        How training ended; `.run` is the trained model, ready to use.

    Raises:
        UserError: settings, corpus or folder are not right, the loss is no longer finite, or the disk is full.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    corpus_path = corpus.path if isinstance(corpus, Corpus) else Path(corpus)
    if run is None:
        recipe = None if isinstance(config, RunConfig) else config
        run = Path("runs", "-".join(Path(name).stem for name in (corpus_path.resolve().name, recipe) if name))
    overrides = {"model": model or {}, "train": train or {}, "evaluation": evaluation or {}}
    path = Path(run)

    def start(world: DistributedContext, stack: ExitStack, tell: Callable[[str], None]) -> Trainer:
        return _start(config, corpus_path, path, overrides, world=world, stack=stack, tell=tell)

    return _run(start, device, threads, callbacks, progress=progress, handle_signals=handle_signals)


def resume(
    run: Path | str,
    corpus: Corpus | Path | str | None = None,
    *,
    train: Overrides | None = None,
    evaluation: Overrides | None = None,
    device: str = "auto",
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Resume a run from its newest checkpoint, bit for bit as if it had never stopped.

    Args:
        run: folder of the run.
        corpus: where the corpus is now; None for where it was.
        train: settings of training to change from here on, such as {"max_steps": 2000}.
        evaluation: settings of evaluation to change.
        device: auto, cuda, mps or cpu.
        threads: as for `train`.
        callbacks: as for `train`.
        progress: as for `train`.
        handle_signals: as for `train`.

    Returns:
        How training ended; `.run` is the trained model, ready to use.

    Raises:
        UserError: there is no such run, another process trains it, it has no checkpoint or a damaged one, the corpus is
            another, or a setting cannot change within a run.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    overrides = {"train": train or {}, "evaluation": evaluation or {}}
    path, corpus_path = Path(run), corpus.path if isinstance(corpus, Corpus) else corpus

    def start(world: DistributedContext, stack: ExitStack, tell: Callable[[str], None]) -> Trainer:
        return _resume(path, corpus_path, overrides, world, stack, tell)

    return _run(start, device, threads, callbacks, progress=progress, handle_signals=handle_signals)


def _run(
    start: Callable[[DistributedContext, ExitStack, Callable[[str], None]], Trainer],
    device: str,
    threads: int | None,
    callbacks: Sequence[Callback],
    *,
    progress: bool,
    handle_signals: bool,
) -> TrainResult:
    """Train what `start` makes, among all processes; the run's folder is locked meanwhile."""

    def choose() -> Any:
        set_threads(threads)
        return choose_device(device)

    def within(world: DistributedContext) -> TrainResult:  # what it makes is unreachable when it ends, as torch needs
        shows = progress and world.is_first
        with ExitStack() as stack:
            tell = say if shows else _ignore
            trainer = start(world, stack, tell)
            num_tokens = trainer.config.batch_size * trainer.config.segment_length
            tell(
                f"model: {trainer.model.num_parameters():,} parameters, on {trainer.device}; "
                f"{trainer.config.max_steps:,} steps of {num_tokens:,} tokens"
            )
            trainer.callbacks = [*([ProgressBarCallback()] if shows else []), *callbacks]
            with _stop_signals(trainer.stop, handle_signals=handle_signals) as received:
                finished = trainer.run()
        if received and not handle_signals:
            raise KeyboardInterrupt
        state = trainer.state
        return TrainResult(
            path=trainer.folder.path,
            device=str(trainer.device),
            step=state.step,
            max_steps=trainer.config.max_steps,
            finished=finished,
            best_nats_per_token=state.best_nats,
            seconds=state.seconds,
            stop_signal=received[0] if received else None,
            rank=world.rank,
        )

    with process_group(choose) as world:
        return within(world)


def _ignore(_: str) -> None:
    pass


def _start(
    config: str | Path | RunConfig | None,
    corpus_path: Path,
    path: Path,
    overrides: Mapping[str, Overrides],
    *,
    world: DistributedContext,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> Trainer:
    """Return the trainer of a new run, or of that run resumed where torchrun restarts the program.

    Until `stack` is closed, no other process trains it.
    """
    with world.raise_together():
        checked, corpus = _check_settings(config, corpus_path, overrides, tell)
        if world.is_first:
            corpus.verify("train", "valid")
        check_trainable(checked, corpus, world.device, world)
        # only the first looks: a shared file system may go on telling the others that nothing is there
        exists = world.is_first and is_restartable() and (path / "config.yaml").exists()
        if exists and RunFolder.open(path).config != checked:
            raise UserError(
                f"{path} holds a run with other settings; resume it with --resume {path}, or choose another --run"
            )
    restarted = world.any(exists)
    trainer = Trainer(RunFolder(path, checked, corpus.tokenizer), corpus, world.device, world=world)
    with world.raise_together():  # last: a model too large for the machine leaves no folder
        if world.is_first and not restarted:
            RunFolder.create(path, checked, corpus.tokenizer)
        if world.is_first:
            stack.enter_context(lock_folder(path))
    with world.raise_together():
        if not (path / "config.yaml").exists():
            raise UserError(f"not every process can see {path}, which the first made; put it where all machines can")
    if restarted:
        _restore(trainer, tell)
    return trainer


def _check_settings(
    config: str | Path | RunConfig | None,
    corpus_path: Path,
    overrides: Mapping[str, Overrides],
    tell: Callable[[str], None],
) -> tuple[RunConfig, Corpus]:
    """Return the settings of a new run as a whole, and its corpus."""
    if isinstance(config, RunConfig):
        settings = merge(config.model_dump(), overrides)
    elif config is not None:
        settings = merge({"recipe": str(config)}, merge_recipe(load_recipe(str(config)), overrides))
    else:
        settings = merge(overrides)
    # wrong settings are refused before anything is read; the vocabulary is still unknown, and none is too large here
    run_settings(merge(settings, {"model": {"vocab_size": INT32_MAX}}), "settings")
    corpus = Corpus.open(corpus_path)
    reference = {
        "path": str(corpus_path.resolve()),
        "tokenizer_sha256": fingerprint(corpus.tokenizer),
        "train_sha256": corpus.record.splits["train"].sha256,
    }
    settings = merge(settings, {"corpus": reference, "model": {"vocab_size": corpus.tokenizer.vocab_size}})
    checked = run_settings(settings, "settings")
    if checked.model.cutoffs == "auto":
        counts = corpus.tokenizer.counts  # None where ids are not in order of frequency
        cutoffs = () if counts is None else find_cutoffs(counts, checked.model.max_tails)
        tell(f"adaptive softmax with cutoffs {', '.join(map(str, cutoffs))}" if cutoffs else "softmax without cutoffs")
        checked = run_settings(merge(settings, {"model": {"cutoffs": cutoffs}}), "settings")
    return checked, corpus


def _resume(
    path: Path,
    corpus_path: Path | str | None,
    overrides: Mapping[str, Overrides],
    world: DistributedContext,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> Trainer:
    """Return the trainer of a run at its newest checkpoint; until `stack` is closed, no other process trains it."""
    with world.raise_together():
        folder = RunFolder.open(path)
        if world.is_first:
            stack.enter_context(lock_folder(path))
        for name in overrides["train"]:
            if name not in _CHANGEABLE:
                raise UserError(f"train.{name} cannot change within a run; start a new one with --run DIR")
        config = run_settings(merge(folder.config.model_dump(), overrides), "settings")
        corpus = folder.open_corpus(corpus_path)
        if folder.config.corpus and folder.config.corpus.train_sha256 != corpus.record.splits["train"].sha256:
            raise UserError(f"{corpus.path} holds another training text than {path} began with; give that corpus again")
        if world.is_first:
            corpus.verify("train", "valid")
        if corpus_path is not None and config.corpus is not None:
            moved = config.corpus.model_copy(update={"path": str(Path(corpus_path).resolve())})
            config = config.model_copy(update={"corpus": moved})
        check_trainable(config, corpus, world.device, world)
    trainer = Trainer(replace(folder, config=config), corpus, world.device, world=world)
    _restore(trainer, tell)
    with world.raise_together():
        if world.is_first and config != folder.config:
            write_text(folder.path / "config.yaml", config_text(config))
    return trainer


def _restore(trainer: Trainer, tell: Callable[[str], None]) -> None:
    """Return to the newest checkpoint, and say so."""
    notes = trainer.resume()
    step, max_steps, path = trainer.state.step, trainer.config.max_steps, trainer.folder.path
    if step > max_steps:
        raise UserError(f"{path} is at step {step:,} already, beyond --train.max-steps {max_steps:,}")
    for line in [*notes, f"resuming {path} at step {step:,} of {max_steps:,}"]:
        tell(line)


@contextmanager
def _stop_signals(stop: Callable[[], None], *, handle_signals: bool) -> Iterator[list[int]]:
    """Call `stop` at the first signal, and collect it; after it, the handlers before are back.

    Without `handle_signals` only Ctrl-C is delayed, in the main thread and where Python itself would raise
    KeyboardInterrupt: raised in the middle of a step, it would leave weights that belong to no step.
    """
    received: list[int] = []
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM) if handle_signals else (signal.SIGINT,)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or (not handle_signals and signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield received
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()
        stop()

    for number in numbers:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
