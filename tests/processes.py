"""What each process of training/test_distributed.py does; torchrun starts it as processes.py JOB FOLDER.

All numbers are float64, so that what must be equal is equal to many digits.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import model_config
from training_runs import StopAt, train_until

from transformer_xl.config import RunConfig, TrainConfig, UserError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext, process_group
from transformer_xl.training.step import ModelWithLoss
from transformer_xl.training.train import resume, train
from transformer_xl.training.trainer import Trainer

MODEL = {"n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.0}
TRAIN = {
    "segment_length": 7, "memory_length": 11, "batch_size": 3, "max_steps": 11, "learning_rate": 0.01,
    "warmup_steps": 3, "dtype": "float32", "seed": 13, "log_interval": 1, "eval_interval": 4, "checkpoint_interval": 5,
}  # fmt: skip
STOP = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "rows that do not divide": {},
    "sharded": {"train": {"parallelism": "fsdp"}},
    "micro-batches, muon, average": {
        "train": {
            "parallelism": "fsdp", "batch_size": 5, "micro_batch_size": 2, "optimizer": "muon", "weight_decay": 0.1,
            "weight_average": "ema", "ema_decay": 0.7,
        },
    },
    "cutoffs, shuffled, segment warm-up": {
        "model": {"cutoffs": (100, 110, 200), "div_val": 2, "norm_first": True},
        "train": {
            "shuffle_documents": True, "batch_size": 6, "micro_batch_size": 1, "segment_length": 8, "memory_length": 12,
            "initial_segment_length": 2, "segment_warmup_steps": 6, "activation_checkpointing": True,
            "optimizer": "adamw", "weight_average": "uniform",
        },
    },
    "a sharded LSTM": {"model": {"architecture": "lstm"}, "train": {"parallelism": "fsdp"}},
    "auxiliary losses": {
        "model": {"architecture": "al-rfou", "intermediate_layer_losses": True, "num_targets": 2},
        "train": {"memory_length": 0},
    },
}  # fmt: skip
OTHER = {"ddp": "fsdp", "fsdp": "ddp"}


def make_corpus(place: Path) -> Corpus:
    """A small text of letters in documents of several lengths."""

    def documents(length: int, seed: int) -> list[Document]:
        text = np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8)
        return [Document("text", [bytes(part)]) for part in np.split(text, range(3, length, 11))]

    splits = {"train": documents(211, 1), "valid": documents(61, 2)}
    return write_corpus(place, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def config_of(variant: dict[str, Any], **train: Any) -> RunConfig:
    """The settings of a variant."""
    model = model_config(**MODEL | variant.get("model", {}))
    return RunConfig(model=model, train=TrainConfig(**TRAIN | variant.get("train", {}) | train))


def begin(place: Path, config: RunConfig, world: DistributedContext = SINGLE_PROCESS) -> Trainer:
    """Starts a new run."""
    corpus = Corpus.open(place.parent / "corpus")
    if world.is_first:
        RunFolder.create(place, config, corpus.tokenizer)
    world.barrier()
    return Trainer(RunFolder.open(place), corpus, torch.device("cpu"), world=world)


def resumed(place: Path, world: DistributedContext = SINGLE_PROCESS, **train: Any) -> tuple[Trainer, list[str]]:
    """A run at its newest checkpoint, with some settings changed; and the notes on it."""
    folder = RunFolder.open(place)
    config = folder.config.model_copy(update={"train": folder.config.train.model_copy(update=train)})
    corpus = Corpus.open(place.parent / "corpus")
    training = Trainer(RunFolder(place, config, corpus.tokenizer), corpus, torch.device("cpu"), world=world)
    return training, training.resume()


def copy(place: Path, name: str, world: DistributedContext) -> Path:
    """Copies a run beside itself."""
    if world.is_first:
        shutil.copytree(place, place.with_name(name))
    world.barrier()
    return place.with_name(name)


def check_world(world: DistributedContext) -> None:
    """Sums, questions, texts, and what one process finds wrong."""
    assert world.sum(torch.tensor([world.rank + 1, 10])).tolist() == [3, 20]
    assert (world.any(world.rank == 1), world.any(False)) == (True, False)
    assert world.gather(f"\u00e4{'x' * world.rank}") == ["\u00e4", "\u00e4x"]
    with pytest.raises(UserError, match="only here"):
        find_wrong(world, rank=1)
    world.seed(3, 0)
    assert len(set(world.gather(str(torch.rand(3).tolist())))) == 2


def check_sharding(world: DistributedContext) -> None:
    """After a pass without gradients a process has its shard alone, so a change of it shows in the next pass."""
    torch.manual_seed(5)
    scored = world.wrap(ModelWithLoss(TransformerXL(model_config(**MODEL, vocab_size=23), memory_length=11)), "fsdp")
    tokens_BT = torch.arange(6).view(2, 3)
    model = scored.model
    with torch.no_grad():
        before_BT, _, _ = scored(tokens_BT, tokens_BT.numpy(), model.initial_memory(2))
        for parameter in model.parameters():
            parameter.to_local().mul_(2)
        after_BT, _, _ = scored(tokens_BT, tokens_BT.numpy(), model.initial_memory(2))
    assert (before_BT - after_BT).abs().min() > 1e-6


def find_wrong(world: DistributedContext, *, rank: int) -> None:
    """Raises an error in one process alone."""
    with world.raise_together():
        if world.rank == rank:
            raise UserError("only here")


def train_and_stop(place: Path, world: DistributedContext) -> None:
    """Trains every variant, with a copy of it when it was stopped; one with dropout is also resumed from there."""
    for name, variant in VARIANTS.items():
        training = begin(place / name, config_of(variant), world)
        train_until(training, STOP)
        copy(place / name, f"{name}, stopped", world)
        training.run()
    noisy = config_of({"model": {"dropout": 0.1}}, parallelism="fsdp")
    training = begin(place / "noisy", noisy, world)
    train_until(training, STOP)
    stopped = copy(place / "noisy", "noisy, resumed", world)
    training.run()
    training, notes = resumed(stopped, world)
    assert notes == []
    training.run()


def resume_all(place: Path, world: DistributedContext) -> None:
    """Resumes every variant where it was stopped, with the other parallelism; and one that a single process began."""
    for name, variant in VARIANTS.items():
        own = copy(place / f"{name}, stopped", f"{name}, resumed by three", world)
        before = config_of(variant).train.parallelism
        training, notes = resumed(own, world, parallelism=OTHER[before])
        assert len(notes) == 1
        assert "by 2 processes, now there are 3" in notes[0]
        training.run()
    training, notes = resumed(
        copy(place / "alone, stopped", "alone, resumed by three", world), world, parallelism="fsdp"
    )
    assert len(notes) == 1
    training.run()


def work(job: str, place: Path, world: DistributedContext) -> None:
    """Does a job; when it returns, nothing it made is reachable."""
    if job == "train_and_stop":
        check_world(world)
        check_sharding(world)
        train_and_stop(place, world)
    else:
        resume_all(place, world)


def call_library(place: Path) -> None:
    """Trains and resumes by the library's functions, each of which forms a process group of its own."""
    options = {"device": "cpu", "progress": False}
    run, config = place / "by the library", config_of(VARIANTS["sharded"])
    stopped = train(config, place / "corpus", run, callbacks=[StopAt(STOP)], **options)
    assert (stopped.step, stopped.finished) == (STOP, False)
    result = resume(run, **options)
    assert result.finished
    assert not result.run.model.training


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    with process_group(lambda: torch.device("cpu")) as all_processes:
        work(sys.argv[1], Path(sys.argv[2]), all_processes)
    if sys.argv[1] == "train_and_stop":
        call_library(Path(sys.argv[2]))
