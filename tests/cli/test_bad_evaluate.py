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
        do("prepare text.txt --out corpus --tokenizer char")
        do(f"train --corpus corpus --run run {MODEL} {TRAIN}")
    return place


@pytest.fixture
def place(ready: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A copy of that folder, as the working directory."""
    shutil.copytree(ready, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


SLIDING = "evaluate run --method sliding-window --memory-length 0"
WRONG_WORDS = [
    ("evaluate run --batch-size 0", "batch_size.*greater than 0"),
    ("evaluate run --batch-size 2 --warmup-tokens -1", "warmup_tokens.*greater than or equal to 0"),
    (f"evaluate run --segment-length {10**22}", "segment_length.*less than or equal to 2147483647"),
    ("evaluate run --max-tokens 0", "max-tokens 0: must be 1 or more"),
    (f"{SLIDING} --attention-window 5 --segment-length 3", "segment-length was given, but method sliding-window"),
    (f"{SLIDING} --attention-window 5 --warmup-tokens 3", "no warm-up; leave out warmup-tokens"),
    (SLIDING, "needs attention-window"),
    ("evaluate run --method sliding-window --attention-window 5", "memory-length is 11.*give memory-length 0"),
    ("evaluate run --method moving", "moving"),
    ("evaluate run --method dynamic --warmup-tokens 3", "no warm-up; leave out warmup-tokens"),
    ("evaluate run --method dynamic --batch-size 2", "batch-size 2: method dynamic reads one sequence; give 1"),
    ("evaluate run --method dynamic --dynamic.learning-rate -1", "dynamic.learning_rate.*greater than or equal to 0"),
    ("evaluate run --method dynamic --dynamic.larning-rate 1", "Did you mean --dynamic.learning-rate?"),
    ("evaluate run --method dynamic --dynamic.optimizer sgd --dynamic.epsilon 5", "epsilon is for the optimizer rms"),
    (
        "evaluate run --dynamic.gradient-stats-tokens 7",
        "settings of method dynamic were given, but the method is memory",
    ),
    ("evaluate run --sweep-memory-length 0,5 --memory-length 3", "--memory-length and --sweep-memory-length were both"),
    ("evaluate run --token-losses a.npy --sweep-memory-length 0,5", "--token-losses and a sweep were both given"),
    ("evaluate run --token-losses gone/a.npy", "writing gone/a.npy: no such file or folder"),
    ("evaluate run --token-losses folder", "writing folder: is a folder, must be a file"),
    ("score", "RUN requires an argument"),
    ("score run", "txl score needs texts"),
    ("score gone text.txt", "gone: no such folder"),
    ("score run gone.txt", "reading gone.txt: no such file or folder"),
    ("score run folder", "reading folder: is a folder, must be a file"),
    ("score run empty.txt", "empty.txt: the text is empty"),
    ("score run text.txt odd.txt", r"odd.txt: byte 3: not UTF-8 \(byte 0xff\)"),
    ("score run text.txt text.txt", "text.txt was given twice; list each file once"),
    ("score run text.txt --per word", "word"),
    ("score run text.txt --memry 5", r"Unknown option: --memry; --help lists .*file of that name as \./--memry"),
    ("score run text.txt --segment-length 0", "segment_length.*greater than 0"),
    ("score run text.txt --device gpu", "no device 'gpu' on this computer"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS, ids=[words[:60] for words, _ in WRONG_WORDS])
def test_wrong_words(place: Path, words: str, message: str, capfd: Capture) -> None:
    assert_refused(place, words, message, capfd)


def test_weights_that_are_not_finite(place: Path, capfd: Capture) -> None:
    folder = RunFolder.open("run")
    weights, _ = load_tensors(folder.path / "model.safetensors")
    name = next(name for name in weights if name.startswith("layers.1."))
    weights[name].flatten()[3] = torch.nan
    folder.save_weights(weights, step=2, nats=1.0)
    for words in ("evaluate run", "score run text.txt"):
        assert_refused(place, words, f"the weights {name} are not finite; train again", capfd)


def test_a_full_disk_leaves_no_losses(place: Path, monkeypatch: Patch, capfd: Capture) -> None:
    full_after(0, monkeypatch)
    assert_refused(place, "evaluate run --token-losses losses.npy", f"writing losses.npy: {FULL}", capfd)
