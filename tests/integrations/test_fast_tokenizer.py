"""Our tokenizers by the library `tokenizers`: ids, texts and places are ours for every text; special tokens by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tokenizers import END, byte_level, word_piece
from refusals import do, txl
from small_runs import make_run
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from transformer_xl.config import UserError
from transformer_xl.integrations.huggingface import TransformerXLTokenizer, TransformerXLTokenizersBackend, from_run
from transformer_xl.integrations.huggingface.tokenization import token_offsets, transformers_tokenizer
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.bpe import BPETokenizer, train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

WORDS = ("<eos>", "<unk>", "<pad>", "the", "cat", ",", "cat,", "\u010a", "end")
SPLIT_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FAST: dict[str, Any] = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("the cadog\n\u00e9\u2603"),
    "char without newline": CharTokenizer("the ca"),
    "bpe": train_bpe([["the cat the cat\n", "  the dog;\n", "caf\u00e9 <pad> ;\n"] * 3], 290),
    "bpe with an end": BPETokenizer.of_library(byte_level()),
    "bpe across spaces": BPETokenizer.of_library(byte_level(pre_tokenizer=SPLIT_LEVEL)),
    "words": WordTokenizer(WORDS, None, "<eos>", "<unk>"),
}
SLOW: dict[str, Tokenizer] = {
    "characters alone": CharTokenizer("the ca", byte_fallback=False),
    "moses": WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer("moses")),
    "lowercase": WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer(lowercase=True)),
    "no unknown word": WordTokenizer(WORDS, None, "<eos>", None),
    "words without newlines": WordTokenizer(WORDS, None, None, "<unk>"),
    "integer": IntegerTokenizer(31),
    "library": LibraryTokenizer("tokenizers", json.dumps(word_piece())),
}
PARTS = [
    "the",
    " ",
    "  ",
    "\n",
    "\n\n",
    ";\n",
    "\r\n",
    "\t",
    " cat,",
    "caf\u00e9",
    "\u2603",
    "\U0001f600",
    "\x00",
    "\x85",
]
PARTS += ["\u00a0", "\u3000", "\u010a", "\u00ff", "'s", "1,2", "e\u0301", "<pad>", "<|bos|>", "<unk>", "\x1c", "\u180e"]
TEXTS = st.text() | st.lists(st.sampled_from(PARTS), max_size=23).map("".join)
each_fast = pytest.mark.parametrize("name", FAST)


def opened(folder: Path, tokenizer: Tokenizer, **arguments: Any) -> Any:
    """Export a run with this tokenizer, and open its tokenizer; `convert` needs no transformers."""
    run = make_run(folder / "run", tokenizer=tokenizer)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    assert txl("convert", run.path, folder / "hub", "--to", "huggingface", *words).status == 0
    return AutoTokenizer.from_pretrained(folder / "hub")


@each_fast
@settings(deadline=None, max_examples=150)
@given(text=TEXTS)
def test_ids_texts_and_places_are_ours(name: str, text: str) -> None:
    own = FAST[name]
    fast = MADE.setdefault(name, transformers_tokenizer(own))
    expected = own.encode(text).tolist()
    encoding = fast(text, return_offsets_mapping=True, split_special_tokens=True)
    assert encoding["input_ids"] == fast(text)["input_ids"] == expected
    assert fast.decode(expected) == fast.decode(expected, skip_special_tokens=True) == own.decode(expected)
    places = token_offsets(own, text)
    assert encoding["offset_mapping"] == places
    for index, character in enumerate(text):
        token = encoding.char_to_token(index)
        if token is None:
            assert name == "words"
            assert character.isspace()
        else:
            assert places[token][0] <= index < places[token][1]
    assert encoding.word_ids() == sorted(encoding.word_ids())


MADE: dict[str, Any] = {}


@each_fast
def test_folders_open_as_fast_tokenizers(name: str, tmp_path: Path) -> None:
    """Those that `convert` writes and those that save_pretrained writes again, and tokenizer.json by itself."""
    own, text = FAST[name], "the cat, caf\u00e9\n\n<pad> end\n"
    tokenizer = opened(tmp_path, own)
    tokenizer.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "again")):
        assert isinstance(one, TransformerXLTokenizersBackend)
        assert one.is_fast
        assert one(text)["input_ids"] == own.encode(text).tolist()
        assert len(one) == one.vocab_size == own.vocab_size
        names = one.get_vocab()  # of words, padding has an id of its own
        assert sorted(names.values()) == [*range(own.vocab_size + (name == "words"))]
        assert names[one.pad_token] == one.pad_token_id
        assert one.bos_token_id == one.convert_tokens_to_ids(one.bos_token) == own.bos_token_id
        # what programs put before a text is that token
        pasted = one(f"{one.bos_token}{text}")["input_ids"]
        assert pasted == [own.bos_token_id, *own.encode(text).tolist()]
        assert one.unk_token_id == own.unk_token_id
        assert one.pad_token_id < own.vocab_size or name == "words"
        batch = one([text, text[:5]], padding=True)
        short = own.encode(text[:5]).tolist()
        assert batch["input_ids"][1] == [one.pad_token_id] * (len(batch["input_ids"][0]) - len(short)) + short
        assert one.decode(batch["input_ids"][1], skip_special_tokens=True) == own.decode(short)
        assert one.decode(batch["input_ids"][1]).startswith(one.pad_token)
        assert one.convert_ids_to_tokens(one.pad_token_id)
        with pytest.raises(UserError, match="vocabulary is fixed"):
            one.add_tokens(["<new>"])
        begun = AutoTokenizer.from_pretrained(tmp_path / "hub", add_bos_token=True)
        assert begun("the")["input_ids"] == [own.bos_token_id, *own.encode("the").tolist()]
    do(f"convert {tmp_path / 'hub'} {tmp_path / 'back'}")


@pytest.mark.parametrize("name", SLOW)
def test_where_the_library_cannot_be_exact_our_own_code_encodes(name: str, tmp_path: Path) -> None:
    own, text = SLOW[name], "30 1\n2" if name == "integer" else "the cat"
    tokenizer = opened(tmp_path, own)
    assert isinstance(tokenizer, TransformerXLTokenizer)
    assert not (tmp_path / "hub" / "tokenizer.json").exists()
    assert tokenizer(text)["input_ids"] == own.encode(text).tolist()
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (
        own.bos_token_id,
        0 if name == "library" else own.vocab_size,
    )
    short, long = "1" if name == "integer" else "the", text
    batch = tokenizer([short, long], padding=True)["input_ids"]
    assert tokenizer.batch_decode(batch, skip_special_tokens=True)[0] == own.decode(own.encode(short))
    with pytest.raises(UserError, match="use TransformerXLTokenizer"):
        TransformerXLTokenizersBackend(tokenizer=own)


@pytest.mark.parametrize(
    ("own", "name", "expected", "pad"),
    [
        (FAST["byte"], "\\n", 10, 255),
        (FAST["bpe"], "\\n", FAST["bpe"].encode("\n")[0], FAST["bpe"].token_bytes.index(b"\xff")),
        (FAST["bpe with an end"], None, END, None),
        (FAST["bpe with an end"], "<|endoftext|>", END, None),
        (FAST["char"], ".", len("the cadog\n\u00e9\u2603") + ord("."), None),
        (FAST["words"], "<eos>", 0, 0),
        (FAST["words"], "end", 8, 8),
        (SLOW["moses"], "end", 8, 8),
        (SLOW["integer"], "7", 7, 7),
        (SLOW["library"], "[SEP]", 3, 0),
    ],
)
def test_the_token_that_ends_a_text_can_be_named(own: Tokenizer, name: str, expected: int, pad, tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, own, **({} if name is None else {"eos_token": name}))
    text = name and name.replace("\\n", "\n")
    model, other = from_run(tmp_path / "run", eos_token=text)
    values = json.loads((tmp_path / "hub" / "generation_config.json").read_text())
    for one in (tokenizer, other):
        assert (one.eos_token, one.eos_token_id) == (text or "<|endoftext|>", expected)
        assert pad is None or one.pad_token_id == pad
        assert one.pad_token_id == values["pad_token_id"] == model.generation_config.pad_token_id
        assert one.bos_token_id == own.bos_token_id
        one.pad_token = one.eos_token
        assert one.pad_token_id == expected
    assert expected == values["eos_token_id"] == model.generation_config.eos_token_id


@each_fast
@pytest.mark.parametrize("words", [["the", "cat,", "a", "dog"], ["the ", " cat", "", "a\n", "caf\u00e9"]])
def test_words_that_are_given_one_by_one_are_those_of_a_text(name: str, words: list[str]) -> None:
    fast = transformers_tokenizer(FAST[name])
    text = "the cat, a dog" if words[0] == "the" else "the  cat  a\ncaf\u00e9"
    encoding = fast(words, is_split_into_words=True)
    assert fast.decode(encoding["input_ids"]) == fast.decode(fast(text)["input_ids"])
    assert {words[index] for index in encoding.word_ids()} == {*words} - {""} or name != "words"
    if name != "bpe across spaces":
        assert encoding["input_ids"] == fast(text)["input_ids"]
    batch = fast([words, ["a"]], is_split_into_words=True)["input_ids"]
    assert batch == [encoding["input_ids"], fast("a")["input_ids"]]


def test_words_of_characters_alone_keep_their_spaces() -> None:
    tokenizer = transformers_tokenizer(SLOW["characters alone"])
    assert tokenizer(["the", "a"], is_split_into_words=True)["input_ids"] == tokenizer("the a")["input_ids"]


@pytest.mark.parametrize("text", ["a\ud800b", ["a", "\udcff"], [["a", "b\udcff"]]])
def test_an_unpaired_surrogate_is_refused(text: Any) -> None:
    fast = transformers_tokenizer(FAST["bpe"])
    with pytest.raises(UserError, match=r"has '.ud.00' at index|has '.udcff' at index"):
        fast(text, is_split_into_words=isinstance(text, list) and isinstance(text[0], list))


def test_the_end_is_the_token_of_the_text_where_a_byte_is_written_like_it(tmp_path: Path) -> None:
    own = BPETokenizer.of_library(byte_level())
    expected = own.encode("\u00e9").tolist()
    tokenizer = opened(tmp_path, own, eos_token="\u00e9")
    values = json.loads((tmp_path / "hub" / "generation_config.json").read_text())
    assert [tokenizer.eos_token_id] == [values["eos_token_id"]] == expected
    assert tokenizer.decode(expected) == "\u00e9"


def test_without_a_name_no_token_ends_a_text(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, FAST["byte"])
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (None, None)
    assert "eos_token_id" not in json.loads((tmp_path / "hub" / "generation_config.json").read_text())


@pytest.mark.parametrize(
    ("own", "name", "message"),
    [
        (
            FAST["bpe"],
            "</s>",
            r"eos.token[ =]'</s>' is none of the 2[0-9]+ tokens.*a text that is one token, such as '\\n'",
        ),
        (FAST["bpe with an end"], "xyz", r"'<\|endoftext\|>'"),
        (
            FAST["words"],
            "xyz",
            r"none of the 9 tokens of this word vocabulary; give a text that is one token, such as '<eos>'",
        ),
        (SLOW["library"], "xyz", r"library vocabulary; give a text that is one token, such as '\[PAD\]'"),
    ],
)
def test_an_unknown_token_is_refused(own: Tokenizer, name: str, message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer=own)
    result = txl("convert", run.path, tmp_path / "hub", "--to", "huggingface", "--eos-token", name)
    assert result.status == 2
    assert re.search(message, result.err)
    assert not (tmp_path / "hub").exists()
    with pytest.raises(UserError, match=message):
        from_run(run, eos_token=name)
    assert "leave it out" in txl("convert", run.path, tmp_path / "hub", "--to", "huggingface-4.37", "--eos-token=a").err


def test_a_text_ends_at_the_named_token_and_batches_are_padded_inside_the_logits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tokenizer=FAST["byte"], noise=0.3)
    model, tokenizer = from_run(run, eos_token="e")
    inputs = tokenizer(["the", "a cat"], return_tensors="pt", padding=True)
    alone = [
        model.generate(**tokenizer(one, return_tensors="pt"), max_new_tokens=30, do_sample=False)[0]
        for one in ("the", "a cat")
    ]
    together = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    for row, expected, start in zip(together, alone, ("the", "a cat"), strict=True):
        assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(expected, skip_special_tokens=True)
        assert "e" not in tokenizer.decode(row)[:-1].removeprefix("<pad><pad>").removeprefix(start).rstrip("<pad>e")
    logits = model(**inputs).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
    assert losses.isfinite()
    labels = DataCollatorForLanguageModeling(tokenizer, mlm=False)([tokenizer("a\nb\n"), tokenizer("\n")])["labels"]
    assert labels.tolist() == [[97, 10, 98, 10], [-100, -100, -100, 10]]  # no token of a text is taken for padding
    assert AutoModelForCausalLM
