"""Reads the vocabularies that other Transformer-XL programs saved, as tokenizers of this package.

A vocabulary is a list of words in the order of their ids, in a JSON, text or pickle file written by the code of the
Transformer-XL authors, NVIDIA or Hugging Face. The order is kept as stored. It cannot be computed again from the text,
because the order of words with equal counts depends on details of the program that counted them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from transformer_xl.config import UserError
from transformer_xl.files import as_user_error, read_bytes
from transformer_xl.integrations.checkpoints.source_config import ImportedModel
from transformer_xl.integrations.checkpoints.torch_file import TorchFile
from transformer_xl.integrations.checkpoints.unpickler import PickledObject
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer, PreTokenizerName
from transformer_xl.text.tokenizers.storage import read_json
from transformer_xl.text.tokenizers.word import WordTokenizer, check_words

# the second ones are those of the data set lm1b (One Billion Word)
_EOS_TOKENS = ("<eos>", "<S>")
_UNK_TOKENS = ("<unk>", "<UNK>")
_ABSENT_BYTE_BIAS = -1e4  # gives a byte a probability of zero, but still a finite loss
_ADVICE = "get it again"
# limits above those of real files, against small ones that take a lot of memory: the bytes of a JSON or text file, its
# brackets (each list or object takes some hundred bytes), and the words
_MAX_BYTES, _MAX_BRACKETS, _MAX_WORDS = 2**26, 1_000_000, 3_000_000
_ENWIK8_SIZES = (204, 205)  # numbers of different bytes in enwik8, without and with the newline
_PRINTABLE_ASCII = frozenset(range(0x20, 0x7F))
# bytes that UTF-8 text without control characters can contain: not 0xC0, 0xC1 and 0xF5 to 0xFF
_BYTES_OF_TEXT = frozenset({*b"\t\n", *range(0x20, 0xC0), *range(0xC2, 0xF5)})

HUGGING_FACE_CLASSES = frozenset(
    [
        "sacremoses.normalize.MosesPunctNormalizer", "sacremoses.tokenize.MosesTokenizer",
        "sacremoses.tokenize.MosesDetokenizer", "re._compile", "tokenizers.AddedToken",
        "transformers.tokenization_utils.Trie", "transformers.tokenization_utils_base.AddedToken",
    ]
)  # fmt: skip
"""Classes and functions that a pickled tokenizer of Hugging Face may refer to; the unpickler imports none of them."""
CORPUS_CLASSES = frozenset(
    [
        *(f"{package}vocabulary.{name}" for package in ("", "utils.") for name in ("Vocab", "OpenAIVocab")),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        "data_utils.Corpus", "numpy.ndarray", "numpy.dtype",
    ]
)  # fmt: skip
"""Classes and functions that a pickled vocabulary or corpus of the authors' or NVIDIA's code may refer to."""


def tokenizer_from_object(
    value: object, source: str, *, pre_tokenizer: PreTokenizerName = "whitespace", lowercase: bool | None = None
) -> Tokenizer:
    """Create a tokenizer from an unpickled object: one with its words, in their order.

    The result is a char tokenizer if all words are single characters with `_` for the space, as in the data set text8,
    otherwise a word tokenizer.

    Args:
        value: a Vocab of the code of the Transformer-XL authors or NVIDIA, a Corpus with such a Vocab, or a dictionary
            of attributes, as TransfoXLTokenizer pickles itself. Its attribute `idx2sym` is the list of words, or
            `sym2idx` the id of each.
        source: file that the object comes from, for error messages.
        pre_tokenizer: how the tokenizer splits text into words (see `PreTokenizer`).
        lowercase: whether the tokenizer lowercases text, or None to use the attribute `lower_case`.

    Raises:
        UserError: the object has no list of words, or they are not strings without whitespace, or one occurs twice.
    """
    if isinstance(value, PickledObject) and "vocab" in value.attributes:
        value = value.attributes["vocab"]
    attributes = value.attributes if isinstance(value, PickledObject) else value if isinstance(value, dict) else {}
    words, ids = attributes.get("idx2sym"), attributes.get("sym2idx")
    if not words and isinstance(ids, dict):
        if sorted(word_id for word_id in ids.values() if type(word_id) is int) != list(range(len(ids))):
            raise UserError(f"{source}: the ids of its {len(ids):,} words are not 0 up to {len(ids) - 1:,}; {_ADVICE}")
        words = sorted(ids, key=ids.__getitem__)
    if not isinstance(words, (list, tuple)) or not words:
        raise UserError(f"{source} holds no words (idx2sym or sym2idx); give tokenizer=RUN, or the right file")
    if len(words) > _MAX_WORDS:
        raise UserError(f"{source} has {len(words):,} words; a model with {_MAX_WORDS:,} at most can be converted")
    characters = [" " if word == "_" else word for word in words]
    are_characters = all(isinstance(character, str) and len(character) == 1 for character in characters)
    if "_" in words and are_characters and len(set(characters)) == len(characters):
        return CharTokenizer("".join(characters), byte_fallback=False)  # other characters cannot be encoded
    try:
        checked = check_words(list(words))
    except ValueError as error:
        raise UserError(f"{source}: {error}; {_ADVICE}") from None
    eos = next((word for word in _EOS_TOKENS if word in checked), None)
    unk = next((word for word in _UNK_TOKENS if word in checked), None)
    if lowercase is None:
        lowercase = attributes.get("lower_case") is True
    return WordTokenizer(checked, eos_token=eos, unk_token=unk, pre_tokenizer=PreTokenizer(pre_tokenizer, lowercase))


def read_tokenizer(
    path: Path, *, pre_tokenizer: PreTokenizerName = "whitespace", lowercase: bool | None = None
) -> Tokenizer:
    """Read a tokenizer from a JSON file, a text file with one word per line, or a pickle.

    Args:
        path: the file; the suffixes `.json` and `.txt` determine the format, all other files are pickles.
        pre_tokenizer: how the tokenizer splits text into words.
        lowercase: whether the tokenizer lowercases text, or None to use the setting in the file.

    Raises:
        UserError: the file cannot be read or is damaged, or a pickle refers to a class that is not allowed.
    """
    if path.suffix == ".json":
        value = read_checkpoint_json(path)
        if isinstance(value, list):
            value = {"idx2sym": value}
        elif isinstance(value, dict) and not {"idx2sym", "sym2idx"} & value.keys():
            value = {"sym2idx": value}
    elif path.suffix == ".txt":
        _check_size(path)
        with as_user_error(f"reading {path}"), path.open(encoding="utf-8-sig", newline="\n") as lines:
            try:
                words = dict.fromkeys(line.split(maxsplit=1)[0] for line in lines if line.strip())
            except UnicodeDecodeError:
                raise UserError(f"{path} is not UTF-8; {_ADVICE}") from None
        value = {"idx2sym": list(words)}
    else:
        value = TorchFile(path, HUGGING_FACE_CLASSES | CORPUS_CLASSES).value
    return tokenizer_from_object(value, str(path), pre_tokenizer=pre_tokenizer, lowercase=lowercase)


def read_checkpoint_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint: its settings, an index of its weights, or its vocabulary.

    Raises:
        UserError: the file is missing, unreadable or damaged, or made to take far more memory than its size.
    """
    if path.is_file():
        _check_size(path)
        content = read_bytes(path)
        if content.count(b"[") + content.count(b"{") > _MAX_BRACKETS:
            raise UserError(f"{path} has too many lists or objects for a checkpoint; {_ADVICE}")
    return read_json(path, _ADVICE)


def _check_size(path: Path) -> None:
    with as_user_error(f"reading {path}"):
        size = path.stat().st_size
    if size > _MAX_BYTES:
        raise UserError(f"{path} has {size:,} bytes, too many for settings or a vocabulary; {_ADVICE}")


def words_of(tokenizer: Tokenizer) -> tuple[str, ...] | None:
    """Return the list of words with which other programs express this tokenizer, or None if they cannot express it."""
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.words
    if isinstance(tokenizer, CharTokenizer) and not tokenizer.byte_fallback and "_" not in tokenizer.characters:
        return tuple("_" if character == " " else character for character in tokenizer.characters)
    return None


def bytes_from_decimal_words(imported: ImportedModel, requested: Tokenizer | None) -> ImportedModel:
    """Replace a word tokenizer whose words are byte values in decimal, as the authors' for enwik8, by a byte tokenizer.

    The rows of the embedding and softmax weights move to the indices of their byte values. The rows of bytes that are
    not among the words become zeros, with a softmax bias that makes their probability zero, so the losses stay the
    same. Models with other tokenizers, or with an adaptive softmax (cutoffs), are returned unchanged.

    Args:
        imported: the model.
        requested: the tokenizer that the user names. A byte tokenizer says that the words are byte values, another one
            that they are not. With None they are only taken for bytes if they are those of enwik8: other numerals can
            be anything, such as the pitches of music. A note says so.
    """
    words = imported.tokenizer.words if isinstance(imported.tokenizer, WordTokenizer) else ()
    value_of_word = {str(value): value for value in range(256)}
    are_numbers = words and all(word in value_of_word for word in words)
    if not are_numbers or imported.model.get("cutoffs") or not isinstance(requested, ByteTokenizer | None):
        return imported
    values = [value_of_word[word] for word in words]
    # the bytes of enwik8 are all those of ASCII text, and none that text lacks
    are_of_enwik8 = len(values) in _ENWIK8_SIZES and _PRINTABLE_ASCII <= set(values) <= _BYTES_OF_TEXT
    if requested is None and not are_of_enwik8:
        note = (
            f"its {len(words)} words are numbers and stay words; if they are bytes, as in the authors' enwik8, convert "
            "it with tokenizer=byte"
        )
        return replace(imported, notes=(*imported.notes, note))
    new_rows = torch.tensor(values)
    weights = dict(imported.weights)
    for name in ("embedding.tables.0", "softmax.tables.0", "softmax.bias"):
        if name in weights:
            old = weights[name]
            new = old.new_full((256, *old.shape[1:]), _ABSENT_BYTE_BIAS if name == "softmax.bias" else 0.0)
            weights[name] = new.index_copy(0, new_rows, old)
    note = f"its {len(words)} decimal byte values became a byte tokenizer; the other bytes have no probability"
    return replace(
        imported,
        model={**imported.model, "vocab_size": 256},
        weights=weights,
        tokenizer=ByteTokenizer(),
        notes=(*imported.notes, note),
    )


def first_existing(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the path of the first of these files that the folder contains, or None if it contains none."""
    return next((folder / name for name in names if (folder / name).is_file()), None)
