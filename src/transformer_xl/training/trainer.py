"""The training loop: trains on the text segment by segment, and passes the memory of each batch row to the next
segment.

read a batch -> train step -> fetch the metrics of the previous step -> (at intervals) validate, save a checkpoint

Shape suffixes: B batch rows of this process, T new tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from transformer_xl.checkpoint_record import CheckpointRecord
from transformer_xl.config import RelativeConfig, RunConfig, TrainConfig, UserError
from transformer_xl.device import MemoryUse, require_memory, resolve_dtype
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.files import quoted, remove_leftovers
from transformer_xl.model.dropout import DropoutKernel, FastDropout, fastest_dropout_kernel
from transformer_xl.model.kernels import KERNELS, choose
from transformer_xl.model.linear import MatmulLibrary, packs
from transformer_xl.model.memory import Memory
from transformer_xl.model.sizes import MIN_LAYER_BYTES, min_activations, min_cache, min_parameters
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.native import status
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.segments import DatasetPosition, SegmentDataset, TokenDataset, check_training
from transformer_xl.text.shuffled import ShuffledDocumentDataset
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.averaging import WeightAverage
from transformer_xl.training.batches import BatchPosition, read_batch
from transformer_xl.training.callbacks import Callback, Metrics
from transformer_xl.training.checkpoint import (
    TrainerState,
    checkpoint_before,
    delete_checkpoints_after,
    load_checkpoint,
    save_checkpoint,
    update_record,
)
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext, gather_weights
from transformer_xl.training.divergence import DivergenceDetector, DivergenceState
from transformer_xl.training.metrics_log import MetricsLog, check_tensorboard
from transformer_xl.training.optimizers import build_optimizers, freeze_parameters
from transformer_xl.training.schedules import learning_rate, set_step_rates
from transformer_xl.training.step import ModelWithLoss, TrainStep, micro_batches
from transformer_xl.training.validation import Validator

_MIN_VALIDATION_RISE = 0.02  # relative, above the lowest validation loss, that is called overfitting
_STOP_CHECK_INTERVAL = 10  # steps (in validation: segments) between synchronizations of stop requests across processes


class Trainer:
    """Trains one run: contains the training state, and decides when to validate and to save.

    Most programs should use `transformer_xl.train`, which also checks the settings and creates the run folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        corpus: Corpus,
        device: torch.device,
        *,
        callbacks: Sequence[Callback] = (),
        world: DistributedContext = SINGLE_PROCESS,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the model and the optimizers; the run's seed determines the initial weights.

        Args:
            folder: folder of the run, with its settings.
            corpus: corpus to train on; its validation text, if it has one, is scored every `eval_interval` steps.
            device: device to compute on.
            callbacks: called during training.
            world: the processes that train this run together.
            weights: initial weights by name, or None to draw them (those of an adapter beside the base's).

        Raises:
            UserError: the corpus is too short for the settings, the device does not support them, or parameters to
                freeze do not exist.
        """
        self.folder, self.corpus, self.device, self.world = folder, corpus, device, world
        self.callbacks = list(callbacks)
        config = self.config = folder.config.train
        self.dataset = training_dataset(corpus, config, world)
        self.validator = Validator(corpus, config, world) if "valid" in corpus.splits else None
        torch.manual_seed(config.seed)
        self.model = folder.build_model()
        if weights is not None:
            self.model.load_state_dict(dict(weights))
        self.model.to(device).train()
        self._choose_kernel()
        finetune = folder.config.finetune
        if finetune is not None:
            freeze_parameters(self.model, finetune.freeze)
        if world.rank:  # after the initial weights, so that each process draws different dropout masks
            world.seed(config.seed, step=0)
        self.model.activation_checkpointing = config.activation_checkpointing
        compile_layers(self.model, device, config.compile)
        self.wrapped_model = world.wrap(
            ModelWithLoss(self.model, copy_memory=config.compile == "cudagraphs"), config.parallelism
        )
        decay = finetune.layer_rate_decay if finetune is not None else 1.0
        # after wrapping, which shards the weights
        self.optimizers = build_optimizers(self.model, config, layer_rate_decay=decay)
        self.weight_average = None if config.weight_average == "none" else WeightAverage(self.model, config)
        # the number of batch rows of each micro-batch, which has a memory of its own
        self.micro_batches = [len(rows) for rows in micro_batches(self.dataset.local_batch_size, config, world.size)]
        self.memories = self._initial_memories()
        self.state = TrainerState()
        self._divergence = DivergenceDetector(corpus, config)
        self._warned_of_overfitting = False
        self._train_step = TrainStep(self.wrapped_model, self.optimizers, config, device, world)
        self._choose_products(self.matmul_library, self.dropout_kernel)
        # the last step, and its metrics, whose computation may be unfinished
        self._pending: tuple[int, Tensor] | None = None
        self._saved_state: TrainerState | None = None  # that of the newest checkpoint
        self._stop_requested = self._skip_validation = False
        self._start_time = self._interval_start = time.perf_counter()
        self._interval_tokens_read = 0  # since the last line of training metrics, for the throughput
        self._log = MetricsLog(folder)

    @property
    def attn_implementation(self) -> str | None:
        """The attention kernel that this run trains with, or None for a model without one."""
        return self.model.attn_implementation if isinstance(self.model, TransformerXL) else None

    @property
    def matmul_library(self) -> MatmulLibrary:
        """What multiplies float32 matrices on a CPU in this run; a resumed run keeps what it began with."""
        return self._train_step.library

    @property
    def dropout_kernel(self) -> DropoutKernel:
        """The implementation of dropout on a CPU in this run."""
        return self._train_step.dropout

    def _choose_products(self, library: MatmulLibrary, dropout: DropoutKernel) -> None:
        """Train with a library of matrix products and an implementation of dropout, if all processes have them.

        The processes of a new run may prefer different ones; then those that every computer has are taken.
        """
        blas = self.world.any(library == "blas" or not packs(torch.float32))
        torch_dropout = self.world.any(dropout == "torch" or fastest_dropout_kernel() == "torch")
        self._train_step = replace(
            self._train_step,
            library="blas" if blas else "onednn",
            dropout="torch" if torch_dropout else "native",
        )

    def _choose_kernel(self) -> None:
        """Replace the setting `auto` by the fastest kernel that all processes have."""
        if self.attn_implementation == "auto":
            assert any(self._use_kernel(name) for name in KERNELS)

    def _use_kernel(self, name: str) -> bool:
        """Train with an attention kernel if all processes have it, and return whether they do."""
        assert isinstance(self.model, TransformerXL)
        if self.world.any(name not in KERNELS or not KERNELS[name].fits(self.device, torch.float32)):
            return False
        self.model.attn_implementation = name
        return True

    def use_recorded_kernels(self, record: CheckpointRecord) -> list[str]:
        """Go on with what a checkpoint was trained with, if the settings leave the choice; return warnings otherwise.

        Other attention kernels compute the same up to rounding, but draw other dropout masks, and so does the other
        implementation of dropout.
        """
        self._choose_products(record.matmul_library, record.dropout_kernel)
        model, name, warnings = self.folder.config.model, record.attn_implementation, list[str]()
        if (
            name is not None
            and isinstance(model, RelativeConfig)
            and model.attn_implementation == "auto"
            and name != self.attn_implementation
            and not self._use_kernel(name)
        ):
            reason = f" ({status().text})" if name == "native" else ""
            warnings.append(
                f"the checkpoint was trained with the attention kernel {name}, which is not available here{reason}: "
                f"training goes on with {self.attn_implementation}, not bit for bit as without the stop"
            )
        has_dropout = any(isinstance(m, FastDropout) and m.p and not m.variational for m in self.model.modules())
        if record.dropout_kernel == "native" != self.dropout_kernel and has_dropout and self.device.type == "cpu":
            warnings.append(
                f"the checkpoint was trained with native dropout, which is not available here ({status().text}): "
                "dropout masks will differ"
            )
        if record.matmul_library == "onednn" != self.matmul_library and self.device.type == "cpu":
            warnings.append(
                "the checkpoint was trained with oneDNN's products, which are not available here: training goes on "
                "with torch's, not bit for bit as without the stop"
            )
        return warnings

    def stop(self, *, skip_validation: bool = False) -> None:
        """End training after the current step (or in the middle of a validation), with a checkpoint.

        The weights are then validated if they were not yet; a further call, during that validation, ends it. May be
        called from callbacks, signal handlers and other threads. Processes synchronize it every few steps.

        Args:
            skip_validation: do not validate the weights then.
        """
        self._stop_requested = True
        self._skip_validation |= skip_validation

    def resume(self) -> list[str]:
        """Restore the newest checkpoint of the run, and remove later lines from metrics.jsonl.

        Returns:
            Warnings for the user: one line for each part of the state that cannot be restored exactly.

        Raises:
            UserError: the checkpoint is damaged, does not fit the settings, or is missing in a trained run.
        """
        warnings: list[str] = []
        folder = self.folder
        # A run that has none of these was killed before its first checkpoint, and starts at step 0. A converted run has
        # only weights, and the first weights of a fine-tuned run are in its first checkpoint, so `load_checkpoint`
        # refuses them.
        has_weights = (folder.path / folder.weights_name).exists() or folder.config.finetune is not None
        if has_weights or folder.latest_checkpoint() or folder.metrics():
            warnings = load_checkpoint(folder, self, self.world)
            self._restore_best_loss()
            with self.world.raise_together():
                # checkpoints of earlier versions have no settings; only config.yaml has those
                earlier = folder.trained_config() or RunFolder.open(folder.path).config
            # config.yaml is written with the next checkpoint, when training had the new settings
            self.folder = replace(folder, config=folder.config.changed_from(earlier, self.state.step))
            if self._is_other_validation_text():
                warnings.append("the validation text has changed, so the search for the best weights starts over")
            if self.folder.config.history != earlier.history:  # with other settings the losses may be others
                self._update_state(divergence=DivergenceState())
            # a run that is to end at this step has no next checkpoint, so this one is written again if settings changed
            ends_here = self.state.step == self.config.max_steps and self.folder.config.history != earlier.history
            self._saved_state = None if ends_here else self.state
        position = self.state.position
        if position.segment_index >= self.dataset.segments_in(position.epoch):  # possible after a change of batch size
            self._update_state(position=DatasetPosition(epoch=position.epoch + 1))
        with self.world.raise_together():
            if self.world.is_first:
                remove_leftovers(folder.path)
                self._log.rewind(self.state.step, self.state.validation_step)
        return warnings

    def run(self) -> bool:
        """Train until all steps are done or `stop` is called; either way a checkpoint is written.

        After a stop, the last weights are validated too, so that the best are chosen among all that are saved. An
        interruption of that validation loses nothing.

        Returns:
            Whether all steps and the validation after the last one are done.

        Raises:
            UserError: the loss is no longer a finite number, or is long above that of a uniform guess, or the disk is
                full; the last good checkpoint is unchanged.
        """
        config, self._stop_requested, self._skip_validation = self.config, False, False
        self._interval_start = time.perf_counter()
        self._start_time = self._interval_start - self.state.seconds
        self._interval_tokens_read = 0
        try:
            for callback in self.callbacks:
                callback.on_train_begin(self)
            while True:
                # a validation that was interrupted by a stop is repeated before the next step
                validated = self.state.step in (0, self.state.validation_step) or not self._is_due(config.eval_interval)
                validated = validated or self._validate()
                stopping = self._should_stop()
                if stopping or self._is_due(config.checkpoint_interval):
                    self._save_checkpoint()
                if stopping:
                    validated = self._validate_after_stop()
                if stopping or self.state.step >= config.max_steps:
                    return validated and self.state.step >= config.max_steps
                self._train_one_step()
        finally:
            self._log.close()
            for callback in self.callbacks:
                callback.on_train_end(self)

    def _is_due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step >= self.config.max_steps

    def _should_stop(self) -> bool:
        """Return whether to stop now; with several processes this needs communication, so not after every step."""
        if self.world.size == 1:
            return self._stop_requested
        intervals = (_STOP_CHECK_INTERVAL, self.config.eval_interval, self.config.checkpoint_interval)
        return any(self._is_due(interval) for interval in intervals) and self.world.any(self._stop_requested)

    def _train_one_step(self) -> None:
        state, config = self.state, self.config
        batch = read_batch(self.dataset, BatchPosition(state.step, state.position, state.part), config, self.world)
        if batch.batch.is_first:
            self.memories = self._initial_memories()
        if self.memories[0].length != batch.memory_length:
            self.memories = tuple(memory.resized(batch.memory_length) for memory in self.memories)
        set_step_rates(self.optimizers, state.step, config, batch.learning_rate_ratio)
        metrics, self.memories = self._train_step(batch.batch, self.memories, done=state.step / config.max_steps)
        if self.weight_average is not None:
            self.weight_average.update(batch.next.step)
        # fetched only after this step is queued, so that the device never waits for the host
        self._fetch_metrics()
        self._pending = batch.next.step, metrics
        self._update_state(step=batch.next.step, position=batch.next.segment, part=batch.next.part)
        # tokens of all processes, estimated from the batch rows of this one without communication
        num_tokens = round(int(batch.batch.loss_mask_BT.sum()) * config.batch_size / self.dataset.local_batch_size)
        for callback in self.callbacks:
            callback.on_step(self, num_tokens)

    def _fetch_metrics(self) -> None:
        """Add the metrics of the pending step to the totals; write a line of metrics every `log_interval` steps."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        step_nats, num_targets, grad_norm, num_tokens = metrics.tolist()
        if not (math.isfinite(step_nats) and math.isfinite(grad_norm)):
            cause = f"gradient norm became {grad_norm}" if math.isfinite(step_nats) else f"loss became {step_nats}"
            raise UserError(
                f"the {cause} at step {step}; {self.folder.latest_checkpoint()} is the last good checkpoint. Resume "
                f"from it with a lower learning rate: {self._resume_slower()}"
            )
        self._interval_tokens_read += round(num_tokens)
        nats, tokens = self.state.interval_nats + step_nats, self.state.interval_tokens + round(num_targets)
        max_norm = max(self.state.interval_grad_norm, grad_norm)
        if step % self.config.log_interval == 0 and tokens:
            now = time.perf_counter()
            rate = round(self._interval_tokens_read / max(1e-9, now - self._interval_start), 1)
            self._interval_tokens_read, self._interval_start = 0, now
            extra = {"grad_norm": grad_norm, "grad_norm_max": max_norm, "tokens_per_second": rate}
            self._report("train", step, self._sums("train", nats, tokens), extra)
            nats, tokens, max_norm = 0.0, 0, 0.0
        self._update_state(interval_nats=nats, interval_tokens=tokens, interval_grad_norm=max_norm)
        self._check_divergence(step, step_nats, num_targets, grad_norm)

    def _check_divergence(self, step: int, nats: float, num_targets: float, grad_norm: float) -> None:
        """Warn when training begins to diverge or has learnt nothing, and stop it when it is lost."""
        before = self.state.divergence
        now = self._divergence.update(before, step, nats, num_targets, grad_norm)
        self._update_state(divergence=now)
        if self._divergence.is_lost(now):
            self._end_lost_run(now, step)
        if now.is_diverging and not before.is_diverging:
            self._warn(
                f"at step {step:,} {now.describe()}; the learning rate is probably too large, unless the text is so "
                f"different here. Stop with Ctrl-C and resume with half of it: {self._resume_slower()}"
            )
        elif self._divergence.has_learnt_nothing(now, step):
            self._warn(
                f"at step {step:,} the loss is {now.mean_nats:.3f} nats per token, and frequencies of tokens alone "
                f"give {self._divergence.token_entropy:.3f}; the learning rate is probably too large, or far too "
                "small. Stop with Ctrl-C and start a new run with another; txl train --find-rate proposes one"
            )

    def _end_lost_run(self, state: DivergenceState, step: int) -> None:
        """Delete what the run saved since it was at its best, and raise a UserError that says how to go on."""
        assert state.lowest_nats is not None
        with self.world.raise_together():  # all processes read before the first one deletes
            checkpoint = checkpoint_before(self.folder, state.lowest_step)
            best = self.folder.best_known()
        is_bad = best is not None and best[1] > self._divergence.uniform_nats
        with self.world.raise_together():
            if self.world.is_first:
                if checkpoint is not None:
                    delete_checkpoints_after(self.folder, checkpoint)
                if is_bad:
                    (self.folder.path / self.folder.weights_name).unlink()
        said = (
            f"the loss is {state.mean_nats:.3f} nats per token at step {step:,}, above that of a uniform guess for "
            f"{state.num_lost_steps} steps, after {state.lowest_nats:.3f} at step {state.lowest_step:,}"
        )
        if best is not None and not is_bad:
            said += f"; the best weights, of step {best[0]:,} with a validation loss of {best[1]:.3f}, are unchanged"
        if checkpoint is None or (checkpoint.name == "step-00000000" and self.folder.config.finetune is None):
            raise UserError(
                f"{said}. Start a new run with a much lower learning rate; txl train --find-rate, with the same "
                "settings, proposes one"
            )
        raise UserError(
            f"{said}; {checkpoint} is the last good checkpoint. Resume from it with a much lower learning rate: "
            f"{self._resume_slower(10)}"
        )

    def _check_overfitting(self, valid_nats: float, best_nats: float) -> None:
        """Warn once when the validation loss has risen above a lower training loss, of a text that was read before."""
        position, divergence = self.state.position, self.state.divergence
        times_read = position.epoch + position.segment_index / self.dataset.segments_in(position.epoch)
        has_risen = valid_nats > (1 + _MIN_VALIDATION_RISE) * best_nats
        # the statistics of the training loss may be new, after resuming
        is_overfit = has_risen and times_read >= 1 and divergence.num_steps > 0 and divergence.mean_nats < best_nats
        if self._warned_of_overfitting or divergence.is_diverging or not is_overfit:
            return
        self._warned_of_overfitting = True
        self._warn(
            f"at step {self.state.step:,} the validation loss is {valid_nats:.3f} nats per token, above its lowest, "
            f"{best_nats:.3f}, and the training loss {divergence.mean_nats:.3f}: the model overfits its training text, "
            f"which it has read {times_read:.1f} times. The weights with the lowest loss are kept. Start a new run "
            "with --train.max-epochs 1, more text or more regularization (--model.dropout)"
        )

    def _warn(self, message: str) -> None:
        for callback in self.callbacks:
            callback.on_warning(self, message)

    def _resume_slower(self, factor: float = 2) -> str:
        """Return the command that resumes this run with the learning rate divided by a factor."""
        rate = self.config.learning_rate / factor
        return f"txl train --resume {quoted(self.folder.path)} --train.learning-rate {rate:g}"

    def _validate(self) -> bool:
        """Score the validation text, and save the weights if they are the best; return False if stopped early."""
        self._fetch_metrics()
        validator, start_time = self.validator, time.perf_counter()
        if validator is None:
            return True

        def should_stop(num_segments: int, num_scored: int) -> bool:
            for callback in self.callbacks:
                callback.on_validation_progress(self, num_scored, validator.num_tokens)
            if self.world.size == 1:
                return self._stop_requested
            return num_segments % _STOP_CHECK_INTERVAL == 0 and self.world.any(self._stop_requested)

        with self._averaged_weights():
            memory = self.model.initial_memory(validator.dataset.local_batch_size)
            nats = validator.sum_losses(self.wrapped_model, memory, should_stop)
            if nats is None:
                return False
            if not math.isfinite(nats):
                raise UserError(
                    f"the validation loss became {nats} at step {self.state.step}; lower --train.learning-rate"
                )
            sums = self._sums("valid", nats, validator.num_tokens)
            nats_per_token = sums.nats_per_token
            best = None if self._is_other_validation_text() else self.state.best_nats
            if best is None or nats_per_token < best:
                best = nats_per_token
                self._save_best_weights(best)
        self._check_overfitting(nats_per_token, best)
        self._update_state(
            validation_step=self.state.step,
            validation_nats=nats_per_token,
            best_nats=best,
            validation_text=validator.text_id,
        )
        self._report("valid", self.state.step, sums, {})
        self._interval_start += time.perf_counter() - start_time  # the throughput is that of training alone
        return True

    def _validate_after_stop(self) -> bool:
        """Validate the weights of the checkpoint just written, unless they were; return False if stopped again."""
        if self.validator is None or self.state.step in (0, self.state.validation_step):
            return True
        if self.world.any(self._skip_validation):
            return False
        self._stop_requested = False
        for callback in self.callbacks:
            callback.on_stop(self)
        if not self._validate():
            return False
        # The rest of the record must fit the tensors of the checkpoint: if it is the one that this run was resumed from
        # with another batch size, the position has changed.
        fields = {"validation_step", "validation_nats", "best_nats", "validation_text"}
        with self.world.raise_together():
            if self.world.is_first:
                update_record(self.folder, state=self.state.model_dump(mode="json", include=fields))
        self._saved_state = self.state
        return True

    def _is_other_validation_text(self) -> bool:
        """Return whether `best_nats` is the loss of a different validation text, which must not be compared."""
        return self.validator is not None and self.state.validation_text not in (None, self.validator.text_id)

    def _save_checkpoint(self) -> None:
        self._fetch_metrics()
        start_time = time.perf_counter()
        if self.state == self._saved_state:
            return
        self._update_state(seconds=start_time - self._start_time)
        self._saved_state = self.state
        # checkpoints save memory at full length, independent of the stage of the segment warm-up
        self.memories = tuple(memory.resized(self.config.memory_length) for memory in self.memories)
        save_checkpoint(self.folder, self, self.world)
        with self.world.raise_together():
            if self.world.is_first:
                self.folder.write_config()
        if self.state.step >= self.config.max_steps and self.validator is None:
            with self._averaged_weights():  # without validation, the last weights or their average are the best
                self._save_best_weights(None)
        self._interval_start += time.perf_counter() - start_time

    def _save_best_weights(self, nats: float | None) -> None:
        """Save the model's current weights as the best of the run; `nats` is the validation loss in nats per token."""
        weights = gather_weights(self.model, self.world)
        if self.world.is_first:
            self.folder.save_weights(weights, step=self.state.step, nats=nats)

    def _restore_best_loss(self) -> None:
        """Set the best loss to that of the best weights on disk.

        After a crash, these weights may be of a later step than the checkpoint; then their loss replaces that of the
        checkpoint. If they are missing, the next validation saves the weights as the best.
        """
        with self.world.raise_together():
            exists = self.world.is_first and (self.folder.path / self.folder.weights_name).exists()
            best = self.folder.best_known() if exists else None
        exists, best = self.world.gather((exists, best))[0]
        if not exists:
            self._update_state(best_nats=None)
        elif best is not None and best[0] > self.state.validation_step:
            self._update_state(best_nats=best[1])

    def _averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the average of its weights, if the run computes one."""
        return nullcontext() if self.weight_average is None else self.weight_average.applied()

    def _initial_memories(self) -> tuple[Memory, ...]:
        return tuple(self.model.initial_memory(rows) for rows in self.micro_batches)

    def _update_state(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)

    def _sums(self, split: str, nats: float, num_tokens: int) -> Sums:
        """Return the totals for some tokens of a split; the number of bytes is estimated from the split's average."""
        return Sums(nats, num_tokens, num_tokens * self.corpus.split(split).bytes_per_token)

    def _report(self, split: str, step: int, sums: Sums, extra: Metrics) -> None:
        """Write a line of metrics, and call the callbacks."""
        metrics: Metrics = {
            "split": split,
            "step": step,
            "nats_per_token": sums.nats_per_token,
            "bits_per_byte": sums.bits_per_byte,
            **extra,
            "learning_rate": learning_rate(step - 1, self.config),
            "seconds": round(time.perf_counter() - self._start_time, 3),
        }
        if self.world.is_first:
            self._log.write(metrics)
        for callback in self.callbacks:
            callback.on_metrics(self, metrics)


def check_trainable(
    config: RunConfig, corpus: Corpus, device: torch.device, world: DistributedContext = SINGLE_PROCESS
) -> None:
    """Check, before a run folder is created, that training can start.

    Raises:
        UserError: the text is too short for batch size and segment length, an attention implementation or package is
            not available, or training certainly needs more memory than there is.
    """
    dataset = training_dataset(corpus, config.train, world)
    require_memory("training", training_memory(config, dataset.local_batch_size, device, world), device)
    if "valid" in corpus.splits:
        Validator(corpus, config.train, world)
    if isinstance(config.model, RelativeConfig):
        choose(config.model.attn_implementation, device, torch.float32)  # raises if it does not work on the device
    check_tensorboard(config.train)


def training_memory(
    config: RunConfig, local_batch_size: int, device: torch.device, world: DistributedContext = SINGLE_PROCESS
) -> list[MemoryUse]:
    """Return lower bounds of the memory that training needs at once in this process.

    Args:
        config: settings of the run.
        local_batch_size: batch rows of this process.
        device: device to compute on.
        world: the processes that train together.
    """
    train, model = config.train, config.model
    rows = [len(part) for part in micro_batches(local_batch_size, train, world.size)]
    parameters = min_parameters(model)
    trained = 0 if config.lora else parameters  # an adapter is small
    # fsdp divides all of these; a process has all weights only before the first step, as `build_checked` requires
    share = world.size if train.parallelism == "fsdp" else 1
    gradients = 4 * trained // share
    # weights, two numbers for each trained parameter in Adam and one in Muon, and the average
    state = 4 * parameters // share + gradients * (1 + (train.optimizer != "muon") + (train.weight_average != "none"))

    def activation_bytes(memory_length: int) -> int:
        count = min_activations(
            model,
            segment_length=train.num_inputs,
            memory_length=memory_length,
            recomputed=train.activation_checkpointing or train.compile != "none",  # compiled layers recompute some
        )
        return (2 if resolve_dtype(device, train.dtype) == "bfloat16" else 4) * max(rows) * count

    activations, new_activations = activation_bytes(train.memory_length), activation_bytes(0)
    # a single micro-batch frees its activations while the gradients appear
    state += gradients if len(rows) > 1 else max(0, gradients - activations)
    cache = 4 * local_batch_size * min_cache(model, train.memory_length, training=True)
    ngrams = "model.ngram_buckets, model.d_ngram, " if model.max_ngram > 1 else ""
    fewer_rows = f"set train.micro_batch_size below {max(rows):,}, or " if max(rows) > 1 else ""
    return [
        MemoryUse(
            f"weights, gradients and optimizer state of {parameters:,} parameters",
            state + MIN_LAYER_BYTES * model.n_layers,
            f"lower {ngrams}model.n_layers or the widths of the model (model.d_model and so on)",
        ),
        MemoryUse(
            f"the activations of {max(rows):,} x {train.num_inputs:,} tokens",
            new_activations,
            f"{fewer_rows}lower train.segment_length, or set train.activation_checkpointing",
        ),
        MemoryUse(
            f"a memory of {local_batch_size:,} x {train.memory_length:,} tokens",
            2 * cache + activations - new_activations,  # before and after the step, and its keys and values
            "lower train.memory_length or train.batch_size",
        ),
    ]


def training_dataset(corpus: Corpus, config: TrainConfig, world: DistributedContext = SINGLE_PROCESS) -> TokenDataset:
    """Return the training text as segments, of the documents in text order or shuffled.

    Raises:
        UserError: the text is too short for batch size and segment length, or has too few documents to shuffle.
    """
    split, bos_token_id = corpus.split("train"), corpus.tokenizer.bos_token_id
    # a step with a random segment length reads as many segments of one token
    unit = 1 if config.random_segment_lengths else config.segment_length
    sizes = {"batch_size": config.batch_size, "segment_length": unit, "shard": world.shard}
    dataset: TokenDataset = SegmentDataset(split.tokens, **sizes, bos_token_id=bos_token_id)
    if config.shuffle_documents:
        dataset = ShuffledDocumentDataset(
            split.tokens, split.document_starts, **sizes, bos_token_id=bos_token_id, seed=config.seed
        )
    check_training(dataset, config.segment_length)
    return dataset
