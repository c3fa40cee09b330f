"""`train` and `resume`, the public functions that train a model on a corpus and write its run folder.

Under torchrun, each process calls them with the same arguments.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from transformer_xl.config import (
    INT32_MAX,
    RunConfig,
    TrainConfig,
    UserError,
    check_type,
    checked_names,
    given_settings,
    grouped,
    load_recipe,
    merge,
    merge_recipe,
    nearest,
    refuse_unused,
    run_settings,
)
from transformer_xl.device import choose_device, set_threads
from transformer_xl.display import Displayed
from transformer_xl.files import as_path, lock_folder, quoted
from transformer_xl.ops.native import status
from transformer_xl.progress import note, say
from transformer_xl.run import Run, load
from transformer_xl.run_folder import RunFolder, first_difference, read_metrics, trained_config
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import fingerprint
from transformer_xl.training.callbacks import Callback, Metrics, ProgressBarCallback
from transformer_xl.training.checkpoint import checkpoint_at, step_of, update_record
from transformer_xl.training.cost import find_cutoffs
from transformer_xl.training.distributed import DistributedContext, is_restartable, num_restarts, process_group
from transformer_xl.training.memory_length_choice import record_memory_lengths
from transformer_xl.training.schedules import learning_rate
from transformer_xl.training.text_losses import TextLoss, losses_of_resumed
from transformer_xl.training.trackers import TrackerCallback, end_finished
from transformer_xl.training.trainer import Trainer

if TYPE_CHECKING:
    from transformer_xl.config import EvaluationConfig, ModelConfig
    from transformer_xl.config.typed_settings import EvaluationSettings, ModelSettings, TrainSettings

Overrides = Mapping[str, Any]
"""Settings of one group by name, such as {"max_steps": 1000}."""

_Start = Callable[[DistributedContext, ExitStack, Callable[[str], None]], Trainer]
"""Returns the trainer of a new or resumed run; the run's folder is locked until the ExitStack is closed. The last
argument prints a line for the user."""

FirstWeights = Callable[[RunConfig], Mapping[str, Tensor]]
"""Returns the weights that a new run with these settings begins with, by name."""

# Settings that can change when a run is resumed. Settings that determine the model, its memory, the order of the text,
# the optimizers (as ngram_learning_rate_ratio does) or the state of the weight average cannot change. After a change of
# batch size, memory starts empty, and a short text may be cut into other pieces.
_CHANGEABLE = {
    *("max_steps", "learning_rate", "lr_schedule", "warmup_steps", "decay_steps", "min_learning_rate_ratio"),
    *("embedding_learning_rate_ratio", "average_learning_rate"),
    *("beta1", "beta2", "muon_learning_rate_ratio", "weight_decay", "max_grad_norm", "ema_decay"),
    *("batch_size", "micro_batch_size", "compile", "activation_checkpointing", "parallelism"),
    *("log_interval", "eval_interval", "eval_tokens", "checkpoint_interval", "trackers"),
}
_MAX_STOP_SIGNALS = 3  # that let training save and end; the next one ends it at once
_MAX_RECIPE_L2 = 0.01  # a weight decay above it is meant for adamw or muon


@dataclass(frozen=True, repr=False)
class TrainResult(Displayed):
    """The result of training."""

    path: Path
    """Folder of the run."""
    device: str
    """Device it was trained on."""
    step: int
    """Total number of optimizer steps done."""
    max_steps: int
    """Total number of optimizer steps in the settings."""
    finished: bool
    """Whether all steps are done; otherwise training was stopped and can be resumed."""
    best_nats_per_token: float | None
    """Lowest validation loss in nats per token, or None without a validation text."""
    seconds: float
    """Total training time in seconds."""
    stop_signal: int | None = None
    """The signal that stopped training, with `handle_signals`."""
    rank: int = 0
    """Index of this process, under torchrun."""
    losses: tuple[TextLoss, ...] = ()
    """Of a run of `finetune`, the loss of each text before and after; empty if training was stopped."""

    @property
    def history(self) -> list[Metrics]:
        """All metrics of the run so far, a dictionary for each line of metrics.jsonl.

        Each has `split` ("train" or "valid"), `step`, `nats_per_token`, `bits_per_byte`, `learning_rate` and `seconds`,
        those of training also `grad_norm`, `grad_norm_max` and `tokens_per_second`. A table of them is
        `pandas.DataFrame(result.history)`.
        """
        return read_metrics(self.path)

    @cached_property
    def run(self) -> Run:
        """The trained model with its tokenizer and config, ready to use; loaded at the first access (best weights)."""
        return load(self.path, device=self.device)


@checked_names
def train(
    config: str | Path | RunConfig | None,
    corpus: Corpus | Path | str,
    run: Path | str | None = None,
    *,
    model: ModelSettings | ModelConfig | None = None,
    train: TrainSettings | TrainConfig | None = None,
    evaluation: EvaluationSettings | EvaluationConfig | None = None,
    device: str = "auto",
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Train a new model on a corpus.

    Settings and corpus are checked before the run folder is created. Ctrl-C (KeyboardInterrupt) is raised only after
    the current step, after a checkpoint is written and its weights are validated; a second one skips the validation.
    `resume` continues from there as if training had never stopped. Under torchrun all processes train together, and a
    restarted program resumes the run.

    Args:
        config: name of a recipe (`txl recipes` lists them), path of a YAML file in the same format or of a run's
            folder, a RunConfig, or None for the defaults of the settings, which are those of the paper (`txl train`
            takes the recipe `fast-small`). The vocabulary size is that of the corpus.
        corpus: corpus to train on, or the folder that `txl prepare` created.
        run: new folder for settings, weights and metrics, or None for runs/CORPUS-RECIPE, named
            after the corpus folder and the recipe (runs/CORPUS without a recipe).
        model: settings of the model that replace those of `config`, such as {"n_layers": 6}.
        train: settings of training that replace those of `config`, such as {"max_steps": 1000}.
        evaluation: settings of evaluation that replace those of `config`.
        device: `cuda`, `cuda:1`, `mps` or `cpu`, or `auto` for the fastest available one.
        threads: number of CPU threads that torch uses in one operation, or None for torch's default.
        callbacks: called during training; they can stop it.
        progress: show a progress bar and messages on standard error.
        handle_signals: let SIGINT and SIGTERM stop training after the current step, with a checkpoint and a result. For
            programs that exit afterwards; otherwise the caller's signal handlers are unchanged.

    Returns:
        The result; `.run` is the trained model, ready to use.

    Raises:
        UserError: settings, corpus or run folder are invalid, the loss is no longer finite, or the disk is full.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    corpus_path = corpus_folder(corpus)
    if run is None:
        run = default_run(corpus_path, config if isinstance(config, str | Path) else None)
    overrides = given_settings(model=model, train=train, evaluation=evaluation)
    start = partial(start_run, config, corpus_path, as_path(run, "run"), overrides)
    return run_training(start, device, threads, callbacks, progress=progress, handle_signals=handle_signals)


@checked_names
def resume(
    run: Run | Path | str,
    corpus: Corpus | Path | str | None = None,
    *,
    from_step: int | None = None,
    base: Path | str | None = None,
    train: TrainSettings | TrainConfig | None = None,
    evaluation: EvaluationSettings | EvaluationConfig | None = None,
    device: str = "auto",
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Resume a run from its newest checkpoint, bit for bit as if it had never stopped, or from an earlier one.

    Args:
        run: folder of the run, or the loaded run.
        corpus: new location of the corpus, or None if it has not moved.
        from_step: go back to the checkpoint of this step, with the settings of training that it had; None: the newest.
            Later checkpoints are kept aside (as step-N.aside) until new ones overtake them, and the best weights stay
            until a validation finds better ones.
        base: new folder of the base of an adapter, or None if it has not moved.
        train: settings of training to change from the next step on, such as {"max_steps": 2000}.
        evaluation: settings of evaluation to change.
        device: as for `train`.
        threads: as for `train`.
        callbacks: as for `train`.
        progress: as for `train`.
        handle_signals: as for `train`.

    Returns:
        The result; `.run` is the trained model, ready to use, and `.losses` those of `finetune` if the run was
        fine-tuned, as far as its base is still there.

    Raises:
        UserError: the run does not exist, is being trained by another process, or has no valid checkpoint; the corpus
            is a different one; or a setting cannot change within a run.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    overrides = given_settings(train=train, evaluation=evaluation)
    path = run.path if isinstance(run, Run) else as_path(run, "run", "give the folder of a run")
    if path is None:
        raise UserError("this run is in no folder; give the folder of a run")
    moved_base = None if base is None else as_path(base, "base", "give the folder of a run")
    check_type(from_step, (int, type(None)), "from_step", "give the step of a checkpoint, an integer")
    moved_corpus = None if corpus is None else corpus_folder(corpus)
    start = partial(_resume, path, moved_corpus, moved_base, overrides, from_step)
    result = run_training(start, device, threads, callbacks, progress=progress, handle_signals=handle_signals)
    if not result.finished or result.rank != 0 or RunFolder.open(result.path).config.finetune is None:
        return result
    return replace(result, losses=losses_of_resumed(result.run, say if progress else ignore))


def default_run(corpus_path: Path, recipe: str | Path | None) -> Path:
    """Return the folder of a new run for which none was given."""
    return Path("runs", "-".join(Path(name).stem for name in (corpus_path.resolve().name, recipe) if name))


def corpus_folder(corpus: Corpus | Path | str) -> Path:
    return corpus.path if isinstance(corpus, Corpus) else as_path(corpus, "corpus", "give a corpus or its folder")


def run_training(
    start: _Start,
    device: str,
    threads: int | None,
    callbacks: Sequence[Callback],
    *,
    progress: bool,
    handle_signals: bool,
) -> TrainResult:
    """Train with the trainer that `start` returns, in all processes, while the run's folder is locked."""
    check_type(callbacks, Sequence, "callbacks", "give a list of Callback objects")
    for callback in callbacks:
        check_type(callback, Callback, "a callback", "give objects of subclasses of Callback")

    def choose() -> torch.device:
        set_threads(threads)
        return choose_device(device)

    def run_in(world: DistributedContext) -> TrainResult:  # a function, to free its objects (see `process_group`)
        show_progress = progress and world.is_first
        with ExitStack() as stack:
            log = say if show_progress else ignore
            trainer = start(world, stack, log)
            world.in_first(trainer.folder.record_start, trainer.state.step, trainer.device, world.size)
            num_tokens = trainer.config.batch_size * trainer.config.segment_length
            num_trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
            trained = "" if num_trained == trainer.model.num_parameters() else f", {num_trained:,} of them trained"
            log(
                f"model: {trainer.model.num_parameters():,} parameters{trained}, on {trainer.device}; "
                f"{trainer.config.max_steps:,} steps of {num_tokens:,} tokens{_kernel_text(trainer)}"
            )
            if (steps := trainer.config.max_steps) < (warmup := trainer.config.warmup_steps):
                peak = trainer.config.learning_rate
                note(
                    f"the warm-up of {warmup:,} steps ends after the training of {steps:,}, which reaches "
                    f"{steps / warmup * peak:.3g} of the learning rate {peak:g}; lower train.warmup_steps",
                    log,
                )
            trackers = [TrackerCallback(name) for name in trainer.config.trackers]
            for tracker in trackers:
                stack.callback(tracker.end, trainer)
            trainer.callbacks = [*trackers, *([ProgressBarCallback()] if show_progress else []), *callbacks]
            with stop_signals(trainer, handle_signals=handle_signals) as received:
                finished = trainer.run()
                num_signals = min(len(received), 1)
                record_memory_lengths(trainer, lambda: len(received) > num_signals, progress=show_progress)
                if finished:
                    end_finished(trackers, trainer)
        if received and not handle_signals:
            raise KeyboardInterrupt
        return TrainResult(
            path=trainer.folder.path,
            device=str(trainer.device),
            step=trainer.state.step,
            max_steps=trainer.config.max_steps,
            finished=finished,
            best_nats_per_token=trainer.state.best_nats,
            seconds=trainer.state.seconds,
            stop_signal=received[0] if received else None,
            rank=world.rank,
        )

    with process_group(choose) as world:
        return run_in(world)


def _kernel_text(trainer: Trainer) -> str:
    """Return, for the first line of a training, which attention kernel it uses and how to get the fastest on a CPU."""
    name = trainer.stepper.numerics.attn_implementation
    if name is None:
        return ""
    text, native = f"; attention kernel {name}", status()
    if name == "native":
        return f"{text} ({native.text})"
    return text if native.operators or trainer.device.type != "cpu" else f"{text} (native operators: {native.text})"


def ignore(_: str) -> None:
    pass


def start_run(
    config: str | Path | RunConfig | None,
    corpus_path: Path,
    path: Path,
    overrides: Mapping[str, Overrides],
    world: DistributedContext,
    stack: ExitStack,
    log: Callable[[str], None],
    *,
    first_weights: FirstWeights | None = None,
) -> Trainer:
    """Return the trainer of a new run, or of the resumed run if torchrun restarted the program."""
    with world.raise_together():
        checked, corpus = complete_settings(config, corpus_path, overrides, log)
        if isinstance(config, str | Path) and Path(config, "config.yaml").exists():
            note(
                f"this trains a new model with the settings of {config}; to train its weights further, use: txl "
                f"finetune {quoted(Path(config))} --corpus {quoted(corpus_path)}",
                log,
            )
        if world.is_first:
            corpus.verify("train", "valid")
        # only the first process checks, because other hosts may see an outdated view of a shared file system
        exists = world.is_first and is_restartable() and (path / "config.yaml").exists()
        if exists and RunFolder.open(path).config != checked:
            raise UserError(
                f"{path} contains a run with other settings; resume it (txl train --resume {quoted(path)}), or "
                "choose another folder"
            )
        window, train = checked.evaluation.attention_window, checked.train
        if window is not None and window < train.segment_length + train.memory_length:
            note(
                f"evaluation attends to {window:,} tokens, fewer than training with segments of "
                f"{train.segment_length:,} and memory of {train.memory_length:,}; "
                "evaluation.attention_window=none removes that limit",
                log,
            )
    restarted = world.any(exists)
    weights = None if first_weights is None or restarted else first_weights(checked)
    trainer = Trainer(RunFolder(path, checked, corpus.tokenizer), corpus, world.device, world=world, weights=weights)
    with world.raise_together():  # after building the model, so that one that does not fit into memory leaves no folder
        if world.is_first and not restarted:
            RunFolder.create(path, checked, corpus.tokenizer)
        if world.is_first:
            stack.enter_context(lock_folder(path))
    with world.raise_together():
        if not (path / "config.yaml").exists():
            raise UserError(f"not every process can read {path}; put it on a file system that all nodes share")
    if restarted:
        _restore(trainer, log)
    return trainer


def complete_settings(
    config: str | Path | RunConfig | None,
    corpus_path: Path,
    overrides: Mapping[str, Overrides],
    log: Callable[[str], None],
) -> tuple[RunConfig, Corpus]:
    """Return the complete settings of a new run, and its corpus."""
    known = (str, Path, RunConfig, type(None))
    overrides = {**overrides, "model": grouped(overrides.get("model", {}))}
    check_type(config, known, "config", "give a recipe such as 'small', a RunConfig, or None and settings by group")
    if isinstance(config, RunConfig):
        settings = merge(config.model_dump(exclude={"history", "finetune"}), overrides)
    elif config is not None:
        settings = merge({"recipe": str(config)}, merge_recipe(load_recipe(str(config)), overrides))
    else:
        settings = merge(overrides)
    # check the settings before reading the corpus, with the largest vocabulary size because its size is still unknown
    checked = run_settings(merge(settings, {"model": {"vocab_size": INT32_MAX}}), "settings")
    refuse_unused(overrides, checked)
    decay, is_recipe = checked.train.weight_decay, isinstance(config, str | Path)
    is_l2 = checked.train.optimizer == "adam" and decay > _MAX_RECIPE_L2
    if is_recipe and is_l2 and "weight_decay" not in overrides.get("train", {}):
        raise UserError(
            f"the recipe's train.weight_decay {decay:g} is for adamw and muon, and would be L2 regularization with "
            "optimizer adam; give train.weight_decay=0 too, or train.optimizer=adamw"
        )
    corpus = Corpus.open(corpus_path)
    reference = {
        "path": str(corpus_path.resolve()),
        "tokenizer_sha256": fingerprint(corpus.tokenizer),
        "train_sha256": corpus.record.splits["train"].sha256,
    }
    settings = merge(settings, {"corpus": reference, "model": {"vocab_size": corpus.tokenizer.vocab_size}})
    settings = merge(settings, {"train": _limit_epochs(checked, corpus, overrides.get("train", {}), log)})
    if (model := checked.model.orders) is not None and model.functional_tokens == "auto":
        settings = merge(settings, {"model": {"functional_tokens": corpus.tokenizer.separators}})
    checked = run_settings(settings, "settings")
    if checked.model.cutoffs == "auto":
        counts = corpus.tokenizer.counts  # None if ids are not in order of frequency
        cutoffs = () if counts is None else find_cutoffs(counts, checked.model.max_tails)
        log(f"adaptive softmax with cutoffs {', '.join(map(str, cutoffs))}" if cutoffs else "softmax without cutoffs")
        checked = run_settings(merge(settings, {"model": {"cutoffs": cutoffs}}), "settings")
    return checked, corpus


def _limit_epochs(
    checked: RunConfig, corpus: Corpus, overrides: Overrides, log: Callable[[str], None]
) -> dict[str, Any]:
    """Return the settings that `max_epochs` changes in a run on this corpus, and none in place of itself."""
    config = checked.train
    if config.max_epochs is None or ("max_steps" in overrides and "max_epochs" not in overrides):
        return {"max_epochs": None}
    num_tokens = corpus.record.splits["train"].num_tokens
    steps = math.ceil(config.max_epochs * num_tokens / checked.model.text_per_step(config))
    if steps >= config.max_steps:
        if steps > config.max_steps and "max_epochs" in overrides:
            epochs = config.max_epochs * config.max_steps / steps
            note(
                f"train.max_epochs {config.max_epochs:g} needs {steps:,} steps, and training ends at train.max_steps "
                f"{config.max_steps:,} ({epochs:.2g} epochs); give train.max_steps {steps} too for all of them",
                log,
            )
        return {"max_epochs": None}
    log(
        f"{steps:,} steps instead of {config.max_steps:,}, as the training text has {num_tokens:,} tokens and "
        f"train.max_epochs is {config.max_epochs:g}"
    )

    def scaled(name: str, most: int = INT32_MAX) -> int:
        value = getattr(config, name)
        return value if name in overrides else max(0, min(round(value * steps / config.max_steps), most))

    # each is rounded by itself, so together they could be a step more than there are
    warmup, start = scaled("warmup_steps"), scaled("average_start_step", steps - 1)
    of_steps = {"warmup_steps": warmup, "decay_steps": scaled("decay_steps", steps - warmup)}
    return {"max_epochs": None, "max_steps": steps, **of_steps, "average_start_step": start}


def _resume(
    path: Path,
    corpus_path: Path | str | None,
    base: Path | None,
    overrides: Mapping[str, Overrides],
    from_step: int | None,
    world: DistributedContext,
    stack: ExitStack,
    log: Callable[[str], None],
) -> Trainer:
    """Return the trainer of a run at the checkpoint of a step, or at its newest."""
    with world.raise_together():
        folder = RunFolder.open(path)
        if world.is_first:
            stack.enter_context(lock_folder(path))
        for name in overrides["train"]:
            if name not in TrainConfig.model_fields:
                raise UserError(f"train has no setting '{name}'{nearest(name, TrainConfig.model_fields)}")
            if name not in _CHANGEABLE:
                raise UserError(
                    f"train.{name} cannot change within a run; to train its weights further with another value: txl "
                    f"finetune {quoted(path)} --corpus DIR; or start a new one with run=DIR"
                )
        from_step = None if num_restarts() else from_step  # a restarted program has gone back already
        checkpoint = checkpoint_at(folder, from_step)
        recorded = None if checkpoint is None else trained_config(checkpoint)
        if recorded is not None and checkpoint != folder.latest_checkpoint():
            # settings of training go back too; corpus, base and evaluation stay as they are now
            trained = {"train": recorded.train, "history": recorded.history}
            folder = replace(folder, config=folder.config.model_copy(update=trained))
        elif recorded is not None:
            if folder.config not in (recorded, recorded.before_last_change()):
                difference = first_difference(folder.config.model_dump(mode="json"), recorded.model_dump(mode="json"))
                note(
                    f"{path / 'config.yaml'} is not what was trained, and is written again: {difference}; pass changes "
                    "as flags",
                    log,
                )
            folder = replace(folder, config=recorded)
        if base is not None:
            finetune = folder.config.finetune
            if finetune is None or finetune.lora is None:
                raise UserError(f"{path} is a whole run, not an adapter; leave out base={base}")
            finetune = finetune.model_copy(update={"base": str(base.resolve())})
            folder = replace(folder, config=folder.config.model_copy(update={"finetune": finetune}))
        known = folder.config
        config = run_settings(merge(known.model_dump(), overrides), "settings")
        refuse_unused(overrides, config)
        corpus = folder.open_corpus(corpus_path)
        if folder.config.corpus and folder.config.corpus.train_sha256 != corpus.record.splits["train"].sha256:
            raise UserError(
                f"{corpus.path} has a different training text than {path}; pass the corpus of the run, or train its "
                f"weights on this text: txl finetune {quoted(path)} --corpus {quoted(corpus.path)}"
            )
        if world.is_first:
            corpus.verify("train", "valid")
        if corpus_path is not None and config.corpus is not None:
            moved = config.corpus.model_copy(update={"path": str(Path(corpus_path).resolve())})
            config = config.model_copy(update={"corpus": moved})
        _check_steps_left(path, 0 if checkpoint is None else step_of(checkpoint), known.train, config.train)
    trainer = Trainer(replace(folder, config=config), corpus, world.device, world=world)
    _restore(trainer, log, from_step)
    for line in _change_lines(trainer, known.train):
        log(line)
    # settings of training are written down with the first checkpoint that was trained with them, all others now
    settled = replace(folder, config=config.model_copy(update={"train": known.train, "history": known.history}))
    if recorded is not None and settled.config != recorded:
        world.in_first(update_record, settled, config=settled.config.model_dump(mode="json"))
    world.in_first(settled.write_config)
    return trainer


def _check_steps_left(path: Path, step: int, known: TrainConfig, config: TrainConfig) -> None:
    """Refuse settings of training that end before the step of the checkpoint, or change where no step is left."""
    if step > config.max_steps:
        raise UserError(f"{path} is at step {step:,} already, beyond train.max_steps={config.max_steps}")
    changed = [name for name, value in config if getattr(known, name) != value and name != "max_steps"]
    if changed and step == config.max_steps:
        name = changed[0]
        raise UserError(
            f"{path} has done all of its {step:,} steps, so none is left to train with train.{name} "
            f"{getattr(config, name)}; give train.max_steps above {step} too, or leave train.{name} out"
        )


def _change_lines(trainer: Trainer, known: TrainConfig) -> list[str]:
    """Say what changes in training when a run is resumed, and how the learning rate goes on."""
    step, config = trainer.state.step, trainer.config
    if step == 0 or config == known:
        return []
    lines = [f"changed: {trainer.folder.config.history[-1]}"] if trainer.folder.config.history else []
    last, following = learning_rate(step - 1, known), learning_rate(step, config)
    is_same = following == learning_rate(step, known) and config.max_steps == known.max_steps
    if is_same or step >= config.max_steps:
        return lines
    end, end_step = learning_rate(config.max_steps - 1, config), config.max_steps
    line = f"learning rate: {last:.3g} in step {step:,}, {following:.3g} in the next, {end:.3g} in step {end_step:,}"
    if step >= config.warmup_steps and following < config.learning_rate / 100:
        line += "; that is below 1% of its peak and teaches little, give more train.max_steps"
    return [*lines, line]


def _restore(trainer: Trainer, log: Callable[[str], None], from_step: int | None = None) -> None:
    """Restore a checkpoint, and print the step at which training resumes."""
    warnings = trainer.resume(from_step)
    step, max_steps = trainer.state.step, trainer.config.max_steps
    for warning in warnings:
        note(warning, log)
    nothing = "; no step is left, give a larger train.max_steps to train on" if step == max_steps else ""
    log(f"resuming {trainer.folder.path} at step {step:,} of {max_steps:,}{nothing}")


class Stoppable(Protocol):
    """A training that can be stopped."""

    def stop(self, *, skip_validation: bool = False) -> None:
        """End training after the current step, with a checkpoint."""


@contextmanager
def stop_signals(trainer: Stoppable, *, handle_signals: bool) -> Iterator[list[int]]:
    """Let signals stop a trainer, and append them to the yielded list; a second one skips validation, the fourth kills.

    A second signal may come while the checkpoint is written, which must not end that. Without `handle_signals`, only
    Ctrl-C is delayed, in the main thread and if Python itself would raise KeyboardInterrupt: raised in the middle of a
    step, it would leave partly updated weights.
    """
    received: list[int] = []
    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM) if handle_signals else (signal.SIGINT,)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or (not handle_signals and signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield received
        return
    previous = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) == _MAX_STOP_SIGNALS:
            restore()
        trainer.stop(skip_validation=len(received) > 1)

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield received
    finally:
        restore()
