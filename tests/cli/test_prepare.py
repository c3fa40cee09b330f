"""`txl prepare`, as a user runs it: own text, numbers, a named corpus among own files, vocabularies that exist."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import Said, txl

from transformer_xl.cli import prepare as command
from transformer_xl.cli.prepare import _Bars
from transformer_xl.text.sources import named_corpora
from transformer_xl.text.token_store import Corpus

TEXT = "".join(f"the cat no. {place % 41} sat,\nand sat; caf\u00e9 {place}\n" for place in range(307)).encode()


def prepare(*words: str | Path) -> Said:
    return txl("prepare", *words)


def tokens(folder: str | Path, split: str) -> list[int]:
    return np.asarray(Corpus.open(folder).split(split).tokens[:]).tolist()


def text(folder: str | Path, split: str) -> bytes:
    corpus = Corpus.open(folder)
    return corpus.tokenizer.decode_bytes(tokens(folder, split))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(TEXT)
    return tmp_path


def test_bytes_of_a_cut_text() -> None:
    found = prepare("text.txt", "--test-fraction", "0.1", "--json").object
    assert (found["name"], found["tokenizer"], found["vocab_size"]) == ("text", "bytes", 256)
    assert found["out"] == "corpora/text"
    parts = {split: text("corpora/text", split) for split in ("train", "valid", "test")}
    assert b"".join(parts.values()) == TEXT
    assert all(part.endswith(b"\n") for part in parts.values())
    assert abs(len(parts["test"]) - len(TEXT) * 0.1) < 40 > abs(len(parts["valid"]) - len(TEXT) * 0.05)
    for split, part in parts.items():
        assert found["splits"][split] == {
            "tokens": len(part), "bytes": len(part), "words": len(part.split()), "unknown": 0, "documents": 1
        }  # fmt: skip


def test_given_splits() -> None:
    for name in ("a", "b", "c"):
        Path(name).write_text(name * 7)
    said = prepare("--train", "a", "b", "--test", "c", "--out", "corpus")
    assert (said.status, said.err) == (0, "")
    assert "train" in said.out
    assert said.out.endswith("next: txl train small --corpus corpus\n")
    assert Corpus.open("corpus").splits == ("train", "test")
    assert text("corpus", "train") == b"aaaaaaabbbbbbb"
    assert Corpus.open("corpus").split("train").num_documents == 2


def test_lines_as_documents() -> None:
    assert prepare("--train", "text.txt", "--documents", "lines", "--out", "c").status == 0
    assert Corpus.open("c").split("train").num_documents == TEXT.count(b"\n")


def test_any_number_of_workers_gives_the_same() -> None:
    for workers in ("1", "2"):
        words = ["text.txt", "--vocabulary", "words", "--documents", "lines", "--workers", workers]
        assert prepare(*words, "--out", f"c{workers}").status == 0
    assert (Path("c1") / "corpus.json").read_bytes() == (Path("c2") / "corpus.json").read_bytes()


def test_words_and_their_flags() -> None:
    assert prepare("text.txt", "--vocabulary", "words", "--out", "plain").status == 0
    counts = Corpus.open("plain").record.splits
    assert counts["valid"].num_unknown > 0 == counts["train"].num_unknown
    size = Corpus.open("plain").tokenizer.vocab_size
    sizes = {}
    for flags in (["--lowercase"], ["--punctuation"], ["--min-count", "2"], ["--max-size", "11"], ["--no-end-of-line"]):
        found = prepare("text.txt", "--vocabulary", "words", *flags, "--out", f"c{flags[0]}", "--json").object
        sizes[flags[0]] = found["vocab_size"]
    assert sizes["--lowercase"] == size  # there are no large letters
    assert sizes["--punctuation"] != size
    assert sizes["--min-count"] < size
    assert sizes["--max-size"] == 11 + 2
    assert sizes["--no-end-of-line"] == size - 1
    words = b"<eos>\n<unk>\nthe\ncat\n"
    Path("words.txt").write_bytes(words)
    found = prepare(
        "text.txt", "--vocabulary", "words", "--words-file", "words.txt", "--out", "listed", "--json"
    ).object
    assert found["vocab_size"] == 4
    assert tokens("listed", "train")[:7] == [2, 3, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_other_kinds_come_back_exactly(kind: str) -> None:
    flags = ["--max-size", "300"] if kind == "bpe" else []
    assert prepare("text.txt", "--vocabulary", kind, *flags, "--out", "c").status == 0
    assert b"".join(text("c", split) for split in ("train", "valid", "test")) == TEXT


def test_a_vocabulary_that_exists_reads_further_text() -> None:
    assert prepare("text.txt", "--vocabulary", "words", "--out", "first").status == 0
    Path("more.txt").write_bytes(b"the dog sat,\nthe cat\n")
    for path in ("first", "first/txl_tokenizer.json"):
        found = prepare("--train", "more.txt", "--vocabulary", path, "--out", f"{path}-more", "--json")
        assert found.object["splits"]["train"]["unknown"] == 1
        assert (Path(f"{path}-more") / "txl_tokenizer.json").read_bytes() == Path(
            "first/txl_tokenizer.json"
        ).read_bytes()


def test_numbers() -> None:
    rows = np.arange(7 * 11).reshape(7, 11) % 23
    np.save("music.npy", rows)
    found = prepare("music.npy", "--valid-fraction", "0.2", "--test-fraction", "0", "--json").object
    assert (found["tokenizer"], found["vocab_size"], found["out"]) == ("integers", 24, "corpora/music")
    ended = np.concatenate([rows, np.full((7, 1), 23)], axis=1)
    assert tokens("corpora/music", "train") == ended[:6].ravel().tolist()
    assert tokens("corpora/music", "valid") == ended[6:].ravel().tolist()
    Path("proteins.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows.tolist()))
    words = ["proteins.txt", "--vocabulary", "integers", "--values", "29", "--valid-fraction", "0.4"]
    assert prepare(*words, "--test-fraction", "0", "--out", "p").status == 0
    assert text("p", "train") + text("p", "valid") == Path("proteins.txt").read_bytes()
    assert Corpus.open("p").tokenizer.vocab_size == 30


@pytest.fixture
def small_ptb(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with other texts in the place of ptb's, and a corpus that does not mind."""
    folder = place / "mine"
    folder.mkdir()
    for split, content in {"train": b"a N <unk>\n b a\n", "valid": b"b c\n", "test": b"d\n"}.items():
        (folder / f"ptb.{split}.txt.gz").write_bytes(gzip.compress(content))
    corpus = named_corpora.DISTRIBUTED["ptb"]
    splits = {
        split: tuple(replace(part, text=replace(part.text, num_bytes=None, checksum=None, urls=())) for part in of)
        for split, of in corpus.splits.items()
    }
    known = {"train": 7, "valid": 3, "test": 5}
    monkeypatch.setitem(named_corpora.DISTRIBUTED, "ptb", replace(corpus, splits=splits, known_tokens=known))
    return folder


def test_a_named_corpus_brings_its_vocabulary(small_ptb: Path) -> None:
    said = prepare("ptb", "--source", small_ptb, "--json")
    found = said.object
    assert (found["out"], found["tokenizer"], found["vocab_size"]) == ("corpora/ptb", "words", 7)
    assert tokens("corpora/ptb", "train") == [1, 3, 4, 0, 2, 1, 0]
    assert text("corpora/ptb", "train") == b"a n <unk>\nb a\n"
    assert said.err == "note: test has 2 tokens, while ptb is known to have 5; is it that text?\n"


def test_its_options_can_be_changed(small_ptb: Path) -> None:
    said = prepare("ptb", "--source", small_ptb, "--no-lowercase", "--out", "large", "--json")
    assert text("large", "train") == b"a N <unk>\nb a\n"
    assert said.err == ""
    found = prepare("ptb", "--source", small_ptb, "--vocabulary", "characters", "--out", "c", "--json").object
    assert text("c", "train") == b"a N <unk>\n b a\n"
    assert found["vocab_size"] == len(set(b"a N <unk>\n b a\n")) + 256  # learned from train alone


def test_glued_punctuation_is_noticed() -> None:
    said = prepare("text.txt", "--vocabulary", "words", "--max-size", "19", "--out", "a")
    assert "of the 21 most frequent words end in punctuation (sat,, sat;); --punctuation takes it apart" in said.err
    for flags in (["--punctuation"], ["--no-punctuation"]):
        assert prepare("text.txt", "--vocabulary", "words", *flags, "--out", f"c{flags[0]}").err == ""
    assert prepare("text.txt", "--vocabulary", "a", "--out", "b").err == ""  # where it can no longer be given


def test_a_text_in_two_splits_is_noticed() -> None:
    said = prepare("--train", "text.txt", "--valid", "./text.txt", "--out", "c", "--json")
    assert said.object["splits"]["valid"]["bytes"] == len(TEXT)
    assert said.err == "note: text.txt is in train and valid\n"


def test_bars_are_shown_after_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with _Bars() as bars:
        for what in ("quick", "slow"):
            for done in range(40):
                bars(what, done, 100)
                clock[0] += 0.04 if what == "quick" else 1.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("slow: ") for line in lines)
    assert lines[0] == "slow: 12 of 100 bytes, 1 bytes/s, 0:01:28 left"


def test_bars_cover_learning_and_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, tuple[int, int]] = {}

    class Told(_Bars):
        def __call__(self, what: str, done: int, total: int) -> None:
            told[what] = (done, total)

    monkeypatch.setattr(command, "_Bars", Told)
    assert prepare("text.txt", "--vocabulary", "words", "--out", "c").status == 0
    train = Corpus.open("c").record.splits["train"].bytes
    assert told == {"learn": (train, train), "write": (len(TEXT), len(TEXT))}
