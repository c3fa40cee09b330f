"""Writing a corpus: what goes in comes out, whatever the chunks, the shards and the processes; whole or not at all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.corpus_writer import count_words, write_corpus
from transformer_xl.text.documents import Document, DocumentUnit, SplitName
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer, EncodedChunk, EncodingError, Tokenizer, split_chunks
from transformer_xl.text.tokenizers.training import TokenizerConfig, train_tokenizer

BYTES = ByteTokenizer()
TEXTS = st.lists(st.text("ab \n\t", max_size=13).map(str.encode), max_size=7)
NUMBERS = st.lists(st.text("12 \n", max_size=13).map(str.encode), max_size=7)
Kind = Literal["byte", "char", "word", "integer"]


def documents_of(texts: Iterable[Sequence[bytes]]) -> list[Document]:
    return [Document(f"text {index}", chunks) for index, chunks in enumerate(texts)]


def write(
    folder: Path,
    splits: dict[SplitName, list[list[bytes]]],
    tokenizer: Tokenizer = BYTES,
    **layout: Any,
) -> Corpus:
    documents = {split: documents_of(texts) for split, texts in splits.items()}
    return write_corpus(folder, documents, name="sample", source="a test", tokenizer=tokenizer, **layout)


def learned(kind: Kind, texts: list[bytes]) -> Tokenizer:
    return train_tokenizer(TokenizerConfig(kind=kind), documents_of([[text] for text in texts]))


def chunked(text: bytes, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@settings(deadline=None, max_examples=50)
@given(TEXTS, st.integers(1, 5))
def test_tokens_documents_and_counts_come_back(texts: list[bytes], size: int) -> None:
    texts = [*texts, b"end"]
    kept = [text for text in texts if text]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "c", {"train": [chunked(text, size) for text in texts]})
        split = Corpus.open(Path(folder) / "c").split("train")
        assert split.tokens[:].tobytes() == b"".join(kept)
        assert split.document_starts.tolist() == [sum(map(len, kept[:index])) for index in range(len(kept))]
        assert (split.num_tokens, split.num_documents) == (len(b"".join(kept)), len(kept))
        assert split.num_bytes == len(b"".join(kept))
        assert split.num_words == sum(len(text.split()) for text in kept)
        assert split.num_unknown == 0


@pytest.mark.parametrize("kind", ["byte", "char", "word", "integer"])
@pytest.mark.parametrize("unit", ["file", "line"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_chunks_and_shards_change_nothing(kind: Kind, unit: DocumentUnit, data: st.DataObject) -> None:
    """Against an oracle: each document (or line) encoded by itself, one after another."""
    texts = [*data.draw(NUMBERS if kind == "integer" else TEXTS), b"12 1\n2 1"]
    tokenizer = learned(kind, texts)
    ids_of_documents: list[np.ndarray] = []
    for text in texts:
        closed = text + b"\n" if tokenizer.adds_final_newline and text and not text.endswith(b"\n") else text
        parts = [line + b"\n" for line in closed.split(b"\n")] if unit == "line" else [closed]
        if unit == "line":
            parts[-1] = parts[-1][:-1]
        ids_of_documents += [ids for part in parts if len(ids := tokenizer.encode(part))]
    shard, size = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 5))
    small_chunks = partial(split_chunks, size=data.draw(st.integers(1, 7)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.text.corpus_writer.split_chunks", small_chunks)
        corpus = write(
            Path(folder) / "c",
            {"train": [chunked(text, size) for text in texts]},
            tokenizer,
            max_shard_tokens=shard,
            document_unit=unit,
        )
        corpus.verify()
        split, record = corpus.split("train"), corpus.record.splits["train"]
        joined = np.concatenate(ids_of_documents)
        assert split.tokens[:].tolist() == joined.tolist()
        assert split.document_starts.tolist() == np.cumsum([0, *map(len, ids_of_documents[:-1])]).tolist()
        assert record.sha256 == hashlib.sha256(joined.tobytes()).hexdigest()
        assert record.num_bytes == sum(map(len, texts))
        assert record.num_words == sum(len(text.split()) for text in texts)
        assert all(length == shard for length in record.shard_lengths[:-1])
        assert sum(record.shard_lengths) == record.num_tokens == len(joined)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Enough chunks for several processes: lines of all lengths, and words that are cut by chunks of the text."""
    monkeypatch.setattr("transformer_xl.text.corpus_writer.split_chunks", partial(split_chunks, size=2**17))
    monkeypatch.setattr("transformer_xl.text.corpus_writer._BATCH_BYTES", 2**16)
    random = np.random.default_rng(11)
    words = np.array([b"transformer", b"xl", b"of", b"a", b"\n", b"\n\n", b"lengthy" * 97])
    return [b" ".join(random.choice(words, size=number)) for number in (7, 15_001, 0, 31, 6_013)]


@pytest.mark.parametrize("unit", ["file", "line"])
def test_workers_chunks_and_shards_change_nothing(tmp_path: Path, large: list[bytes], unit: DocumentUnit) -> None:
    tokenizer = learned("word", large)
    one = write(tmp_path / "one", {"train": [[text] for text in large]}, tokenizer, document_unit=unit)
    texts = [chunked(text, 99_991) for text in large]
    options = {"document_unit": unit, "num_workers": 2, "max_shard_tokens": 4999}
    other = write(tmp_path / "other", {"train": texts}, tokenizer, **options)
    other.verify()
    record, other_record = one.record.splits["train"], other.record.splits["train"]
    assert len(other_record.shard_lengths) > 2
    assert other_record.model_copy(update={"shard_lengths": record.shard_lengths}) == record


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    tokenizer = learned("word", [b"one two\n"])
    splits: dict[SplitName, list[list[bytes]]] = {"train": [[b"one two\n"]], "test": [[b"one six two", b"ten\nsix"]]}
    corpus = write(tmp_path / "c", splits, tokenizer)
    assert [corpus.split(split).num_unknown for split in corpus.splits] == [0, 3]
    assert corpus.record.splits["test"].num_unknown == 3


class Wide(ByteTokenizer):
    """Two bytes a token, to see wide ids written and sizes told apart from counts."""

    vocab_size = 65521

    def last_boundary(self, text: bytes) -> int:
        return len(text) // 2 * 2

    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        return EncodedChunk(np.frombuffer(chunk, dtype=">u2"))


def test_wide_ids_are_little_endian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.text.token_store.load_tokenizer", lambda path: Wide())
    corpus = write(tmp_path / "wide", {"train": [[b"\x01", b"\x02"], [b"\x03", b"\x04"]]}, Wide())
    tokens = corpus.split("train")
    assert (tmp_path / "wide" / "train-00000.tokens").read_bytes() == b"\x02\x01\x04\x03"
    assert tokens.tokens[:].tolist() == [0x0102, 0x0304]
    assert tokens.document_starts.tolist() == [0, 1]
    assert tokens.bytes_per_token == 2.0


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [[b""]]}, r"the train split of sample has no text; pass text for it to 'txl prepare'$"),
        ({"test": [[b"text"]]}, r"the train split of sample has no text"),
        ({"train": [[b"text"]], "valid": []}, r"the valid split of sample has no text; .* or leave it out$"),
        ({"train": [[b"text"]], "test": [[b""], []]}, r"the test split of sample has no text"),
    ],
)
def test_split_without_text_is_refused(
    tmp_path: Path, splits: dict[SplitName, list[list[bytes]]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write(tmp_path / "new" / "c", splits)
    assert list(tmp_path.iterdir()) == []


def test_lines_need_a_token_that_ends_them(tmp_path: Path) -> None:
    options = TokenizerConfig(kind="word", add_eos=False)
    tokenizer = train_tokenizer(options, documents_of([[b"one two\n"]]))
    with pytest.raises(UserError, match=r"no token that ends a line, so lines cannot be documents; set --add-eos"):
        write(tmp_path / "c", {"train": [[b"one two\n"]]}, tokenizer, document_unit="line")
    assert list(tmp_path.iterdir()) == []


class Picky(ByteTokenizer):
    """Refuses the byte 0xff; cut at line ends alone, so that there are several chunks."""

    def last_boundary(self, text: bytes) -> int:
        return text.rfind(b"\n") + 1

    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        if b"\xff" in chunk:
            raise EncodingError(chunk.index(b"\xff"), "not UTF-8 (byte 0xff)")
        return super().encode_chunk(chunk)


def test_bad_text_is_named_with_its_position_in_the_document(tmp_path: Path) -> None:
    line = b"x" * (2**20 - 1) + b"\n"
    for position in (0, 5 * 2**20 + 17, 8 * 2**20):
        text = bytearray(line * 9)
        text[position] = 0xFF
        splits: dict[SplitName, list[list[bytes]]] = {"train": [[line], chunked(bytes(text), 2**19)]}
        with pytest.raises(UserError, match=rf"^text 1: byte {position:,}: not UTF-8 \(byte 0xff\)$"):
            write(tmp_path / "c", splits, Picky())
    with pytest.raises(UserError, match=r"^text 0: byte 1,048,576: no whitespace in 16 MiB"):
        write(tmp_path / "c", {"train": [[line, *[b"x" * 2**20] * 21]]}, Picky())
    assert list(tmp_path.iterdir()) == []


def test_bad_text_is_named_from_a_worker_too(tmp_path: Path, large: list[bytes]) -> None:
    tokenizer = learned("word", large)
    text = bytearray(large[1])
    position = len(text) - 97
    text[position] = 0xFF
    splits: dict[SplitName, list[list[bytes]]] = {"train": [[large[1]], chunked(bytes(text), 2**16), [large[4]]]}
    with pytest.raises(UserError, match=rf"^text 1: byte {position:,}: not UTF-8 \(byte 0xff\)"):
        write(tmp_path / "c", splits, tokenizer, num_workers=2)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_reading_fails(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"text" * 2**21
        raise UserError("reading x: permission denied")

    documents: dict[SplitName, list[Document]] = {"train": [Document("x", broken())]}
    with pytest.raises(UserError, match=r"reading x: permission denied"):
        write_corpus(tmp_path / "c", documents, name="c", source="", tokenizer=BYTES)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", {"train": [[b"text"]]})
    with pytest.raises(UserError, match=r"exists already"):
        write(corpus.path, {"train": [[b"other"]]})
    corpus.verify()


def test_only_a_few_chunks_are_held_in_memory(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        for count in range(41):
            yield bytes(2**20)
            (partial,) = tmp_path.glob(".c.partial-*")
            files = partial.glob("train-*.tokens")
            held.append((count + 1) * 2**20 - sum(file.stat().st_size for file in files))

    held: list[int] = []
    write_corpus(tmp_path / "c", {"train": [Document("x", chunks())]}, name="c", source="", tokenizer=BYTES)
    assert 0 < max(held) <= 5 * 2**20


def test_killed_half_way_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    program = """if True:
        import os, signal, sys
        from transformer_xl.text.corpus_writer import write_corpus
        from transformer_xl.text.documents import Document
        from transformer_xl.text.tokenizers import ByteTokenizer
        def chunks():
            for _ in range(17):
                yield bytes(2**20)
            os.kill(os.getpid(), int(sys.argv[2]))
        documents = {"train": [Document("x", chunks())]}
        write_corpus(sys.argv[1], documents, name="c", source="", tokenizer=ByteTokenizer())
    """
    words = [sys.executable, "-c", program, str(tmp_path / "c"), str(int(signal.SIGKILL))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(words, env=environment).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".c.partial-")
    for path in (left, tmp_path / "c"):
        with pytest.raises(UserError, match=r"is not a corpus|no corpus at"):
            Corpus.open(path)
    living = left.rename(tmp_path / f".c.partial-{os.getpid()}")
    left.mkdir()  # the killed writer's again, which the next writer takes away; not so that of a writer that lives
    words[-1] = str(int(signal.SIGINT))
    interrupted = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert "KeyboardInterrupt" in interrupted.stderr
    assert list(tmp_path.iterdir()) == [living]


@given(
    st.lists(st.sampled_from([b"\n", b" ", b"\t", b"\v", b"\f", b"\r", b"\x1c", b"\x85", b"\xa0", b"a"]), min_size=1)
)
def test_words_are_those_of_split(parts: list[bytes]) -> None:
    text = b"".join(parts)
    number, (begins, ends) = count_words(text)
    assert number == len(text.split())
    assert begins == (not text[:1].isspace())
    assert ends == (not text[-1:].isspace())
