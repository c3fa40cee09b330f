"""Several processes are one: same losses and weights however many share the work, and however they share the model.

Any number of them can resume a checkpoint; a killed process, a signal and a wrong setting end as they should.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import STOP, VARIANTS, begin, config_of, make_corpus, resumed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensors import assert_same_tensors
from training_runs import train_until

import transformer_xl
from transformer_xl.config import UserError
from transformer_xl.run_folder import CheckpointRecord, RunFolder, file_digest
from transformer_xl.tensor_file import load_tensors

ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1]), "OMP_NUM_THREADS": "1",
}  # fmt: skip
SCRIPT = Path(__file__).parents[1] / "processes.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes and looks for them as Linux does")


def torchrun(processes: int, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *words,
    ]


def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


@pytest.fixture
def double() -> Iterator[None]:
    """Float64 here too, as in processes.py."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def lines_of(place: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def weights_of(place: Path) -> dict[str, torch.Tensor]:
    folder = RunFolder.open(place)
    return {
        f"{which}/{name}": tensor
        for which in ("best", "last")
        for name, tensor in load_tensors(folder.weights_file(which))[0].items()
    }


def assert_equal(one: Path, other: Path, tolerance: float) -> None:
    found, wanted = lines_of(one), lines_of(other)
    assert [(line["split"], line["step"]) for line in found] == [(line["split"], line["step"]) for line in wanted]
    for line, expected in zip(found, wanted, strict=True):
        numbers = [{name: value for name, value in figures.items() if name != "split"} for figures in (line, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=tolerance), f"{one.name}: {line} instead of {expected}"
    found, wanted = weights_of(one), weights_of(other)
    assert found.keys() == wanted.keys()
    apart = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    assert max(apart.values()) <= tolerance, f"{one.name}: {apart}"


def test_any_number_of_processes_gives_the_same(tmp_path: Path, double: None) -> None:
    """Losses, gradient norms, validations and weights: 1 and 2 processes; stopped by 2 and resumed by 1 and 3."""
    make_corpus(tmp_path / "corpus")
    ended = launch(torchrun(2, str(SCRIPT), "train_and_stop", str(tmp_path)))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_equal(tmp_path / "by the library", tmp_path / "sharded", 0.0)
    for name, variant in VARIANTS.items():
        begin(tmp_path / f"{name}, one process", config_of(variant)).run()
        assert_equal(tmp_path / name, tmp_path / f"{name}, one process", 1e-9)
        own = shutil.copytree(tmp_path / f"{name}, stopped", tmp_path / f"{name}, resumed by one")
        training, (note,) = resumed(own)
        assert "by 2 processes, now there is 1" in note
        assert training.state.step == STOP
        training.run()
        assert_equal(own, tmp_path / f"{name}, one process", 1e-9)
    # with dropout too, as many processes as before go on as if nothing had been, bit for bit
    assert_equal(tmp_path / "noisy, resumed", tmp_path / "noisy", 0.0)

    train_until(begin(tmp_path / "alone", config_of({})), STOP)
    shutil.copytree(tmp_path / "alone", tmp_path / "alone, stopped")
    ended = launch(torchrun(3, str(SCRIPT), "resume_all", str(tmp_path)))
    assert ended.returncode == 0, ended.stderr[-3000:]
    for name in VARIANTS:
        assert_equal(tmp_path / f"{name}, resumed by three", tmp_path / f"{name}, one process", 1e-9)
    first = next(iter(VARIANTS))
    assert_equal(tmp_path / "alone, resumed by three", tmp_path / f"{first}, one process", 1e-9)
    for run in (first, "sharded", "alone, resumed by three"):
        RunFolder.open(tmp_path / run).verify()
    assert CheckpointRecord.read(RunFolder.open(tmp_path / "sharded").checkpoints()[-1]).num_processes == 2


# Through the command:
WORDS = [
    *("--threads=1", "--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-head=5"),
    *(
        "--model.d-ff=19",
        "--model.dropout=0.1",
        "--train.segment-length=7",
        "--train.memory-length=11",
        "--train.batch-size=3",
    ),
    *("--train.max-steps=37", "--train.warmup-steps=5", "--train.dtype=float32", "--train.log-interval=1"),
    *("--train.eval-interval=18", "--train.checkpoint-interval=4", "--train.parallelism=fsdp"),
]


def train_command(place: Path, *words: str, restarts: int = 1) -> list[str]:
    # without the two dashes torchrun takes --run for an abbreviation of an option of its own
    torch_words = ["--max-restarts", str(restarts), "-m", "--", "transformer_xl", "train"]
    return torchrun(2, *torch_words, "--corpus", str(place.parent / "corpus"), "--run", str(place), *words, *WORDS)


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_lines(process: subprocess.Popen[str], place: Path, number: int) -> None:
    deadline, metrics = time.monotonic() + 200, place / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= number):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def process_of_rank(parent: int, rank: int) -> int:
    """Number of the process that torchrun started with this rank."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (found,) = [
        child for child in children if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes()
    ]
    return int(found)


def test_killed_and_stopped_it_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A process killed: torchrun starts all anew. A signal: a checkpoint. Bit for bit as without either."""
    make_corpus(tmp_path / "corpus")
    whole = launch(train_command(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert whole.stdout.count("next: txl evaluate") == 1
    run = tmp_path / "run"
    with started(train_command(run)) as process:
        wait_for_lines(process, run, 6)
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        wait_for_lines(process, run, 15)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert out == ""
    assert err.count("txl: error: another process of this run has ended") <= 1  # or torchrun was faster
    assert err.count(f"resuming {run} at step ") == 1
    assert err.count("stopped and saved at step ") == 1
    newest = RunFolder.open(run).checkpoints()[-1]
    assert 5 < int(newest.name.removeprefix("step-")) < 37
    damaged = shutil.copytree(run, tmp_path / "damaged")

    again = launch(train_command(run))
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"resuming {run} at step {int(newest.name.removeprefix('step-'))} of 37" in again.stderr
    assert_equal(run, tmp_path / "whole", 0.0)
    for which in ("best", "last"):
        files = [RunFolder.open(place).weights_file(which) for place in (run, tmp_path / "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()

    (damaged / "model.safetensors").unlink(missing_ok=True)  # stopped before the first validation, there are none
    (damaged / "model.safetensors" / "in the way").mkdir(parents=True)  # the first process alone will find it
    ended = launch(train_command(damaged, restarts=0))
    assert ended.returncode != 0
    told = [line for line in ended.stderr.splitlines() if line.startswith("txl: ")]
    assert len(told) == 1
    assert f"writing {damaged / 'model.safetensors'}" in told[0]
    assert "transformer_xl/training/train.py" not in ended.stderr  # torchrun shows its own traceback, we none


def test_what_is_wrong_is_told_once(tmp_path: Path) -> None:
    """Before anything is made, in one line of one process."""
    make_corpus(tmp_path / "corpus")
    ended = launch(
        [word for word in train_command(tmp_path / "run", "--train.batch-size=1") if word != "--train.batch-size=3"]
    )
    assert ended.returncode != 0
    assert ended.stdout == ""
    told = [line for line in ended.stderr.splitlines() if line.startswith("txl: ")]
    assert len(told) == 1  # though torchrun restarts it once
    assert re.search(r"2 processes .*--train.batch-size 2", told[0])
    assert not (tmp_path / "run").exists()


def test_another_batch_size_starts_with_an_empty_memory_at_the_same_position(tmp_path: Path, double: None) -> None:
    """Of 211 tokens 3 rows of 7 have 11 segments; after 5 of them 2 rows are at segment 7, 3 chunks and all."""
    make_corpus(tmp_path / "corpus")
    train_until(begin(tmp_path / "run", config_of({})), STOP)
    kept = {name: tensor.clone() for name, tensor in weights_of(tmp_path / "run").items()}
    training, notes = resumed(tmp_path / "run", batch_size=2, micro_batch_size=1)
    assert len(notes) == 1
    assert "batch size changed from 3 to 2: memory starts empty" in notes[0]
    assert training.state.position.segment_index == 7
    assert [memory.valid_B.tolist() for memory in training.memories] == [[0], [0]]
    assert_same_tensors(training.model, {name: kept[f"last/{name}"] for name in training.model.state_dict()})
    train_until(training, 10)
    assert [memory.valid_B.tolist() for memory in training.memories] == [[11], [11]]
    assert training.state.step == 10


def test_a_checkpoint_without_part_of_the_optimiser_is_refused(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    train_until(begin(tmp_path / "run", config_of({})), STOP)
    state = tmp_path / "run" / "checkpoints" / "step-00000005"
    record = CheckpointRecord.read(state)
    (name,) = record.files
    tensors, parts = load_file(state / "training" / name), load_sharding(state / "training" / name)
    kept = {name: tensor for name, tensor in tensors.items() if "softmax.bias" not in name}
    save_file(kept, state / "training" / name, {"DCP_SHARDING_INFO": parts})
    files = {name: file_digest(state / "training" / name)}
    record.model_copy(update={"files": files}).write(state)
    with pytest.raises(UserError, match=r"step-00000005 lacks part of the optimizer state; delete it"):
        resumed(tmp_path / "run")


def load_sharding(file: Path) -> str:
    """Where in the whole the tensors of a file belong, as torch notes it."""
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()["DCP_SHARDING_INFO"]
