"""`txl prepare` and `prepare()`: text files, integers, named data sets, texts in memory, trained tokenizers."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from refusals import txl
from text_sources import make_files, without_digests

from transformer_xl.config import UserError
from transformer_xl.progress import StageBars
from transformer_xl.text.prepare import prepare as prepare_corpus
from transformer_xl.text.sources.named_datasets import DOWNLOADABLE
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig

TEXT = "".join(f"the cat no. {index % 41} sat,\nand sat; caf\u00e9 {index}\n" for index in range(307)).encode()


def prepare(*words: str | Path) -> dict[str, Any]:
    """Run `txl prepare WORDS --json`, which must succeed, and return the printed object."""
    prepared = txl("prepare", *words, "--json")
    assert prepared.status == 0
    return prepared.object


def token_ids(folder: str | Path, split: str) -> list[int]:
    return np.asarray(Corpus.open(folder).split(split).tokens[:]).tolist()


def decoded(folder: str | Path, *splits: str) -> bytes:
    """Return the concatenated text of the splits, decoded from their token ids."""
    tokenizer = Corpus.open(folder).tokenizer
    return b"".join(tokenizer.decode_bytes(token_ids(folder, split)) for split in splits)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with text.txt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(TEXT)


def test_text_is_split_at_line_boundaries_by_fraction() -> None:
    facts = prepare("text.txt", "--test-fraction", "0.1", "--split-method", "end")
    assert (facts["name"], facts["tokenizer"], facts["vocab_size"]) == ("text", "byte", 256)
    assert facts["out"] == "corpora/text"
    texts = {split: decoded("corpora/text", split) for split in ("train", "valid", "test")}
    assert b"".join(texts.values()) == TEXT
    assert all(text.endswith(b"\n") for text in texts.values())
    assert abs(len(texts["test"]) - len(TEXT) * 0.1) < 40 > abs(len(texts["valid"]) - len(TEXT) * 0.05)
    for split, text in texts.items():
        assert facts["splits"][split] == {
            "num_tokens": len(text), "num_bytes": len(text), "num_words": len(text.split()), "num_unknown": 0,
            "num_documents": 1,
        }  # fmt: skip


@pytest.mark.parametrize(("length", "recipe"), [(1023, "tiny "), (1024, "")])
def test_files_for_each_split_and_the_recipe_whose_batch_fits(length: int, recipe: str) -> None:
    """A batch of the default recipe has 32 x 64 = 2,048 tokens."""
    for name in ("a", "b", "c"):
        Path(name).write_text(name * length)
    prepared = txl("prepare", "--train", "a", "b", "--test", "c", "--out", "corpus")
    assert (prepared.status, prepared.err) == (0, "")
    assert "train" in prepared.out
    assert prepared.out.endswith(f"next: txl train {recipe}--corpus corpus\n")
    assert Corpus.open("corpus").splits == ("train", "test")
    assert decoded("corpus", "train") == b"a" * length + b"b" * length
    assert Corpus.open("corpus").split("train").num_documents == 2


def test_flags_that_select_decode_and_split_files() -> None:
    """Many files are drawn whole; a file that is not text is left out with a note, which counts and names it."""
    contents = {f"{index}.txt": f"caf\u00e9 {index}\n" for index in range(200)} | {"long.log": "no\n" * 9}
    folder = make_files(Path("d"), {name: text.encode("latin-1") for name, text in contents.items()})
    (folder / "0.png").write_bytes(b"\x89PNG\0")
    prepared = txl(
        *("prepare", "d", "--include", "*.txt", "--include", "*.png", "--exclude", "7.*", "--exclude", "e/*"),
        *("--encoding", "latin-1"),
    )
    left_out, unused = prepared.err.splitlines()
    assert prepared.status == 0
    assert left_out.startswith("note: left out 1 of 200 files: none is text: d/0.png (a picture)")
    assert unused.startswith("note: no file of the folders and patterns matches e/*")
    assert "d; files drawn at random with seed 1: 179 train, 10 valid, 10 test\n" in prepared.out
    lines = decoded("corpora/d", "train", "valid", "test").decode().splitlines(keepends=True)
    assert sorted(lines) == sorted(text for name, text in contents.items() if name not in ("7.txt", "long.log"))
    texts = {
        seed: prepare("d", "--exclude", "*.png", "--encoding", "latin-1", "--seed", seed, "--out", seed)
        for seed in "12"
    }
    assert decoded("1", "test") != decoded("2", "test")
    assert "seed 2" in texts["2"]["source"] == Corpus.open("2").source


def test_flags_of_the_word_tokenizer() -> None:
    facts = prepare("text.txt", "--tokenizer", "word", "--out", "plain")
    assert facts["splits"]["valid"]["num_unknown"] > 0 == facts["splits"]["train"]["num_unknown"]
    sizes = {
        flag: prepare("text.txt", "--tokenizer", "word", *flag.split(), "--out", f"c{flag}")["vocab_size"]
        for flag in ("--lowercase", "--split-punctuation", "--min-frequency 2", "--no-add-eos")
    }
    assert sizes["--lowercase"] == facts["vocab_size"]  # the text has no uppercase
    assert sizes["--split-punctuation"] != facts["vocab_size"]
    assert sizes["--min-frequency 2"] < facts["vocab_size"]
    assert sizes["--no-add-eos"] == facts["vocab_size"] - 1
    Path("words.txt").write_bytes(b"\xef\xbb\xbf<eos>\n<unk>\nthe\ncat\n")
    assert prepare("text.txt", "--tokenizer", "word", "--vocab-file", "words.txt", "--out", "file")["vocab_size"] == 4
    # the cat no. 0 sat, <eos> and: all words but the first two are unknown
    assert token_ids("file", "train")[:7] == [2, 3, 1, 1, 1, 0, 1]


def test_integers_from_arrays_and_text() -> None:
    rows = np.arange(7 * 11).reshape(7, 11) % 23
    np.save("music.npy", rows)
    end = ["--split-method", "end"]
    facts = prepare("music.npy", "--valid-fraction", "0.2", "--test-fraction", "0", *end)
    assert (facts["tokenizer"], facts["vocab_size"], facts["out"]) == ("integer", 24, "corpora/music")
    with_eos = np.concatenate([rows, np.full((7, 1), 23)], axis=1)  # 23, the largest id, ends each row
    assert token_ids("corpora/music", "train") == with_eos[:6].ravel().tolist()
    assert token_ids("corpora/music", "valid") == with_eos[6:].ravel().tolist()
    Path("proteins.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows.tolist()))
    flags = ["--tokenizer", "integer", "--vocab-size", "30", "--valid-fraction", "0.4", "--test-fraction", "0", *end]
    assert prepare("proteins.txt", *flags, "--out", "p")["vocab_size"] == 30
    assert decoded("p", "train", "valid") == Path("proteins.txt").read_bytes()


def test_integers_of_arrays_without_an_id_are_refused() -> None:
    for value, message in ((-2, r"'-2' is not an integer .*; remove it, renumber"), (30, "'30' is not an integer")):
        np.save("odd.npy", np.array([[1, 2, 3], [4, value, 6]] * 9))
        with pytest.raises(UserError, match=rf"odd.npy.*: byte \d+: {message}"):
            prepare_corpus("odd.npy", "new", vocab_size=31)


@pytest.fixture
def small_ptb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with short files of the data set ptb, whose checksums are not compared.

    The numbers of tokens are compared with expected ones, of which that of test is wrong: it has 2, not 5.
    """
    dataset = without_digests(DOWNLOADABLE["ptb"])
    changed = replace(dataset, expected_num_tokens={"train": 7, "valid": 3, "test": 5})
    monkeypatch.setitem(DOWNLOADABLE, "ptb", changed)
    texts = {"train": b"a N <unk>\n b a\n", "valid": b"b c\n", "test": b"d\n"}
    files = {f"ptb.{split}.txt.gz": gzip.compress(text) for split, text in texts.items()}
    return make_files(tmp_path / "downloaded", files)


def test_a_named_dataset_has_a_default_tokenizer(small_ptb: Path) -> None:
    prepared = txl("prepare", "ptb", "--data-dir", small_ptb, "--json")
    facts = prepared.object
    assert (facts["out"], facts["tokenizer"], facts["vocab_size"]) == ("corpora/ptb", "word", 7)
    # a n <unk> <eos> b a <eos>
    assert token_ids("corpora/ptb", "train") == [1, 3, 4, 0, 2, 1, 0]
    assert decoded("corpora/ptb", "train") == b"a n <unk>\nb a\n"
    assert prepared.err == "note: test has 2 tokens, but ptb should have 5; is this the right text?\n"


def test_flags_override_the_tokenizer_of_a_named_dataset(small_ptb: Path) -> None:
    assert txl("prepare", "ptb", "--data-dir", small_ptb, "--no-lowercase", "--out", "cased").err == ""
    assert decoded("cased", "train") == b"a N <unk>\nb a\n"
    facts = prepare("ptb", "--data-dir", small_ptb, "--tokenizer", "char", "--out", "c")
    assert decoded("c", "train") == b"a N <unk>\n b a\n"
    assert facts["vocab_size"] == len(set(b"a N <unk>\n b a\n")) + 256  # characters of train, and one token per byte


def test_progress_lines_only_of_stages_longer_than_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]  # the time that time.perf_counter returns, in seconds
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with StageBars() as bars:
        for stage, seconds in (("quick", 0.04), ("slow", 1.0)):
            for done in range(40):
                bars(stage, done, 100)
                clock[0] += seconds
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("slow: ") for line in lines)
    assert lines[0] == "slow: 10 of 100 bytes, 1 bytes/s, 0:01:30 left"


def test_documents_in_memory() -> None:
    """Texts are passed as strings instead of files; with fractions, or by split."""
    texts = ["one two\n", "caf\u00e9 one", "one two six\n"]
    corpus = prepare_corpus(out="joined", documents=texts, valid_fraction=0.3, test_fraction=0, split_method="end")
    assert decoded("joined", "train", "valid") == "".join(texts).encode()
    assert (corpus.name, corpus.split("train").num_documents) == ("joined", 3)
    corpus = prepare_corpus(out="by-split", documents={"train": texts[:2], "test": texts[2:]}, tokenizer="word")
    assert corpus.splits == ("train", "test")
    assert corpus.record.splits["test"].num_unknown == 1
    for documents, message in (
        ({"valid": ["a"]}, "has valid; give train"),
        ({"trian": ["a"]}, "has trian; give train"),
        (
            {"train": ["a"], "dev": ["a"], "validation": ["b"]},
            "has train, dev, validation, of which two are the valid split; give one",
        ),
    ):
        with pytest.raises(UserError, match=message):
            prepare_corpus(out="new", documents=documents)
    with pytest.raises(UserError, match="give the text in one way"):
        prepare_corpus("text.txt", "new", documents=texts)
    with pytest.raises(UserError, match="document_unit: Input should be 'file' or 'line'"):
        prepare_corpus("text.txt", "new", document_unit=cast(Any, "para"))
    with pytest.raises(UserError, match="word is trained already; leave add_eos=False out"):
        prepare_corpus("text.txt", "new", tokenizer=corpus.tokenizer, add_eos=False)
    again = prepare_corpus("text.txt", "again", tokenizer=corpus.tokenizer)
    assert again.record.tokenizer_sha256 == corpus.record.tokenizer_sha256


def test_progress_reports_all_bytes_of_training_and_writing() -> None:
    last: dict[str, tuple[int, int]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        last[stage] = (done, total)

    config = TokenizerConfig(kind="word", eos_token="<end>")
    corpus = prepare_corpus("text.txt", "c", tokenizer=config, min_frequency=2, progress=progress)
    assert corpus.tokenizer.to_json()["eos_token"] == "<end>"
    train = corpus.record.splits["train"].num_bytes
    whole = len(TEXT), len(TEXT)
    assert last == {"check": whole, "train tokenizer": (train, train), "write": whole}
