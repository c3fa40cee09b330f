"""Jobs that tests/training/test_distributed.py runs in several processes.

The processes are forked from a server that has imported this module, because importing torch takes seconds. All values
are float64, so that results that are equal mathematically agree to many digits.

Shape suffixes: B batch size, T new tokens.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import model_config
from training_runs import MODEL, StopAt, train_until

from transformer_xl.cli.main import run as run_txl
from transformer_xl.config import RunConfig, TrainConfig, UserError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.distributed import SINGLE_PROCESS, DistributedContext, process_group
from transformer_xl.training.finetune import finetune
from transformer_xl.training.stepper import ModelWithLoss
from transformer_xl.training.train import resume, train
from transformer_xl.training.trainer import Trainer

TRAIN = {
    "segment_length": 7, "memory_length": 11, "batch_size": 3, "max_steps": 11, "learning_rate": 0.01,
    "warmup_steps": 3, "dtype": "float32", "seed": 13, "log_interval": 1, "eval_interval": 4, "checkpoint_interval": 5,
}  # fmt: skip
# gradients of n-gram tables are sparse in one process alone
TABLES: dict[str, Any] = {
    "model": {"max_ngram": 3, "ngram_buckets": 29, "d_ngram": 3, "value_embeddings": True},
    "train": {"ngram_learning_rate_ratio": 2.0, "optimizer": "soap-muon", "batch_size": 6, "micro_batch_size": 1},
}
STOP_STEP = 5  # where runs are stopped, to be resumed later
# this run is resumed by three processes twice: after two processes have trained it, and after one alone has
SHARDED_LSTM = {"model": {"architecture": "lstm"}, "train": {"parallelism": "fsdp"}}
# Name of a run, and the settings that differ from MODEL and TRAIN. Sharded: parameters are sharded over the processes
# (fsdp; otherwise ddp). Average: the weights are averaged over steps (weight_average).
VARIANTS: dict[str, dict[str, Any]] = {
    "sharded, micro-batches, muon, average": {
        "train": {
            "parallelism": "fsdp", "batch_size": 5, "micro_batch_size": 2, "optimizer": "muon", "weight_decay": 0.1,
            "weight_average": "ema", "ema_decay": 0.7,
        },
    },
    "cutoffs, shuffled": {
        "model": {
            "cutoffs": (100, 110, 200), "div_val": 2, "norm_first": True, "value_embeddings": True, "key_offset": True,
            "attention_sinks": True,
        },
        "train": {
            "shuffle_documents": True, "batch_size": 6, "micro_batch_size": 1, "segment_length": 8, "memory_length": 12,
            "activation_checkpointing": True, "optimizer": "adamw", "weight_average": "uniform",
        },
    },
    "sharded LSTM": SHARDED_LSTM,
    "auxiliary losses": {
        "model": {"architecture": "al-rfou", "intermediate_layer_losses": True, "num_targets": 2},
        "train": {"memory_length": 0},
    },
    "extended context, random lengths, penalties": {
        "model": {
            "tie_key_projections": True, "learned_attention_biases": False, "activation_penalty": 0.3,
            "temporal_activation_penalty": 0.2,
        },
        "train": {
            "parallelism": "fsdp", "memory_length": 0, "extended_context_length": 5, "random_segment_lengths": True,
            "embedding_learning_rate_ratio": 2.0, "weight_decay": 0.01,
        },
    },
}  # fmt: skip

# settings of the runs that are trained by the command `txl train`, and by `train` for comparison
COMMAND_MODEL = MODEL | {"dropout": 0.1}
COMMAND_TRAIN = TRAIN | {"parallelism": "fsdp", "max_steps": 37, "eval_interval": 36, "checkpoint_interval": 4}


def make_corpus(path: Path) -> Corpus:
    """Write a small corpus of random letters in documents of several lengths."""

    def documents(length: int, seed: int) -> list[Document]:
        text = np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8)  # the ASCII codes of a to z
        # the first document has 3 letters, the others 11, the last maybe fewer
        return [Document(name="text", chunks=[bytes(part)]) for part in np.split(text, range(3, length, 11))]

    splits = {"train": documents(length=211, seed=1), "valid": documents(length=61, seed=2)}
    return write_corpus(path, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def config_of(variant: dict[str, Any], **train: Any) -> RunConfig:
    """Return MODEL and TRAIN with the settings of a variant, and further settings of training."""
    model = model_config(**MODEL | variant.get("model", {}))
    return RunConfig(model=model, train=TrainConfig(**TRAIN | variant.get("train", {}) | train))


def start(path: Path, config: RunConfig, world: DistributedContext = SINGLE_PROCESS) -> Trainer:
    """Create a run, whose corpus is in the folder `corpus` next to it, and return its trainer."""
    corpus = Corpus.open(path.parent / "corpus")
    if world.is_first:
        RunFolder.create(path, config, corpus.tokenizer)
    world.barrier()
    return Trainer(RunFolder.open(path), corpus, torch.device("cpu"), world=world)


def resume_trainer(path: Path, world: DistributedContext = SINGLE_PROCESS, **train: Any) -> tuple[Trainer, list[str]]:
    """Return the trainer of a run at its newest checkpoint, with some settings changed, and the warnings."""
    folder = RunFolder.open(path)
    config = folder.config.model_copy(update={"train": folder.config.train.model_copy(update=train)})
    corpus = Corpus.open(path.parent / "corpus")
    trainer = Trainer(RunFolder(path, config, corpus.tokenizer), corpus, torch.device("cpu"), world=world)
    return trainer, trainer.resume()


def copy_run(path: Path, name: str, world: DistributedContext = SINGLE_PROCESS) -> Path:
    """Copy the folder of a run to one of that name next to it."""
    if world.is_first:
        shutil.copytree(path, path.with_name(name))
    world.barrier()
    return path.with_name(name)


def fail_in_second_process(world: DistributedContext) -> None:
    with world.raise_together():
        if world.rank == 1:
            raise UserError("only here")


def check_communication(world: DistributedContext) -> None:
    """Check the operations that combine values of the two processes."""
    assert world.sum(torch.tensor([world.rank + 1, 10])).tolist() == [3, 20]
    assert (world.any(world.rank == 1), world.any(False)) == (True, False)
    assert world.gather(["\u00e4", world.rank]) == [["\u00e4", 0], ["\u00e4", 1]]
    with pytest.raises(UserError, match="only here"):
        fail_in_second_process(world)
    world.seed(seed=3, step=0)  # different random numbers in each process
    assert len(set(world.gather(torch.rand(()).item()))) == 2


def check_resharding(world: DistributedContext) -> None:
    """After a pass without gradients, the weights are sharded again, so a changed shard changes the next pass."""
    torch.manual_seed(5)
    model = TransformerXL(model_config(**MODEL, vocab_size=23), memory_length=11)
    wrapped = world.wrap(ModelWithLoss(model), "fsdp")
    tokens_BT = torch.arange(6).view(2, 3)
    with torch.no_grad():
        before_BT, _, _ = wrapped(tokens_BT, tokens_BT.numpy(), model.initial_memory(2))
        for parameter in model.parameters():
            parameter.to_local().mul_(2)
        after_BT, _, _ = wrapped(tokens_BT, tokens_BT.numpy(), model.initial_memory(2))
    assert (before_BT - after_BT).abs().min() > 1e-6


def train_with_stop(path: Path, world: DistributedContext) -> None:
    """Train every variant, and copy its run at STOP_STEP; a run with dropout is also resumed from its copy."""
    for name, variant in VARIANTS.items():
        trainer = start(path / name, config_of(variant), world)
        train_until(trainer, STOP_STEP)
        copy_run(path / name, f"{name}, stopped", world)
        trainer.run()
    trainer = start(path / "dropout", config_of({"model": {"dropout": 0.1}}, parallelism="fsdp"), world)
    train_until(trainer, STOP_STEP)
    stopped = copy_run(path / "dropout", "dropout, resumed", world)
    trainer.run()
    trainer, warnings = resume_trainer(stopped, world)
    assert warnings == []
    trainer.run()
    start(path / "tables", config_of(TABLES), world).run()


def resume_with_three(path: Path, world: DistributedContext) -> None:
    """Resume every variant that 2 processes stopped, with the other parallelism; and one that 1 process stopped."""
    for name, variant in VARIANTS.items():
        for num_processes in ("2 processes", "1 process") if variant is SHARDED_LSTM else ("2 processes",):
            stopped = path / (f"{name}, stopped" if num_processes == "2 processes" else f"{name}, stopped by one")
            parallelism = "ddp" if config_of(variant).train.parallelism == "fsdp" else "fsdp"
            run = copy_run(stopped, f"{stopped.name}, resumed by three", world)
            trainer, (warning,) = resume_trainer(run, world, parallelism=parallelism)
            assert f"by {num_processes}, now there are 3" in warning
            trainer.run()


def train_with_library(path: Path) -> None:
    """Train by calling the library's `train` and `resume`, each of which joins another process group."""
    options = {"device": "cpu", "progress": False}
    run = path / "by the library"
    stopped = train(config_of(SHARDED_LSTM), path / "corpus", run, callbacks=[StopAt(STOP_STEP)], **options)
    assert (stopped.step, stopped.finished) == (STOP_STEP, False)
    result = resume(run, **options)
    assert result.finished
    assert not result.run.model.training
    torch.set_default_dtype(torch.float32)  # as in the command
    train(None, path / "corpus", path / "uninterrupted", model=COMMAND_MODEL, train=COMMAND_TRAIN, **options)
    # long enough for 16 tokens of the validation text, which are 8 times the lengths
    lengths = {"segment_length": 2, "memory_length": 2, "batch_size": 48, "max_steps": 11}
    result = train(None, path / "corpus", path / "lengths", model=MODEL, train=COMMAND_TRAIN | lengths, **options)
    assert result.run.memory_lengths is not None  # in every process: the others wait for the first


def train_job(path: Path) -> None:
    """Train the runs in folder `path`; run by each of two processes."""
    torch.set_default_dtype(torch.float64)
    with process_group(lambda: torch.device("cpu")) as world:
        check_communication(world)
        check_resharding(world)
        train_with_stop(path, world)
    train_with_library(path)


def resume_job(path: Path) -> None:
    """Resume the stopped runs in folder `path`; run by each of three processes."""
    torch.set_default_dtype(torch.float64)
    with process_group(lambda: torch.device("cpu")) as world:
        resume_with_three(path, world)


def adapter_job(path: Path, parallelism: str) -> None:
    """Train an adapter of the run `base` on the corpus `new`, in a folder with the name of the parallelism.

    A sharded one (fsdp) is stopped at STOP_STEP.
    """
    torch.set_default_dtype(torch.float64)
    train = {"max_steps": 9, "warmup_steps": 2, "eval_interval": 3, "parallelism": parallelism, "weight_average": "ema"}
    callbacks = [StopAt(STOP_STEP)] if parallelism == "fsdp" else []
    options = {"lora_rank": 3, "train": train, "callbacks": callbacks, "device": "cpu", "progress": False}
    finetune(path / "base", path / "new", path / parallelism, **options)


def command_job(stderr: Path, *arguments: str) -> None:
    """Run `txl` with its standard error in a file for each process."""
    os.dup2(os.open(f"{stderr}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    sys.exit(run_txl(list(arguments)))


def run_with_rank(rank: int, num_processes: int, port: int, job: Callable[..., None], *arguments: Any) -> None:
    """Run a job with the environment variables that torchrun would set."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes}
    variables = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    faulthandler.enable()  # else a crash of torch would leave no more than its signal
    torch.set_num_threads(1)
    job(*arguments)


def start_process(rank: int, num_processes: int, port: int, job: Callable[..., None], *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=run_with_rank, args=(rank, num_processes, port, job, *arguments))
    process.start()
    return process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_processes(num_processes: int, job: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run a job in several processes that form a group, and return their exit codes."""
    port = free_port()
    processes = [start_process(rank, num_processes, port, job, *arguments) for rank in range(num_processes)]
    for process in processes:
        process.join(timeout=300)
        process.kill()  # if it has not ended
    return [process.exitcode for process in processes]
