"""Small training runs for the tests: a corpus of letters, a model of distinct primes, and what was written of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_configs import settings_of
from token_losses import token_nats
from typing_extensions import override

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


def letters(length: int, seed: int) -> bytes:
    return bytes(np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8))


def make_corpus(place: Path, train: bytes, valid: bytes | None = None) -> Corpus:
    splits = {"train": [Document("train", [train])]} | ({"valid": [Document("valid", [valid])]} if valid else {})
    return write_corpus(place, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def start(place: Path, corpus: Corpus, *, model: dict[str, Any] | None = None, **train: Any) -> Trainer:
    settings = settings_of(**MODEL | (model or {}))
    has_memory = ARCHITECTURES[settings.get("architecture", "transformer-xl")].has_memory
    sizes = TRAIN if has_memory else {**TRAIN, "memory_length": 0}
    config = run_settings({"model": settings, "train": sizes | train}, "test")
    return Trainer(RunFolder.create(place, config, corpus.tokenizer), corpus, CPU)


class StopAt(Callback):
    """Stops training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        if trainer.state.step >= self.step:
            trainer.stop()


def train_until(trainer: Trainer, step: int) -> None:
    trainer.callbacks.append(StopAt(step))
    trainer.run()
    trainer.callbacks.pop()


def reopened(trainer: Trainer, **changed: Any) -> Trainer:
    """The run as another process resumes it, with some settings of training changed."""
    folder = trainer.folder
    if changed:
        config = folder.config.model_copy(update={"train": folder.config.train.model_copy(update=changed)})
        (folder.path / "config.yaml").write_text(config_text(config))
    torch.manual_seed(104_729)  # a new process would not have the old one's random state either
    trainer = Trainer(RunFolder.open(folder.path), trainer.corpus, CPU)
    trainer.resume()
    return trainer


def rows_nats(model: LanguageModel, tokens: Tokens, rows: int = 3) -> float:
    """The loss of a text in rows that each begin with an empty memory, as validation reads it."""
    edges = [row * len(tokens) // rows for row in range(rows + 1)]
    before = [10, *(int(tokens[edge - 1]) for edge in edges[1:-1])]
    plan = EvaluationPlan(segment_length=7, context_limits=ContextLimits(11))
    spans = zip(pairwise(edges), before, strict=True)
    return sum(float(token_nats(model, tokens[begin:end], start, plan).sum()) for (begin, end), start in spans)


def lines_of(training: Trainer, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (training.folder.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def nats_of(training: Trainer) -> list[float]:
    return [line["nats_per_token"] for line in lines_of(training, "train")]


def best_and(folder: RunFolder, file: Path) -> list[bool]:
    best, _ = load_tensors(folder.weights_file("best"))
    other, _ = load_tensors(file)
    return [torch.equal(best[name], other[name]) for name in best]
