"""What a run folder records of its weights and checkpoints: which weights there are, and how far training was."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_xl.config import Settings, UserError, check_settings
from transformer_xl.files import as_user_error, json_digest, parse_json, read_bytes, write_json
from transformer_xl.progress import NOTE
from transformer_xl.tensor_file import DAMAGED, check_exists

CheckpointName = Literal["best", "last"]
"""Which weights of a run: those with the lowest validation loss, or those of the newest checkpoint."""


class MemoryLengths(Settings):
    """Losses of a run's best weights at several memory lengths, measured on the validation text after training."""

    chosen: int
    """The memory length to evaluate and generate with by default."""
    nats_per_token: dict[int, float]
    """Loss by memory length, in rising order of the lengths."""
    num_tokens: int
    """Number of tokens scored at each length, from the start of the validation text."""
    segment_length: int
    attention_window: int | None
    clamp_length: int | None

    def describe(self) -> str:
        """Return in words why this length is used."""
        return f"chosen from {', '.join(f'{length:,}' for length in self.nats_per_token)} on the validation text"


@dataclass(frozen=True)
class SavedWeights:
    """Weights in a run folder: which they are, and how good."""

    name: CheckpointName
    file: Path
    step: int
    """Number of training steps after which the model had these weights; 0 for a converted or saved model."""
    valid_nats_per_token: float | None
    """Their validation loss in nats per token, or None if it is not known."""
    is_validated: bool
    """Whether this step was validated, perhaps with the average of the weights in place of these, or before the loss
    was recorded."""
    memory_lengths: MemoryLengths | None = None
    """Their losses at several memory lengths, or None if these were not measured."""

    def describe(self) -> str:
        """Return the name, the step and the validation loss in words."""
        loss = self.valid_nats_per_token
        unknown = "validation loss not known" if self.is_validated else "not validated"
        quality = unknown if loss is None else f"validation loss {loss:.4f} nats/token"
        return f"{self.name}, step {self.step:,} ({quality})"

    def as_dict(self) -> dict[str, Any]:
        """Return name, step and loss by name, for JSON."""
        return {"name": self.name, "step": self.step, "valid_nats_per_token": self.valid_nats_per_token}


@dataclass(frozen=True)
class ChosenWeights:
    """The weights of a run that are used, and the others that could be."""

    used: SavedWeights
    others: tuple[SavedWeights, ...] = ()

    def lines(self, model: str = "") -> list[str]:
        """Return lines for the user: which weights are used, and a warning if newer ones were never validated.

        Empty for a converted or saved model, which has no other weights. `model` names one of several models.
        """
        if self.used.name == "best" and self.used.step == 0 and not self.others:
            return []
        others = [weights.describe() for weights in self.others if weights.step != self.used.step]
        subject = f"weights of {model}" if model else "weights"
        lines = [f"{subject}: {self.used.describe()}" + (f"; others: {', '.join(others)}" if others else "")]
        for newer in self.others:
            if newer.step > self.used.step and not newer.is_validated:
                lines.append(
                    f"{NOTE}the {newer.name} weights are {newer.step - self.used.step:,} steps newer than those "
                    f"used and were never validated, so they may be better; checkpoint={newer.name} uses them"
                )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the weights by the names that JSON output has for them."""
        others = [weights.as_dict() for weights in self.others]
        return {"checkpoint": self.used.as_dict(), "other_checkpoints": others}


class Numerics(Settings):
    """The implementations that a training computed with, of those that compute the same up to rounding."""

    attn_implementation: str | None = None
    """The attention kernel; None for a model without one."""
    matmul_library: Literal["blas", "mixed", "onednn"] = "blas"
    """What multiplied float32 matrices on a CPU; earlier versions always left it to torch's BLAS."""
    dropout_kernel: Literal["native", "torch"] = "torch"
    """The implementation of dropout on a CPU; earlier versions had one."""
    norm_kernel: Literal["native", "torch"] = "torch"
    """The implementation of RMSNorm on a CPU; earlier versions had one."""


class CheckpointRecord(Numerics):
    """The contents of `training.json` of a checkpoint: how far training was, and the checksums of the other files."""

    format: Literal["3"] = "3"
    """Version of the format of checkpoints."""
    num_processes: int
    """Number of processes that trained together."""
    state: dict[str, Any]
    """The fields of `TrainerState`: the step, the position in the training data and so on."""
    files: dict[str, str]
    """sha256 of each file in `training/`, by name."""
    config: dict[str, Any] | None = None
    """The settings that training had, as in config.yaml."""

    @property
    def numerics(self) -> Numerics:
        """The fields of `Numerics`, by themselves."""
        return Numerics(**{name: getattr(self, name) for name in Numerics.model_fields})

    def write(self, checkpoint: Path) -> None:
        """Write the record, with its checksum, to the folder of a checkpoint."""
        contents = self.model_dump(mode="json")
        write_json(checkpoint / "training.json", {**contents, "sha256": json_digest(contents)})

    @staticmethod
    def read(checkpoint: Path) -> CheckpointRecord:
        """Read the record from the folder of a checkpoint.

        Raises:
            UserError: the file is missing, truncated or altered.
        """
        file = checkpoint / "training.json"
        check_exists(file)
        content = read_bytes(file)
        try:
            contents = parse_json(content)
            expected = contents.pop("sha256")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(DAMAGED.format(file, "it is incomplete")) from None
        if expected != json_digest(contents):
            raise UserError(DAMAGED.format(file, "its checksum does not match its contents"))
        return check_settings(CheckpointRecord, contents, str(file))

    def verify(self, checkpoint: Path, *, rank: int = 0, size: int = 1) -> None:
        """Compare the files of a checkpoint with their checksums; several processes each verify some of them.

        Args:
            checkpoint: folder of the checkpoint.
            rank: index of this process.
            size: number of processes that verify the files together.

        Raises:
            UserError: a file is missing, truncated or altered.
        """
        for index, (name, expected) in enumerate(sorted(self.files.items())):
            file = checkpoint / "training" / name
            check_exists(file)
            with as_user_error(f"reading {file}"):
                if index % size == rank and file_digest(file) != expected:
                    raise UserError(DAMAGED.format(file, "its checksum does not match its contents"))


def file_digest(file: Path) -> str:
    """Return the sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
