"""What can go wrong on the command line with the paper's other systems: one line on standard error, exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import assert_refused, do, txl

Capture = pytest.CaptureFixture[str]
SMALL = "--model.n-layers 1 --model.d-model 14 --model.n-heads 2 --model.d-ff 19"
SHORT = "--train.segment-length 7 --train.batch-size 3 --train.max-steps 2 --train.warmup-steps 0 --train.dtype float32"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a run of an LSTM and of learned places."""
    place = tmp_path_factory.mktemp("systems") / "w"
    place.mkdir()
    (place / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(99)))
    do(f"prepare {place}/text.txt --out {place}/corpus")
    for name, system in (("lstm", "--model.architecture lstm"), ("learned", "--model.architecture al-rfou")):
        do(f"train --corpus {place}/corpus --run {place}/{name} {SMALL} {SHORT} {system}")
    return place


def test_what_they_can_do(place: Path) -> None:
    """Without this, what is refused below might be refused for another reason."""
    for name in ("lstm", "learned"):
        assert txl("evaluate", place / name, "--tokens", "50", "--json").object
        said = txl("generate", place / name, "--prompt", "line", "--tokens", "13")
        assert (said.status, said.err) == (0, "")
        assert said.out
        told = txl("info", place / name, "--json").object["run"]
        assert told["kernel"] is None
        kind = told["model"]
        assert (kind["kind"], kind["encoding"]) == (("lstm", "relative") if name == "lstm" else ("transformer", name))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.architecture lsmt", "model.kind|lsmt"),
        (
            "--model.architecture lstm --model.attention-window 3",
            "kind lstm does not attend, and window 3 was given; give window none",
        ),
        ("--model.architecture qrnn --evaluation.clamp-length 3", "kind qrnn does not attend, and clamp 3 was given"),
        (
            "--model.architecture lstm --model.architecture shaw",
            "encoding shaw needs kind transformer, and this is kind lstm",
        ),
        ("--model.architecture lstm --train.compile layers", "train.compile layers is for transformers"),
        (
            "--model.architecture vaswani --train.memory-length 7",
            "encoding sinusoidal has no memory, and memory 7 was given",
        ),
        (
            "--model.architecture al-rfou --model.learned_positions 5",
            "segment 7 is longer than the 5 learned positions",
        ),
        (
            "--model.architecture shaw --model.learned_positions 999",
            "learned_positions 999 are more than training goes",
        ),
        ("--model.num-targets 2", "second_target True needs encoding sinusoidal or learned"),
    ],
)
def test_wrong_settings(place: Path, capfd: Capture, flags: str, message: str) -> None:
    assert_refused(place, f"train --corpus {place}/corpus --run {place}/new {SMALL} {SHORT} {flags}", message, capfd)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate {}/lstm --window 3", "kind lstm does not attend, and window 3 was given"),
        ("evaluate {}/lstm --clamp 3", "kind lstm does not attend, and clamp 3 was given"),
        ("evaluate {}/learned --memory 5", "encoding learned has no memory, and memory 5 was given; give memory 0"),
        ("evaluate {}/learned --segment 8", "segment 8 is longer than the 7 learned positions; give 7 at most"),
        ("generate {}/learned --prompt line --memory 5", "encoding learned has no memory, and memory 5 was given"),
        ("train --resume {}/learned --train.max-steps 3 --model.num-targets 2", "cannot change within a run"),
    ],
)
def test_wrong_lengths(place: Path, capfd: Capture, words: str, message: str) -> None:
    assert_refused(place, words.format(place), message, capfd)
