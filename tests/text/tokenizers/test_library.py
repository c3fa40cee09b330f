"""Tokenizers of other libraries: their ids line by line, corpora that are whole, right counts; `<|endoftext|>`."""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tokenizers import (
    END,
    LINES,
    byte_level,
    prefix_space,
    sentencepiece_model,
    unigram,
    word_piece,
    xlnet_model,
)
from refusals import do
from small_runs import make_run
from tokenizers import Tokenizer as TheirTokenizer
from torch import Tensor

from transformer_xl import evaluate, generate, prepare, score, surprisal
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import Tokenizer, load_tokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer, lines_of
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.storage import tokenizer_from_json

TEXT = "".join(LINES)
FILES = {"word piece": word_piece(), "unigram": unigram(), "prefix space": prefix_space()}
each_file = pytest.mark.parametrize("name", FILES)


def loaded(folder: Path, values: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return load_tokenizer(folder / "tokenizer.json")


@each_file
@settings(deadline=None, max_examples=50)
@given(text=st.text() | st.lists(st.sampled_from([*LINES, " ", "[CLS]", "\u2603"])).map("".join))
def test_ids_and_places_are_those_of_the_library(name: str, text: str) -> None:
    own = tokenizer_from_json({"kind": "library", "library": "tokenizers", "content": FILES[name]})
    theirs = TheirTokenizer.from_str(json.dumps(FILES[name]))
    theirs.no_truncation()
    theirs.encode_special_tokens = True
    lines = [theirs.encode(line, add_special_tokens=False) for line in lines_of(text)]
    assert own.encode(text).tolist() == [index for line in lines for index in line.ids]
    assert isinstance(own, LibraryTokenizer)
    places, position = [], 0
    for line, expected in zip(lines_of(text), lines, strict=True):
        places += [(position + start, position + end) for start, end in expected.offsets]
        position += len(line)
    assert own.places(text) == places
    if own.bos_token_id not in own.encode(text):
        texts = [theirs.decode(line.ids, False) for line in lines]
        assert own.decode(own.encode(text)).split() == " ".join(texts).split()


@pytest.mark.parametrize("name", [*FILES, "sentencepiece"])
def test_a_corpus_and_a_run_are_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may go: corpus and run have it. Bytes and words are those of the text, and its words have surprisals."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    file = Path("spiece.model" if name == "sentencepiece" else "tokenizer.json")
    file.write_bytes(sentencepiece_model() if name == "sentencepiece" else json.dumps(FILES[name]).encode())
    do(f"prepare text.txt --valid-fraction 0 --test-fraction 0 --tokenizer {file} --out corpus")
    file.unlink()
    own = load_tokenizer("corpus")
    corpus = prepare(out="again", documents={"train": [TEXT]}, tokenizer="corpus", num_workers=2)
    split = corpus.split("train")
    end = [] if own.document_end is None else [own.document_end.id]
    assert split.tokens[:].tolist() == own.encode(TEXT).tolist() + end
    run = make_run(tmp_path / "run", tokenizer=own)
    sums = evaluate(run, split)
    assert (sums.bytes, sums.words) == (len(TEXT.encode()), len(TEXT.split()))
    assert sums.bits_per_byte == pytest.approx(sums.nats / math.log(2) / len(TEXT.encode()))
    part = evaluate(run, split, max_tokens=20)
    assert part.bytes == pytest.approx(20 * split.bytes_per_token, abs=1)
    assert (part.words, part.perplexity) == (None, None)
    (scored,) = score(run, LINES[0])
    assert (scored.sums.bytes, scored.sums.words) == (len(LINES[0]), 6)
    rows = [row for row in surprisal(run, [LINES[0].strip()], memory_lengths=[4]) if row["word"]]
    assert [row["word"] for row in rows] == LINES[0].split()
    assert sum(row["surprisal_bits_alone"] for row in rows) <= scored.sums.nats / math.log(2) + 1e-6
    assert all(row["tokens"] for row in rows)
    assert generate(run, "the cat", max_new_tokens=5, eos_token_ids=()).text is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordPiece"}}, "cannot use it"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "cannot use it"),
        ({"added_tokens": [{"id": 99, "content": "x", "special": True}]}, "without gaps"),
        ({"model": {**FILES["prefix space"]["model"], "dropout": 0.1}}, "tokens of a text are drawn at random"),
    ],
)
def test_what_its_library_cannot_use_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path, {**FILES["word piece"], **changes})
    assert "\n" not in str(caught.value)


def test_a_damaged_model_of_sentencepiece_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model()
    for content in (model[:50], b"", b"text"):
        (tmp_path / "a.model").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.model: not a valid library tokenizer"):
            load_tokenizer(tmp_path / "a.model")


@settings(deadline=None, max_examples=20)
@given(text=st.text())
def test_sentencepiece_has_its_ids_and_places(text: str) -> None:
    """With bytes for unknown characters and newlines kept, as Llama's, decoding restores every line but its spaces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sentencepiece_model(
        vocab_size=320, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False,
    )  # fmt: skip
    own = tokenizer_from_json(
        {"kind": "library", "library": "sentencepiece", "content": base64.b64encode(model).decode()}
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert own.encode(text).tolist() == [index for line in lines_of(text) for index in theirs.encode(line)]
    assert (own.unk_token_id, own.document_end) == (0, (2, "</s>"))
    if "\u2581" not in text and "\x00" not in text:
        assert own.decode(own.encode(text)) == text


XLNET_TEXTS = [
    "The cat sat on the mat.",
    "``the cat'' said ''it'' \"here\" `a' don't",
    "caf\u00e9 na\u00efve e\u0301\u0323 \u00c9t\u00e9 \u212b \ufb01ne x\u00b2 \u00bd \u0130",
    "1,000, 1,000,345, 20, 9, and 9,9,1, (1,) a1, 7,",
    "  several   spaces\t and\u00a0 \u3000 more \r\n lines\n\n of text \n",
    "",
    "cats \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467, \U0001f1e9\U0001f1ea",
    "\u4e2d\u6587\uff0c\u5b57 \ud55c\uad6d the \u0915\u093f \u2581 <sep> </s>",
]


@settings(deadline=None, max_examples=30)
@given(text=st.one_of(st.text(), st.text(alphabet="19,0 a`'.\n\u00e9\u0301")))
def test_xlnet_has_the_ids_of_its_code(text: str) -> None:
    """The code, in a few lines: the whole text at once, where ours reads lines."""
    sentencepiece, model = pytest.importorskip("sentencepiece"), xlnet_model()
    own = tokenizer_from_json({"kind": "library", "library": "xlnet", "content": base64.b64encode(model).decode()})
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    for one in [text, *XLNET_TEXTS]:
        changed = " ".join(one.strip().split()).replace("``", '"').replace("''", '"')
        changed = "".join(part for part in unicodedata.normalize("NFKD", changed) if not unicodedata.combining(part))
        pieces = list[str]()
        for piece in theirs.encode(changed, out_type=str):
            if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
                number = theirs.encode(piece[:-1].replace("\u2581", ""), out_type=str)
                if piece[0] != "\u2581" and number[0][0] == "\u2581":
                    number = number[1:] if len(number[0]) == 1 else [number[0][1:], *number[1:]]
                pieces += [*number, ","]
            else:
                pieces.append(piece)
        assert own.encode(one).tolist() == [theirs.piece_to_id(piece) for piece in pieces]
    assert isinstance(own, LibraryTokenizer)
    assert (own.document_end, own.padding, own.unk_token_id) == ((7, "<eod>"), (5, "<pad>"), 0)


def test_tokens_of_xlnet_have_places() -> None:
    """Those of the text as it is, though accents and spaces are changed and a number is split from its comma."""
    content = base64.b64encode(xlnet_model()).decode()
    own = tokenizer_from_json({"kind": "library", "library": "xlnet", "content": content})
    assert isinstance(own, LibraryTokenizer)
    text = "  the  caf\u00e9\u0301 1,000, ``a''\nat\n"
    found = [
        (own.names[index], text[slice(*place)]) for index, place in zip(own.encode(text), own.places(text), strict=True)
    ]
    assert found == [
        ("\u2581the", "the"), ("\u2581ca", "  ca"), ("f", "f"), ("e", "\u00e9\u0301"), ("\u2581", " "), ("1,", "1,"),
        ("0", "0"), ("0", "0"), ("0", "0"), (",", ","), ("\u2581", " "), ('"', "``"), ("a", "a"), ('"', "''"),
        ("\u2581", ""), ("at", "at"),
    ]  # fmt: skip
    assert own.word_indices(text.encode()).tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


# The end of a document


def test_endoftext_ends_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In corpora after each document, and first of all; a text spelled like it is text, and its bytes are none."""
    own = loaded(tmp_path, byte_level())
    assert isinstance(own, BPETokenizer)
    assert (own.document_end, own.bos_token_id, own.decode([END])) == ((END, "<|endoftext|>"), END, "")
    assert END not in own.encode("a<|endoftext|>b").tolist()
    corpus = prepare(out=tmp_path / "files", documents={"train": [*LINES, ""], "valid": LINES[:1]}, tokenizer=own)
    split = corpus.split("train")
    tokens, starts = split.tokens[:].tolist(), split.document_starts.tolist()
    assert tokens == [index for line in LINES for index in [*own.encode(line).tolist(), END]]
    assert starts == [0, *(place + 1 for place, index in enumerate(tokens[:-1]) if index == END)]
    by_line = prepare(out=tmp_path / "lines", documents={"train": [TEXT]}, tokenizer=own, document_unit="line")
    assert by_line.split("train").tokens[:].tolist() == tokens
    assert by_line.split("train").document_starts.tolist() == starts
    run = make_run(tmp_path / "run", tokenizer=own)
    assert evaluate(run, split, max_tokens=len(tokens) - 1).bytes == len(TEXT.encode())
    with_end = generate(run, "the", max_new_tokens=9, logits_processor=lambda ids, logits: force_end(logits))
    assert (with_end.token_ids, with_end.finish_reason, with_end.text) == ((END,), "eos", "")


def force_end(logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([END]), 99.0)


def test_corpora_and_runs_of_before_stay_as_they_were() -> None:
    """Their files do not say that a token ends documents."""
    before = BPETokenizer.from_json({"tokenizer": byte_level()})
    assert (before.document_end, before.bos_token_id) == (None, before.encode("\n")[0])
    assert before.decode([END]) == "<|endoftext|>"
    assert before.to_json() == {"kind": "bpe", "tokenizer": byte_level()}
    with pytest.raises(UserError, match="'<eos>' is none of its special tokens"):
        tokenizer_from_json({"kind": "bpe", "tokenizer": byte_level(), "document_end_token": "<eos>"})


def test_a_token_of_two_words_is_refused() -> None:
    values = unigram()
    values["pre_tokenizer"] = {**values["pre_tokenizer"], "split": False}
    values["model"]["vocab"].append(["\u2581the\u2581cat", -0.1])
    own = tokenizer_from_json({"kind": "library", "library": "tokenizers", "content": values})
    with pytest.raises(UserError, match="the token 'the cat' has parts of two words"):
        own.word_indices(b"the cat sat\n")
    assert np.array_equal(own.word_indices(b"sat\n"), np.zeros(len(own.encode("sat\n"))))
