"""The token store: what goes in comes out, whatever the pieces; and a folder that is not whole is never opened."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.token_store import Corpus, Document, SplitName, write_corpus
from transformer_xl.text.vocabulary import ByteVocabulary, TokenArray, Vocabulary

TEXTS = [b"one two\n", b"three\tfour  five", b"six"]


def write(folder: Path, splits: dict[SplitName, list[list[bytes]]], vocabulary: Vocabulary | None = None) -> Corpus:
    documents = {
        split: [Document(f"{split} {place}", chunks) for place, chunks in enumerate(texts)]
        for split, texts in splits.items()
    }
    return write_corpus(
        folder,
        documents,
        name="sample",
        source="a test",
        vocabulary=ByteVocabulary() if vocabulary is None else vocabulary,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write(tmp_path / "sample", {"train": [[text] for text in TEXTS], "test": [[b"seven"]]})


def edit(corpus: Corpus, change: Callable[[dict[str, Any]], object]) -> None:
    path = corpus.path / "corpus.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@settings(deadline=None, max_examples=50)  # each flushes its files to disk
@given(st.lists(st.lists(st.text("ab \n\t", max_size=7).map(str.encode), max_size=5), max_size=7))
def test_tokens_documents_and_counts_come_back(documents: list[list[bytes]]) -> None:
    documents = [*documents, [b"end"]]
    texts = [b"".join(chunks) for chunks in documents if any(chunks)]
    starts = [sum(map(len, texts[:place])) for place in range(len(texts))]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "c", {"train": documents})
        split = Corpus.open(Path(folder) / "c").split("train")
        assert split.tokens.tobytes() == b"".join(texts)
        assert split.document_starts.tolist() == starts
        assert (split.num_tokens, split.num_documents) == (len(b"".join(texts)), len(texts))
        assert split.num_bytes == len(b"".join(texts))
        assert split.num_words == sum(len(text.split()) for text in texts)


def test_corpus_says_what_it_is(corpus: Corpus) -> None:
    opened = Corpus.open(str(corpus.path))
    opened.verify()
    assert (opened.name, opened.source, opened.splits) == ("sample", "a test", ("train", "test"))
    assert opened.vocabulary == ByteVocabulary()
    split = opened.split("train")
    assert isinstance(split.tokens, np.memmap)
    assert isinstance(split.document_starts, np.memmap)
    assert not split.tokens.flags.writeable
    assert (split.num_tokens, split.num_words, split.num_documents, split.bytes_per_token) == (27, 6, 3, 1.0)
    assert sorted(item.name for item in corpus.path.iterdir()) == [
        "corpus.json",
        "test.documents",
        "test.tokens",
        "train.documents",
        "train.tokens",
        "vocabulary.json",
    ]


class WideVocabulary(ByteVocabulary):
    """Two bytes a token, to see wide ids written and sizes told apart from counts."""

    @property
    def size(self) -> int:
        return 65521

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[TokenArray]:
        text = b"".join(chunks)
        yield np.array([256 * high + low for high, low in zip(text[::2], text[1::2], strict=True)], dtype=np.uint16)


def test_wide_ids_are_little_endian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.text.token_store.load_vocabulary", lambda path: WideVocabulary())
    corpus = write(tmp_path / "wide", {"train": [[b"\x01", b"\x02"], [b"\x03", b"\x04"]]}, WideVocabulary())
    tokens = corpus.split("train")
    assert (tmp_path / "wide" / "train.tokens").read_bytes() == b"\x02\x01\x04\x03"
    assert tokens.tokens.tolist() == [0x0102, 0x0304]
    assert tokens.document_starts.tolist() == [0, 1]
    assert tokens.bytes_per_token == 2.0


def test_empty_split_is_read_as_empty(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", {"train": [[b"text"]], "valid": [], "test": [[], [b""]]})
    for name in ("valid", "test"):
        split = corpus.split(name)
        assert (split.num_tokens, split.num_documents, split.num_bytes, split.num_words) == (0, 0, 0, 0)
        assert math.isnan(split.bytes_per_token)
    corpus.verify()


@pytest.mark.parametrize("splits", [{"train": [[b""]]}, {"test": [[b"text"]]}])
def test_no_text_to_train_on_is_refused(tmp_path: Path, splits: dict[SplitName, list[list[bytes]]]) -> None:
    with pytest.raises(UserError, match=r"the train split of sample holds no text.*give 'txl prepare' files with text"):
        write(tmp_path / "c", splits)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_reading_fails(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"text"
        raise UserError("reading x: permission denied")

    with pytest.raises(UserError, match=r"reading x: permission denied"):
        write_corpus(
            tmp_path / "c", {"train": [Document("x", broken())]}, name="c", source="", vocabulary=ByteVocabulary()
        )
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_left_alone(corpus: Corpus) -> None:
    with pytest.raises(UserError, match=r"exists already"):
        write(corpus.path, {"train": [[b"other"]]})
    corpus.verify()


def test_only_a_piece_is_held_in_memory(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield bytes(2**20)
            (partial,) = tmp_path.glob(".c.partial-*")
            sizes.append((partial / "train.tokens").stat().st_size)

    sizes: list[int] = []
    write_corpus(tmp_path / "c", {"train": [Document("x", chunks())]}, name="c", source="", vocabulary=ByteVocabulary())
    assert sizes == [count * 2**20 for count in range(1, 6)]


def test_unknown_split_offers_the_nearest(corpus: Corpus) -> None:
    with pytest.raises(
        UserError, match=r"no split 'tset' \(did you mean 'test'\?\); it has train, test, and 'txl prep"
    ):
        corpus.split("tset")
    with pytest.raises(UserError, match=r"no split 'valid'"):
        corpus.split("valid")


@pytest.mark.parametrize("file", ["train.tokens", "test.documents"])
def test_cut_long_and_missing_files_are_refused(corpus: Corpus, file: str) -> None:
    path = corpus.path / file
    size = path.stat().st_size
    content = path.read_bytes()
    for wrong in (content[:-1], content + b"x", b""):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match=rf"{file}: {len(wrong)} bytes long, wanted {size}; copy the corpus again"):
            Corpus.open(corpus.path)
    path.unlink()
    with pytest.raises(
        UserError, match=rf"{file}: missing, wanted {size} bytes; copy the corpus again, or make it aga"
    ):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("file", ["train.tokens", "train.documents", "test.tokens", "test.documents"])
def test_verify_finds_one_changed_byte(corpus: Corpus, file: str) -> None:
    path = corpus.path / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file}: damaged \(sha256 [0-9a-f]{{12}}, wanted [0-9a-f]{{12}}\); copy"):
        Corpus.open(corpus.path).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format="other"), "format 'other', wanted 'txl-corpus'; 'txl prepare FILES"),
        (lambda values: values.pop("format"), "format None, wanted 'txl-corpus'"),
        (lambda values: values.update(version=2), "version 2, this txl reads 1; upgrade transformer-xl, or make the"),
        (lambda values: values.update(vocabulary="0" * 64), r"not the vocabulary this corpus was made with \(fingerp"),
        (lambda values: values.update(nmae="x"), r"unknown setting 'nmae' \(did you mean 'name'\?\); copy the corpus"),
        (lambda values: values["splits"].pop("train"), "wanted a split 'train', found none; copy the corpus again"),
        (lambda values: values["splits"].update({"../x": {}}), "splits"),
        (lambda values: values["splits"]["test"].update(tokens=-1), "splits.test.tokens: .*greater than or equal to 0"),
        (lambda values: values["splits"]["test"].update(dtype="uint64"), "splits.test.dtype"),
        (lambda values: values["splits"]["test"].pop("sha256"), "splits.test.sha256"),
    ],
)
def test_wrong_record_is_refused(corpus: Corpus, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(corpus, change)
    with pytest.raises(UserError, match=message):
        Corpus.open(corpus.path)


def test_dtype_that_is_not_the_vocabularys_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "test.tokens"
    path.write_bytes(path.read_bytes() * 2)
    edit(corpus, lambda values: values["splits"]["test"].update(dtype="uint16"))
    with pytest.raises(UserError, match=r"splits.test.dtype is uint16, wanted uint8"):
        Corpus.open(corpus.path)


def test_damaged_json_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "corpus.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UserError, match=r"corpus.json: damaged, not readable as JSON"):
        Corpus.open(corpus.path)


def test_missing_vocabulary_is_refused(corpus: Corpus) -> None:
    (corpus.path / "vocabulary.json").unlink()
    with pytest.raises(UserError, match=r"vocabulary.json: missing, wanted a JSON file; copy it again"):
        Corpus.open(corpus.path)


def test_what_is_no_corpus_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus at .*gone; 'txl prepare FILES --out .*gone' makes one there"):
        Corpus.open(tmp_path / "gone")
    file = tmp_path / "a.txt"
    file.write_text("text")
    with pytest.raises(
        UserError, match=r"a.txt is a file, wanted the folder of a corpus; 'txl prepare .*a.txt --out DIR'"
    ):
        Corpus.open(file)
    with pytest.raises(
        UserError, match=r"is not a corpus \(it has no corpus.json\); 'txl prepare FILES --out DIR' makes"
    ):
        Corpus.open(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match=r"is a run, wanted a corpus; its config.yaml names the one it learned"):
        Corpus.open(tmp_path)
