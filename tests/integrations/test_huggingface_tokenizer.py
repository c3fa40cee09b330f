"""Our tokenizers in transformers: ids, texts and offsets are those of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import make_run
from tokenizers import Tokenizer as LibraryWords
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.tokenizers import tokenizer_from_object
from transformer_xl.integrations.huggingface import TransformerXLTokenizer
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer, PreTokenizerName
from transformer_xl.text.tokenizers.word import WordTokenizer

TEXT = "the cat, the\n dog <pad> says: caf\u00e9 \u2603!\n\nthe <eos> \U0001f600 end\n"
WORDS = ("<eos>", "<unk>", "<pad>", "the", "cat", ",", "dog", "says", "cat,", "Ċ", "end")


def words(name: PreTokenizerName, *, lowercase: bool = False) -> WordTokenizer:
    return WordTokenizer(WORDS, None, "<eos>", "<unk>", PreTokenizer(name, lowercase))


TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("the cadog\n"),
    "char without bytes": CharTokenizer("".join(sorted(set(TEXT))), byte_fallback=False),
    "bpe": train_bpe([["the cat the cat\n", "the dog\n", "caf\u00e9 <pad>\n"]], 280),
    "words": words("whitespace"),
    "words, lowercase": words("whitespace", lowercase=True),
    "words, punctuation": words("punctuation"),
    "words, moses": words("moses"),
    "words without newlines": WordTokenizer(WORDS, None, None, "<unk>"),
    "integer": IntegerTokenizer(31),
    "integer without newlines": IntegerTokenizer(31, add_eos=False),
}
NUMBERS = "3 17 4\n\n30  1\n2"
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def text_of(name: str) -> str:
    return NUMBERS if name.startswith("integer") else TEXT


@each_tokenizer
def test_ids_and_texts_are_ours(name: str, tmp_path: Path) -> None:
    """Also after saving and opening; what is spelled like the padding token is text."""
    own = TOKENIZERS[name]
    TransformerXLTokenizer(tokenizer=own).save_pretrained(tmp_path)
    make_run(tmp_path / "run", tokenizer=own)
    (tmp_path / "config.json").write_text('{"model_type": "transformer-xl", "architecture": "transformer-xl"}')
    opened = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (TransformerXLTokenizer(tokenizer=own), opened):
        for text in (text_of(name), text_of(name).strip(), "", "\n"):
            expected = own.encode(text).tolist()
            assert tokenizer(text)["input_ids"] == expected
            assert tokenizer.encode(text, add_special_tokens=False) == expected
            assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == expected
            for skip in (False, True):
                assert tokenizer.decode(expected, skip_special_tokens=skip) == own.decode(expected)
            assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(text)) == own.decode(expected)
        assert len(tokenizer.get_vocab()) == len(tokenizer) == own.vocab_size + 1
        assert tokenizer.vocab_size == tokenizer.pad_token_id == own.vocab_size
        named = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
        assert named == (own.bos_token_id, own.eos_token_id, own.unk_token_id)
        assert tokenizer.chat_template is None
        assert tokenizer.convert_ids_to_tokens(list(range(own.vocab_size))) == list(tokenizer.get_vocab())[:-1]


@each_tokenizer
def test_the_first_token_written_before_a_text_is_that_token(name: str) -> None:
    """As minicons does with bos_token=True; it was read as text, and shifted the surprisal of every word."""
    own = TOKENIZERS[name]
    tokenizer, text = TransformerXLTokenizer(tokenizer=own), text_of(name).strip()
    expected = [own.bos_token_id, *own.encode(text).tolist()]
    assert tokenizer(tokenizer.bos_token + text)["input_ids"] == expected
    assert tokenizer.convert_tokens_to_ids(tokenizer.bos_token) == own.bos_token_id
    if "integer" not in name and name != "char without bytes":  # which lack the characters
        split = tokenizer.tokenize(tokenizer.bos_token, split_special_tokens=True)
        assert tokenizer.convert_tokens_to_ids(split) == own.encode(tokenizer.bos_token).tolist()
    if "punctuation" not in name and "moses" not in name:
        places = tokenizer(f"{tokenizer.bos_token}{text}", return_offsets_mapping=True)["offset_mapping"]
        shift, alone = len(tokenizer.bos_token), tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert places == [(0, shift), *((start + shift, stop + shift) for start, stop in alone)]


def test_the_first_token_of_another_library_is_text_where_it_is_not_special(tmp_path: Path) -> None:
    """Of a vocabulary without special tokens, every text would be cut at token 0."""
    other = LibraryWords(models.WordLevel({"the": 0, "theory": 1, "of": 2, "[UNK]": 3}, unk_token="[UNK]"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.save(str(tmp_path / "tokenizer.json"))
    own, text = load_tokenizer(tmp_path / "tokenizer.json"), "the theory of the other"
    tokenizer = TransformerXLTokenizer(tokenizer=own)
    assert tokenizer(text)["input_ids"] == own.encode(text).tolist() == [0, 1, 2, 0, 3]
    assert tokenizer.bos_token_id == own.bos_token_id
    special = LibraryWords(models.WordLevel({"the": 0, "<s>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    special.add_special_tokens(["<s>"])
    special.save(str(tmp_path / "tokenizer.json"))
    assert TransformerXLTokenizer(tokenizer=load_tokenizer(tmp_path / "tokenizer.json")).bos_token == "<s>"


@each_tokenizer
def test_batches_are_padded_on_the_left(name: str) -> None:
    own = TOKENIZERS[name]
    tokenizer = TransformerXLTokenizer(tokenizer=own)
    texts = [text_of(name), text_of(name)[:6].strip()]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for text, row, mask in zip(texts, batch["input_ids"], batch["attention_mask"], strict=True):
        expected = own.encode(text).tolist()
        assert row[mask == 1].tolist() == expected
        assert row.tolist() == [own.vocab_size] * (len(row) - len(expected)) + expected
        assert tokenizer.decode(row, skip_special_tokens=True) == own.decode(expected)
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)[0] == own.decode(own.encode(texts[0]))
    assert tokenizer.decode(batch["input_ids"][1]).startswith(tokenizer.pad_token)


def test_beginning_of_text_is_added_if_asked(tmp_path: Path) -> None:
    own = words("whitespace")
    TransformerXLTokenizer(tokenizer=own, add_bos_token=True).save_pretrained(tmp_path)
    TransformerXLTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    tokenizer = TransformerXLTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer("the cat")["input_ids"] == [0, 3, 4]
    assert tokenizer("the cat", add_special_tokens=False)["input_ids"] == [3, 4]
    assert tokenizer("the", return_special_tokens_mask=True)["special_tokens_mask"] == [1, 0]


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if "punctuation" not in name and "moses" not in name])
def test_offsets_are_the_places_of_the_tokens(name: str) -> None:
    own, text = TOKENIZERS[name], text_of(name)
    tokenizer = TransformerXLTokenizer(tokenizer=own)
    encoding = tokenizer(text, return_offsets_mapping=True)
    assert len(encoding["offset_mapping"]) == len(encoding["input_ids"])
    for token_id, (start, stop) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        piece = own.decode([token_id])
        if token_id == own.eos_token_id and text[start:stop] == "<eos>":
            continue  # the text is spelled like the token of a newline
        place = text[start:stop].lower() if "lowercase" in name else text[start:stop]
        assert token_id == own.unk_token_id or place == piece or "\ufffd" in piece, (piece, place)
    batch = tokenizer([text, text[:5]], return_offsets_mapping=True, padding=True, return_tensors="pt")
    width = batch["input_ids"].shape[1]
    assert batch["offset_mapping"].shape == (2, width, 2)
    short = tokenizer(text[:5], return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    padding = [(0, 0)] * (width - len(short))
    assert torch.equal(batch["offset_mapping"][1], torch.tensor([*padding, *short]))
    cut = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=3)
    assert cut["offset_mapping"] == encoding["offset_mapping"][:3]


def test_what_a_tokenizer_cannot_do_is_refused() -> None:
    tokenizer = TransformerXLTokenizer(tokenizer=words("moses"))
    with pytest.raises(UserError, match="splits words by 'moses', so its tokens have no offsets"):
        tokenizer("the cat", return_offsets_mapping=True)
    with pytest.raises(UserError, match="leave it out with pairs"):
        tokenizer("the", "cat", return_offsets_mapping=True)
    for add in (lambda: tokenizer.add_tokens(["new"]), lambda: tokenizer.add_special_tokens({"mask_token": "[MASK]"})):
        with pytest.raises(UserError, match="vocabulary is fixed"):
            add()
    with pytest.raises(UserError, match="no tokenizer was given"):
        TransformerXLTokenizer()
    with pytest.raises(UserError, match="not in this word vocabulary"):
        tokenizer.decode([99])
    with pytest.raises(ValueError, match="chat_template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer(["the", "the cat"], padding=True)["input_ids"] == [[0, 3], [3, 4]]


def test_words_of_the_hub_are_split_as_there() -> None:
    own = tokenizer_from_object({"idx2sym": list(WORDS)}, source="test", pre_tokenizer="moses")
    assert TransformerXLTokenizer(tokenizer=own)("the cat, the")["input_ids"] == [3, 4, 5, 3]
