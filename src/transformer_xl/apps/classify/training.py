"""`finetune_classifier`: train a classifier of documents from a run; `resume_classifier` goes on with it.

A document is read as training reads a text: segment by segment, with memory that passes no gradient. All segments but
the last k are read without gradient. At the end of each of the last k, what was pooled until then predicts the label;
their losses are averaged. So a step needs the memory of one segment, whatever the length of the documents, and the
gradients train how these segments read their memory, not what earlier segments wrote into it.

Shape suffixes: B documents of a micro-batch, T new tokens, D model width, N documents, C labels.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.apps.classify import classifier as classifiers
from transformer_xl.apps.classify import embedding
from transformer_xl.apps.classify.classifier import ClassifierRecord, Validation, label_indices
from transformer_xl.checkpoint_record import CheckpointName
from transformer_xl.config import TrainConfig, UserError, check_type, checked_names, given_settings, merge, run_settings
from transformer_xl.config.settings import INT32_MAX
from transformer_xl.device import autocast, choose_device, set_threads
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.evaluation.pooling import PooledStates, Pooling
from transformer_xl.evaluation.score import Texts
from transformer_xl.files import as_path, lock_folder, remove_leftovers, write_json
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.model.model_with_memory import init_weights
from transformer_xl.progress import ProgressBar, note, say
from transformer_xl.reader import Reader
from transformer_xl.run import Run
from transformer_xl.run_folder import CLASSIFIER_FILE, HEAD, RunFolder, build_checked, check_new_run, load_weights
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.text.segments import DatasetPosition, TokenDataset
from transformer_xl.text.tokenizers import TokenArray
from transformer_xl.training.checkpoint import load_checkpoint, save_checkpoint
from transformer_xl.training.distributed import SINGLE_PROCESS
from transformer_xl.training.finetune import base_record, open_base, tuned_settings
from transformer_xl.training.numerics import computing_with
from transformer_xl.training.schedules import set_step_rates
from transformer_xl.training.stepper import Stepper
from transformer_xl.training.train import TrainResult, ignore, stop_signals

if TYPE_CHECKING:
    from transformer_xl.config import EvaluationConfig, ModelConfig
    from transformer_xl.config.typed_settings import EvaluationSettings, ModelSettings, TrainSettings

_DOCUMENTS_FILE = "documents.safetensors"
# settings of training that are for texts, or for the loop of their training
_OF_TEXTS = (
    *("loss", "random_segment_lengths", "extended_context_length", "shuffle_documents", "shuffle_length"),
    *("max_epochs", "eval_tokens", "parallelism", "weight_average", "ema_decay", "average_start_step"),
    *("average_learning_rate", "compile", "trackers", "log_interval"),
)
_OF_TOKENS = "softmax.", "next_heads.", "second_heads.", "mask_embedding"


@dataclass(frozen=True)
class Examples:
    """Documents as tokens, and the indices of their labels."""

    documents: Sequence[TokenArray]
    labels: Sequence[int]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tokens of all documents, their lengths and their labels."""
        tokens = torch.from_numpy(np.concatenate(self.documents).astype(np.int32))
        lengths = torch.tensor([len(document) for document in self.documents])
        return {"tokens": tokens, "lengths": lengths, "labels": torch.tensor(self.labels)}

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], name: str) -> Examples:
        """Return the examples whose tensors have this name before them."""
        tokens, lengths, labels = (tensors[f"{name}/{key}"] for key in ("tokens", "lengths", "labels"))
        return Examples(np.split(tokens.numpy(), lengths.cumsum(0)[:-1].numpy()), labels.tolist())

    def select(self, rows: Sequence[int]) -> Examples:
        """Return these examples."""
        return Examples([self.documents[row] for row in rows], [self.labels[row] for row in rows])


@checked_names
def finetune_classifier(
    base: Run | Path | str,
    documents: Texts,
    labels: Sequence[str],
    run: Path | str,
    *,
    valid: tuple[Texts, Sequence[str]] | None = None,
    valid_fraction: float = 0.1,
    pooling: Pooling = "last",
    loss_segments: int = 2,
    freeze: Sequence[str] = (),
    layer_rate_decay: float = 1.0,
    checkpoint: CheckpointName = "best",
    model: ModelSettings | ModelConfig | None = None,
    train: TrainSettings | TrainConfig | None = None,
    evaluation: EvaluationSettings | EvaluationConfig | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Train a classifier of documents of any length, with the weights of a run to begin with.

        finetune_classifier("runs/mine", documents, labels, "runs/topics", train={"max_steps": 300})

    The settings are those of `finetune`: the base's, with 1000 steps and a validation every 250, unless `train` says
    otherwise. `batch_size` is the number of documents of a step; they come in a new order each epoch. The weights with
    the lowest validation loss are kept. Ctrl-C saves a checkpoint; `resume_classifier` goes on from there bit for bit.

    Args:
        base: as for `finetune`.
        documents: the texts, as for `embed`.
        labels: the label of each document.
        run: new folder of the classifier, which is also that of a run, the fine-tuned language model.
        valid: documents and labels to validate with; None: some of the documents, which are not trained with.
        valid_fraction: without `valid`, the fraction of the documents of each label to validate with, one at least.
        pooling: as for `embed`.
        loss_segments: number of segments at the end of a document that are read with gradients. The label is predicted
            at the end of each. With 1, a document whose last segment is short trains little.
        freeze: as for `finetune`.
        layer_rate_decay: as for `finetune`.
        checkpoint: as for `finetune`.
        model: as for `finetune`.
        train: as for `finetune`.
        evaluation: settings of evaluation, with which the classifier is validated and applied; those of the base do not
            count. Unless they have them, the lengths of segment and memory are those of training.
        device: as for `train`.
        threads: as for `train`.
        progress: as for `train`.
        handle_signals: as for `train`.

    Returns:
        The result; `load_classifier(result.path)` is the classifier, and its `record` has the validations.

    Raises:
        UserError: there is not one label for each document, all labels are the same, a validation label is not one of
            those in training, a document is empty, the loss is no longer finite, or a reason that `finetune` lists.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    base_run, path = open_base(base, checkpoint), as_path(run, "run")
    check_new_run(path)
    groups = given_settings(model=model, train=train, evaluation=evaluation)
    if given := [name for name in groups["train"] if name in _OF_TEXTS]:
        raise UserError(f"train.{given[0]} has no effect on documents with labels; leave it out")
    check_type(loss_segments, int, "loss_segments", "give an integer")
    if not 1 <= loss_segments <= INT32_MAX:
        raise UserError(f"loss_segments {loss_segments}: must be 1 to {INT32_MAX:,}")
    check_type(valid, (tuple, list, type(None)), "valid", "give (documents, labels)")
    if valid is not None and len(valid) != 2:
        raise UserError(f"valid has {len(valid):,} parts; give (documents, labels)")
    record = base_record(base_run, freeze=freeze, layer_rate_decay=layer_rate_decay)
    settings = tuned_settings(base_run, base_run.tokenizer.vocab_size, groups["model"], record)
    plain = {name: TrainConfig.model_fields[name].default for name in _OF_TEXTS}
    values = settings.model_dump() | {"finetune": record, "evaluation": {}}
    if settings.model.orders is not None:
        values["model"]["bi_data"] = False  # documents are read one way
    config = run_settings(merge(values, {"train": plain}, groups), "settings")
    names, examples = _examples(base_run, documents, labels)
    if valid is None:
        examples, held_out = _split(examples, names, valid_fraction, config.train.seed)
    else:
        held_out = _examples(base_run, *valid, names)[1]
    counts = {"num_train": len(examples.labels), "num_valid": len(held_out.labels)}
    pooling = embedding.check_pooling(pooling)
    classifier = ClassifierRecord(labels=names, pooling=pooling, loss_segments=loss_segments, **counts)
    torch.manual_seed(config.train.seed)
    head = nn.Linear(config.model.d_model, len(names), bias=False)
    init_weights(head)
    weights, tensors = {**base_run.model.state_dict(), HEAD: head.weight}, dict[str, Tensor]()
    for name, part in (("train", examples), ("valid", held_out)):
        tensors |= {f"{name}/{key}": tensor for key, tensor in part.tensors().items()}
    set_threads(threads)
    folder, log = RunFolder(path, config, base_run.tokenizer), say if progress else ignore
    trainer = ClassifierTrainer(folder, classifier, tensors, choose_device(device))
    trainer.model.load_state_dict(weights)

    def write(temporary: Path) -> None:
        write_json(temporary / CLASSIFIER_FILE, classifier.model_dump(mode="json"))
        save_tensors(temporary / _DOCUMENTS_FILE, tensors)

    RunFolder.create(path, config, base_run.tokenizer, weights, also=write)
    return _train(trainer, log, handle_signals=handle_signals)


@checked_names
def resume_classifier(
    path: Path | str,
    *,
    device: str = "auto",
    threads: int | None = None,
    progress: bool = True,
    handle_signals: bool = False,
) -> TrainResult:
    """Go on with the training of a classifier from its newest checkpoint, bit for bit as if it had never stopped.

    Args:
        path: folder of the classifier, which has the documents too.
        device: as for `train`.
        threads: as for `train`.
        progress: as for `train`.
        handle_signals: as for `train`.

    Raises:
        UserError: it is not the folder of a classifier, or its files are damaged.
        KeyboardInterrupt: Ctrl-C was pressed, unless `handle_signals`.
    """
    path, log = as_path(path, "path"), say if progress else ignore
    record, folder = classifiers.read_record(path), RunFolder.open(path)
    tensors, _ = load_tensors(path / _DOCUMENTS_FILE)
    set_threads(threads)
    trainer = ClassifierTrainer(folder, record, tensors, choose_device(device))
    load_weights(trainer.model, path / folder.weights_name)  # the first, if there is no checkpoint yet
    return _train(trainer, log, handle_signals=handle_signals)


def _examples(
    run: Run, documents: Texts, labels: Sequence[str], known: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], Examples]:
    """Return all labels in order, or the `known` ones, and the documents with the indices of theirs.

    Raises:
        UserError: there is not one label for each document, or there are fewer than two, or unknown ones.
    """
    given = classifiers.checked_labels(labels)
    encoded, names = embedding.encode_documents(run, documents), known or tuple(sorted(set(given)))
    if len(given) != len(encoded):
        raise UserError(f"{len(given):,} labels for {len(encoded):,} documents; give one for each")
    if len(names) < 2:
        raise UserError(f"all documents have the label {names[0]!r}; give documents of two labels or more")
    return names, Examples(encoded, label_indices(given, names))


def _split(examples: Examples, names: Sequence[str], fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Return the documents to train with, and a fraction of those of each label, chosen at random, to validate with.

    Raises:
        UserError: no document of a label would be left to train with or to validate with.
    """
    check_type(fraction, (int, float), "valid_fraction", "give a fraction such as 0.1")
    order, held_out = _random_order(len(examples.labels), seed, epoch=-1), list[int]()
    for label in sorted(set(examples.labels)):
        rows = [row for row in order if examples.labels[row] == label]
        number = max(1, round(fraction * len(rows))) if 0 < fraction < 1 else len(rows)
        if number >= len(rows):
            raise UserError(
                f"valid_fraction {fraction:g} of {len(rows):,} documents with the label {names[label]!r} leaves none "
                "to train with; give a lower fraction above 0, more documents, or others to validate with (valid)"
            )
        held_out += rows[:number]
    return examples.select(sorted(set(order).difference(held_out))), examples.select(sorted(held_out))


def _random_order(number: int, seed: int, epoch: int) -> list[int]:
    """Return 0 to number - 1 in an order that depends on seed and epoch alone, in every version of NumPy."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch + 1,)))
    return np.argsort(generator.random_raw(number), kind="stable").tolist()


def _train(trainer: ClassifierTrainer, log: Callable[[str], None], *, handle_signals: bool) -> TrainResult:
    """Train from the newest checkpoint, while the folder is locked."""
    start, path, max_steps = time.perf_counter(), trainer.folder.path, trainer.stepper.config.max_steps
    with lock_folder(path):
        trainer.resume(log)
        trainer.folder.record_start(trainer.stepper.num_steps, trainer.stepper.device, 1)
        with stop_signals(trainer, handle_signals=handle_signals) as received:
            trainer.run(show_progress=log is not ignore)
    if received and not handle_signals:
        raise KeyboardInterrupt
    step, device, seconds = trainer.stepper.num_steps, str(trainer.stepper.device), time.perf_counter() - start
    stop_signal = received[0] if received else None
    return TrainResult(path, device, step, max_steps, step >= max_steps, None, seconds, stop_signal)


class DocumentStepper(Stepper):
    """Trains on documents with labels: a step is a batch of documents, whose memory begins empty."""

    examples: Examples
    """What is trained on; to be set after the Stepper is made."""
    record: ClassifierRecord
    """The pooling and the number of segments with a loss; to be set too."""
    segment_length: int
    """Tokens of a document that are read at once; to be set too."""

    @override
    def initial_memories(self) -> tuple[Memory, ...]:
        """Return a memory without slots: nothing is remembered from one step to the next."""
        return (self.model.initial_memory(self.config.batch_size, ContextLimits(0)),)

    @override
    def step(self) -> tuple[Tensor, int]:
        """Train on the next documents; return their mean loss in nats, and their number of tokens."""
        size, number, rows = self.config.batch_size, len(self.examples.labels), list[int]()
        while len(rows) < size:
            epoch, place = divmod(self.num_steps * size + len(rows), number)
            rows += _random_order(number, self.config.seed, epoch)[place : place + size - len(rows)]
        set_step_rates(self.optimizers, self.num_steps, self.config)
        with computing_with(self.numerics):
            parts = [self.examples.select([rows[index] for index in part]) for part in self.micro_batches]
            nats = torch.stack([self.backward(part) for part in parts]).sum()
        self._clip_and_apply()
        self.num_steps += 1
        return nats, sum(len(document) for part in parts for document in part.documents)

    def backward(self, examples: Examples) -> Tensor:
        """Add the gradients of some documents of a step, which are read at once; return their part of its mean loss."""
        length, tokens = self.segment_length, [document.tolist() for document in examples.documents]
        segments_B = torch.tensor([-(-len(ids) // length) for ids in tokens])
        losses_B = segments_B.clamp(max=self.record.loss_segments)  # number of losses of each document
        starts, device = ((segments_B - losses_B) * length).tolist(), self.device
        part_B, labels_B = 1 / (losses_B * self.config.batch_size), torch.tensor(examples.labels, device=device)
        states, nats = PooledStates(self.record.pooling), torch.zeros((), device=device)
        limits, longest = self.model.context_limits, max(map(len, tokens))
        reader = Reader.begin(
            self.model.for_documents(), len(tokens), limits, segment_length=length, max_tokens=longest
        )
        # autocast keeps converted weights until it ends, and those of this part have no gradient
        with torch.no_grad(), autocast(device, self.config.dtype):
            for hidden_BTD, lengths in reader.read([ids[:start] for ids, start in zip(tokens, starts, strict=True)]):
                states.add(hidden_BTD, lengths)
        steps = reader.read([ids[start:] for ids, start in zip(tokens, starts, strict=True)], stride=length)
        while True:
            with autocast(device, self.config.dtype):
                step = next(steps, None)
            if step is None:
                return nats
            pooled_BD = states.add(*step)
            nats_B = F.cross_entropy(F.linear(pooled_BD, self.model.get_parameter(HEAD)), labels_B, reduction="none")
            loss = (nats_B * (part_B * (torch.tensor(step[1]) > 0)).to(device)).sum()
            loss.backward()
            states.detach()
            nats += loss.detach()


class ClassifierTrainer:
    """Trains a classifier: steps, and at intervals validates and saves a checkpoint."""

    def __init__(
        self, folder: RunFolder, record: ClassifierRecord, documents: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """Build the model and its optimizers; the caller loads its weights.

        Args:
            folder: folder of the classifier, with its settings; it need not exist yet.
            record: the contents of its classifier.json.
            documents: the contents of its documents.safetensors.
            device: device to compute on.

        Raises:
            UserError: the device does not support the settings, parameters to freeze do not exist, or this is one of
                several processes.
        """
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UserError("a classifier is trained by one process; start it without torchrun")
        self.folder, self.record = folder, record
        self.plan = embedding.check_plan(EvaluationPlan.resolve(folder.config), folder.config.model)
        examples, self.valid = (Examples.of_tensors(documents, name) for name in ("train", "valid"))
        self.model = build_checked(folder.config, draw=False)
        # in the model, so that it is trained and saved as all other weights are
        self.model.score = nn.Linear(folder.config.model.d_model, len(record.labels), bias=False)
        for name, parameter in self.model.named_parameters():  # what predicts tokens has no gradient here
            parameter.requires_grad_(not name.startswith(_OF_TOKENS))
        train, finetune = folder.config.train, folder.config.finetune
        text = cast(TokenDataset, SimpleNamespace(local_batch_size=train.batch_size, segments_in=_one))
        self.stepper = DocumentStepper(self.model.to(device), text, train, device, finetune=finetune)
        self.stepper.examples, self.stepper.record = examples, record
        self.stepper.segment_length = embedding.segment_of_documents(folder.config.model, train.segment_length)
        # beside the run's own checkpoints, whose weights would be taken for better ones of a language model
        self._checkpoints = replace(folder, path=folder.path / "training")
        self._nats, self._saved_step, self._stop_requested = 0.0, -1, False

    def resume(self, log: Callable[[str], None]) -> None:
        """Restore the newest checkpoint if there is one; `log` prints a line for the user.

        Raises:
            UserError: it is damaged.
        """
        remove_leftovers(self.folder.path)
        torch.manual_seed(self.folder.config.train.seed)
        path = self._checkpoints.latest_checkpoint()
        if path is None:
            return
        allocate = self.stepper.empty_tensors
        saved, tensors, size = load_checkpoint(path, self._checkpoints, self.model, allocate, SINGLE_PROCESS)
        step, self._nats = saved.state["step"], saved.state["nats"]
        self.record = ClassifierRecord(**{**self.record.model_dump(), "validations": saved.state["validations"]})
        self._saved_step = step
        for warning in self.stepper.load_state_dict(tensors, step, DatasetPosition(), saved, size):
            note(warning, log)
        log(f"resuming {self.folder.path} at step {step:,} of {self.stepper.config.max_steps:,}")

    def stop(self, *, skip_validation: bool = False) -> None:
        """End training after the current step, with a checkpoint."""
        self._stop_requested = True

    def run(self, *, show_progress: bool) -> None:
        """Train until all steps are done or `stop` is called; either way a checkpoint is written.

        Raises:
            UserError: the loss is no longer a finite number, or the disk is full; all that was saved is unchanged.
        """
        stepper, config = self.stepper, self.stepper.config
        with ProgressBar("train", config.max_steps, "steps") if show_progress else nullcontext() as bar:
            if bar is not None:
                bar.begin_at(stepper.num_steps)
            while True:
                is_end = self._stop_requested or stepper.num_steps >= config.max_steps
                is_due = is_end or stepper.num_steps % config.checkpoint_interval == 0
                if is_due and stepper.num_steps != self._saved_step:
                    self._save()
                if is_end:
                    return
                self._nats += _finite(float(stepper.step()[0]), stepper.num_steps)
                if stepper.num_steps % config.eval_interval == 0 or stepper.num_steps >= config.max_steps:
                    self._validate()
                if bar is not None:
                    last = self.record.validations[-1:]
                    bar.advance(1, "".join(f"valid loss {one.loss:.3f}, accuracy {one.accuracy:.1%}" for one in last))

    @torch.no_grad()
    def _validate(self) -> None:
        """Measure loss and accuracy of the validation documents, and save the weights if they are the best."""
        step, before = self.stepper.num_steps, self.record.validations
        self.model.eval()
        with computing_with(self.stepper.numerics), autocast(self.stepper.device, self.plan.dtype):
            reader = self.model.for_documents()
            vectors_ND = embedding.read_pooled(reader, self.valid.documents, self.record.pooling, self.plan)
        self.model.train()
        scores_NC = torch.from_numpy(vectors_ND) @ self.model.get_parameter(HEAD).cpu().T
        loss = _finite(float(F.cross_entropy(scores_NC, torch.tensor(self.valid.labels))), step)
        accuracy = float(np.mean(scores_NC.argmax(-1).numpy() == self.valid.labels))
        train_loss = self._nats / (step - (before[-1].step if before else 0))
        new = Validation(step=step, train_loss=train_loss, loss=loss, accuracy=accuracy)
        best, self._nats = self.record.best, 0.0
        self.record = self.record.model_copy(update={"validations": (*before, new)})
        if best is None or new.loss < best.loss:
            self.folder.save_weights(self.model.state_dict(), step=step, nats=None)
        write_json(self.folder.path / CLASSIFIER_FILE, self.record.model_dump(mode="json"))

    def _save(self) -> None:
        """Write a checkpoint of this step."""
        stepper, step = self.stepper, self.stepper.num_steps
        validations = [one.model_dump(mode="json") for one in self.record.validations]
        state, tensors = {"step": step, "nats": self._nats, "validations": validations}, stepper.state_dict()
        what = self._checkpoints, self.model, tensors, state, stepper.numerics, SINGLE_PROCESS
        save_checkpoint(*what, good_step=step)
        self._saved_step = step


def _one(epoch: int) -> int:
    return 1


def _finite(nats: float, step: int) -> float:
    """Return the loss of a step.

    Raises:
        UserError: it is not finite.
    """
    if not math.isfinite(nats):
        raise UserError(f"the loss became {nats} at step {step:,}; lower train.learning_rate")
    return nats
