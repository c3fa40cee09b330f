"""Byte-pair encoding: every text comes back, training repeats itself, a tokenizer that changes text is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import fingerprint, load_tokenizer, split_chunks, tokenizer_from_json
from transformer_xl.text.tokenizers.bpe import BPETokenizer, last_word_boundary, lines_of, train_bpe

UNHURRIED = settings(deadline=None, max_examples=50)
TEXT = "the quick brown fox isn't here\nthe caf\u00e9 is here\r\n\n\tthe 1,234 \u65e5\u672c\n" * 7
BPE = train_bpe([lines_of(TEXT)], 283)
SOURCE = Path(__file__).parents[3] / "src"


@UNHURRIED
@given(
    st.text() | st.lists(st.sampled_from(["the", " ", "\n", "\r\n", "\x00", "caf\u00e9", "\U0001f600"])).map("".join)
)
def test_any_text_comes_back(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert BPE.decode_bytes(ids) == text.encode()
    assert ids.tolist() == [token for line in lines_of(text) for token in BPE.encode(line).tolist()]


def test_words_become_single_tokens() -> None:
    assert (BPE.vocab_size, BPE.kind, BPE.counts, BPE.adds_final_newline) == (283, "bpe", None, False)
    assert BPE.decode_bytes([BPE.bos_token_id]) == b"\n"
    assert len(BPE.encode("the")) == 1
    assert len(BPE.encode(TEXT)) < len(TEXT.encode()) / 1.5
    assert BPE.encode("").tolist() == []


PARTS = [
    "the",
    " ",
    "  ",
    "x",
    "9",
    "'s",
    "\t",
    "\u00a0",
    ",",
    "!",
    "\u00e9",
    "\u65e5",
    "\u3000",
    "\u2009",
    "\u201c",
    "\x85",
]
PARTS += ["\x1c", "\x00", "\u1680", "\u180e", "\U0001f600", '"', "\u0663", "\u0301"]


@UNHURRIED
@given(st.lists(st.sampled_from(PARTS)).map("".join) | st.text().map(lambda text: text.replace("\n", " ")))
def test_a_line_is_cut_only_where_that_changes_nothing(line: str) -> None:
    """Nothing of what is joined to tokens, whatever was joined in training; wherever the line was cut before."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str
    whole = [part for part, _ in split(line)]
    text = line.encode()
    for end in range(len(text) + 1):
        cut = BPE.last_boundary(text[:end])
        parts = [part for half in (text[:cut], text[cut:]) for part, _ in split(half.decode())]
        assert parts == whole


def test_long_lines_are_cut_at_spaces() -> None:
    line = ("the quick brown fox isn't here " * 1009).encode()
    chunks = list(split_chunks(BPE, [line], 997))
    assert max(map(len, chunks)) < 1100
    assert [token for chunk in chunks for token in BPE.encode(chunk).tolist()] == BPE.encode(line).tolist()


@pytest.mark.parametrize("text", ['"a1", "b2", ', "\u0436 \u0437 ", "\u65e5, \u672c ", "(a) [b] {c}: ", "x, "])
def test_lines_of_any_kind_can_be_cut(text: str) -> None:
    line = (text * 3001).encode()
    assert len(line) - 2 * len(text.encode()) <= last_word_boundary(line) < len(line)
    assert last_word_boundary(b"a b" + b"x" * 7001) == 1
    assert last_word_boundary(b"a b\nc" + b"x" * 7001) == 4
    assert last_word_boundary(b"x" * 7001) == 0


def in_new_process(code: str, *arguments: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment = {**clean, "PYTHONPATH": str(SOURCE), **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_training_is_deterministic() -> None:
    """Also in another process, with another hash seed and number of threads."""
    code = (
        "import sys; from transformer_xl.text.tokenizers.bpe import *;"
        "from transformer_xl.text.tokenizers import fingerprint;"
        "print(fingerprint(train_bpe(iter([lines_of(sys.argv[1])]), 283)))"
    )
    found = in_new_process(code, TEXT, PYTHONHASHSEED="7", TOKENIZERS_PARALLELISM="false")
    assert found.strip() == fingerprint(BPE) == fingerprint(train_bpe([lines_of(TEXT)], 283))


def test_tokenizers_is_imported_only_for_this_kind() -> None:
    in_new_process(
        "import os, sys; from transformer_xl.text.documents import Document;"
        "from transformer_xl.text.tokenizers.training import TokenizerConfig, train_tokenizer;"
        "train_tokenizer(TokenizerConfig(kind='word'), [Document('a', [b'a'], 1)]);"
        "assert 'tokenizers' not in sys.modules;"
        "assert 'TOKENIZERS_PARALLELISM' not in os.environ"
    )


def changed(**changes: object) -> dict[str, object]:
    values = json.loads(json.dumps(BPE.to_json()["tokenizer"]))
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = values
        for folder in folders:
            place = place[folder]
        place[name] = value
    return values


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REMOVING = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
ISOLATING = {**REMOVING, "behavior": "Isolated"}
ADDED = {"id": 283, "content": "fox", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, r"changes the text before encoding it \(it has a normalizer\)"),
        ({"pre_tokenizer__add_prefix_space": True}, r"puts a space before the text \(add_prefix_space\)"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, r"is not byte-level"),
        ({"pre_tokenizer": None}, r"is not byte-level"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVING, BYTE_LEVEL]}},
            r"may drop text \(its pre-tokenizer Split\)",
        ),
        ({"added_tokens": [{**ADDED, "special": False}]}, r"finds its added token 'fox' inside the text"),
        ({"added_tokens": [{**ADDED, "special": True, "id": 285}]}, r"token ids .* without gaps and duplicates"),
        ({"model__vocab__Zz": 5}, r"token ids .* without gaps and duplicates"),
        ({"model__vocab__Zz": 285}, r"token ids .* without gaps and duplicates"),
        ({"model__dropout": 0.1}, r"it has dropout"),
        ({"model__type": "WordPiece", "model__max_input_chars_per_word": 9}, r"cannot be used|is not of type BPE"),
        (
            {"model__continuing_subword_prefix": "##"},
            r"by more than their bytes \(it has continuing_subword_prefix\)",
        ),
        ({"model__end_of_word_suffix": "</w>"}, r"by more than their bytes \(it has end_of_word_suffix\)"),
        ({"model__merges": [["Q", "absent"]]}, r"cannot be used \("),
        (
            {"truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}},
            r"truncates or pads texts",
        ),
    ],
)
def test_a_tokenizer_that_changes_text_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed(**changes)))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_byte_without_a_token_is_refused() -> None:
    values = changed()
    values["model"]["vocab"] = {
        ("\u0101\u0101" if token == "!" else token): place for token, place in values["model"]["vocab"].items()
    }
    with pytest.raises(UserError, match="is not byte-level"):
        tokenizer_from_json({"kind": "bpe", "tokenizer": values})


@pytest.mark.parametrize("pre_tokenizer", [BYTE_LEVEL, {"type": "Sequence", "pretokenizers": [ISOLATING, BYTE_LEVEL]}])
def test_other_byte_level_tokenizers_are_taken(tmp_path: Path, pre_tokenizer: dict[str, object]) -> None:
    special = {**ADDED, "content": "<|end|>", "special": True}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed(pre_tokenizer=pre_tokenizer, added_tokens=[special])))
    loaded = load_tokenizer(file)
    assert isinstance(loaded, BPETokenizer)
    assert loaded.vocab_size == 284
    text = "the <|end|> fox\n\nis here "
    ids = loaded.encode(text)
    assert 283 not in ids.tolist()
    assert loaded.decode(ids) == text
    assert loaded.decode([283]) == "<|end|>"
    assert tokenizer_from_json(json.loads(json.dumps(loaded.to_json()))).encode(text).tolist() == ids.tolist()
    # Tokens may reach over spaces here.
    assert loaded.last_boundary(b"the fox") == 0
    assert loaded.last_boundary(b"the\nfox is") == 4


def test_empty_prefix_and_suffix_are_taken() -> None:
    values = changed(model__continuing_subword_prefix="", model__end_of_word_suffix="")
    assert tokenizer_from_json({"kind": "bpe", "tokenizer": values}).encode(TEXT).tolist() == BPE.encode(TEXT).tolist()
