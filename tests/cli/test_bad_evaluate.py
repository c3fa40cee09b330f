"""What a user can do wrong with `txl evaluate` and `txl score`: one line on standard error, exit status 2, no file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from refusals import FULL, assert_refused, do, full_after

from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

MODEL = "--model.n-layers=2 --model.d-model=14 --model.n-heads=2 --model.d-head=5 --model.d-ff=19"
TRAIN = "--train.segment-length=7 --train.memory-length=11 --train.batch-size=3 --train.max-steps=2"


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a corpus of characters and a run."""
    place = tmp_path_factory.mktemp("ready") / "w"
    place.mkdir()
    text = "abc\n" * 200
    for name, content in {"text": text.encode(), "empty": b"", "odd": b"abc\xff"}.items():
        (place / f"{name}.txt").write_bytes(content)
    (place / "folder").mkdir()
    with Patch.context() as patch:
        patch.chdir(place)
        do("prepare text.txt --out corpus --vocabulary characters")
        do(f"train --corpus corpus --run run {MODEL} {TRAIN}")
    return place


@pytest.fixture
def place(ready: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A copy of it to stand in."""
    shutil.copytree(ready, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


WRONG_WORDS = [
    ("evaluate run --rows 0", "rows 0: wanted 1 or more"),
    ("evaluate run --rows 2 --warmup -1", "warmup -1: wanted 0 or more"),
    (f"evaluate run --segment {10**22}", "wanted 1 or more, 2,147,483,647 at most"),
    (f"evaluate run --rows {10**17}", "wanted 1 or more, 2,147,483,647 at most"),
    ("evaluate run --method sliding-window --memory 0 --window 5 --segment 3", "--segment was given; a moving window"),
    (
        "evaluate run --method sliding-window --memory 0 --window 5 --warmup 3",
        "warms up by nothing; leave out --warmup",
    ),
    ("evaluate run --method dynamic --warmup 3", "without warming up; leave out --warmup"),
    ("evaluate run --method dynamic --dynamic.form sgd --dynamic.epsilon 5", "--dynamic.epsilon is for the form rms"),
    ("evaluate run --documents reste", 'Did you mean "reset"?'),
    ("evaluate run --method moving", "moving"),
    ("evaluate run --method sliding-window --window 5", r"has no memory, but memory 11 is asked for \(or is the run's"),
    ("evaluate run --method sliding-window --memory 0", "a moving window needs a length; give --window N"),
    ("evaluate run --method dynamic --rows 2", "rows 2: dynamic evaluation reads one after another; give 1"),
    ("evaluate run --method dynamic --dynamic.rate -1", "dynamic rate -1.0: wanted a number, 0 or more"),
    ("evaluate run --method dynamic --dynamic.rte 1", "--dynamic.rte. Did you mean --dynamic.rate?"),
    ("evaluate run --dynamic.statistics-tokens 7", "--dynamic.statistics-tokens was given; it goes with --method dyna"),
    ("evaluate run --per-token a.npy --sweep-memory 0,5", "--per-token and a sweep were both given"),
    ("evaluate run --per-token gone/a.npy", "writing gone/a.npy: no such file or folder"),
    ("evaluate run --per-token folder", "writing folder: is a folder, wanted a file"),
    ("score", "RUN requires an argument"),
    ("score run", "txl score needs texts; give files after the run, or - for standard input"),
    ("score gone text.txt", "gone: no such folder"),
    ("score run gone.txt", "reading gone.txt: no such file or folder"),
    ("score run folder", "reading folder: is a folder, wanted a file"),
    ("score run empty.txt", "empty.txt: there is no token in it; give some text"),
    ("score run text.txt odd.txt", r"odd.txt: byte 3: not UTF-8 \(byte 0xff\)"),
    ("score run text.txt text.txt", "text.txt was given twice; give each file once"),
    ("score run text.txt --per word", "word"),
    ("score run text.txt --memry 5", r"Unknown option: --memry; --help shows what can be given, and ./--memry is a"),
    ("score run text.txt --rows 0", "rows 0: wanted 1 or more"),
    ("score run text.txt --segment 0", "segment 0: wanted 1 or more"),
    ("score run text.txt --device gpu", "no device 'gpu' on this machine"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS, ids=[words[:60] for words, _ in WRONG_WORDS])
def test_wrong_words(place: Path, words: str, message: str, capfd: Capture) -> None:
    assert_refused(place, words, message, capfd)


def test_weights_that_are_not_numbers(place: Path, capfd: Capture) -> None:
    folder = RunFolder.open("run")
    weights, _ = load_tensors(folder.path / "model.safetensors")
    weights["layers.1.attention.key.weight"][2, 3] = torch.nan
    folder.save_weights(weights, step=2, nats=1.0)
    for words in ("evaluate run", "score run text.txt"):
        message = "the weights layers.1.attention.key.weight hold numbers that are infinite or not numbers; train again"
        assert_refused(place, words, message, capfd)


def test_a_full_disk_leaves_no_losses(place: Path, monkeypatch: Patch, capfd: Capture) -> None:
    full_after(0, monkeypatch)
    assert_refused(place, "evaluate run --per-token losses.npy", f"writing losses.npy: {FULL}", capfd)
