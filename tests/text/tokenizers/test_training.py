"""Training of tokenizers: order of the tokens, limits, special tokens, and errors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError, check_settings
from transformer_xl.text.documents import Document
from transformer_xl.text.tokenizers import ByteTokenizer, fingerprint
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig
from transformer_xl.text.tokenizers.training import train_tokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

PROPERTY = settings(deadline=None, max_examples=50)
# The word <unk> in it is encoded as the unknown token.
TEXT = "the dog saw the cat\nThe cat saw <unk> <unk> <unk>\n<unk> dog ran"


def train(*texts: str | bytes, num_workers: int = 1, **options: Any) -> Any:
    """Train a tokenizer on these documents, each in chunks of seven bytes."""
    documents = []
    for number, text in enumerate(texts):
        content = text.encode() if isinstance(text, str) else text
        chunks = [content[start : start + 7] for start in range(0, len(content), 7)]
        documents.append(Document(f"text{number}", chunks, len(content)))
    return train_tokenizer(TokenizerConfig(**options), documents, num_workers=num_workers)


def words_with_counts(tokenizer: WordTokenizer) -> list[tuple[str, int]]:
    assert tokenizer.counts is not None
    return list(zip(tokenizer.words, tokenizer.counts.tolist(), strict=True))


def authors_words(text: str, max_words: int | None, min_frequency: int) -> list[str]:
    """Return the vocabulary of the Transformer-XL authors' code: <eos>, then the most frequent words."""
    counter: Counter[str] = Counter()
    for line in text.split("\n"):
        counter.update(line.strip(" ").split(" ") if line.strip(" ") else [])
    return ["<eos>", *(word for word, count in counter.most_common(max_words) if count >= min_frequency)]


@PROPERTY
@given(
    words=st.lists(st.sampled_from(["a", "b", "c", "dd", "\u00e9", "<unk>", "\n"]), min_size=1, max_size=43),
    vocab_size=st.none() | st.integers(2, 8),
    min_frequency=st.integers(1, 3),
)
def test_words_are_in_the_order_of_the_authors_code(
    words: list[str], vocab_size: int | None, min_frequency: int
) -> None:
    text = " ".join(words)
    expected = authors_words(text, None if vocab_size is None else vocab_size - 1, min_frequency)
    if len(expected) > 1:
        tokenizer = train(text, vocab_size=vocab_size, min_frequency=min_frequency, unk_token=None, kind="word")
        assert list(tokenizer.words) == expected
        text += "\n" * (not text.endswith("\n"))
        assert tokenizer.counts.tolist() == [text.count("\n"), *(text.split().count(word) for word in expected[1:])]


@PROPERTY
@given(
    words=st.lists(st.sampled_from(["a", "b", "c", "dd", "<unk>", "<eos>", "\n"]), max_size=43),
    vocab_size=st.none() | st.integers(3, 7),
    min_frequency=st.integers(1, 3),
    unk_token=st.sampled_from([None, "<unk>"]),
)
def test_counts_equal_those_of_the_encoded_text_in_descending_order(
    words: list[str], vocab_size: int | None, min_frequency: int, unk_token: str | None
) -> None:
    text = " ".join(words) + "\n"
    options = {"vocab_size": vocab_size, "min_frequency": min_frequency, "unk_token": unk_token}
    if not {word for word in words if words.count(word) >= min_frequency} - {unk_token, "<eos>", "\n"}:
        with pytest.raises(UserError, match="no words to train on"):
            train(text, kind="word", **options)
        return
    tokenizer = train(text, kind="word", **options)
    assert vocab_size is None or tokenizer.vocab_size <= vocab_size
    if unk_token or (vocab_size is None and min_frequency == 1):
        counts = np.bincount(tokenizer.encode(text), minlength=tokenizer.vocab_size)
        assert tokenizer.counts.tolist() == counts.tolist()
    # <unk> is at the front only if the text does not contain it; otherwise it is sorted by its count.
    num_special = 2 if tokenizer.words[1:2] == ("<unk>",) and "<unk>" not in words else 1
    assert (np.diff(tokenizer.counts[num_special:]) <= 0).all()
    assert tokenizer.words[0] == "<eos>"
    assert ("<unk>" in tokenizer.words) >= bool(unk_token)


@pytest.mark.parametrize(
    # `expected`: each word of the vocabulary in the order of ids, followed by its count
    ("text", "options", "expected"),
    [
        (TEXT, {}, "<eos> 3 <unk> 4 the 2 dog 2 saw 2 cat 2 The 1 ran 1"),
        (
            TEXT,
            {"min_frequency": 2, "unk_token": "<UNK>", "eos_token": "<S>"},
            "<S> 3 <UNK> 2 <unk> 4 the 2 dog 2 saw 2 cat 2",
        ),
        (TEXT, {"vocab_size": 2, "add_eos": False}, "<unk> 12 the 2"),
        (TEXT, {"vocab_size": 4, "lowercase": True}, "<eos> 3 <unk> 9 the 3 dog 2"),
        ("a a b\n<unk> b a a c", {}, "<eos> 2 a 4 b 2 <unk> 1 c 1"),
        ("<unk> a a b b c", {"min_frequency": 2}, "<eos> 1 <unk> 2 a 2 b 2"),
        ("isn't (-).", {"split_punctuation": True}, "<eos> 1 <unk> 0 isn 1 't 1 ( 1 - 1 ) 1 . 1"),
    ],
)
def test_words_and_special_tokens(text: str, options: dict[str, Any], expected: str) -> None:
    words, counts = expected.split()[::2], map(int, expected.split()[1::2])
    assert words_with_counts(train(text, kind="word", **options)) == list(zip(words, counts, strict=True))


def test_end_of_sequence_token_ends_the_last_line_of_each_document() -> None:
    assert words_with_counts(train("a", "b\n", "", "c", kind="word"))[0] == ("<eos>", 3)


def test_characters() -> None:
    tokenizer = train("abba \u00e9\u00e9\u00e9", "bc", kind="char")
    # in descending order of frequency, and of first occurrence where equally frequent
    assert (tokenizer.characters, tokenizer.vocab_size) == ("b\u00e9a c", 5 + 256)
    assert tokenizer.counts[:6].tolist() == [3, 3, 2, 1, 1, 0]
    assert train("zzyya", "wbb", kind="char").characters == "zybaw"
    assert train("abba ccc", kind="char", vocab_size=258).characters == "ca"  # 256 bytes and two characters
    frequent = train("abba ccc", kind="char", min_frequency=3)
    assert (frequent.characters, frequent.counts, frequent.vocab_size) == ("c", None, 257)
    without_bytes = train("abba ccc", kind="char", byte_fallback=False)
    assert (without_bytes.characters, without_bytes.counts.tolist()) == ("cab ", [3, 2, 2, 1])


def test_other_kinds() -> None:
    assert train(b"\xff", kind="byte") == ByteTokenizer()
    assert train("5 7\n\n11 3", "", kind="integer") == IntegerTokenizer(num_values=12)  # 0 to 11
    assert train("5 77 no", kind="integer", vocab_size=32) == IntegerTokenizer(num_values=31)
    plain = train("5 7\n\n11 3", "", kind="integer", add_eos=False)
    assert (plain, plain.vocab_size) == (IntegerTokenizer(num_values=12, add_eos=False), 12)
    assert train("5 77 no", kind="integer", vocab_size=32, add_eos=False).vocab_size == 32
    assert train("abc abc abc\n" * 7, kind="bpe", vocab_size=257).vocab_size == 257
    assert train("\n", kind="bpe").vocab_size == 256


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "word", "split_punctuation": True, "lowercase": True, "min_frequency": 2},
        {"kind": "char"},
        {"kind": "integer"},
        {"kind": "bpe", "vocab_size": 263},
    ],
    ids=str,
)
def test_processes_and_chunks_do_not_affect_the_tokenizer(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = (np.random.default_rng(5).zipf(1.5, 3001) % 997).tolist()
    text = "".join(f"{number} " if number % 7 else f"{number}\n" for number in numbers)
    texts = [text[:7001], text[7001:], "" if options["kind"] == "integer" else "Caf\u00e9. \u20ac\n"]
    expected = fingerprint(train(*texts, **options))
    monkeypatch.setattr("transformer_xl.text.documents.ENCODE_CHUNK_BYTES", 1009)
    # Starting processes is slow, so they are tested with two kinds only.
    num_workers = 2 if options["kind"] in ("word", "bpe") else 1
    assert fingerprint(train(*texts, num_workers=num_workers, **options)) == expected


@pytest.mark.parametrize(("kind", "chunk_size"), [("word", 5), ("word", 4096), ("char", 5), ("bpe", 5)])
def test_invalid_text_is_refused_with_its_position(kind: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.text.documents.ENCODE_CHUNK_BYTES", chunk_size)
    # The byte 0xff follows 240 * 5 + 5 bytes.
    with pytest.raises(
        UserError, match=r"^text1: byte 1,205: not UTF-8 \(byte 0xff\); save it as UTF-8, or prepare it"
    ):
        train("fine\n", "\u00e9 x\n".encode() * 240 + b"abc\xc3\xa9\xff", kind=kind)
    with pytest.raises(UserError, match=r"^text0: byte 7: '1x' is not an integer"):
        train("5\n31 2 1x 5", kind="integer")
    monkeypatch.setattr("transformer_xl.text.tokenizers.chunking.MAX_UNSPLIT_BYTES", 4096)
    if kind != "char":  # bpe splits before the space, word after it
        with pytest.raises(UserError, match=rf"^text1: byte {3 if kind == 'bpe' else 4}: no whitespace in"):
            train("a b", "abc " + "x" * 5000, kind=kind)


@pytest.mark.parametrize(
    ("text", "options", "unit"),
    [
        ("", {"kind": "word"}, "words"),
        (" \n", {"kind": "word", "unk_token": None, "add_eos": False}, "words"),
        (TEXT, {"kind": "word", "vocab_size": 5, "min_frequency": 100_000}, "words"),
        ("<unk> <eos>\n", {"kind": "word"}, "words"),
        ("abba", {"kind": "char", "min_frequency": 3}, "characters"),
        ("", {"kind": "char", "byte_fallback": False}, "characters"),
        ("\n\n", {"kind": "integer"}, "integers"),
    ],
)
def test_text_with_nothing_to_train_on_is_refused(text: str, options: dict[str, Any], unit: str) -> None:
    with pytest.raises(UserError, match=rf"no {unit} to train on.*; give "):
        train(text, **options)


def test_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_bytes("<S> 7\n<UNK> 1\r\nthe 5\n\ncat\u00e9 5\nb 2\n".encode())
    tokenizer = train("not read", kind="word", vocab_file=str(file), eos_token="<S>")
    assert words_with_counts(tokenizer) == [("<S>", 7), ("<UNK>", 1), ("the", 5), ("cat\u00e9", 5), ("b", 2)]
    assert tokenizer.encode("the dog\nb\n").tolist() == [2, 1, 0, 4, 0]
    file.write_bytes(b"<UNK> 9\nthe 5\n<eos> 7\na 6\n")  # counts that are not descending are ignored
    tokenizer = train(kind="word", vocab_file=str(file))
    assert (tokenizer.words, tokenizer.counts, tokenizer.bos_token_id) == (("<UNK>", "the", "<eos>", "a"), None, 2)
    for count in (b"9" * 5000, b"9223372036854775807"):  # the sum of the counts exceeds int64
        file.write_bytes(b"<eos> 1\n<unk> 1\nthe " + count + b"\n")
        assert train(kind="word", vocab_file=str(file)).counts is None
    file.write_bytes(b"the\na\n")
    tokenizer = train(kind="word", vocab_file=str(file), add_eos=False, unk_token=None)
    assert (tokenizer.words, tokenizer.counts, tokenizer.unk_token) == (("the", "a"), None, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the\n<unk>\n", r"words.txt: no word '<eos>'.*add_eos=false"),
        (b"the\n<eos>\n", r"words.txt: no word '<unk>'.*add it"),
        (b"<eos>\n<unk>\nthe\nthe 3\n", r"words.txt: it has the word 'the' twice"),
        (b"the\n\xff\n", r"words.txt: byte 4: not UTF-8 \(byte 0xff\)"),
        (b"\n \n", r"words.txt: it has no words, or .*; expected one word per line"),
        (b"<eos> 9\n<unk> 7\n", r"words.txt: no words other than special tokens"),
    ],
)
def test_invalid_file_of_words_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "words.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        train(kind="word", vocab_file=str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "byte", "lowercase": False}, r"lowercase is for word tokenizers, not for byte; leave it out"),
        ({"kind": "bpe", "min_frequency": 2}, r"min_frequency is for word and char tokenizers, not for bpe"),
        ({"kind": "char", "unk_token": None}, r"unk_token is for word tokenizers"),
        ({"kind": "word", "byte_fallback": True}, r"byte_fallback is for char tokenizers"),
        ({"kind": "word", "eos_token": "a b"}, r"'a b' is empty or contains whitespace; give one word"),
        ({"kind": "word", "unk_token": ""}, r"'' is empty or contains whitespace"),
        ({"kind": "word", "unk_token": "<eos>"}, r"'<eos>' cannot be both"),
        ({"kind": "word", "vocab_file": "x", "vocab_size": 7}, r"leave vocab_size and min_frequency out"),
        ({"kind": "word", "vocab_size": 2}, r"too small for word; give 3 or more"),
        ({"kind": "char", "vocab_size": 256}, r"too small for char; give 257 or more"),
        ({"kind": "bpe", "vocab_size": 255}, r"too small for bpe; give 256 or more"),
        ({"kind": "bpe", "vocab_size": 2**31 - 1}, r"too large for bpe; give 10,000,000 at most"),
        ({"kind": "integer", "vocab_size": 1}, r"too small for integer; give 2 or more"),
    ],
)
def test_settings_that_do_not_apply_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(TokenizerConfig, options, "tokenizer")
