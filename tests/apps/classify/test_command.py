"""`txl embed`, `txl finetune --task classification`, `txl classify` and `txl train --resume`, as users type them."""

from __future__ import annotations

import csv
import resource
from pathlib import Path

import numpy as np
import pytest
from labelled import contents, documents, write_lines
from refusals import Capture, assert_refused, txl
from small_runs import make_run

from transformer_xl import classify, embed, load, load_classifier
from transformer_xl.apps.classify import command
from transformer_xl.apps.classify.training import DocumentStepper

TRAIN = [
    "--train.max-steps=4", "--train.batch-size=3", "--train.warmup-steps=1", "--train.eval-interval=2",
    "--train.checkpoint-interval=1", "--train.dtype=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its texts, documents with labels as JSON lines and CSV, and a classifier of them."""
    folder = tmp_path_factory.mktemp("classify")
    make_run(folder / "run")
    texts, labels = documents(30)
    write_lines(folder / "train.jsonl", texts, labels)
    write_lines(folder / "valid.jsonl", texts, labels)
    write_lines(folder / "other.jsonl", ["ab"], ["q"])
    write_lines(folder / "one.jsonl", texts, ["x"] * 30)
    write_lines(folder / "empty.jsonl", ["ab", " "], ["x", "y"])
    with (folder / "test.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("body", "topic"), *zip(*documents(9, seed=4), strict=True)])
    (folder / "a.txt").write_text("ab\ncdx\n")
    words = ("finetune", folder / "run", folder / "train.jsonl", "--task", "classification", "--labels", "topic")
    trained = txl(*words, "--run", folder / "topics", *TRAIN, "--loss-segments", "2", "--valid", folder / "valid.jsonl")
    assert trained.status == 0, trained.err
    assert f"next: txl classify {folder / 'topics'} FILES" in trained.out
    return folder


def test_embed_writes_what_the_function_returns(folder: Path) -> None:
    run, (texts, _) = load(folder / "run", device="cpu"), documents(30)
    written = txl("embed", folder / "run", folder / "train.jsonl", "--out", folder / "a.npy", "--memory-length", "3")
    assert written.out == f"{folder / 'a.npy'}: 30 vectors of 14 numbers\n"
    assert np.array_equal(np.load(folder / "a.npy"), embed(run, texts, memory_length=3))
    for flags, expected in (([], ["ab\ncdx\n"]), (["--per", "line"], ["ab", "cdx"])):
        out = folder / f"{len(flags)}.npy"
        words = ("embed", folder / "topics", folder / "a.txt", "--out", out, "--pooling", "mean", "--layer", "1")
        assert txl(*words, *flags, "--json").object["num_documents"] == len(expected)
        topics = load(folder / "topics", device="cpu")
        assert np.array_equal(np.load(out), embed(topics, expected, pooling="mean", layer=1))


def test_embed_writes_all_or_nothing(folder: Path, capfd: Capture) -> None:
    """numpy ignores a full disk, here a limit of sizes, when it closes a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # 30 vectors take 1,808 bytes
    try:
        assert_refused(folder, f"embed {folder}/run {folder}/train.jsonl --out {folder}/full.npy", "too large", capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_embed_writes_parquet(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    words = f"embed {folder}/run {folder}/a.txt {folder}/train.jsonl --out {folder}/b.parquet"
    assert txl(*words.split()).status == 0
    table = parquet.read_table(folder / "b.parquet")
    expected = embed(load(folder / "run", device="cpu"), ["ab\ncdx\n", *documents(30)[0]])
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), expected)
    assert table["document"][0].as_py() == f"{folder}/a.txt"
    assert table["document"][30].as_py() == f"{folder}/train.jsonl: row 30"
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert_refused(folder, words.replace("b.parquet", "c.parquet"), r"pyarrow is not installed.*\[parquet\]", capfd)


def test_classify_prints_and_writes_what_the_function_returns(folder: Path) -> None:
    texts, labels = documents(9, seed=4)
    expected = classify(load_classifier(folder / "topics", device="cpu"), texts, labels)
    words = ("classify", folder / "topics", folder / "test.csv", "--text-column", "body", "--labels", "topic")
    printed = txl(*words, "--json").object
    assert printed["accuracy"] == expected.accuracy
    assert printed["macro_f1"] == expected.macro_f1
    assert printed["confusion"] == expected.confusion_CC.tolist()
    assert [row["predicted"] for row in printed["documents"]] == list(expected.predicted)
    shown = txl(*words).out
    assert f"9 documents: accuracy {expected.accuracy:.4f}, macro F1 {expected.macro_f1:.4f}" in shown
    assert "as x" in shown
    assert txl("classify", folder / "topics", folder / "a.txt", "--out", folder / "p.csv").out == ""
    (row,) = csv.DictReader((folder / "p.csv").read_text().splitlines())
    assert row["document"] == f"{folder / 'a.txt'}"
    assert float(row["probability_x"]) == pytest.approx(
        classify(load_classifier(folder / "topics", device="cpu"), "ab\ncdx\n").probabilities_NC[0, 0]
    )


def test_stopped_training_is_resumed_by_the_printed_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = DocumentStepper.step

    def step_and_stop(stepper: DocumentStepper):
        if stepper.num_steps == 1:
            raise MemoryError  # as a kill: without a checkpoint of this step
        return step(stepper)

    words = ("finetune", folder / "run", folder / "train.jsonl", "--task", "classification", "--labels", "topic")
    words = (*words, "--loss-segments", "2", "--valid", folder / "valid.jsonl", "--run", folder / "stopped", *TRAIN)
    with monkeypatch.context() as patch:
        patch.setattr(DocumentStepper, "step", step_and_stop)
        assert txl(*words).status == 2
    resumed = txl("train", "--resume", folder / "stopped", "--json")
    assert resumed.object["step"] == 4
    assert f"resuming {folder / 'stopped'} at step 1 of 4" in resumed.err
    assert contents(folder / "stopped", 4) == contents(folder / "topics", 4)
    assert txl("info", folder / "topics", "--verify").status == 0


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("finetune run train.jsonl --task classification", "needs --labels COLUMN"),
        (
            "finetune run train.jsonl --task classification --labels label",
            "no column 'label'; the columns are text, topic; name yours with --labels",
        ),
        ("finetune run one.jsonl --task classification --labels topic", "all documents have the label 'x'"),
        (
            "finetune run empty.jsonl --task classification --labels topic",
            r"line 2: the text \(column 'text'\) is empty",
        ),
        ("finetune run a.txt --task classification --labels topic", "a text has no columns"),
        ("finetune run --task classification --labels topic", "there is no document; give files"),
        (
            "finetune run train.jsonl --task classification --labels topic --valid other.jsonl",
            "label 'q' is not one of",
        ),
        (
            "finetune run train.jsonl --task classification --labels topic --valid train.jsonl",
            "a file was given to train and to validate with; leave --valid out",
        ),
        (
            "finetune run train.jsonl --task classification --labels topic --corpus c",
            "--corpus has no effect on a class",
        ),
        ("finetune run train.jsonl --task classification --labels topic --lora-rank 2", "--lora-rank has no effect"),
        ("finetune run --labels topic --corpus c", "--labels has no effect on a language model; give --task class"),
        ("finetune run train.jsonl", "files has no effect on a language model; give --task classification"),
        ("finetune run", "needs --corpus DIR"),
        ("train --resume topics --train.max-steps 9", "settings of train cannot change"),
        ("train --resume topics --from 2", "leave --corpus, --base and --from out"),
        ("classify run a.txt", "not the folder of a classifier"),
        ("classify topics other.jsonl --labels topic", "the label 'q' is not one of those in training: x, y, z"),
        ("classify topics a.txt --labels topic", "a text has no columns"),
        ("classify topics train.jsonl --labels topic --per file", "a text has no columns; leave --per out"),
        ("classify topics", "there is no document; give files"),
        ("classify topics a.txt --memory-length -1", "memory-length"),
        ("embed run a.txt --out a.csv", "must end in .npy or .parquet"),
        ("embed run a.txt --out train.jsonl.npy --layer 9", "layer 9: must be 0"),
        ("embed run a.txt --per line --text-column body --out x.npy", "a text has no columns"),
        ("embed run a.txt a.txt --out x.npy", "a file was given twice"),
        ("embed run missing.txt --out x.npy", "missing.txt"),
    ],
)
def test_bad_input_is_refused(
    words: str, pattern: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.chdir(folder)
    assert_refused(folder, words, pattern, capfd)
