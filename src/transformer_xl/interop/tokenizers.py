"""Vocabularies of other programs: a list of words in the order of their ids, wherever it is kept.

The order is never made anew. Ties in the counts fell as the words happened to come, so a vocabulary that was learned
again from the same text need not be the same one.
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

_LINE_ENDS = ("<eos>", "<S>")
_UNKNOWN = ("<unk>", "<UNK>")
_IMPOSSIBLE = -1e4  # a score that no other comes near: the probability is zero, and the loss of such a byte finite

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
    """Names that stand in what Hugging Face's tokenizer pickles of itself; none of these things is made or used."""
    return name in _TOKENIZER


def is_corpus_class(name: str) -> bool:
    """Names that stand in the vocabularies of the authors' and NVIDIA's code, and in the text kept beside them."""
    return name in _CORPUS


def tokenizer_from_words(
    symbols: Sequence[object], source: str, *, lower_case: bool = False, pre_tokenizer: PreTokenizerName = "whitespace"
) -> Tokenizer:
    """The vocabulary of these words, in this order.

    The 27 letters of text8, written with `_` for a space, become characters.

    Args:
        symbols: every word, marks included.
        source: where they come from, for messages.
        lower_case: text is read as if all letters were small.
        pre_tokenizer: what stands between words.

    Raises:
        UserError: they are no words, or one stands in it twice.
    """
    letters = [" " if symbol == "_" else symbol for symbol in symbols]
    single = all(isinstance(letter, str) and len(letter) == 1 for letter in letters)
    if single and "_" in symbols and len(set(map(str, letters))) == len(letters):
        return CharTokenizer("".join(map(str, letters)), byte_fallback=False)
    try:
        words = check_words(list(symbols))
    except ValueError as error:
        raise UserError(f"{source}: {error}; get it again") from None
    mark = next((word for word in _LINE_ENDS if word in words), None)
    unknown = next((word for word in _UNKNOWN if word in words), None)
    return WordTokenizer(words, None, mark, unknown, PreTokenizer(pre_tokenizer, lower_case))


def tokenizer_from_attributes(
    attributes: Mapping[str, Any], source: str, pre_tokenizer: PreTokenizerName = "whitespace"
) -> Tokenizer:
    """The vocabulary out of the attributes of an object of the authors' class Vocab, or of Hugging Face's tokenizer.

    Raises:
        UserError: it holds no words.
    """
    symbols = attributes.get("idx2sym")
    numbered = attributes.get("sym2idx")
    if not symbols and isinstance(numbered, dict):
        symbols = _sorted_by_id(numbered, source)
    if not isinstance(symbols, (list, tuple)) or not symbols:
        raise UserError(f"{source} holds no words (idx2sym, sym2idx); give --tokenizer RUN, or the right file")
    return tokenizer_from_words(
        symbols, source, lower_case=attributes.get("lower_case") is True, pre_tokenizer=pre_tokenizer
    )


def _sorted_by_id(numbered: Mapping[Any, Any], source: str) -> list[Any]:
    """Words in the order of their numbers."""
    if sorted(number for number in numbered.values() if type(number) is int) != list(range(len(numbered))):
        raise UserError(f"{source}: the numbers of its {len(numbered):,} words are not 0 up to {len(numbered) - 1:,}")
    return sorted(numbered, key=numbered.__getitem__)


def read_json(path: Path) -> Any:
    """A JSON file.

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
    path: Path, *, pre_tokenizer: PreTokenizerName = "whitespace", lower_case: bool | None = None
) -> Tokenizer:
    """A vocabulary in a file: JSON, one word on each line, or pickled either way.

    Args:
        path: the file; the end of its name says which.
        pre_tokenizer: what stands between words.
        lower_case: whether text is read as if all letters were small, whatever the file says; none: as it says.

    Raises:
        UserError: it cannot be read, is damaged, or is meant to do harm.
    """
    source = str(path)
    told = {} if lower_case is None else {"lower_case": lower_case}
    if path.suffix == ".json":
        value = read_json(path)
        if isinstance(value, dict) and not {"idx2sym", "sym2idx"} & value.keys():
            value = _sorted_by_id(value, source)
        if isinstance(value, dict):
            return tokenizer_from_attributes({**value, **told}, source, pre_tokenizer)
        return tokenizer_from_words(
            value if isinstance(value, list) else [], source, pre_tokenizer=pre_tokenizer, **told
        )
    if path.suffix == ".txt":
        with as_user_error(f"reading {path}"):
            content = path.read_bytes()
        try:
            lines = content.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8; get it again") from None
        words = [line.split()[0] for line in lines if line.split()]
        return tokenizer_from_words(list(dict.fromkeys(words)), source, pre_tokenizer=pre_tokenizer, **told)
    value = TorchFile(path, lambda name: is_huggingface_class(name) or is_corpus_class(name)).value
    return tokenizer_from_attributes({**_attributes(value), **told}, source, pre_tokenizer)


def tokenizer_from_pickle(value: object, source: str, pre_tokenizer: PreTokenizerName = "whitespace") -> Tokenizer:
    """The vocabulary in what was pickled: a tokenizer's attributes, a Vocab, or a Corpus that has one.

    Raises:
        UserError: there is none.
    """
    return tokenizer_from_attributes(_attributes(value), source, pre_tokenizer)


def _attributes(value: object) -> Mapping[str, Any]:
    if isinstance(value, PickledObject) and "vocab" in value.attributes:
        value = value.attributes["vocab"]
    return value if isinstance(value, dict) else value.attributes if isinstance(value, PickledObject) else {}


def words_of(tokenizer: Tokenizer) -> tuple[str, ...] | None:
    """The words of a vocabulary as other programs list them; none where it has none."""
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.words
    if isinstance(tokenizer, CharTokenizer) and not tokenizer.byte_fallback and "_" not in tokenizer.characters:
        return tuple("_" if character == " " else character for character in tokenizer.characters)
    return None


def bytes_from_byte_ids(imported: ImportedModel) -> ImportedModel:
    """A model of byte numbers, as the authors' enwik8 has them, in bytes: its rows stand where the bytes are.

    Bytes that it never saw get a row of zeros, and a score that leaves them no probability. So the numbers are the
    same, and text goes in as it is.
    """
    words = imported.tokenizer.words if isinstance(imported.tokenizer, WordTokenizer) else ()
    byte_names = {str(byte): byte for byte in range(256)}
    if not words or imported.model.get("cutoffs") or not all(word in byte_names for word in words):
        return imported
    place = torch.tensor([byte_names[word] for word in words])
    weights = dict(imported.weights)
    for name in ("embedding.tables.0", "softmax.tables.0", "softmax.bias"):
        if name in weights:
            rows = weights[name]
            spread = rows.new_full((256, *rows.shape[1:]), _IMPOSSIBLE if name == "softmax.bias" else 0.0)
            weights[name] = spread.index_copy(0, place, rows)
    return replace(
        imported,
        model={**imported.model, "vocab_size": 256},
        weights=weights,
        tokenizer=ByteTokenizer(),
        remarks=(
            *imported.remarks,
            f"its {len(words)} byte numbers became the 256 bytes; the others have no probability",
        ),
    )


def first_existing(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these files that is in the folder."""
    return next((folder / name for name in names if (folder / name).is_file()), None)
