"""Vocabularies: nothing is lost on the way to ids and back, and a vocabulary file is what it was or is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.vocabulary import (
    ByteVocabulary,
    build_vocabulary,
    fingerprint,
    load_vocabulary,
    save_vocabulary,
    token_dtype,
    vocabulary_from_json,
)

VOCABULARY = ByteVocabulary()
UNHURRIED = settings(deadline=None)
# Bytes in which whole, cut and wrong UTF-8 characters all turn up often.
UTF8_PIECES = st.lists(
    st.sampled_from([b"a", "\u00e9".encode(), "\u20ac".encode(), "\U0001f600".encode(), b"\xf0\x9f", b"\x98", b"\xff"])
).map(b"".join)


@UNHURRIED
@given(st.binary())
def test_bytes_come_back(text: bytes) -> None:
    ids = VOCABULARY.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text)
    assert VOCABULARY.decode_bytes(ids) == text
    assert VOCABULARY.decode_bytes(ids.tolist()) == text
    assert VOCABULARY.decode(ids) == text.decode("utf-8", errors="replace")


@UNHURRIED
@given(st.text())
def test_text_comes_back(text: str) -> None:
    assert VOCABULARY.decode(VOCABULARY.encode(text)) == text


@UNHURRIED
@given(st.binary(), st.lists(st.integers(0, 31), max_size=5))
def test_chunks_cut_anywhere_give_the_same_ids(text: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    ids = [token for piece in VOCABULARY.encode_chunks(chunks) for token in piece.tolist()]
    assert ids == VOCABULARY.encode(text).tolist()


@UNHURRIED
@given(st.one_of(st.binary(), st.text().map(str.encode), UTF8_PIECES))
def test_stream_of_tokens_reads_as_the_whole(text: bytes) -> None:
    decoder = VOCABULARY.stream_decoder()
    pieces = [decoder.push(int(token)) for token in VOCABULARY.encode(text)]
    assert "".join([*pieces, decoder.finish()]) == VOCABULARY.decode(list(text))


def test_stream_never_shows_half_a_character() -> None:
    decoder = VOCABULARY.stream_decoder()
    assert [decoder.push(token) for token in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]
    assert decoder.finish() == ""
    assert [decoder.push(token) for token in "\u20ac".encode()[:2]] == ["", ""]
    assert decoder.finish() == "\ufffd"


def test_ids_are_the_callers_own_to_write() -> None:
    ids = VOCABULARY.encode(b"abc")
    ids[0] = 7
    assert VOCABULARY.encode("abc").flags.writeable


def test_command_line_bytes_that_are_not_utf8_come_through() -> None:
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    assert VOCABULARY.decode_bytes(VOCABULARY.encode(argument)) == b"caf\xe9"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UserError, match=r"holds '\\ud800' at place 2, which UTF-8 cannot write; take it out"):
        VOCABULARY.encode("ab\ud800")


@pytest.mark.parametrize("ids", [[3, 256], [-1, 5], np.array([257], dtype=np.int32)])
def test_foreign_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match=r"token id (256|-1|257) is not one of the byte vocabulary; wanted 0 to 255"):
        VOCABULARY.decode_bytes(ids)


def test_what_it_is() -> None:
    assert (VOCABULARY.kind, VOCABULARY.size, VOCABULARY.start_id) == ("bytes", 256, ord("\n"))
    assert build_vocabulary("bytes") == VOCABULARY
    assert VOCABULARY.decode([]) == ""


def test_fingerprint_is_pinned() -> None:
    """Every corpus and run holds it: should it change, none of them could be used any more."""
    assert fingerprint(VOCABULARY) == "a7b73f94d2a566c1e8408d436a1a2bc8619fc938cdc3b7a79dccc68ae9211b59"


def test_saved_vocabulary_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    save_vocabulary(VOCABULARY, path)
    assert load_vocabulary(path) == VOCABULARY
    assert fingerprint(load_vocabulary(path)) == fingerprint(VOCABULARY)
    assert vocabulary_from_json(json.loads(path.read_text())) == VOCABULARY


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "bytse"}', r"vocabulary.json: no vocabulary 'bytse' \(did you mean 'bytes'\?\); known: bytes"),
        ('{"size": 256}', r"no kind of vocabulary in it, wanted one of bytes; copy it again"),
        ('{"kind": "bytes", "size": 255, "start_id": 10}', r"damaged, its values do not describe.*'txl prepare'"),
        ('{"kind": "bytes", "si', r"damaged, not readable as JSON .*copy it again"),
        ("\ufeff\xff", r"damaged, not readable as JSON"),
        ("[" * 100_000, r"damaged, not readable as JSON"),
        ("[]", r"wanted a JSON object, found list; copy it again"),
        ("", r"damaged, not readable as JSON"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_vocabulary(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocabulary.json: missing, wanted a JSON file; copy it again"):
        load_vocabulary(tmp_path / "vocabulary.json")
    with pytest.raises(UserError, match="is a folder, wanted a file"):
        load_vocabulary(tmp_path)


def test_unknown_kind_offers_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--vocabulary: no vocabulary 'byte' \(did you mean 'bytes'\?\); known: bytes"):
        build_vocabulary("byte")


@pytest.mark.parametrize(
    ("size", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (267735, "uint32")],
)
def test_token_dtype_is_the_smallest_that_fits(size: int, name: str) -> None:
    dtype = token_dtype(size)
    assert dtype.name == name
    assert dtype.newbyteorder("<") == dtype
    assert np.array([size - 1]).astype(dtype)[0] == size - 1
