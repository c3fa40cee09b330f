"""Saving, loading and identifying tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error, write_text
from transformer_xl.text.tokenizers.base import Tokenizer
from transformer_xl.text.tokenizers.config import TOKENIZER_KINDS, TokenizerKind

TOKENIZER_FILE = "txl_tokenizer.json"
_CLASSES: dict[TokenizerKind, str] = {
    "byte": "ByteTokenizer",
    "char": "CharTokenizer",
    "word": "WordTokenizer",
    "bpe": "BPETokenizer",
    "integer": "IntegerTokenizer",
}
_EARLIER_FILE = "vocabulary.json"
_EARLIER_KINDS = ("bytes", "characters", "words", "integers")
_AGAIN = "copy it again from where it came, or make the corpus again with 'txl prepare'"
_ADVICE = (
    f"give one of the kinds {', '.join(TOKENIZER_KINDS)}, the folder of a run or corpus, its {TOKENIZER_FILE}, or a "
    "tokenizer.json of the library tokenizers"
)


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write `txl_tokenizer.json` atomically."""
    write_text(path, json.dumps(tokenizer.to_json(), indent=1) + "\n")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file, or from the folder that contains it. The format is detected from the content.

    Args:
        path: the folder of a run or corpus, a `txl_tokenizer.json`, or a `tokenizer.json` of the library `tokenizers`
            (byte-level BPE) or the folder that contains one.

    Raises:
        UserError: the tokenizer is missing, damaged, was written by an earlier version, or does not preserve the text.
    """
    path = Path(path)
    with as_user_error(f"reading {path}"):
        folder = path if path.is_dir() else path.parent
        names = (TOKENIZER_FILE, "tokenizer.json") if path.is_dir() else (path.name,)
        file = next((folder / name for name in names if (folder / name).is_file()), None)
        if path.name == _EARLIER_FILE or (file is None and (folder / _EARLIER_FILE).is_file()):
            raise _written_by_earlier_version(folder / _EARLIER_FILE)
        if file is None:
            if path.name == TOKENIZER_FILE:
                raise UserError(f"{path}: missing; {_AGAIN}")
            raise UserError(f"no tokenizer at {path}{nearest(str(path), TOKENIZER_KINDS)}; {_ADVICE}")
    values = read_json_object(file)
    return (
        _from_library(values, file)
        if {"kind", "model"} & values.keys() == {"model"}
        else tokenizer_from_json(values, str(file))
    )


def _from_library(values: dict[str, Any], file: Path) -> Tokenizer:
    from transformer_xl.text.tokenizers.bpe import BPETokenizer

    try:
        return BPETokenizer.from_json({"tokenizer": values})
    except ValueError as error:
        raise UserError(f"{file}: {error}; give another tokenizer, or train one with --tokenizer bpe") from None


def _written_by_earlier_version(source: object) -> UserError:
    return UserError(
        f"{source}: written by an earlier version of txl, which this one does not read; prepare the corpus again"
    )


def tokenizer_from_json(values: Mapping[str, Any], source: str = "tokenizer") -> Tokenizer:
    """Create a tokenizer from the output of `Tokenizer.to_json`.

    Args:
        values: the output of `to_json`.
        source: where the values come from, for messages.

    Raises:
        UserError: the kind is unknown, or the values are invalid for this kind.
    """
    kind = values.get("kind")
    if kind in _EARLIER_KINDS:
        raise _written_by_earlier_version(source)
    if kind not in TOKENIZER_KINDS:
        named = "no kind of tokenizer in it" if kind is None else f"no tokenizer kind '{kind}'"
        raise UserError(f"{source}: {named}{nearest(str(kind), TOKENIZER_KINDS)}; known: {', '.join(TOKENIZER_KINDS)}")
    module = import_module(f"transformer_xl.text.tokenizers.{kind}")
    try:
        tokenizer: Tokenizer = getattr(module, _CLASSES[kind]).from_json(values)
    except ValueError as error:
        raise UserError(f"{source}: damaged, {error}; {_AGAIN}") from None
    if tokenizer.to_json() != values:
        raise UserError(f"{source}: damaged, its values do not describe a {kind} tokenizer; {_AGAIN}")
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the identifier of a tokenizer: the sha256 of its JSON with sorted keys and no spaces, as 64 hex digits."""
    canonical = json.dumps(tokenizer.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def read_json_object(path: Path, advice: str = _AGAIN) -> dict[str, Any]:
    """Read a JSON file that contains one object; `advice` ends the error message and states the remedy.

    Raises:
        UserError: it is missing, unreadable or damaged.
    """
    with as_user_error(f"reading {path}"):
        if not path.exists():
            raise UserError(f"{path}: missing, expected a JSON file; {advice}")
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged, not readable as JSON ({error}); {advice}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}; {advice}")
    return values
