"""Finds a user's text for `prepare`: files, folders and glob patterns, or texts in memory.

The user names the files of each split (`source_of_splits`), or one text that `split_text` splits into train, valid and
test by fractions.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from typing_extensions import override

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, Document, SplitName, TextSource
from transformer_xl.text.sources.archives import COMPRESSED_SUFFIXES, FileRange, is_archive
from transformer_xl.text.sources.arrays import ArrayRange
from transformer_xl.text.sources.folders import glob_files, list_files
from transformer_xl.text.sources.named_datasets import DATASET_NAMES
from transformer_xl.text.tokenizers.config import TokenizerConfig

SPLIT_TOLERANCE_BYTES = 2**16
"""Maximum distance by which a split boundary is moved so that it falls between lines."""

_WHITESPACE = re.compile(rb"[ \t\n\v\f\r]")
# UTF-8 bytes after the first byte of a character; no match where more than three follow, since that is not UTF-8.
_REST_OF_CHARACTER = re.compile(rb"[\x80-\xbf]{0,3}(?![\x80-\xbf])")


@dataclass(frozen=True)
class BytesRange(FileRange):
    """The bytes from `start` to `stop` of a text in memory; `path` is only a name for messages."""

    content: bytes = b""

    @override
    def __iter__(self) -> Iterator[bytes]:
        yield self.content[self.start : self.stop]

    @override
    def size(self) -> int:
        return (len(self.content) if self.stop is None else self.stop) - self.start


TextRange = FileRange | ArrayRange
"""Part of a text, iterated in chunks of bytes. `size()`, `start` and `stop` count bytes, or integers in arrays."""


def source_of_splits(
    splits: Mapping[SplitName, Sequence[TextRange]],
    *,
    name: str,
    description: str,
    kind: str | None,
    notes: tuple[str, ...] | None = None,
) -> TextSource:
    """Return a text source with these splits.

    Args:
        splits: the texts of each split, from `texts_of_paths` or in memory; must include train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: the kind of tokenizer that will encode it, or None for integer with .npy files and byte with others.
        notes: warnings for the user, or None to warn about files that were given more than once.

    Raises:
        UserError: a text is not for this kind of tokenizer.
    """
    tokenizer = _default_tokenizer([text for texts in splits.values() for text in texts], kind)
    return TextSource(
        name,
        description,
        {split: [Document(text.name, text, text.known_num_bytes) for text in texts] for split, texts in splits.items()},
        tokenizer=tokenizer,
        # The vocabulary of an integer tokenizer must contain the integers of all splits.
        tokenizer_splits=SPLITS if tokenizer.kind == "integer" else ("train",),
        notes=_note_repeated_files(splits) if notes is None else notes,
    )


def split_text(
    texts: Sequence[TextRange], fractions: Mapping[SplitName, float], *, name: str, description: str, kind: str | None
) -> TextSource:
    """Concatenate texts in the given order and split the result into train, valid and test.

    A boundary falls after a newline if one is nearby, else after whitespace, else between characters; for an integer
    tokenizer always between sequences.

    Args:
        texts: the texts, from `texts_of_paths` or in memory.
        fractions: fractions of the concatenated text for valid and test, in [0, 1); the rest is train.
        name: default name of the corpus.
        description: where the text comes from.
        kind: as in `source_of_splits`.

    Raises:
        UserError: a text is not for this kind of tokenizer, or is too short; or a fraction is out of range.
    """
    for split, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"--{split}-fraction {fraction:g} is out of range; must be 0 <= fraction < 1")
    if sum(fractions.values()) >= 1:
        raise UserError(
            f"--valid-fraction {fractions['valid']:g} and --test-fraction {fractions['test']:g} leave nothing to train "
            "on; their sum must be below 1"
        )
    tokenizer = _default_tokenizer(texts, kind)
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if arrays and len(arrays) < len(texts):
        raise UserError(
            f"{arrays[0].path} is an array and other files are text, so they cannot be joined and split; use --train, "
            "--valid and --test instead"
        )
    unit = "values" if arrays else "bytes"
    notes = _note_repeated_files({"the text": texts})
    texts = [replace(text, stop=text.size()) for text in texts]  # so that compressed files are measured only once
    *offsets, size = accumulate((text.size() for text in texts), initial=0)
    placed_texts = list(zip(offsets, texts, strict=True))
    lengths = {split: round(size * fractions[split]) for split in ("valid", "test")}
    train, whole_lines = size - sum(lengths.values()), tokenizer.kind == "integer"
    # A boundary moves by at most half of the split after it, so that this split does not become empty.
    first = _boundary(placed_texts, train, (lengths["valid"] or lengths["test"]) // 2, whole_lines)
    second = _boundary(placed_texts, train + lengths["valid"], lengths["test"] // 2, whole_lines)
    ends: dict[SplitName, int] = {"train": first, "valid": max(first, second), "test": size}
    splits: dict[SplitName, list[TextRange]] = {}
    start = 0
    for split, stop in ends.items():
        if start < stop:
            splits[split] = [
                replace(text, start=max(start - offset, 0), stop=min(stop - offset, text.size()))
                for offset, text in placed_texts
                if max(start, offset) < min(stop, offset + text.size())
            ]
        elif split == "train" or fractions[split]:
            raise UserError(
                f"the text is too short to split: {size:,} {unit} leave {split} empty; pass more text, or change "
                "--valid-fraction and --test-fraction (0 for none)"
            )
        start = stop
    shares = f"valid {fractions['valid']:g} and test {fractions['test']:g} of its {unit}, split off at the end"
    return source_of_splits(splits, name=name, description=f"{description}; {shares}", kind=tokenizer.kind, notes=notes)


PlacedTexts = Sequence[tuple[int, TextRange]]
"""Texts to concatenate, each with its offset in the result. Offsets count bytes, or values if the texts are arrays."""


def _boundary(texts: PlacedTexts, position: int, tolerance: int, whole_lines: bool) -> int:
    """Return the best boundary at or after a position in the concatenated texts, usually within `tolerance` of it.

    Texts for an integer tokenizer are split only between lines (`whole_lines`), however far the next newline is.
    """
    for offset, text in texts:
        local_position = position - offset
        if 0 < local_position < text.size():
            if isinstance(text, ArrayRange):
                return offset + text.row_end(local_position)
            if whole_lines:
                return offset + _line_end(text, local_position)
            return offset + _boundary_near(text, local_position, min(tolerance, SPLIT_TOLERANCE_BYTES))
    return position


def _line_end(text: FileRange, position: int) -> int:
    """Return the first position at or after `position` that follows a newline, or the end of the text."""
    chunk_start = position - 1
    for chunk in replace(text, start=chunk_start):
        if (newline := chunk.find(b"\n")) >= 0:
            return chunk_start + newline + 1
        chunk_start += len(chunk)
    return text.size()


def _boundary_near(text: FileRange, position: int, tolerance: int) -> int:
    """Return the best boundary from `position` to `position + tolerance`.

    In order of preference: the first position after a newline, the end of the text, the first position after
    whitespace; and if the range has none of them, the end of the character at `position`.
    """
    # a UTF-8 character has up to 4 bytes
    content = b"".join(replace(text, start=position - 1, stop=min(position + max(tolerance, 4), text.size())))
    candidates = content[: tolerance + 1]  # for each possible boundary, the byte before it
    if (newline := candidates.find(b"\n")) >= 0:
        return position + newline
    if position + tolerance >= text.size():
        return text.size()
    if space := _WHITESPACE.search(candidates):
        return position + space.start()
    rest_of_character = _REST_OF_CHARACTER.match(content, 1)
    return position + (rest_of_character.end() - 1 if rest_of_character else 0)


def _default_tokenizer(texts: Sequence[TextRange], kind: str | None) -> TokenizerConfig:
    """Return the default settings for these texts, after checking that arrays get an integer tokenizer."""
    arrays = [text for text in texts if isinstance(text, ArrayRange)]
    if not arrays:
        return TokenizerConfig(kind="integer" if kind == "integer" else "byte")
    if kind not in (None, "integer") or (kind is None and len(arrays) < len(texts)):
        raise UserError(
            f"{arrays[0].path} contains integers, not text; give --tokenizer integer, or leave it out (a pattern such "
            "as 'folder/**/*.txt' selects files by suffix)"
        )
    return TokenizerConfig(kind="integer")


def texts_of_paths(paths: Sequence[str], option: str = "") -> list[TextRange]:
    """Return the files that match the paths, folders and glob patterns, in order.

    Args:
        paths: the paths.
        option: prefix of each error message, such as `--train: `.

    Raises:
        UserError: a file is missing, unreadable, empty, an archive or not a regular file.
    """
    return [_text_of_file(file, option) for path in paths for file in _files(path, option)]


def _text_of_file(path: Path, option: str) -> TextRange:
    if is_archive(path):
        raise UserError(
            f"{option}{path} is an archive; extract it first, or leave it out (a pattern such as 'folder/**/*.txt' "
            "selects files by suffix)"
        )
    if path.suffix.lower() == ".npy":
        return ArrayRange.whole(path)
    text = FileRange(path)
    return text if text.is_compressed else replace(text, stop=text.size())


def _files(source: str, option: str) -> list[Path]:
    """Return the files that a path, folder or glob pattern selects."""
    if not source:
        raise UserError(f"{option}the path is empty; name a file or folder ('.' is the current one)")
    path = Path(source)
    with as_user_error(f"{option}reading {source}"):
        status = path.stat() if path.exists() else None
    if status is None:
        files = glob_files(source) if glob.has_magic(source) else []
        problem = f"no file with text matches the pattern '{source}'; check it ('**' matches any number of folders)"
        if not glob.has_magic(source):
            data_set = "" if option else f" nor a known data set{nearest(source, DATASET_NAMES)}"
            known = "" if option else f" (known data sets: {', '.join(DATASET_NAMES)})"
            problem = f"'{source}' is neither a file nor a folder{data_set}; check the spelling{known}"
    elif stat.S_ISDIR(status.st_mode):
        files = list_files(path)
        problem = f"the folder {source} contains no text (hidden and empty files are ignored); name another"
    elif stat.S_ISREG(status.st_mode):
        files = [path] if status.st_size else []
        problem = f"the file {source} is empty; leave it out, or name one that contains text"
    else:
        files = list[Path]()
        problem = f"{source} is not a regular file; write its text to a file and name that"
    if not files:
        raise UserError(f"{option}{problem}")
    return files


def _note_repeated_files(texts: Mapping[Any, Sequence[TextRange]]) -> tuple[str, ...]:
    """Return a warning if a file occurs more than once, under any path; the message contains the keys."""
    occurrences: dict[tuple[int, int], list[str]] = {}
    for split, split_texts in texts.items():
        for text in split_texts:
            if not isinstance(text, BytesRange):
                with as_user_error(f"reading {text.path}"):
                    status = text.path.stat()
                occurrences.setdefault((status.st_dev, status.st_ino), []).append(f"{text.path} in {split}")
    repeated = [places for places in occurrences.values() if len(places) > 1]
    more = f", and {len(repeated) - 1:,} more files" if len(repeated) > 1 else ""
    return (f"the same file was given more than once: {', '.join(repeated[0])}{more}",) if repeated else ()


def name_of_paths(paths: Sequence[str]) -> str:
    """Return a name for a corpus of these paths: that of the first folder, or of the first file without suffixes."""
    path = Path(os.path.abspath(paths[0]))
    if glob.has_magic(path.name) and not path.exists():
        path = next(parent for parent in path.parents if not glob.has_magic(parent.name))
    if path.is_dir():
        return path.name or "text"
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED_SUFFIXES else path.stem


def describe_paths(paths: Sequence[str]) -> str:
    """Return the first few paths, absolute, as a comma-separated list."""
    rest = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(os.path.abspath(path) for path in paths[:3]) + rest
