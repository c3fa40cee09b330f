"""The token store: files that are read as one array, and a folder that is not whole is never opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document, SplitName
from transformer_xl.text.token_store import Corpus, TokenShards
from transformer_xl.text.tokenizers import ByteTokenizer

TEXTS = [b"one two\n", b"three\tfour  five", b"six"]


def write(folder: Path, splits: dict[SplitName, list[bytes]], **layout: int) -> Corpus:
    documents = {
        split: [Document(f"{split} {index}", [text]) for index, text in enumerate(texts)]
        for split, texts in splits.items()
    }
    return write_corpus(folder, documents, name="sample", source="a test", tokenizer=ByteTokenizer(), **layout)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write(tmp_path / "sample", {"train": TEXTS, "test": [b"seven"]}, max_shard_tokens=11)


def edit(corpus: Corpus, change: Callable[[dict[str, Any]], object]) -> None:
    path = corpus.path / "corpus.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_corpus_says_what_it_is(corpus: Corpus) -> None:
    opened = Corpus.open(str(corpus.path))
    opened.verify()
    assert (opened.name, opened.source, opened.splits) == ("sample", "a test", ("train", "test"))
    assert opened.tokenizer == ByteTokenizer()
    split = opened.split("train")
    assert isinstance(split.tokens, TokenShards)
    assert split.tokens[:].tobytes() == b"".join(TEXTS)
    assert split.document_starts.tolist() == [0, 8, 24]
    assert (split.num_tokens, split.num_words, split.num_documents, split.bytes_per_token) == (27, 6, 3, 1.0)
    assert sorted(item.name for item in corpus.path.iterdir()) == [
        "corpus.json",
        "test-00000.tokens",
        "test.documents",
        "train-00000.tokens",
        "train-00001.tokens",
        "train-00002.tokens",
        "train.documents",
        "txl_tokenizer.json",
    ]
    assert [(corpus.path / f"train-0000{shard}.tokens").stat().st_size for shard in range(3)] == [11, 11, 5]


def test_tokens_stay_on_disk(corpus: Corpus) -> None:
    for array in (corpus.split("test").tokens, corpus.split("train").document_starts):
        assert isinstance(array, np.ndarray)
        assert isinstance(array.base, np.memmap)
        assert not array.flags.writeable
    # what is written into the file afterwards is seen, so nothing was copied when the split was opened
    tokens = corpus.split("train").tokens
    with (corpus.path / "train-00001.tokens").open("r+b") as file:
        file.write(b"X")
    assert tokens[11] == ord("X")


@settings(deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=7), st.data())
def test_shards_read_as_one_array(lengths: list[int], data: st.DataObject) -> None:
    joined = np.arange(sum(lengths), dtype=np.uint16)
    tokens = TokenShards(tuple(np.split(joined, np.cumsum(lengths)[:-1])))
    indices = st.integers(-len(joined) - 3, len(joined) + 3) | st.none()
    start, stop = data.draw(indices), data.draw(indices)
    found = tokens[start:stop]
    assert found.tolist() == joined[start:stop].tolist()
    assert found.dtype == joined.dtype == tokens.dtype
    assert (len(tokens), tokens.ndim) == (len(joined), 1)
    index = data.draw(st.integers(-len(joined), len(joined) - 1))
    assert tokens[index] == joined[index]
    assert np.shape(tokens[index]) == ()
    drawn = np.array(data.draw(st.lists(st.integers(0, len(joined) - 1), min_size=6, max_size=6))).reshape(2, 3)
    assert tokens[drawn].tolist() == joined[drawn].tolist()
    for wrong in (len(joined), -len(joined) - 1):
        with pytest.raises(IndexError):
            tokens[wrong]


def test_a_slice_within_a_shard_is_not_copied() -> None:
    first, second = np.arange(7, dtype=np.uint8), np.arange(11, dtype=np.uint8)
    tokens = TokenShards((first, second))
    assert np.shares_memory(tokens[2:7], first)
    assert np.shares_memory(tokens[7:9], second)
    assert not np.shares_memory(tokens[2:8], first)


def test_unknown_split_offers_the_nearest(corpus: Corpus) -> None:
    with pytest.raises(
        UserError, match=r"no split 'tset' \(did you mean 'test'\?\); it has train, test, and 'txl prep"
    ):
        corpus.split("tset")
    with pytest.raises(UserError, match=r"no split 'valid'"):
        corpus.split("valid")


@pytest.mark.parametrize("file", ["train-00001.tokens", "test-00000.tokens", "test.documents"])
def test_cut_long_and_missing_files_are_refused(corpus: Corpus, file: str) -> None:
    path = corpus.path / file
    size = path.stat().st_size
    content = path.read_bytes()
    for wrong in (content[:-1], content + b"x", b""):
        path.write_bytes(wrong)
        with pytest.raises(
            UserError, match=rf"{file}: {len(wrong)} bytes long, expected {size}; copy the corpus again"
        ):
            Corpus.open(corpus.path)
    path.unlink()
    with pytest.raises(UserError, match=rf"{file}: missing, expected {size} bytes; copy the corpus again"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("train-00000.tokens", "train-00000.tokens to train-00002.tokens"),
        ("train-00002.tokens", "train-00000.tokens to train-00002.tokens"),
        ("train.documents", "train.documents"),
        ("test-00000.tokens", "test-00000.tokens"),
        ("test.documents", "test.documents"),
    ],
)
def test_verify_finds_one_changed_byte(corpus: Corpus, file: str, named: str) -> None:
    path = corpus.path / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{named}: damaged \(sha256 [0-9a-f]{{12}}, expected [0-9a-f]{{12}}\); copy"):
        Corpus.open(corpus.path).verify()


def test_verify_finds_shards_in_the_wrong_order(corpus: Corpus) -> None:
    first, second = (corpus.path / f"train-0000{shard}.tokens" for shard in (0, 1))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with pytest.raises(UserError, match="damaged"):
        Corpus.open(corpus.path).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format="other"), "format 'other', expected 'txl-corpus'; 'txl prepare FILES"),
        (lambda values: values.pop("format"), "format None, expected 'txl-corpus'"),
        (lambda values: values.update(version=2), "an earlier version of txl .*; prepare the corpus again"),
        (lambda values: values.update(version=4), "a later version of txl .*; upgrade transformer-xl, or prepare"),
        (lambda values: values.update(tokenizer_sha256="0" * 64), "not the tokenizer this corpus was made with"),
        (lambda values: values.update(nmae="x"), r"unknown setting 'nmae' \(did you mean 'name'\?\); copy the corpus"),
        (lambda values: values["splits"].pop("train"), "split 'train' is missing.*copy the corpus again"),
        (lambda values: values["splits"].update({"../x": {}}), "splits"),
        (lambda values: values["splits"]["test"].update(num_tokens=0), "splits.test.num_tokens: .*greater than 0"),
        (
            lambda values: values["splits"]["train"].update(shard_lengths=[11, 11]),
            "shard_lengths sum to 22, expected .*27",
        ),
        (
            lambda values: values["splits"]["train"].update(shard_lengths=[27, 0]),
            "splits.train.shard_lengths.*greater than 0",
        ),
        (lambda values: values["splits"]["test"].update(dtype="uint64"), "splits.test.dtype"),
        (lambda values: values["splits"]["test"].pop("sha256"), "splits.test.sha256"),
    ],
)
def test_wrong_record_is_refused(corpus: Corpus, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(corpus, change)
    with pytest.raises(UserError, match=message):
        Corpus.open(corpus.path)


def test_dtype_other_than_the_tokenizers_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "test-00000.tokens"
    path.write_bytes(path.read_bytes() * 2)
    edit(corpus, lambda values: values["splits"]["test"].update(dtype="uint16"))
    with pytest.raises(UserError, match=r"splits.test.dtype is uint16, expected uint8"):
        Corpus.open(corpus.path)


def test_damaged_json_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "corpus.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UserError, match=r"corpus.json: damaged, not readable as JSON"):
        Corpus.open(corpus.path)


def test_missing_tokenizer_is_refused(corpus: Corpus) -> None:
    (corpus.path / "txl_tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"txl_tokenizer.json: missing"):
        Corpus.open(corpus.path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_tokens_are_refused(corpus: Corpus) -> None:
    (corpus.path / "test-00000.tokens").chmod(0)
    with pytest.raises(UserError, match=r"reading .*test-00000.tokens: permission denied"):
        corpus.split("test")


def test_what_is_no_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus at .*gone; 'txl prepare FILES --out .*gone' creates one there"):
        Corpus.open(tmp_path / "gone")
    file = tmp_path / "a.txt"
    file.write_text("text")
    with pytest.raises(
        UserError, match=r"a.txt is a file, expected the folder of a corpus; 'txl prepare .*a.txt --out DIR'"
    ):
        Corpus.open(file)
    with pytest.raises(
        UserError, match=r"is not a corpus \(it has no corpus.json\); 'txl prepare FILES --out DIR' creates"
    ):
        Corpus.open(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(
        UserError, match=r"is a run, expected a corpus; its config.yaml names the corpus it was trained on"
    ):
        Corpus.open(tmp_path)
