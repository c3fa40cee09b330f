"""Vocabularies: what holds of every kind, and a vocabulary file is what it was or is refused."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text import tokenizer as tokenizers
from transformer_xl.text.tokenizers import (
    MAX_UNSPLIT_BYTES,
    ByteTokenizer,
    EncodingError,
    Tokenizer,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    split_chunks,
    token_dtype,
    tokenizer_from_json,
)
from transformer_xl.text.tokenizers.bpe import lines_of, train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

UNHURRIED = settings(deadline=None)
BYTES = ByteTokenizer()
WORDS = ("<eos>", "<unk>", "the", "a", "Mr.", ".", "'t", "@-@", "3", "\u00e9t\u00e9", "\x00")
COUNTS = np.array([7, 5, 11, 3, 3, 2, 2, 2, 1, 1, 1])
KINDS: dict[str, Tokenizer] = {
    "bytes": BYTES,
    "characters": CharTokenizer("e \u00e9\n", None),
    "closed characters": CharTokenizer(
        "a.3\u00e9\x00 \n\r\t'-,\"<>unk@theMrvxosy\u20ac\U0001f600", byte_fallback=False
    ),
    "words": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>"),
    "words without a mark": WordTokenizer(WORDS, None, None, "<unk>", PreTokenizer(lowercase=True)),
    "punctuation": WordTokenizer(WORDS, COUNTS, "<eos>", "<unk>", PreTokenizer("punctuation")),
    "bpe": train_bpe([lines_of("the \u00e9t\u00e9 the a\nMr. the\u20ac don't\r\nthe\n" * 3)], 277),
    "integers": IntegerTokenizer(31),
}
OF_TEXT = [name for name in KINDS if name != "integers"]
# What any kind of text may be cut at, and what cutting must not take apart.
PIECES = [
    "the",
    "a",
    "Mr.",
    ".",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'t",
    "-",
    "3",
    "3,",
    "\x00",
    "\u00e9t\u00e9",
    "\u20ac",
]
PIECES += ["\U0001f600", '"', "<unk>", "<eos>", "x y", " the ", " v", "a."]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=29).map("".join)
NUMBERS = st.lists(st.sampled_from(["0", "7", "13", "30", " ", "\n", "  ", " 5 ", "\t"]), max_size=29).map(
    # two numbers side by side would make a larger one
    lambda words: "".join(a + " " * (a[-1].isdigit() and b[0].isdigit()) for a, b in itertools.pairwise([*words, " "]))
)


def texts_for(name: str) -> st.SearchStrategy[str]:
    return NUMBERS if name == "integers" else TEXTS


def chunked(text: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return (text[start:stop] for start, stop in itertools.pairwise(edges))


@UNHURRIED
@given(data=st.data(), cuts=st.lists(st.integers(0, 61), max_size=5), size=st.integers(1, 43))
@pytest.mark.parametrize("name", KINDS)
def test_text_cut_anywhere_has_the_tokens_of_the_whole(
    name: str, data: st.DataObject, cuts: list[int], size: int
) -> None:
    tokenizer, text = KINDS[name], data.draw(texts_for(name)).encode()
    pieces = list(split_chunks(tokenizer, chunked(text, cuts), size))
    end = b"\n" if tokenizer.adds_final_newline and text and not text.endswith(b"\n") else b""
    assert b"".join(pieces) == text + end
    assert all(pieces)
    found = [tokenizer.encode_chunk(piece) for piece in pieces]
    whole = tokenizer.encode_chunk(text + end)
    assert [token for piece in found for token in piece.ids.tolist()] == whole.ids.tolist()
    assert sum(piece.num_unknown for piece in found) == whole.num_unknown


@UNHURRIED
@given(data=st.data())
@pytest.mark.parametrize("name", KINDS)
def test_stream_of_tokens_reads_as_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = KINDS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=23))
    decoder = tokenizer.stream_decoder()
    text = "".join([*[decoder.push(token) for token in ids], decoder.finish()])
    assert text == tokenizer.decode(ids) == tokenizer.decode(np.array(ids, dtype=np.uint16))
    assert tokenizer.decode_bytes(ids).decode("utf-8", errors="replace") == text


@UNHURRIED
@given(text=TEXTS)
@pytest.mark.parametrize("name", ["bytes", "characters", "closed characters", "bpe"])
def test_text_comes_back(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode(text.encode())) == text.encode()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_says_what_it_is(name: str, tmp_path: Path) -> None:
    tokenizer = KINDS[name]
    ids = tokenizer.encode("3 3\n")
    assert ids.dtype == token_dtype(tokenizer.vocab_size)
    ids[0] = 0  # the caller's own
    assert 0 <= tokenizer.bos_token_id < tokenizer.vocab_size
    assert tokenizer.counts is None or tokenizer.counts.shape == (tokenizer.vocab_size,)
    assert tokenizer.is_newline_V.dtype == np.bool_
    ends = [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]).endswith("\n")]
    assert np.flatnonzero(tokenizer.is_newline_V).tolist() == ends
    save_tokenizer(tokenizer, tmp_path / "txl_tokenizer.json")
    for again in (
        load_tokenizer(tmp_path),
        load_tokenizer(tmp_path / "txl_tokenizer.json"),
        tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json()))),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert type(again) is type(tokenizer)
        assert fingerprint(again) == fingerprint(tokenizer)
        assert (
            again.encode("the 3" * (name in OF_TEXT)).tolist() == tokenizer.encode("the 3" * (name in OF_TEXT)).tolist()
        )


@pytest.mark.parametrize("name", KINDS)
def test_foreign_ids_are_refused(name: str) -> None:
    tokenizer = KINDS[name]
    for wrong in (tokenizer.vocab_size, -1):
        message = rf"token id {wrong} is not one of this vocabulary of {tokenizer.kind}; wanted 0 to {tokenizer.vocab_size - 1}"
        for use in (tokenizer.decode, tokenizer.decode_bytes):
            with pytest.raises(UserError, match=message):
                use([0, wrong, 2])
        with pytest.raises(UserError, match=message):
            tokenizer.stream_decoder().push(wrong)


@pytest.mark.parametrize("name", [name for name in OF_TEXT if name != "bytes"])
def test_what_is_not_utf8_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(
        EncodingError, match=r"not UTF-8 \(byte 0xff\); save the text as UTF-8, or read it with"
    ) as caught:
        KINDS[name].encode_chunk("the \u00e9".encode() + b"\xffa")
    assert caught.value.place == 6
    # Bytes of a command line that are not UTF-8 arrive as escapes.
    with pytest.raises(EncodingError, match=r"byte 0xe9"):
        KINDS[name].encode(b"the\xe9".decode("utf-8", errors="surrogateescape"))


def test_bad_text_is_one_line_and_can_be_sent_between_processes() -> None:
    error = pickle.loads(pickle.dumps(EncodingError(12345, "not so; do that")))
    assert str(error) == "byte 12,345 of the text: not so; do that"
    assert (type(error), error.place, error.what) == (EncodingError, 12345, "not so; do that")


@pytest.mark.parametrize("name", ["words", "integers", "bpe"])
def test_text_without_a_place_to_cut_is_refused(name: str) -> None:
    tokenizer, chunk = KINDS[name], b"7" * 2**20
    held = [b"7 7 ", *itertools.repeat(chunk, MAX_UNSPLIT_BYTES // len(chunk) - 1)]
    head = {"bpe": 3}.get(name, 4)  # where the stretch begins
    fits = [*held, chunk[: MAX_UNSPLIT_BYTES + head - sum(map(len, held))]]
    last = list(split_chunks(tokenizer, fits))[-1]
    assert len(last.rstrip(b"\n")) == MAX_UNSPLIT_BYTES
    taken = []
    with pytest.raises(
        EncodingError, match=r"no white space in 16 MiB where it could be cut, is this text\?; leave it out"
    ) as caught:
        taken.extend(split_chunks(tokenizer, [*fits, b"7 7"]))
    assert caught.value.place == head


def test_a_long_line_is_not_said_to_lack_the_white_space_it_has() -> None:
    for name, part in (("punctuation", b"a. b. "), ("bpe", b"      ")):
        with pytest.raises(
            EncodingError, match=r"no line end in 16 MiB, nor white space where this vocabulary may cut; br"
        ):
            list(split_chunks(KINDS[name], [part * (MAX_UNSPLIT_BYTES // 6 + 1)]))


def test_pieces_are_about_as_long_as_wanted() -> None:
    text = b"seven 7\n" * 100_003
    for chunks in ([text], chunked(text, range(0, len(text), 1009))):
        pieces = list(split_chunks(KINDS["words"], chunks, 10_007))
        assert {len(piece) // 1000 for piece in pieces[:-1]} <= {9, 10}
        assert b"".join(pieces) == text


@UNHURRIED
@given(st.binary())
def test_bytes_come_back(text: bytes) -> None:
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text)
    assert BYTES.decode_bytes(ids.tolist()) == text
    assert BYTES.decode(ids) == text.decode("utf-8", errors="replace")


@pytest.mark.parametrize("name", ["bytes", "characters"])
def test_stream_never_shows_half_a_character(name: str) -> None:
    decoder = KINDS[name].stream_decoder()
    tokens = KINDS[name].encode("x\u20acy").tolist()
    assert [decoder.push(token) for token in tokens] == ["x", "", "", "\u20ac", "y"]
    assert decoder.finish() == ""
    assert [decoder.push(token) for token in tokens[1:3]] == ["", ""]
    assert decoder.finish() == "\ufffd"


def test_command_line_bytes_that_are_not_utf8_come_through() -> None:
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    assert BYTES.decode_bytes(BYTES.encode(argument)) == b"caf\xe9"


@pytest.mark.parametrize("name", KINDS)
def test_half_a_surrogate_pair_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"holds '\\ud800' at place 2, which UTF-8 cannot write; take it out"):
        KINDS[name].encode("ab\ud800")


def test_what_bytes_are() -> None:
    assert (BYTES.kind, BYTES.size, BYTES.bos_token_id) == ("bytes", 256, ord("\n"))
    assert ByteTokenizer() == BYTES


def test_fingerprint_is_pinned() -> None:
    """Every corpus and run holds it: should it change, none of them could be used any more."""
    assert fingerprint(BYTES) == "a7b73f94d2a566c1e8408d436a1a2bc8619fc938cdc3b7a79dccc68ae9211b59"
    assert fingerprint(KINDS["characters"]) == "abee60b60f454d8698235816cc9c782317ff6e67acf71a1451e2f383925dbb7c"
    assert fingerprint(KINDS["punctuation"]) == "6cebb569d872b05821f3908f5aed5ff6d4ee2b12f6d50dd73e241e725a1fd8e2"
    assert fingerprint(KINDS["integers"]) == "520e36c6c8283aa8645c53e33b8450f5e8f18d9e54a91bf0a102c1482b76d901"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"kind": "bytse"}',
            r"txl_tokenizer.json: no vocabulary 'bytse' \(did you mean 'bytes'\?\); known: bytes, char",
        ),
        ('{"size": 256}', r"no kind of vocabulary in it, wanted one of bytes, characters, words, bpe, integers; copy"),
        ('{"kind": "bytes", "size": 255, "start_id": 10}', r"damaged, its values do not describe.*'txl prepare'"),
        ('{"kind": "bytes", "si', r"damaged, not readable as JSON .*copy it again"),
        ("\ufeff\xff", r"damaged, not readable as JSON"),
        ("[" * 100_000, r"damaged, not readable as JSON"),
        ("[]", r"wanted a JSON object, found list; copy it again"),
        ("", r"damaged, not readable as JSON"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "txl_tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("words", {"words": ["a", "a", *WORDS[2:]]}, r"damaged, the word 'a' stands in it twice; copy it again"),
        ("words", {"words": [*WORDS[:-1], "a b"]}, r"one of its words is empty or holds white space"),
        ("words", {"words": [*WORDS[:-1], ""]}, r"one of its words is empty or holds white space"),
        ("words", {"words": [*WORDS[:-1], 7]}, r"its words are not a list of texts"),
        ("words", {"words": []}, r"its words are not a list of texts"),
        ("words", {"words": None}, r"its words are not a list of texts"),
        ("words", {"words": [*WORDS[:-1], "\ud800"]}, r"surrogates not allowed"),
        ("words", {"counts": COUNTS.tolist()[1:]}, r"it has 10 counts for 11 tokens"),
        ("words", {"counts": [*COUNTS.tolist()[1:], 0.5]}, r"its counts are not a list of whole numbers"),
        ("words", {"counts": [*COUNTS.tolist()[1:], -1]}, r"its counts are not a list of whole numbers"),
        ("words", {"counts": 7}, r"its counts are not a list of whole numbers"),
        ("words", {"unknown": "<UNK>"}, r"'<UNK>' is not one of its words"),
        ("words", {"end_of_line": ["<eos>"]}, r"\['<eos>'\] is not one of its words"),
        ("words", {"case": "upper"}, r"case 'upper' or splitting 'spaces' is not known"),
        ("words", {"case": []}, r"case \[\] or"),
        ("words", {"further": 1}, r"its values do not describe a vocabulary of words"),
        ("characters", {"characters": ["a", "a"]}, r"one stands there twice"),
        ("characters", {"characters": ["ab"]}, r"not a list of single characters"),
        ("characters", {"characters": "ab"}, r"not a list of single characters"),
        ("characters", {"characters": ["\ud800"]}, r"surrogates not allowed"),
        ("characters", {"counts": [1, 1, 1, 1]}, r"it has 4 counts for 260 tokens"),
        ("characters", {"closed": 1}, r"closed is 1, wanted true or false"),
        ("closed characters", {"characters": []}, r"none at all"),
        ("integers", {"values": 0}, r"values is 0, wanted a whole number from 1 to"),
        ("integers", {"values": True}, r"values is True, wanted a whole number"),
        ("integers", {"values": 2**31}, r"values is 2147483648, wanted"),
        ("bpe", {"tokenizer": None}, r"it holds no tokenizer"),
        ("bpe", {"tokenizer": {}}, r"the tokenizer cannot be used \("),
    ],
)
def test_damaged_values_are_refused(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tokenizer_from_json({**KINDS[name].to_json(), **change}, "v.json")
    assert str(caught.value).startswith("v.json: damaged, ")
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"txl_tokenizer.json: missing, wanted a JSON file; copy it again"):
        load_tokenizer(tmp_path / "txl_tokenizer.json")
    with pytest.raises(UserError, match="is a folder, wanted a file"):
        load_tokenizer(tmp_path)
    for path in (tmp_path, tmp_path / "gone", tmp_path / "gone" / "txl_tokenizer.json"):
        with pytest.raises(
            UserError, match=r"no vocabulary at .*; give a txl_tokenizer.json, the folder of a corpus or"
        ):
            load_tokenizer(path)


def test_every_kind_is_tested() -> None:
    assert {tokenizer.kind for tokenizer in KINDS.values()} == set(tokenizers._KINDS)


@pytest.mark.parametrize(
    ("size", "name"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (267735, "uint32")],
)
def test_token_dtype_is_the_smallest_that_fits(size: int, name: str) -> None:
    dtype = token_dtype(size)
    assert dtype.name == name
    assert dtype.newbyteorder("<") == dtype
    assert np.array([size - 1]).astype(dtype)[0] == size - 1
