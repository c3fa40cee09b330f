"""`txl train`: a new run from a corpus and settings, or an old run going on."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from transformer_xl.cli.flags import EvaluationFlags, ModelFlags, TrainFlags, given
from transformer_xl.cli.options import ANY_MACHINE, Json, Machine, MachineOptions
from transformer_xl.cli.output import print_json
from transformer_xl.config import (
    INT32_MAX,
    ModelConfig,
    RunConfig,
    UserError,
    load_recipe,
    merge,
    merge_recipe,
    run_settings,
)
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.text.token_store import Corpus
    from transformer_xl.text.tokenizer import Tokenizer
    from transformer_xl.training.distributed import DistributedContext
    from transformer_xl.training.loop import Trainer, TrainResult

# What a resumed run may change: nothing that shapes the model, its memory or the order of the text, and nothing that a
# kept average of gradients or weights is of. Other rows begin with an empty memory.
_CHANGEABLE = {
    *("max_steps", "learning_rate", "lr_schedule", "warmup_steps", "decay_steps", "min_learning_rate_ratio"),
    *("beta1", "beta2", "muon_momentum", "weight_decay", "max_grad_norm", "ema_decay"),
    *("batch_size", "micro_batch_size", "compile", "activation_checkpointing", "parallelism"),
    *("log_interval", "eval_interval", "eval_tokens", "checkpoint_interval", "tensorboard"),
}


def train(
    recipe: str | None = None,
    /,
    *,
    corpus: Path | None = None,
    run: Path | None = None,
    resume: Path | None = None,
    model: Annotated[ModelFlags | None, Parameter(group="Model")] = None,
    train: Annotated[TrainFlags | None, Parameter(group="Training")] = None,
    evaluation: Annotated[EvaluationFlags | None, Parameter(group="Evaluation")] = None,
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> int:
    """Train a model on a corpus, or go on with a run.

    Settings: the defaults, then the recipe, then flags. Ctrl-C or SIGTERM saves a checkpoint and ends the command with
    status 130 or 143; --resume goes on from there as if it had never stopped.

    Parameters
    ----------
    recipe
        Name of a recipe ('txl recipes' lists them), or a YAML file like them.
    corpus
        Folder that 'txl prepare' made.
    run
        New folder for settings, weights and figures. [default: runs/CORPUS-RECIPE]
    resume
        Folder of a run to go on with, instead of a recipe, --corpus and --run.
    """
    from transformer_xl.training.distributed import process_group

    flags = given(model=model, train=train, evaluation=evaluation)
    with process_group(machine.choose) as world:
        if resume is None:
            if corpus is None:
                raise UserError("training needs --corpus DIR (from 'txl prepare'), or --resume RUN to go on with a run")
            run = run or Path("runs", "-".join(Path(name).stem for name in (corpus.resolve().name, recipe) if name))
        elif recipe or run:
            raise UserError("--resume goes on with a run as it is; leave the recipe and --run out")
        return _train(_Wanted(recipe, corpus, run, resume, flags), world, json)


@dataclass(frozen=True)
class _Wanted:
    """What was typed."""

    recipe: str | None
    corpus: Path | None
    run: Path | None
    resume: Path | None
    flags: dict[str, dict[str, Any]]


def _train(wanted: _Wanted, world: DistributedContext, json: bool) -> int:
    """All of training; when it returns, nothing of it is left that holds on to the other processes."""
    with ExitStack() as stack:
        if wanted.resume is not None:
            training = _resumed(wanted.resume, wanted.corpus, wanted.flags, world, stack)
        else:
            assert wanted.corpus is not None
            assert wanted.run is not None
            training = _begun(wanted.recipe, wanted.corpus, wanted.run, wanted.flags, world, stack)
        outcome, stopped_by = run_training(training)
    if world.is_first:
        _tell(training.folder, outcome, json)
    return 0 if outcome.finished else 128 + (stopped_by or signal.SIGTERM)


def new_training(
    recipe: str | None, corpus: Path, run: Path, flags: dict[str, dict[str, Any]], machine: Machine
) -> Trainer:
    """Checks everything, then makes the run folder: bad input leaves nothing behind. For one process."""
    from transformer_xl.training.distributed import DistributedContext

    with ExitStack() as stack:
        return _begun(recipe, corpus, run, flags, DistributedContext(device=machine.choose()), stack)


def _begun(
    recipe: str | None,
    corpus: Path,
    run: Path,
    flags: dict[str, dict[str, Any]],
    world: DistributedContext,
    stack: ExitStack,
) -> Trainer:
    """A new run; or, where torchrun starts the same command anew after a process has died, that run going on.

    Until `stack` is closed, no other command trains it.
    """
    from transformer_xl.files import lock_folder
    from transformer_xl.run_folder import RunFolder
    from transformer_xl.training.distributed import is_restartable
    from transformer_xl.training.loop import Trainer, check

    with world.together():
        config, opened = _checked(recipe, corpus, flags, world)
        check(config, opened, world.device, world)
        # only the first looks: a file system that is shared may go on telling the others that nothing is there
        there = world.is_first and is_restartable() and (run / "config.yaml").exists()
        if there and RunFolder.open(run).config != config:
            raise UserError(
                f"{run} holds a run with other settings; go on with it by --resume {run}, or choose another --run"
            )
    again = world.any(there)
    training = Trainer(RunFolder(run, config, opened.tokenizer), opened, world.device, world=world)
    with world.together():  # last: a model too large for the machine leaves no folder
        if world.is_first and not again:
            RunFolder.create(run, config, opened.tokenizer)
        if world.is_first:
            stack.enter_context(lock_folder(run))
    with world.together():
        if not (run / "config.yaml").exists():
            raise UserError(f"not every process can see {run}, which the first has made; put it where all machines can")
    if again:
        _go_on(training)
    return training


def _checked(
    recipe: str | None, corpus: Path, flags: dict[str, dict[str, Any]], world: DistributedContext
) -> tuple[RunConfig, Corpus]:
    """The settings of a new run as a whole, and its corpus."""
    known = load_recipe(recipe) if recipe else None
    settings = merge({"recipe": recipe}, merge_recipe(known, flags) if known else flags)
    # wrong settings are told before anything is read; the vocabulary is still unknown, and none is too large here
    run_settings(merge({"model": {"vocab_size": INT32_MAX}}, settings), "settings")

    from transformer_xl.text.token_store import Corpus
    from transformer_xl.text.tokenizer import fingerprint

    opened = Corpus.open(corpus)
    reference = {
        "path": str(corpus.resolve()),
        "tokenizer_sha256": fingerprint(opened.tokenizer),
        "train_sha256": opened.record.splits["train"].sha256,
    }
    settings = merge(settings, {"corpus": reference, "model": {"vocab_size": opened.tokenizer.vocab_size}})
    config = run_settings(settings, "settings")
    if config.model.cutoffs == "auto":
        found = {"cutoffs": cutoffs_for(config.model, opened.tokenizer, tell=world.is_first)}
        config = run_settings(merge(settings, {"model": found}), "settings")
    if world.is_first:
        opened.verify("train", "valid")
    return config, opened


def cutoffs_for(config: ModelConfig, tokenizer: Tokenizer, *, tell: bool = True) -> tuple[int, ...]:
    """Cutoffs that suit a vocabulary; none where its ids are not in order of frequency, or too few to pay."""
    from transformer_xl.model.cost import find_cutoffs

    found = () if tokenizer.counts is None else find_cutoffs(tokenizer.counts, config.max_tails)
    if tell:
        say(f"adaptive softmax with cutoffs {', '.join(map(str, found))}" if found else "softmax without cutoffs")
    return found


def _resumed(
    resume: Path, corpus: Path | None, flags: dict[str, dict[str, Any]], world: DistributedContext, stack: ExitStack
) -> Trainer:
    """A run going on; until `stack` is closed, no other command trains it."""
    from dataclasses import replace

    from transformer_xl.files import lock_folder, write_text
    from transformer_xl.run_folder import RunFolder, config_text
    from transformer_xl.training.loop import Trainer, check

    with world.together():
        folder = RunFolder.open(resume)
        if world.is_first:
            stack.enter_context(lock_folder(resume))
        for group, names in flags.items():
            for name in names:
                if group == "model" or (group == "train" and name not in _CHANGEABLE):
                    raise UserError(f"{group}.{name} cannot change within a run; start a new one with --run DIR")
        config = run_settings(merge(folder.config.model_dump(), flags), "settings")
        opened = folder.open_corpus(corpus)
        if folder.config.corpus and folder.config.corpus.train_sha256 != opened.record.splits["train"].sha256:
            raise UserError(
                f"{opened.path} holds another training text than {resume} began with; give that corpus again"
            )
        if world.is_first:
            opened.verify("train", "valid")
        if corpus is not None and config.corpus is not None:
            moved = config.corpus.model_copy(update={"path": str(corpus.resolve())})
            config = config.model_copy(update={"corpus": moved})
        check(config, opened, world.device, world)
    training = Trainer(replace(folder, config=config), opened, world.device, world=world)
    _go_on(training)
    with world.together():
        if world.is_first and config != folder.config:
            write_text(folder.path / "config.yaml", config_text(config))
    return training


def _go_on(training: Trainer) -> None:
    """Puts it where the newest checkpoint is, and says so."""
    remarks = training.resume()
    step, steps, path = training.state.progress.step, training.config.max_steps, training.folder.path
    if step > steps:
        raise UserError(f"{path} is at step {step:,} already, beyond --train.max-steps {steps:,}")
    if training.world.is_first:
        for line in [*remarks, f"going on with {path} at step {step:,} of {steps:,}"]:
            say(line)


def run_training(training: Trainer) -> tuple[TrainResult, int | None]:
    """Trains with a progress bar; a first Ctrl-C or SIGTERM stops after the current step, a second at once."""
    config = training.config
    with _stop_signals() as received, ExitStack() as stack:
        if training.world.is_first:
            bar = stack.enter_context(ProgressBar("train", config.max_steps, "steps"))
            bar.begin_at(training.state.progress.step)
            training.reporter = _BarReporter(bar, training.folder.tokenizer.kind)
        outcome = training.run(lambda: bool(received))
    return outcome, received[0] if received else None


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects stop signals; after the first one, the usual handling is back."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


class _BarReporter:
    """Shows training on a progress bar."""

    def __init__(self, bar: ProgressBar, kind: str) -> None:
        self._bar, self._kind = bar, kind
        self._notes = {"train": "", "valid": ""}
        self._tokens = 0

    def step(self, step: int, tokens: int) -> None:
        """Moves the bar on."""
        self._tokens += tokens
        rate = self._tokens / max(1e-9, self._bar.seconds)
        self._bar.advance(1, f"{self._notes['train']}{self._notes['valid']}{rate:,.0f} tokens/s")

    def validating(self, read: int, tokens: int) -> None:
        """Says so beside the bar."""
        self._bar.advance(0, f"validation, {read:,} of {tokens:,} tokens")

    def figures(self, figures: dict[str, Any]) -> None:
        """Keeps the newest figures beside the bar."""
        if self._kind in ("bytes", "characters"):
            quality = f"{figures['bits_per_byte']:.3f} bits/byte"
        else:
            quality = f"ppl {math.exp(min(figures['nats_per_token'], 99)):.1f}"
        loss = f"loss {figures['nats_per_token']:.3f} " if figures["split"] == "train" else "valid "
        self._notes[figures["split"]] = f"{loss}{quality}, "


def _tell(folder: RunFolder, outcome: TrainResult, json: bool) -> None:
    best = outcome.best_nats_per_token
    if not outcome.finished:
        say(f"stopped and saved at step {outcome.step:,}; go on with: txl train --resume {folder.path}")
    if json:
        print_json(
            {
                "run": str(folder.path),
                "finished": outcome.finished,
                "step": outcome.step,
                "steps": folder.config.train.max_steps,
                "best_valid_nats_per_token": best,
                "seconds": outcome.seconds,
            }
        )
        return
    if not outcome.finished:
        return
    valid = (
        "" if best is None else f", best validation loss {best:.4f} nats per token (perplexity {math.exp(best):.2f})"
    )
    print(f"{folder.path}: {outcome.step:,} steps in {outcome.seconds:,.0f} s{valid}")
    print(f"next: txl evaluate {folder.path}")
