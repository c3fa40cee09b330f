"""Sentences, and tokenizers of each kind that know their words."""

from __future__ import annotations

from transformer_xl.text.tokenizers import Tokenizer
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.word import WordTokenizer

SENTENCES = ["the union received an offer", "the offer was too low", "the union found that the offer was too low"]
_WORDS = ("<eos>", "<unk>", *dict.fromkeys(" ".join(SENTENCES).split()))
TOKENIZERS: dict[str, Tokenizer | None] = {
    "bytes": None,
    "bpe": train_bpe([["the offer was too low\n", "the union found the offer\n"]], 290),
    "words": WordTokenizer(_WORDS, eos_token="<eos>", unk_token="<unk>"),
}
