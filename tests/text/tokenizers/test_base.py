"""Properties of every kind of tokenizer: splitting into chunks, streaming, ids and JSON.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tokenizers import byte_level, prefix_space, unigram, word_piece

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, chunking, fingerprint, token_dtype
from transformer_xl.text.tokenizers.base import EncodingError
from transformer_xl.text.tokenizers.bpe import BPETokenizer, lines_of, train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.chunking import split_chunks
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.storage import tokenizer_from_json
from transformer_xl.text.tokenizers.tokenizer_config import TOKENIZER_KINDS
from transformer_xl.text.tokenizers.word import WordTokenizer

PROPERTY = settings(deadline=None, max_examples=50)
WORDS = ("<eos>", "<unk>", "the", "a", "Mr.", ".", "'t", "@-@", "3", "\u00e9t\u00e9", "\x00")
# Of WORDS: in descending order after the two special tokens.
COUNTS = np.array([7, 5, 11, 3, 3, 2, 2, 2, 1, 1, 1])
CHARACTERS = "a.3\u00e9\x00 \n\r\t'-,\"<>unk@theMrvxosy\u20ac\U0001f600"
# Arguments of WordTokenizer: words, counts, eos_token, unk_token, pre_tokenizer.
TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("e \u00e9\n"),
    "char without byte fallback": CharTokenizer(CHARACTERS, byte_fallback=False),
    "word": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>"),
    "word without eos": WordTokenizer(WORDS, None, None, "<unk>", PreTokenizer(lowercase=True)),
    "punctuation": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>", PreTokenizer("punctuation")),
    "moses": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>", PreTokenizer("moses")),
    "bpe": train_bpe([lines_of("the \u00e9t\u00e9 the a\nMr. the\u20ac don't\r\nthe\n" * 3)], vocab_size=277),
    "bpe with an end": BPETokenizer.of_library(byte_level()),
    "word piece": LibraryTokenizer("tokenizers", json.dumps(word_piece())),
    "unigram": LibraryTokenizer("tokenizers", json.dumps(unigram())),
    "prefix space": LibraryTokenizer("tokenizers", json.dumps(prefix_space())),
    "integer": IntegerTokenizer(num_values=31),
    "integer without eos": IntegerTokenizer(num_values=31, add_eos=False),
}
OF_BYTES = ("byte", "integer")  # the kinds that do not decode their text as UTF-8
# Text at which the kinds may split, and text that they must not split.
PARTS = ["the", "a", "Mr.", ".", " ", "  ", "\n", "\r\n", "\t", "'t", "-", "3", "3,", "\x00", "\u00e9t\u00e9", "\u20ac"]
PARTS += ["\U0001f600", '"', "<unk>", "<eos>", "x y", " the ", " v", "a."]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=29).map("".join)
INTEGERS = st.tuples(
    st.lists(st.sampled_from(["0 ", "7 ", "13\n", "30\t", " ", "\n", "  ", " 5 "]), max_size=29).map("".join),
    st.sampled_from(["", "11"]),
).map("".join)


def chunked(text: bytes, ends: Iterable[int]) -> Iterator[bytes]:
    """The text in chunks that end at these positions and at the end of the text."""
    edges = [0, *sorted(min(end, len(text)) for end in ends), len(text)]
    return (text[start:end] for start, end in itertools.pairwise(edges))


def test_all_kinds_are_tested() -> None:
    assert {tokenizer.kind for tokenizer in TOKENIZERS.values()} == {*TOKENIZER_KINDS, "library"}


@PROPERTY
@given(data=st.data(), ends=st.lists(st.integers(0, 61), max_size=5), size=st.integers(1, 43))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_chunks_have_the_tokens_of_the_whole_text(name: str, data: st.DataObject, ends: list[int], size: int) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(TEXTS if tokenizer.is_text else INTEGERS).encode()
    chunks = list(split_chunks(tokenizer, chunked(text, ends), size=size))
    final_newline = b"\n" if tokenizer.adds_final_newline and text and not text.endswith(b"\n") else b""
    assert b"".join(chunks) == text + final_newline
    assert all(chunks)
    encoded = [tokenizer.encode_chunk(chunk) for chunk in chunks]
    whole = tokenizer.encode_chunk(text + final_newline)
    assert [token for chunk in encoded for token in chunk.ids.tolist()] == whole.ids.tolist()
    assert sum(chunk.num_unknown for chunk in encoded) == whole.num_unknown
    if tokenizer.is_lossless:
        assert tokenizer.decode_bytes(whole.ids) == text


@pytest.mark.parametrize("name", ["bpe", "punctuation"])
@pytest.mark.parametrize(
    "text", ['"a1", "b2", ', "\u0436 \u0437 ", "\u65e5, \u672c ", "(a) [b] {c}: ", '"A." "B." ', "x, "]
)
def test_long_lines_are_split_near_their_end(name: str, text: str) -> None:
    line = (text * 3001).encode()
    last_boundary = TOKENIZERS[name].last_boundary
    assert len(line) - 2 * len(text.encode()) <= last_boundary(line) < len(line)
    assert last_boundary(b"a b" + b"x" * 7001) == 1
    assert last_boundary(b"a b\nc" + b"x" * 7001) == 4
    assert last_boundary(b"x" * 7001) == 0


@PROPERTY
@given(data=st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_stream_decoder_equals_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=23))
    decoder = tokenizer.stream_decoder()
    text = "".join([*[decoder.push(token) for token in ids], decoder.finish()])
    assert text == tokenizer.decode(ids) == tokenizer.decode(np.array(ids, dtype=np.uint16))
    assert tokenizer.decode_bytes(ids).decode("utf-8", errors="replace") == text


@pytest.mark.parametrize("name", ["byte", "char"])
def test_stream_decoder_withholds_an_incomplete_character(name: str) -> None:
    decoder = TOKENIZERS[name].stream_decoder()
    tokens = TOKENIZERS[name].encode("x\u20acy").tolist()  # both tokenizers encode the euro sign as its three bytes
    assert [decoder.push(token) for token in tokens] == ["x", "", "", "\u20ac", "y"]
    assert decoder.finish() == ""
    assert [decoder.push(token) for token in tokens[1:3]] == ["", ""]
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_properties_json_and_pickle(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("3 3\n")  # a text that every kind can encode
    assert ids.dtype == token_dtype(tokenizer.vocab_size)
    ids[0] = 0  # writable
    assert 0 <= tokenizer.bos_token_id < tokenizer.vocab_size
    assert tokenizer.counts is None or tokenizer.counts.shape == (tokenizer.vocab_size,)
    newlines = [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]).endswith("\n")]
    assert np.flatnonzero(tokenizer.is_newline_V).tolist() == newlines
    text = "the 3" if tokenizer.is_text else ""
    for copy in (
        tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json()))),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert type(copy) is type(tokenizer)
        assert fingerprint(copy) == fingerprint(tokenizer)
        assert copy.encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_id_outside_the_vocabulary_is_refused(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for token in (tokenizer.vocab_size, -1):
        message = rf"token id {token} .*expected 0 to {tokenizer.vocab_size - 1}"
        for decode in (tokenizer.decode, tokenizer.decode_bytes):
            with pytest.raises(UserError, match=message):
                decode([0, token, 2])
        with pytest.raises(UserError, match=message):
            tokenizer.stream_decoder().push(token)


@pytest.mark.parametrize("name", [name for name, one in TOKENIZERS.items() if one.kind not in OF_BYTES])
def test_text_that_is_not_utf8_is_refused_with_its_position(name: str) -> None:
    with pytest.raises(EncodingError, match=r"not UTF-8 \(byte 0xff\); .*tokenizer=byte") as caught:
        TOKENIZERS[name].encode_chunk("the \u00e9".encode() + b"\xffa")
    assert caught.value.position == 6
    copy = pickle.loads(pickle.dumps(caught.value))  # as when a worker process raises it
    assert (type(copy), str(copy), copy.position) == (EncodingError, str(caught.value), 6)


@pytest.mark.parametrize("name", ["word", "bpe"])
def test_text_that_cannot_be_split_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "MAX_UNSPLIT_BYTES", 4096)
    tokenizer = TOKENIZERS[name]
    start = 3 if name == "bpe" else 4  # of the part that cannot be split: bpe splits before a space, word after it
    text = b"7 7 ".ljust(4096 + start, b"7")
    chunks = [text[:1000], text[1000:]]
    assert len(list(split_chunks(tokenizer, chunks, size=1024))[-1].rstrip(b"\n")) == 4096
    with pytest.raises(EncodingError, match=r"no whitespace in 16 MiB.*leave it out") as caught:
        list(split_chunks(tokenizer, [*chunks, b"7 7"], size=1024))
    assert caught.value.position == start
    for other, part in (("punctuation", b"a. b. "), ("bpe", b"      ")):  # whitespace, but no boundary
        with pytest.raises(EncodingError, match=r"no newline in 16 MiB.*break the line"):
            list(split_chunks(TOKENIZERS[other], [part * 700], size=1024))


def test_chunks_have_about_the_requested_size() -> None:
    text = b"seven 7\n" * 100_003
    for input_chunks in ([text], chunked(text, range(0, len(text), 1009))):
        chunks = list(split_chunks(TOKENIZERS["word"], input_chunks, size=10_007))
        assert {len(chunk) // 1000 for chunk in chunks[:-1]} <= {9, 10}  # the last chunk is the rest


def test_byte_tokenizer_keeps_bytes_that_are_not_utf8() -> None:
    tokenizer, content = ByteTokenizer(), bytes(range(256))
    ids = tokenizer.encode(content)
    assert ids.tolist() == list(range(256))
    assert tokenizer.decode_bytes(ids) == content
    assert tokenizer.decode(ids) == content.decode("utf-8", errors="replace")
    command_line_argument = content.decode("utf-8", errors="surrogateescape")
    assert tokenizer.encode(command_line_argument).tolist() == ids.tolist()
    with pytest.raises(UserError, match=r"'\\ud800' at index 2, which UTF-8 cannot represent"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_dtype_is_the_smallest_that_fits(vocab_size: int, name: str) -> None:
    dtype = token_dtype(vocab_size)
    assert dtype.name == name
    assert dtype.newbyteorder("<") == dtype
