"""Learning a vocabulary: the order of its tokens, the limits, the special words, what is said of wrong text."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError, check_settings
from transformer_xl.text.documents import Document
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, fingerprint, learning
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.training import TokenizerConfig, train_tokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

UNHURRIED = settings(deadline=None)
TEXT = "the dog saw the cat\nThe cat saw <unk> <unk> <unk>\n<unk> dog ran"


def learn(*texts: str | bytes, workers: int = 1, **options: Any) -> Any:
    """The vocabulary of these documents, each in chunks of seven bytes."""
    documents = []
    for place, text in enumerate(texts):
        content = text.encode() if isinstance(text, str) else text
        chunks = [content[start : start + 7] for start in range(0, len(content), 7)]
        documents.append(Document(f"text{place}", chunks, len(content)))
    return train_tokenizer(TokenizerConfig(**options), documents, workers=workers)


def numbered(tokenizer: WordTokenizer) -> list[tuple[str, int]]:
    assert tokenizer.counts is not None
    return list(zip(tokenizer.words, tokenizer.counts.tolist(), strict=True))


def authors_words(text: str, max_size: int | None, min_frequency: int) -> list[str]:
    """As the authors' code makes a vocabulary: the mark first, then the most common words while frequent enough."""
    counter: Counter[str] = Counter()
    for line in text.split("\n"):
        counter.update(line.strip(" ").split(" ") if line.strip(" ") else [])
    return ["<eos>", *(word for word, count in counter.most_common(max_size) if count >= min_frequency)]


@UNHURRIED
@given(
    words=st.lists(st.sampled_from(["a", "b", "c", "dd", "\u00e9", "<unk>", "\n"]), min_size=1, max_size=43),
    max_size=st.none() | st.integers(1, 7),
    min_frequency=st.integers(1, 3),
)
def test_words_are_in_the_order_of_the_authors_code(words: list[str], max_size: int | None, min_frequency: int) -> None:
    text = " ".join(words)
    wanted = authors_words(text, max_size, min_frequency)
    if len(wanted) > 1:
        found = learn(text, max_size=max_size, min_frequency=min_frequency, unk_token=None, kind="word")
        assert list(found.words) == wanted
        closed = text + "\n" * (not text.endswith("\n"))
        assert found.counts.tolist() == [closed.count("\n"), *(closed.split().count(word) for word in wanted[1:])]


@UNHURRIED
@given(
    words=st.lists(st.sampled_from(["a", "b", "c", "dd", "<unk>", "<eos>", "\n"]), max_size=43),
    max_size=st.none() | st.integers(1, 5),
    min_frequency=st.integers(1, 3),
    unknown=st.sampled_from([None, "<unk>"]),
)
def test_counts_are_those_of_the_tokens_and_fall(
    words: list[str], max_size: int | None, min_frequency: int, unknown: str | None
) -> None:
    text = " ".join(words) + "\n"
    kept = {word for word, _ in Counter(w for w in text.split() if w != "<eos>").most_common(max_size)}
    if not {word for word in kept if text.split().count(word) >= min_frequency} - {unknown}:
        with pytest.raises(UserError, match="no words to learn"):
            learn(text, kind="word", max_size=max_size, min_frequency=min_frequency, unknown=unknown)
        return
    found = learn(text, kind="word", max_size=max_size, min_frequency=min_frequency, unknown=unknown)
    if unknown or (max_size is None and min_frequency == 1):
        ids = found.encode(text)
        assert found.counts.tolist() == np.bincount(ids, minlength=found.size).tolist()
    in_front = 2 if found.words[1:2] == ("<unk>",) and "<unk>" not in words else 1
    assert (np.diff(found.counts[in_front:]) <= 0).all()
    assert found.words[0] == "<eos>"
    assert ("<unk>" in found.words) >= bool(unknown)


def test_special_words() -> None:
    assert numbered(learn(TEXT, kind="word")) == [
        ("<eos>", 3), ("<unk>", 4), ("the", 2), ("dog", 2), ("saw", 2), ("cat", 2), ("The", 1), ("ran", 1),
    ]  # fmt: skip
    assert numbered(learn(TEXT, kind="word", min_frequency=2, unknown="<UNK>", eos_token="<S>")) == [
        ("<S>", 3), ("<UNK>", 2), ("<unk>", 4), ("the", 2), ("dog", 2), ("saw", 2), ("cat", 2),
    ]  # fmt: skip
    assert numbered(learn(TEXT, kind="word", max_size=2, eos_token=None)) == [("<unk>", 12), ("the", 2)]
    assert numbered(learn("a a b\n<unk> b a a c", kind="word")) == [
        ("<eos>", 2), ("a", 4), ("b", 2), ("<unk>", 1), ("c", 1),
    ]  # fmt: skip
    tied = learn("<unk> a a b b c", kind="word", min_frequency=2)
    assert numbered(tied) == [("<eos>", 1), ("<unk>", 2), ("a", 2), ("b", 2)]
    folded = learn(TEXT, kind="word", case="folded")
    assert numbered(folded)[1:4] == [("<unk>", 4), ("the", 3), ("dog", 2)]
    assert folded.encode("THE").tolist() == [2]
    split = learn("It isn't (well-known).", kind="word", splitting="punctuation")
    assert split.words == ("<eos>", "<unk>", "It", "isn", "'t", "(", "well", "@-@", "known", ")", ".")


def test_each_document_closes_its_last_line() -> None:
    assert numbered(learn("a", "b\n", "", "c", kind="word"))[0] == ("<eos>", 3)


def test_characters() -> None:
    found = learn("abba \u00e9\u00e9\u00e9", "bc", kind="char")
    assert isinstance(found, CharTokenizer)
    assert found.characters == "b\u00e9a c"
    assert found.counts is not None
    assert found.counts[:6].tolist() == [3, 3, 2, 1, 1, 0]
    assert found.size == 5 + 256
    assert learn("zzyya", "wbb", kind="char").characters == "zybaw"
    assert learn("abba ccc", kind="char", max_size=2).characters == "ca"
    rare = learn("abba ccc", kind="char", min_frequency=3)
    assert (rare.characters, rare.counts, rare.size) == ("c", None, 257)
    closed = learn("abba ccc", kind="char", unk_token=None)
    assert (closed.characters, closed.size, closed.counts.tolist()) == ("cab ", 4, [3, 2, 2, 1])


def test_other_kinds() -> None:
    assert learn(b"\xff", kind="byte") == ByteTokenizer()
    assert learn("5 7\n\n11 3", "", kind="integer") == IntegerTokenizer(12)
    assert learn("5 77 no", kind="integer", values=31) == IntegerTokenizer(31)
    assert learn("abc abc abc\n" * 7, kind="bpe", max_size=257).size == 257
    assert learn("\n", kind="bpe").size == 256


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "words"},
        {"kind": "words", "splitting": "punctuation", "case": "folded", "min_count": 2},
        {"kind": "characters"},
        {"kind": "integers"},
        {"kind": "bpe", "max_size": 263},
    ],
    ids=str,
)
def test_neither_processes_nor_pieces_change_anything(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(5).zipf(1.5, 3001) % 997
    text = "".join(f"{number}{' ' if number % 7 else chr(10)}" for number in drawn.tolist())
    texts = [text[:7001], text[7001:], "" if options["kind"] == "integers" else "Caf\u00e9. \u20ac\n"]
    whole: Tokenizer = learn(*texts, **options)
    for size, workers in ((1009, 1), (1013, 2)):
        monkeypatch.setattr(learning, "PIECE_BYTES", size)
        assert fingerprint(learn(*texts, workers=workers, **options)) == fingerprint(whole)


@pytest.mark.parametrize("kind", ["words", "characters", "bpe"])
@pytest.mark.parametrize("size", [5, 4096])
def test_wrong_text_is_named_with_its_place(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PIECE_BYTES", size)
    with pytest.raises(UserError, match=r"^text1: byte 1,205: not UTF-8 \(byte 0xff\); save the text as UTF-8, or"):
        learn("fine\n", "\u00e9 x\n".encode() * 240 + b"abc\xc3\xa9\xff", kind=kind)
    with pytest.raises(UserError, match=r"^text0: byte 7: '1x' is not a whole number"):
        learn("5\n31 2 1x 5", kind="integer")
    monkeypatch.setattr("transformer_xl.text.tokenizers.MAX_STRETCH", 4096)
    if kind != "characters":
        with pytest.raises(UserError, match=rf"^text1: byte {3 if kind == 'bpe' else 4}: no white space in"):
            learn("a b", "abc " + "x" * 5000, kind=kind)


def test_nothing_to_learn_is_said() -> None:
    with pytest.raises(UserError, match=r"no words to learn"):
        learn(" \n", kind="word", unk_token=None, eos_token=None)
    for text, limits in [("", {}), (" \n\t", {}), (TEXT, {"max_size": 5, "min_count": 100_000}), ("<unk> <eos>\n", {})]:
        with pytest.raises(UserError, match=r"no words to learn"):
            learn(text, kind="word", **limits)
    with pytest.raises(UserError, match=r"no characters to learn"):
        learn("abba", kind="char", min_frequency=3)
    with pytest.raises(UserError, match=r"no characters to learn"):
        learn("", kind="char", unk_token=None)
    with pytest.raises(UserError, match=r"holds no numbers to learn from; give one sequence"):
        learn("\n\n", kind="integer")


def test_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_bytes("<S> 7\n<UNK> 1\r\nthe 5\n\ncat\u00e9 5\nb 2\n".encode())
    found = learn("never read \xff", kind="word", vocab_file=str(file), eos_token="<S>")
    assert numbered(found) == [("<S>", 7), ("<UNK>", 1), ("the", 5), ("cat\u00e9", 5), ("b", 2)]
    assert found.encode("the dog\nb\n").tolist() == [2, 1, 0, 4, 0]
    file.write_bytes(b"<UNK> 9\nthe 5\n<eos> 7\na 6\n")  # not falling: known order, unknown counts
    found = learn(kind="word", vocab_file=str(file))
    assert (found.words, found.counts, found.bos_token_id) == (("<UNK>", "the", "<eos>", "a"), None, 2)
    for count in (b"99999999999999999999", b"9" * 5000, b"9223372036854775807"):  # together more than there can be
        file.write_bytes(b"<eos> 1\n<unk> 1\nthe " + count + b"\n")
        assert learn(kind="word", vocab_file=str(file)).counts is None
    file.write_bytes(b"the\na\n")
    found = learn(kind="word", vocab_file=str(file), eos_token=None, unk_token=None)
    assert (found.words, found.counts, found.unknown) == (("the", "a"), None, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the\n<unk>\n", r"words.txt: no word '<eos>', the mark of line ends; add it, or give --no-end-of-line"),
        (b"the\n<eos>\n", r"words.txt: no word '<unk>' for unknown words; add it on a line by itself"),
        (b"<eos>\n<unk>\nthe\nthe 3\n", r"words.txt: the word 'the' stands in it twice; wanted a word to a line"),
        (b"the\n\xff\n", r"words.txt: byte 4: not UTF-8 \(byte 0xff\)"),
        (b"", r"words.txt: empty, wanted a word to a line, marks included"),
        (b"\n \n", r"words.txt: empty, wanted a word to a line, marks included"),
        (b"<eos> 9\n<unk> 7\n", r"words.txt: no words but its marks, so there is nothing to learn; give"),
        (None, r"reading .*words.txt: no such file or folder"),
    ],
)
def test_a_wrong_file_of_words_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "words.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        learn(kind="word", vocab_file=str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bytes", "case": "folded"}, r"case is for words, not for bytes; leave it out"),
        ({"kind": "characters", "splitting": "punctuation"}, r"splitting is for words, not for characters"),
        ({"kind": "bpe", "min_count": 2}, r"min_count is for words and characters, not for bpe"),
        ({"kind": "bpe", "unknown": None}, r"unknown is for words and characters, not for bpe"),
        ({"kind": "integers", "max_size": 7}, r"max_size is for words and characters and bpe, not for integers"),
        ({"kind": "words", "values": 7}, r"values is for integers, not for words"),
        ({"kind": "words", "tokenizer_file": "x"}, r"tokenizer_file is for bpe, not for words"),
        ({"kind": "bpe", "words_file": "x"}, r"words_file is for words, not for bpe"),
        ({"kind": "characters", "end_of_line": None}, r"end_of_line is for words, not for characters"),
        ({"kind": "words", "end_of_line": "a b"}, r"the mark 'a b' holds white space; give one word"),
        ({"kind": "words", "unknown": ""}, r"a mark is empty; give a word, or none"),
        ({"kind": "words", "unknown": "<eos>"}, r"'<eos>' cannot mark both line ends and unknown words"),
        ({"kind": "words", "words_file": "x", "max_size": 7}, r"come from a file, so they cannot be limited"),
        ({"kind": "bpe", "max_size": 255}, r"max_size is 255, but bpe has at least the 256 bytes"),
        ({"kind": "wrods"}, r"kind"),
        ({"kind": "words", "min_count": 0}, r"min_count"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_settings(TokenizerConfig, options, "vocabulary")


def test_options_that_fit_are_taken() -> None:
    for kind, unknown in itertools.product(["words", "characters"], [None, "<UNK>"]):
        assert check_settings(TokenizerConfig, {"kind": kind, "unknown": unknown}, "x").unk_token == unknown
    assert TokenizerConfig(kind="word", eos_token=None, unk_token=None).kind == "words"
