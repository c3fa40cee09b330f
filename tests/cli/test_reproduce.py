"""`txl reproduce`: tables from ordinary runs, gone on with where they were left, never mixed with other settings."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusals import Capture, Said, assert_refused, do, txl

from transformer_xl.analysis import context_table, systems
from transformer_xl.reproduction.systems import BY_NAME

ROWS = tuple(BY_NAME[name] for name in ("xl-full", "learned-half"))
TINY = (
    "--model.n-layers 1 --model.d-model 16 --model.n-heads 2 --model.d-head 8 --model.d-ff 16 --train.segment-length 8 "
    "--train.memory-length 8 --train.batch-size 4 --train.max-steps 12 --train.checkpoint-interval 4 --train.eval-interval 12 "
    "--train.eval-tokens 64 --tokens 100 --device cpu"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and an ablation of two rows."""
    place = tmp_path_factory.mktemp("reproduce") / "w"
    place.mkdir()
    (place / "text.txt").write_bytes(b"".join(b"line %d of the text\n" % number for number in range(400)))
    do(f"prepare {place}/text.txt --out {place}/corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "ABLATION", ROWS)
        patch.setattr(systems, "EQUAL_MEMORY", ())
        said = txl("reproduce", "ablation", "--corpus", place / "corpus", "--out", place / "out", *TINY.split())
        assert said.status == 0, said.err
        again = txl(
            "reproduce", "ablation", "--corpus", place / "corpus", "--out", place / "out", *TINY.split(), "--json"
        )
        assert "4 of 4 runs are trained and scored already" in again.err
    (place / "said.txt").write_text(said.out)
    (place / "said.json").write_text(again.out)
    return place


def test_figures_are_those_of_txl_evaluate(place: Path) -> None:
    figures = json.loads((place / "said.json").read_text())["systems"]
    assert list(figures) == [row.name for row in ROWS]
    assert figures["xl-full"]["initial_length"] == 16
    assert list(figures["xl-full"]["by_length"]) == ["4", "8", "12", "16", "24", "32", "48"]
    assert list(figures["learned-half"]["by_length"]) == ["4", "8"]
    tokens = ("--tokens", "100", "--json")
    for seed in (1, 2):
        run = place / "out" / "runs" / f"xl-full-seed{seed}"
        alone = txl("evaluate", run, "--window", "24", "--memory", "23", *tokens).object
        assert figures["xl-full"]["by_length"]["24"][seed - 1] == pytest.approx(alone["bits_per_byte"], rel=1e-6)
        run = place / "out" / "runs" / f"learned-half-seed{seed}"
        alone = txl("evaluate", run, "--method", "sliding-window", "--window", "8", *tokens).object
        assert figures["learned-half"]["initial"][seed - 1] == pytest.approx(alone["bits_per_byte"], rel=1e-6)
    assert figures["xl-full"]["initial"][0] != figures["xl-full"]["initial"][1]


def test_what_is_shown(place: Path) -> None:
    shown = (place / "said.txt").read_text()
    assert all(f"│ {row.name} " in shown for row in ROWS)
    assert "26.77" in shown
    report = (place / "out" / "report.html").read_text()
    assert "<svg" in report
    assert "Which part of the model helps?" in report
    assert f"{json.loads((place / 'said.json').read_text())['command']}" in report
    assert "segments of 8, 4 rows, 12 steps, seeds 1, 2" in report


def test_context_of_the_same_runs(place: Path) -> None:
    """Nothing is trained again, and each model reads with the attention length that it is best with."""
    words = ("reproduce", "context", "--corpus", place / "corpus", "--out", place / "out", *TINY.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_table, "GROUPS", (("xl-full", "learned-half"),))
        said = txl(*words, "--positions", "20", "--longest", "16", "--json")
        assert "4 of 4 runs are trained and scored already" in said.err
        report = (place / "out" / "report.html").read_text()
        shown = txl(*words, "--positions", "20", "--longest", "16").out
    groups = said.object["groups"]
    assert [group["trained_with_seed"] for group in groups] == [1, 2]
    assert groups[0]["contexts"] == [4, 8, 12, 16]
    by_length = json.loads((place / "said.json").read_text())["systems"]["xl-full"]["by_length"]
    for seed, group in enumerate(groups):
        transformer, learned = group["models"]
        best = min(by_length, key=lambda length: by_length[length][seed])
        assert (str(transformer["window"]), transformer["memory"]) == (best, int(best) - 1)
        assert (learned["memory_length"], learned["max_visible_tokens"]) == (0, 8)
    assert "700, 600, 500" in shown
    assert "How far does a text help?" in report
    assert "Which part of the model helps?" in report  # what was there stays


def test_speed_joins_the_report(place: Path) -> None:
    said = txl("reproduce", "speed", "--smoke", "--out", place / "out")
    assert said.status == 0, said.err
    report = (place / "out" / "report.html").read_text()
    assert "How much faster is evaluation with memory?" in report
    assert json.loads((place / "out" / "speed.json").read_text())["model"] == "tiny"
    elsewhere = txl("reproduce", "speed", "--smoke", "--out", place / "corpus")
    assert (elsewhere.status, elsewhere.err.count("\n")) == (2, 1)
    assert "holds no reproduction" in elsewhere.err


def test_a_row_can_be_trained_by_hand(place: Path) -> None:
    """The recipe in the folder is all there is to it."""
    do(
        f"train {place}/out/recipes/learned-half.yaml --corpus {place}/corpus --run {place}/hand --train.seed 2 "
        "--device cpu --threads 1"
    )
    by_hand = (place / "hand" / "model.safetensors").read_bytes()
    assert by_hand == (place / "out" / "runs" / "learned-half-seed2" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--train.max-steps 13",
            "was begun with train.max_steps 12, and now it is 13; give the same again, or another --out",
        ),
        ("--train.max-grad-norm 0.5", "was begun with train.max_grad_norm 0.25, and now it is 0.5"),
        ("--smoke", "was begun with"),
        ("--tokens 99", "was begun with tokens 100, and now it is 99"),
        ("--tokens 0", "--tokens 0: wanted 1 or more"),
        ("--workers 0", "--workers 0: wanted 1 or more"),
        ("--seeds 1,x", "--seeds 1,x: wanted whole numbers"),
        ("--seeds 2,1,2", "--seeds 2,1,2: one is named twice"),
        ("--train.memory-length 0", "train.memory_length 0: recurrence is what is compared; give 1 or more"),
        ("--lengths 0", "--lengths 0: wanted whole numbers from 1 on"),
        ("--recipe ablatoin", "no recipe 'ablatoin' .did you mean 'ablation'"),
        ("--model.architecture shaw", "model.architecture is what the systems differ in; leave it out"),
        ("--train.loss half", "train.loss is not one for all systems; leave it out"),
        ("--train.max-steps 0", "train.max_steps"),
        ("--device abacus", "no device 'abacus'"),
    ],
)
def test_refused(place: Path, capfd: Capture, flags: str, message: str) -> None:
    words = f"reproduce ablation --corpus {place}/corpus --out {place}/out {TINY}"
    names = {word for word in flags.split() if word.startswith("--")}
    kept = " ".join(pair for pair in pairs(words) if pair.split()[0] not in names)
    assert_refused(place, f"{kept} {flags}", message, capfd)


def pairs(words: str) -> list[str]:
    """A command line in pieces: the command, then each flag with its value."""
    first, *flags = words.split(" --")
    return [first, *(f"--{flag}" for flag in flags)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--corpus {}/nowhere --out {}/new", "no corpus at .*nowhere; make one with 'txl prepare enwik8'"),
        ("--corpus {}/corpus --out {}/hand", "exists and holds no reproduction; choose another --out"),
        ("--corpus {}/corpus --out {}/text.txt", "exists and holds no reproduction"),
        ("--corpus {}/corpus --out {}/new --train.batch-size 5000", "train.batch_size|too short|rows"),
        ("--corpus {}/other --out {}/out", "was begun with test_sha256"),
    ],
)
def test_wrong_places(place: Path, capfd: Capture, words: str, message: str) -> None:
    (place / "hand").mkdir(exist_ok=True)
    (place / "hand" / "file").touch()
    if not (place / "other").exists():
        (place / "lines").mkdir()
        text = (place / "text.txt").read_bytes()
        for name, part in (("train", text[:7471]), ("valid", text[7471:7891]), ("test", text[7891:-20])):
            (place / "lines" / name).write_bytes(part)
        splits = " ".join(f"--{name} {place}/lines/{name}" for name in ("train", "valid", "test"))
        do(f"prepare {splits} --out {place}/other")
    assert_refused(place, f"reproduce ablation {words.replace('{}', str(place))} {TINY}", message, capfd)


def again(place: Path, *words: str | Path) -> Said:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "ABLATION", ROWS)
        patch.setattr(systems, "EQUAL_MEMORY", ())
        corpus, out = place / "corpus", place / "out"
        return txl("reproduce", "ablation", "--corpus", corpus, "--out", out, *TINY.split(), *words)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("scores/xl-full-seed1.json", "{", "xl-full-seed1.json is damaged; delete it and give the command again"),
        ("scores/xl-full-seed1.json", "{}", "xl-full-seed1.json is damaged"),
        ("scores/xl-full-seed1.json", '{"sweep": null}', "xl-full-seed1.json is damaged"),
        ("speed.json", '{"command": ""}', "speed.json is damaged; delete it and make it again"),
        ("context.json", '{"command": "", "groups": []}', "context.json is damaged"),
        ("recipes/xl-full.yaml", None, "xl-full-seed1 is not of the settings in the recipe beside it"),
        ("settings.yaml", "", "settings.yaml is missing, so what the runs there are is not known"),
    ],
)
def test_damage_is_told(place: Path, name: str, content: str | None, message: str) -> None:
    file = place / "out" / name
    whole = file.read_text() if file.exists() else None
    if content is None:
        file.write_text((whole or "").replace("clip", "clip").replace("rows: 4", "rows: 5"))
    elif content:
        file.write_text(content)
    else:
        file.unlink()
    said = again(place)
    file.unlink(missing_ok=True)
    if whole is not None:
        file.write_text(whole)
    assert said.status == 2
    assert message in said.err
    assert again(place).status == 0


def test_lengths_that_were_scored_before_are_not_scored_again(place: Path) -> None:
    """Nor is what was found at others lost."""
    said = again(place, "--lengths", "8,24", "--json")
    assert "4 of 4 runs are trained and scored already" in said.err
    assert list(said.object["systems"]["xl-full"]["by_length"]) == ["8", "16", "24"]


def test_a_run_whose_last_validation_is_lacking_is_finished_first(place: Path) -> None:
    """Its log knows of the last step, but the weights kept as the best may be older."""
    run, scores = place / "out" / "runs" / "xl-full-seed1", place / "out" / "scores" / "xl-full-seed1.json"
    weights, figures = run / "model.safetensors", scores.read_text()
    best, log = weights.read_bytes(), (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    weights.unlink()
    scores.unlink()
    assert again(place).status == 0
    assert weights.read_bytes() == best
    assert (
        json.loads(scores.read_text())["sweep"][0]["nats_per_token"]
        == (json.loads(figures)["sweep"][0]["nats_per_token"])
    )
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == len(log.splitlines())


def test_one_command_at_a_time(place: Path) -> None:
    with (place / "out" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = again(place)
    assert said.status == 2
    assert "another txl reproduce, or a training that it began, is at work" in said.err


ONE_ROW = """
import sys
from transformer_xl.analysis import context_table, systems
from transformer_xl.cli.main import main
systems.ABLATION, systems.EQUAL_MEMORY = (systems.BY_NAME["xl-full"],), ()
main()
"""


def test_stopped_it_goes_on_where_it_was(place: Path) -> None:
    """The figures are those of one never stopped."""
    flags = (
        TINY.replace("--train.max-steps 12", "--train.max-steps 300").replace("save_every 4", "save_every 50").split()
    )
    words = ["reproduce", "ablation", "--corpus", str(place / "corpus"), *flags, "--seeds", "2", "--out"]

    def start(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ONE_ROW, *words, str(place / out)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)

    parent = start("killed")
    run = place / "killed" / "runs" / "xl-full-seed2"
    wait_until(lambda: (run / "checkpoints").exists() and any((run / "checkpoints").glob("step-*")))
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=100)
    assert not (place / "killed" / "ablation.json").exists()
    for out in ("killed", "whole"):
        finished = start(out)
        finished.communicate(timeout=200)
        assert finished.returncode == 0
    killed, whole = (json.loads((place / out / "ablation.json").read_text())["systems"] for out in ("killed", "whole"))
    assert killed == whole


def wait_until(holds, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
