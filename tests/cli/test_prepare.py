"""`txl prepare` and `prepare()`: files, numbers, named data sets, texts in memory, trained tokenizers."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import Said, txl

from transformer_xl.config import UserError
from transformer_xl.progress import StageBars
from transformer_xl.text.prepare import prepare as prepare_corpus
from transformer_xl.text.sources import named_datasets
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import TokenizerConfig

TEXT = "".join(f"the cat no. {index % 41} sat,\nand sat; caf\u00e9 {index}\n" for index in range(307)).encode()


def prepare(*words: str | Path) -> Said:
    return txl("prepare", *words)


def tokens(folder: str | Path, split: str) -> list[int]:
    return np.asarray(Corpus.open(folder).split(split).tokens[:]).tolist()


def text(folder: str | Path, split: str) -> bytes:
    corpus = Corpus.open(folder)
    return corpus.tokenizer.decode_bytes(tokens(folder, split))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(TEXT)
    return tmp_path


def test_bytes_of_a_cut_text() -> None:
    found = prepare("text.txt", "--test-fraction", "0.1", "--json").object
    assert (found["name"], found["tokenizer"], found["vocab_size"]) == ("text", "byte", 256)
    assert found["out"] == "corpora/text"
    parts = {split: text("corpora/text", split) for split in ("train", "valid", "test")}
    assert b"".join(parts.values()) == TEXT
    assert all(part.endswith(b"\n") for part in parts.values())
    assert abs(len(parts["test"]) - len(TEXT) * 0.1) < 40 > abs(len(parts["valid"]) - len(TEXT) * 0.05)
    for split, part in parts.items():
        assert found["splits"][split] == {
            "num_tokens": len(part), "num_bytes": len(part), "num_words": len(part.split()), "num_unknown": 0,
            "num_documents": 1,
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
    assert prepare("--train", "text.txt", "--document-unit", "line", "--out", "c").status == 0
    assert Corpus.open("c").split("train").num_documents == TEXT.count(b"\n")


def test_any_number_of_workers_gives_the_same() -> None:
    for workers in ("1", "2"):
        words = ["text.txt", "--tokenizer", "word", "--document-unit", "line", "--num-workers", workers]
        assert prepare(*words, "--out", f"c{workers}").status == 0
    assert (Path("c1") / "corpus.json").read_bytes() == (Path("c2") / "corpus.json").read_bytes()


def test_words_and_their_flags() -> None:
    assert prepare("text.txt", "--tokenizer", "word", "--out", "plain").status == 0
    counts = Corpus.open("plain").record.splits
    assert counts["valid"].num_unknown > 0 == counts["train"].num_unknown
    size = Corpus.open("plain").tokenizer.vocab_size
    sizes = {}
    for flags in (
        ["--lowercase"],
        ["--split-punctuation"],
        ["--min-frequency", "2"],
        ["--vocab-size", "11"],
        ["--no-add-eos"],
    ):
        found = prepare("text.txt", "--tokenizer", "word", *flags, "--out", f"c{flags[0]}", "--json").object
        sizes[flags[0]] = found["vocab_size"]
    assert sizes["--lowercase"] == size  # there are no large letters
    assert sizes["--split-punctuation"] != size
    assert sizes["--min-frequency"] < size
    assert sizes["--vocab-size"] == 11
    assert sizes["--no-add-eos"] == size - 1
    words = b"<eos>\n<unk>\nthe\ncat\n"
    Path("words.txt").write_bytes(words)
    found = prepare("text.txt", "--tokenizer", "word", "--vocab-file", "words.txt", "--out", "listed", "--json").object
    assert found["vocab_size"] == 4
    assert tokens("listed", "train")[:7] == [2, 3, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_other_kinds_come_back_exactly(kind: str) -> None:
    flags = ["--vocab-size", "300"] if kind == "bpe" else []
    assert prepare("text.txt", "--tokenizer", kind, *flags, "--out", "c").status == 0
    assert b"".join(text("c", split) for split in ("train", "valid", "test")) == TEXT


def test_a_trained_tokenizer_encodes_further_text() -> None:
    assert prepare("text.txt", "--tokenizer", "word", "--out", "first").status == 0
    Path("more.txt").write_bytes(b"the dog sat,\nthe cat\n")
    for path in ("first", "first/txl_tokenizer.json"):
        found = prepare("--train", "more.txt", "--tokenizer", path, "--out", f"{path}-more", "--json")
        assert found.object["splits"]["train"]["num_unknown"] == 1
        assert (Path(f"{path}-more") / "txl_tokenizer.json").read_bytes() == Path(
            "first/txl_tokenizer.json"
        ).read_bytes()


def test_numbers() -> None:
    rows = np.arange(7 * 11).reshape(7, 11) % 23
    np.save("music.npy", rows)
    found = prepare("music.npy", "--valid-fraction", "0.2", "--test-fraction", "0", "--json").object
    assert (found["tokenizer"], found["vocab_size"], found["out"]) == ("integer", 24, "corpora/music")
    ended = np.concatenate([rows, np.full((7, 1), 23)], axis=1)
    assert tokens("corpora/music", "train") == ended[:6].ravel().tolist()
    assert tokens("corpora/music", "valid") == ended[6:].ravel().tolist()
    Path("proteins.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows.tolist()))
    words = ["proteins.txt", "--tokenizer", "integer", "--vocab-size", "30", "--valid-fraction", "0.4"]
    assert prepare(*words, "--test-fraction", "0", "--out", "p").status == 0
    assert text("p", "train") + text("p", "valid") == Path("proteins.txt").read_bytes()
    assert Corpus.open("p").tokenizer.vocab_size == 30


@pytest.fixture
def small_ptb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with other texts instead of those of ptb, and a ptb without checksums."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, content in {"train": b"a N <unk>\n b a\n", "valid": b"b c\n", "test": b"d\n"}.items():
        (folder / f"ptb.{split}.txt.gz").write_bytes(gzip.compress(content))
    corpus = named_datasets.DISTRIBUTED["ptb"]
    splits = {
        split: tuple(replace(part, text=replace(part.text, num_bytes=None, checksum=None, urls=())) for part in of)
        for split, of in corpus.splits.items()
    }
    known = {"train": 7, "valid": 3, "test": 5}
    monkeypatch.setitem(named_datasets.DISTRIBUTED, "ptb", replace(corpus, splits=splits, expected_num_tokens=known))
    return folder


def test_a_named_dataset_has_its_own_tokenizer(small_ptb: Path) -> None:
    said = prepare("ptb", "--data-dir", small_ptb, "--json")
    found = said.object
    assert (found["out"], found["tokenizer"], found["vocab_size"]) == ("corpora/ptb", "word", 7)
    assert tokens("corpora/ptb", "train") == [1, 3, 4, 0, 2, 1, 0]
    assert text("corpora/ptb", "train") == b"a n <unk>\nb a\n"
    assert said.err == "note: test has 2 tokens, but ptb should have 5; is this the right text?\n"


def test_its_tokenizer_can_be_changed(small_ptb: Path) -> None:
    said = prepare("ptb", "--data-dir", small_ptb, "--no-lowercase", "--out", "large", "--json")
    assert text("large", "train") == b"a N <unk>\nb a\n"
    assert said.err == ""
    found = prepare("ptb", "--data-dir", small_ptb, "--tokenizer", "char", "--out", "c", "--json").object
    assert text("c", "train") == b"a N <unk>\n b a\n"
    assert found["vocab_size"] == len(set(b"a N <unk>\n b a\n")) + 256  # learned from train alone


def test_glued_punctuation_is_noticed() -> None:
    said = prepare("text.txt", "--tokenizer", "word", "--vocab-size", "21", "--out", "a")
    assert "of the 21 most frequent words end in punctuation" in said.err
    assert "--split-punctuation" in said.err
    for flags in (["--split-punctuation"], ["--no-split-punctuation"]):
        assert prepare("text.txt", "--tokenizer", "word", *flags, "--out", f"c{flags[0]}").err == ""
    assert prepare("text.txt", "--tokenizer", "a", "--out", "b").err == ""  # where it can no longer be given


def test_a_text_in_two_splits_is_noticed() -> None:
    said = prepare("--train", "text.txt", "--valid", "./text.txt", "--out", "c", "--json")
    assert said.object["splits"]["valid"]["num_bytes"] == len(TEXT)
    assert said.err == "note: text.txt is in train and valid\n"


def test_bars_are_shown_after_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with StageBars() as bars:
        for what in ("quick", "slow"):
            for done in range(40):
                bars(what, done, 100)
                clock[0] += 0.04 if what == "quick" else 1.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("slow: ") for line in lines)
    assert lines[0] == "slow: 12 of 100 bytes, 1 bytes/s, 0:01:28 left"


def test_documents_in_memory() -> None:
    texts = ["one two\n", "caf\u00e9 one", "one two six\n"]
    corpus = prepare_corpus(out="whole", documents=texts, valid_fraction=0.3, test_fraction=0)
    assert text("whole", "train") + text("whole", "valid") == "".join(texts).encode()
    assert (corpus.name, corpus.split("train").num_documents) == ("whole", 3)
    corpus = prepare_corpus(out="given", documents={"train": texts[:2], "test": texts[2:]}, tokenizer="word")
    assert corpus.splits == ("train", "test")
    assert corpus.record.splits["test"].num_unknown == 1
    for wrong, message in ((({"valid": ["a"]}), "no split 'train'"), ({"trian": ["a"]}, "did you mean 'train'")):
        with pytest.raises(UserError, match=message):
            prepare_corpus(out="new", documents=wrong)
    with pytest.raises(UserError, match="both documents and files"):
        prepare_corpus("text.txt", "new", documents=texts)
    with pytest.raises(UserError, match="word is trained already; leave --no-add-eos out"):
        prepare_corpus("text.txt", "new", tokenizer=corpus.tokenizer, add_eos=False)
    again = prepare_corpus("text.txt", "again", tokenizer=corpus.tokenizer)
    assert again.record.tokenizer_sha256 == corpus.record.tokenizer_sha256


def test_progress_covers_training_and_writing() -> None:
    calls: dict[str, tuple[int, int]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        calls[stage] = (done, total)

    config = TokenizerConfig(kind="word", eos_token="<end>")
    corpus = prepare_corpus("text.txt", "c", tokenizer=config, min_frequency=2, progress=progress)
    assert corpus.tokenizer.to_json()["eos_token"] == "<end>"
    train = corpus.record.splits["train"].num_bytes
    assert calls == {"train tokenizer": (train, train), "write": (len(TEXT), len(TEXT))}
