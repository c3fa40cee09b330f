"""The figures of training on disk: a line of JSON for each, and the same for TensorBoard where it is wanted.

In several processes only the first one has such a log.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.files import as_user_error, write_text
from transformer_xl.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

Figures = dict[str, Any]
"""Split, step and what was measured there, by name with unit."""


@dataclass
class MetricsLog:
    """`metrics.jsonl` of a run, and its folder `tensorboard/`."""

    folder: RunFolder
    _board: SummaryWriter | None = field(default=None, init=False, repr=False)

    def go_on(self, step: int, validated: int) -> None:
        """Takes out what was written after these steps (of training, of validation): it comes again.

        Raises:
            UserError: metrics.jsonl is damaged, or the file system refuses.
        """
        known_until = {"train": step, "valid": validated}
        kept = [line for line in self.folder.metrics() if line["step"] <= known_until.get(line["split"], 0)]
        write_text(self.folder.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        self._open_board(step)
        for line in kept:
            if line["step"] == step:  # no longer shown either; what else was shown of this step comes again
                self._show(line)

    def write(self, figures: Figures) -> None:
        """Adds a line.

        Raises:
            UserError: the file system refuses.
        """
        file = self.folder.path / "metrics.jsonl"
        with as_user_error(f"writing {file}"), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(figures) + "\n")
        self._open_board(None)
        self._show(figures)

    def _show(self, figures: Figures) -> None:
        if self._board is None:
            return
        with as_user_error(f"writing {self.folder.path / 'tensorboard'}"):
            for name, value in figures.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(f"{figures['split']}/{name}", value, figures["step"])
            self._board.flush()  # a run that is killed must not lose figures that its checkpoint knows of

    def close(self) -> None:
        """Ends the file for TensorBoard; a later line begins another."""
        if self._board is not None:
            self._board.close()
        self._board = None

    def _open_board(self, first_step: int | None) -> None:
        """Begins a file for TensorBoard, which shows nothing of older files from `first_step` on."""
        if self._board is None and self.folder.config.train.tensorboard:
            place = str(self.folder.path / "tensorboard")
            with as_user_error(f"writing {place}"):
                self._board = _summary_writer()(place, purge_step=first_step)


def check_log(config: TrainConfig) -> None:
    """Finds out, before a run folder is made, whether the figures can be written as the settings want them.

    Raises:
        UserError: the package for TensorBoard is missing.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "train.tensorboard needs a package that is not installed; type pip install tensorboard, "
            "or leave --train.tensorboard out (metrics.jsonl has the same figures)"
        )


def _summary_writer() -> Callable[..., SummaryWriter]:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter
