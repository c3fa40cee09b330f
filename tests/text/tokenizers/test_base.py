"""What holds for every kind of tokenizer: chunks, streams, ids and files."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import (
    TOKENIZER_KINDS,
    ByteTokenizer,
    EncodingError,
    Tokenizer,
    chunking,
    fingerprint,
    split_chunks,
    token_dtype,
    tokenizer_from_json,
)
from transformer_xl.text.tokenizers.bpe import lines_of, train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

UNHURRIED = settings(deadline=None, max_examples=50)
WORDS = ("<eos>", "<unk>", "the", "a", "Mr.", ".", "'t", "@-@", "3", "\u00e9t\u00e9", "\x00")
COUNTS = np.array([7, 5, 11, 3, 3, 2, 2, 2, 1, 1, 1])
TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("e \u00e9\n"),
    "char without bytes": CharTokenizer(
        "a.3\u00e9\x00 \n\r\t'-,\"<>unk@theMrvxosy\u20ac\U0001f600", byte_fallback=False
    ),
    "word": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>"),
    "word without eos": WordTokenizer(WORDS, None, None, "<unk>", PreTokenizer(lowercase=True)),
    "punctuation": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>", PreTokenizer("punctuation")),
    "moses": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>", PreTokenizer("moses")),
    "bpe": train_bpe([lines_of("the \u00e9t\u00e9 the a\nMr. the\u20ac don't\r\nthe\n" * 3)], 277),
    "integer": IntegerTokenizer(31),
}
OF_TEXT = [name for name, tokenizer in TOKENIZERS.items() if tokenizer.is_text]
LOSSLESS = [name for name, tokenizer in TOKENIZERS.items() if tokenizer.is_lossless]
# What kinds of text may be cut at, and what cutting must not take apart.
PARTS = ["the", "a", "Mr.", ".", " ", "  ", "\n", "\r\n", "\t", "'t", "-", "3", "3,", "\x00", "\u00e9t\u00e9", "\u20ac"]
PARTS += ["\U0001f600", '"', "<unk>", "<eos>", "x y", " the ", " v", "a."]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=29).map("".join)
NUMBERS = st.lists(st.sampled_from(["0", "7", "13", "30", " ", "\n", "  ", " 5 ", "\t"]), max_size=29).map(
    # two numbers side by side would make a larger one
    lambda words: "".join(a + " " * (a[-1].isdigit() and b[0].isdigit()) for a, b in itertools.pairwise([*words, " "]))
)


def texts_for(name: str) -> st.SearchStrategy[str]:
    return NUMBERS if name == "integer" else TEXTS


def chunked(text: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return (text[start:stop] for start, stop in itertools.pairwise(edges))


@UNHURRIED
@given(data=st.data(), cuts=st.lists(st.integers(0, 61), max_size=5), size=st.integers(1, 43))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_chunks_have_the_tokens_of_the_whole_text(name: str, data: st.DataObject, cuts: list[int], size: int) -> None:
    tokenizer, text = TOKENIZERS[name], data.draw(texts_for(name)).encode()
    chunks = list(split_chunks(tokenizer, chunked(text, cuts), size))
    end = b"\n" if tokenizer.adds_final_newline and text and not text.endswith(b"\n") else b""
    assert b"".join(chunks) == text + end
    assert all(chunks)
    encoded = [tokenizer.encode_chunk(chunk) for chunk in chunks]
    whole = tokenizer.encode_chunk(text + end)
    assert [token for chunk in encoded for token in chunk.ids.tolist()] == whole.ids.tolist()
    assert sum(chunk.num_unknown for chunk in encoded) == whole.num_unknown
    if name in LOSSLESS:
        assert tokenizer.decode_bytes(whole.ids) == text


@UNHURRIED
@given(data=st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_stream_decoder_gives_what_decode_gives(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=23))
    decoder = tokenizer.stream_decoder()
    text = "".join([*[decoder.push(token) for token in ids], decoder.finish()])
    assert text == tokenizer.decode(ids) == tokenizer.decode(np.array(ids, dtype=np.uint16))
    assert tokenizer.decode_bytes(ids).decode("utf-8", errors="replace") == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_properties_json_and_pickle(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("3 3\n")
    assert ids.dtype == token_dtype(tokenizer.vocab_size)
    ids[0] = 0  # the caller may change it
    assert 0 <= tokenizer.bos_token_id < tokenizer.vocab_size
    assert tokenizer.counts is None or tokenizer.counts.shape == (tokenizer.vocab_size,)
    ends = [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]).endswith("\n")]
    assert np.flatnonzero(tokenizer.is_newline_V).tolist() == ends
    text = "the 3" if tokenizer.is_text else ""
    for again in (
        tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json()))),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert type(again) is type(tokenizer)
        assert fingerprint(again) == fingerprint(tokenizer)
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_every_kind_is_tested() -> None:
    assert {tokenizer.kind for tokenizer in TOKENIZERS.values()} == set(TOKENIZER_KINDS)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for wrong in (tokenizer.vocab_size, -1):
        message = rf"token id {wrong} .*expected 0 to {tokenizer.vocab_size - 1}"
        for use in (tokenizer.decode, tokenizer.decode_bytes):
            with pytest.raises(UserError, match=message):
                use([0, wrong, 2])
        with pytest.raises(UserError, match=message):
            tokenizer.stream_decoder().push(wrong)


@pytest.mark.parametrize("name", [name for name in OF_TEXT if name != "byte"])
def test_text_that_is_not_utf8_is_refused_with_its_position(name: str) -> None:
    with pytest.raises(EncodingError, match=r"not UTF-8 \(byte 0xff\); .*--tokenizer byte") as caught:
        TOKENIZERS[name].encode_chunk("the \u00e9".encode() + b"\xffa")
    assert caught.value.position == 6
    # Bytes of a command line that are not UTF-8 arrive as escapes.
    with pytest.raises(EncodingError, match=r"byte 0xe9"):
        TOKENIZERS[name].encode(b"the\xe9".decode("utf-8", errors="surrogateescape"))


def test_encoding_errors_are_one_line_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(EncodingError(12345, "wrong; do that")))
    assert str(error) == "byte 12,345 of the text: wrong; do that"
    assert (type(error), error.position, error.reason) == (EncodingError, 12345, "wrong; do that")


@pytest.mark.parametrize("name", ["word", "bpe"])
def test_text_that_cannot_be_cut_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "MAX_UNSPLIT_BYTES", 4096)
    tokenizer = TOKENIZERS[name]
    start = 3 if name == "bpe" else 4  # of the text without white space
    fits = b"7 7 ".ljust(4096 + start, b"7")
    given = [fits[:1000], fits[1000:]]
    assert len(list(split_chunks(tokenizer, given, 1024))[-1].rstrip(b"\n")) == 4096
    with pytest.raises(EncodingError, match=r"no white space in 16 MiB.*leave it out") as caught:
        list(split_chunks(tokenizer, [*given, b"7 7"], 1024))
    assert caught.value.position == start
    for other, part in (("punctuation", b"a. b. "), ("bpe", b"      ")):  # white space, but where it cannot be cut
        with pytest.raises(EncodingError, match=r"no newline in 16 MiB.*break the line"):
            list(split_chunks(TOKENIZERS[other], [part * 700], 1024))


def test_chunks_are_about_as_long_as_wanted() -> None:
    text = b"seven 7\n" * 100_003
    for given_chunks in ([text], chunked(text, range(0, len(text), 1009))):
        chunks = list(split_chunks(TOKENIZERS["word"], given_chunks, 10_007))
        assert {len(chunk) // 1000 for chunk in chunks[:-1]} <= {9, 10}


@UNHURRIED
@given(st.binary())
def test_bytes_come_back(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text)
    assert tokenizer.decode_bytes(ids.tolist()) == text
    assert tokenizer.decode(ids) == text.decode("utf-8", errors="replace")


@pytest.mark.parametrize("name", ["byte", "char"])
def test_stream_decoder_holds_back_part_of_a_character(name: str) -> None:
    decoder = TOKENIZERS[name].stream_decoder()
    tokens = TOKENIZERS[name].encode("x\u20acy").tolist()
    assert [decoder.push(token) for token in tokens] == ["x", "", "", "\u20ac", "y"]
    assert decoder.finish() == ""
    assert [decoder.push(token) for token in tokens[1:3]] == ["", ""]
    assert decoder.finish() == "\ufffd"


def test_command_line_bytes_that_are_not_utf8_are_kept() -> None:
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    assert ByteTokenizer().decode_bytes(ByteTokenizer().encode(argument)) == b"caf\xe9"
    with pytest.raises(UserError, match=r"'\\ud800' at index 2, which UTF-8 cannot represent"):
        ByteTokenizer().encode("ab\ud800")


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (267735, "uint32")],
)
def test_token_dtype_is_the_smallest_that_fits(vocab_size: int, name: str) -> None:
    dtype = token_dtype(vocab_size)
    assert dtype.name == name
    assert dtype.newbyteorder("<") == dtype
