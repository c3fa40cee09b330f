"""Byte-pair encoding: decoding restores every text, training is deterministic, lossy tokenizers are refused."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import fingerprint, load_tokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer, lines_of, train_bpe
from transformer_xl.text.tokenizers.storage import tokenizer_from_json

PROPERTY = settings(deadline=None, max_examples=50)
TEXT = "the quick brown fox isn't here\nthe caf\u00e9 is here\r\n\n\tthe 1,234 \u65e5\u672c\n" * 7
BPE = train_bpe([lines_of(TEXT)], vocab_size=283)  # 256 bytes and 27 merges, so that the next free id is 283
SOURCE = Path(__file__).parents[3] / "src"


@PROPERTY
@given(
    st.text() | st.lists(st.sampled_from(["the", " ", "\n", "\r\n", "\x00", "caf\u00e9", "\U0001f600"])).map("".join)
)
def test_decoding_restores_every_text(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert ids.tolist() == [token for line in lines_of(text) for token in BPE.encode(line).tolist()]


def test_a_run_without_whitespace_is_cut_in_training_alone() -> None:
    """Training takes the square of the longest word's length: hours for a genome, or for a line of base64."""
    tokenizer = train_bpe([["a" * 5000]], 280)
    assert max(map(len, tokenizer.token_bytes)) == 256
    assert len(tokenizer.encode("a" * 5000)) == 20  # 19 of 256 bytes, and the rest
    assert tokenizer.to_json()["tokenizer"]["pre_tokenizer"]["type"] == "ByteLevel"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_training_ends_at_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The library itself notices none until it has finished."""
    (tmp_path / "genome.txt").write_text("".join(random.Random(1).choices("ACGT\n", k=2_000_000)))
    words = ["prepare", "genome.txt", "--tokenizer", "bpe", "--vocab-size", "500000", "--out", "corpus"]
    process = subprocess.Popen(
        [sys.executable, "-m", "transformer_xl", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while not (trainers := [int(child) for child in children.read_text().split()]):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(number)
        process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert not any(Path(f"/proc/{child}").exists() for child in trainers)
    assert [path.name for path in tmp_path.iterdir()] == ["genome.txt"]


def test_frequent_words_become_single_tokens() -> None:
    # counts is None: a BPE tokenizer does not record how often tokens occurred in its training text. It adds no final
    # newline to a document, because no end-of-sequence token replaces its newlines.
    assert (BPE.vocab_size, BPE.kind, BPE.counts, BPE.adds_final_newline) == (283, "bpe", None, False)
    assert BPE.decode_bytes([BPE.bos_token_id]) == b"\n"
    assert len(BPE.encode("the")) == 1
    assert len(BPE.encode(TEXT)) < len(TEXT.encode()) / 1.5


def test_many_lines_are_encoded_in_order() -> None:
    lines = [f"the {number}\n" for number in range(1301)]  # more than two of the batches that are encoded at once
    assert BPE.encode("".join(lines)).tolist() == [token for line in lines for token in BPE.encode(line).tolist()]


# Letters, digits and symbols; the last three are an Arabic digit, a combining accent and NUL.
PARTS = ["the", "'s", *'x9,!\u00e9\u65e5\u201c\U0001f600"\u0663\u0301\x00']
# Unicode whitespace, and U+180E, which only older Unicode versions regard as whitespace; mostly spaces.
WHITESPACE = list("\t\u00a0\u3000\u2009\x85\x1c\u1680\u180e") + 3 * [" ", "  "]


@PROPERTY
@given(st.lists(st.sampled_from(PARTS + WHITESPACE)).map("".join) | st.text().map(lambda text: text.replace("\n", " ")))
def test_last_boundary_is_not_inside_a_match_of_the_gpt2_pattern(line: str) -> None:
    """No token extends beyond a match, so none crosses the boundary, whatever the merges are. Tests every prefix."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str
    matches = [match for match, _ in split(line)]
    text = line.encode()
    for end in range(len(text) + 1):
        boundary = BPE.last_boundary(text[:end])
        halves = text[:boundary], text[boundary:]
        assert [match for half in halves for match, _ in split(half.decode())] == matches


def test_new_process_trains_the_same_tokenizer_and_imports_the_library_only_for_bpe() -> None:
    code = """if True:
        import os, sys
        from transformer_xl.text.documents import Document
        from transformer_xl.text.tokenizers import fingerprint
        from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig
        from transformer_xl.text.tokenizers.training import train_tokenizer
        documents = [Document("a", [sys.argv[1].encode()])]
        train_tokenizer(TokenizerConfig(kind="word"), documents)
        assert "tokenizers" not in sys.modules
        assert "TOKENIZERS_PARALLELISM" not in os.environ
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        print(fingerprint(train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=283), documents)))
    """
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {"PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, TEXT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == fingerprint(BPE) == fingerprint(train_bpe([lines_of(TEXT)], vocab_size=283))


def tokenizer_json(**changes: object) -> dict[str, object]:
    """The content of tokenizer.json, with changed values; `__` in a name separates the keys of nested objects."""
    content = json.loads(json.dumps(BPE.to_json()["tokenizer"]))
    for name, value in changes.items():
        *parents, key = name.split("__")
        target = content
        for parent in parents:
            target = target[parent]
        target[key] = value
    return content


# Parts of a tokenizer.json: three pre-tokenizers, and an added token.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REMOVING = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
ISOLATING = {**REMOVING, "behavior": "Isolated"}
ADDED = {"id": 283, "content": "fox", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
VOCAB = BPE.to_json()["tokenizer"]["model"]["vocab"]


@pytest.mark.parametrize(
    # `changes`: see `tokenizer_json`
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "it has normalizer, which can change"),
        ({"truncation": {"direction": "Right", "max_length": 9}}, "it has truncation"),
        ({"model__dropout": 0.1}, "it has dropout"),
        ({"model__continuing_subword_prefix": "##"}, "it has continuing_subword_prefix"),
        ({"model__end_of_word_suffix": "</w>"}, "it has end_of_word_suffix"),
        ({"pre_tokenizer__add_prefix_space": True}, "it changes the text"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "is not byte-level BPE"),
        ({"pre_tokenizer": None}, "is not byte-level BPE"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVING, BYTE_LEVEL]}}, "Split may drop text"),
        ({"added_tokens": [{**ADDED, "special": False}]}, "'fox' is matched inside the text"),
        ({"added_tokens": [{**ADDED, "special": True, "id": 285}]}, "without gaps and duplicates"),
        # a second token with id 5; then a vocabulary without the token of the byte "!"
        ({"model__vocab__Zz": 5}, "without gaps and duplicates"),
        ({"model__vocab": {"QQ" if token == "!" else token: VOCAB[token] for token in VOCAB}}, "is not byte-level BPE"),
        ({"model__type": "WordPiece", "model__max_input_chars_per_word": 9}, "cannot use it|is not byte-level BPE"),
        ({"model__merges": [["Q", "absent"]]}, r"cannot use it \("),
        # the library panics; and it would make room for all ids up to the largest, in half a minute
        ({"model__merges": [["\u0136", "r"]]}, r"cannot use it \("),
        ({"model__vocab__Zz": 2**31 - 1}, "without gaps and duplicates"),
    ],
)
def test_tokenizer_that_changes_text_is_no_bpe(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    """Its library encodes then, as it is, or cannot use it either."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(**changes)))
    with pytest.raises(ValueError, match=message):
        BPETokenizer.of_library(tokenizer_json(**changes))
    if re.search("dropout|without gaps|cannot use it|truncation|continuing_subword", message):
        with pytest.raises(UserError, match=f"{file}: not a valid library tokenizer") as caught:
            load_tokenizer(file)
        assert "\n" not in str(caught.value)
    else:
        assert load_tokenizer(file).kind == "library"


@pytest.mark.parametrize("pre_tokenizer", [BYTE_LEVEL, {"type": "Sequence", "pretokenizers": [ISOLATING, BYTE_LEVEL]}])
def test_other_byte_level_tokenizers_are_accepted(tmp_path: Path, pre_tokenizer: dict[str, object]) -> None:
    special = {**ADDED, "content": "<|end|>", "special": True}
    changes = {"model__continuing_subword_prefix": "", "model__end_of_word_suffix": "", "added_tokens": [special]}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(pre_tokenizer=pre_tokenizer, **changes)))
    tokenizer = load_tokenizer(file)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.vocab_size == 284
    text = "the <|end|> fox\n\nis here "
    ids = tokenizer.encode(text)
    assert 283 not in ids.tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([283]) == "<|end|>"
    assert tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json()))).encode(text).tolist() == ids.tolist()
    # Tokens may contain spaces between words here, so only newlines are boundaries.
    assert tokenizer.last_boundary(b"the fox") == 0
    assert tokenizer.last_boundary(b"the\nfox is") == 4
