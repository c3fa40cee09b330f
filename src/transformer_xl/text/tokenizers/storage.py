"""Saves, loads and identifies tokenizers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error, check_not_special, parse_json, read_bytes, write_json
from transformer_xl.text.tokenizers.base import ByteLevelTokenizer, Tokenizer, quoted
from transformer_xl.text.tokenizers.tokenizer_config import TOKENIZER_KINDS

TOKENIZER_FILE = "txl_tokenizer.json"
LIBRARY_FILE = "tokenizer.json"
"""The file of a tokenizer of the Hugging Face library `tokenizers`."""
_TOKEN_KEYS = ("words", "characters", "num_values", "counts", "midi")  # the keys of the JSON that are no settings
_KINDS = ", ".join(TOKENIZER_KINDS)
_COPY_AGAIN = "copy it again from its source, or make the corpus again with 'txl prepare'"


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write `txl_tokenizer.json` atomically."""
    write_json(path, tokenizer.to_json())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file, or from the folder that contains it. The content determines the format.

    Args:
        path: the folder of a run or corpus, a `txl_tokenizer.json`; or a `tokenizer.json` of the library `tokenizers`
            or the folder that contains one, or a `.model` of sentencepiece. Byte-level BPE that restores every text
            becomes a `BPETokenizer`, another one a `LibraryTokenizer`.

    Raises:
        UserError: the tokenizer is missing or damaged, or its library cannot use it.
    """
    path = Path(path)
    with as_user_error(f"reading {path}"):
        names = [TOKENIZER_FILE, LIBRARY_FILE] if path.is_dir() else [""]
        file = next((path / name for name in names if (path / name).is_file()), path)
        if not file.is_file() and path.name != TOKENIZER_FILE:
            raise UserError(
                f"no tokenizer at {path}{nearest(str(path), TOKENIZER_KINDS)}; give one of the kinds {_KINDS}, the "
                f"folder of a run or corpus, its {TOKENIZER_FILE}, a {LIBRARY_FILE} of the library tokenizers, or a "
                ".model of sentencepiece"
            )
    if file.suffix == ".model":
        content = base64.b64encode(read_bytes(file)).decode()
        return tokenizer_from_json({"kind": "library", "library": "sentencepiece", "content": content}, str(file))
    values = read_json_object(file)
    if "model" not in values or "kind" in values:
        return tokenizer_from_json(values, str(file))
    from transformer_xl.text.tokenizers.bpe import BPETokenizer

    try:  # written by the library
        return BPETokenizer.of_library(values)
    except ValueError:
        values = {"kind": "library", "library": "tokenizers", "content": values}
        return tokenizer_from_json(values, str(file), "get it again, or use another such as tokenizer=bpe")


def tokenizer_from_json(
    values: Mapping[str, Any], source: str = "tokenizer", advice: str = "copy it again, or use another"
) -> Tokenizer:
    """Create a tokenizer from the output of `Tokenizer.to_json`.

    Args:
        values: the output of `to_json`.
        source: file that the values come from, for error messages.
        advice: what to do if they are invalid, for error messages.

    Raises:
        UserError: the kind is unknown, or the values are invalid for this kind.
    """
    kind = values.get("kind")
    if kind not in (*TOKENIZER_KINDS, "library"):
        raise UserError(
            f"{source}: no tokenizer of kind {kind!r}{nearest(str(kind), TOKENIZER_KINDS)}; expected one of {_KINDS}"
        )
    module = import_module(f"transformer_xl.text.tokenizers.{kind}")
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Tokenizer)]
    (kind_class,) = [one for one in classes if vars(one).get("kind") == kind]
    try:
        tokenizer: Tokenizer = kind_class.from_json(values)
        if tokenizer.to_json() != values:
            raise ValueError("it has settings or values that such a tokenizer does not have")
    except ValueError as error:
        if isinstance(error, UserError):  # a library that is missing
            raise
        raise UserError(f"{source}: not a valid {kind} tokenizer, {error}; {advice}") from None
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the sha256 of a tokenizer's JSON with sorted keys and no spaces, as 64 hex digits.

    It includes the counts, so it tells whether a file is still the one that was written; `describe_difference` tells
    whether two tokenizers are the same for a model.
    """
    canonical = json.dumps(tokenizer.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def describe_difference(actual: Tokenizer, expected: Tokenizer) -> str | None:
    """Return in what a tokenizer differs from another one, for messages, or None if both encode every text equally.

    Counts are not compared: they say how often tokens occurred in some text, and change no id.
    """
    if actual.kind != expected.kind:
        return f"{actual.kind}, {actual.vocab_size:,} tokens, not {expected.kind}, {expected.vocab_size:,} tokens"
    differences: list[str] = []
    if actual.vocab_size != expected.vocab_size:
        differences.append(f"{actual.vocab_size:,} tokens, not {expected.vocab_size:,}")
    for token_id, (token, other) in enumerate(zip(_tokens(actual), _tokens(expected), strict=False)):
        if token != other:
            differences.append(f"token {token_id:,} is {quoted(token)}, not {quoted(other)}")
            break
    settings, others = _settings(actual), _settings(expected)
    changed = [name for name in sorted(settings | others) if settings.get(name) != others.get(name)]
    if changed and not differences:
        values = (json.dumps(found.get(changed[0])) for found in (settings, others))
        differences.append(f"{changed[0]} is {', not '.join(value[:40] for value in values)}")
    return f"{actual.kind}, {'; '.join(differences)}" if differences else None


def shared_tokens(tokenizer: Tokenizer, other: Tokenizer) -> npt.NDArray[np.int64]:
    """Return for each token of a tokenizer the id of the same token in another one, or -1, shape (V,).

    Integers are the same if their ids are.
    """
    if "integer" in (tokenizer.kind, other.kind):
        ids = np.arange(tokenizer.vocab_size)
        return np.where((ids < other.vocab_size) & (tokenizer.kind == other.kind), ids, -1)
    ids = {key: token_id for token_id, key in enumerate(_numbered(_tokens(other)))}
    return np.array([ids.get(key, -1) for key in _numbered(_tokens(tokenizer))], dtype=np.int64)


def _numbered(tokens: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each token and how often it occurred before: a character may be there as itself and as a byte."""
    counts: Counter[str] = Counter()
    for token in tokens:
        yield token, counts[token]
        counts[token] += 1


def _tokens(tokenizer: Tokenizer) -> Sequence[str]:
    """Return the tokens in the order of their ids; none for integers, which are the same in all vocabularies."""
    if isinstance(tokenizer, ByteLevelTokenizer):
        return [content.decode("utf-8", errors="backslashreplace") for content in tokenizer.token_bytes]
    from transformer_xl.text.tokenizers.library import LibraryTokenizer

    return tokenizer.names if isinstance(tokenizer, LibraryTokenizer) else tokenizer.to_json().get("words", ())


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a tokenizer has besides tokens and their counts, such as whether it lowercases."""
    values = tokenizer.to_json()
    values |= values.pop("tokenizer", {})  # the components of a tokenizer of the library
    if tokenizer.kind == "integer":
        values.setdefault("add_eos", True)  # left out of the JSON of older tokenizers
    return {name: value for name, value in values.items() if name not in _TOKEN_KEYS}


def read_json_object(path: Path, advice: str = _COPY_AGAIN) -> dict[str, Any]:
    """Read a JSON file as `read_json` does, and check that it contains an object."""
    values = read_json(path, advice)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}; {advice}")
    return values


def read_json(path: Path, advice: str) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        advice: what the user can do if it is missing or damaged; error messages end with this.

    Raises:
        UserError: the file is missing, unreadable or damaged.
    """
    with as_user_error(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, expected a JSON file; {advice}")
        check_not_special(path)
        content = path.read_bytes()
    try:
        return parse_json(content)
    except ValueError as error:
        raise UserError(f"{path}: damaged, not readable as JSON ({error}); {advice}") from None
