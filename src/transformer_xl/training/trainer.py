"""The training loop: trains step by step, and at intervals validates, saves a checkpoint and logs.

    loop: validate if it is due -> save a checkpoint if it is due, or before a stop -> end, or the next step

The sums of a step are fetched when the next one is queued. After a stop, weights that were not validated are validated
once their checkpoint is written.

What a step is, is in `stepper.py`, and what looks at the losses to warn or to end a training in `health.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.checkpoint_record import CheckpointRecord
from transformer_xl.config import UserError, check_settings
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.files import remove_leftovers
from transformer_xl.run_folder import RunFolder, trained_config
from transformer_xl.text.token_store import Corpus
from transformer_xl.training.callbacks import Callback, StepSums, TrainerState
from transformer_xl.training.checkpoint import (
    checkpoint_at,
    load_checkpoint,
    returned_unsaved,
    save_checkpoint,
    set_aside_after,
    update_record,
)
from transformer_xl.training.data import open_data
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext, gather_weights
from transformer_xl.training.health import DivergenceState, HealthCallback
from transformer_xl.training.metrics_log import MetricsLog
from transformer_xl.training.numerics import computing_with
from transformer_xl.training.stepper import Stepper

_STOP_CHECK_INTERVAL = 10  # steps (in validation: segments) between synchronizations of stop requests across processes


class Trainer:
    """Trains one run: decides when to step, to validate, to save, to log and to stop.

    Most programs should use `transformer_xl.train`, which also checks the settings and creates the run folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        corpus: Corpus,
        device: torch.device,
        *,
        world: DistributedContext = SINGLE_PROCESS,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Open the texts, and build the model and the optimizers; the run's seed determines the initial weights.

        Args:
            folder: folder of the run, with its settings; it need not exist yet.
            corpus: corpus to train on; its validation text, if it has one, is scored every `eval_interval` steps.
            device: device to compute on.
            world: the processes that train this run together.
            weights: initial weights by name, or None to draw them (those of an adapter beside the base's).

        Raises:
            UserError: the corpus is too short for the settings, the device does not support them, training needs more
                memory than there is, or parameters to freeze do not exist.
        """
        self.folder, self.corpus, self.device, self.world = folder, corpus, device, world
        self.callbacks: list[Callback] = []
        """Called during training, besides `health`."""
        self.config = folder.config.train
        with world.raise_together():
            dataset, self.validator = open_data(folder.config, corpus, device, world)
        torch.manual_seed(self.config.seed)
        self.model = folder.build_model()
        if weights is not None:
            self.model.load_state_dict(dict(weights))
        self.model.to(device)
        self.stepper = Stepper(self.model, dataset, self.config, device, world, folder.config.finetune)
        self.health = HealthCallback(corpus, self.config)
        self.state = TrainerState()
        # the last step, and its sums, whose computation may be unfinished
        self._pending: tuple[int, Tensor] | None = None
        self._saved_state: TrainerState | None = None  # that of the newest checkpoint
        self._stop_requested = self._skip_validation = False
        self._start_time = self._interval_start = time.perf_counter()
        self._interval_tokens_read = 0  # since the last line of training metrics, for the throughput
        self._log = MetricsLog(folder, world)

    @property
    def epochs(self) -> float:
        """How often training has read its text."""
        position = self.state.position
        return position.epoch + position.segment_index / self.stepper.dataset.segments_in(position.epoch)

    def stop(self, *, skip_validation: bool = False) -> None:
        """End training after the current step (or in the middle of a validation), with a checkpoint.

        The weights are then validated if they were not yet; a further call, during that validation, ends it. May be
        called from callbacks, signal handlers and other threads. Processes synchronize it every few steps.

        Args:
            skip_validation: do not validate the weights then.
        """
        self._stop_requested = True
        self._skip_validation |= skip_validation

    def warn(self, message: str) -> None:
        """Tell all callbacks what the user should know."""
        self._call("on_warning", message)

    def resume(self, from_step: int | None = None) -> list[str]:
        """Restore a checkpoint of the run, and remove later lines from metrics.jsonl.

        Args:
            from_step: step of the checkpoint, or None for the newest. Later ones are kept aside until new ones overtake
                them. The best weights stay, whatever their step, until a validation finds better ones.

        Returns:
            Warnings for the user: one line for each part of the state that cannot be restored exactly.

        Raises:
            UserError: there is no such checkpoint, or none in a trained run; or it is damaged or does not fit the
                settings.
        """
        folder, warnings = self.folder, list[str]()
        with self.world.raise_together():
            path = checkpoint_at(folder, from_step)
        if path is not None:
            warnings = self._load(path)
        with self.world.raise_together():
            if self.world.is_first:
                for place in (folder.path, folder.path / "checkpoints"):
                    remove_leftovers(place)
                if from_step is None and path is not None and returned_unsaved(path):
                    warnings.append(
                        f"training went back to step {self.state.step:,} and was stopped before its next checkpoint: "
                        "the settings that were given then are lost; stop and give them again"
                    )
                if from_step is not None and (aside := set_aside_after(folder, from_step)):
                    warnings.append(f"kept aside until training has passed them: {', '.join(map(str, aside))}")
                self._log.rewind(self.state.step, self.state.validation_step)
        return warnings

    def _load(self, path: Path) -> list[str]:
        """Restore the state in a checkpoint; return warnings."""
        folder, stepper = self.folder, self.stepper
        record, tensors, batch_size = load_checkpoint(path, folder, self.model, stepper.empty_tensors, self.world)
        with self.world.raise_together():
            values = {**record.state}
            health = check_settings(DivergenceState, values.pop("divergence", {}), "the statistics of divergence")
            self.health.state = health
            self.state = check_settings(TrainerState, values, str(path / "training.json"))
            # checkpoints of earlier versions have no settings; only config.yaml has those
            earlier = trained_config(path) or RunFolder.open(folder.path).config
        warnings = stepper.load_state_dict(tensors, self.state.step, self.state.position, record, batch_size)
        self._update_state(position=stepper.position)
        self._restore_best_loss()
        # config.yaml is written with the next checkpoint, when training had the new settings
        self.folder = replace(folder, config=folder.config.changed_from(earlier, self.state.step))
        if self._is_other_validation_text():
            warnings.append("the validation text has changed, so the search for the best weights starts over")
        is_changed = self.folder.config.history != earlier.history
        if is_changed:  # with other settings the losses may be others
            self.health.state = DivergenceState()
        # a run that is to end at this step has no next checkpoint, so this one is written again if settings changed
        # or if the last weights, the best of a run without validation, were not saved after it
        ends_here = self.state.step == self.config.max_steps and (is_changed or not self._has_last_weights())
        self._saved_state = None if ends_here else self.state
        return warnings

    def run(self) -> bool:
        """Train until all steps are done or `stop` is called; either way a checkpoint is written.

        After a stop, the last weights are validated too, so that the best are chosen among all that are saved. An
        interruption of that validation loses nothing.

        Returns:
            Whether all steps and the validation after the last one are done.

        Raises:
            UserError: the loss is no longer a finite number, or is long above that of a uniform guess, or the disk is
                full; all that was saved is unchanged.
        """
        config, self._stop_requested, self._skip_validation = self.config, False, False
        try:
            self._call("on_train_begin")
            self._interval_start = time.perf_counter()
            self._start_time = self._interval_start - self.state.seconds
            self._interval_tokens_read = 0
            while True:
                # a validation that was interrupted by a stop is repeated before the next step
                validated = self.state.step in (0, self.state.validation_step) or not self._is_due(config.eval_interval)
                validated = validated or self._validate()
                stopping = self._should_stop()
                if stopping or self._is_due(config.checkpoint_interval):
                    self._save_if_changed()
                if stopping:
                    validated = self._validate_after_stop()
                if stopping or self.state.step >= config.max_steps:
                    return validated and self.state.step >= config.max_steps
                self._step()
        finally:
            self._call("on_train_end")

    def _call(self, method: str, *arguments: object) -> None:
        """Call a method of all callbacks."""
        for callback in (self.health, *self.callbacks):
            getattr(callback, method)(self, *arguments)

    def _is_due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step >= self.config.max_steps

    def _should_stop(self) -> bool:
        """Return whether to stop now; with several processes this needs communication, so not after every step."""
        if self.world.size == 1:
            return self._stop_requested
        intervals = (_STOP_CHECK_INTERVAL, self.config.eval_interval, self.config.checkpoint_interval)
        return any(self._is_due(interval) for interval in intervals) and self.world.any(self._stop_requested)

    def _step(self) -> None:
        sums, num_tokens = self.stepper.step()
        # fetched only after this step is queued, so that the device never waits for the host
        self._fetch_sums()
        self._pending = self.stepper.num_steps, sums
        self._update_state(step=self.stepper.num_steps, position=self.stepper.position)
        self._call("on_step", num_tokens)

    def _fetch_sums(self) -> None:
        """Add the sums of the pending step to the totals; write a line of metrics every `log_interval` steps."""
        if self._pending is None:
            return
        (step, tensor), self._pending = self._pending, None
        sums = StepSums(step, *tensor.tolist())
        self._call("on_step_sums", sums)
        self._interval_tokens_read += round(sums.num_tokens)
        nats, tokens = self.state.interval_nats + sums.nats, self.state.interval_tokens + round(sums.num_targets)
        max_norm = max(self.state.interval_grad_norm, sums.grad_norm)
        if step % self.config.log_interval == 0 and tokens:
            now = time.perf_counter()
            rate = round(self._interval_tokens_read / max(1e-9, now - self._interval_start), 1)
            self._interval_tokens_read, self._interval_start = 0, now
            extra = {"grad_norm": sums.grad_norm, "grad_norm_max": max_norm, "tokens_per_second": rate}
            self._report("train", step, self._sums("train", nats, tokens), **extra)
            nats, tokens, max_norm = 0.0, 0, 0.0
        self._update_state(interval_nats=nats, interval_tokens=tokens, interval_grad_norm=max_norm)

    def _validate(self) -> bool:
        """Score the validation text, and save the weights if they are the best; return False if stopped early."""
        self._fetch_sums()
        validator, start_time = self.validator, time.perf_counter()
        if validator is None:
            return True

        def should_stop(num_segments: int, num_scored: int) -> bool:
            self._call("on_validation_progress", num_scored, validator.num_tokens)
            if self.world.size == 1:
                return self._stop_requested
            return num_segments % _STOP_CHECK_INTERVAL == 0 and self.world.any(self._stop_requested)

        with self._averaged_weights(), computing_with(self.stepper.numerics):
            memory = self.model.initial_memory(validator.dataset.local_batch_size)
            nats = validator.sum_losses(self.stepper.wrapped_model, memory, should_stop)
            if nats is None:
                return False
            if not math.isfinite(nats):
                raise UserError(
                    f"the validation loss became {nats} at step {self.state.step}; lower train.learning_rate"
                )
            extra = dict[str, float]()
            if validator.in_order is not None:
                memory = self.model.initial_memory(validator.in_order.local_batch_size)
                predicted = validator.nats_in_order(self.stepper.wrapped_model, memory, should_stop)
                if predicted is None:
                    return False
                extra["nats_per_predicted_token"] = predicted
            sums = self._sums("valid", nats, validator.num_tokens)
            nats_per_token = sums.nats_per_token
            best = None if self._is_other_validation_text() else self.state.best_nats
            if best is None or nats_per_token < best:
                best = nats_per_token
                self._save_best_weights(best)
        self._update_state(
            validation_step=self.state.step,
            validation_nats=nats_per_token,
            best_nats=best,
            validation_text=validator.text_id,
        )
        self._report("valid", self.state.step, sums, **extra)
        self._interval_start += time.perf_counter() - start_time  # the throughput is that of training alone
        return True

    def _validate_after_stop(self) -> bool:
        """Validate the weights of the checkpoint just written, unless they were; return False if stopped again."""
        if self.validator is None or self.state.step in (0, self.state.validation_step):
            return True
        if self.world.any(self._skip_validation):
            return False
        self._stop_requested = False
        self._call("on_stop")
        if not self._validate():
            return False
        # The rest of the record must fit the tensors of the checkpoint: if it is the one that this run was resumed from
        # with another batch size, the position has changed.
        fields = {"validation_step", "validation_nats", "best_nats", "validation_text"}
        self.world.in_first(update_record, self.folder, state=self.state.model_dump(mode="json", include=fields))
        self._saved_state = self.state
        return True

    def _is_other_validation_text(self) -> bool:
        """Return whether `best_nats` is the loss of a different validation text, which must not be compared."""
        return self.validator is not None and self.state.validation_text not in (None, self.validator.text_id)

    def _save_if_changed(self) -> None:
        self._fetch_sums()
        start_time = time.perf_counter()
        if self.state == self._saved_state:
            return
        self._update_state(seconds=start_time - self._start_time)
        self.save_checkpoint()
        if self.state.step >= self.config.max_steps and self.validator is None:
            with self._averaged_weights():  # without validation, the last weights or their average are the best
                self._save_best_weights(None)
        self._interval_start += time.perf_counter() - start_time

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step, and the settings that it was trained with; all processes take part.

        Raises:
            UserError: a file cannot be written; older checkpoints are unchanged.
        """
        save_checkpoint(
            self.folder,
            self.model,
            self.stepper.state_dict(),
            {**self.state.model_dump(mode="json"), "divergence": self.health.state.model_dump(mode="json")},
            self.stepper.numerics,
            self.world,
            good_step=self.health.state.lowest_step,
        )
        self._saved_state = self.state
        self.world.in_first(self.folder.write_config)

    def _save_best_weights(self, nats: float | None) -> None:
        """Save the model's current weights as the best of the run; `nats` is the validation loss in nats per token."""
        weights = gather_weights(self.model, self.world)
        if self.world.is_first:
            self.folder.save_weights(weights, step=self.state.step, nats=nats)

    def _restore_best_loss(self) -> None:
        """Set the best loss to that of the best weights on disk.

        After a crash, or when training goes back to an earlier checkpoint, these weights may be of a later step than
        the checkpoint; then their loss replaces that of the checkpoint, and so does the validation text of the newest.
        If they are missing, the next validation saves the weights as the best.
        """
        text, newest = self.state.validation_text, self.folder.latest_checkpoint()
        with self.world.raise_together():
            exists = self.world.is_first and (self.folder.path / self.folder.weights_name).exists()
            best = self.folder.best_known() if exists else None
        if newest is not None:
            with suppress(UserError):  # a damaged one may be what training goes back from
                text = CheckpointRecord.read(newest).state.get("validation_text")
        exists, best, text = self.world.gather((exists, best, text))[0]
        if not exists:
            self._update_state(best_nats=None)
        elif best is not None and best[0] > self.state.validation_step:
            self._update_state(best_nats=best[1], validation_text=text)

    def _has_last_weights(self) -> bool:
        """Return whether the file of the best weights has those of this step, or validation chooses them."""
        with self.world.raise_together():
            step = self.folder.best_step() if self.world.is_first else None
        return self.validator is not None or self.world.gather(step)[0] == self.state.step

    def _averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the average of its weights, if the run computes one."""
        average = self.stepper.weight_average
        return nullcontext() if average is None else average.applied()

    def _update_state(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)

    def _sums(self, split: str, nats: float, num_tokens: int) -> Sums:
        """Return the totals for some tokens of a split; the number of bytes is estimated from the split's average."""
        return Sums(nats, num_tokens, num_tokens * self.corpus.split(split).bytes_per_token)

    def _report(self, split: str, step: int, sums: Sums, **extra: float) -> None:
        """Write a line of metrics, and call the callbacks."""
        self._call("on_metrics", self._log.write(split, step, sums, time.perf_counter() - self._start_time, **extra))
