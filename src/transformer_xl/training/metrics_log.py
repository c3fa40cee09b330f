"""Writes the metrics of a run: to metrics.jsonl, one JSON object per line, and optionally to TensorBoard files.

With several processes, only the first one writes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.config.extras import install_command
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.files import as_user_error, write_text
from transformer_xl.run_folder import RunFolder
from transformer_xl.training.callbacks import Metrics
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.schedules import learning_rate

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


@dataclass
class MetricsLog:
    """Writes `metrics.jsonl` of a run, and its folder `tensorboard/`."""

    folder: RunFolder
    world: DistributedContext
    _board: SummaryWriter | None = field(default=None, init=False, repr=False)

    def rewind(self, step: int, validation_step: int) -> None:
        """Remove the lines after a checkpoint from metrics.jsonl, because the resumed run writes them again.

        Args:
            step: step of the checkpoint; later lines of training are removed.
            validation_step: step of its last validation; later lines of validation are removed.

        Raises:
            UserError: metrics.jsonl is damaged, or a file cannot be written.
        """
        last_step = {"train": step, "valid": validation_step}
        remaining = [line for line in self.folder.metrics() if line["step"] <= last_step.get(line["split"], 0)]
        write_text(self.folder.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in remaining))
        # TensorBoard hides this step of the older files too
        self._add_to_board([line for line in remaining if line["step"] == step], purge_step=step)

    def write(self, split: str, step: int, sums: Sums, seconds: float, **extra: float) -> Metrics:
        """Return a line of metrics; the first process appends it to the files.

        Args:
            split: train or valid.
            step: the step.
            sums: the losses.
            seconds: training time so far.
            extra: further metrics by name.

        Raises:
            UserError: a file cannot be written.
        """
        metrics: Metrics = {
            "split": split,
            "step": step,
            "nats_per_token": sums.nats_per_token,
            "bits_per_byte": sums.bits_per_byte,
            **extra,
            "learning_rate": learning_rate(step - 1, self.folder.config.train),
            "seconds": round(seconds, 3),
        }
        if self.world.is_first:
            file = self.folder.path / "metrics.jsonl"
            with as_user_error(f"writing {file}"), file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(metrics) + "\n")
            self._add_to_board([metrics])
        return metrics

    def close(self) -> None:
        """Close the TensorBoard file; the next `write` opens a new one."""
        if self._board is not None:
            self._board.close()
        self._board = None

    def _add_to_board(self, lines: Sequence[Metrics], purge_step: int | None = None) -> None:
        """Add lines to the TensorBoard file, if the run has one.

        Args:
            lines: the lines.
            purge_step: if the file is new, TensorBoard ignores steps from this one on in older files of the run.
        """
        if not self.folder.config.train.tensorboard:
            return
        log_dir = str(self.folder.path / "tensorboard")
        with as_user_error(f"writing {log_dir}"):
            if self._board is None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(log_dir, purge_step=purge_step)
            for metrics in lines:
                for name, value in metrics.items():
                    if isinstance(value, int | float) and name != "step":
                        self._board.add_scalar(f"{metrics['split']}/{name}", value, metrics["step"])
            self._board.flush()  # a killed run must not lose metrics from before its checkpoint


def check_tensorboard(config: TrainConfig) -> None:
    """Check, before a run folder is created, that TensorBoard is installed if the settings enable it.

    Raises:
        UserError: the package is missing.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            f"train.tensorboard needs a package that is not installed; {install_command('tensorboard')}, "
            "or omit train.tensorboard (metrics.jsonl contains the same values)"
        )
