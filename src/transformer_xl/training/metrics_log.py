"""Writes the metrics of a run to metrics.jsonl, one JSON object per line.

With several processes, only the first one writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from transformer_xl.evaluation.metrics import Sums
from transformer_xl.files import as_user_error, write_text
from transformer_xl.run_folder import RunFolder
from transformer_xl.training.callbacks import Metrics
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.schedules import learning_rate


@dataclass
class MetricsLog:
    """Writes `metrics.jsonl` of a run."""

    folder: RunFolder
    world: DistributedContext

    def rewind(self, step: int, validation_step: int) -> None:
        """Remove the lines after a checkpoint from metrics.jsonl, because the resumed run writes them again.

        Args:
            step: step of the checkpoint; later lines of training are removed.
            validation_step: step of its last validation; later lines of validation are removed.

        Raises:
            UserError: metrics.jsonl is damaged, or cannot be written.
        """
        last_step = {"train": step, "valid": validation_step}
        remaining = [line for line in self.folder.metrics() if line["step"] <= last_step.get(line["split"], 0)]
        write_text(self.folder.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in remaining))

    def write(self, split: str, step: int, sums: Sums, seconds: float, **extra: float) -> Metrics:
        """Return a line of metrics; the first process appends it to the file.

        Args:
            split: train or valid.
            step: the step.
            sums: the losses.
            seconds: training time so far.
            extra: further metrics by name.

        Raises:
            UserError: the file cannot be written.
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
        return metrics
