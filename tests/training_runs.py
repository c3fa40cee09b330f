"""Small training runs for tests: a corpus of random letters, a small model, and the losses and metrics of a run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_configs import settings_of
from token_losses import token_nats
from typing_extensions import override

from transformer_xl import train as train_run
from transformer_xl.config import ARCHITECTURES, run_settings
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus, Tokens
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.trainer import Trainer

CPU = torch.device("cpu")
MODEL = {"n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.0}
TRAIN = {
    "segment_length": 7, "memory_length": 11, "batch_size": 3, "max_steps": 17, "learning_rate": 0.01,
    "warmup_steps": 5, "dtype": "float32", "log_interval": 1, "eval_interval": 1000, "checkpoint_interval": 1000,
}  # fmt: skip


OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False}
SHORT = {"max_steps": 6, "warmup_steps": 2, "eval_interval": 3, "checkpoint_interval": 6}


def letters(length: int, seed: int) -> bytes:
    """Return random letters from a to z, whose ASCII codes are 97 to 122."""
    return bytes(np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8))


def make_corpus(path: Path, train: bytes, valid: bytes | None = None) -> Corpus:
    """Write a corpus of these texts, whose tokens are bytes; without `valid` it has no validation split."""
    # each split is one document: its name, and its text in one chunk
    splits = {"train": [Document("train", [train])]} | ({"valid": [Document("valid", [valid])]} if valid else {})
    return write_corpus(path, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def letters_corpus(path: Path, num_train: int = 127, num_valid: int = 41) -> Corpus:
    """Write a corpus of this many random letters; with num_valid 0 it has no validation split."""
    return make_corpus(path, letters(num_train, seed=1), letters(num_valid, seed=2) if num_valid else None)


def start(path: Path, corpus: Corpus, *, model: dict[str, Any] | None = None, **train: Any) -> Trainer:
    """Create a run and its trainer. Architectures without memory get memory_length 0."""
    settings = settings_of(**MODEL | (model or {}))
    has_memory = ARCHITECTURES[settings.get("architecture", "transformer-xl")].has_memory
    defaults = TRAIN if has_memory else {**TRAIN, "memory_length": 0}
    config = run_settings({"model": settings, "train": defaults | train}, "test")
    return Trainer(RunFolder.create(path, config, corpus.tokenizer), corpus, CPU)


class StopAt(Callback):
    """Stops training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        if trainer.state.step >= self.step:
            trainer.stop()


class StopInValidation(StopAt):
    """Stops training during the validation after a step."""

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        pass

    @override
    def on_validation_progress(self, trainer: Trainer, num_scored: int, num_tokens: int) -> None:
        if trainer.state.step == self.step:
            trainer.stop()


def train_until(trainer: Trainer, step: int) -> None:
    """Train, and stop after this step."""
    trainer.callbacks.append(StopAt(step))
    trainer.run()
    trainer.callbacks.pop()


def reopened(trainer: Trainer, **changed: Any) -> Trainer:
    """Return the run as another process would resume it, with some settings of training changed."""
    folder = trainer.folder
    if changed:
        config = folder.config.model_copy(update={"train": folder.config.train.model_copy(update=changed)})
        (folder.path / "config.yaml").write_text(config_text(config))
    torch.manual_seed(104_729)  # any other seed: a new process would have another random state
    trainer = Trainer(RunFolder.open(folder.path), trainer.corpus, CPU)
    trainer.resume()
    return trainer


def validation_nats(model: LanguageModel, tokens: Tokens, rows: int = 3, plan: EvaluationPlan | None = None) -> float:
    """Return the total loss of a text in nats, computed as in validation.

    def validation_nats(
        model: LanguageModel, tokens: Tokens, rows: int = 3, plan: EvaluationPlan | None = None
    ) -> float:
        a plan, the lengths are those of TRAIN.
    """
    edges = [row * len(tokens) // rows for row in range(rows + 1)]
    # the token before each row, which is its first input
    previous = [10, *(int(tokens[edge - 1]) for edge in edges[1:-1])]  # a newline precedes the first token
    plan = plan or EvaluationPlan(segment_length=7, context_limits=ContextLimits(memory_length=11))
    spans = zip(pairwise(edges), previous, strict=True)
    return sum(float(token_nats(model, tokens[begin:end], token, plan).sum()) for (begin, end), token in spans)


def names_in(run: Path) -> list[str]:
    """Return the names of the checkpoints of a run, and of all else in their folder."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def lines_of(trainer: Trainer, split: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl for a split."""
    return [line for line in trainer.folder.metrics() if line["split"] == split]


def nats_of(trainer: Trainer) -> list[float]:
    """Return the logged training losses in nats per token."""
    return [line["nats_per_token"] for line in lines_of(trainer, "train")]


def equals_best(folder: RunFolder, file: Path) -> list[bool]:
    """Return, for each tensor of a file, whether it equals that of the run's best weights."""
    best, _ = load_tensors(folder.choose_weights("best").used.file)
    other, _ = load_tensors(file)
    return [torch.equal(best[name], other[name]) for name in best]


def make_base(folder: Path, **model: Any) -> Path:
    """Train a run for a few steps on letters, and return its folder."""
    corpus = make_corpus(folder / "old", letters(127, seed=1), letters(41, seed=2))
    settings = settings_of(**MODEL | model)
    has_memory = ARCHITECTURES[settings.get("architecture", "transformer-xl")].has_memory
    train = {**TRAIN, "max_steps": 5} | ({} if has_memory else {"memory_length": 0})
    return train_run(None, corpus, folder / "base", model=settings, train=train, **OPTIONS).path


def new_corpus(folder: Path) -> Corpus:
    """Write the corpus that is fine-tuned on: few letters in a fixed order."""
    return make_corpus(folder / "new", b"abc" * 60, b"cab" * 20)
