"""A reproduction is made of ordinary runs, resumes where it was stopped, and never mixes different settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refusals import do, txl

from transformer_xl.config import UserError
from transformer_xl.files import lock_folder
from transformer_xl.reproduction import tables
from transformer_xl.reproduction.reproduction import Reproduction
from transformer_xl.reproduction.systems import BY_NAME
from transformer_xl.reproduction.tables import AblationResult, reproduce_ablation, reproduce_context, reproduce_speed

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
FLAGS = [f"--model.{name.replace('_', '-')}={value}" for name, value in MODEL.items()]
FLAGS += [f"--train.{name.replace('_', '-')}={value}" for name, value in TRAIN.items()]
FLAGS += ["--max-tokens=100", "--device=cpu"]


def opened(folder: Path, **changes: Any) -> Reproduction:
    settings = {
        "model": MODEL,
        "train": TRAIN,
        "max_tokens": 100,
        "device": "cpu",
        "command": "txl reproduce",
        **changes,
    }
    return Reproduction.open(settings.pop("out", folder / "out"), settings.pop("corpus", folder / "corpus"), **settings)


def ablate(folder: Path, windows: tuple[int, ...] | None = None, **changes: Any) -> AblationResult:
    return reproduce_ablation(opened(folder, **changes), windows, systems=SYSTEMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and an ablation of two systems."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "text.txt").write_bytes(b"".join(b"line %d of the text\n" % number for number in range(400)))
    do(f"prepare {folder}/text.txt --out {folder}/corpus")
    ablate(folder)
    return folder


def test_scores_are_those_of_txl_evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ablate(folder).values["systems"]
    assert "4 of 4 runs are trained and scored already" in capsys.readouterr().err
    assert systems["xl-full"]["trained_window"] == 16
    assert list(systems["xl-full"]["by_window"]) == ["4", "8", "12", "16", "24", "32", "48"]
    assert list(systems["learned-half"]["by_window"]) == ["4", "8"]
    assert systems["xl-full"]["initial"][0] != systems["xl-full"]["initial"][1]
    tokens = ("--max-tokens", "100", "--json")
    run = folder / "out" / "runs" / "xl-full-seed2"
    alone = txl("evaluate", run, "--attention-window", "24", "--memory-length", "23", *tokens).object
    assert systems["xl-full"]["by_window"]["24"][1] == pytest.approx(alone["bits_per_byte"], rel=1e-6)
    run = folder / "out" / "runs" / "learned-half-seed1"
    alone = txl("evaluate", run, "--method", "sliding-window", "--attention-window", "8", *tokens).object
    assert systems["learned-half"]["initial"][0] == pytest.approx(alone["bits_per_byte"], rel=1e-6)


def test_the_command_shows_tables_and_the_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "reproduce_ablation", partial(reproduce_ablation, systems=SYSTEMS))
    words = ["reproduce", "ablation", "--corpus", folder / "corpus", "--out", folder / "out", *FLAGS]
    shown = txl(*words, "--attention-windows", "8,24")
    assert shown.status == 0, shown.err
    assert all(f"│ {system.name} " in shown.out for system in SYSTEMS)
    assert "26.77" in shown.out
    found = txl(*words, "--attention-windows", "8,24", "--json").object
    # windows that were scored before are not scored again
    assert list(found["systems"]["xl-full"]["by_window"]) == ["8", "16", "24"]
    report = (folder / "out" / "report.html").read_text()
    assert "<svg" in report
    assert "segments of 8, batch size 4, 12 steps, seeds 1, 2" in report
    assert found["command"] in report


def test_context_of_the_same_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is trained again, and each model is read with its best attention window."""
    systems = ablate(folder).values["systems"]
    reproduction = opened(folder)
    sweep = reproduction.context_sweep(max_context=16, num_positions=20)
    groups = [[system.name for system in SYSTEMS]]
    found = reproduce_context(reproduction, sweep, groups=groups).values["groups"]
    assert "4 of 4 runs are trained and scored already" in capsys.readouterr().err
    assert [group["trained_with_seed"] for group in found] == [1, 2]
    assert found[0]["contexts"] == [4, 8, 12, 16]
    by_window = systems["xl-full"]["by_window"]
    for seed, group in enumerate(found):
        transformer, learned = group["models"]
        best = min(by_window, key=lambda window: by_window[window][seed])
        assert (str(transformer["attention_window"]), transformer["memory_length"]) == (best, int(best) - 1)
        assert (learned["memory_length"], learned["max_visible_tokens"]) == (0, 8)
    again = reproduce_context(reproduction, sweep, groups=groups)
    assert again.values["groups"] == found  # seconds too: nothing was measured again
    report = again.report.read_text()
    assert "How far does a text help?" in report
    assert "700, 600, 500" in report
    assert "Which part of the model helps?" in report


def test_speed_joins_the_report(folder: Path) -> None:
    result = reproduce_speed(folder / "out", smoke=True, device="cpu", command="txl reproduce speed")
    assert "How much faster is evaluation with memory?" in result.report.read_text()
    assert json.loads((folder / "out" / "speed.json").read_text())["model"] == "tiny"
    with pytest.raises(UserError, match="holds no reproduction"):
        reproduce_speed(folder / "corpus", smoke=True)


def test_a_system_can_be_trained_by_hand(folder: Path) -> None:
    """Its recipe in the folder says all."""
    do(
        f"train {folder}/out/recipes/learned-half.yaml --corpus {folder}/corpus --run {folder}/hand --train.seed 2 "
        "--device cpu --threads 1"
    )
    by_hand = (folder / "hand" / "model.safetensors").read_bytes()
    assert by_hand == (folder / "out" / "runs" / "learned-half-seed2" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {**TRAIN, "max_steps": 13}}, "was started with train.max_steps 12, and now it is 13; give the same"),
        ({"train": {**TRAIN, "beta1": 0.5}}, "with train.beta1 0.9, and now it is 0.5"),
        ({"max_tokens": 99}, "was started with max_tokens 100, and now it is 99"),
        ({"smoke": True, "model": {}, "train": {}}, "was started with"),
        ({"max_tokens": 0}, "max_tokens 0: wanted 1 or more"),
        ({"workers": 0}, "workers 0: wanted 1 or more"),
        ({"seeds": (2, 1, 2)}, "seeds 2,1,2: .* name each once"),
        ({"train": {**TRAIN, "memory_length": 0}}, "train.memory_length 0: recurrence is what is compared"),
        ({"recipe": "ablatoin"}, "no recipe 'ablatoin' .did you mean 'ablation'"),
        ({"model": {"architecture": "shaw"}}, "model.architecture is what the systems differ in; leave it out"),
        ({"train": {"loss": "half"}}, "train.loss differs between runs; leave it out"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"corpus": Path("nowhere")}, "no corpus at nowhere; make one with 'txl prepare enwik8'"),
        ({"out": Path(__file__)}, "exists and holds no reproduction; choose another out"),
    ],
)
def test_what_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(folder, **changes)


def test_another_corpus_is_refused(folder: Path) -> None:
    text = (folder / "text.txt").read_bytes()
    for name, part in (("train", text[:7471]), ("valid", text[7471:7891]), ("test", text[7891:-20])):
        (folder / name).write_bytes(part)
    splits = " ".join(f"--{name} {folder}/{name}" for name in ("train", "valid", "test"))
    do(f"prepare {splits} --out {folder}/other")
    with pytest.raises(UserError, match="was started with test_sha256"):
        opened(folder, corpus=folder / "other")


def test_a_bad_number_is_one_line(folder: Path) -> None:
    for flags, message in (("--seeds 1,x", "--seeds 1,x: must be"), ("--attention-windows 0", "--attention-windows 0")):
        said = txl("reproduce", "ablation", "--corpus", folder / "corpus", "--out", folder / "new", *flags.split())
        assert (said.status, said.out) == (2, "")
        assert re.fullmatch(f"txl: error: {message}[^\n]*\n", said.err)
        assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("scores/xl-full-seed1.json", "{", "xl-full-seed1.json is damaged; delete it and run the command again"),
        ("scores/xl-full-seed1.json", '{"sweep": null}', "xl-full-seed1.json is damaged"),
        ("speed.json", '{"command": ""}', "speed.json is damaged; delete it and run its command again"),
        ("context.json", '{"command": "", "groups": []}', "context.json is damaged"),
        ("recipes/xl-full.yaml", None, "xl-full-seed1 has other settings than the recipe beside it"),
        ("settings.yaml", "", "settings.yaml is missing, so the settings of the runs there are unknown"),
    ],
)
def test_damage_is_told(folder: Path, name: str, content: str | None, message: str) -> None:
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


def test_a_run_without_its_last_validation_is_finished_first(folder: Path) -> None:
    """Its log has the last step, but the weights saved as the best may be older."""
    run, scores = folder / "out" / "runs" / "xl-full-seed1", folder / "out" / "scores" / "xl-full-seed1.json"
    weights, results = run / "model.safetensors", json.loads(scores.read_text())["sweep"]
    best, log = weights.read_bytes(), (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    weights.unlink()
    scores.unlink()
    ablate(folder)
    assert weights.read_bytes() == best
    again = json.loads(scores.read_text())["sweep"]
    assert [entry["nats_per_token"] for entry in again] == [entry["nats_per_token"] for entry in results]
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == len(log.splitlines())


def test_one_command_at_a_time(folder: Path) -> None:
    with lock_folder(folder / "out"), pytest.raises(UserError, match="is in use by another txl command"):
        ablate(folder)


ONE_SYSTEM = """
from functools import partial
from transformer_xl.cli.main import main
from transformer_xl.reproduction import tables
from transformer_xl.reproduction.systems import BY_NAME
tables.reproduce_ablation = partial(tables.reproduce_ablation, systems=[BY_NAME["xl-full"]])
main()
"""


def test_stopped_it_resumes_where_it_was(folder: Path) -> None:
    """The results are those of one never stopped."""
    words = ["reproduce", "ablation", "--corpus", str(folder / "corpus"), *FLAGS, "--seeds", "2"]
    words += ["--train.max-steps", "300", "--train.checkpoint-interval", "50", "--attention-windows", "16", "--out"]
    words = [word for word in words if not word.startswith(("--train.max-steps=", "--train.checkpoint-interval="))]

    def start(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ONE_SYSTEM, *words, str(folder / out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    parent, run = start("killed"), folder / "killed" / "runs" / "xl-full-seed2"
    wait_until(lambda: (run / "checkpoints").exists() and any((run / "checkpoints").glob("step-*")))
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=100)
    assert not (folder / "killed" / "ablation.json").exists()
    both = [start("killed"), start("whole")]
    for process in both:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    killed, whole = (json.loads((folder / out / "ablation.json").read_text())["systems"] for out in ("killed", "whole"))
    assert killed == whole


def wait_until(holds, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
