"""Tokenizers of other libraries for tests: small, with the parts that published ones have."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from transformer_xl.text.tokenizers.bpe import train_bpe

END = 280  # the id of `<|endoftext|>`
LINES = [
    "the cat sat on the mat.\n",
    "Isn't the CAF\u00c9 here?\n",
    "  the dog  sat\tthere \n",
    "\n",
    "caf\u00e9 the cat",
]


def word_piece() -> dict[str, Any]:
    """Like BERT's: lowercased without accents, white space dropped, unknown words as [UNK]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    )
    cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    tokenizer.enable_truncation(9)
    tokenizer.enable_padding()
    return json.loads(tokenizer.to_str())


def unigram() -> dict[str, Any]:
    """Like T5's: NFKC, runs of spaces as one, a mark for the space before a word, </s> at the end."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=50, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 5, trainer)
    return json.loads(tokenizer.to_str())


def byte_level(**changes: Any) -> dict[str, Any]:
    """Like GPT-2's: byte-level BPE with `<|endoftext|>`, and other values at the top."""
    values = train_bpe([LINES], 280).to_json()["tokenizer"]
    assert len(values["model"]["vocab"]) == END
    end = {"id": END, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False}
    return {**values, "added_tokens": [{**end, "normalized": False, "special": True}], **changes}


def prefix_space() -> dict[str, Any]:
    """Like RoBERTa's with add_prefix_space."""
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return byte_level(pre_tokenizer=level)


def sentencepiece_model(**options: Any) -> bytes:
    """Return a model of sentencepiece, which the test needs."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        model_writer=model,
        minloglevel=2,
        **{"sentence_iterator": iter(LINES * 5), "vocab_size": 32, **options},
    )
    return model.getvalue()


def xlnet_model() -> bytes:
    """Return a model of sentencepiece with XLNet's special tokens, and with tokens that end in a digit and a comma."""
    numbers = [f"In 19{year}, 1,000,{year} of 9, then {year}, of 20,{year}.\n" for year in range(10, 40)]
    return sentencepiece_model(
        sentence_iterator=iter([*LINES * 5, *numbers * 3, "a fine na\u00efve \u4e2d\u6587\n"]), vocab_size=150,
        control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"], hard_vocab_limit=False,
        user_defined_symbols=["<eop>", ".", "(", ")", '"', "-", "\u2013", "\u00a3", "\u20ac"],
    )  # fmt: skip
