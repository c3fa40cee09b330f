"""Tests of `write_corpus`: chunks, shards and processes change no token, and a failure leaves no corpus."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.corpus_writer import count_words, write_corpus
from transformer_xl.text.documents import Document, DocumentUnit, SplitName
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.base import EncodedChunk, EncodingError
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig, TokenizerKind
from transformer_xl.text.tokenizers.training import train_tokenizer

BYTES = ByteTokenizer()
# Documents.
TEXTS = st.lists(st.text("ab \n\t", max_size=13).map(str.encode), max_size=7)
# Integers of at most two digits, since `is_newline_V` of an integer tokenizer has an entry for every smaller integer.
NUMBERS = st.lists(
    st.lists(st.sampled_from([b"1 ", b"12 ", b"2\n", b"21\n", b" ", b"\n"]), max_size=7).map(b"".join), max_size=7
)


def write(
    folder: Path, splits: dict[SplitName, list[list[bytes]]], tokenizer: Tokenizer = BYTES, **options: Any
) -> Corpus:
    """Write a corpus. A split is a list of documents, named text 0, text 1 and so on, each a list of chunks."""
    documents = {
        split: [Document(f"text {index}", chunks) for index, chunks in enumerate(texts)]
        for split, texts in splits.items()
    }
    return write_corpus(folder, documents, name="sample", source="a test", tokenizer=tokenizer, **options)


def trained(kind: TokenizerKind, texts: list[bytes], **options: Any) -> Tokenizer:
    return train_tokenizer(TokenizerConfig(kind=kind, **options), [Document("text", [text]) for text in texts])


def chunked(text: bytes, size: int) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("kind", ["byte", "char", "word", "integer"])
@pytest.mark.parametrize("unit", ["file", "line"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_corpus_equals_documents_encoded_one_by_one(
    kind: TokenizerKind, unit: DocumentUnit, data: st.DataObject
) -> None:
    texts = [*data.draw(NUMBERS if kind == "integer" else TEXTS), b"12 1\n2 1"]
    tokenizer = trained(kind, texts)
    documents: list[np.ndarray] = []  # the token ids of each
    for text in texts:
        if tokenizer.adds_final_newline and text and not text.endswith(b"\n"):
            text += b"\n"
        parts = text.splitlines(keepends=True) if unit == "line" else [text]
        documents += [ids for part in parts if len(ids := tokenizer.encode(part))]
    joined = np.concatenate(documents)
    max_shard_tokens = data.draw(st.integers(1, 13))
    chunk_size, encoded_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.text.documents.ENCODE_CHUNK_BYTES", encoded_size)
        corpus = write(
            Path(folder) / "c",
            {"train": [chunked(text, chunk_size) for text in texts]},
            tokenizer,
            max_shard_tokens=max_shard_tokens,
            document_unit=unit,
        )
        corpus.verify()
        split, record = corpus.split("train"), corpus.record.splits["train"]
        assert split.tokens[:].tolist() == joined.tolist()
        assert split.document_starts.tolist() == np.cumsum([0, *map(len, documents[:-1])]).tolist()
        assert record.sha256 == hashlib.sha256(joined.tobytes()).hexdigest()
        assert record.num_bytes == sum(map(len, texts))
        assert record.num_words == sum(len(text.split()) for text in texts)
        assert all(length == max_shard_tokens for length in record.shard_lengths[:-1])
        assert sum(record.shard_lengths) == record.num_tokens == len(joined)


@pytest.fixture
def large_texts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Enough chunks for several processes: lines of all lengths, and words that chunk boundaries split."""
    monkeypatch.setattr("transformer_xl.text.documents.ENCODE_CHUNK_BYTES", 2**17)
    monkeypatch.setattr("transformer_xl.text.documents._BATCH_BYTES", 2**16)
    random = np.random.default_rng(11)
    words = np.array([b"transformer", b"xl", b"of", b"a", b"\n", b"\n\n", b"lengthy" * 97])
    return [b" ".join(random.choice(words, size=number)) for number in (7, 15_001, 0, 31, 6_013)]


def test_processes_and_shards_change_no_token(tmp_path: Path, large_texts: list[bytes]) -> None:
    tokenizer = trained("word", large_texts)
    single = write(tmp_path / "single", {"train": [[text] for text in large_texts]}, tokenizer, document_unit="line")
    texts = [chunked(text, 99_991) for text in large_texts]
    options = {"document_unit": "line", "num_workers": 2, "max_shard_tokens": 4999}
    parallel = write(tmp_path / "parallel", {"train": texts}, tokenizer, **options)
    parallel.verify()
    record, parallel_record = single.record.splits["train"], parallel.record.splits["train"]
    assert len(parallel_record.shard_lengths) > 2
    assert parallel_record.model_copy(update={"shard_lengths": record.shard_lengths}) == record


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ({"train": [[b""]]}, {}, r"the train split of sample has no text; pass text for it to 'txl prepare'$"),
        ({"test": [[b"text"]]}, {}, r"the train split of sample has no text"),
        ({"train": [[b"text"]], "valid": []}, {}, r"the valid split of sample has no text; .* or leave it out$"),
        (
            {"train": [[b"one\n"]]},
            {"tokenizer": trained("word", [b"one\n"], add_eos=False), "document_unit": "line"},
            "no token that ends a line, so lines cannot be documents; set add_eos=true",
        ),
    ],
)
def test_split_without_text_and_lines_without_newline_token_are_refused(
    tmp_path: Path, splits: dict[SplitName, list[list[bytes]]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write(tmp_path / "new" / "c", splits, **options)
    assert list(tmp_path.iterdir()) == []


class TokenizerThatRefusesFF(ByteTokenizer):
    """Refuses the byte 0xff; can split text only after newlines, so that there are several chunks."""

    def last_boundary(self, text: bytes) -> int:
        return text.rfind(b"\n") + 1

    def encode_chunk(self, chunk: bytes) -> EncodedChunk:
        if b"\xff" in chunk:
            raise EncodingError(chunk.index(b"\xff"), "not UTF-8 (byte 0xff)")
        return super().encode_chunk(chunk)


def test_error_has_the_position_of_the_invalid_byte_in_its_document(tmp_path: Path) -> None:
    line = b"x" * (2**20 - 1) + b"\n"
    # in the first of nine lines of 1 MiB, inside the sixth, and at the start of the last
    for position in (0, 5 * 2**20 + 17, 8 * 2**20):
        text = bytearray(line * 9)
        text[position] = 0xFF
        splits: dict[SplitName, list[list[bytes]]] = {"train": [[line], chunked(bytes(text), 2**19)]}
        with pytest.raises(UserError, match=rf"^text 1: byte {position:,}: not UTF-8 \(byte 0xff\)$"):
            write(tmp_path / "c", splits, TokenizerThatRefusesFF())
    # After the first line, the only position where this tokenizer can split, 21 MiB follow without a newline.
    with pytest.raises(UserError, match=r"^text 0: byte 1,048,576: no whitespace in 16 MiB"):
        write(tmp_path / "c", {"train": [[line, *[b"x" * 2**20] * 21]]}, TokenizerThatRefusesFF())
    assert list(tmp_path.iterdir()) == []


def test_error_in_a_worker_process_has_the_position_too(tmp_path: Path, large_texts: list[bytes]) -> None:
    text = bytearray(large_texts[1])
    position = len(text) - 97  # in a late chunk
    text[position] = 0xFF
    splits: dict[SplitName, list[list[bytes]]] = {"train": [[large_texts[1]], chunked(bytes(text), 2**16)]}
    with pytest.raises(UserError, match=rf"^text 1: byte {position:,}: not UTF-8 \(byte 0xff\)"):
        write(tmp_path / "c", splits, trained("word", large_texts), num_workers=2)
    assert list(tmp_path.iterdir()) == []


def test_at_most_five_mebibytes_of_text_are_held_in_memory(tmp_path: Path) -> None:
    """The 4 MiB that are encoded at once (ENCODE_CHUNK_BYTES), and the 1 MiB that the document yields at a time."""

    def chunks() -> Iterator[bytes]:
        for index in range(41):
            yield bytes(2**20)
            (partial_folder,) = tmp_path.glob(".c.partial-*")
            num_written = sum(file.stat().st_size for file in partial_folder.glob("train-*.tokens"))
            held_bytes.append((index + 1) * 2**20 - num_written)

    held_bytes: list[int] = []
    write_corpus(tmp_path / "c", {"train": [Document("x", chunks())]}, name="c", source="", tokenizer=BYTES)
    assert 0 < max(held_bytes) <= 5 * 2**20


def test_killed_writer_leaves_no_corpus_and_the_next_writer_deletes_its_files(tmp_path: Path) -> None:
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
    command = [sys.executable, "-c", program, str(tmp_path / "c"), str(int(signal.SIGKILL))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    (partial_folder,) = tmp_path.iterdir()
    assert partial_folder.name.startswith(".c.partial-")
    for path in (partial_folder, tmp_path / "c"):
        with pytest.raises(UserError, match=r"is not a corpus|no corpus at"):
            Corpus.open(path)
    # A temporary folder is named after the process id of its writer; this test is a running process.
    folder_of_live_writer = partial_folder.rename(tmp_path / f".c.partial-{os.getpid()}")
    partial_folder.mkdir()  # the folder of the killed writer again
    command[-1] = str(int(signal.SIGINT))
    interrupted = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "KeyboardInterrupt" in interrupted.stderr
    assert list(tmp_path.iterdir()) == [folder_of_live_writer]


@given(
    # 0x1c, 0x85 and 0xa0 are whitespace for str.split, but not for bytes.split
    st.lists(st.sampled_from([b"\n", b" ", b"\t", b"\v", b"\f", b"\r", b"\x1c", b"\x85", b"\xa0", b"a"]), min_size=1)
)
def test_words_are_counted_as_by_split(parts: list[bytes]) -> None:
    text = b"".join(parts)
    assert count_words(text) == len(text.split())
    # The text may begin inside the word that the previous byte, a, belongs to.
    assert count_words(text, previous_byte=b"a") == len((b"a" + text).split()) - 1
