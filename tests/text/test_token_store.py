"""Tests of opening a corpus: shards act as one array, tokens stay on disk, and damaged folders are refused."""

from __future__ import annotations

import json
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


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    splits: dict[SplitName, list[Document]] = {
        "train": [Document(f"train {index}", [text]) for index, text in enumerate(TEXTS)],
        "test": [Document("test", [b"seven"])],
    }
    return write_corpus(
        tmp_path / "sample", splits, name="sample", source="a test", tokenizer=ByteTokenizer(), max_shard_tokens=11
    )


def test_opened_corpus_has_the_text_counts_and_files(corpus: Corpus) -> None:
    opened = Corpus.open(str(corpus.path))
    opened.verify()
    assert (opened.name, opened.source, opened.splits) == ("sample", "a test", ("train", "test"))
    assert opened.tokenizer == ByteTokenizer()
    split = opened.split("train")
    assert isinstance(split.tokens, TokenShards)
    assert split.tokens[:].tobytes() == b"".join(TEXTS)
    assert split.document_starts.tolist() == [0, 8, 24]  # the texts have 8, 16 and 3 bytes
    assert (split.num_tokens, split.num_words, split.num_documents, split.bytes_per_token) == (27, 6, 3, 1.0)
    # One byte per token and at most 11 tokens per shard; eight bytes per document.
    assert {item.name: item.stat().st_size for item in corpus.path.glob("t*") if item.suffix != ".json"} == {
        "test-00000.tokens": 5,
        "test.documents": 8,
        "train-00000.tokens": 11,
        "train-00001.tokens": 11,
        "train-00002.tokens": 5,
        "train.documents": 24,
    }


def test_tokens_are_memory_mapped(corpus: Corpus) -> None:
    for array in (corpus.split("test").tokens, corpus.split("train").document_starts):
        assert isinstance(array, np.ndarray)
        assert isinstance(array.base, np.memmap)
        assert not array.flags.writeable
    tokens = corpus.split("train").tokens
    with (corpus.path / "train-00001.tokens").open("r+b") as file:
        file.write(b"X")
    assert tokens[11:12].tobytes() == b"X"  # opening the split copied nothing


@settings(deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=7), st.data())
def test_shards_are_indexed_as_one_array(lengths: list[int], data: st.DataObject) -> None:
    joined = np.arange(sum(lengths), dtype=np.uint16)
    tokens = TokenShards(tuple(np.split(joined, np.cumsum(lengths)[:-1])))
    assert (len(tokens), tokens.ndim, tokens.dtype) == (len(joined), 1, np.uint16)
    indices = st.integers(-len(joined) - 3, len(joined) + 3) | st.none()
    start, stop = data.draw(indices), data.draw(indices)
    assert tokens[start:stop].tolist() == joined[start:stop].tolist()
    assert tokens[start:stop].dtype == joined.dtype
    index = np.array(data.draw(st.lists(st.integers(0, len(joined) - 1), min_size=6, max_size=6))).reshape(2, 3)
    assert tokens[index].tolist() == joined[index].tolist()
    with pytest.raises(IndexError):
        tokens[np.array([len(joined)])]


def test_slice_within_one_shard_is_not_copied() -> None:
    first, second = np.arange(7, dtype=np.uint8), np.arange(11, dtype=np.uint8)
    tokens = TokenShards((first, second))
    assert np.shares_memory(tokens[2:7], first)
    assert np.shares_memory(tokens[7:9], second)


@pytest.mark.parametrize("name", ["train-00001.tokens", "test.documents"])
# None: the file is deleted
@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content + b"x", None])
def test_files_of_wrong_size_and_missing_files_are_refused(
    corpus: Corpus, name: str, change: Callable[[bytes], bytes] | None
) -> None:
    path = corpus.path / name
    content = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(content))
    problem = f"{len(change(content))} bytes long" if change else "missing"
    with pytest.raises(UserError, match=rf"{name}: {problem}, expected {len(content)}.*; copy the corpus again"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format="other"), "format 'other', .* expected 'txl-corpus', version 3; prepare"),
        # the version before the current one
        (lambda values: values.update(version=2), "'txl-corpus', version 2, .*; prepare the corpus again"),
        (lambda values: values.update(tokenizer_sha256="0" * 64), "not the tokenizer this corpus was made with"),
        (lambda values: values.update(nmae="x"), r"unknown setting 'nmae' \(did you mean 'name'\?\); copy the corpus"),
        (lambda values: values["splits"].update({"../x": {}}), "splits"),
        (lambda values: values["splits"]["test"].pop("sha256"), "splits.test.sha256"),
        (lambda values: values["splits"]["test"].update(shard_lengths=[]), "splits.test.shard_lengths"),
    ],
)
def test_invalid_corpus_json_is_refused(
    corpus: Corpus, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = corpus.path / "corpus.json"
    values = json.loads(path.read_text())
    del values["sha256"]  # as in corpora made before there was one
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        Corpus.open(corpus.path)


def test_changed_count_in_corpus_json_is_detected(corpus: Corpus) -> None:
    """Bits per byte and word perplexity divide by these counts."""
    path = corpus.path / "corpus.json"
    values = json.loads(path.read_text())
    values["splits"]["test"]["num_words"] += 1
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"corpus.json: damaged, its checksum does not match its contents; copy"):
        Corpus.open(corpus.path)


def test_truncated_corpus_json_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "corpus.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UserError, match=r"corpus.json: damaged, not readable as JSON"):
        Corpus.open(corpus.path)
