"""A reproduction consists of ordinary runs, resumes after it was stopped, and never mixes different settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from library_tokenizers import word_piece
from refusals import assert_refused, do, txl

from transformer_xl.apps.reproduce import reproduction, tables
from transformer_xl.apps.reproduce.parallel import Job
from transformer_xl.apps.reproduce.reproduction import Reproduction
from transformer_xl.apps.reproduce.systems import BY_NAME
from transformer_xl.apps.reproduce.tables import reproduce_ablation, reproduce_context, reproduce_speed
from transformer_xl.config import UserError
from transformer_xl.files import lock_folder
from transformer_xl.run_folder import RunFolder

# Transformer-XL with the full loss, and learned absolute positions with half the loss (of the second half of a segment)
SYSTEMS = tuple(BY_NAME[name] for name in ("xl-full", "learned-half"))
MODEL = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_head": 8, "d_ff": 16}
TRAIN = {
    "segment_length": 8,
    "memory_length": 8,
    "batch_size": 4,
    "max_steps": 12,
    "checkpoint_interval": 4,
    "eval_interval": 12,
    "eval_tokens": 64,
}
# printed when two systems with two seeds each need no more training
DONE = "4 of 4 runs are trained and scored already"


@pytest.fixture(scope="module", autouse=True)
def in_process() -> Iterator[None]:
    """Replace `run_parallel`: run the commands of all jobs in this process, which is faster than starting processes."""

    def run_jobs(title: str, jobs: Sequence[Job], *_: Any, **__: Any) -> None:
        for command in (command for job in jobs for command in job.commands):
            result = txl(*command.arguments)
            assert result.status == 0, result.err
            if command.output:
                command.output.write_text(result.out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "run_parallel", run_jobs)
        yield


def flags_of(train: dict[str, Any]) -> list[str]:
    """Return the flags of the settings that `opened` passes, with these training settings."""
    groups = {"model": MODEL, "train": train}
    settings = [(f"{group}.{name}", value) for group, values in groups.items() for name, value in values.items()]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings]
    return [*flags, "--max-tokens=100", "--device=cpu"]


def opened(folder: Path, **changes: Any) -> Reproduction:
    """Open the reproduction in folder/out, with changed arguments of Reproduction.open."""
    settings = {"model": MODEL, "train": TRAIN, "max_tokens": 100, "device": "cpu", "command": "txl reproduce"}
    return Reproduction.open(**{"out": folder / "out", "corpus": folder / "corpus", **settings, **changes})


def ablate(folder: Path, **changes: Any) -> dict[str, Any]:
    """Train and score what is missing, and return the results of the ablation of SYSTEMS."""
    return reproduce_ablation(opened(folder, **changes), systems=SYSTEMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and an ablation of two systems."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "text.txt").write_bytes(b"".join(b"line %d of the text\n" % number for number in range(400)))
    do(f"prepare {folder}/text.txt --out {folder}/corpus")
    ablate(folder)
    return folder


@pytest.mark.parametrize("tokenizer", ["word", "library"])
def test_settings_that_training_completes_and_every_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    """Epochs become steps and cutoffs integers in a run, which is the same run as before for the next command."""
    text, file = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_bytes(b"".join(b"the cat %d sat on the mat.\n" % number for number in range(400)))
    file.write_text(json.dumps(word_piece()))
    do(f"prepare {text} --out {tmp_path}/corpus --tokenizer {file if tokenizer == 'library' else 'word'}")
    changes = {"model": {**MODEL, "cutoffs": "auto"}, "train": {**TRAIN, "max_epochs": 0.08}, "seeds": (1,)}
    results = ablate(tmp_path, **changes)
    assert ablate(tmp_path, **changes)["systems"] == results["systems"]
    assert results["metric"] == ("perplexity" if tokenizer == "word" else "token_perplexity")
    run = RunFolder.open(tmp_path / "out" / "runs" / "xl-full-seed1").config
    assert run.train.max_steps < TRAIN["max_steps"]
    assert run.model.cutoffs != "auto"


def test_scores_equal_those_of_txl_evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ablate(folder)["systems"]
    assert DONE in capsys.readouterr().err
    full, learned = systems["xl-full"], systems["learned-half"]
    assert full["trained_window"] == 16
    # 1, 2, 3, 4, 6, 8 and 12 times half the segment length; the positions of learned-half end at the segment length
    assert list(full["by_window"]) == ["4", "8", "12", "16", "24", "32", "48"]
    assert list(learned["by_window"]) == ["4", "8"]
    assert full["initial"][0] != full["initial"][1]
    for name, score, options in (
        ("xl-full-seed2", full["by_window"]["24"][1], ("--attention-window", "24", "--memory-length", "23")),
        ("learned-half-seed1", learned["initial"][0], ("--method", "sliding-window", "--attention-window", "8")),
    ):
        evaluation = txl("evaluate", folder / "out" / "runs" / name, *options, "--max-tokens", "100", "--json").object
        assert score == pytest.approx(evaluation["bits_per_byte"], rel=1e-6)


def test_command_prints_tables_and_writes_the_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "reproduce_ablation", partial(reproduce_ablation, systems=SYSTEMS))
    words = ["reproduce", "ablation", "--corpus", folder / "corpus", "--out", folder / "out", *flags_of(TRAIN)]
    words += ["--attention-windows", "8,24"]
    printed = txl(*words)
    assert printed.status == 0, printed.err
    assert all(f"│ {system.name} " in printed.out for system in SYSTEMS)
    assert "26.77" in printed.out  # the paper's best result of xl-full
    results = txl(*words, "--json").object
    # the windows of the flag, and that of training
    assert list(results["systems"]["xl-full"]["by_window"]) == ["8", "16", "24"]
    report = (folder / "out" / "report.html").read_text()
    assert "<svg" in report
    assert "segments of 8, batch size 4, 12 steps, seeds 1, 2" in report
    assert results["command"] in report


def test_smoke_says_that_nothing_can_be_concluded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tables, the JSON and the report."""
    monkeypatch.setattr(tables, "reproduce_ablation", partial(reproduce_ablation, systems=SYSTEMS))
    words = ["reproduce", "ablation", "--smoke", "--corpus", folder / "corpus", "--out", folder / "smoke"]
    printed, results = txl(*words, *flags_of(TRAIN)), txl(*words, *flags_of(TRAIN), "--json").object
    assert printed.status == 0, printed.err
    assert results["caveat"].startswith("Smoke scale")
    assert results["verdicts"][0][1].startswith("nothing concluded at smoke scale: ")
    report = (folder / "smoke" / "report.html").read_text()
    for shown in (printed.out, report):
        assert results["caveat"] in shown
        assert "nothing concluded at smoke scale" in " ".join(shown.split())
        assert "as in the paper" not in shown


def test_context_is_measured_on_the_same_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is trained again, and each model is evaluated with its best attention window."""
    by_window = ablate(folder)["systems"]["xl-full"]["by_window"]
    context = partial(reproduce_context, groups=[[system.name for system in SYSTEMS]])
    sweep = opened(folder).context_sweep(max_context=16, num_positions=20)
    groups = context(opened(folder), sweep)["groups"]
    assert DONE in capsys.readouterr().err
    assert [group["trained_with_seed"] for group in groups] == [1, 2]
    assert groups[0]["contexts"] == [4, 8, 12, 16]
    for index, group in enumerate(groups):
        transformer, learned = group["models"]
        best = min(by_window, key=lambda window: by_window[window][index])
        assert (str(transformer["attention_window"]), transformer["memory_length"]) == (best, int(best) - 1)
        assert (learned["memory_length"], learned["max_visible_tokens"]) == (0, 8)
    # the measured seconds are equal too, so nothing was measured again
    assert context(opened(folder), sweep)["groups"] == groups
    report = (folder / "out" / "report.html").read_text()
    # headings, and the paper's lengths of xl-full for r = 0.1, 0.5 and 1
    for phrase in ("How far back does text still help?", "700, 600, 500", "Which part of the model helps?"):
        assert phrase in report


def test_speed_is_added_to_the_report(folder: Path) -> None:
    reproduce_speed(folder / "out", smoke=True, device="cpu", command="txl reproduce speed")
    assert "How much faster is evaluation with memory?" in (folder / "out" / "report.html").read_text()
    assert json.loads((folder / "out" / "speed.json").read_text())["model"] == "tiny"
    with pytest.raises(UserError, match="is not the folder of a reproduction"):
        reproduce_speed(folder / "corpus", smoke=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {**TRAIN, "max_steps": 13}}, "other settings: train.max_steps is 13, not 12; give the same"),
        ({"train": {**TRAIN, "beta1": 0.5}}, "other settings: train.beta1 is 0.5, not 0.9"),
        ({"max_tokens": 0}, "max_tokens 0: must be 1 or more"),
        ({"seeds": (2, 1, 2)}, "seeds 2,1,2: .* name each once"),
        ({"train": {**TRAIN, "memory_length": 0}}, "train.memory_length 0: .* give 1 or more"),
        ({"recipe": "ablatoin"}, "no recipe 'ablatoin' .did you mean 'ablation'"),
        ({"model": {"architecture": "shaw"}}, "model.architecture .*; leave it out"),
        ({"train": {"loss": "half"}}, "train.loss differs between runs; leave it out"),
        ({"corpus": Path("nowhere")}, "no corpus at nowhere, .*; 'txl prepare"),
        ({"out": Path(__file__)}, "is not the folder of a reproduction; choose another out"),
    ],
)
def test_other_settings_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(folder, **changes)


@pytest.mark.parametrize("flags", ["--seeds 1,x", "--attention-windows 0"])
def test_invalid_flag_prints_one_line(folder: Path, flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"reproduce ablation --corpus {folder}/corpus --out {folder}/new {flags}"
    assert_refused(folder, words, f"{flags}: must be", capfd)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("scores/xl-full-seed1.json", "{", "xl-full-seed1.json is damaged; delete it and run .* again"),
        ("scores/xl-full-seed1.json", '{"sweep": null}', "xl-full-seed1.json is damaged"),
        ("speed.json", '{"command": ""}', "speed.json is damaged"),
        ("context.json", '{"command": "", "groups": []}', "context.json is damaged"),
        ("recipes/xl-full.yaml", None, "xl-full-seed1 has other settings than its recipe"),
        ("settings.yaml", "test_sha256: abc", "was started with other settings: test_sha256 is .*, not abc"),
        ("settings.yaml", "", "settings.yaml is missing, so the settings of the runs there are unknown"),
    ],
)
def test_damaged_file_is_named(folder: Path, name: str, content: str | None, message: str) -> None:
    """The file gets the content; an empty content deletes it, and None changes the batch size in it."""
    file = folder / "out" / name
    before = file.read_text() if file.exists() else None
    if content is None:
        file.write_text((before or "").replace("batch_size: 4", "batch_size: 5"))
    elif content:
        file.write_text(content)
    else:
        file.unlink()
    with pytest.raises(UserError, match=message):
        ablate(folder)
    file.unlink(missing_ok=True)
    if before is not None:
        file.write_text(before)
    ablate(folder)


def test_folder_of_a_version_with_fewer_settings_is_continued(folder: Path) -> None:
    out = folder / "out"
    files = [out / "settings.yaml", *(out / "recipes").glob("*.yaml"), *(out / "runs").glob("*/config.yaml")]
    before = {file: file.read_text() for file in files}
    for file, text in before.items():
        file.write_text("".join(line for line in text.splitlines(True) if "attention_sinks" not in line))
    assert "attention_sinks" in before[files[0]]
    assert "attention_sinks" not in files[0].read_text()
    ablate(folder)
    with pytest.raises(UserError, match=r"other settings: model\.attention_sinks is True, not False;"):
        opened(folder, model={**MODEL, "attention_sinks": True})
    for file, text in before.items():
        file.write_text(text)


def test_run_without_its_last_validation_is_finished_before_it_is_scored(folder: Path) -> None:
    """The log has the last step, but the best weights may be older."""
    run, scores = folder / "out" / "runs" / "xl-full-seed1", folder / "out" / "scores" / "xl-full-seed1.json"
    weights, results = run / "model.safetensors", json.loads(scores.read_text())["sweep"]
    best, num_lines = weights.read_bytes(), len((run / "metrics.jsonl").read_bytes().splitlines())
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    weights.unlink()
    scores.unlink()
    ablate(folder)
    assert weights.read_bytes() == best
    again = json.loads(scores.read_text())["sweep"]
    assert [entry["nats_per_token"] for entry in again] == [entry["nats_per_token"] for entry in results]
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == num_lines


def test_folder_is_locked(folder: Path) -> None:
    with lock_folder(folder / "out"), pytest.raises(UserError, match="is in use by another txl command"):
        ablate(folder)


# the command line of txl, with an ablation of one system
ONE_SYSTEM = """
from functools import partial
from transformer_xl.cli.main import main
from transformer_xl.apps.reproduce import tables
from transformer_xl.apps.reproduce.systems import BY_NAME
tables.reproduce_ablation = partial(tables.reproduce_ablation, systems=[BY_NAME["xl-full"]])
main()
"""


def test_stopped_reproduction_resumes_to_equal_results(folder: Path) -> None:
    """A process is stopped while it trains; the results after resuming equal those without a stop."""
    train = {**TRAIN, "max_steps": 100, "checkpoint_interval": 20, "eval_interval": 100}
    words = ["reproduce", "ablation", "--corpus", folder / "corpus", "--out", folder / "stopped", *flags_of(train)]
    command = [sys.executable, "-c", ONE_SYSTEM, *map(str, words), "--seeds=2", "--attention-windows=16"]
    parent = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    checkpoints, deadline = folder / "stopped" / "runs" / "xl-full-seed2" / "checkpoints", time.monotonic() + 60
    while not any(checkpoints.glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=100)
    assert not (folder / "stopped" / "ablation.json").exists()
    stopped, uninterrupted = (
        reproduce_ablation(opened(folder, out=folder / out, train=train, seeds=(2,)), (16,), systems=SYSTEMS[:1])
        for out in ("stopped", "uninterrupted")
    )
    assert stopped["systems"] == uninterrupted["systems"]
