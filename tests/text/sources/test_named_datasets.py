"""Named data sets: the tables about them are sound, and each is split and tokenized as it should be."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.config import UserError
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import SPLITS, Document, TextSource
from transformer_xl.text.prepare import find_text
from transformer_xl.text.sources.dataset_files import TextFile
from transformer_xl.text.sources.named_datasets import DATASET_NAMES, DISTRIBUTED, NamedDataset, open_dataset
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers.training import train_tokenizer

DIGITS = {"sha256": 64, "sha1": 40, "md5": 32}


def text_of(documents: Iterable[Document]) -> bytes:
    return b"".join(chunk for document in documents for chunk in document.chunks)


def names_of(documents: Iterable[Document]) -> list[str]:
    return [Path(document.name).name for document in documents]


def sha256_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def make(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def texts_of(corpus: NamedDataset) -> list[TextFile]:
    texts = [part.text for parts in corpus.splits.values() for part in parts]
    return [*texts, *([corpus.vocab_file] if corpus.vocab_file else [])]


def unchecked(corpus: NamedDataset) -> NamedDataset:
    """The same corpus, of texts whose contents are not known."""

    def plain(text: TextFile) -> TextFile:
        return replace(text, num_bytes=None, checksum=None, urls=())

    return replace(
        corpus,
        splits={
            split: tuple(replace(part, text=plain(part.text)) for part in of) for split, of in corpus.splits.items()
        },
        vocab_file=corpus.vocab_file and plain(corpus.vocab_file),
    )


def written(source: TextSource, folder: Path) -> Corpus:
    documents = [document for split in source.tokenizer_splits for document in source.splits[split]]
    tokenizer = train_tokenizer(source.tokenizer, documents)
    return write_corpus(
        folder,
        source.splits,
        name=source.name,
        source=source.description,
        tokenizer=tokenizer,
        document_unit=source.document_unit,
    )


def test_the_names() -> None:
    assert DATASET_NAMES == ("enwik8", "text8", "wikitext-103", "wikitext-2", "ptb", "lm1b", "python-stdlib")


@pytest.mark.parametrize("corpus", DISTRIBUTED.values(), ids=lambda corpus: corpus.name)
def test_what_is_written_down_is_sound(corpus: NamedDataset) -> None:
    assert corpus.archive
    remotes = [corpus.archive, *filter(None, (text.remote for text in texts_of(corpus)))]
    assert all(re.match(r"https?://[^/]+/", url) for remote in remotes for url in remote.urls)
    assert all(len(set(remote.urls)) == len(remote.urls) for remote in remotes)
    for checksum in (thing.checksum for thing in (*remotes, *texts_of(corpus))):
        if checksum:
            algorithm, _, digits = checksum.partition(":")
            assert re.fullmatch(rf"[0-9a-f]{{{DIGITS[algorithm]}}}", digits)
    assert tuple(corpus.splits) == SPLITS
    assert bool(corpus.tokenizer.vocab_file) is False  # it is found with the texts
    assert set(corpus.expected_num_tokens) <= set(SPLITS)


def test_published_figures_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    for corpus in DISTRIBUTED.values():
        assert corpus.archive
        things = [corpus.archive, *(text for text in texts_of(corpus) if text.checksum)]
        for thing in things:
            assert (thing.checksum or "").partition(":")[2] in page
            assert f"{thing.num_bytes:,}" in page
        assert all(f"{tokens:,}" in page for tokens in corpus.expected_num_tokens.values())
        remotes = [corpus.archive, *filter(None, (text.remote for text in texts_of(corpus)))]
        hosts = {url.split("/")[2] for remote in remotes for url in remote.urls}
        assert [host for host in hosts if host not in page] == []


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_a_hundred_million_bytes_are_cut_in_three(name: str) -> None:
    splits = DISTRIBUTED[name].splits
    assert [(part.start, part.stop) for of in splits.values() for part in of] == [
        (0, 90_000_000), (90_000_000, 95_000_000), (95_000_000, 100_000_000)
    ]  # fmt: skip
    assert {part.text.num_bytes for of in splits.values() for part in of} == {100_000_000}


def test_text8_is_cut_and_closed(tmp_path: Path) -> None:
    """At a millionth of its size."""
    letters = b"abcdefghijklmnopqrstuvwxyz ab"
    folder = make(tmp_path, {"text8.gz": gzip.compress(letters * 3 + b"c" * 13)})
    corpus = unchecked(DISTRIBUTED["text8"])
    small = {
        split: tuple(replace(part, start=part.start // 10**6, stop=(part.stop or 0) // 10**6) for part in of)
        for split, of in corpus.splits.items()
    }
    source = replace(corpus, splits=small).open(folder)
    assert [text_of(source.splits[split]) for split in SPLITS] == [letters * 3 + b"ccc", b"c" * 5, b"c" * 5]
    result = written(source, tmp_path / "out")
    assert result.tokenizer.vocab_size == 27
    with pytest.raises(UserError, match="!"):
        result.tokenizer.encode("a!")


@pytest.mark.parametrize(("name", "words"), [("wikitext-103", 7), ("wikitext-2", 9), ("ptb", 8)])
def test_line_ends_are_words_and_counted_splits_differ(tmp_path: Path, name: str, words: int) -> None:
    """`<unk>` is where its count puts it; WikiText-103 learns its words from train alone; only PTB folds case."""
    train, valid, test = b" a N\n \n b a <unk> a\n", b" n c\n", b" d"
    files = {"train.txt": train, "valid.txt": valid, "test.txt": test}
    source = unchecked(DISTRIBUTED[name]).open(make(tmp_path / "mine", files))
    corpus = written(source, tmp_path / "out")
    expected = {
        "wikitext-103": ["\n", "a", "N", "b", "<unk>"],
        "wikitext-2": ["\n", "a", "N", "b", "<unk>", "n", "c", "d"],
        "ptb": ["\n", "a", "n", "b", "<unk>", "c", "d"],
    }[name]
    found = corpus.tokenizer
    assert [found.decode([index]) for index in range(found.vocab_size)] == expected
    assert found.bos_token_id == 0
    assert corpus.split("train").num_tokens == 6 + 3
    assert np.asarray(corpus.split("test").tokens[:]).tolist()[1:] == [0]  # the last line is closed
    assert corpus.record.splits["valid"].num_unknown == (2 if name == "wikitext-103" else 0)


def lm1b_files() -> dict[str, bytes]:
    training, heldout = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
    files = {f"{training}/news.en-{number:05}-of-00100": b"The %d\nx The\n" % number for number in range(100)}
    files |= {f"{heldout}/news.en.heldout-{number:05}-of-00050": b"x %d\n" % number for number in range(3)}
    return {**files, "1b_word_vocab.txt": b"<S> 3\n<UNK> 2\nThe 1\nx 1\n7 1\n"}


def test_lm1b_is_sentences_between_marks(tmp_path: Path) -> None:
    source = unchecked(DISTRIBUTED["lm1b"]).open(make(tmp_path / "mine", lm1b_files()))
    assert [text_of(source.splits[split]) for split in ("valid", "test")] == [b"x 1\n", b"x 0\n"]
    assert len(source.splits["train"]) == 99
    assert text_of(source.splits["train"][:2]) == b"The 1\nx The\nThe 2\nx The\n"
    corpus = written(source, tmp_path / "out")
    assert (corpus.tokenizer.vocab_size, corpus.tokenizer.bos_token_id) == (5, 0)
    train = corpus.split("train")
    assert train.num_documents == 2 * 99
    # inputs begin with the mark, each sentence of n words gives n + 1 targets: its words and the mark
    assert np.asarray(train.tokens[:12]).tolist() == [2, 1, 0, 3, 2, 0] * 2
    assert np.asarray(train.tokens[36:42]).tolist() == [2, 4, 0, 3, 2, 0]
    assert corpus.record.splits["train"].num_unknown == 98


def test_another_tokenizer_needs_no_vocab_file(tmp_path: Path) -> None:
    files = lm1b_files()
    words = files.pop("1b_word_vocab.txt")
    folder = make(tmp_path / "mine", files)
    with pytest.raises(UserError, match=r"no 1b_word_vocab.txt there for lm1b"):
        unchecked(DISTRIBUTED["lm1b"]).open(folder)
    source = unchecked(DISTRIBUTED["lm1b"]).open(folder, kind="byte")
    assert source.tokenizer.kind == "byte"
    assert (source.document_unit, source.tokenizer_splits, source.expected_num_tokens) == ("line", ("train",), {})
    make(folder, {"1b_word_vocab.txt.gz": gzip.compress(words)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_CACHE", str(tmp_path / "cache"))
        source = unchecked(DISTRIBUTED["lm1b"]).open(folder)
    assert Path(source.tokenizer.vocab_file or "").read_bytes() == words


def test_a_wrong_text_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, {"ptb.train.txt": b"no\n", "ptb.valid.txt": b"no\n", "ptb.test.txt": b"no\n"})
    with pytest.raises(
        UserError, match=r"ptb.train.txt: 3 bytes long, expected 5,101,618 for ptb; .* txl prepare --train"
    ):
        open_dataset("ptb", tmp_path)


def test_standard_library_has_no_tests_and_no_overlap() -> None:
    source = find_text(["python-stdlib"])
    names = {split: [document.name for document in documents] for split, documents in source.splits.items()}
    everything = [name for of in names.values() for name in of]
    assert source.name == "python-stdlib"
    assert all(of == sorted(of, key=sha256_of) for of in names.values())
    assert all(of != sorted(of) for of in names.values())
    assert len(everything) == len(set(everything)) > 300
    assert "argparse.py" in everything
    assert "json/decoder.py" in everything
    folders = {folder for name in everything for folder in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert len(names["train"]) > 8 * len(names["valid"]) > 0
    assert len(names["train"]) > 8 * len(names["test"]) > 0
    assert text_of(source.splits["test"])


def test_standard_library_split_is_drawn_from_the_path_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned by hand with sha256sum: first 16 hex digits below e666... are train, below f333... valid, others test.

    Within a split the order is that of the same digits.
    """
    files = {f"m{index}.py": b"x" for index in range(40)}
    make(tmp_path, {**files, "test/t.py": b"x", "a/tests/t.py": b"x", "a/readme.txt": b"x", "empty.py": b""})
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    splits = find_text(["python-stdlib"]).splits
    assert names_of(splits["valid"]) == ["m27.py", "m12.py", "m4.py", "m18.py"]
    assert names_of(splits["test"]) == ["m11.py", "m9.py", "m28.py"]
    assert len(names_of(splits["train"])) == 40 - 4 - 3


def test_python_without_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"too little source code to split \(0 files in .*pass your own files"):
        find_text(["python-stdlib"])
