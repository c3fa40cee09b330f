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

import transformer_xl
from transformer_xl.cli.main import run as txl
from transformer_xl.config import RunConfig, TrainConfig, TransformerXLConfig, UserError
from transformer_xl.run_folder import CheckpointRecord, RunFolder, config_text
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.training.checkpoint import save_checkpoint
from transformer_xl.training.trainer import Silence, Trainer, TrainResult

CPU = torch.device("cpu")
MODEL = {
    "n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
TRAIN = {
    "segment_length": 7, "memory_length": 11, "batch_size": 3, "max_steps": 23, "learning_rate": 0.01, "warmup_steps": 5, "dtype": "float32",
    "seed": 13, "log_interval": 5, "eval_interval": 6, "checkpoint_interval": 4,
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


def make_corpus(place: Path, *, valid: bool = True) -> Corpus:
    """127 tokens in 5 documents: an epoch of 3 rows is 7 segments of 7, the last with one token in one row only."""

    def documents(length: int, seed: int) -> list[Document]:
        text = np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8)
        return [Document("text", [bytes(part)]) for part in np.split(text, [3, 7, 11, 23])]

    splits = {"train": documents(127, 1)} | ({"valid": documents(41, 2)} if valid else {})
    return write_corpus(place, splits, name="tiny", source="a test", tokenizer=ByteTokenizer())


def start(place: Path, corpus: Corpus, variant: dict[str, Any]) -> Trainer:
    model, train = MODEL | variant.get("model", {}), TRAIN | variant.get("train", {})
    config = RunConfig(model=TransformerXLConfig(**model), train=TrainConfig(**train))
    return Trainer(RunFolder.create(place, config, corpus.tokenizer), corpus, CPU)


def go_on(place: Path, corpus: Corpus) -> Trainer:
    torch.manual_seed(104_729)  # a new process would not have the old one's random state either
    training = Trainer(RunFolder.open(place), corpus, CPU)
    training.resume()
    return training


def train_until(training: Trainer, step: int) -> TrainResult:
    return training.run(lambda: training.state.step >= step)


def tensors_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Best weights, last weights, optimiser, memory and random state of a run."""
    best, last = folder.weights_file("best"), folder.weights_file("last")
    (state,) = (last.parent / "training").iterdir()
    read = {"best": load_tensors(best)[0], "last": load_tensors(last)[0], "checkpoints": load_file(state)}
    return {f"{kind}/{name}": tensor for kind, tensors in read.items() for name, tensor in tensors.items()}


def figures_of(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, and at the end the progress; all without seconds, which no two runs share."""
    progress = CheckpointRecord.read(folder.weights_file("last").parent).progress
    lines = [*map(json.loads, (folder.path / "metrics.jsonl").read_text().splitlines()), progress]
    assert all(line.pop("seconds") >= 0 for line in lines)
    assert all(line.pop("tokens_per_second") > 0 for line in lines if line.get("split") == "train")
    return lines


def assert_same(one: RunFolder, other: RunFolder) -> None:
    found, wanted = tensors_of(one), tensors_of(other)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    # weights are the same files, byte for byte; training.json also notes the seconds, which no two runs share
    for of in (lambda run: run.weights_file("best"), lambda run: run.weights_file("last")):
        assert of(one).read_bytes() == of(other).read_bytes()
    assert figures_of(one) == figures_of(other)
    assert one.checkpoints()[-1].name == other.checkpoints()[-1].name
    assert not list(one.path.rglob("*.partial-*"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory):
    """Gives the corpus and the uninterrupted run of a variant, trained once."""
    place = tmp_path_factory.mktemp("straight")
    known: dict[str, tuple[Corpus, Trainer]] = {}

    def of(name: str) -> tuple[Corpus, Trainer]:
        if name not in known:
            variant = VARIANTS[name]
            corpus = make_corpus(place / f"{name} corpus", valid=variant.get("valid", True))
            training = start(place / name, corpus, variant)
            outcome = training.run()
            assert (outcome.step, outcome.finished) == (23, True)
            known[name] = corpus, training
        return known[name]

    return of


@pytest.mark.parametrize(
    ("variant", "stops"),
    [
        ("base", [1]),  # in the middle of warm-up and of a logging interval
        ("base", [4]),  # where a checkpoint is written anyway
        ("base", [5]),  # right after a line of figures
        ("base", [6, 7, 8]),  # after a validation, at the end of an epoch, after the first segment of the next
        ("base", [13]),
        ("base", [22]),
        *((variant, [2, 12, 17]) for variant in VARIANTS if variant != "base"),
    ],
)
def test_resume_equals_the_straight_run(tmp_path: Path, straight, variant: str, stops: list[int]) -> None:
    corpus, wanted = straight(variant)
    training = start(tmp_path / "run", corpus, VARIANTS[variant])
    for stop in stops:
        outcome = train_until(training, stop)
        assert (outcome.step, outcome.finished) == (stop, False)
        training = go_on(tmp_path / "run", corpus)
        assert training.state.step == stop
    outcome = training.run()
    assert outcome.finished
    assert_same(training.folder, wanted.folder)
    assert outcome.best_nats_per_token == wanted.state.best_nats


def test_stopped_at_every_step(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    for step in range(1, 24):
        train_until(training, step)
        training = go_on(tmp_path / "run", corpus)
    assert training.run().finished  # nothing is left to do, and doing it changes nothing
    assert_same(training.folder, wanted.folder)


@pytest.mark.parametrize("step", [6, 12, 23])
def test_stopped_in_a_validation(tmp_path: Path, straight, step: int) -> None:
    """It is cut short, and done anew first of all; the checkpoint before it is whole."""
    corpus, wanted = straight("base")
    training = start(tmp_path / "run", corpus, {})
    heard: list[int] = []
    training.reporter = Silence()
    training.reporter.validating = lambda *_: heard.append(training.state.step)
    outcome = training.run(lambda: step in heard)
    assert (outcome.step, outcome.finished) == (step, False)
    assert training.folder.metrics()[-1]["step"] < step
    training = training if step == 12 else go_on(tmp_path / "run", corpus)  # at 12 it goes on by itself
    assert training.run().finished
    assert_same(training.folder, wanted.folder)


def test_what_the_straight_run_went_through(straight) -> None:
    """The equalities above would be easy for a run whose memory, random state or weights never moved."""
    _, wanted = straight("base")
    tensors, progress = tensors_of(wanted.folder), wanted.state
    assert progress.position.epoch == 3
    assert progress.position.segment_index == 2
    assert tensors["state/memory/valid"].tolist() == [11, 11, 11]
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
    assert short.run().finished
    config = short.folder.config.model_copy(update={"train": whole.config})
    (tmp_path / "short" / "config.yaml").write_text(config_text(config))
    longer = go_on(tmp_path / "short", corpus)
    longer.run()
    found, wanted = tensors_of(longer.folder), tensors_of(whole.folder)
    assert [name for name in wanted if name.startswith("last") and not torch.equal(found[name], wanted[name])] == []


def test_checkpoints_kept_and_their_files(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 9)
    assert [path.name for path in training.folder.checkpoints()] == ["step-00000008", "step-00000009"]
    for state in training.folder.checkpoints():
        assert sorted(file.name for file in state.iterdir()) == ["model.safetensors", "training", "training.json"]
        assert [file.name for file in (state / "training").iterdir()] == list(CheckpointRecord.read(state).files)
    assert sorted(item.name for item in (tmp_path / "run").iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "model.safetensors",
        "checkpoints",
        "txl_tokenizer.json",
    ]


def test_leftovers_of_a_killed_save_are_ignored_and_cleaned(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    train_until(start(tmp_path / "run", corpus, {}), 6)
    state = tmp_path / "run" / "checkpoints"
    shutil.copytree(state / "step-00000006", state / ".step-00000010.partial-7919")
    (state / ".step-00000010.partial-7919" / "training.json").write_bytes(b"half")
    (state / ".step-00000011.partial-7919").mkdir()
    (tmp_path / "run" / ".model.safetensors.partial-7919").write_bytes(b"half")
    training = go_on(tmp_path / "run", corpus)
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
    training = go_on(tmp_path / "run", corpus)
    assert [line["step"] for line in training.folder.metrics()] == [5, 6]
    training.run()
    assert_same(training.folder, wanted.folder)


def test_killed_before_its_first_checkpoint(tmp_path: Path, straight) -> None:
    """Such a run has settings and nothing else; to go on with it is to begin."""
    corpus, wanted = straight("base")
    start(tmp_path / "run", corpus, {})
    training = go_on(tmp_path / "run", corpus)
    assert training.state.step == 0
    training.run()
    assert_same(training.folder, wanted.folder)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    train_until(start(tmp_path / "run", corpus, {}), 6)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match=r"state holds no checkpoint; start anew with 'txl train --run DIR'"):
        go_on(tmp_path / "run", corpus)


def test_weights_without_a_checkpoint_are_not_overwritten(tmp_path: Path, straight) -> None:
    """As `txl convert` makes them: training would begin with other weights, and keep those as the best."""
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    training.folder.save_weights(training.model.state_dict(), step=0, nats=None)
    with pytest.raises(UserError, match=r"state holds no checkpoint; .*converted run can be used, but not trained on"):
        go_on(tmp_path / "run", corpus)


def test_other_folders_beside_the_checkpoints_do_not_matter(tmp_path: Path, straight) -> None:
    corpus, wanted = straight("base")
    train_until(start(tmp_path / "run", corpus, {}), 6)
    state = tmp_path / "run" / "checkpoints"
    shutil.copytree(state / "step-00000006", state / "step-of-friday")
    shutil.copytree(state / "step-00000006", state / "step-00000006.bak")
    training = go_on(tmp_path / "run", corpus)
    training.run()
    assert (state / "step-of-friday").is_dir()
    assert (state / "step-00000006.bak").is_dir()
    assert_same(training.folder, wanted.folder)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    train_until(start(tmp_path / "run", corpus, {}), 2)
    for old, new, message in (
        ("memory: 11", "memory: 13", "the kept memory has another shape than this model and memory length need"),
        ("feedforward: 19", "feedforward: 17", r"model.safetensors does not fit the settings in config.yaml \(at lay"),
        ("layers: 2", "layers: 3", r"does not fit the settings in config.yaml \(at layers.2"),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / new)
        settings = tmp_path / new / "config.yaml"
        settings.write_text(settings.read_text().replace(old, new))
        with pytest.raises(UserError, match=message):
            go_on(tmp_path / new, corpus)


def test_saving_changes_nothing(tmp_path: Path, straight) -> None:
    corpus, _ = straight("base")
    training = start(tmp_path / "run", corpus, {})
    train_until(training, 3)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    random_state = torch.get_rng_state()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    path = save_checkpoint(training.folder, training.state)
    assert path.name == "step-00000003"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())
    assert torch.equal(tensors_of(training.folder)["state/random/0/cpu"], random_state)


# Through the command:
WORDS = [
    "--threads=1",
    *(f"--model.{name}={value}" for name, value in MODEL.items()),
    *(f"--train.{name}={value}" for name, value in {**TRAIN, "max_steps": 307, "log_interval": 1, "checkpoint_interval": 2}.items()),
]  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = tmp_path_factory.mktemp("uninterrupted")
    make_corpus(place / "corpus")
    assert txl(["train", "--corpus", str(place / "corpus"), "--run", str(place / "run"), *WORDS]) == 0
    return RunFolder.open(place / "run")


def train_and_send(number: signal.Signals, corpus: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Trains in another process, which gets the signal once it has written a random number of lines."""
    words = [sys.executable, "-m", "transformer_xl", "train", "--corpus", str(corpus), "--run", str(place), *WORDS]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        wanted, metrics = random.randrange(1, 60), place / "metrics.jsonl"
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


@pytest.mark.parametrize("attempt", [1, 2])
def test_kill_9_at_a_random_step(tmp_path: Path, uninterrupted: RunFolder, attempt: int) -> None:
    ended = train_and_send(signal.SIGKILL, uninterrupted.path.parent / "corpus", tmp_path / "run")
    assert ended.returncode == -signal.SIGKILL
    assert RunFolder.open(tmp_path / "run").metrics()[-1]["step"] < 307
    assert txl(["train", "--resume", str(tmp_path / "run"), "--threads", "1"]) == 0
    assert_same(RunFolder.open(tmp_path / "run"), uninterrupted)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step(
    tmp_path: Path, uninterrupted: RunFolder, number: signal.Signals, status: int
) -> None:
    ended = train_and_send(number, uninterrupted.path.parent / "corpus", tmp_path / "run")
    assert ended.returncode == status
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("train: ")]  # progress, where it is slow
    message = rf"stopped and saved at step (\d+); go on with: txl train --resume {re.escape(str(tmp_path / 'run'))}"
    said = re.fullmatch(message, "\n".join(lines))
    assert said
    assert 1 <= int(said[1]) < 307
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == f"step-{int(said[1]):08}"
    assert txl(["train", "--resume", str(tmp_path / "run"), "--threads", "1"]) == 0
    assert_same(RunFolder.open(tmp_path / "run"), uninterrupted)
