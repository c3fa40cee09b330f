"""What can go wrong on the command line with the paper's other systems: one line on standard error, exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import assert_refused, do, txl

Capture = pytest.CaptureFixture[str]
SIZES = "--model.n-layers 1 --model.d-model 16"
SHORT = "--train.segment-length 7 --train.batch-size 3 --train.max-steps 2 --train.warmup-steps 0 --train.dtype float32"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a run of an LSTM and a run with learned positions."""
    place = tmp_path_factory.mktemp("systems") / "w"
    place.mkdir()
    (place / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(99)))
    do(f"prepare {place}/text.txt --out {place}/corpus")
    for name in ("lstm", "al-rfou"):
        do(f"train --corpus {place}/corpus --run {place}/{name} {SIZES} {SHORT} --model.architecture {name}")
    return place


def test_what_they_can_do(place: Path) -> None:
    """Without this, what is refused below might be refused for another reason."""
    for name in ("lstm", "al-rfou"):
        assert txl("evaluate", place / name, "--max-tokens", "50", "--json").object
        said = txl("generate", place / name, "--prompt", "line", "--max-new-tokens", "13")
        assert (said.status, said.err) == (0, "")
        assert said.out
        told = txl("info", place / name, "--json").object["run"]
        assert told["attn_implementation"] is None
        assert told["model"]["architecture"] == name


def test_another_architecture_leaves_out_what_it_does_not_have(place: Path) -> None:
    """A recipe states the heads of its transformer, and an LSTM has none."""
    flags = "--model.architecture lstm --train.max-steps 1 --train.warmup-steps 0 --train.batch-size 3"
    do(f"train ablation --corpus {place}/corpus --run {place}/from-recipe {SIZES} {flags} --train.segment-length 7")
    assert txl("info", place / "from-recipe", "--json").object["run"]["model"]["d_model"] == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.architecture lsmt", "model.architecture|lsmt"),
        ("--model.architecture lstm --model.attention-window 3", "attention_window is a setting of .* this is .* lstm"),
        ("--model.architecture qrnn --evaluation.clamp-length 3", "qrnn has no clamp_length; give none"),
        ("--model.architecture lstm --train.compile layers", "train.compile layers is not for lstm"),
        ("--model.architecture vaswani --train.memory-length 7", "vaswani has no memory; give memory_length 0"),
        ("--model.architecture al-rfou --model.max-position-embeddings 5", "longer than the 5 positions of this model"),
        ("--model.architecture shaw --model.max-relative-positions 999", "max_relative_positions 999 is more than"),
        ("--model.num-targets 2", "num_targets is a setting of vaswani, al-rfou, and this is .* transformer-xl"),
    ],
)
def test_wrong_settings(place: Path, capfd: Capture, flags: str, message: str) -> None:
    assert_refused(place, f"train --corpus {place}/corpus --run {place}/new {SIZES} {SHORT} {flags}", message, capfd)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate {}/lstm --attention-window 3", "lstm has no attention_window; give none"),
        ("evaluate {}/lstm --clamp-length 3", "lstm has no clamp_length; give none"),
        ("evaluate {}/al-rfou --memory-length 5", "al-rfou has no memory; give memory_length 0"),
        (
            "evaluate {}/al-rfou --segment-length 8",
            "segment_length 8 is longer than the 7 positions .*; give 7 at most",
        ),
        ("generate {}/al-rfou --prompt line --memory-length 5", "al-rfou has no memory; give memory_length 0"),
        ("train --resume {}/al-rfou --train.max-steps 3 --model.num-targets 2", "cannot change within a run"),
    ],
)
def test_wrong_lengths(place: Path, capfd: Capture, words: str, message: str) -> None:
    assert_refused(place, words.format(place), message, capfd)
