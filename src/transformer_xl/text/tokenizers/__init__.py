"""Tokenizers: text to token ids and back.

`base.py` defines the interface, `byte.py`, `char.py`, `word.py`, `bpe.py` and `integer.py` the five kinds, `config.py`
and `training.py` the training, and `storage.py` saving and loading. Modules of kinds other than byte are imported
lazily.
"""

from transformer_xl.text.tokenizers.base import TokenArray, Tokenizer, document_errors, to_bytes, token_dtype
from transformer_xl.text.tokenizers.byte import ByteTokenizer
from transformer_xl.text.tokenizers.chunking import split_chunks
from transformer_xl.text.tokenizers.storage import (
    describe_difference,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    shared_tokens,
)

__all__ = [
    "ByteTokenizer",
    "TokenArray",
    "Tokenizer",
    "describe_difference",
    "document_errors",
    "fingerprint",
    "load_tokenizer",
    "save_tokenizer",
    "shared_tokens",
    "split_chunks",
    "to_bytes",
    "token_dtype",
]
