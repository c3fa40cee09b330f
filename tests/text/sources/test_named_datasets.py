"""Tests of named data sets: their table is consistent, and each is split and tokenized as published."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from text_sources import make_files, names_of, text_of, without_digests

from transformer_xl.config import UserError
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import SPLITS, TextSource
from transformer_xl.text.prepare import find_text
from transformer_xl.text.sources.download import RemoteFile, TextFile
from transformer_xl.text.sources.named_datasets import DATASET_NAMES, DOWNLOADABLE, NamedDataset
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers.training import train_tokenizer

# Hexadecimal digits of a checksum by algorithm.
NUM_DIGITS = {"sha256": 64, "sha1": 40, "md5": 32}


def texts_of(dataset: NamedDataset) -> list[TextFile]:
    texts = [file.text for files in dataset.files.values() for file in files]
    return [*texts, *filter(None, [dataset.vocab_file])]


def remotes_of(dataset: NamedDataset) -> list[RemoteFile]:
    return list(filter(None, [dataset.archive, *(text.remote for text in texts_of(dataset))]))


def write(source: TextSource, folder: Path) -> Corpus:
    documents = [document for split in source.tokenizer_splits for document in source.splits[split]]
    tokenizer = train_tokenizer(source.tokenizer, documents)
    return write_corpus(
        folder, source.splits, name=source.name, source="", tokenizer=tokenizer, document_unit=source.document_unit
    )


@pytest.mark.parametrize("dataset", DOWNLOADABLE.values(), ids=lambda dataset: dataset.name)
def test_table_entries_are_well_formed_and_documented(dataset: NamedDataset) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    assert dataset.archive
    for remote in remotes_of(dataset):
        assert len(set(remote.urls)) == len(remote.urls)
        hosts = [re.match(r"https?://([^/]+)/", url) for url in remote.urls]
        assert all(host and host[1] in page for host in hosts)
    for digest in filter(None, [dataset.archive.digest, *(text.digest for text in texts_of(dataset))]):
        algorithm, _, digits = digest.checksum.partition(":")
        assert re.fullmatch(rf"[0-9a-f]{{{NUM_DIGITS[algorithm]}}}", digits)
        assert digits in page
        assert f"{digest.num_bytes:,}" in page
    assert tuple(dataset.files) == SPLITS
    assert all(f"{num_tokens:,}" in page for num_tokens in dataset.expected_num_tokens.values())


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_enwik8_and_text8_are_split_at_90_and_95_million_bytes(name: str) -> None:
    files = [file for files in DOWNLOADABLE[name].files.values() for file in files]
    assert [(file.start, file.stop) for file in files] == [
        (0, 90_000_000), (90_000_000, 95_000_000), (95_000_000, 100_000_000)
    ]  # fmt: skip
    assert {file.text.digest.num_bytes for file in files if file.text.digest} == {100_000_000}


def test_text8_has_27_characters_and_refuses_others(tmp_path: Path) -> None:
    """A text of a millionth of the size of text8, split at the same fractions."""
    letters = b"abcdefghijklmnopqrstuvwxyz ab"  # 29 bytes; the text has 3 * 29 + 13 = 100
    folder = make_files(tmp_path, {"text8.gz": gzip.compress(letters * 3 + b"c" * 13)})
    dataset = without_digests(DOWNLOADABLE["text8"])
    small = {
        split: tuple(replace(file, start=file.start // 10**6, stop=(file.stop or 0) // 10**6) for file in files)
        for split, files in dataset.files.items()
    }
    source = replace(dataset, files=small).open(folder)
    assert [text_of(source.splits[split]) for split in SPLITS] == [letters * 3 + b"ccc", b"c" * 5, b"c" * 5]
    corpus = write(source, tmp_path / "out")
    assert corpus.tokenizer.vocab_size == 27
    with pytest.raises(UserError, match="!"):
        corpus.tokenizer.encode("a!")


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [
        ("wikitext-103", ["\n", "a", "N", "b", "<unk>"]),
        ("wikitext-2", ["\n", "a", "N", "b", "<unk>", "n", "c", "d"]),
        ("ptb", ["\n", "a", "n", "b", "<unk>", "c", "d"]),
    ],
)
def test_word_datasets_have_the_published_vocabulary(tmp_path: Path, name: str, vocabulary: list[str]) -> None:
    """WikiText-103 has only the words of train; PTB is lowercased; `<unk>` is sorted by its count in all data sets.

    The token <eos> is decoded to a newline.
    """
    files = {"train.txt": b" a N\n \n b a <unk> a\n", "valid.txt": b" n c\n", "test.txt": b" d"}
    source = without_digests(DOWNLOADABLE[name]).open(make_files(tmp_path / "mine", files))
    corpus = write(source, tmp_path / "out")
    tokenizer = corpus.tokenizer
    assert [tokenizer.decode([index]) for index in range(tokenizer.vocab_size)] == vocabulary
    assert tokenizer.bos_token_id == 0
    assert corpus.split("train").num_tokens == 6 + 3  # words and newlines
    assert np.asarray(corpus.split("test").tokens[:]).tolist()[1:] == [0]  # a newline is added to the last line
    # The words n and c of valid are unknown if only train defines the vocabulary.
    assert corpus.record.splits["valid"].num_unknown == (2 if name == "wikitext-103" else 0)


def lm1b_files() -> dict[str, bytes]:
    """Files of the data set lm1b: file i contains the number i, and the vocabulary file a count for each word."""
    training, heldout = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
    files = {f"{training}/news.en-{index:05}-of-00100": b"The %d\nx The\n" % index for index in range(100)}
    files |= {f"{heldout}/news.en.heldout-{index:05}-of-00050": b"x %d\n" % index for index in range(3)}
    return {**files, "1b_word_vocab.txt": b"<S> 3\n<UNK> 2\nThe 1\nx 1\n7 1\n"}


def test_lm1b_documents_are_sentences_that_end_in_the_token_s(tmp_path: Path) -> None:
    source = without_digests(DOWNLOADABLE["lm1b"]).open(make_files(tmp_path / "mine", lm1b_files()))
    assert [text_of(source.splits[split]) for split in ("valid", "test")] == [b"x 1\n", b"x 0\n"]
    assert len(source.splits["train"]) == 99
    assert text_of(source.splits["train"][:2]) == b"The 1\nx The\nThe 2\nx The\n"
    corpus = write(source, tmp_path / "out")
    assert (corpus.tokenizer.vocab_size, corpus.tokenizer.bos_token_id) == (5, 0)
    train = corpus.split("train")
    assert train.num_documents == 2 * 99
    # A sentence of n words becomes n + 1 tokens: its words and <S>, which is 0.
    assert np.asarray(train.tokens[:12]).tolist() == [2, 1, 0, 3, 2, 0] * 2
    # The sentences of file 7, the only number in the vocabulary; in the 98 other files it is an unknown word.
    assert np.asarray(train.tokens[36:42]).tolist() == [2, 4, 0, 3, 2, 0]
    assert corpus.record.splits["train"].num_unknown == 98


def test_vocab_file_is_needed_only_for_the_default_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    files = lm1b_files()
    words = files.pop("1b_word_vocab.txt")
    folder = make_files(tmp_path / "mine", files)
    dataset = without_digests(DOWNLOADABLE["lm1b"])
    with pytest.raises(UserError, match=r"no 1b_word_vocab.txt there for lm1b"):
        dataset.open(folder)
    assert dataset.open(folder, kind="byte").tokenizer.vocab_file is None
    make_files(folder, {"1b_word_vocab.txt.gz": gzip.compress(words)})
    corpus = write(dataset.open(folder), tmp_path / "out")
    assert corpus.tokenizer.vocab_size == len(words.splitlines())


def test_standard_library_is_split_into_disjoint_files() -> None:
    source = find_text(["python-stdlib"])
    names = {split: [document.name for document in documents] for split, documents in source.splits.items()}
    all_names = [name for split_names in names.values() for name in split_names]
    assert source.name == "python-stdlib" == DATASET_NAMES[-1]
    assert len(all_names) == len(set(all_names)) > 300  # every Python version has more files
    assert {"argparse.py", "json/decoder.py"} <= set(all_names)
    folders = {folder for name in all_names for folder in Path(name).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert len(names["train"]) > 8 * max(len(names["valid"]), len(names["test"])) > 0
    assert text_of(source.splits["test"])


def test_standard_library_split_depends_only_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by hand with sha256sum: hashes below 0xe666... (0.9) are train, below 0xf333... (0.95)
    valid, others test.
    """
    files = {f"m{index}.py": b"x" for index in range(40)}
    make_files(tmp_path, {**files, "test/t.py": b"x", "a/tests/t.py": b"x", "a/readme.txt": b"x", "empty.py": b""})
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    splits = find_text(["python-stdlib"]).splits
    assert names_of(splits["valid"]) == ["m27.py", "m12.py", "m4.py", "m18.py"]
    assert names_of(splits["test"]) == ["m11.py", "m9.py", "m28.py"]
    assert len(names_of(splits["train"])) == 40 - 4 - 3
