"""prepare, train, evaluate and generate with every kind of tokenizer, and word-level corpora in particular."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import NO_RECIPE, txl

from transformer_xl import UserError, evaluate, load
from transformer_xl.run_folder import RunFolder

TEXT = "the cat sat on a mat while that dog ran after it and all of them slept in warm sun till noon came"
WORDS = TEXT.split()
NUM_LINES = {"train": 211, "valid": 31, "test": 29}
SPLITS = ["--train", "train.txt", "--valid", "valid.txt", "--test", "test.txt"]
# settings of a tiny model and its training
TINY = [
    "--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-ff=19", "--train.segment-length=7",
    "--train.memory-length=11", "--train.batch-size=3", "--train.checkpoint-interval=4", "--train.eval-interval=5",
    "--train.dtype=float32",
]  # fmt: skip
NINE_STEPS = [*TINY, "--train.max-steps=9"]


@pytest.fixture(autouse=True)
def text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file for each split, with lines of one to nine words; the first in `WORDS` are the most frequent."""
    monkeypatch.chdir(tmp_path)
    weights = 1 / (np.arange(len(WORDS)) + 1.5)
    for seed, (split, num_lines) in enumerate(NUM_LINES.items()):
        rng = np.random.default_rng(seed)
        lines = [rng.choice(WORDS, rng.integers(1, 10), p=weights / weights.sum()) for _ in range(num_lines)]
        Path(f"{split}.txt").write_text("".join(" ".join(line) + "\n" for line in lines))


def run_json(*arguments: str) -> dict[str, Any]:
    """Run a command that succeeds, and return the JSON object that it prints."""
    result = txl(*arguments, "--json")
    assert result.status == 0, result.err
    return result.object


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe", "integer"])
def test_every_kind_is_prepared_trained_evaluated_and_generated(kind: str) -> None:
    if kind == "integer":  # its texts consist of decimal token ids; each word is replaced by its length
        for split in NUM_LINES:
            file = Path(f"{split}.txt")
            lines = file.read_text().splitlines()
            file.write_text("".join(" ".join(str(len(word)) for word in line.split()) + "\n" for line in lines))
    size = ["--vocab-size=300"] if kind == "bpe" else []
    corpus = run_json("prepare", *SPLITS, "--tokenizer", kind, *size, "--out", "corpus")
    assert corpus["tokenizer"] == kind
    assert run_json("train", NO_RECIPE, "--corpus", "corpus", *NINE_STEPS)["run"] == "runs/corpus-no_recipe"
    evaluation = run_json("evaluate", "runs/corpus-no_recipe")
    assert evaluation["tokens"] == corpus["splits"]["test"]["num_tokens"]
    assert math.isfinite(evaluation["token_perplexity"])
    assert (evaluation["perplexity"] is None) == (kind == "integer")
    # what could be taken for the perplexity of papers, which is per word, says that it is per token
    shown = {
        "word": ["perplexity/word"],
        "bpe": ["perplexity/word", "perplexity/token"],
        "integer": ["perplexity/token"],
    }
    for table in (
        txl("evaluate", "runs/corpus-no_recipe").out,
        txl("score", "runs/corpus-no_recipe", "test.txt", "--per", "file").out,
    ):
        assert re.findall(r"perplexity\S*", table) == shown.get(kind, [])
    if kind == "bpe":  # a text without words has no perplexity per word
        Path("blank.txt").write_text("   ")
        run_json(
            "prepare",
            "--train",
            "train.txt",
            "--test",
            "blank.txt",
            "--tokenizer",
            "runs/corpus-no_recipe",
            "--out",
            "blank",
        )
        scored = txl("score", "runs/corpus-no_recipe", "blank.txt", "--per", "file").out
        for table, number in ((scored, 4), (txl("evaluate", "runs/corpus-no_recipe", "--corpus", "blank").out, 5)):
            row = table.strip().splitlines()[-2]
            assert [cell.strip() for cell in row.strip("\u2502").split("\u2502")][number] == "-"
    prompt = "3 3" if kind == "integer" else "the cat"
    assert txl("generate", "runs/corpus-no_recipe", "--prompt", prompt, "--max-new-tokens", "5").out


def test_corpora_whose_words_differ_only_in_counts_are_interchangeable() -> None:
    """The same text twice has the same words in the same order, and other counts."""
    train = Path("train.txt").read_text()
    Path("train.txt").write_text(train * 2)
    run_json("prepare", *SPLITS, "--tokenizer", "word", "--out", "twice")
    Path("train.txt").write_text(train)
    run_json("prepare", *SPLITS, "--tokenizer", "word", "--out", "once")
    run_json("prepare", *SPLITS, "--tokenizer", "word", "--no-add-eos", "--out", "no-eos")
    run_json("train", NO_RECIPE, "--corpus", "once", *TINY, "--train.max-steps=1", "--run", "run")
    assert run_json("evaluate", "run", "--corpus", "twice")["perplexity"] == run_json("evaluate", "run")["perplexity"]
    refused = txl("evaluate", "run", "--corpus", "no-eos")
    assert refused.status == 2
    different = (
        r"no-eos has another tokenizer than run \(word, 24 tokens, not 25; token 0 is .<unk>., not .<eos>.\); prepare"
    )
    assert re.search(different, refused.err)


def test_score_says_that_lines_are_unknown_without_a_token_for_line_ends() -> None:
    run_json("prepare", *SPLITS, "--tokenizer", "word", "--no-add-eos", "--out", "no-eos")
    run_json("train", NO_RECIPE, "--corpus", "no-eos", *TINY, "--train.max-steps=1", "--run", "run")
    assert "note: the run's tokenizer has no token for a line end" in txl("score", "run", "train.txt").err
    assert "note" not in txl("score", "run", "train.txt", "--per", "file").err


def test_word_level_with_cutoffs_and_resuming() -> None:
    corpus = run_json("prepare", *SPLITS, "--tokenizer", "word", "--out", "corpora/mine")
    for split, num_lines in NUM_LINES.items():
        counts = corpus["splits"][split]
        assert counts["num_words"] == len(Path(f"{split}.txt").read_text().split())
        assert counts["num_tokens"] == counts["num_words"] + num_lines  # each newline is a token
    train = ["train", NO_RECIPE, "--corpus", "corpora/mine", *TINY]
    cutoffs = ["--model.cutoffs=5,11", "--model.div-val=2", "--model.tie-projections=all_but_first"]
    run_json(*train, *cutoffs, "--train.max-steps=4")
    run_json("train", "--resume", "runs/mine-no_recipe", "--train.max-steps=9")
    folder = RunFolder.open(Path("runs/mine-no_recipe"))
    assert folder.config.model.cutoffs == (5, 11)
    assert [line["step"] for line in folder.metrics()] == [4, 5, 9]
    assert "words and newlines" in txl("evaluate", "runs/mine-no_recipe").out
    assert "softmax" in txl(*train, "--model.cutoffs=auto", "--train.max-steps=1", "--run=auto").err
    assert isinstance(RunFolder.open(Path("auto")).config.model.cutoffs, tuple)


def test_lines_as_shuffled_documents() -> None:
    prepare = ["prepare", "--train", "train.txt", "--tokenizer", "word", "--document-unit", "line", "--out", "corpus"]
    assert run_json(*prepare)["splits"]["train"]["num_documents"] == 211
    assert run_json("train", NO_RECIPE, "--corpus", "corpus", "--train.shuffle-documents", *NINE_STEPS)["finished"]


def test_new_text_is_prepared_with_the_tokenizer_of_a_run() -> None:
    run_json("prepare", "--train", "train.txt", "--tokenizer", "word", "--out", "corpus")
    run_json("train", NO_RECIPE, "--corpus", "corpus", *NINE_STEPS)
    Path("new.txt").write_text("the cat met a walrus\nand the walrus slept\n")
    corpus = run_json("prepare", "--train", "new.txt", "--tokenizer", "runs/corpus-no_recipe", "--out", "new")
    assert corpus["splits"]["train"]["num_unknown"] == 3  # met, walrus, walrus
    evaluate = ["evaluate", "runs/corpus-no_recipe", "--corpus", "new", "--split", "train"]
    evaluation = run_json(*evaluate)
    # 9 words and 2 newlines
    assert (evaluation["tokens"], evaluation["num_unknown"], evaluation["bytes"]) == (11, 3, 42)
    assert "11 words and newlines (3 of them unknown words, 27.3%), 42 bytes" in txl(*evaluate).out
    # The tokens do not determine the bytes of unknown words, so those of a part are estimated by its share of tokens.
    part = run_json(*evaluate, "--max-tokens=6")
    assert (part["tokens"], part["num_unknown"], part["bytes"]) == (6, 2, round(42 / 11 * 6))


@pytest.mark.parametrize("file", ["train-00000.tokens", "train.documents", "valid-00000.tokens"])
def test_corpus_with_changed_content_is_refused(file: str) -> None:
    run_json("prepare", *SPLITS, "--tokenizer", "word", "--document-unit", "line", "--out", "corpus")
    path = Path("corpus", file)
    path.write_bytes(b"\x05" * path.stat().st_size)  # of the same size, but with another checksum
    refused = txl("train", NO_RECIPE, "--corpus", "corpus", "--train.shuffle-documents", *NINE_STEPS)
    assert refused.status == 2
    assert f"{file}: damaged (sha256" in refused.err
    assert not Path("runs").exists()


def test_a_split_with_changed_content_is_not_evaluated() -> None:
    run_json("prepare", *SPLITS, "--tokenizer", "word", "--out", "corpus")
    run_json("train", NO_RECIPE, "--corpus", "corpus", "--run", "run", *NINE_STEPS)
    path = Path("corpus", "test-00000.tokens")
    path.write_bytes(b"\x05" * path.stat().st_size)
    refused = txl("evaluate", "run", "--split", "test")
    assert (refused.status, refused.out) == (2, "")
    assert f"{path.name}: damaged (sha256" in refused.err
    with pytest.raises(UserError, match=r"damaged \(sha256"):
        evaluate(load("run", device="cpu"), "test")
    assert run_json("evaluate", "run", "--split", "valid")["tokens"]
