"""Documents with labels for tests of classifiers: random letters, with one that decides the label."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from transformer_xl.checkpoint_record import CheckpointRecord

TRAIN: dict[str, Any] = {
    "batch_size": 5, "max_steps": 8, "warmup_steps": 2, "learning_rate": 0.01, "eval_interval": 3,
    "checkpoint_interval": 2, "dtype": "float32",
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False}


def documents(number: int, seed: int = 1, longest: int = 40) -> tuple[list[str], list[str]]:
    """Return texts of different lengths, and the letter that each has at its end."""
    rng = random.Random(seed)
    labels = [rng.choice("xyz") for _ in range(number)]
    return ["".join(rng.choices("abcd", k=rng.randrange(longest))) + label for label in labels], labels


def write_lines(path: Path, texts: list[str], labels: list[str]) -> Path:
    """Write JSON lines with the columns text and topic."""
    path.write_text("".join(json.dumps({"text": a, "topic": b}) + "\n" for a, b in zip(texts, labels, strict=True)))
    return path


def contents(path: Path, step: int) -> dict[str, Any]:
    """Return what the training of a classifier must determine bit by bit, by the names of files and tensors."""
    checkpoint = path / "training" / "checkpoints" / f"step-{step:08}"
    files = [*path.glob("*.json"), *path.glob("*.safetensors"), path / "config.yaml", checkpoint / "model.safetensors"]
    values: dict[str, Any] = {str(file.relative_to(path)): file.read_bytes() for file in files}
    values["state"] = CheckpointRecord.read(checkpoint).state
    for file in (checkpoint / "training").iterdir():  # whose metadata are in any order
        values |= {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}
    return values
