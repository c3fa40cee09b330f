"""What can go wrong with `txl generate`: one line on standard error, exit status 2, nothing changed on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import assert_refused, do

from transformer_xl.text.tokenizer import save_tokenizer
from transformer_xl.text.tokenizers.words import WordTokenizer

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

MODEL = "--model.n-layers=1 --model.d-model=14 --model.n-heads=2 --model.d-head=5 --model.d-ff=19"
TRAIN = "--train.segment-length=7 --train.memory-length=11 --train.batch-size=3 --train.max-steps=2"


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of bytes, and one of words that knows no others and no line ends."""
    place = tmp_path_factory.mktemp("bad-generate") / "w"
    place.mkdir()
    (place / "text.txt").write_text("the cat sat on the mat " * 40)
    save_tokenizer(WordTokenizer(("the", "cat", "sat", "on", "mat"), None), place / "words.json")
    with Patch.context() as patch:
        patch.chdir(place)
        for kind, words in (("run", ""), ("words", " --vocabulary words.json")):
            do(f"prepare text.txt --out {kind}-corpus{words}")
            do(f"train --corpus {kind}-corpus --run {kind} {MODEL} {TRAIN}")
    return place


WRONG_WORDS = [
    # numbers out of range
    ("generate run --temperature -1", r"temperature -1.0: wanted 0 \(greedy\) or more"),
    ("generate run --top-k 0", "top-k 0: wanted 1 or more"),
    ("generate run --top-p 0", "top-p 0.0: wanted a number above 0, up to 1"),
    ("generate run --top-p 1.5", "top-p 1.5: wanted a number above 0, up to 1"),
    ("generate run --min-p -0.5", "min-p -0.5: wanted a number from 0 to 1"),
    ("generate run --min-p 2", "min-p 2.0: wanted a number from 0 to 1"),
    ("generate run --repetition-penalty 0", r"repetition penalty 0.0: wanted more than 0 \(1 changes nothing\)"),
    ("generate run --repetition-window 0", "repetition window 0: wanted 1 or more tokens"),
    ("generate run --samples 0", "0 samples wanted; give 1 or more"),
    ("generate run --beams 0", "0 beams wanted; give 1 or more"),
    ("generate run --beams 2 --length-penalty nan", "length penalty nan: wanted a number"),
    ("generate run --context 0", "context 0: wanted 1 or more tokens"),
    ("generate run --min-tokens -1", "min-tokens -1: wanted from 0 to the 500 tokens to be made"),
    ("generate run --tokens 5 --min-tokens 6", "min-tokens 6: wanted from 0 to the 5 tokens to be made"),
    ("generate run --tokens many", "many"),
    ("generate run --stop=", "a stop string is empty; give some text, or leave it out"),
    ("generate run --prompt a --prompt=", "the prompt is empty; give some text"),
    ("generate run --beams 2 --prompt=", "the prompt is empty; give some text"),
    # what does not go together
    ("generate run --prompt a --prompt-file text.txt", "--prompt and --prompt-file were both given; use one of them"),
    ("generate run --beams 2 --samples 2", "--beams and --samples were both given; use one of them"),
    ("generate run --beams 2 --temperature 0.5", "--beams finds the likeliest text: leave out what says how to draw"),
    ("generate run --beams 2 --top-k 5", "--beams finds the likeliest text: leave out what says how to draw"),
    ("generate run --beams 2 --seed 1", "--beams finds the likeliest text: leave out what says how to draw"),
    ("generate run --beams 2 --greedy", "--beams finds the likeliest text: leave out what says how to draw"),
    ("generate run --beams 2 --stop a", "--beams finds the likeliest text: leave out what says how to draw"),
    ("generate run --length-penalty 2", "--length-penalty ranks beams; give --beams, or leave it out"),
    (
        "generate run --tokens none --json",
        "--tokens none never ends; give a number, or write one text alone and without --json",
    ),
    ("generate run --tokens none --samples 2", "--tokens none never ends; give a number"),
    ("generate run --tokens none --prompt a --prompt b", "--tokens none never ends; give a number"),
    ("generate run --log-probabilities", "--log-probabilities are shown with --json; give that too"),
    ("generate run --chat --prompt a", "--chat reads prompts from standard input and shows one answer"),
    ("generate run --chat --json", "--chat reads prompts from standard input and shows one answer"),
    ("generate run --chat --samples 2", "--chat reads prompts from standard input and shows one answer"),
    # words
    (
        "generate words --prompt horse",
        "the word 'horse' is not one of the [0-9]+ of this vocabulary, which has none for",
    ),
    ("generate words --prompt cat --prompt horse", "the word 'horse' is not one of the"),
    ("generate words --until-line-end", "this vocabulary has no token that ends a line; leave out --until-line-end"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS, ids=[words for words, _ in WRONG_WORDS])
def test_wrong_words(ready: Path, words: str, message: str, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.chdir(ready)
    assert_refused(ready, words, message, capfd)
