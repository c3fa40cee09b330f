"""`txl analyze context`: what it says and writes, and what it refuses in one line with exit status 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from refusals import assert_refused, do, txl

Capture = pytest.CaptureFixture[str]
SMALL = "--model.n-layers 1 --model.d-model 14 --model.n-heads 2 --model.d-ff 19"
SHORT = "--train.segment-length 7 --train.batch-size 3 --train.max-steps 2 --train.warmup-steps 0 --train.dtype float32"
QUICK = "--split train --context-step 5 --max-context 20 --num-positions 11 --device cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and two runs; one of another vocabulary, and one that lost its weights."""
    place = tmp_path_factory.mktemp("context") / "w"
    place.mkdir()
    (place / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(99)))
    do(f"prepare {place}/text.txt --out {place}/corpus")
    do(f"prepare {place}/text.txt --out {place}/letters --tokenizer char")
    for name, system in (("xl", "--train.memory-length 11"), ("learned", "--model.architecture al-rfou")):
        do(f"train --corpus {place}/corpus --run {place}/{name} {SMALL} {SHORT} {system}")
    do(f"train --corpus {place}/letters --run {place}/other {SMALL} {SHORT}")
    (place / "empty" / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "txl_tokenizer.json"):
        shutil.copy(place / "xl" / file, place / "empty" / file)
    (place / "there.json").write_text("mine")
    return place


def test_tables_files_and_what_it_costs(place: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "figures.json", tmp_path / "gains.svg"
    words = ["analyze", "context", place / "xl", f"vanilla={place}/learned", *QUICK.split(), "--fractions", "0.5,1"]
    said = txl(*words, "--out", out, "--plot", picture)
    assert said.status == 0
    assert "Relative effective context length in tokens, train: 11 positions" in said.out
    assert "r = 0.5" in said.out
    assert "Mean loss in nats per token" in said.out
    # without memory a model sees the 7 tokens of a segment at most: of 5, 10, 15 and 20
    assert "11 positions, 4 contexts of 5 to 20 tokens; tokens to read: xl 550, vanilla 286; in all 836" in said.err
    assert "estimated time: a minute or less" in said.err
    assert "<svg" in picture.read_text(encoding="utf-8")
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert figures["runs"] == {"xl": f"{place}/xl", "vanilla": f"{place}/learned"}
    assert [model["memory_length"] for model in figures["models"]] == [11, 0]
    assert txl(*words, "--json").object.keys() == figures.keys()


def test_how_far_attention_looks(place: Path) -> None:
    """Given lengths are for models that have them; the same places and losses come again."""
    words = ["analyze", "context", place / "xl", place / "learned", *QUICK.split(), "--json"]
    xl, learned = txl(*words).object["models"]
    whole, still = txl(*words, "--memory-length", "all", "--clamp-length", "3").object["models"]
    near, _ = txl(*words, "--memory-length", "0", "--attention-window", "2").object["models"]
    assert (whole["memory_length"], whole["clamp_length"], still["memory_length"], still["clamp_length"]) == (
        20,
        3,
        0,
        None,
    )
    assert (near["attention_window"], near["max_visible_tokens"]) == (2, 7)
    assert still["nats_per_token"] == learned["nats_per_token"]
    assert whole["nats_per_token"][-1] != xl["nats_per_token"][-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no run was given; name the folders of the runs"),
        ("{}/xl {}/xl", "two runs are called xl, .*name one otherwise: NAME=RUN"),
        ("a={}/xl a={}/learned", "two runs are called a"),
        ("={}/xl", "must be the folder of a run, or NAME=RUN"),
        ("{}/none", "none: no such folder; expected a folder made by"),
        ("{}/corpus", "a corpus, not a run"),
        ("{}/xl {}/other", "other has another tokenizer .char, .* than .*xl .byte, 256 tokens"),
        ("{}/xl {}/empty " + QUICK, "empty has no weights yet"),
        ("{}/xl --corpus {}/letters", "letters.*(vocabulary|tokenizer)"),
        ("{}/xl --split tset", r"has no split 'tset' \(did you mean 'test'\?\)"),
        ("{}/xl --max-context 100000", "which 0 have 100,000 before them, and num_positions is 1,000"),
        ("{}/xl --num-positions 1000000", "num_positions is 1,000,000; give a smaller num_positions"),
        ("{}/xl --context-step 0", "context_step 0: wanted 1 or more"),
        ("{}/xl --min-context 50 --max-context 60", "max_context 60 leaves nothing .* min_context 50; wanted 150"),
        ("{}/xl --threshold 1", "threshold 1: wanted a number above 0 and below 1"),
        ("{}/xl --fractions 0.1,x", "--fractions 0.1,x: must be numbers separated by commas, such as 0.1,0.5,1.0"),
        ("{}/xl --fractions 0.1,2", "fractions 0.1,2: wanted numbers above 0 and up to 1"),
        ("{}/xl --memory-length -1 " + QUICK, "memory_length"),
        ("{}/xl --memory-length some", "some"),
        ("{}/xl --out {}/there.json", "there.json exists already; choose another --out"),
        ("{}/xl --out {}/none/a.json", "folder .*none does not exist; create it, or choose another --out"),
        ("{}/xl --plot {}/a.jpg", "a.jpg: wanted a file name that ends in .svg or .png"),
        ("{}/xl --plot {}/a.svg --out {}/a.svg", "a.svg was given for --out and --plot; choose different files"),
    ],
)
def test_what_is_refused(place: Path, capfd: Capture, words: str, message: str) -> None:
    assert_refused(place, f"analyze context {words.replace('{}', str(place))}", message, capfd)
