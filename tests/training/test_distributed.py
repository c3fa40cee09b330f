"""Training with several processes: the same losses and weights for any number of processes, with DDP and with FSDP.

Any number of processes can resume a checkpoint. A killed process, a signal and an error end all processes.
"""

from __future__ import annotations

import os
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
from processes import (
    COMMAND_MODEL,
    COMMAND_TRAIN,
    SHARDED_LSTM,
    STOP_STEP,
    TABLES,
    VARIANTS,
    command_job,
    config_of,
    copy_run,
    make_corpus,
    resume_job,
    resume_trainer,
    run_processes,
    start,
    train_job,
)
from refusals import NO_RECIPE
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensors import assert_same_tensors
from training_runs import train_until

import transformer_xl
from transformer_xl.checkpoint_record import CheckpointRecord, file_digest
from transformer_xl.config import UserError
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in float64 in this process too, as processes.py does."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run, without times, which differ between equal runs."""
    excluded = ("split", "seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in excluded} for line in RunFolder.open(path).metrics()]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the best and the last weights of a run."""
    folder = RunFolder.open(path)
    files = {
        checkpoint: load_tensors(folder.choose_weights(checkpoint).used.file)[0] for checkpoint in ("best", "last")
    }
    return {f"{checkpoint}/{name}": tensor for checkpoint, file in files.items() for name, tensor in file.items()}


def assert_same_runs(actual: Path, expected: Path, tolerance: float) -> None:
    for line, expected_line in zip(metrics_of(actual), metrics_of(expected), strict=True):
        assert line == pytest.approx(expected_line, rel=tolerance), actual.name
    assert_same_tensors(weights_of(actual), weights_of(expected), atol=tolerance)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all VARIANTS with 2 processes, and further runs of `train_job`; return the folder that contains them."""
    path = tmp_path_factory.mktemp("trained")
    make_corpus(path / "corpus")
    assert run_processes(2, train_job, path) == [0, 0]  # the exit status of each process
    return path


def test_results_do_not_depend_on_the_number_of_processes(trained: Path, float64: None) -> None:
    """Compare losses, gradient norms and weights of runs in 1 and 2 processes, also after resuming them in 1 or 3.

    A run of 2 processes has the name of its variant; its copy "NAME, stopped" ends at STOP_STEP, to be resumed.
    """
    # trained and resumed with the public functions instead of a Trainer
    assert_same_runs(trained / "by the library", trained / "sharded LSTM", tolerance=0.0)
    # with dropout too, the same number of processes resumes bit for bit
    assert_same_runs(trained / "dropout, resumed", trained / "dropout", tolerance=0.0)
    single = start(trained / "tables, one process", config_of(TABLES))
    single.run()
    assert_same_runs(trained / "tables", single.folder.path, tolerance=1e-9)
    for name, variant in VARIANTS.items():
        single = start(trained / f"{name}, one process", config_of(variant))
        train_until(single, STOP_STEP)
        if variant is SHARDED_LSTM:
            copy_run(single.folder.path, f"{name}, stopped by one")
        single.run()
        assert_same_runs(trained / name, single.folder.path, tolerance=1e-9)
        run = copy_run(trained / f"{name}, stopped", f"{name}, resumed by one")
        trainer, (warning,) = resume_trainer(run)
        assert "by 2 processes, now there is 1" in warning
        assert trainer.state.step == STOP_STEP
        trainer.run()
        assert_same_runs(run, single.folder.path, tolerance=1e-9)

    assert run_processes(3, resume_job, trained) == [0, 0, 0]
    resumed = list(trained.glob("*, resumed by three"))
    assert len(resumed) == len(VARIANTS) + 1  # the sharded LSTM was stopped twice, by 2 processes and by 1
    for run in resumed:
        assert_same_runs(run, trained / f"{run.name.partition(', stopped')[0]}, one process", tolerance=1e-9)
        RunFolder.open(run).verify()
    assert CheckpointRecord.read(RunFolder.open(trained / "sharded LSTM").checkpoints()[-1]).num_processes == 2


FLAGS = [
    "--threads=1",
    *(f"--model.{name}={value}" for name, value in COMMAND_MODEL.items()),
    *(f"--train.{name}={value}" for name, value in COMMAND_TRAIN.items()),
]


@contextmanager
def started_by_torchrun(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start `txl train` in 2 processes, which torchrun restarts once."""
    # after --, because torchrun would take --run for an abbreviation of one of its own options
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "--", "transformer_xl", "train"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *map(str, arguments)]
    source = str(Path(transformer_xl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_lines(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Wait until metrics.jsonl has this many lines."""
    deadline, metrics = time.monotonic() + 200, run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def process_of_rank(torchrun_id: int, rank: int) -> int:
    """Return the id of the process that torchrun started with this rank."""
    children = Path(f"/proc/{torchrun_id}/task/{torchrun_id}/children").read_text().split()
    variable = f"\0RANK={rank}\0".encode()
    (process_id,) = [child for child in children if variable in Path(f"/proc/{child}/environ").read_bytes()]
    return int(process_id)


def test_killed_and_stopped_run_equals_uninterrupted(tmp_path: Path, trained: Path) -> None:
    """After a kill torchrun restarts all processes; SIGTERM writes a checkpoint and validates; an error ends all.

    The run has 37 steps and writes a checkpoint every 4 steps (COMMAND_TRAIN).
    """
    run = tmp_path / "run"
    with started_by_torchrun(NO_RECIPE, "--corpus", trained / "corpus", "--run", run, *FLAGS) as process:
        wait_for_lines(process, run, 6)  # each step writes a line
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        wait_for_lines(process, run, 15)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert out == ""
    assert err.count("txl: error: another process of this run has ended") <= 1  # 0 if torchrun ended it before
    assert err.count(f"resuming {run} at step ") == 1
    assert err.count("stopped and saved at step ") == 1
    step = int(RunFolder.open(run).checkpoints()[-1].name.removeprefix("step-"))
    assert 5 < step < 36  # of 37 steps

    command = ("train", "--resume", str(run), "--threads=1")
    assert [line["step"] for line in RunFolder.open(run).metrics() if line["split"] == "valid"] == [step]
    (run / "model.safetensors").unlink()
    (run / "model.safetensors" / "subfolder").mkdir(parents=True)  # the first process cannot replace a folder
    assert run_processes(2, command_job, tmp_path / "error", *command) == [2, 2]
    output = "".join(file.read_text() for file in tmp_path.glob("error-*"))
    (error,) = [line for line in output.splitlines() if line.startswith("txl: ")]
    assert f"writing {run / 'model.safetensors'}" in error
    assert "Traceback" not in output
    shutil.rmtree(run / "model.safetensors")

    assert run_processes(2, command_job, tmp_path / "resumed", *command) == [0, 0]
    assert f"resuming {run} at step " in (tmp_path / "resumed-0").read_text()
    metrics = run / "metrics.jsonl"
    stopped = f'"split": "valid", "step": {step},'  # the validation of the stop, which the uninterrupted run lacks
    metrics.write_text("".join(line for line in metrics.read_text().splitlines(keepends=True) if stopped not in line))
    assert_same_runs(run, trained / "uninterrupted", tolerance=0.0)


def test_another_batch_size_resumes_at_the_same_position_with_empty_memory(tmp_path: Path, float64: None) -> None:
    """211 tokens in 3 batch rows have 11 segments of 7 tokens. After 5 of them, 2 batch rows continue at segment
    5 * 3 // 2 = 7, about the same position. `valid_B` is the number of filled memory slots of each row (B)."""
    make_corpus(tmp_path / "corpus")
    train_until(start(tmp_path / "run", config_of({})), STOP_STEP)
    saved = weights_of(tmp_path / "run")
    trainer, (warning,) = resume_trainer(tmp_path / "run", batch_size=2, micro_batch_size=1)
    assert "batch size changed from 3 to 2: memory starts empty" in warning
    assert trainer.state.position.segment_index == 7
    assert [memory.valid_B.tolist() for memory in trainer.stepper.memories] == [[0], [0]]
    assert_same_tensors(trainer.model, {name: saved[f"last/{name}"] for name in trainer.model.state_dict()})
    train_until(trainer, 10)
    assert [memory.valid_B.tolist() for memory in trainer.stepper.memories] == [[11], [11]]
    assert trainer.state.step == 10


def test_checkpoint_without_part_of_the_optimizer_state_is_refused(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    train_until(start(tmp_path / "run", config_of({})), STOP_STEP)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000005"
    record = CheckpointRecord.read(checkpoint)
    (name,) = record.files
    file = checkpoint / "training" / name
    # torch.distributed.checkpoint (DCP) describes the shards in the metadata of the file
    with safe_open(file, framework="pt") as opened:
        sharding = opened.metadata()["DCP_SHARDING_INFO"]
    remaining = {name: tensor for name, tensor in load_file(file).items() if "softmax.bias" not in name}
    save_file(remaining, file, {"DCP_SHARDING_INFO": sharding})
    record.model_copy(update={"files": {name: file_digest(file)}}).write(checkpoint)
    with pytest.raises(UserError, match=r"step-00000005 lacks optimizer/softmax.bias/exp_avg; delete it"):
        resume_trainer(tmp_path / "run")
