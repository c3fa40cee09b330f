"""A resumed run equals an uninterrupted one bit for bit: stopped at any step, killed, or interrupted by a signal.

A stop also validates the weights of its step, so the best weights are chosen among more than in an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import NO_RECIPE, txl
from safetensors.torch import load_file
from tensors import assert_same_tensors
from training_runs import CPU, MODEL, TRAIN, StopInValidation, reopened, start, train_until

import transformer_xl
from transformer_xl.checkpoint_record import CheckpointRecord
from transformer_xl.config import UserError
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.trainer import Trainer

# 23 steps are no multiple of the intervals, so that training does not end with a regular validation or checkpoint
INTERVALS = {"max_steps": 23, "log_interval": 5, "eval_interval": 6, "checkpoint_interval": 4}
# Settings of the model and of training that differ from MODEL and TRAIN. The tests stop these runs before an average
# starts, and while auxiliary losses are on (a quarter of training).
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({"attention_dropout": 0.1}, {}),
    "no validation text": ({}, {}),
    "bfloat16, half loss": ({}, {"dtype": "bfloat16", "loss": "half", "memory_length": 5}),
    "pre-norm, no memory": ({"norm_first": True}, {"memory_length": 0}),
    "adaptive, shuffled": ({"cutoffs": (100, 110, 200), "div_val": 2}, {"shuffle_documents": True}),
    "pieces": ({}, {"shuffle_length": 9}),
    "adamw, wsd, ema": (
        {},
        {
            "optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "wsd", "decay_steps": 7, "weight_average": "ema",
            "ema_decay": 0.9, "micro_batch_size": 2, "activation_checkpointing": True,
        },
    ),
    "muon, uniform average, n-grams": (
        {"qk_norm": True, "max_ngram": 3, "ngram_buckets": 29, "d_ngram": 3},
        {"optimizer": "muon", "weight_average": "uniform", "average_start_step": 4, "micro_batch_size": 1},
    ),
    "soap-muon, rows of n-grams": (
        {"max_ngram": 3, "ngram_buckets": 29, "d_ngram": 3},
        {"optimizer": "soap-muon", "weight_decay": 0.1, "ngram_learning_rate_ratio": 2.0},
    ),
    "random lengths, extended context": (
        {"embedding_dropout": 0.1, "variational_dropout": True, "activation_penalty": 0.3},
        {
            "memory_length": 0, "extended_context_length": 6, "random_segment_lengths": True, "weight_decay": 0.01,
            "weight_average": "uniform", "average_start_step": 12, "average_learning_rate": 0.001,
            "embedding_learning_rate_ratio": 2.0,
        },
    ),
    "value embeddings": ({"value_embeddings": True}, {"memory_length": 5}),
    "key offset": ({"key_offset": True, "attention_sinks": True}, {"memory_length": 5}),
    "lstm": ({"architecture": "lstm"}, {"micro_batch_size": 2}),
    "qrnn": ({"architecture": "qrnn", "zoneout": 0.2}, {"optimizer": "muon"}),
    "shaw": ({"architecture": "shaw"}, {"activation_checkpointing": True}),
    "xlnet": ({"architecture": "xlnet", "bi_data": True}, {"batch_size": 4, "micro_batch_size": 2}),
    "vaswani": ({"architecture": "vaswani"}, {"loss": "half"}),
    "al-rfou": (
        {"architecture": "al-rfou", "intermediate_layer_losses": True, "num_targets": 2},
        {"weight_average": "uniform"},
    ),
}  # fmt: skip


def make_documents_corpus(path: Path, *, valid: bool = True) -> Corpus:
    """Write a corpus of 127 training tokens in 5 documents; validation text of 41 tokens only if `valid`.

    An epoch of 3 rows has 7 segments of 7 tokens; in the last, one row has one token and the others have none.
    """

    def documents(length: int, seed: int) -> list[Document]:
        text = np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8)
        return [Document("text", [bytes(part)]) for part in np.split(text, [3, 7, 11, 23])]

    splits = {"train": documents(127, 1)} | ({"valid": documents(41, 2)} if valid else {})
    return write_corpus(path, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def start_variant(path: Path, corpus: Corpus, variant: str = "base", **changed: Any) -> Trainer:
    model, train = VARIANTS[variant]
    return start(path, corpus, model={"dropout": 0.2, **model}, **{**INTERVALS, **train, **changed})


def tensors_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint."""
    last = folder.choose_weights("last").used.file
    (file,) = (last.parent / "training").iterdir()
    files = {"last": load_tensors(last)[0], "training": load_file(file)}
    return {f"{kind}/{name}": tensor for kind, tensors in files.items() for name, tensor in tensors.items()}


def metrics_of(folder: RunFolder, valid_steps: set[int]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl and the trainer's state, without times, which differ between equal runs.

    Args:
        folder: the run.
        valid_steps: steps of the validations to return; the best loss is left out, as it can be of another step.
    """
    state = CheckpointRecord.read(folder.choose_weights("last").used.file.parent).state
    state.pop("best_nats")
    lines = [line for line in folder.metrics() if line["split"] == "train" or line["step"] in valid_steps] + [state]
    assert all(line.pop("seconds") >= 0 for line in lines)
    assert all(line.pop("tokens_per_second") > 0 for line in lines if line.get("split") == "train")
    return lines


def assert_same_runs(one: RunFolder, other: RunFolder) -> None:
    """Check that a resumed run equals the uninterrupted `other`, and that its best weights are the best it had."""
    assert_same_tensors(tensors_of(one), tensors_of(other))
    assert one.choose_weights("last").used.file.read_bytes() == other.choose_weights("last").used.file.read_bytes()
    valid_steps = {line["step"] for line in other.metrics() if line["split"] == "valid"}
    assert metrics_of(one, valid_steps) == metrics_of(other, valid_steps)
    assert one.checkpoints()[-1].name == other.checkpoints()[-1].name
    assert not list(one.path.rglob("*.partial-*"))
    losses = [(line["nats_per_token"], line["step"]) for line in one.metrics() if line["split"] == "valid"]
    lowest, step = min(losses, default=(None, 0))
    assert one.best_known() == (None if lowest is None else (step, lowest))
    if step in valid_steps or lowest is None:
        assert one.choose_weights("best").used.file.read_bytes() == other.choose_weights("best").used.file.read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory):
    """Returns the corpus and the uninterrupted run of a variant, trained once."""
    path = tmp_path_factory.mktemp("uninterrupted")
    runs: dict[str, tuple[Corpus, Trainer]] = {}

    def train(variant: str = "base") -> tuple[Corpus, Trainer]:
        if variant not in runs:
            corpus = make_documents_corpus(path / f"{variant} corpus", valid=variant != "no validation text")
            trainer = start_variant(path / variant, corpus, variant)
            assert trainer.run()
            runs[variant] = corpus, trainer
        return runs[variant]

    return train


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "base"])
def test_resumed_run_equals_uninterrupted(tmp_path: Path, uninterrupted, variant: str) -> None:
    corpus, expected = uninterrupted(variant)
    trainer = start_variant(tmp_path / "run", corpus, variant)
    for step in (3, 7, 13):  # stopped and reopened after each of these steps
        train_until(trainer, step)
        trainer = reopened(trainer)
        assert trainer.state.step == step
    assert trainer.run()
    assert_same_runs(trainer.folder, expected.folder)


def test_run_resumed_at_every_step_equals_uninterrupted(tmp_path: Path, uninterrupted) -> None:
    corpus, expected = uninterrupted()
    trainer = reopened(start_variant(tmp_path / "run", corpus))  # as if killed before its first checkpoint
    assert trainer.state.step == 0
    for step in range(1, 24):
        train_until(trainer, step)
        trainer = reopened(trainer)
    assert trainer.run()  # no steps are left, and nothing changes
    assert_same_runs(trainer.folder, expected.folder)


@pytest.mark.parametrize("step", [6, 23])  # the first and the last validation
def test_interrupted_validation_is_repeated(tmp_path: Path, uninterrupted, step: int) -> None:
    corpus, expected = uninterrupted()
    trainer = start_variant(tmp_path / "run", corpus)
    trainer.callbacks.append(StopInValidation(step))
    assert not trainer.run()
    assert trainer.state.step == step
    assert trainer.folder.metrics()[-1]["step"] < step
    trainer.callbacks.clear()
    trainer = trainer if step == 6 else reopened(trainer)  # the same trainer can resume too
    assert trainer.run()
    assert_same_runs(trainer.folder, expected.folder)


def test_uninterrupted_run_has_full_memory_and_changing_losses(uninterrupted) -> None:
    """The equalities of the other tests would say little about a run whose memory and weights are trivial."""
    _, trainer = uninterrupted()
    tensors, state = tensors_of(trainer.folder), trainer.state
    assert (state.position.epoch, state.position.segment_index) == (3, 2)  # 23 steps, 7 in each epoch
    assert tensors["training/memory/valid"].tolist() == [11, 11, 11]  # filled slots of each batch row: all
    # last weights; first and second moment and step of Adam for each parameter; and 5 more: the memory of both layers,
    # its number of filled slots and its position in each batch row, and the random state
    assert len(tensors) == len(trainer.model.state_dict()) + 3 * len(list(trainer.model.parameters())) + 5
    lines = trainer.folder.metrics()
    assert [line["step"] for line in lines if line["split"] == "train"] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if line["split"] == "valid"] == [6, 12, 18, 23]
    assert state.interval_tokens == 43  # steps 21 to 23: the last segment of an epoch with 1 token, then 21 and 21
    assert lines[-1]["nats_per_token"] < lines[1]["nats_per_token"] - 0.1


def test_another_seed_gives_other_initial_weights(tmp_path: Path, uninterrupted) -> None:
    corpus, _ = uninterrupted()
    trainers = [start_variant(tmp_path / f"{index}", corpus, seed=seed) for index, seed in enumerate((13, 13, 17))]
    first, same, other = (trainer.model.embedding.tables[0] for trainer in trainers)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_finished_run_resumes_with_more_steps(tmp_path: Path, uninterrupted) -> None:
    """All steps are in the warm-up, so that the learning rate does not depend on max_steps."""
    corpus, _ = uninterrupted()
    expected = start_variant(tmp_path / "long", corpus, warmup_steps=23)
    expected.run()
    short = start_variant(tmp_path / "short", corpus, warmup_steps=23, max_steps=11)
    assert short.run()
    longer = reopened(short, max_steps=23)
    longer.run()
    weights = [load_tensors(trainer.folder.choose_weights("last").used.file)[0] for trainer in (longer, expected)]
    assert_same_tensors(*weights)


def test_two_checkpoints_are_kept(tmp_path: Path, uninterrupted) -> None:
    corpus, _ = uninterrupted()
    trainer = start_variant(tmp_path / "run", corpus)
    train_until(trainer, 9)
    assert [path.name for path in trainer.folder.checkpoints()] == ["step-00000008", "step-00000009"]
    for checkpoint in trainer.folder.checkpoints():
        assert {file.name for file in checkpoint.iterdir()} == {"model.safetensors", "training", "training.json"}
        assert [file.name for file in (checkpoint / "training").iterdir()] == list(
            CheckpointRecord.read(checkpoint).files
        )
    files = {"checkpoints", "config.yaml", "metrics.jsonl", "model.safetensors", "txl_tokenizer.json"}
    assert {item.name for item in (tmp_path / "run").iterdir()} == files


def test_leftovers_are_removed_and_other_folders_ignored(tmp_path: Path, uninterrupted) -> None:
    corpus, expected = uninterrupted()
    trainer = start_variant(tmp_path / "run", corpus)
    train_until(trainer, 6)
    checkpoints = tmp_path / "run" / "checkpoints"
    # leftovers of a killed process have .partial- in their names; the others are a user's own copies
    for name in (".step-00000010.partial-7919", "step-of-friday", "step-00000006.bak"):
        shutil.copytree(checkpoints / "step-00000006", checkpoints / name)
    (checkpoints / ".step-00000010.partial-7919" / "training.json").write_bytes(b"incomplete")
    (checkpoints / ".step-00000011.partial-7919").mkdir()
    (tmp_path / "run" / ".model.safetensors.partial-7919").write_bytes(b"incomplete")
    trainer = reopened(trainer)
    assert trainer.state.step == 6
    assert not list(checkpoints.glob(".*"))  # also of a run that is trained already, and writes no more checkpoints
    trainer.run()
    assert_same_runs(trainer.folder, expected.folder)
    remaining = {"step-00000020", "step-00000023", "step-of-friday", "step-00000006.bak"}
    assert {item.name for item in checkpoints.iterdir()} == remaining


def test_metrics_after_the_checkpoint_are_removed(tmp_path: Path, uninterrupted) -> None:
    """A killed run has written metrics of steps after its last checkpoint, the last line incompletely."""
    corpus, expected = uninterrupted()
    trainer = start_variant(tmp_path / "run", corpus)
    train_until(trainer, 9)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000009")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for split, step in (("train", 10), ("valid", 12)):
            file.write(json.dumps({"split": split, "step": step, "nats_per_token": 1.0, "seconds": 1}) + "\n")
        file.write('{"split": "tra')
    trainer = reopened(trainer)
    assert [line["step"] for line in trainer.folder.metrics()] == [5, 6]
    trainer.run()
    assert_same_runs(trainer.folder, expected.folder)


def test_checkpoint_of_other_settings_is_refused(tmp_path: Path, uninterrupted) -> None:
    corpus, _ = uninterrupted()
    train_until(start_variant(tmp_path / "run", corpus), 2)
    for old, new, message in (  # a line of config.yaml, the line that replaces it, and the error
        ("memory_length: 11", "memory_length: 13", "memory does not fit"),
        ("d_ff: 19", "d_ff: 17", r"model.safetensors does not fit .*config.yaml \(at lay"),
        ("n_layers: 2", "n_layers: 3", r"does not fit .*config.yaml \(at layers.2"),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / new)
        config = tmp_path / new / "config.yaml"
        config.write_text(config.read_text().replace(old, new))
        with pytest.raises(UserError, match=message):
            Trainer(RunFolder.open(tmp_path / new), corpus, CPU).resume()


# --threads comes first, because `train_and_send` passes it already and leaves it out
FLAGS = [
    "--threads=1",
    *(f"--model.{name}={value}" for name, value in (MODEL | {"dropout": 0.1}).items()),
    *(f"--train.{name}={value}" for name, value in (TRAIN | {"max_steps": 97, "checkpoint_interval": 3}).items()),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}


def train_and_send(number: signal.Signals, run: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `txl train`, and send it a signal after it has written a random number of lines of metrics."""
    command = [sys.executable, "-m", "transformer_xl", "train", "--threads=1", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    metrics = run / "metrics.jsonl"
    before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    num_lines, deadline = before + random.randrange(1, 30), time.monotonic() + 300
    try:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= num_lines):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(random.random() * 0.02)  # so that the signal can also arrive in a step, or while a file is written
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_killed_and_interrupted_run_equals_uninterrupted(tmp_path: Path) -> None:
    make_documents_corpus(tmp_path / "corpus")
    run, expected = tmp_path / "run", tmp_path / "expected"
    assert txl("train", NO_RECIPE, "--corpus", tmp_path / "corpus", "--run", expected, *FLAGS).status == 0
    killed = train_and_send(signal.SIGKILL, run, NO_RECIPE, "--corpus", tmp_path / "corpus", "--run", run, *FLAGS[1:])
    assert killed.returncode == -signal.SIGKILL
    assert RunFolder.open(run).metrics()[-1]["step"] < 97
    interrupted = train_and_send(signal.SIGINT, run, "--resume", run)
    assert (interrupted.returncode, interrupted.stdout) == (130, "")
    message = rf"^stopped and saved at step (\d+); resume with: txl train --resume {re.escape(str(run))}$"
    stopped = re.search(message, interrupted.stderr, re.MULTILINE)
    assert stopped
    assert 1 <= int(stopped[1]) < 97
    assert RunFolder.open(run).checkpoints()[-1].name == f"step-{int(stopped[1]):08}"
    assert txl("train", "--resume", run, "--threads", "1").status == 0
    assert_same_runs(RunFolder.open(run), RunFolder.open(expected))
