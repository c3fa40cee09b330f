"""Tokenizers of other programs: a list of words in the order of their ids, read from any of their file formats.

The stored order is kept. It cannot be rebuilt from the text, because the order of words with equal counts depends on
details of the program that counted them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.torch_file import TorchFile
from transformer_xl.interop.unpickler import PickledObject
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer, PreTokenizerName
from transformer_xl.text.tokenizers.word import WordTokenizer, check_words

_EOS_TOKENS = ("<eos>", "<S>")
_UNK_TOKENS = ("<unk>", "<UNK>")
_IMPOSSIBLE = -1e4  # a logit so low that the probability is zero, while the loss of such a byte stays finite

_TOKENIZER = frozenset(
    [
        "sacremoses.normalize.MosesPunctNormalizer", "sacremoses.tokenize.MosesTokenizer",
        "sacremoses.tokenize.MosesDetokenizer", "re._compile", "tokenizers.AddedToken",
        "transformers.tokenization_utils.Trie", "transformers.tokenization_utils_base.AddedToken",
    ]
)  # fmt: skip
_CORPUS = frozenset(
    [
        *(f"{home}vocabulary.{kind}" for home in ("", "utils.") for kind in ("Vocab", "OpenAIVocab")),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        "data_utils.Corpus", "numpy.ndarray", "numpy.dtype",
    ]
)  # fmt: skip


def is_huggingface_class(name: str) -> bool:
    """Return whether Hugging Face's pickled tokenizer may name this class; none of these classes is imported."""
    return name in _TOKENIZER


def is_corpus_class(name: str) -> bool:
    """Return whether a pickled vocabulary or corpus of the authors' or NVIDIA's code may name this class."""
    return name in _CORPUS


def tokenizer_from_words(
    words: Sequence[object], source: str, *, lowercase: bool = False, pre_tokenizer: PreTokenizerName = "whitespace"
) -> Tokenizer:
    """Build a tokenizer with these words, in this order.

    Single characters with `_` for the space, as in text8, give a char tokenizer.

    Args:
        words: every word, special tokens included.
        source: the file they come from, for messages.
        lowercase: whether text is lowercased.
        pre_tokenizer: how text is split into words.

    Raises:
        UserError: the list is not one of words, or has a word twice.
    """
    letters = [" " if word == "_" else word for word in words]
    single = all(isinstance(letter, str) and len(letter) == 1 for letter in letters)
    if single and "_" in words and len(set(map(str, letters))) == len(letters):
        return CharTokenizer("".join(map(str, letters)), byte_fallback=False)
    try:
        checked = check_words(list(words))
    except ValueError as error:
        raise UserError(f"{source}: {error}; get it again") from None
    eos_token = next((word for word in _EOS_TOKENS if word in checked), None)
    unk_token = next((word for word in _UNK_TOKENS if word in checked), None)
    return WordTokenizer(checked, None, eos_token, unk_token, PreTokenizer(pre_tokenizer, lowercase))


def tokenizer_from_attributes(
    attributes: Mapping[str, Any], source: str, pre_tokenizer: PreTokenizerName = "whitespace"
) -> Tokenizer:
    """Build a tokenizer from the attributes of the authors' Vocab or of Hugging Face's tokenizer.

    Raises:
        UserError: the attributes have no words.
    """
    words = attributes.get("idx2sym")
    ids = attributes.get("sym2idx")
    if not words and isinstance(ids, dict):
        words = _sorted_by_id(ids, source)
    if not isinstance(words, (list, tuple)) or not words:
        raise UserError(f"{source} holds no words (idx2sym, sym2idx); give --tokenizer RUN, or the right file")
    return tokenizer_from_words(
        words, source, lowercase=attributes.get("lower_case") is True, pre_tokenizer=pre_tokenizer
    )


def _sorted_by_id(ids: Mapping[Any, Any], source: str) -> list[Any]:
    """Return the words in the order of their ids."""
    if sorted(number for number in ids.values() if type(number) is int) != list(range(len(ids))):
        raise UserError(f"{source}: the ids of its {len(ids):,} words are not 0 up to {len(ids) - 1:,}")
    return sorted(ids, key=ids.__getitem__)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    with as_user_error(f"reading {path}"):
        content = path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not readable as JSON; get it again") from None


def read_tokenizer(
    path: Path, *, pre_tokenizer: PreTokenizerName = "whitespace", lowercase: bool | None = None
) -> Tokenizer:
    """Read a tokenizer from JSON, from text with one word on each line, or from a pickle.

    Args:
        path: the file; its suffix says which format it is.
        pre_tokenizer: how text is split into words.
        lowercase: whether text is lowercased; None: as the file says.

    Raises:
        UserError: the file cannot be read, is damaged, or names classes that a tokenizer has no use for.
    """
    source = str(path)
    given = {} if lowercase is None else {"lower_case": lowercase}
    if path.suffix == ".json":
        value = read_json(path)
        if isinstance(value, dict) and not {"idx2sym", "sym2idx"} & value.keys():
            value = _sorted_by_id(value, source)
        if isinstance(value, dict):
            return tokenizer_from_attributes({**value, **given}, source, pre_tokenizer)
        return tokenizer_from_words(
            value if isinstance(value, list) else [], source, pre_tokenizer=pre_tokenizer, lowercase=lowercase is True
        )
    if path.suffix == ".txt":
        with as_user_error(f"reading {path}"):
            content = path.read_bytes()
        try:
            lines = content.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8; get it again") from None
        words = [line.split()[0] for line in lines if line.split()]
        return tokenizer_from_words(
            list(dict.fromkeys(words)), source, pre_tokenizer=pre_tokenizer, lowercase=lowercase is True
        )
    value = TorchFile(path, lambda name: is_huggingface_class(name) or is_corpus_class(name)).value
    return tokenizer_from_attributes({**_attributes(value), **given}, source, pre_tokenizer)


def tokenizer_from_pickle(value: object, source: str, pre_tokenizer: PreTokenizerName = "whitespace") -> Tokenizer:
    """Build a tokenizer from a pickled object: a tokenizer's attributes, a Vocab, or a Corpus that has one.

    Raises:
        UserError: the object has no words.
    """
    return tokenizer_from_attributes(_attributes(value), source, pre_tokenizer)


def _attributes(value: object) -> Mapping[str, Any]:
    if isinstance(value, PickledObject) and "vocab" in value.attributes:
        value = value.attributes["vocab"]
    return value if isinstance(value, dict) else value.attributes if isinstance(value, PickledObject) else {}


def words_of(tokenizer: Tokenizer) -> tuple[str, ...] | None:
    """Return the words as other programs list them; None for a tokenizer that has none."""
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.words
    if isinstance(tokenizer, CharTokenizer) and not tokenizer.byte_fallback and "_" not in tokenizer.characters:
        return tuple("_" if character == " " else character for character in tokenizer.characters)
    return None


def bytes_from_byte_ids(imported: ImportedModel) -> ImportedModel:
    """Give a model whose words are the bytes in decimal, as in the authors' enwik8, a byte tokenizer.

    The rows of its embedding and softmax move to the byte values. Bytes that are not among its words get zeros, and a
    bias that leaves them no probability, so the losses stay the same. Other models are returned unchanged.
    """
    words = imported.tokenizer.words if isinstance(imported.tokenizer, WordTokenizer) else ()
    byte_names = {str(byte): byte for byte in range(256)}
    if not words or imported.model.get("cutoffs") or not all(word in byte_names for word in words):
        return imported
    byte_of_row = torch.tensor([byte_names[word] for word in words])
    weights = dict(imported.weights)
    for name in ("embedding.tables.0", "softmax.tables.0", "softmax.bias"):
        if name in weights:
            rows = weights[name]
            moved = rows.new_full((256, *rows.shape[1:]), _IMPOSSIBLE if name == "softmax.bias" else 0.0)
            weights[name] = moved.index_copy(0, byte_of_row, rows)
    return replace(
        imported,
        model={**imported.model, "vocab_size": 256},
        weights=weights,
        tokenizer=ByteTokenizer(),
        remarks=(
            *imported.remarks,
            f"its {len(words)} byte numbers became a byte tokenizer; the other bytes have no probability",
        ),
    )


def first_existing(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these files that the folder has; None if it has none."""
    return next((folder / name for name in names if (folder / name).is_file()), None)
