"""Small training runs for the tests: a corpus of letters, a model of distinct primes, and what was written of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_xl.config import ModelConfig, RunConfig, TrainConfig
from transformer_xl.evaluation.scoring import Plan, sum_nats
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Reach
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus, Tokens
from transformer_xl.text.vocabulary import ByteVocabulary
from transformer_xl.training.loop import Training

CPU = torch.device("cpu")
MODEL = {"layers": 2, "width": 14, "heads": 2, "head_width": 5, "feedforward": 19, "dropout": 0.0}
TRAIN = {
    "segment": 7, "memory": 11, "rows": 3, "steps": 17, "learning_rate": 0.01, "warmup": 5, "precision": "float32",
    "log_every": 1, "evaluate_every": 1000, "save_every": 1000,
}  # fmt: skip


def letters(length: int, seed: int) -> bytes:
    return bytes(np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8))


def make_corpus(place: Path, train: bytes, valid: bytes | None = None) -> Corpus:
    splits = {"train": [Document("train", [train])]} | ({"valid": [Document("valid", [valid])]} if valid else {})
    return write_corpus(place, splits, name="tiny", source="a test", vocabulary=ByteVocabulary())


def start(place: Path, corpus: Corpus, *, model: dict[str, Any] | None = None, **train: Any) -> Training:
    config = RunConfig(model=ModelConfig(**MODEL | (model or {})), train=TrainConfig(**TRAIN | train))
    return Training(RunFolder.create(place, config, corpus.vocabulary), corpus, CPU)


def train_until(training: Training, step: int) -> None:
    training.run(lambda: training.state.progress.step >= step)


def rows_nats(model: LanguageModel, tokens: Tokens, rows: int = 3) -> float:
    """The loss of a text in rows that each begin with an empty memory, as validation reads it."""
    edges = [row * len(tokens) // rows for row in range(rows + 1)]
    before = [10, *(int(tokens[edge - 1]) for edge in edges[1:-1])]
    plan = Plan(segment=7, reach=Reach(11))
    spans = zip(pairwise(edges), before, strict=True)
    return sum(sum_nats(model, tokens[begin:end], start, plan) for (begin, end), start in spans)


def lines_of(training: Training, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (training.folder.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def nats_of(training: Training) -> list[float]:
    return [line["nats_per_token"] for line in lines_of(training, "train")]


def best_and(folder: RunFolder, file: Path) -> list[bool]:
    best, _ = load_tensors(folder.weights_file("best"))
    other, _ = load_tensors(file)
    return [torch.equal(best[name], other[name]) for name in best]
