"""Resume equals the straight run bit for bit: stopped at any step, killed at any moment, by a signal or half saved."""

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
from safetensors.torch import load_file
from tensors import assert_same_tensors, copied_tensors
from training_runs import CPU, reopened, train_until
from typing_extensions import override

import transformer_xl
from transformer_xl.cli.main import run as txl
from transformer_xl.config import UserError, run_settings
from transformer_xl.run_folder import CheckpointRecord, RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.checkpoint import save_checkpoint
from transformer_xl.training.trainer import Trainer

MODEL = {
    "n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
TRAIN = {
    "segment_length": 7, "memory_length": 11, "batch_size": 3, "max_steps": 23, "learning_rate": 0.01,
    "warmup_steps": 5, "dtype": "float32", "seed": 13, "log_interval": 5, "eval_interval": 6, "checkpoint_interval": 4,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "no valid split": {"valid": False},
    "half loss": {"train": {"loss": "half"}},
    "bfloat16": {"train": {"dtype": "bfloat16"}},
    "no memory": {"train": {"memory_length": 0}},
    "memory shorter than a segment": {"train": {"memory_length": 5}},
    "pre-norm": {"model": {"norm_first": True}},
    "adaptive, shuffled": {"model": {"cutoffs": (100, 110, 200), "div_val": 2}, "train": {"shuffle_documents": True}},
}


def make_documents_corpus(place: Path, *, valid: bool = True) -> Corpus:
    """127 tokens in 5 documents: an epoch of 3 rows is 7 segments of 7, the last with one token in one row only."""

    def documents(length: int, seed: int) -> list[Document]:
        text = np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8)
        return [Document("text", [bytes(part)]) for part in np.split(text, [3, 7, 11, 23])]

    splits = {"train": documents(127, 1)} | ({"valid": documents(41, 2)} if valid else {})
    return write_corpus(place, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def start(place: Path, corpus: Corpus, variant: dict[str, Any]) -> Trainer:
    settings = {"model": MODEL | variant.get("model", {}), "train": TRAIN | variant.get("train", {})}
    return Trainer(RunFolder.create(place, run_settings(settings, "test"), corpus.tokenizer), corpus, CPU)


def tensors_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Best weights, last weights, optimiser, memory and random state of a run."""
    best, last = folder.weights_file("best"), folder.weights_file("last")
    (file,) = (last.parent / "training").iterdir()
    read = {"best": load_tensors(best)[0], "last": load_tensors(last)[0], "training": load_file(file)}
    return {f"{kind}/{name}": tensor for kind, tensors in read.items() for name, tensor in tensors.items()}


def metrics_of(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, and at the end the progress; all without seconds, which no two runs share."""
    state = CheckpointRecord.read(folder.weights_file("last").parent).state
    lines = [*map(json.loads, (folder.path / "metrics.jsonl").read_text().splitlines()), state]
    assert all(line.pop("seconds") >= 0 for line in lines)
    assert all(line.pop("tokens_per_second") > 0 for line in lines if line.get("split") == "train")
    return lines


def assert_same(one: RunFolder, other: RunFolder) -> None:
    assert_same_tensors(tensors_of(one), tensors_of(other))
    # weights are the same files, byte for byte; training.json also notes the seconds, which no two runs share
    for of in (lambda run: run.weights_file("best"), lambda run: run.weights_file("last")):
        assert of(one).read_bytes() == of(other).read_bytes()
    assert metrics_of(one) == metrics_of(other)
    assert one.checkpoints()[-1].name == other.checkpoints()[-1].name
    assert not list(one.path.rglob("*.partial-*"))


class StopInValidation(Callback):
    """Stops training in the middle of the validation of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @override
    def on_validation_progress(self, trainer: Trainer, num_scored: int, num_tokens: int) -> None:
        if trainer.state.step == self.step:
            trainer.stop()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory):
    """Gives the corpus and the uninterrupted run of a variant, trained once."""
    place = tmp_path_factory.mktemp("straight")
    known: dict[str, tuple[Corpus, Trainer]] = {}

    def of(name: str) -> tuple[Corpus, Trainer]:
        if name not in known:
            variant = VARIANTS[name]
            corpus = make_documents_corpus(place / f"{name} corpus", valid=variant.get("valid", True))
            training = start(place / name, corpus, variant)
            assert training.run()
            assert training.state.step == 23
            known[name] = corpus, training
        return known[name]

    return of


@pytest.mark.parametrize(
    ("variant", "stops"),
    [
        ("base", [5]),  # in the middle of warm-up, right after a line of figures
        ("base", [6, 7, 8]),  # after a validation, at the end of an epoch, after the first segment of the next
        ("base", [13]),
        *((variant, [2, 12, 17]) for variant in VARIANTS if variant != "base"),
    ],
)
def test_resume_equals_the_straight_run(tmp_path: Path, straight, variant: str, stops: list[int]) -> None:
    corpus, wanted = straight(variant)
    training = start(tmp_path / "run", corpus, VARIANTS[variant])
    for stop in stops:
        train_until(training, stop)
        assert training.state.step == stop
        training = reopened(training)
        assert training.state.step == stop
    assert training.run()
    assert_same(training.folder, wanted.folder)
    assert training.state.best_nats == wanted.state.best_nats


def test_stopped_at_every_step(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    for step in range(1, 24):
        train_until(training, step)
        training = reopened(training)
    assert training.run()  # nothing is left to do, and doing it changes nothing
    assert_same(training.folder, wanted.folder)


@pytest.mark.parametrize("step", [6, 12, 23])
def test_stopped_in_a_validation(tmp_path: Path, straight, step: int) -> None:
    """It is cut short, and done anew first of all; the checkpoint before it is whole."""
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    training.callbacks.append(StopInValidation(step))
    assert not training.run()
    assert training.state.step == step
    training.callbacks.clear()
    assert training.folder.metrics()[-1]["step"] < step
    training = training if step == 12 else reopened(training)  # the same trainer can go on too
    assert training.run()
    assert_same(training.folder, wanted.folder)


def test_what_the_straight_run_went_through(straight) -> None:
    """The equalities above would be easy for a run whose memory, random state or weights never moved."""
    _, wanted = straight("base")
    tensors, progress = tensors_of(wanted.folder), wanted.state
    assert progress.position.epoch == 3
    assert progress.position.segment_index == 2
    assert tensors["training/memory/valid"].tolist() == [11, 11, 11]
    assert len(tensors) == 2 * len(wanted.model.state_dict()) + 3 * len(list(wanted.model.parameters())) + 5
    lines = wanted.folder.metrics()
    assert [line["step"] for line in lines if line["split"] == "train"] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if line["split"] == "valid"] == [6, 12, 18, 23]
    assert progress.interval_tokens == 43  # steps 21, 22 and 23: a last segment of 1 token, then 21 and 21
    assert lines[-1]["nats_per_token"] < lines[1]["nats_per_token"] - 0.1


def test_training_again_gives_the_same_and_another_seed_does_not(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    torch.manual_seed(3)
    again = start(tmp_path / "again", corpus, {})
    again.run()
    assert_same(again.folder, wanted.folder)
    other = start(tmp_path / "other", corpus, {"train": {"seed": 17}})
    other.run()
    assert not torch.equal(other.model.embedding.tables[0], again.model.embedding.tables[0])


def test_a_run_with_more_steps_goes_on(tmp_path: Path, straight) -> None:
    """Where the rate does not depend on the steps (all of them in the warm-up), 11 and then 23 are 23."""
    corpus, _ = straight("base")
    whole = start(tmp_path / "whole", corpus, {"train": {"warmup_steps": 23}})
    whole.run()
    short = start(tmp_path / "short", corpus, {"train": {"warmup_steps": 23, "max_steps": 11}})
    assert short.run()
    longer = reopened(short, max_steps=23)
    longer.run()
    found, wanted = (
        {name: tensor for name, tensor in tensors_of(run.folder).items() if name.startswith("last")}
        for run in (longer, whole)
    )
    assert_same_tensors(found, wanted)


def test_checkpoints_kept_and_their_files(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 9)
    assert [path.name for path in training.folder.checkpoints()] == ["step-00000008", "step-00000009"]
    for state in training.folder.checkpoints():
        assert sorted(file.name for file in state.iterdir()) == ["model.safetensors", "training", "training.json"]
        assert [file.name for file in (state / "training").iterdir()] == list(CheckpointRecord.read(state).files)
    assert sorted(item.name for item in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "model.safetensors",
        "txl_tokenizer.json",
    ]


def test_leftovers_of_a_killed_save_are_ignored_and_cleaned(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 6)
    state = tmp_path / "run" / "checkpoints"
    shutil.copytree(state / "step-00000006", state / ".step-00000010.partial-7919")
    (state / ".step-00000010.partial-7919" / "training.json").write_bytes(b"half")
    (state / ".step-00000011.partial-7919").mkdir()
    (tmp_path / "run" / ".model.safetensors.partial-7919").write_bytes(b"half")
    training = reopened(training)
    assert training.state.step == 6
    training.run()
    assert_same(training.folder, wanted.folder)
    assert sorted(item.name for item in state.iterdir()) == ["step-00000020", "step-00000023"]


def test_lines_after_the_checkpoint_and_a_half_line_are_dropped(tmp_path: Path, straight) -> None:
    """A killed run has written figures that its last checkpoint knows nothing of."""
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 9)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000009")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for split, step in (("train", 10), ("valid", 12)):
            file.write(json.dumps({"split": split, "step": step, "nats_per_token": 1.0, "seconds": 1}) + "\n")
        file.write('{"split": "tra')
    training = reopened(training)
    assert [line["step"] for line in training.folder.metrics()] == [5, 6]
    training.run()
    assert_same(training.folder, wanted.folder)


def test_killed_before_its_first_checkpoint(tmp_path: Path, straight) -> None:
    """Such a run has settings and nothing else; to go on with it is to begin."""
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    training = reopened(training)
    assert training.state.step == 0
    training.run()
    assert_same(training.folder, wanted.folder)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 6)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(
        UserError, match=r"checkpoints contains no checkpoint; start a new run with 'txl train --run DIR'"
    ):
        reopened(training)


def test_weights_without_a_checkpoint_are_not_overwritten(tmp_path: Path, straight) -> None:
    """As `txl convert` makes them: training would begin with other weights, and keep those as the best."""
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    training.folder.save_weights(training.model.state_dict(), step=0, nats=None)
    with pytest.raises(UserError, match=r"no checkpoint; .*converted .* can be used"):
        reopened(training)


def test_other_folders_beside_the_checkpoints_do_not_matter(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 6)
    state = tmp_path / "run" / "checkpoints"
    shutil.copytree(state / "step-00000006", state / "step-of-friday")
    shutil.copytree(state / "step-00000006", state / "step-00000006.bak")
    training = reopened(training)
    training.run()
    assert {"step-of-friday", "step-00000006.bak"} <= {folder.name for folder in state.iterdir()}
    assert_same(training.folder, wanted.folder)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 2)
    for old, new, message in (
        ("memory_length: 11", "memory_length: 13", "memory does not fit"),
        ("d_ff: 19", "d_ff: 17", r"model.safetensors does not fit .*config.yaml \(at lay"),
        ("n_layers: 2", "n_layers: 3", r"does not fit .*config.yaml \(at layers.2"),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / new)
        settings = tmp_path / new / "config.yaml"
        settings.write_text(settings.read_text().replace(old, new))
        with pytest.raises(UserError, match=message):
            Trainer(RunFolder.open(tmp_path / new), corpus, CPU).resume()


def test_saving_changes_nothing(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 3)
    before = copied_tensors(training.model)
    random_state = torch.get_rng_state()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    path = save_checkpoint(training.folder, training)
    assert path.name == "step-00000003"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_tensors(training.model, before)
    assert torch.equal(tensors_of(training.folder)["training/random/0/cpu"], random_state)


SHORT = {"max_steps": 97, "log_interval": 1, "checkpoint_interval": 3}
WORDS = [
    "--threads=1",
    *(f"--model.{name}={value}" for name, value in MODEL.items()),
    *(f"--train.{name}={value}" for name, value in (TRAIN | SHORT).items()),
]  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = tmp_path_factory.mktemp("uninterrupted")
    make_documents_corpus(place / "corpus")
    assert txl(["train", "--corpus", str(place / "corpus"), "--run", str(place / "run"), *WORDS]) == 0
    return RunFolder.open(place / "run")


def train_and_send(number: signal.Signals, corpus: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Trains in another process, which gets the signal once it has written a random number of lines."""
    words = [sys.executable, "-m", "transformer_xl", "train", "--corpus", str(corpus), "--run", str(place), *WORDS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        wanted, metrics = random.randrange(1, 40), place / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(random.random() * 0.02)  # so that it also falls between two lines: in a step, or in a save
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_kill_9_at_a_random_step(tmp_path: Path, uninterrupted: RunFolder) -> None:
    ended = train_and_send(signal.SIGKILL, uninterrupted.path.parent / "corpus", tmp_path / "run")
    assert ended.returncode == -signal.SIGKILL
    assert RunFolder.open(tmp_path / "run").metrics()[-1]["step"] < 97
    assert txl(["train", "--resume", str(tmp_path / "run"), "--threads", "1"]) == 0
    assert_same(RunFolder.open(tmp_path / "run"), uninterrupted)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step(
    tmp_path: Path, uninterrupted: RunFolder, number: signal.Signals, status: int
) -> None:
    ended = train_and_send(number, uninterrupted.path.parent / "corpus", tmp_path / "run")
    assert ended.returncode == status
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("train: ", "model: "))]
    message = rf"stopped and saved at step (\d+); resume with: txl train --resume {re.escape(str(tmp_path / 'run'))}"
    said = re.fullmatch(message, "\n".join(lines))
    assert said
    assert 1 <= int(said[1]) < 97
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == f"step-{int(said[1]):08}"
    assert txl(["train", "--resume", str(tmp_path / "run"), "--threads", "1"]) == 0
    assert_same(RunFolder.open(tmp_path / "run"), uninterrupted)
