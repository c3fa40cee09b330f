"""Tokenizers: text to token ids and back.

`base.py` defines the interface, `byte.py`, `char.py`, `word.py`, `bpe.py`, `integer.py` and `library.py` the kinds,
`tokenizer_config.py` and `training.py` the training, and `storage.py` saving and loading. Modules of kinds other than
byte are imported lazily. (`name as name` makes an imported name public for type checkers.)
"""

from transformer_xl.text.tokenizers.base import (
    TokenArray as TokenArray,
    Tokenizer as Tokenizer,
    document_errors as document_errors,
    to_bytes as to_bytes,
    token_dtype as token_dtype,
)
from transformer_xl.text.tokenizers.byte import ByteTokenizer as ByteTokenizer
from transformer_xl.text.tokenizers.storage import (
    describe_difference as describe_difference,
    fingerprint as fingerprint,
    load_tokenizer as load_tokenizer,
    save_tokenizer as save_tokenizer,
    shared_tokens as shared_tokens,
)
